"""Sums over a Gaussian kernel beside the formula, SciPy, scikit-learn and POT, on one core.

taskset -c 0 python -m benchmarks.kernel_regression speed    seconds and differences
python -m benchmarks.kernel_regression digits                errors by distance, and the picture

Both go to docs/kernel_regression.md. Contenders take turns on the same points, and the shortest
call of each counts. `off by` is the largest difference from the formula, the float64 matrix of all
pairs from SciPy's cdist, which has its turn, too. Peers that are not installed are left out by
name: pip install '.[lab]' pot. `speed --check` measures small sums once and writes nothing.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from datetime import date
from importlib import import_module, metadata
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa_lab as lab
from benchmarks import machine
from benchmarks.beyond import quoted
from benchmarks.pictures import example
from benchmarks.timing import QUICK, Effort, race
from sdpa_lab.tools.table import layout

Array = npt.NDArray[Any]
Calls = dict[str, Callable[[], Array]]

PAGE = machine.ROOT / "docs" / "kernel_regression.md"
PICTURE = machine.ROOT / "docs" / "kernel_regression" / "regression.svg"
EFFORT = Effort(passes=1, rounds=3, turn=0.0, seconds=4.0)
PEERS = ("scipy", "scikit-learn", "pot")
H = 0.3
"""The bandwidth, but for densities, which have that of Scott's rule."""
REG, ITERATIONS = 0.5, 20
"""Of Sinkhorn."""


class Work(NamedTuple):
    """One sum; the first contender is sdpa, the second the formula."""

    name: str
    calls: Calls


