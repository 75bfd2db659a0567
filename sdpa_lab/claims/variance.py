"""Rows on the mean, variance and distribution of scores of independent components."""

from math import gamma

import numpy as np

import sdpa

from .. import theory
from ..experiments.growth import (
    INITIALISERS,
    Array,
    growth,
    initialisers,
    matrices,
    normality,
)
from ..tools.estimate import Draws, Estimate, exact
from ..tools.inputs import stream
from .record import Claim, Expect, Measured, draws

NOTE_TENSORS = 18  # scores in a tensor of 2 x 3 x 3


def mean_and_variance(seed: int, times: float) -> Measured:
    """Mean and variance of raw scores over d_k and n, and over kinds of components."""
    measured: dict[str, Draws] = {}
    for width in (4, 64, 512):
        table = growth([width], [64], seed=seed, draws=draws(600, times))
        row = table.row(d_k=width)
        assert isinstance(row["mean"], Draws)
        assert isinstance(row["variance"], Draws)
        measured[f"mean over std d_k={width}"] = Draws(row["mean"].values / width**0.5)
        measured[f"variance over d_k, d_k={width}"] = Draws(row["variance"].values / width)
        measured[f"std raw d_k={width}"] = Draws(row["variance"].values, "root_mean")
    for kind in ("uniform", "sign"):
        table = growth([64], [64], components=kind, seed=seed, draws=draws(300, times))
        row = table.row(d_k=64)
        assert isinstance(row["variance"], Draws)
        measured[f"variance over d_k, d_k=64, {kind} components"] = Draws(
            row["variance"].values / 64
        )
    return measured


def scaled_variance(seed: int, times: float) -> Measured:
    """Variance of scaled scores over d_k and n."""
    measured: dict[str, Draws] = {}
    for width, length, count in (
        (1, 64, 4000),
        (16, 64, 800),
        (64, 8, 4000),
        (64, 64, 400),
        (512, 64, 200),
    ):
        key = ("scaled variance", width, length)
        found = matrices(seed, key, draws(count, times), _square, (length, width))
        measured[f"variance scaled d_k={width} n={length}"] = Draws(found["square"])
    return measured


def _square(query: Array, key: Array) -> dict[str, Array]:
    scores = sdpa.attention_weights(query, key, stage="scores")
    return {"square": (scores**2).mean(axis=(1, 2))}


def products(seed: int, times: float) -> Measured:
    """Variance of q_l k_l, and of q.k with means; every pair is a draw."""
    rng = stream(seed, "products")
    count = draws(1_200_000, times)
    measured: dict[str, Draws] = {}
    for width, mean_q, mean_k, var_q, var_k in ((1, 0, 0, 1, 1), (1, 1, 2, 2, 3), (16, 1, 2, 2, 3)):
        some = count // width
        query = mean_q + var_q**0.5 * rng.standard_normal((some, 1, width))
        key = mean_k + var_k**0.5 * rng.standard_normal((some, 1, width))
        raw = sdpa.attention_weights(query, key, scale=1.0, stage="scores").ravel()
        square = (raw - width * mean_q * mean_k) ** 2
        if mean_q == 0:
            measured["variance of a product"] = Draws(square)
        else:
            name = f"variance over the formula, means 1 and 2, d_k={width}"
            law = var_q * var_k + mean_q**2 * var_k + mean_k**2 * var_q
            measured[name] = Draws(square / (width * law))
    # What the mean of the keys adds is the same for all keys of a row.
    rows = matrices(seed, ("products in a row",), draws(400, times), _with_mean, (64, 64))
    measured["variance over d_k, key mean 2"] = Draws(rows["total"])
    measured["variance within a row over d_k, key mean 2"] = Draws(rows["row"])
    return measured


def _with_mean(query: Array, key: Array) -> dict[str, Array]:
    scores = sdpa.attention_weights(query, key + 2, stage="scores")
    return {
        "total": (scores**2).mean(axis=(1, 2)),
        "row": scores.var(axis=2, ddof=1).mean(axis=1),
    }


