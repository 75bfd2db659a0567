"""Read GGUF, the format of llama.cpp's language models: metadata, and tensors as float32.

Version 3, as ggml's docs/gguf.md describes it: a header, named and typed values, a list of tensors,
and their data, aligned. Of the quantised types those of the known models are read, Q4_1 and Q8_0:
blocks of 32 weights with a factor, and in Q4_1 an offset.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32
"""Of the data, where the field general.alignment does not say otherwise."""

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
"""Types of values."""

BLOCK = 32
Q4_1 = np.dtype([("factor", "<f2"), ("offset", "<f2"), ("weights", "u1", BLOCK // 2)])
Q8_0 = np.dtype([("factor", "<f2"), ("weights", "i1", BLOCK)])
TENSORS: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 3: Q4_1, 8: Q8_0}
"""Types of tensors that are read."""


class Gguf(NamedTuple):
    """What a file holds."""

    fields: dict[str, Any]
    """Numbers, strings, booleans and lists of them."""
    tensors: dict[str, Floats]
    """Weights; those of a linear layer are (out, in)."""


def parse(content: bytes) -> Gguf:
    """Read a whole file.

    Parameters
    ----------
    content : bytes

    Returns
    -------
    Gguf

    Raises
    ------
    ValueError
        It is not GGUF of version 3, it ends too early, or a tensor has a type that is not read.

    Examples
    --------
    >>> from sdpa_lab.gguf import parse
    >>> parse(b"GGUF" + bytes([3]) + 19 * bytes(1))
    Gguf(fields={}, tensors={})
    """
    if content[:4] != MAGIC:
        raise ValueError(f"expected a file that begins with {MAGIC!r}, got {content[:4]!r}")
    reader = _Reader(content, len(MAGIC))
    version, tensors, fields = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version != VERSION:
        raise ValueError(f"expected GGUF version {VERSION}, got {version}")
    found = {reader.string(): reader.value(reader.number("I")) for _ in range(fields)}
    listed = [reader.tensor() for _ in range(tensors)]
    alignment = found.get("general.alignment", ALIGNMENT)
    start = -(-reader.at // alignment) * alignment
    return Gguf(found, {place.name: _weights(content, start, place) for place in listed})


class _Place(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class _Reader:
    def __init__(self, content: bytes, at: int) -> None:
        self.content, self.at = content, at

    def number(self, letter: str) -> Any:
        try:
            (value,) = struct.unpack_from(f"<{letter}", self.content, self.at)
        except struct.error as error:
            raise ValueError(f"the file ends at byte {len(self.content)}") from error
        self.at += struct.calcsize(f"<{letter}")
        return value

    def string(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.content[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, size = self.number("I"), self.number("Q")
            return [self.value(kind) for _ in range(size)]
        if kind not in SCALARS:
            raise ValueError(f"expected a value of type 0 to 12, got {kind}")
        return self.number(SCALARS[kind])

    def tensor(self) -> _Place:
        name = self.string()
        # The fastest axis comes first.
        shape = tuple(self.number("Q") for _ in range(self.number("I")))[::-1]
        return _Place(name, shape, self.number("I"), self.number("Q"))


def _weights(content: bytes, start: int, place: _Place) -> Floats:
    if place.type not in TENSORS:
        raise ValueError(f"{place.name}: expected a type of {sorted(TENSORS)}, got {place.type}")
    kind = TENSORS[place.type]
    count = prod(place.shape) // (BLOCK if kind.fields else 1)
    try:
        blocks = np.frombuffer(content, kind, count, start + place.offset)
    except ValueError as error:
        raise ValueError(f"{place.name}: the file ends at byte {len(content)}") from error
    if kind.fields is None:
        plain: Floats = blocks.astype(np.float32).reshape(place.shape)
        return plain
    packed = blocks["weights"]
    # The first half of a Q4_1 block is in the low bits of its bytes, the second in the high bits.
    numbers = np.hstack([packed & 15, packed >> 4]) if kind is Q4_1 else packed
    weights: Floats = numbers * blocks["factor"].astype(np.float32)[:, None]
    if kind is Q4_1:
        weights += blocks["offset"].astype(np.float32)[:, None]
    return weights.reshape(place.shape)
