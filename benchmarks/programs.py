"""Functions of the user: what their masks skip, and what they cost beside the plain call.

taskset -c 0 python -m benchmarks.programs

The attentions of docs/programs.md, on 4 heads of 2048 positions, go to that page. Contenders take
turns on the same arrays, and the shortest call of each counts. PyTorch's way to train such
functions on a CPU is the formula, composed of its operations; it is left out by name where torch
is not installed. `--check` measures small arrays once and writes nothing.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from datetime import date
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa
import sdpa_lab as lab
from benchmarks import machine
from benchmarks.beyond import quoted
from benchmarks.timing import QUICK, Effort, race
from sdpa_lab.tools.table import layout

Array = npt.NDArray[Any]
Options = dict[str, Any]
Call = Callable[[], Any]

PAGE = machine.ROOT / "docs" / "programs.md"
EFFORT = Effort(passes=1, rounds=3, turn=0.0, seconds=1.5)
HEADS, D = 4, 64
HEADER = ["", "visible", "none", "some", "all", "forward", "backward", "PyTorch"]


class Work(NamedTuple):
    """One attention; `composed` names PyTorch's formula in `FORMULAS`."""

    name: str
    options: Options
    composed: str = ""
    n_q: int | None = None
    """Queries, at the end of the sequence, where they are fewer than keys."""


# ------------------------------------------------------------------------------- functions


def own(b: Any, h: Any, q: Any, k: Any, document: Any) -> Any:
    return (document[q] == document[k]) & (q >= k)


def prefix_lm(b: Any, h: Any, q: Any, k: Any, length: Any) -> Any:
    return (k < length[b]) | (q >= k)


