"""Refusals of KVCache and its methods."""

import numpy as np
from support.calls import FLOATS, KV_CACHE, TRUNCATED, ones
from support.protocols import elsewhere

import sdpa

# case: (exception, message, changes to a valid call)
CACHE = {
    "batch": (ValueError, "batch: expected at least 0, got -1", {"batch": -1}),
    "heads": (TypeError, "heads: expected an integer, got 2.0", {"heads": 2.0}),
    "d_v": (ValueError, "d_v: expected at least 0, got -3", {"d_v": -3}),
    "capacity": (TypeError, "capacity: expected an integer, got None", {"capacity": None}),
    "huge": (ValueError, f"batch: expected at most 2^48, got {2**70}", {"batch": 2**70}),
    "dtype": (TypeError, f"dtype: expected {FLOATS}, got int32", {"dtype": np.int32}),
    "window number": (TypeError, "window: expected a pair (left, right), got 3", {"window": 3}),
    "window float": (TypeError, "window: expected an integer, got 0.5", {"window": (0.5, 1)}),
    "negative window": (
        ValueError,
        "window: expected bounds of at least 0, or None for no bound, got (0, -1)",
        {"window": (0, -1)},
    ),
    "short": (
        ValueError,
        "capacity: expected more than the 9 positions that window=(9, None) looks back, got 9",
        {"window": (9, None)},
    ),
}
APPEND = {
    **elsewhere("key"),
    **elsewhere("value"),
    "key": (
        ValueError,
        "key: expected (2, 4, n, 8), got (2, 4, 7, 6)",
        {"key": ones(2, 4, 7, 6)},
    ),
    "key axes": (ValueError, "key: expected (2, 4, n, 8), got (4, 7, 8)", {"key": ones(4, 7, 8)}),
    "key heads": (
        ValueError,
        "key: expected (2, 4, n, 8), got (2, 1, 7, 8); heads=4 of the cache are the heads of key "
        "and value",
        {"key": ones(2, 1, 7, 8)},
    ),
    "key dtype": (
        TypeError,
        f"key: expected {FLOATS}, got int64; write key.astype(np.float32)",
        {"key": np.ones((2, 4, 7, 8), np.int64)},
    ),
    "value": (
        ValueError,
        "value: expected (2, 4, 7, 3), got (2, 4, 6, 3)",
        {"value": ones(2, 4, 6, 3)},
    ),
    "value dtype": (
        TypeError,
        f"value: expected {FLOATS}, got complex64",
        {"value": np.ones((2, 4, 7, 3), np.complex64)},
    ),
    "lengths dtype": (TypeError, "lengths: expected integers, got float64", {"lengths": [1.0, 2]}),
    "lengths": (ValueError, "lengths: expected (2,), got ()", {"lengths": 3}),
    "long": (
        ValueError,
        "lengths: expected integers from 0 to 7, got 8",
        {"lengths": [7, 8]},
    ),
}
REORDER = {
    **elsewhere("index"),
    "dtype": (TypeError, "index: expected integers, got bool", {"index": [True, False]}),
    "shape": (ValueError, "index: expected (2,), got (3,)", {"index": [0, 1, 1]}),
    "negative": (ValueError, "index: expected integers from 0 to 1, got -1", {"index": [0, -1]}),
}

TRUNCATE = {
    **elsewhere("lengths"),
    "dtype": (TypeError, "lengths: expected integers, got float64", {"lengths": 2.0}),
    "flags": (TypeError, "lengths: expected integers, got bool", {"lengths": [True, False]}),
    "shape": (
        ValueError,
        "lengths: expected one integer or (2,), got (1, 2)",
        {"lengths": [[6, 5]]},
    ),
    "longer": (
        ValueError,
        "lengths: expected integers from 2 to 5 for sequence 1, got 6",
        {"lengths": 6},
    ),
    "negative": (
        ValueError,
        "lengths: expected integers from 2 to 6 for sequence 0, got -1",
        {"lengths": [-1, 4]},
    ),
    "window": (
        ValueError,
        "lengths: expected integers from 2 to 5 for sequence 1, got 1; its next query sees 2 "
        "before it, and earlier ones are dropped: go on from a copy() made earlier",
        {"lengths": [6, 1]},
    ),
}

TABLE = [
    (sdpa.KVCache, CACHE),
    (KV_CACHE.append, APPEND),
    (KV_CACHE.reorder, REORDER),
    (TRUNCATED.truncate, TRUNCATE),
]
