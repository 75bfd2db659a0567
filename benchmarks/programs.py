"""Functions of the user: what their masks skip, and what they cost beside the plain call.

python -m benchmarks --only programs --threads 1 --json programs.json
python -m benchmarks.programs programs.json

The attentions of docs/programs.md, and a few that are parts of them. The second command writes that
page's table from the first one's figures; it runs the same kernels. PyTorch's way to train such
functions on a CPU is the formula, composed of its operations.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sdpa
from benchmarks import machine
from benchmarks.beyond import quoted
from benchmarks.contenders import (
    Array,
    Contender,
    Contenders,
    Setting,
    Work,
    check,
    flops,
    operands,
)
from benchmarks.peers import Operands
from benchmarks.results import Results, Timing, load
from sdpa_lab.tools.clock import Call
from sdpa_lab.tools.table import layout

Options = dict[str, Any]

PAGE = machine.ROOT / "docs" / "programs.md"
D = 64
HEADER = ["", "visible", "none", "some", "all", "forward", "backward", "option", "PyTorch"]


class Attention(NamedTuple):
    """One attention over `heads` of n keys; `composed` names PyTorch's formula in `FORMULAS`."""

    name: str
    heads: int
    n: int
    options: Options
    option: Options | None = None
    """The options that compute the same, where there are some."""
    composed: str = ""
    n_q: int | None = None
    """Queries, at the end of the sequence, where they are fewer than keys."""

    def operands(self) -> Operands:
        x = operands(self.heads, self.n, D)
        rows = slice(-self.n_q if self.n_q else 0, None)
        return x._replace(query=x.query[..., rows, :], grad_out=x.grad_out[..., rows, :])


# ------------------------------------------------------------------------------- functions


