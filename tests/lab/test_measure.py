"""`lab.measure` against the whole matrix of weights, and its memory."""

import subprocess
import sys

import numpy as np
import pytest
from support.calls import message, operands
from support.protocols import CopiedFromDevice

import sdpa
import sdpa_lab as lab
from sdpa import reference
from sdpa_lab.tools.inputs import stream


def by_hand(query, key, **options):
    """The forward figures of one head from the whole matrix, in float64."""
    s = reference.attention_weights(query, key, stage="biased", **options)
    p = reference.softmax(s)
    seen = s > -np.inf
    rows = [row[keep] for row, keep in zip(s, seen, strict=True) if keep.any()]
    jacobian = [np.linalg.norm(np.diag(r) - np.outer(r, r)) for r in p[seen.any(axis=1)]]
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)[seen.any(axis=1)]
    means = np.array([row.mean() for row in rows])
    variances = np.array([row.var() for row in rows])
    return {
        "total_variance": variances.mean() + means.var(),
        "row_variance": variances.mean(),
        "entropy": entropy.mean(),
        "effective_keys": np.exp(entropy).mean(),
        "max_weight": p.max(axis=1)[seen.any(axis=1)].mean(),
        "saturated": (p.max(axis=1) > 0.99)[seen.any(axis=1)].mean(),
        "score_rms": np.sqrt(np.mean(np.square(jacobian))),
        "score_median": np.median(jacobian),
        "score_dead": np.mean(np.array(jacobian) < 0.01),
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 1.0}, {"is_causal": True}, {"window": (3, 0)}, {"key_lengths": 17}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_figures_are_those_of_the_matrix(rng, options):
    query, key = rng.standard_normal((2, 3, 40, 16))
    table = lab.measure(query, key, **options)
    assert table["head"].tolist() == ["0", "1", "2", "all"]
    expected = [by_hand(q, k, **options) for q, k in zip(query, key, strict=True)]
    for name in expected[0]:
        heads = [row[name] for row in expected]
        np.testing.assert_allclose(table[name][:3], heads, rtol=1e-9, atol=1e-12)
        power = 2 if name == "score_rms" else 1
        whole = np.mean(np.array(heads) ** power) ** (1 / power)
        np.testing.assert_allclose(table[name][3], whole, rtol=1e-9, atol=1e-12)


def test_gradients_are_in_units_of_the_upstream_one(rng):
    """Values and keys of other spread and mean than 1 and 0 change nothing."""
    query, key, value = rng.standard_normal((3, 30, 2, 64, 32))
    plain = lab.measure(query, key, value)
    other = lab.measure(query / 4, 4 * key, 5 * value + 3)
    for target in ("query", "key", "value"):
        for figure in ("rms", "median"):
            name = f"{target}_{figure}"
            np.testing.assert_allclose(other[name], plain[name], rtol=1e-9)
    # Exact for independent q, k and v: the law per unit of the norm of g.
    law = lab.theory.attention(64, 32)
    for target in ("query", "key", "value"):
        row = plain.row(head="all")[f"{target}_rms"].estimate(0.999)
        expected = getattr(law, f"grad_{target}")
        # The spread of 64 tokens is taken about their mean: each of two factors is 1/128 too small.
        assert row.low * 0.98 <= expected <= row.high * 1.02, (target, row, expected)


def test_rows_that_see_nothing_count_nowhere(rng):
    query, key, value = rng.standard_normal((3, 1, 20, 8))
    seen = lab.measure(query[:, 5:], key, value, is_causal=True)
    table = lab.measure(query, key, value, is_causal=True, query_offset=-5)
    fewer = lab.measure(query[:, 5:], key, value, is_causal=True, query_offset=0)
    for name in ("entropy", "row_variance", "score_median"):
        # A row at another place in its block may be rounded differently.
        np.testing.assert_allclose(table[name], fewer[name], rtol=1e-13)
        np.testing.assert_allclose(seen[name], fewer[name], rtol=1e-13)
    assert np.isfinite(table["query_median"]).all()


