"""The benchmark of functions of the user: its works are what they say, and its table is the page's.

The oracle is the same function on NumPy arrays.
"""

import re
import sys

import numpy as np
import pytest
from support.examples import ROOT

sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

from benchmarks import programs
from benchmarks.beyond import quoted
from benchmarks.timing import QUICK

N = 256
WORKS = list(programs.works(N))
EACH = pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)


def on_arrays(work):
    """The logits and who is seen, from the functions on whole arrays."""
    query, key = (x.astype(float) for x in programs.operands(work, N)[:2])
    s = query @ key.swapaxes(1, 2) / np.sqrt(programs.D)
    b, h, q, k = np.ogrid[:1, : s.shape[0], : s.shape[1], :N]
    q = q + work.options.get("query_offset", 0)
    seen = np.ones((1, *s.shape), bool)
    if mask := work.options.get("mask_mod"):
        seen &= mask(b, h, q, k, *work.options.get("mask_args", ()))
    if work.options.get("is_causal"):
        seen &= q >= k
    if score := work.options.get("score_mod"):
        with np.errstate(divide="ignore"):
            s = score(s[None], b, h, q, k, *work.options.get("score_args", ()))[0]
    return np.where(seen[0], s, -np.inf), seen[0]


@EACH
def test_results_and_shares(work):
    arrays = programs.operands(work, N)
    z, seen = on_arrays(work)
    weights = np.exp(z - z.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    forward, _ = programs.calls(arrays, work.options)
    np.testing.assert_allclose(forward().out, weights @ arrays[2], rtol=0, atol=1e-5)
    visible, none, some, whole = programs.pattern(work, arrays)
    assert visible == pytest.approx(seen.mean())
    assert none + some + whole == pytest.approx(1)
    assert whole <= visible <= 1 - none


@pytest.mark.parametrize(
    "work", [work for work in WORKS if work.composed], ids=lambda work: work.name
)
def test_pytorch_computes_the_same(work, torch):
    arrays = programs.operands(work, N)
    out, *theirs = programs.composed(torch, work, arrays)()
    forward, backward = programs.calls(arrays, work.options)
    np.testing.assert_allclose(forward().out, out, rtol=0, atol=1e-5)
    grads = backward()
    ours = [*grads[:3], *(grads.score_args or ())]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * abs(a).max())


def test_a_row_of_the_table():
    row = programs.measured(WORKS[0], N, QUICK, None)
    assert len(row) == len(programs.HEADER)
    assert row[0] == "causal documents"
    assert row[-1] == ""
    assert all(float(cell) >= 0 for cell in row[1:-1])


def test_without_pytorch_it_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert programs.library() is None


def test_only_floats_have_gradients():
    (graph,) = (work for work in WORKS if work.name == "bias of a graph")
    assert programs.needed(graph.options)[-1] == "score_args"
    assert programs.needed({"score_args": (np.arange(3),)}) == ("query", "key", "value")


def test_the_page_has_the_table():
    page = programs.PAGE.read_text(encoding="utf-8")
    assert quoted(page, "times", "a table").count("\na table\n") == 1
    block = re.search(r"<!-- times -->\n\n```\n(.*?)\n```", page, re.DOTALL)[1]
    rows = block.splitlines()[3:]
    assert rows[0].split() == programs.HEADER[1:]
    for work, row in zip(programs.works(N), rows[1:], strict=True):
        assert row.strip().startswith(f"{work.name} ")
        assert (len(row.split()) - len(work.name.split())) == 6 + bool(work.composed)
