"""Integers of any size and kind in sdpa.interop.torch."""

import sys
import warnings

import numpy as np
import pytest
from support.calls import message

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import sdpa
from sdpa.interop import torch as interop

pytestmark = pytest.mark.usefixtures("torch_itself")

Q = torch.ones(2, 3, 4)


class Index:
    def __index__(self):
        return 2


INTEGERS = {
    "window": {"window": (5, sys.maxsize)},
    "window beyond int64": {"window": (2**70, 1)},
    "unsigned window": {"window": (np.uint64(2**63 + 3), 1)},
    "window by protocol": {"window": (Index(), 0)},
    "workers beyond int64": {"workers": 2**70},
    "workers by protocol": {"workers": Index()},
    "offset": {"query_offset": -(2**60), "is_causal": True},
    "seed of NumPy": {"dropout_p": 0.5, "rng": np.int64(3)},
    "seed by protocol": {"dropout_p": 0.5, "rng": Index()},
    "large seed of NumPy": {"dropout_p": 0.5, "rng": np.uint64(2**64 - 1)},
}


@pytest.mark.parametrize("case", INTEGERS)
def test_integers_as_in_the_function_on_arrays(case, rng):
    x = rng.standard_normal((3, 2, 4, 7, 8))
    expected = sdpa.attention(*x, **INTEGERS[case])
    tensors = [torch.from_numpy(a) for a in x]
    np.testing.assert_array_equal(interop.attention(*tensors, **INTEGERS[case]), expected)


@pytest.mark.parametrize("name", ["key_lengths", "query_offset"])
def test_integers_beyond_int64_are_refused_as_in_the_function_on_arrays(name):
    x, options = Q.numpy(), {name: -(2**70)}
    expected = message(ValueError, sdpa.attention, x, x, x, **options)
    assert message(ValueError, interop.attention, Q, Q, Q, **options) == expected


def test_one_graph_for_all_integers(rng):
    """No recompilation for another window, length or offset."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def f(q, n):
        return interop.attention(q, q, q, window=(n, 1), key_lengths=n, query_offset=n, workers=n)

    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=True)
    for n in 3, 4, 5:
        q = torch.from_numpy(rng.standard_normal((2, 9, 4)))
        assert torch.equal(compiled(q, n), f(q, n))
    assert len(graphs) == 1
