"""Rows on entropy, largest weight, temperature and gradients of independent queries and keys."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import log

import numpy as np

import sdpa

from ..experiments.gradients import TARGETS, exponents, gradients, log_gradients
from ..experiments.growth import Array, matrices
from ..experiments.saturation import saturation
from ..tools.estimate import Draws, Estimate, exact
from ..tools.table import Cell
from .record import Claim, Expect, Measured, draws

WIDTHS = (16, 64, 256)
ENTROPIES = {"unscaled": (2.1, 0.8, 0.2), "scaled": (2.3, 2.3, 2.3)}
LARGEST = {"unscaled": (0.342, 0.891, 0.998), "scaled": (0.289, 0.276, 0.301)}
"""As printed by note 002, for d_k = 16, 64, 256."""

# `theory.attention(10, d_k, scale).entropy`
ENTROPY_LAW = {"unscaled": (0.746, 0.348, 0.166), "scaled": (1.929, 1.925, 1.924)}

# The largest of 100 dependent weights has no closed form: means over 40 000 to 200 000 tensors of
# a NumPy program of three lines, with another generator and seed than the experiment's.
TENSOR_LAW = {"unscaled": (0.980, 0.999, 1.000), "scaled": (0.530, 0.523, 0.522)}


def _expected(
    name: str, printed: Mapping[str, Sequence[float]], laws: Mapping[str, Sequence[float]]
) -> tuple[Expect, ...]:
    """What note 002 prints, to 0.05, and the laws where they are not the same to that."""
    return tuple(
        Expect(f"{name} {scale} d_k={d_k}", given, 0.05, law if abs(law - given) > 0.05 else None)
        for scale, column in printed.items()
        for d_k, given, law in zip(WIDTHS, column, laws[scale], strict=True)
    )


def _tables(seed: int, times: float, count: int) -> dict[tuple[Cell, Cell], dict[str, Cell]]:
    table = saturation(WIDTHS, (10,), seed=seed, draws=draws(count, times))
    return {(row["scale"], row["d_k"]): row for row in table.rows}


def _draws(cell: Cell) -> Draws:
    assert isinstance(cell, Draws)
    return cell


def _beside_printed(
    rows: Mapping[tuple[Cell, Cell], Mapping[str, Cell]],
    column: str,
    name: str,
    printed: Mapping[str, Sequence[float]],
) -> dict[str, Draws]:
    """A column of `_tables`, and the share of single tensors below what note 002 prints."""
    measured: dict[str, Draws] = {}
    for scale, figures in printed.items():
        for width, figure in zip(WIDTHS, figures, strict=True):
            cell = measured[f"{name} {scale} d_k={width}"] = _draws(rows[scale, width][column])
            below = (cell.values < figure).astype(float)
            share = f"share of tensors below the printed {name}, {scale} d_k={width}"
            measured[share] = Draws(below, "share")
    return measured


def entropies(seed: int, times: float) -> Measured:
    """Entropy of rows of ten weights, and where the printed figures lie among single tensors."""
    rows = _tables(seed, times, 1500)
    measured = _beside_printed(rows, "entropy", "entropy", ENTROPIES)
    longer = saturation((64,), (64, 1024), seed=seed, draws=draws(20, times))
    for row in longer.rows:
        name = f"entropy over ln n, {row['scale']} d_k=64 n={row['n']}"
        measured[name] = _draws(row["entropy_share"])
    return measured


def largest_weights(seed: int, times: float) -> Measured:
    """Largest weight of tensors (1, 10, 10), and where the printed figures lie among them."""
    rows = _tables(seed, times, 2500)
    measured = _beside_printed(rows, "tensor_max", "max weight", LARGEST)
    for (scale, width), row in rows.items():
        name = f"mean of the rows' largest weights, {scale} d_k={width}"
        measured[name] = _draws(row["max_weight"])
    longer = saturation((64,), (64,), seed=seed, draws=draws(40, times))
    for row in longer.rows:
        measured[f"max weight {row['scale']} d_k=64 n=64"] = _draws(row["tensor_max"])

    def halved(query: Array, key: Array) -> dict[str, Array]:
        scale = 0.5 * query.shape[2] ** -0.5
        rows = sdpa.attention_statistics(query, key, scale=scale)
        return {"largest": rows.max_weight.max(axis=1)}

    for width in WIDTHS:
        found = matrices(seed, ("halved", width), draws(400, times), halved, (10, width))
        measured[f"max weight divided by 2 sqrt(d_k), d_k={width}"] = Draws(found["largest"])
    return measured


@cache
def gradient_law(seed: int, times: float) -> Measured:
    """Exponents of |dL/dQ| in d_k, and its other faces at the largest d_k."""
    widths = (16, 64, 256, 1024)
    measured: dict[str, Draws] = {}
    table = exponents(
        widths, (10, 64), seed=seed, draws=draws(120, times, least=24), batches=12, typical=False
    )
    for row in table.rows:
        name = f"{row['scale']} n={row['n']}"
        measured[f"exponent of rms |dL/dQ|, {name}"] = _draws(row["rms"])
    for width in widths:
        logs = log_gradients(width, 10, seed=seed, draws=draws(60, times))["unscaled"]
        measured[f"mean of ln |dL/dQ|, unscaled d_k={width} n=10"] = Draws(logs)
    wide = [
        gradients((width,), (10,), d_v=width, seed=seed, draws=draws(60, times))
        for width in (16, 256)
    ]
    narrow, broad = (_draws(t.row(scale="scaled")["rms_query"]).values for t in wide)
    measured["exponent of rms |dL/dQ|, scaled n=10, d_v = d_k"] = Draws(
        0.5 * np.log(broad / narrow) / log(16)
    )
    ends = gradients((16, 1024), (10,), seed=seed, draws=draws(100, times))
    for row in ends.rows:
        for target in ("query",) if row["d_k"] == 16 else TARGETS:
            for what in ("rms", "median", "dead"):
                name = f"{what} of dL/d{_LETTER[target]}, {row['scale']} d_k={row['d_k']} n=10"
                measured[name] = _draws(row[f"{what}_{target}"])
    return measured


_LETTER = {"score": "S", "query": "Q", "key": "K", "value": "V", "weight": "W"}


def temperature(seed: int, times: float) -> Measured:
    """Softmax of raw scores at temperature sqrt(d_k) against scaled attention; a draw: a matrix."""
    measured: dict[str, Draws | Estimate] = {}
    for width, length in ((16, 10), (64, 64), (512, 64)):

        def measure(query: Array, key: Array) -> dict[str, Array]:
            d_k = query.shape[2]
            raw = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
            warm = sdpa.softmax(raw, temperature=d_k**0.5)
            scaled = sdpa.attention_weights(query, key)
            lengths = np.linalg.norm(query, axis=2) / d_k**0.5
            return {
                "difference": abs(warm - scaled).max(axis=(1, 2)),
                "spread": lengths.std(axis=1, ddof=1),
            }

        found = matrices(seed, ("temperature", width), draws(40, times), measure, (length, width))
        difference = exact(found["difference"].max())
        measured[f"largest difference of weights, d_k={width} n={length}"] = difference
        name = f"spread of |q|/sqrt(d_k), d_k={width} n={length}"
        measured[name] = Draws(found["spread"])
    return measured


CLAIMS = (
    Claim(
        id="entropy-table",
        claim="For n = 10 the entropy of the weights at d_k = 16, 64, 256 is 2.1, 0.8, 0.2 without "
        "the scale and 2.3 at each with it.",
        claim_zh="n = 10 时，d_k = 16、64、256 的注意力熵：不缩放为 2.1、0.8、0.2，缩放后均为 "
        "2.3。",
        # Half a unit of the digit printed.
        expect=_expected("entropy", ENTROPIES, ENTROPY_LAW),
        holds="The entropies are those printed.",
        law="The trend is right, the figures are not: unscaled {entropy unscaled d_k=16}, "
        "{entropy unscaled d_k=64}, {entropy unscaled d_k=256}; scaled {entropy scaled d_k=16}, "
        "{entropy scaled d_k=64}, {entropy scaled d_k=256}, in agreement with exact quadrature. "
        "2.3 is ln 10, the entropy of equal weights, which no mean over tensors with scores of "
        "variance 1 reaches; scaled entropy is independent of d_k but not of n.",
        experiment=entropies,
    ),
    Claim(
        id="maxweight-table",
        claim="The largest weight of a (1, 10, 10) tensor at d_k = 16, 64, 256 is 0.342, 0.891, "
        "0.998 without the scale and 0.289, 0.276, 0.301 with it.",
        claim_zh="形状为 (1, 10, 10) 的权重张量，d_k = 16、64、256 时最大权重：不缩放为 0.342、"
        "0.891、0.998，缩放后为 0.289、0.276、0.301。",
        # A printed number is one draw: it should lie this near to the mean of such draws.
        expect=_expected("max weight", LARGEST, TENSOR_LAW),
        holds="The largest weights are those printed.",
        law="The largest of 100 weights is {max weight unscaled d_k=16:.3f}, {max weight unscaled "
        "d_k=64:.4f}, {max weight unscaled d_k=256:.5f} without the scale and {max weight scaled "
        "d_k=16:.2f}, {max weight scaled d_k=64:.2f}, {max weight scaled d_k=256:.2f} with it, in "
        "agreement with a second simulation (there is no closed form). Of 2500 simulated tensors "
        "a share of {share of tensors below the printed max weight, unscaled d_k=16} had a "
        "maximum below 0.342 and {share of tensors below the printed max weight, scaled d_k=16} "
        "one below 0.289: the note's program can hardly have printed these. The scaled column is "
        "near that of another divisor, 2 sqrt(d_k): {max weight divided by 2 sqrt(d_k), "
        "d_k=16:.2f}, {max weight divided by 2 sqrt(d_k), d_k=64:.2f}, {max weight divided by 2 "
        "sqrt(d_k), d_k=256:.2f}.",
        experiment=largest_weights,
    ),
    Claim(
        id="grad-law",
        claim="Without the scale the norm of dL/dQ falls as 1/d_k.",
        claim_zh="不缩放时，dL/dQ 的范数按 1/d_k 衰减（梯度消失）。",
        # The loss is sum(g * out), g and the values of N(0, 1) and of width 64 at every d_k.
        # A quarter tells 1/d_k from 1/sqrt(d_k) and from a constant.
        expect=(
            Expect("exponent of rms |dL/dQ|, unscaled n=10", -1.0, 0.25, law=0.29),
            Expect("exponent of rms |dL/dQ|, unscaled n=64", -1.0, 0.25, law=0.33),
        ),
        holds="The norm falls as 1/d_k.",
        law="The root mean square grows while the typical row dies. The loss is sum(g * out), g "
        "and values are N(0, 1) and 64 wide. The root mean square has exponent {exponent of rms "
        "|dL/dQ|, unscaled n=10} for n = 10 and {exponent of rms |dL/dQ|, unscaled n=64} for 64, "
        "tending to 1/4, because dL/dQ multiplies the shrinking dL/dS by unscaled keys. The "
        "typical row follows no power of d_k: E ln |dL/dQ| is {mean of ln |dL/dQ|, unscaled d_k=16 "
        "n=10}, {mean of ln |dL/dQ|, unscaled d_k=64 n=10}, {mean of ln |dL/dQ|, unscaled d_k=256 "
        "n=10} and {mean of ln |dL/dQ|, unscaled d_k=1024 n=10} at d_k = 16, 64, 256 and 1024, "
        "about a constant + ln(d_k)/2 - 0.54 sqrt(d_k), where 0.54 is the mean gap between the two "
        "largest of ten normal numbers. The share of rows without gradient goes from {dead of "
        "dL/dQ, unscaled d_k=16 n=10:.2f} at d_k = 16 to {dead of dL/dQ, unscaled d_k=1024 "
        "n=10:.2f} at 1024, the median from {median of dL/dQ, unscaled d_k=16 n=10:.1f} to {median "
        "of dL/dQ, unscaled d_k=1024 n=10:.0e}. dL/dV does not vanish: only values that no query "
        "picks get none.",
        experiment=gradient_law,
    ),
    Claim(
        id="grad-constant",
        claim="With the scale the norm of dL/dQ is constant in d_k.",
        claim_zh="缩放后，dL/dQ 的范数约为常数，不随 d_k 变化（梯度稳定）。",
        expect=(
            Expect("exponent of rms |dL/dQ|, scaled n=10", 0.0, 0.1),
            Expect("exponent of rms |dL/dQ|, scaled n=64", 0.0, 0.1),
        ),
        holds="It is, as long as d_v is: the exponent of its root mean square is {exponent of rms "
        "|dL/dQ|, scaled n=10} for n = 10 and {exponent of rms |dL/dQ|, scaled n=64} for 64. With "
        "d_v = d_k and the loss sum(g * out) it grows as the norm of g does, with exponent "
        "{exponent of rms |dL/dQ|, scaled n=10, d_v = d_k}.",
        law="Its root mean square has exponent {exponent of rms |dL/dQ|, scaled n=10} for n = 10.",
        experiment=gradient_law,
    ),
    Claim(
        id="temperature",
        claim="sqrt(d_k) is the temperature of the softmax.",
        claim_zh="sqrt(d_k) 就是 softmax 的温度参数。",
        expect=tuple(
            Expect(f"largest difference of weights, d_k={d} n={n}", 0.0, 1e-12)
            for d, n in ((16, 10), (64, 64), (512, 64))
        ),
        holds="Softmax of the raw scores at temperature sqrt(d_k) gives the same weights to "
        "rounding. A row's own temperature is sqrt(d_k)/|q|: the length of the query over "
        "sqrt(d_k) scatters by {spread of |q|/sqrt(d_k), d_k=16 n=10} at d_k = 16 and {spread of "
        "|q|/sqrt(d_k), d_k=512 n=64} at 512, that is 1/sqrt(2 d_k).",
        law="The weights differ.",
        experiment=temperature,
    ),
)
