"""A language model's speed with attention by sdpa, by NumPy and by PyTorch, and where time goes.

python -m benchmarks.models [--lengths 512 2048 8192] [--save build/bench/models.json]

SmolLM2-135M-Instruct (`make models`) reads a prompt, then goes on for some tokens: everything but
attention is the same NumPy. Each contender and length runs in a separate process, whose resident
memory at its highest is shown. Contenders that are not installed are left out by name.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import sdpa
from benchmarks.machine import ROOT
from sdpa_lab import smollm2
from sdpa_lab.corpus import docstrings
from sdpa_lab.tools.progress import progress

CONTENDERS = ("sdpa", "NumPy", "PyTorch", "PyTorch, 1")
WRITTEN = 32
"""Tokens written after the prompt."""

Run = dict[str, Any]


def numpy_attention(layer: int, query: Any, cache: sdpa.KVCache) -> Any:
    """The formula, head by head: the scores of nine heads at 8192 tokens would be 2.4 GB."""
    key, value, offset = cache.key[0], cache.value[0], int(cache.query_offset[0])
    n, group = query.shape[2], smollm2.HEADS // smollm2.KEY_HEADS
    seen = np.tri(n, key.shape[1], offset, dtype=bool) if n > 1 else None
    out = np.empty_like(query)
    for head in range(smollm2.HEADS):
        scores = query[0, head] @ key[head // group].T
        scores *= np.float32(smollm2.D_K**-0.5)
        if seen is not None:
            scores[~seen] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out[0, head] = scores @ value[head // group]
    return out


def torch_attention(layer: int, query: Any, cache: sdpa.KVCache) -> Any:
    """PyTorch's function on the same arrays, without a copy."""
    import torch
    import torch.nn.functional as F

    operands = (torch.from_numpy(x) for x in (query, cache.key, cache.value))
    # A prompt begins with the first token, so that its mask is the triangle; one token sees all.
    causal = query.shape[2] > 1
    return F.scaled_dot_product_attention(*operands, is_causal=causal, enable_gqa=True).numpy()


ATTENTION: dict[str, smollm2.Attention] = {
    "sdpa": smollm2.attention,
    "NumPy": numpy_attention,
    "PyTorch": torch_attention,
    # On one thread: its threads and those of NumPy's BLAS, which follow one another, get in each
    # other's way.
    "PyTorch, 1": torch_attention,
}


def measure(contender: str, length: int) -> Run:
    """Seconds of the prompt and of each further token, and the part of attention in either."""
    function, spent = ATTENTION[contender], [0.0]
    if contender == "PyTorch, 1":
        import torch

        torch.set_num_threads(1)

    def timed(layer: int, query: Any, cache: sdpa.KVCache) -> Any:
        start = time.perf_counter()
        out = function(layer, query, cache)
        spent[0] += time.perf_counter() - start
        return out

    model = smollm2.SmolLM2.load()
    prompt = text(model, length)
    _read(model, prompt[:64], timed, 2)  # threads, code, first pages
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent[0] = 0.0
    prefill, steps, inside = _read(model, prompt, timed, WRITTEN, spent)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "contender": contender,
        "length": length,
        "prefill": prefill,
        "prefill attention": inside,
        "token": float(np.median(steps)),
        "token attention": (spent[0] - inside) / WRITTEN,
        "peak": 1024 * peak,
        "before": 1024 * loaded,
    }


def _read(
    model: smollm2.SmolLM2,
    prompt: list[int],
    attention: smollm2.Attention,
    written: int,
    spent: list[float] | None = None,
) -> tuple[float, list[float], float]:
    caches = model.caches(len(prompt) + written)
    start = time.perf_counter()
    logits = model.logits(model.hidden(prompt, caches, attention=attention)[-1])
    prefill, inside = time.perf_counter() - start, spent[0] if spent else 0.0
    steps = []
    for _ in range(written):
        start = time.perf_counter()
        hidden = model.hidden([int(logits.argmax())], caches, attention=attention)
        logits = model.logits(hidden[-1])
        steps.append(time.perf_counter() - start)
    return prefill, steps, inside


def text(model: smollm2.SmolLM2, length: int) -> list[int]:
    """The first tokens of the standard library's docstrings."""
    source = docstrings()
    characters = "".join(source.alphabet[i] for i in source.test[: 8 * length])
    return model.tokens(characters)[:length]


def table(runs: list[Run]) -> str:
    """The figures, one line per length and contender."""
    lines = ["tokens  attention by   prompt s  in attention   tokens/s  in attention   peak MB"]
    for run in runs:
        lines.append(
            f"{run['length']:6d}  {run['contender']:13s} {run['prefill']:8.2f} "
            f"{run['prefill attention'] / run['prefill']:12.0%} {1 / run['token']:10.1f} "
            f"{run['token attention'] / run['token']:12.0%} {run['peak'] / 1e6:10.0f}"
        )
    return "\n".join(lines)


def profile(length: int) -> str:
    """Where the time of one token after `length` others goes, in ms, by the kind of work."""
    model = smollm2.SmolLM2.load()
    caches = model.caches(length + 16)
    model.hidden(text(model, length), caches)
    model.hidden([1], caches)  # the caches' last position is now a single one
    x = np.zeros((1, smollm2.D_MODEL), np.float32)
    layers, query = model.layers, np.zeros((1, smollm2.HEADS, 1, smollm2.D_K), np.float32)
    heads = smollm2.HEADS + smollm2.KEY_HEADS
    wide = np.zeros((1, layers[0].down.shape[1]), np.float32)
    turned = np.zeros((heads, 1, smollm2.D_K), np.float32)
    works: dict[str, Callable[[], Any]] = {
        "linear layers": lambda: [
            (x @ layer.qkv.T, x @ layer.out.T, x @ layer.gate_up.T, wide @ layer.down.T)
            for layer in layers
        ],
        "logits": lambda: model.logits(x[0]),
        "attention": lambda: [smollm2.attention(0, query, cache) for cache in caches],
        "rotary positions": lambda: [
            sdpa.rotary_embedding(turned, [length], base=smollm2.BASE, interleaved=True)
            for _ in layers
        ],
        "one token in all": lambda: model.logits(model.hidden([1], caches)),
    }
    best = {name: min(_seconds(call) for _ in range(9)) for name, call in works.items()}
    return "\n".join(f"{name:18s} {1e3 * seconds:7.2f} ms" for name, seconds in best.items())


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192 - WRITTEN])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--save", type=Path, help="write the figures there; others are kept")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=int, help="tokens before the one that is profiled")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    if options.profile:
        print(profile(options.profile))
        return
    chosen = [name for name in options.only if find_spec("torch") or "PyTorch" not in name]
    for name in set(options.only) - set(chosen):
        print(f"{name} is not installed and left out", file=sys.stderr)
    runs = []
    with progress("runs", len(chosen) * len(options.lengths)) as move:
        for length in options.lengths:
            for name in chosen:
                command = [sys.executable, "-m", "benchmarks.models", "--one", name, str(length)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
                runs.append(json.loads(done.stdout))
                move(1)
    print(table(runs))
    if options.save:
        kept = json.loads(options.save.read_text()) if options.save.exists() else []
        mine = {(run["contender"], run["length"]) for run in runs}
        kept = [run for run in kept if (run["contender"], run["length"]) not in mine]
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(kept + runs, indent=1))


if __name__ == "__main__":
    main()