def optional(name: str) -> Any:
    """A module, or None where it is not installed."""
    # POT imports every library of tensors that it finds, unless it is told not to.
    for backend in ("PYTORCH", "JAX", "CUPY", "TENSORFLOW"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")
    try:
        return import_module(name)
    except ImportError:
        return None


def kernel(x: Array, y: Array, h: float) -> Array:
    return import_module("scipy.spatial.distance").cdist(x, y, "sqeuclidean") / (-2 * h**2)


def works(sums: Any, small: bool) -> Iterator[Work]:
    """`sums`: examples/kernel_regression.py."""
    rng = np.random.default_rng(0)

    def normal(n: int, d: int) -> Array:
        return rng.standard_normal((n // 20 if small else n, d))

    for d in (2, 10):
        x, y = normal(4000, d), normal(4000, d)
        yield Work(f"log density, 4000 x 4000, d = {d}", density(sums, x, y))
    x, y, values, grad = (normal(4000, d) for d in (3, 3, 1, 1))
    yield Work("smoothing and gradients, 4000 x 4000, d = 3", smoothing(sums, x, y, values, grad))
    x, y = normal(1000, 2), normal(1000, 2) / 2 + 1
    yield Work(f"Sinkhorn, 1000 x 1000, d = 2, {ITERATIONS} iterations", transport(sums, x, y))
    yield Work("mean shift, 2000 points, d = 2, 10 steps", modes(sums, normal(2000, 2)))
    states, patterns = normal(1000, 64), normal(4000, 64)
    yield Work("Hopfield, 1000 states, 4000 patterns, d = 64", memory(sums, states, patterns))
    data, model = normal(3000, 3), normal(3000, 3)
    yield Work("E-step, 3000 x 3000, d = 3", drift(sums, data, model))


def density(sums: Any, x: Array, y: Array) -> Calls:
    n, d = y.shape
    # SciPy's bandwidth is a factor of the covariance, which is made 1.
    y = (y - y.mean(axis=0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(y.T))).T
    h = n ** (-1 / (d + 4))
    constant = np.log(n) + d * np.log(h * np.sqrt(2 * np.pi))

    def single() -> Array:
        q, k = x / h, y / h
        query, key = (a.astype(np.float32) for a in (sums.queries(q), sums.keys(k)))
        return sums.log_sum(query, key) - sums.half_square(q) - constant

    special = import_module("scipy.special")
    calls: Calls = {
        "sdpa": lambda: sums.log_density(x, y, h),
        "formula": lambda: special.logsumexp(kernel(x, y, h), axis=1) - constant,
        "sdpa, float32": single,
    }
    stats, neighbors = optional("scipy.stats"), optional("sklearn.neighbors")
    if stats:
        estimate = stats.gaussian_kde(y.T, bw_method=h)
        calls["SciPy logpdf"] = lambda: estimate.logpdf(x.T)
        calls["SciPy pdf"] = lambda: np.log(estimate(x.T))
    if neighbors:
        for name, rtol in (("scikit-learn", 0.0), ("scikit-learn, rtol=1e-4", 1e-4)):
            fitted = neighbors.KernelDensity(bandwidth=h, atol=0, rtol=rtol).fit(y)
            calls[name] = lambda fitted=fitted: fitted.score_samples(x)
    return calls


def smoothing(sums: Any, x: Array, y: Array, values: Array, grad: Array) -> Calls:
    """The gradients by x, y, values and the bandwidth in one vector; they need the result."""

    def mine() -> Array:
        found = sums.smooth_backward(grad, x, y, values, H)
        return np.concatenate([np.ravel(part) for part in found])

    def formula() -> Array:
        scores = kernel(x, y, H)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out = weights @ values
        slopes = weights * (grad @ values.T - (grad * out).sum(axis=1, keepdims=True))
        by_x = slopes @ y / H**2  # the slopes of a row sum to 0
        by_y = (slopes.T @ x - slopes.sum(axis=0)[:, None] * y) / H**2
        by_h = -2 * (slopes * scores).sum() / H
        parts = by_x, by_y, weights.T @ grad, by_h
        return np.concatenate([np.ravel(part) for part in parts])

    return {"sdpa": mine, "formula": formula}


def transport(sums: Any, x: Array, y: Array) -> Calls:
    """log u, up to a constant."""
    a, b = np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y))
    cost = -REG * kernel(x, y, np.sqrt(REG / 2))
    special, ot = import_module("scipy.special"), optional("ot")
    options = {"numItermax": ITERATIONS, "stopThr": 0.0, "warn": False, "log": True}

    def centred(log_u: Array) -> Array:
        return log_u - log_u.mean()

    def formula() -> Array:
        scores, log_u = kernel(x, y, np.sqrt(REG / 2)), np.zeros(len(x))
        for _ in range(ITERATIONS):
            log_v = np.log(b) - special.logsumexp(scores + log_u[:, None], axis=0)
            log_u = np.log(a) - special.logsumexp(scores + log_v, axis=1)
        return centred(log_u)

    calls: Calls = {
        "sdpa": lambda: centred(sums.sinkhorn(x, y, a, b, REG, ITERATIONS)[0]),
        "formula": formula,
    }
    if ot:

        def lazy() -> Array:
            # POT begins with its first points: theirs are our second ones.
            found = ot.bregman.empirical_sinkhorn(
                y, x, REG, b, a, isLazy=True, numIterMax=ITERATIONS, stopThr=0.0, warn=False
            )
            return centred(found[1])

        def plain(method: str) -> Array:
            return centred(np.log(ot.sinkhorn(a, b, cost, REG, method, **options)[1]["u"]))

        calls["POT sinkhorn_log"] = lambda: plain("sinkhorn_log")
        calls["POT, lazy"] = lazy
        calls["POT sinkhorn, no logarithms"] = lambda: plain("sinkhorn")
    return calls


def modes(sums: Any, y: Array) -> Calls:
    def formula() -> Array:
        moved = y
        for _ in range(10):
            weights = np.exp(kernel(moved, y, H))
            moved = weights @ y / weights.sum(axis=1, keepdims=True)
        return moved

    return {"sdpa": lambda: sums.mean_shift(y, H, 10), "formula": formula}


def memory(sums: Any, states: Array, patterns: Array) -> Calls:
    special = import_module("scipy.special")
    return {
        "sdpa": lambda: sums.retrieve(states, patterns, 0.5)[0],
        "formula": lambda: special.softmax(0.5 * states @ patterns.T, axis=1) @ patterns,
    }


def drift(sums: Any, data: Array, model: Array) -> Calls:
    """P1, P^T 1 and P X in one vector."""
    variance, outliers = H**2, 0.1

    def formula() -> Array:
        weights = np.exp(kernel(data, model, H))
        constant = (2 * np.pi * variance) ** 1.5 * outliers / (1 - outliers)
        weights /= weights.sum(axis=1, keepdims=True) + constant * len(model) / len(data)
        parts = weights.sum(axis=0), weights.sum(axis=1), weights.T @ data
        return np.concatenate([np.ravel(part) for part in parts])

    def mine() -> Array:
        parts = sums.e_step(data, model, variance, outliers)
        return np.concatenate([np.ravel(part) for part in parts])

    return {"sdpa": mine, "formula": formula}


def measured(work: Work, effort: Effort) -> list[list[str]]:
    """Rows of the table: contender, milliseconds, how many times sdpa's, difference."""
    expected = work.calls["formula"]()
    best = {name: min(times) for name, times in race(work.calls, effort).items()}
    rows = []
    for name, call in work.calls.items():
        off = abs(call() - expected).max()
        ratio = best[name] / best["sdpa"]
        rows.append(
            [
                name,
                f"{1e3 * best[name]:.3g}",
                f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                "" if name == "formula" else f"{off:.0e}",
            ]
        )
    return rows


def table(effort: Effort, small: bool) -> str:
    """The text that the page has."""
    config = lab.machine()
    cpus = len(os.sched_getaffinity(0))
    versions = []
    for name in ("numpy", *PEERS):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} is not installed")
    isa = config["sdpa"]["isa"]
    lines: list[str | list[str]] = []
    for work in works(example("kernel_regression"), small):
        lines += ["", f"{work.name}", *measured(work, effort)]
    head = [
        f"{config['processor']}, {machine.cpu()}, kernels {isa}, CPUs: {cpus}",
        f"measured {date.today()}, {', '.join(versions)}",
        "",
    ]
    return "\n".join([*head, layout(["", "ms", "times sdpa's", "off by"], lines)])


def write(what: str, text: str) -> None:
    """Print a table and put it into its block of the page."""
    print(text)
    PAGE.write_text(quoted(PAGE.read_text(encoding="utf-8"), what, text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_regression")
    parser.add_argument("what", choices=("speed", "digits"))
    parser.add_argument("--check", action="store_true", help="small sums once; write nothing")
    options = parser.parse_args()
    if options.what == "digits":
        from sdpa_lab.report.why import picture

        rounding = lab.kernel_rounding()
        write("rounding", str(rounding))
        figure = lab.plot_kernel_regression(lab.kernel_smoothing(), rounding)
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(picture(figure, "en"), encoding="utf-8")
    elif options.check:
        print(table(QUICK, small=True))
    else:
        write("times", table(EFFORT, small=False))


if __name__ == "__main__":
    main()
