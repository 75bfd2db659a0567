"""Causal attention over 262144 tokens in files, with less than 300 MB of memory.

python examples/long_context.py [--tokens 262144] [--folder a/folder] [--check 3]

Query, key, value and result are Zarr arrays: pip install '.[dask]'. The matrix of scores would
have 69 billion entries. The arrays, 268 MB, are written to the folder, a temporary one by default.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from sdpa import blocks

D = 64
ROWS, BLOCK = 32768, 8192
"""Number of queries of one call, and of keys that are read at a time."""


def main():
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stores = written(Path(folder), options.tokens)
        before = peak()
        start = time.perf_counter()
        attend(stores, progress=True)
        seconds = time.perf_counter() - start
        products = 4 * D * options.tokens**2 / 2
        print(
            f"{options.tokens} tokens in {seconds:.1f} s, {products / seconds / 1e9:.0f} GFLOP/s; "
            f"{peak() / 1e6:.0f} MB resident at most, {before / 1e6:.0f} before"
        )
        for row in np.linspace(0, options.tokens - 1, options.check).astype(int):
            print(f"query {row}: error {error(stores, row):.1e} beside float64")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--check", type=int, default=3, help="queries to compare with the formula")
    return parser.parse_args()


def written(folder, tokens):
    """{name: Zarr array} of query, key and value, random, and of a result that is still empty."""
    try:
        import zarr
    except ImportError:
        raise SystemExit("long_context.py needs zarr: pip install zarr") from None
    rng = np.random.default_rng(0)
    stores = {}
    for name in ("query", "key", "value", "out"):
        # Random numbers cannot be compressed; activations may be.
        stores[name] = store = zarr.create_array(
            str(folder / name), shape=(tokens, D), chunks=(BLOCK, D), dtype="float32",
            compressors=None,
        )  # fmt: skip
        for i in range(0, tokens if name != "out" else 0, BLOCK):
            store[i : i + BLOCK] = rng.standard_normal((min(BLOCK, tokens - i), D), np.float32)
    return stores


def attend(stores, progress=False):
    """Write the result, block of queries by block of queries."""
    query, key, value, out = stores.values()
    tokens = query.shape[0]
    for i in range(0, tokens, ROWS):
        rows = slice(i, min(i + ROWS, tokens))
        done = blocks.attend(
            query, key, value, rows=rows, block=BLOCK, is_causal=True, progress=progress
        )
        out[rows] = done.out


def error(stores, row):
    """The largest difference of one result to the formula in float64."""
    query, key, value, out = stores.values()
    key, value = (x[: row + 1].astype(np.float64) for x in (key, value))
    scores = key @ query[row].astype(np.float64) / D**0.5
    weights = np.exp(scores - scores.max())
    return abs(weights @ value / weights.sum() - out[row]).max()


def peak():
    """The most memory that this process has had, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
