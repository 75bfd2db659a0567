"""The laboratory's view of the kernel: online softmax, memory, and one head to explore."""

import numpy as np
import pytest
from support.bounds import AttentionBounds

import sdpa
import sdpa_lab as lab
from sdpa_lab import explore, theory


def test_online_softmax_ends_with_attention_and_passes_through_attention_to_fewer_keys(rng):
    query, key, value = (rng.standard_normal((n, 16)) for n in (1, 300, 300))
    steps = lab.online(query, key, value, block=128)
    np.testing.assert_array_equal(steps["keys"], [128, 256, 300])
    whole = sdpa.attention_forward(query, key, value)
    bounds = AttentionBounds(query, key, value)
    for row in steps.rows:
        seen = slice(row["keys"])
        part = sdpa.attention_forward(query, key[seen], value[seen])
        difference = abs(part.out - whole.out).max()
        # Three results of the same operands, each within the bound; merging rounds as much again.
        assert abs(row["difference"] - difference) <= 6 * bounds.out.max()
        assert row["lse"] == pytest.approx(part.lse[0], rel=1e-14)
        assert row["largest"] == pytest.approx((query @ key[seen].T / 4).max(), rel=1e-13)
        assert row["share"] == pytest.approx(np.exp(part.lse - whole.lse)[0], rel=1e-12)
    lses = np.array([-np.inf, *steps["lse"]])
    np.testing.assert_allclose(steps["kept"], np.exp(lses[:-1] - lses[1:]), rtol=1e-12)
    with pytest.raises(ValueError, match=r"query: expected one query, \(1, d_k\), got \(300, 16\)"):
        lab.online(key, key, value)


ONE_QUERY = {
    "causal": {"is_causal": True, "query_offset": 170},
    "sinks": {"sinks": 1.0},
    "alibi": {"alibi_slopes": 0.1, "query_offset": 200},
    "window": {"window": (50, 20), "query_offset": 200},
    "key_lengths": {"key_lengths": 210},
    "bias": {"attn_mask": np.linspace(-1, 1, 300)[None]},
    "where": {"where": np.arange(300) % 7 > 1, "sinks": 0.3},
    "nothing": {"where": False},
    "dropout": {"dropout_p": 0.3, "rng": 5},
    "softcap": {"softcap": 2.0, "scale": 3.0},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s - 0.01 * j},
}


@pytest.mark.parametrize("options", ONE_QUERY.values(), ids=ONE_QUERY)
def test_online_softmax_with_options_ends_with_attention(rng, options):
    """Keys of later blocks keep their places, and a sink counts once."""
    query, key, value = (rng.standard_normal((n, 16)) for n in (1, 300, 300))
    steps = lab.online(query, key, value, block=100, **options)
    whole = sdpa.attention_forward(query, key, value, **options)
    np.testing.assert_allclose(steps["lse"][-1], whole.lse[0], rtol=1e-14)
    assert steps["difference"][-1] < 1e-14
    assert steps["share"][-1] == pytest.approx(float(whole.lse[0] > -np.inf), rel=1e-13)
    seen = sdpa.attention_weights(query, key, stage="biased", **options)[0]
    np.testing.assert_array_equal(steps["largest"], np.maximum.accumulate(seen)[99::100])


def test_memory_follows_the_matrix_for_numpy_alone():
    (row,) = lab.memory([3072]).rows
    assert row["matrix"] == 4 * 3072**2
    assert 0.9 * row["matrix"] < row["numpy"]
    assert row["sdpa"] < 0.1 * row["matrix"]


def test_what_a_call_needs_holds_its_result():
    """Memory that is resident already must not hide it."""
    for row in lab.memory([1024, 2048]).rows:
        assert row["sdpa"] >= 256 * row["n"]
        assert row["numpy"] >= row["matrix"]


def test_plots_show_the_tables(rng):
    pytest.importorskip("matplotlib")
    query, key, value = (rng.standard_normal((n, 16)) for n in (1, 300, 300))
    steps = lab.online(query, key, value, block=100)
    matrix, course, distance = lab.plot_online(steps, (256, 512), is_causal=True).axes
    assert "tiles" in matrix.get_title()
    assert (matrix.get_xlim(), matrix.get_ylim()) == ((0, 512), (256, 0))
    np.testing.assert_array_equal(course.lines[0].get_ydata(), steps["lse"])
    np.testing.assert_array_equal(distance.lines[0].get_ydata(), steps["difference"])
    table = lab.Table("", [{"n": 256, "numpy": 2**21, "sdpa": 2**20, "matrix": 2**18}])
    (axes,) = lab.plot_memory(table).axes
    assert [line.get_ydata()[0] for line in axes.lines] == [2.0, 1.0, 0.25]


# ------------------------------------------------------------------------------ the explorer


@pytest.mark.parametrize("scale", explore.SCALES)
def test_the_scale_is_the_one_chosen(scale):
    found = explore.explore(16, 8, scale, seed=1)
    expected = {
        "1/sqrt(d_k)": 0.25,
        "1": 1.0,
        "1/(2 sqrt(d_k))": 0.125,
        "1/ln(d_k)": 1 / np.log(16),
        "1/d_k": 1 / 16,
    }
    assert found.scale == pytest.approx(expected[scale], rel=1e-15)
    assert found.scores.shape == found.weights.shape == (8, 8)
    assert {name: len(norms) for name, norms in found.gradients.items()} == {"Q": 8, "K": 8, "V": 8}