def as_it_is(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s


def alibi(slopes: Array) -> Callable[..., Any]:
    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    return function


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


def of_scores(heads: int, n: int) -> Iterator[Attention]:
    """Those whose function makes another score."""
    rng = np.random.default_rng(0)
    slopes = sdpa.bias.alibi(heads).astype(np.float32)
    yield Attention("score as it is", heads, n, {"score_mod": as_it_is})
    yield Attention("ALiBi", heads, n, {"score_mod": alibi(slopes)})
    yield Attention("softcap", heads, n, {"score_mod": capped}, {"softcap": 20.0}, "softcap")
    causal = {"is_causal": True}
    yield Attention(
        "softcap, ALiBi, causal", heads, n,
        {"score_mod": capped_alibi, "score_args": (slopes,)} | causal,
        {"softcap": 20.0, "alibi_slopes": slopes} | causal, "alibi",
    )  # fmt: skip
    table = rng.standard_normal((heads, 32), np.float32)
    options = {"score_mod": relative(n), "score_args": (table,)}
    yield Attention("T5 bias", heads, n, options, composed="relative")
    factor = np.full(heads, 0.3, np.float32)
    options = {"score_mod": scalable, "score_args": (factor,)} | causal
    yield Attention("temperature of log n", heads, n, options)
    yield Attention("relu", heads, n, {"score_mod": relu})


MASKS = ("causal documents", "prefix LM", "neighbourhoods, 13 x 13", "block diffusion")
"""Those that are known for a whole tile before it is computed."""


def of_pairs(heads: int, n: int) -> Iterator[Attention]:
    """Those whose function says which pairs attend; n is a multiple of 64."""
    rng = np.random.default_rng(0)
    options: dict[str, Options] = {
        "causal documents": {"mask_mod": own, "mask_args": (np.repeat(np.arange(8), n // 8),)},
        "prefix LM": {"mask_mod": prefix_lm, "mask_args": (np.array([n // 4]),)},
        "neighbourhoods, 13 x 13": {"mask_mod": neighbours},
        "block diffusion": {"mask_mod": diffusion(n // 2, n // 64)},
    }
    for name in MASKS:
        yield Attention(name, heads, n, options[name])
    place = np.arange(n) // 4  # groups of 4 on a line: the path leads through the groups
    steps = abs(place[:, None] - place).astype(np.uint16)
    table = rng.standard_normal((heads, n // 4), np.float32)
    graph = {"score_mod": by_path, "score_args": (table, steps)}
    graph |= {"mask_mod": joined, "mask_args": (steps,)}
    yield Attention("bias of a graph", heads, n, graph)
    branch = np.eye(64, dtype=bool)
    for i in range(1, 64):
        branch[i] |= branch[(i - 1) // 2]
    drafts = {"mask_mod": tree(n - 64), "mask_args": (branch,), "query_offset": n - 64}
    yield Attention("tree of 64 drafts", heads, n, drafts, n_q=64)


def attentions(setting: Setting) -> Iterator[Attention]:
    """All of them, in the order of the table."""
    yield from of_scores(8, setting.length(1024))
    yield from of_pairs(4, setting.length(2048))


# ------------------------------------------------------------------------------- calls


def calls(x: Operands, options: Options) -> dict[str, Call]:
    """Forward, backward with the forward's results, and both; with gradients of float arguments."""
    query, key, value, grad, _ = x
    saved = sdpa.attention_forward(query, key, value, **options)
    floats = any(a.dtype.kind == "f" for a in options.get("score_args", ()))
    needs = ("query", "key", "value", *(["score_args"] if floats else []))

    def backward(out: Array, lse: Array) -> sdpa.AttentionGradients:
        return sdpa.attention_backward(grad, query, key, value, out, lse, needs=needs, **options)

    def both() -> object:
        found = sdpa.attention_forward(query, key, value, **options)
        return found, backward(*found)

    return {
        "forward": lambda: sdpa.attention_forward(query, key, value, **options),
        "backward": lambda: backward(*saved),
        "both": both,
    }


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


def composed(torch: Any, attention: Attention, x: Operands) -> Call:
    """Forward and backward of the formula in PyTorch; out and the gradients."""
    leaves = [torch.tensor(a, requires_grad=True) for a in x[:3]]
    given = attention.options.get("score_args", ())
    args = [torch.tensor(a, requires_grad=True) for a in given]
    grad, n = torch.tensor(x.grad_out), attention.n
    distance = np.arange(n)[:, None] - np.arange(n)
    positions = torch.tensor(distance), torch.tensor(ranges_of(distance))

    def call() -> list[Any]:
        query, key, value = leaves
        scores = query @ key.transpose(-1, -2) / D**0.5
        scores = FORMULAS[attention.composed](torch, scores, *positions, *args)
        out = torch.softmax(scores, -1) @ value
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *args], grad)]

    return call


def tiles(attention: Attention) -> tuple[float, ...]:
    """Shares of tiles that nobody, somebody and everybody sees."""
    x = attention.operands()
    kinds, _ = sdpa._core._pattern(x.query[0], x.key[0], **attention.options)
    return tuple(float((kinds == kind).mean()) for kind in (0, 1, 2))


def pattern(attention: Attention) -> tuple[float, ...]:
    """The share of visible pairs, and those of tiles."""
    x, options = attention.operands(), attention.options
    masks = {name: given for name, given in options.items() if not name.startswith("score")}
    biased = sdpa.attention_weights(x.query[0], x.key[0], stage="biased", **masks)
    return float(np.isfinite(biased).mean()), *tiles(attention)


def programs(setting: Setting) -> Iterator[Work]:
    """Each attention beside the plain call, its options and PyTorch's formula.

    The FLOPs are those of the tiles that somebody sees.
    """

    def ours(attention: Attention, direction: str) -> Contenders:
        x = attention.operands()
        count = flops(x) * {"forward": 1, "backward": 2.5, "both": 3.5}[direction]
        found = {"plain": Contender(calls(x, {})[direction], count)}
        count *= 1 - tiles(attention)[0]
        found["sdpa"] = Contender(calls(x, attention.options)[direction], count)
        if attention.option is not None:
            found["option"] = Contender(calls(x, attention.option)[direction], count)
            results = (sdpa.attention(*x[:3], **a) for a in (attention.option, attention.options))
            check("option", *results)
        return found

    def beside_torch(attention: Attention) -> Contenders:
        found = ours(attention, "both")
        if setting.torch() is None:
            return found
        import torch

        x = attention.operands()
        theirs: Any = composed(torch, attention, x)
        check("torch", theirs()[0], sdpa.attention(*x[:3], **attention.options))
        return found | {"torch": found["sdpa"]._replace(call=theirs)}

    for each in attentions(setting):
        for to in ("forward", "backward"):
            yield Work("programs", f"{each.name} {to}", lambda a=each, to=to: ours(a, to))
        if each.composed:
            yield Work("programs", f"{each.name} both", lambda a=each: beside_torch(a))


# ------------------------------------------------------------------------------- page


def row(attention: Attention, results: Results) -> list[str]:
    """A line of the table, as `HEADER` names it."""
    shares = [f"{share:.3f}" for share in pattern(attention)]

    def ratio(direction: str, one: str, other: str, digits: int = 2) -> str:
        found: dict[str, Timing] = results.get(1, "programs", f"{attention.name} {direction}")
        known = one in found and other in found
        return f"{found[one].seconds / found[other].seconds:.{digits}f}" if known else ""

    times = [ratio(to, "sdpa", "plain") for to in ("forward", "backward")]
    option = [ratio(to, "option", "plain") for to in ("forward", "backward")]
    beside = " / ".join(option) if attention.option else ""
    return [attention.name, *shares, *times, beside, ratio("both", "torch", "sdpa", 1)]


def table(results: Results) -> str:
    """The text that the page has."""
    run = results.runs[-1]
    names = (results.processor, results.cpu, f"kernels {results.isa}", "one thread")
    versions = (
        f"{name} {run['peers'][name]}" for name in ("numpy", "torch") if name in run["peers"]
    )
    rows: list[str | list[str]] = [row(each, results) for each in attentions(Setting(1, []))]
    head = [", ".join(names), ", ".join([f"measured {run['date']}", *versions]), ""]
    return "\n".join([*head, layout(HEADER, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs")
    parser.add_argument("json", type=Path, nargs="+", help="of the group `programs`, by --json")
    results = load(parser.parse_args().json)
    isa = sdpa.show_config("dicts")["isa"]
    if results.isa != isa:
        raise SystemExit(f"the figures are of {results.isa}, the tiles would be of {isa}")
    text = table(results)
    print(text)
    PAGE.write_text(quoted(PAGE.read_text(encoding="utf-8"), "times", text), encoding="utf-8")


if __name__ == "__main__":
    main()
