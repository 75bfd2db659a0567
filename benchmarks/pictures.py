"""The pictures of docs/models.md, from the models themselves and from saved figures.

python -m benchmarks.pictures [--folder docs/models]

Needs `make models` and espeak-ng; speeds are drawn from models.json and embeddings.json there, as
`python -m benchmarks.models --save` and `python -m benchmarks.embeddings --save` write them.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import sdpa
from benchmarks.machine import ROOT
from sdpa_lab import smollm2, style

SENTENCE = "The cat sat on the mat because the cat was tired"
HEADS = ((0, 3), (10, 4), (20, 0))
"""(layer, head) of SmolLM2 that are shown."""
SPEECH = "Please open the window. It is too warm in this room."


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@style.plot
def plot_reaction() -> Any:
    """The head that maps atoms: weights between the atoms of both sides, and what was chosen."""
    reactions = example("reactions")
    reaction = reactions.PUBLISHED[0]
    result = reactions.mapped(reactions.Albert.load(), reaction)
    sides = [
        [token for token in reactions.TOKEN.findall(side) if reactions.is_atom(token)]
        for side in reaction.split(">>")
    ]
    figure, axes = style.subplots(size=(8.0, 4.2))
    reactants, product = sides
    sdpa.plot.weights(result.weights, query_tokens=product, key_tokens=reactants, ax=axes)
    rows, columns, _ = zip(*result.pairs, strict=True)
    axes.plot(columns, rows, "o", mfc="none", mec=style.VERMILION, ms=11, label="mapped")
    figure.axes[-1].set_ylabel("weight, both directions")
    axes.set(xlabel="atoms of the reactants", ylabel="atoms of the product")
    axes.set_title(f"{reaction}\nlayer 10, head 5; confidence {result.confidence:.3f}")
    axes.grid(visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2))
    return figure


@style.plot
def plot_speech() -> Any:
    """A waveform with the words where they were heard, and where the alignment heads looked."""
    whisper = example("whisper")
    model = whisper.Whisper.load()
    with tempfile.TemporaryDirectory() as folder:
        whisper.spoken(SPEECH, Path(folder) / "a.wav")
        samples = whisper.recording(Path(folder) / "a.wav")
    memory = model.memory(model.encoded(whisper.log_mel(samples)))
    tokens, queries = model.decoded(memory)
    frames = -(-len(samples) * whisper.FRAMES // whisper.RATE)
    gains = model.alignment(queries, memory, frames)
    starts = whisper.path(gains) / whisper.FRAMES
    figure, (above, below) = style.subplots(2, 1, size=(9.0, 3.0))
    width = whisper.RATE // 100
    parts = samples[: len(samples) // width * width].reshape(-1, width)
    seconds = np.arange(len(parts)) / 100
    above.fill_between(seconds, parts.min(axis=1), parts.max(axis=1), color=style.SKY, linewidth=0)
    for i, word in enumerate(model.timed(tokens, starts)):
        above.axvline(word.start, color=style.VERMILION, linewidth=0.8)
        high = samples.max() * (1.05 + 0.17 * (i % 3))
        above.text(word.start, high, f" {word.text}", fontsize=8, va="bottom")
    above.set(xlim=(0, seconds[-1]), ylim=(samples.min(), 1.6 * samples.max()))
    above.set(ylabel="sound pressure")
    names = [model.tokenizer.decode([token]) for token in tokens]
    extent = (0, frames / whisper.FRAMES, len(gains) - 0.5, -0.5)
    below.imshow(gains, aspect="auto", extent=extent, interpolation="nearest")
    below.step(starts, np.arange(len(starts)), where="post", color=style.VERMILION)
    below.set_yticks(range(len(names) + 1), [*names, "(end)"], fontsize=7)
    below.set(xlabel="seconds", xlim=(0, seconds[-1]))
    below.grid(visible=False)
    return figure


@style.plot
def plot_heads() -> Any:
    """What three heads of the language model look at in one sentence."""
    model = smollm2.SmolLM2.load()
    tokens = model.tokens(SENTENCE)
    found: dict[tuple[int, int], Any] = {}

    def attend(layer: int, query: Any, cache: sdpa.KVCache) -> Any:
        for number, head in HEADS:
            if number == layer:
                key = cache.key[0, head // 3]
                found[number, head] = sdpa.attention_weights(query[0, head], key, is_causal=True)
        return smollm2.attention(layer, query, cache)

    model.hidden(tokens, model.caches(len(tokens)), attention=attend)
    names = [model.text([token]) for token in tokens]
    weights = np.stack([found[place] for place in HEADS])
    figure = sdpa.plot.weights(weights, query_tokens=names, key_tokens=names)
    for axes, place in zip(figure.axes, HEADS, strict=False):  # the last is the bar of colours
        axes.set_title(f"layer {place[0]}, head {place[1]}")
        axes.grid(visible=False)
    return figure


@style.plot
def plot_speed(runs: list[dict[str, Any]]) -> Any:
    """Prompt and tokens per second by length and by who computes attention."""
    figure, (left, right) = style.subplots(1, 2, size=(4.6, 3.4))
    contenders = list(dict.fromkeys(run["contender"] for run in runs))
    lengths = sorted({run["length"] for run in runs})
    for i, name in enumerate(contenders):
        own = {run["length"]: run for run in runs if run["contender"] == name}
        at = np.array([lengths.index(n) for n in own]) + 0.2 * (i - 1.5)
        color = style.COLORS[i]
        left.bar(at, [n / own[n]["prefill"] for n in own], 0.18, color=color, label=name)
        right.bar(at, [1 / own[n]["token"] for n in own], 0.18, color=color)
    for axes, label in (
        (left, "tokens of the prompt read, a second"),
        (right, "written, a second"),
    ):
        axes.set_xticks(range(len(lengths)), map(str, lengths))
        axes.set(xlabel="tokens before", ylabel=label)
    left.legend(title="attention by")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "models")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"reaction": plot_reaction(), "speech": plot_speech(), "heads": plot_heads()}
    if (folder / "models.json").exists():
        figures["speed"] = plot_speed(json.loads((folder / "models.json").read_text()))
    for name, figure in figures.items():
        path = folder / f"{name}.svg"
        path.write_text(style.svg(figure), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
