"""The explorer in a real browser: it computes what the C routines compute.

Tests that need no browser come first.
"""

import errno
import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.bounds import AttentionBounds
from support.explorer import D_V, current, go
from support.helpers import assert_within
from support.pages import assert_fits, assert_named, opened

import sdpa
from sdpa.__main__ import main
from sdpa_lab import report, theory

DATA = json.loads((report.FOLDER / "explorer.json").read_text(encoding="utf-8"))

STATES = {
    "as it opens": "",
    "unscaled": "#scale=one&d_k=512&n=32&seed=5",
    "small": "#scale=log&d_k=4&n=4&seed=1&rho=1",
    "correlated": "#scale=half&d_k=64&n=64&rho=0.6&seed=999999",
    "images": "#input=digits&scale=sqrt&d_k=32&n=128&rho=0.25&seed=7",
    "images unscaled": "#input=digits&scale=one&d_k=128&n=8&seed=2",
    "a scale by the slider": "#scale=0.3&d_k=16&n=16&seed=4",
}


def test_attention_in_javascript_is_short():
    lines = (report.FOLDER / "attention.js").read_text(encoding="utf-8").splitlines()
    assert 0 < len(lines) <= 150


def test_curves_are_the_laws():
    for n, curves in DATA["curves"].items():
        assert len(curves["entropy"]) == len(curves["jacobian"]) == len(DATA["sigma"])
        for i in range(0, len(DATA["sigma"]), 6):
            law = theory.weights(int(n), DATA["sigma"][i])
            # Ordinates have five decimals; rounding sigma moves them by less.
            assert curves["entropy"][i] == pytest.approx(law.entropy, abs=2e-5)
            assert curves["jacobian"][i] == pytest.approx(law.jacobian**0.5, abs=2e-5)


def test_images_are_those_of_scikit_learn():
    pixels = pytest.importorskip("sklearn.datasets").load_digits().images
    np.testing.assert_array_equal(np.reshape(DATA["digits"], (16, 8, 8)), pixels[:16])
    assert (DATA["mean"], DATA["std"]) == (pixels.mean(), pixels.std())


def test_a_page_that_cannot_be_written(tmp_path, monkeypatch):
    def no_space(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit, match="cannot write"):
        main(["explorer", str(tmp_path / "nowhere" / "explorer.html")])
    monkeypatch.setattr(Path, "write_text", no_space)
    with pytest.raises(SystemExit, match=r"cannot write .*page.html: No space left on device$"):
        main(["explorer", str(tmp_path / "page.html")])


# ------------------------------------------------------------------------------ in the browser


@pytest.mark.parametrize("state", STATES)
def test_attention_and_gradients_agree_with_the_c_routines(page, state, isa):
    go(page, STATES[state])
    found = current(page)
    q, k, v, g = found["operands"].values()
    ours, scale = found["result"], found["scale"]
    # Both results are within the bound of the true value.
    bounds = AttentionBounds(q, k, v, grad_out=g, scale=scale)
    out, lse = sdpa.attention_forward(q, k, v, scale=scale)
    grads = sdpa.attention_backward(g, q, k, v, out, lse, scale=scale)
    for name, stage in ("s", "scores"), ("p", "weights"):
        expected = sdpa.attention_weights(q, k, scale=scale, stage=stage)
        assert_within(ours[name], expected, 2 * bounds.stages[stage], stage)
    assert_within(ours["out"], out, 2 * bounds.out, "out")
    for name in ("query", "key", "value"):
        bound = 2 * getattr(bounds, name)
        assert_within(ours[f"d{name[0]}"], getattr(grads, name), bound, name)


