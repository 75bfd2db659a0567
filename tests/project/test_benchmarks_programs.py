"""The benchmark of functions of the user: its works are what they say, and its table is the page's.

The oracle is the same function on NumPy arrays.
"""

import json
import re
import sys

import numpy as np
import pytest
from support.examples import ROOT

import sdpa

sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

from support.results import run_of

from benchmarks import programs, targets
from benchmarks.beyond import quoted
from benchmarks.contenders import Setting

N = 256
EACH = [*programs.of_scores(3, N), *programs.of_pairs(2, N)]
ALL = pytest.mark.parametrize("attention", EACH, ids=lambda attention: attention.name)
COMPOSED = [attention for attention in EACH if attention.composed]


def on_arrays(attention):
    """The logits and who is seen, from the functions on whole arrays."""
    options = attention.options
    query, key = (x[0].astype(float) for x in attention.operands()[:2])
    s = query @ key.swapaxes(1, 2) / np.sqrt(programs.D)
    b, h, q, k = np.ogrid[:1, : s.shape[0], : s.shape[1], :N]
    q = q + options.get("query_offset", 0)
    seen = np.ones((1, *s.shape), bool)
    if mask := options.get("mask_mod"):
        seen &= mask(b, h, q, k, *options.get("mask_args", ()))
    if options.get("is_causal"):
        seen &= q >= k
    if score := options.get("score_mod"):
        with np.errstate(divide="ignore"):
            s = score(s[None], b, h, q, k, *options.get("score_args", ()))[0]
    return np.where(seen[0], s, -np.inf), seen[0]


@ALL
def test_results_and_shares(attention):
    x = attention.operands()
    z, seen = on_arrays(attention)
    weights = np.exp(z - z.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = programs.calls(x, attention.options)["forward"]().out
    np.testing.assert_allclose(out[0], weights @ x.value[0], rtol=0, atol=1e-5)
    if attention.option is not None:
        other = programs.calls(x, attention.option)["forward"]().out
        np.testing.assert_allclose(out, other, rtol=0, atol=1e-5)
    visible, none, some, whole = programs.pattern(attention)
    assert visible == pytest.approx(seen.mean())
    assert none + some + whole == pytest.approx(1)
    assert whole <= visible <= 1 - none


@pytest.mark.parametrize("attention", COMPOSED, ids=lambda attention: attention.name)
def test_pytorch_computes_the_same(attention, torch):
    x = attention.operands()
    out, *theirs = programs.composed(torch, attention, x)()
    found, grads = programs.calls(x, attention.options)["both"]()
    np.testing.assert_allclose(found.out, out, rtol=0, atol=1e-5)
    ours = [*grads[:3], *(grads.score_args or ())]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * abs(a).max())


def test_the_backward_has_the_gradients_of_floats_alone():
    for name, given in (("bias of a graph", 2), ("T5 bias", 1), ("softcap", 0)):
        (attention,) = (each for each in EACH if each.name == name)
        grads = programs.calls(attention.operands(), attention.options)["backward"]()
        shown = [] if grads.score_args is None else [x is not None for x in grads.score_args]
        assert shown == [True, False][:given]


def results_of(seconds, flops):
    """Results in which each contender of each work takes these."""
    contenders = {name: (seconds[name], flops[name], 0.0) for name in seconds}
    works = programs.programs(Setting(1, []))
    isa = sdpa.show_config("dicts")["isa"]
    return run_of({("programs", work.name): contenders for work in works}, isa)


SECONDS = {"plain": 2.0, "sdpa": 1.0, "option": 0.5, "torch": 3.0}
FLOPS = {"plain": 4.0, "sdpa": 1.0, "option": 1.0, "torch": 1.0}


def test_goals_are_those_of_the_tiles_that_somebody_sees():
    rows = list(targets.rows(results_of(SECONDS, FLOPS)))
    found = {(row.section, row.title): row for row in rows}
    assert len(found) == len(rows) == 2 * (3 + 4) + 3
    documents = found["functions that mask, backward, time / plain", "causal documents"]
    assert (documents.value, documents.goal.at_least) == (0.5, False)
    assert documents.goal.bound == pytest.approx(1.25 / 4 + 0.02, abs=1e-3)
    assert found["functions, forward, time / option", "softcap"].value == 2
    assert found["functions, forward, time / plain", "ALiBi"].value == 0.5
    trained = found["functions, forward and backward, PyTorch's formula", "T5 bias"]
    assert (trained.value, trained.beside) == (3, "torch")


def test_a_row_of_the_table():
    results = results_of(SECONDS, FLOPS)
    capped, masked = (next(each for each in EACH if each.name == name)
                      for name in ("softcap", "prefix LM"))  # fmt: skip
    row = programs.row(capped, results)
    assert len(row) == len(programs.HEADER)
    assert row == ["softcap", "1.000", "0.000", "0.000", "1.000", "0.50", "0.50", "0.25 / 0.25",
                   "3.0"]  # fmt: skip
    assert programs.row(masked, results)[5:] == ["0.50", "0.50", "", ""]


def test_figures_of_other_kernels_are_refused(tmp_path, monkeypatch):
    """Their tiles have another size."""
    run = results_of(SECONDS, FLOPS).runs[0] | {"isa": "another"}
    path = tmp_path / "other.json"
    path.write_text(json.dumps([run]))
    monkeypatch.setattr(sys, "argv", ["programs", str(path)])
    with pytest.raises(SystemExit, match="figures are of another"):
        programs.main()


def test_the_page_has_the_table():
    page = programs.PAGE.read_text(encoding="utf-8")
    assert quoted(page, "times", "a table").count("\na table\n") == 1
    block = re.search(r"<!-- times -->\n\n```\n(.*?)\n```", page, re.DOTALL)[1]
    header, *rows = block.splitlines()[3:]
    assert header.split() == programs.HEADER[1:]
    for attention, row in zip(EACH, rows, strict=True):
        assert row.strip().startswith(f"{attention.name} ")
        cells = len(row.split()) - len(attention.name.split())
        assert cells == 6 + 3 * (attention.option is not None) + bool(attention.composed)
