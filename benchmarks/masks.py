"""Dense masks and biases per key beside the plain call: what they hide should cost nothing."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.contenders import Array, Contenders, Setting, Work, operands, ours


class Mask(NamedTuple):
    """A mask of attention over (heads, n, d), and what the call may take of a plain one."""

    heads: int
    n: int
    d: int
    bound: float


MASKS = {
    "8 heads, nothing visible": Mask(8, 4096, 64, 0.01),
    "64 documents of 64": Mask(1, 4096, 64, 0.08),
    "blocks of 256, an eighth": Mask(1, 4096, 64, 0.18),
    "bias per key, d = 64": Mask(8, 1024, 64, 1.05),
    "bias per key, d = 16": Mask(8, 1024, 16, 1.10),
}


def draw(name: str, n: int) -> Array:
    """The mask of this name for n queries and keys."""
    rng = np.random.default_rng(6)
    if name.startswith("bias"):
        return rng.standard_normal((1, n), np.float32)
    i = np.arange(n)
    if "documents" in name:
        size = max(n // 64, 1)
        return np.asarray(i[:, None] // size == i // size)
    if "blocks" in name:
        size = max(n // 16, 1)
        chosen = (rng.random((n // size, n // size)) < 1 / 15) | np.eye(n // size, dtype=bool)
        return np.repeat(np.repeat(chosen, size, 0), size, 1)
    return np.full((n, n), False)


def masks(setting: Setting) -> Iterator[Work]:
    """The call with the mask, and without."""
    for name, (heads, n, d, _) in MASKS.items():
        for direction in ("forward", "backward"):

            def build(
                name: str = name, shape: tuple[int, ...] = (heads, n, d), to: str = direction
            ) -> Contenders:
                x = operands(shape[0], setting.length(shape[1]), shape[2])
                mask = draw(name, x.query.shape[-2])
                return {"plain": ours(x)[to], "sdpa": ours(x, attn_mask=mask)[to]}

            yield Work("masks", f"{name} {direction}", build)