@pytest.mark.parametrize("state", STATES)
def test_figures_are_those_of_the_arrays(page, state):
    """In NumPy from the page's own arrays: sums of some thousand terms of one sign."""
    go(page, STATES[state])
    found = current(page)
    s, p = found["result"]["s"], found["result"]["p"]
    n, d_k = found["state"]["n"], found["state"]["d_k"]
    statistics = sdpa.attention_statistics(
        found["operands"]["q"], found["operands"]["k"], scale=found["scale"]
    )
    p2, p3 = (p**2).sum(axis=1), (p**3).sum(axis=1)
    jacobian = np.sqrt(np.maximum(0, p2 - 2 * p3 + p2**2))
    close = {"rel": 1e-11, "abs": 1e-11}
    assert found["total"] == pytest.approx((s**2).mean(), **close)
    assert found["within"] == pytest.approx(s.var(axis=1, ddof=1).mean(), **close)
    assert found["entropy"] == pytest.approx(statistics.entropy.mean(), rel=1e-9, abs=1e-11)
    assert found["largest"] == pytest.approx(p.max(axis=1).mean(), **close)
    assert found["saturated"] == (p.max(axis=1) > 0.99).mean()
    # The squares cancel where a weight is nearly 1: the root takes half of the digits.
    assert found["jacobian"] == pytest.approx(math.sqrt((jacobian**2).mean()), rel=1e-9, abs=1e-8)
    for row, name in zip(found["gradients"], ("ds", "dq", "dk", "dv"), strict=True):
        norms = np.linalg.norm(found["result"][name], axis=1)
        assert row["rms"] == pytest.approx(np.sqrt((norms**2).mean()), **close)
        assert row["median"] == pytest.approx(np.median(norms), **close)
        assert row["dead"] == (norms < 0.01 * math.sqrt(D_V)).mean()
    assert d_k * n == found["result"]["dq"].size


def test_gradients_follow_their_laws_over_many_seeds(page):
    """The mean of the squares over 40 draws of g and v, against that of the laws."""
    squares = {name: [] for name in "SQKV"}
    for seed in range(1, 41):
        go(page, f"#scale=one&d_k=16&n=8&seed={seed}")
        for row in page.evaluate("Explorer.current().gradients"):
            squares[row["to"]].append((row["rms"] ** 2, row["law"] ** 2))
    for name, pairs in squares.items():
        difference = np.subtract(*np.transpose(pairs))
        error = difference.std(ddof=1) / math.sqrt(len(pairs))
        assert abs(difference.mean()) < 5 * error, name


def test_random_numbers_are_normal(page):
    x = np.array(page.evaluate("Array.from(Attention.normal(Attention.uniform(3), 200000))"))
    # Five standard errors of the first four moments, and of the correlation of neighbours.
    for power, moment, variance in (1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96):
        assert abs((x**power).mean() - moment) < 5 * math.sqrt(variance / x.size)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(x.size)
    other = np.array(page.evaluate("Array.from(Attention.normal(Attention.uniform(4), 200000))"))
    assert abs((x * other).mean()) < 5 / math.sqrt(x.size)


def test_scores_scatter_as_the_scale_says(page):
    for name, scale in ("one", 1.0), ("linear", 1 / 64), ("log", 1 / math.log(64)):
        go(page, f"#scale={name}&d_k=64&n=128&seed=11")
        found = page.evaluate("(({total, scale}) => ({total, scale}))(Explorer.current())")
        assert found["scale"] == pytest.approx(scale, rel=1e-15)
        spread = 5 * math.sqrt(theory.mean_square_spread(128, 128, 64))
        assert found["total"] == pytest.approx(scale**2 * 64, rel=spread)


def test_the_largest_setting_is_fast(page):
    go(page, "#d_k=512&n=128&seed=1")
    milliseconds = page.evaluate(
        """() => { const start = performance.now();
        document.querySelector("[name=redraw]").click(); return performance.now() - start; }"""
    )
    assert milliseconds < 3000  # some 150 on an idle machine


def test_the_page_in_a_window(context, explorer_path):
    with opened(context, explorer_path, STATES["unscaled"]) as page:
        assert_fits(page)
        assert_named(page)
        assert page.locator("h1").count() == 1
