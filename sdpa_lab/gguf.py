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

DEEPEST, AXES = 4, 4
"""Arrays within arrays, and axes of a tensor, that are read."""

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
        It is not GGUF of version 3, it ends too early, a tensor has a type that is not read, or a
        number in it makes no sense.

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
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment: expected a positive integer, got {alignment!r}")
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
        (value,) = struct.unpack(f"<{letter}", self.bytes(struct.calcsize(f"<{letter}")))
        return value

    def bytes(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise ValueError(f"the file ends at byte {len(self.content)}")
        self.at += size
        return self.content[self.at - size : self.at]

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            if depth == DEEPEST:
                raise ValueError(f"expected arrays at most {DEEPEST} deep, got one within these")
            kind, size = self.number("I"), self.number("Q")
            return [self.value(kind, depth + 1) for _ in range(size)]
        if kind not in SCALARS:
            raise ValueError(f"expected a value of type 0 to 12, got {kind}")
        return self.number(SCALARS[kind])

    def tensor(self) -> _Place:
        name, axes = self.string(), self.number("I")
        if axes > AXES:
            raise ValueError(f"{name}: expected a shape of at most {AXES} axes, got {axes}")
        # The fastest axis comes first.
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        if max(shape, default=0) >= 2**63:
            raise ValueError(f"{name}: expected a shape of numbers below 2^63, got {shape}")
        return _Place(name, shape, self.number("I"), self.number("Q"))


@np.errstate(all="ignore")  # what is no number stays so
def _weights(content: bytes, start: int, place: _Place) -> Floats:
    if place.type not in TENSORS:
        raise ValueError(f"{place.name}: expected a type of {sorted(TENSORS)}, got {place.type}")
    kind = TENSORS[place.type]
    count, rest = divmod(prod(place.shape), BLOCK if kind.fields else 1)
    if rest:
        raise ValueError(f"{place.name}: expected a multiple of {BLOCK} weights, got {place.shape}")
    first = start + place.offset
    if first + count * kind.itemsize > len(content):
        raise ValueError(f"{place.name}: the file ends at byte {len(content)}")
    blocks = np.frombuffer(content, kind, count, first)
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