def test_figures_are_those_of_the_weights():
    found = explore.explore(64, 32, "1", correlation=0.3, seed=2)
    p = found.weights
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1).mean()
    jacobians = sdpa.softmax_jacobian(p)
    assert found.entropy == pytest.approx(entropy, rel=1e-10)
    assert found.jacobian == pytest.approx(
        np.sqrt((jacobians**2).sum(axis=(1, 2)).mean()), rel=1e-8
    )
    assert found.spread == pytest.approx(np.sqrt(found.scores.var(axis=1, ddof=1).mean()), rel=0.05)


def test_correlation_moves_a_position_towards_itself():
    """E s_ii = scale r d_k and Var s_ii = scale^2 d_k (1 + r^2), over draws; other pairs stay."""
    itself, others = [], []
    for seed in range(60):
        scores = explore.explore(64, 8, "1/sqrt(d_k)", correlation=0.5, seed=seed).scores
        itself.append(np.diag(scores).mean())
        others.append((scores.sum() - np.trace(scores)) / 56)
    error = np.sqrt(1.25 / 8 / 60)
    assert abs(np.mean(itself) - 0.5 * 8) < 5 * error
    assert abs(np.mean(others)) < 5 * np.std(others, ddof=1) / np.sqrt(60)


def test_independent_rows_follow_the_exact_law():
    entropies = [explore.explore(512, 16, seed=seed).entropy for seed in range(60)]
    law = theory.attention(16, 512).entropy
    assert abs(np.mean(entropies) - law) < 5 * np.std(entropies, ddof=1) / np.sqrt(60)


@pytest.mark.parametrize("knobs", [{}, {"scale": "1"}, {"d_k": 4, "correlation": 0.5}])
def test_gradients_follow_their_laws(knobs):
    """The laws are expectations given q and k, so the ratio has mean 1 whatever these are."""
    draws = [explore.explore(seed=seed, **knobs) for seed in range(60)]
    for name in "QKV":
        ratios = [np.mean(x.gradients[name] ** 2) / x.laws[name] ** 2 for x in draws]
        error = np.std(ratios, ddof=1) / np.sqrt(60)
        assert abs(np.mean(ratios) - 1) < 5 * error < 0.5, name


def test_other_draws_scatter_as_one_does():
    """A fresh draw lies within all but two of 40 with the probability 38/41."""
    draws = [explore.explore(8, 4, 1.0, seed=seed) for seed in range(100)]
    for name in "QKV":
        inside = [
            x.scatter[name][0] <= np.sqrt(np.mean(x.gradients[name] ** 2)) <= x.scatter[name][1]
            for x in draws
        ]
        error = np.sqrt(38 / 41 * 3 / 41 / len(draws))
        assert abs(np.mean(inside) - 38 / 41) < 5 * error, name


def test_a_number_is_a_scale():
    named, given = (explore.explore(16, 8, scale, seed=1) for scale in ("1/sqrt(d_k)", 0.25))
    assert given.scale == named.scale
    np.testing.assert_array_equal(given.weights, named.weights)
    assert given.scatter == named.scatter


def test_images_are_a_choice():
    pytest.importorskip("sklearn")
    a, b = (explore.explore(32, 20, seed=1, input=name) for name in explore.INPUTS)
    assert a.scores.shape == b.scores.shape == (20, 20)
    assert not np.array_equal(a.scores, b.scores)
    assert (set(a.laws), set(b.laws)) == (set("QKV"), {"V"})


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"scale": "sqrt"}, r"scale: expected a number or one of 1/sqrt\(d_k\), .*, got 'sqrt'"),
        ({"input": "text"}, "input: expected one of random, digits, got 'text'"),
        ({"correlation": 1.5}, "correlation: expected 0 to 1, got 1.5"),
        (
            {"d_k": 1, "scale": "1/ln(d_k)"},
            r"d_k: expected at least 2 for the scale 1/ln\(d_k\), got 1",
        ),
    ],
)
def test_bad_knobs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        explore.explore(**knobs)


@pytest.mark.parametrize("knobs", [{"scale": -0.5}, {"scale": 0.0}, {"n": 1}])
def test_the_picture_of_unusual_knobs(knobs):
    pytest.importorskip("matplotlib")
    figure = explore.plot_explored(explore.explore(16, **knobs))
    (scores,) = (axes for axes in figure.axes if axes.get_title() == "density of the scores")
    assert all((line.get_ydata() >= 0).all() for line in scores.lines)


def test_the_picture_of_the_knobs():
    pytest.importorskip("matplotlib")
    found = explore.explore(16, 8)
    figure = explore.plot_explored(found)
    titles = [axes.get_title() for axes in figure.axes]
    assert {"density of the scores", "weights", "norm of the Jacobian"} <= set(titles)
    entropy = figure.axes[titles.index("entropy of a row, nats")]
    assert entropy.lines[1].get_ydata() == [found.entropy]
    laws, others = figure.axes[titles.index("norms of the gradient's rows")].collections
    assert [float(segment[0, 1]) for segment in laws.get_segments()] == list(found.laws.values())
    ends = [tuple(segment[:, 1]) for segment in others.get_segments()]
    assert ends == list(found.scatter.values())
    (numbers,) = figure.axes[-2].texts  # behind it is the bar of colours
    low, high = found.scatter["Q"]
    assert f"38 of 40 others have\ndL/dQ: {low:.3g} to {high:.3g}" in numbers.get_text()