def neighbours(b: Any, h: Any, q: Any, k: Any, side: int = 32, reach: int = 6) -> Any:
    """Images of this width, of twice the height."""
    row = np.clip(q // side, reach, 2 * side - 1 - reach)
    column = np.clip(q % side, reach, side - 1 - reach)
    return (abs(row - k // side) <= reach) & (abs(column - k % side) <= reach)


def diffusion(half: int, size: int) -> Callable[..., Any]:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        block, other, noisy = q % half // size, k % half // size, k < half
        of_noisy = np.where(noisy, block == other, block > other)
        return np.where(q < half, of_noisy, ~noisy & (block >= other))

    return function


def ranges_of(distance: Array) -> Array:
    return np.minimum(4 * np.log2(1 + abs(distance)), 31).astype(int)


def relative(n: int) -> Callable[..., Any]:
    """T5's, by the logarithm of the distance."""
    ranges = ranges_of(np.arange(1 - n, n))

    def function(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
        return s + table[h, ranges[k - q + n - 1]]

    return function


def scalable(s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any) -> Any:
    return s * factor[h] * np.log(q + 1)


def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20 * np.tanh(s / 20)


def capped_alibi(s: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    return 20 * np.tanh(s / 20) - slopes[h] * (q - k)


def by_path(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, steps: Any) -> Any:
    return s + table[h, steps[q, k]]


def joined(b: Any, h: Any, q: Any, k: Any, steps: Any) -> Any:
    return steps[q, k] < 8


def tree(text: int) -> Callable[..., Any]:
    def function(b: Any, h: Any, q: Any, k: Any, branch: Any) -> Any:
        return (k < text) | branch[q - text, np.maximum(k - text, 0)]

    return function


def relu(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return np.log(np.maximum(s, 0))


def works(n: int) -> Iterator[Work]:
    """The attentions for a sequence of n positions, a multiple of 64."""
    rng = np.random.default_rng(0)
    document = np.repeat(np.arange(8), n // 8)
    yield Work("causal documents", {"mask_mod": own, "mask_args": (document,)})
    yield Work("prefix LM", {"mask_mod": prefix_lm, "mask_args": (np.array([n // 4]),)})
    yield Work("neighbourhoods, 13 x 13", {"mask_mod": neighbours})
    yield Work("block diffusion", {"mask_mod": diffusion(n // 2, n // 64)})
    table = rng.standard_normal((HEADS, 32))
    yield Work("T5 bias", {"score_mod": relative(n), "score_args": (table,)}, "relative")
    factor = {"score_mod": scalable, "score_args": (np.full(HEADS, 0.3),), "is_causal": True}
    yield Work("temperature of log n", factor)
    yield Work("softcap", {"score_mod": capped}, "softcap")
    slopes = {"score_args": (sdpa.bias.alibi(HEADS),), "is_causal": True}
    yield Work("softcap, ALiBi, causal", {"score_mod": capped_alibi, **slopes}, "alibi")
    place = np.arange(n) // 4  # groups of 4 on a line: the path leads through the groups
    steps = abs(place[:, None] - place).astype(np.uint16)
    table = rng.standard_normal((HEADS, n // 4))
    graph = {"score_mod": by_path, "score_args": (table, steps)}
    yield Work("bias of a graph", graph | {"mask_mod": joined, "mask_args": (steps,)})
    branch = np.eye(64, dtype=bool)
    for i in range(1, 64):
        branch[i] |= branch[(i - 1) // 2]
    options = {"mask_mod": tree(n - 64), "mask_args": (branch,), "query_offset": n - 64}
    yield Work("tree of 64 drafts", options, n_q=64)
    yield Work("relu", {"score_mod": relu})


# ------------------------------------------------------------------------------- calls


def operands(work: Work, n: int) -> list[Array]:
    """query, key, value and the gradient of the result."""
    rng, n_q = np.random.default_rng(1), work.n_q or n
    return [rng.standard_normal((HEADS, m, D), np.float32) for m in (n_q, n, n, n_q)]


def needed(options: Options) -> tuple[str, ...]:
    arguments = [a for a in options.get("score_args", ()) if a.dtype.kind == "f"]
    return ("query", "key", "value", *(["score_args"] if arguments else []))


def calls(arrays: list[Array], options: Options) -> tuple[Call, Call]:
    """Forward and backward, which has the forward's results."""
    query, key, value, grad = arrays
    saved = sdpa.attention_forward(query, key, value, **options)
    needs = needed(options)
    return (
        lambda: sdpa.attention_forward(query, key, value, **options),
        lambda: sdpa.attention_backward(grad, query, key, value, *saved, needs=needs, **options),
    )


FORMULAS: dict[str, Callable[..., Any]] = {
    "softcap": lambda torch, s, distance, ranges: 20 * torch.tanh(s / 20),
    "alibi": lambda torch, s, distance, ranges, slopes: torch.where(
        distance >= 0, 20 * torch.tanh(s / 20) - slopes[:, None, None] * distance, -torch.inf
    ),
    "relative": lambda torch, s, distance, ranges, table: (
        s + torch.nn.functional.embedding(ranges, table.T).permute(2, 0, 1)
    ),
}
"""Of the scores, the distances q - k and T5's ranges of them, all made once."""


def composed(torch: Any, work: Work, arrays: list[Array]) -> Call:
    """Forward and backward of the formula in PyTorch; out and the gradients."""
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays[:3]]
    given = work.options.get("score_args", ())
    args = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in given]
    grad, n = torch.tensor(arrays[3]), arrays[1].shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)
    positions = torch.tensor(distance), torch.tensor(ranges_of(distance))

    def call() -> list[Any]:
        query, key, value = leaves
        scores = query @ key.transpose(1, 2) / D**0.5
        scores = FORMULAS[work.composed](torch, scores, *positions, *args)
        out = torch.softmax(scores, -1) @ value
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *args], grad)]

    return call


# ------------------------------------------------------------------------------- table


def pattern(work: Work, arrays: list[Array]) -> tuple[float, ...]:
    """Shares of visible pairs, and of tiles that nobody, somebody and everybody sees."""
    kinds, _ = sdpa._core._pattern(*arrays[:2], **work.options)
    biased = sdpa.attention_weights(*arrays[:2], stage="biased", **masks_of(work.options))
    # 1 is part of a tile, 2 the whole of it.
    shares = [float((kinds == kind).mean()) for kind in (0, 1, 2)]
    return float(np.isfinite(biased).mean()), *shares


def masks_of(options: Options) -> Options:
    return {name: x for name, x in options.items() if not name.startswith("score")}


def measured(work: Work, n: int, effort: Effort, torch: Any) -> list[str]:
    """A row of the table, as `HEADER` names it; times are multiples of the plain call's."""
    arrays = operands(work, n)
    forward, backward = calls(arrays, work.options)
    plain_forward, plain_backward = calls(arrays, {})

    def ratio(other: Call, base: Call) -> float:
        times = race({"other": other, "base": base}, effort)
        return min(times["other"]) / min(times["base"])

    row = [f"{ratio(forward, plain_forward):.2f}", f"{ratio(backward, plain_backward):.2f}"]
    beside = ""
    if work.composed and torch:

        def both() -> None:
            saved = sdpa.attention_forward(*arrays[:3], **work.options)
            query, key, value, grad = arrays
            needs = needed(work.options)
            sdpa.attention_backward(grad, query, key, value, *saved, needs=needs, **work.options)

        beside = f"{ratio(composed(torch, work, arrays), both):.1f}"
    shares = [f"{share:.3f}" for share in pattern(work, arrays)]
    return [work.name, *shares, *row, beside]


def library() -> Any:
    """PyTorch on one thread, or None."""
    try:
        torch = import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def table(n: int, effort: Effort) -> str:
    """The text that the page has."""
    config, torch = lab.machine(), library()
    cpus = len(os.sched_getaffinity(0))
    version = f"torch {torch.__version__}" if torch else "torch is not installed"
    isa = config["sdpa"]["isa"]
    head = [
        f"{config['processor']}, {machine.cpu()}, kernels {isa}, CPUs: {cpus}",
        f"measured {date.today()}, numpy {np.__version__}, {version}",
        "",
    ]
    rows: list[str | list[str]] = [measured(work, n, effort, torch) for work in works(n)]
    return "\n".join([*head, layout(HEADER, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs")
    parser.add_argument("--check", action="store_true", help="small arrays once; write nothing")
    if parser.parse_args().check:
        print(table(256, QUICK))
        return
    text = table(2048, EFFORT)
    print(text)
    PAGE.write_text(quoted(PAGE.read_text(encoding="utf-8"), "times", text), encoding="utf-8")


if __name__ == "__main__":
    main()
