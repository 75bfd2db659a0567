"""Functions of the user on scores and masks, traced into programs that the core runs."""

from sdpa._programs._program import prepare as _prepare

__all__ = ["_prepare"]