@pytest.mark.parametrize("padding", [0.0, 1e3, np.nan])
@pytest.mark.parametrize("grouped", [False, True])
def test_padding_counts_nowhere(rng, padding, grouped):
    """Neither among the rows of key and value nor in the units of the gradients."""
    lengths = np.array([5, 20, 12])
    query, key, value = (
        rng.standard_normal((3, heads, 20, 8)) for heads in (4, *2 * [2 if grouped else 4])
    )
    hidden = np.arange(20) >= lengths[:, None]
    padded = [np.where(hidden[:, None, :, None], padding, x) for x in (query, key, value)]
    options = {"where": ~(hidden[:, None, :, None] | hidden[:, None, None]), "enable_gqa": grouped}
    table = lab.measure(*padded, seed=3, **options)
    upstream = stream(3, "measure").standard_normal(query.shape, np.float32)
    squares = {name: np.empty((3, 4)) for name in ("query", "key", "value")}
    for i, n in enumerate(lengths):
        q, k, v, g = (x[i, :, :n] for x in (query, key, value, upstream.astype(np.float64)))
        out, lse = sdpa.attention_forward(q, k, v, enable_gqa=grouped)
        grads = sdpa.attention_backward(g, q, k, v, out, lse, enable_gqa=grouped)
        # Query heads that share a key head count together.
        stds = [np.sqrt(x.var(axis=1).reshape(len(k), -1).mean(axis=1)) for x in (q, k, v)]
        units = {"query": stds[1] * stds[2], "key": stds[0] * stds[2], "value": np.ones(len(k))}
        for name, unit in units.items():
            rows = (getattr(grads, name) ** 2).sum(axis=2).mean(axis=1)
            squares[name][i] = np.repeat(rows, 4 // len(rows)) / np.repeat(unit**2, 4 // len(k)) / 8
    for name, found in squares.items():
        np.testing.assert_allclose(table[f"{name}_rms"][:4], np.sqrt(found.mean(axis=0)), rtol=1e-9)


def test_one_sequence_has_no_interval_and_several_have_one(rng):
    query, key = rng.standard_normal((2, 6, 2, 32, 8))
    one, several = lab.measure(query[0], key[0]), lab.measure(query, key)
    assert (one["entropy_low"] == one["entropy_high"]).all()
    assert (one["entropy_n"] == 1).all()
    assert (several["entropy_low"] < several["entropy_high"]).all()
    assert (several["entropy_n"] == 6).all()


def test_shared_key_heads(rng):
    query = rng.standard_normal((5, 4, 32, 8))
    key, value = rng.standard_normal((2, 5, 2, 32, 8))
    table = lab.measure(query, key, value, enable_gqa=True)
    assert len(table) == 5
    repeated = lab.measure(query, np.repeat(key, 2, axis=1))
    np.testing.assert_allclose(table["entropy"], repeated["entropy"], rtol=1e-12)
    assert table["key_rms"][0] != table["key_rms"][2]
    np.testing.assert_array_equal(table["key_rms"][0], table["key_rms"][1])


def test_a_single_head_without_axes(rng):
    query, key = rng.standard_normal((2, 32, 8))
    np.testing.assert_array_equal(
        lab.measure(query, key)["entropy"], lab.measure(query[None], key[None])["entropy"]
    )


def test_inputs_are_left_alone(rng):
    query, key, value = rng.standard_normal((3, 2, 16, 8), np.float32)
    copies = query.copy(), key.copy(), value.copy()
    lab.measure(query, key, value)
    for array, copy in zip((query, key, value), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_sequences_that_do_not_match_are_refused(rng):
    with pytest.raises(ValueError, match=r"^key: expected axes \(3,\) before the heads, as query"):
        lab.measure(np.zeros((3, 2, 8, 4)), np.zeros((1, 2, 8, 4)))
    # Its gradient would be summed over the sequences.
    x = np.zeros((3, 2, 8, 4))
    with pytest.raises(
        ValueError, match=r"^value: expected axes \(3, 2, 8\) before the last, as key"
    ):
        lab.measure(x, x, x[:1])


MEMORY = """
import resource
import numpy as np
import sdpa_lab as lab
from sdpa import reference
key, value = np.random.default_rng(0).standard_normal((2, 1, 65536, 16), np.float32)
query = key[:, :4096]
lab.measure(query[:, :64], key[:, :64], value[:, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lab.measure(query, key, value)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.uninstrumented
def test_memory_at_65536_keys():
    """The matrix would take 1 GiB; keys, values and their gradients 4 MiB each, 8 in float64."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 80 * 1024  # KiB


@pytest.mark.parametrize("value", [False, True])
def test_plot(rng, value):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    arrays = rng.standard_normal((3, 4, 2, 16, 8))
    table = lab.measure(*arrays[: 2 + value])
    assert len(lab.plot_measure(table).axes) == 4


def test_it_is_the_packages_own_statistics(rng):
    query, key = rng.standard_normal((2, 16, 8))
    stats = sdpa.attention_statistics(query, key)
    assert lab.measure(query, key)["entropy"][0] == stats.entropy.mean()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_array_on_another_device_is_refused(name):
    x = operands()
    x[name] = CopiedFromDevice(2, 1, contents=x[name])
    text = message(TypeError, lab.measure, **x)
    assert text == f"{name}: expected an array on the CPU, got {CopiedFromDevice} on cuda:1"
