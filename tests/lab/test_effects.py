"""Experiments behind rows on rounding, depth, the scale in the weights, and eager code."""

import re
import sys

import numpy as np
import pytest

import sdpa
from sdpa_lab.claims import additive, cited, effects, scales, structure
from sdpa_lab.experiments import depth, eager
from sdpa_lab.experiments.cost import eager_calls
from sdpa_lab.theory import attention, best_scale


def test_laws_are_those_of_the_theory():
    for n, ratio in scales.GRADIENT.items():
        found = attention(n, 64).grad_score / attention(n, 64, best_scale(n, 64)).grad_score
        assert found == pytest.approx(ratio, abs=5e-4)
    found = attention(64, 64, 1 / np.log(64)).max_weight
    assert found == pytest.approx(scales.LARGEST_LOG, abs=5e-4)


def test_errors_of_scores_grow_as_a_quarter_of_the_power():
    growth = effects.error_law(65536) / effects.error_law(4096)
    assert growth == pytest.approx(16**0.25, rel=0.03)


def test_errors_are_those_of_float32():
    measured = effects.rounding(3, 0.3)
    for d_k in (64, 512):
        assert measured[f"error unscaled over scaled, d_k={d_k}"].values.min() > 1
        assert measured[f"numbers that are not finite, unscaled d_k={d_k}"].values.max() == 0
        assert 0 < measured[f"bits of 24 that are lost, scaled d_k={d_k}"].values.mean() < 6


def test_a_perturbation_of_one_layer_is_its_jacobian():
    """Against the size of the Jacobian by differences in every direction, one draw."""
    x = np.random.default_rng(2).standard_normal((1, 3, 64))
    for scale in (1 / 8, 1.0):
        outs = [
            depth._stack(x + 1e-6 * unit.reshape(x.shape), 1, "with skip connections", scale, 5)
            - depth._stack(x - 1e-6 * unit.reshape(x.shape), 1, "with skip connections", scale, 5)
            for unit in np.eye(x.size)
        ]
        size = np.linalg.norm(np.array(outs)) / 2e-6 / x.size**0.5
        rng = np.random.default_rng(3)
        steps = 1e-6 * rng.standard_normal((400, *x.shape))
        found = [
            np.linalg.norm(
                depth._stack(x + s, 1, "with skip connections", scale, 5)
                - depth._stack(x - s, 1, "with skip connections", scale, 5)
            )
            / np.linalg.norm(2 * s)
            for s in steps
        ]
        assert np.mean(np.square(found)) ** 0.5 == pytest.approx(size, rel=0.05)


def test_depth_zero_changes_nothing():
    found = depth.perturbation(0, draws=4)
    np.testing.assert_allclose(list(found.values()), 0, atol=1e-8)


def test_steps_of_a_folded_scale():
    measured = effects.folded(4, 0.2)
    ratios = {
        rule: measured[f"step of the scores folded over in the kernel, {rule}"]
        for rule in effects.STEPS
    }
    np.testing.assert_allclose(ratios["descent"].values, 32**0.5, rtol=1e-9)
    np.testing.assert_allclose(ratios["signs"].values, 32**0.25, rtol=1e-9)


def test_values_take_no_part_in_the_weights():
    measured = structure.other_projections(1, 0.2)
    assert measured["change of the weights with another W^V"].value == 0
    assert measured["change of the weights with another W^K"].values.min() > 0.5


def test_the_quoted_footnote_is_compared_word_by_word(monkeypatch):
    text = dict(cited.publications())
    changed = text["footnote"]["text"].replace("independent random", "dependent random")
    monkeypatch.setattr(
        cited, "publications", lambda: text | {"footnote": {"text": changed, "page": 4}}
    )
    assert cited.footnote(0, 1.0)["quoted words that differ"].value == 1


@pytest.mark.parametrize("name", cited.publications())
def test_what_others_published_says_when_it_was_compared_with_them(name):
    """Our own measurements have the date in their source."""
    entry = cited.publications()[name]
    assert re.match(r"2026-\d\d-\d\d[:,] ", entry.get("checked", "")) or (
        re.search(r", 2026-\d\d-\d\d: ", entry["source"])
    )


def test_counts_of_operations():
    measured = additive.parallelism(0, 0.1)
    # d = 16: 31 operations in 5 steps; 63 in 7.
    assert measured["operations at a time, dot, d=16"].value == 31 / 5
    assert measured["operations at a time, additive, d=16"].value == 63 / 7
    assert measured["largest change if parts are computed apart"].value == 0


@pytest.mark.parametrize("name", ["PyTorch", "NumPy"])
def test_eager_code_computes_attention(rng, name, monkeypatch):
    if name == "NumPy":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        pytest.importorskip("torch")
    assert eager.framework().name == name
    query, key, value = rng.standard_normal((3, 20, 8)).astype(np.float32)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8, 8), 8)]
    with eager.one_thread():
        dot, added = (np.asarray(call()) for call in eager_calls(query, key, value, *weights))
    np.testing.assert_allclose(dot, sdpa.attention(query, key, value), rtol=1e-4, atol=1e-5)
    expected = sdpa.additive_attention(query, key, value, *weights)
    np.testing.assert_allclose(added, expected, rtol=1e-4, atol=1e-5)


def test_one_thread_gives_the_threads_back():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with eager.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