def distance_to_normal(seed: int, times: float) -> Measured:
    """Distance to N(0, 1) and kurtosis of scaled scores."""
    measured: dict[str, Draws] = {}
    for width in (4, 16, 64, 512):
        count = draws(600 if width > 16 else 300, times)
        table = normality([width], [64], seed=seed, draws=count)
        cell = table.rows[0]["distance"]
        assert isinstance(cell, Draws)
        measured[f"distance to N(0, 1) d_k={width}"] = cell
        measured[f"distance times d_k, d_k={width}"] = Draws(cell.values * width)
    kurtosis = growth([4, 64], [64], seed=seed, draws=draws(300, times))
    for row in kurtosis.rows:
        cell = row["kurtosis"]
        assert isinstance(cell, Draws)
        measured[f"excess kurtosis d_k={row['d_k']}"] = cell
    return measured


def three_sigma(seed: int, times: float) -> Measured:
    """Shares of scores within three standard deviations; the largest of the note's tensors."""
    measured: dict[str, Draws | Estimate] = {}
    for width, bound in ((16, 12), (64, 24), (512, 68)):

        def measure(query: Array, key: Array, bound: int = bound) -> dict[str, Array]:
            raw = abs(sdpa.attention_weights(query, key, scale=1.0, stage="scores"))
            scaled = abs(sdpa.attention_weights(query, key, stage="scores"))
            axes = (1, 2)
            return {
                "raw": (raw <= bound).mean(axis=axes),
                "scaled": (scaled <= 3).mean(axis=axes),
                "hundred": (raw.max(axis=axes) >= 100).astype(float),
            }

        count = draws(1200 if width == 64 else 800, times)
        found = matrices(seed, ("three sigma", width), count, measure, (64, width))
        measured[f"share scaled within 3, d_k={width}"] = Draws(found["scaled"])
        measured[f"share raw within {bound}, d_k={width}"] = Draws(found["raw"])
        if width == 512:
            measured["share of 64 x 64 matrices with a score beyond 100, d_k=512"] = Draws(
                found["hundred"], "share"
            )
    found = matrices(seed, ("note's tensors",), draws(10_000, times), measure, (3, 512))
    pairs = found["hundred"][: len(found["hundred"]) // 2 * 2].reshape(-1, 2).max(axis=1)
    measured["share of tensors (2, 3, 512) with a score beyond 100"] = Draws(pairs, "share")
    beyond = theory.outside(100 / 512**0.5, 512)
    return measured | {"probability that a score is beyond 100, d_k=512": exact(beyond)}


def initial_variance(seed: int, times: float) -> Measured:
    """Both readings of N(0, 1/sqrt(dim)): as the variance, and as the standard deviation."""
    measured: dict[str, Draws] = {}
    for width in (64, 512):

        def measure(query: Array, key: Array, width: int = width) -> dict[str, Array]:
            found = {}
            for name, variance in (("variance", width**-0.5), ("std", 1 / width)):
                std = variance**0.5
                raw = sdpa.attention_weights(std * query, std * key, scale=1.0, stage="scores")
                found[name] = (raw**2).mean(axis=(1, 2))
            return found

        found = matrices(seed, ("initial", width), draws(300, times), measure, (64, width))
        measured[f"variance of q k, 1/sqrt(dim) the variance, dim={width}"] = Draws(
            found["variance"]
        )
        measured[f"variance of q k, 1/sqrt(dim) the std, dim={width}"] = Draws(found["std"])
    return measured


def toy_512(seed: int, times: float) -> Measured:
    """The note's tensors (2, 3, 512): the standard deviation of 18 scores, over many tensors."""
    rng = stream(seed, "toy-512")
    count = draws(3000, times)
    raw: list[Array] = []
    scaled: list[Array] = []
    for _ in range(0, count, 100):
        query, key = rng.standard_normal((2, 100, 2, 3, 512))
        for scale, values in ((1.0, raw), (None, scaled)):
            scores = sdpa.attention_weights(query, key, scale=scale, stage="scores")
            values.append(scores.reshape(100, NOTE_TENSORS).std(axis=1, ddof=1))
    raw_std, scaled_std = np.concatenate(raw), np.concatenate(scaled)
    return {
        "std raw d_k=512, mean of tensors": Draws(raw_std),
        "std scaled d_k=512, mean of tensors": Draws(scaled_std),
        "share of tensors with a std below 20": Draws((raw_std < 20).astype(float), "share"),
        "share of tensors with a std above 25": Draws((raw_std > 25).astype(float), "share"),
    }


def toy_variance(seed: int, times: float) -> Measured:
    """The note's matrices 100 x d_k: the sample variance of 10 000 dependent scores."""
    measured: dict[str, Draws] = {}
    for width in (64, 128, 256, 512):

        def measure(query: Array, key: Array) -> dict[str, Array]:
            raw = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
            scaled = sdpa.attention_weights(query, key, stage="scores")
            n = raw.shape[1]
            return {
                "raw": raw.reshape(-1, n * n).var(axis=1, ddof=1),
                "scaled": scaled.reshape(-1, n * n).var(axis=1, ddof=1),
            }

        count = draws(600 if width == 64 else 120, times)
        found = matrices(seed, ("toy-var", width), count, measure, (100, width))
        measured[f"variance raw d_k={width}"] = Draws(found["raw"])
        measured[f"variance scaled d_k={width}"] = Draws(found["scaled"])
        spread = (found["scaled"] - 1) ** 2
        law = theory.mean_square_spread(100, 100, width) ** 0.5
        measured[f"std of one printed variance over d_k, d_k={width}"] = Draws(
            spread, "root_mean", law
        )
    return measured


def sigma_law(seed: int, times: float) -> Measured:
    """Variance of scores over dim sigma^2, for components of variance sigma^2."""
    measured: dict[str, Draws] = {}
    for sigma2 in (0.25, 1.0, 4.0):

        def measure(query: Array, key: Array, sigma2: float = sigma2) -> dict[str, Array]:
            std = sigma2**0.5
            raw = sdpa.attention_weights(std * query, std * key, scale=1.0, stage="scores")
            return {"ratio": (raw**2).mean(axis=(1, 2)) / (query.shape[2] * sigma2)}

        found = matrices(seed, ("sigma", str(sigma2)), draws(500, times), measure, (64, 64))
        text = f"{sigma2:g}".replace(".", "_") if sigma2 >= 1 else "1/4"
        measured[f"variance over dim sigma^2, sigma^2={text}"] = Draws(found["ratio"])
    return measured


def product_growth(seed: int, times: float) -> Measured:
    """Exponents in d_k of |q.k| and of the cosine, and the mean of q.k; a draw: four matrices."""
    widths, count = (16, 64, 256, 1024), draws(80, times)
    sizes: dict[str, list[Array]] = {"|q k|": [], "|cosine|": [], "mean": []}
    for width in widths:

        def measure(query: Array, key: Array) -> dict[str, Array]:
            raw = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
            lengths = [np.linalg.norm(x, axis=-1) for x in (query, key)]
            cosines = raw / (lengths[0][:, :, None] * lengths[1][:, None, :])
            axes = (1, 2)
            return {
                "|q k|": abs(raw).mean(axis=axes),
                "|cosine|": abs(cosines).mean(axis=axes),
                "mean": raw.mean(axis=axes) / query.shape[2] ** 0.5,
            }

        found = matrices(seed, ("products grow", width), count, measure, (64, width))
        for name, values in found.items():
            sizes[name].append(values)
    measured = {
        f"exponent of {name} in d_k": Draws(
            np.polyfit(np.log(widths), np.log(np.array(sizes[name])), 1)[0]
        )
        for name in ("|q k|", "|cosine|")
    }
    return measured | {"mean of q k over its std": Draws(np.mean(sizes["mean"], axis=0))}


def cosine(seed: int, times: float) -> Measured:
    """Scaled scores against cosines of the same vectors."""
    measured: dict[str, Draws] = {}
    for width in (16, 64, 512):

        def measure(query: Array, key: Array) -> dict[str, Array]:
            lengths = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
            directions = (query / lengths[0], key / lengths[1])
            cosines = sdpa.attention_weights(*directions, scale=1.0, stage="scores")
            divisor = (lengths[0] @ lengths[1].swapaxes(-1, -2)) / query.shape[2] ** 0.5
            return {
                "variance": (cosines**2).mean(axis=(1, 2)),
                "divisor": divisor.mean(axis=(1, 2)),
            }

        found = matrices(seed, ("cosine", width), draws(200, times), measure, (64, width))
        measured[f"lengths product over sqrt(d_k), d_k={width}"] = Draws(found["divisor"])
        measured[f"std of cosines d_k={width}"] = Draws(found["variance"], "root_mean")
    return measured


def _mean_lengths(d_k: int) -> float:
    """E |q| |k| / sqrt(d_k) for normal components."""
    ratio = (
        gamma((d_k + 1) / 2) / gamma(d_k / 2)
        if d_k < 300
        else (d_k / 2) ** 0.5 * (1 - 1 / (4 * d_k))
    )
    return float(2 * ratio**2 / d_k**0.5)


def glorot(seed: int, times: float) -> Measured:
    """Variance of the components of q, and of scaled scores, under several initialisers."""
    measured: dict[str, Draws] = {}
    both = ("Glorot", "Glorot, all heads")
    tables = [
        initialisers((width,), (64,), names=names, seed=seed, draws=draws(count, times))
        for width, names, count in ((16, both, 60), (64, INITIALISERS, 60), (512, both, 20))
    ]
    for row in (row for table in tables for row in table.rows):
        name, width = row["initialiser"], row["d_k"]
        if name in ("Glorot", "Glorot, all heads"):
            components, scores = row["components"], row["scores"]
            assert isinstance(components, Draws)
            assert isinstance(scores, Draws)
            measured[f"variance of a component of q, {name}, d_k={width}"] = components
            measured[f"variance of scaled scores, {name}, d_k={width}"] = scores
        elif name != "BERT, 0.02" and width == 64:
            scores = row["scores"]
            assert isinstance(scores, Draws)
            measured[f"variance of scaled scores, {name}, d_k={width}"] = scores
    return measured


CLAIMS = (
    Claim(
        id="mean-var",
        claim="For independent components of mean 0 and variance 1 the dot product q.k has mean 0 "
        "and variance d_k: standard deviation 8 at d_k = 64, about 22.6 at 512.",
        claim_zh="若 q 与 k 的分量独立同分布、均值为 0、方差为 1，则点积的均值为 0、方差为 d_k："
        "d_k = 64 时标准差为 8，512 时约为 22.6。",
        expect=(
            *(Expect(f"mean over std d_k={d}", 0.0, 0.02) for d in (4, 64, 512)),
            *(Expect(f"variance over d_k, d_k={d}", 1.0, 0.05) for d in (4, 64, 512)),
            Expect("variance over d_k, d_k=64, uniform components", 1.0, 0.05),
            Expect("variance over d_k, d_k=64, sign components", 1.0, 0.05),
            Expect("std raw d_k=64", 8.0, 0.2),
            Expect("std raw d_k=512", 22.6, 0.5),
        ),
        holds="Mean 0 and variance d_k hold at every d_k and for any distribution of the "
        "components with this mean and variance; std {std raw d_k=64} at 64 and {std raw d_k=512} "
        "at 512.",
        law="The mean is 0 and the variance d_k times the variances of both components.",
        experiment=mean_and_variance,
    ),
    Claim(
        id="unit-var",
        claim="After division by sqrt(d_k) the score has variance 1 whatever d_k is.",
        claim_zh="除以 sqrt(d_k) 之后，分数的方差为 1，与 d_k 无关。",
        expect=tuple(
            Expect(f"variance scaled d_k={d} n={n}", 1.0, 0.05)
            for d, n in ((1, 64), (16, 64), (64, 8), (64, 64), (512, 64))
        ),
        holds="For independent components the variance is 1 whatever d_k and n are: {variance "
        "scaled d_k=16 n=64} at d_k = 16, {variance scaled d_k=512 n=64} at 512. After training "
        "it is not.",
        law="The variance of scaled scores is the product of the variances of the components.",
        experiment=scaled_variance,
    ),
    Claim(
        id="product-var",
        claim="A product q_l k_l of two such components has variance 1; in general Var(qk) = v_q "
        "v_k + m_q^2 v_k + m_k^2 v_q.",
        claim_zh="两个这样的分量之积 q_l k_l 的方差为 1；一般地，Var(qk) = v_q v_k + m_q^2 v_k + "
        "m_k^2 v_q。",
        expect=(
            Expect("variance of a product", 1.0, 0.05),
            Expect("variance over the formula, means 1 and 2, d_k=1", 1.0, 0.05),
            Expect("variance over the formula, means 1 and 2, d_k=16", 1.0, 0.05),
        ),
        holds="Both formulas hold. But what a mean of the keys adds is the same for a whole row, "
        "and softmax ignores it: with a key mean of 2 the total variance is {variance over d_k, "
        "key mean 2} d_k and that within a row {variance within a row over d_k, key mean 2} d_k.",
        law="Var(qk) = v_q v_k + m_q^2 v_k + m_k^2 v_q.",
        experiment=products,
    ),
    Claim(
        id="normal",
        claim="q.k / sqrt(d_k) has the standard normal distribution N(0, 1).",
        claim_zh="q.k / sqrt(d_k) 服从标准正态分布 N(0, 1)。",
        # A hundredth: what a histogram of the note's 10 000 scores can just show.
        expect=(
            Expect("distance to N(0, 1) d_k=64", 0.0, 0.01),
            Expect("distance to N(0, 1) d_k=512", 0.0, 0.01),
        ),
        holds="Nearly, at the d_k of the notes, but never exactly: the Kolmogorov distance is "
        "0.1376/d_k (times d_k: {distance times d_k, d_k=4} at 4, {distance times d_k, d_k=16} at "
        "16), the excess kurtosis 6/d_k ({excess kurtosis d_k=4} at 4, {excess kurtosis d_k=64} "
        "at 64).",
        law="The distribution is a normal one of random width |q|/sqrt(d_k): its distance to N(0, "
        "1) is 0.1376/d_k and its excess kurtosis 6/d_k.",
        experiment=distance_to_normal,
    ),
    Claim(
        id="three-sigma",
        claim="99.7 % of the scaled scores lie in [-3, 3], and of the raw ones in [-24, 24] at d_k "
        "= 64 and in about [-68, 68] at 512, where a score may reach 100.",
        claim_zh="99.7% 的缩放后分数落在 [-3, 3]；未缩放时，d_k = 64 落在 [-24, 24]，512 落在约 "
        "[-68, 68]，并可能出现 ±100 这样的极端值。",
        # Half a unit of the last digit printed.
        expect=(
            Expect("share scaled within 3, d_k=64", 0.997, 0.0005),
            Expect("share scaled within 3, d_k=512", 0.997, 0.0005),
            Expect("share raw within 24, d_k=64", 0.997, 0.0005),
            Expect("share raw within 68, d_k=512", 0.997, 0.0005),
        ),
        holds="True to the digits printed, but the tails are heavier than normal at small d_k "
        "({share scaled within 3, d_k=16} within 3 at 16, where a normal variable has 0.9973). At "
        "d_k = 512 a score of 100 is 4.4 sigma, which is exceeded with probability {probability "
        "that a score is beyond 100, d_k=512:.1e}: the note's tensor of 18 scores contains one in "
        "fewer than 1 of 4800 draws, a 64 x 64 matrix with probability {share of 64 x 64 matrices "
        "with a score beyond 100, d_k=512}.",
        law="The share within three sigma is 0.9973 at large d_k and less at small d_k, by the "
        "mixture of normal tails over |q|.",
        experiment=three_sigma,
    ),
    Claim(
        id="init-var",
        claim="If components of q and k are drawn from N(0, 1/sqrt(dim)), the dot product has "
        "variance 1.",
        claim_zh="若 q 与 k 的分量取自 N(0, 1/sqrt(dim))，则点积的方差为 1。",
        expect=tuple(
            Expect(f"variance of q k, 1/sqrt(dim) the variance, dim={d}", 1.0, 0.05)
            for d in (64, 512)
        ),
        holds="Right if 1/sqrt(dim) is the variance, as in the notation N(mean, variance). Read "
        "as a standard deviation, which is how most initialisers are written, it gives 1/dim "
        "({variance of q k, 1/sqrt(dim) the std, dim=64:.4f} at 64).",
        law="Components of variance v give dim v^2.",
        experiment=initial_variance,
    ),
    Claim(
        id="toy-512",
        claim="Random tensors of shape (2, 3, 512) print a standard deviation of about 22.6 for "
        "the raw scores and about 1.0 for the scaled ones.",
        claim_zh="形状为 (2, 3, 512) 的随机张量，打印出的未缩放分数标准差约为 22.6，缩放后约为 "
        "1.0。",
        expect=(
            Expect("std raw d_k=512, mean of tensors", 22.6, 1.1),
            Expect("std scaled d_k=512, mean of tensors", 1.0, 0.05),
        ),
        holds="The averages agree ({std raw d_k=512, mean of tensors} and {std scaled d_k=512, "
        "mean of tensors}), but one tensor has only 18 scores: it prints less than 20 with "
        "probability {share of tensors with a std below 20:.2f} and more than 25 with probability "
        "{share of tensors with a std above 25:.2f}.",
        law="The standard deviation of 18 dependent scores is {std raw d_k=512, mean of tensors} "
        "on average.",
        experiment=toy_512,
    ),
    Claim(
        id="toy-var",
        claim="For matrices of 100 x d_k with d_k = 64, 128, 256, 512 the printed variance of the "
        "raw scores is d_k, that of the scaled scores 1.",
        claim_zh="对 100 x d_k 的矩阵（d_k = 64、128、256、512），打印出的未缩放分数方差为 d_k"
        "，缩"
        "放后为 1。",
        expect=tuple(
            Expect(
                f"variance {kind} d_k={d}",
                float(d if kind == "raw" else 1),
                0.05 * (d if kind == "raw" else 1),
            )
            for d in (64, 128, 256, 512)
            for kind in ("raw", "scaled")
        ),
        holds="The means are d_k and 1. A single printed value is typically off by {std of one "
        "printed variance over d_k, d_k=64:.1%} at d_k = 64, where 10 000 independent scores "
        "would give 1.4 %: scores share rows and columns, which makes the relative variance about "
        "2/n^2 + 4/(n d_k).",
        law="The variance is d_k times the product of the components' variances.",
        experiment=toy_variance,
    ),
    Claim(
        id="glorot-unit-var",
        claim="Components of q and k of variance 1 agree with Xavier/Glorot initialisation.",
        claim_zh="q、k 分量方差为 1 的假设与 Xavier/Glorot 初始化一致。",
        expect=tuple(
            Expect(
                f"variance of a component of q, Glorot, d_k={d}",
                1.0,
                0.05,
                law=2 * 512 / (512 + d) if d < 512 else None,  # where it is the claim
            )
            for d in (16, 64, 512)
        ),
        holds="At d_model = 512 the variances are 1.",
        law="They agree only if d_k = d_model: for inputs of unit variance a component of q has "
        "variance 2 d_model/(d_model + d_k), {variance of a component of q, Glorot, d_k=16} at "
        "d_k = 16 and {variance of a component of q, Glorot, d_k=64} at 64 for d_model = 512, and "
        "the scaled scores its square ({variance of scaled scores, Glorot, d_k=64} at 64); one "
        "matrix for all heads gives 1, PyTorch's Linear 1/9 and MultiheadAttention 1/4.",
        experiment=glorot,
    ),
    Claim(
        id="sigma-law",
        claim="For components of variance sigma^2 the variance of q.k is dim sigma^2.",
        claim_zh="若分量的方差为 sigma^2，则 Var(Q K^T) = dim * sigma^2。",
        expect=(
            Expect("variance over dim sigma^2, sigma^2=1/4", 1.0, 0.05, law=0.25),
            Expect("variance over dim sigma^2, sigma^2=1", 1.0, 0.05),
            Expect("variance over dim sigma^2, sigma^2=4", 1.0, 0.05, law=4.0),
        ),
        holds="It is dim sigma^2.",
        law="It is dim sigma^4, since each product has a factor of variance sigma^2 from q and one "
        "from k; both agree at sigma = 1 alone.",
        experiment=sigma_law,
    ),
    Claim(
        id="products-grow",
        claim="In high dimension the dot product of two random vectors tends to grow, as in the "
        "curse of dimensionality.",
        claim_zh="高维空间中两个随机向量的点积倾向于增大，类似“维度灾难”。",
        expect=(Expect("exponent of |q k| in d_k", 0.5, 0.05),),
        holds="Its size does, with exponent {exponent of |q k| in d_k} in d_k, and in both signs: "
        "its mean stays 0 ({mean of q k over its std} standard deviations). What is known as the "
        "curse is the reverse: relative to the lengths of the vectors it shrinks, with exponent "
        "{exponent of |cosine| in d_k}, since random directions become orthogonal.",
        law="Its size has exponent {exponent of |q k| in d_k} in d_k.",
        experiment=product_growth,
    ),
    Claim(
        id="cosine-analogy",
        claim="Dividing by sqrt(dim) normalises like the division by both lengths in cosine "
        "similarity.",
        claim_zh="除以 sqrt(dim) 类似于余弦相似度中除以两个向量的模长。",
        expect=tuple(
            Expect(f"lengths product over sqrt(d_k), d_k={d}", 1.0, 0.1, law=_mean_lengths(d))
            for d in (16, 64, 512)
        ),
        holds="The two divisors are alike.",
        law="The product of the lengths is about d_k, not sqrt(d_k): cosines of random vectors "
        "have standard deviation 1/sqrt(d_k) ({std of cosines d_k=64} at 64), scaled scores have "
        "1. The cosine also divides out each vector's own length, and needs a temperature of its "
        "own to be selective.",
        experiment=cosine,
    ),
)
