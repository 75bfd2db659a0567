"""Functions of the user on a part of a call, whose positions, batch and heads count anew.

What tells the part's place is an argument before the user's own, so that one trace serves all
parts. The wrappers are partial functions, which the tracer reads and workers of Dask can be sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sdpa._programs._program import Program
from sdpa._programs._trace import WRAPPERS, Wrapper


def _score_beyond_keys(
    function: Callable[..., Any], per_batch: bool, score: Any, b: Any, h: Any, q: Any, k: Any,
    first_key: Any, *args: Any,
) -> Any:  # fmt: skip
    first = first_key[b] if per_batch else first_key
    return function(score, b, h, q + first, k + first, *args)


def _mask_beyond_keys(
    function: Callable[..., Any], per_batch: bool, b: Any, h: Any, q: Any, k: Any,
    first_key: Any, *args: Any,
) -> Any:  # fmt: skip
    first = first_key[b] if per_batch else first_key
    return function(b, h, q + first, k + first, *args)


def _score_of_part(
    function: Callable[..., Any], score: Any, b: Any, h: Any, q: Any, k: Any,
    batch: Any, first_head: Any, *args: Any,
) -> Any:  # fmt: skip
    return function(score, batch[b], h + first_head, q, k, *args)


def _mask_of_part(
    function: Callable[..., Any], b: Any, h: Any, q: Any, k: Any,
    batch: Any, first_head: Any, *args: Any,
) -> Any:  # fmt: skip
    return function(batch[b], h + first_head, q, k, *args)


def _pair_beyond_keys(
    options: tuple[Any, ...], arrays: Any, b: int, h: int, q: int, k: int
) -> tuple[int, ...]:
    first = int(arrays[0][b] if options[0] else arrays[0])
    return b, h, q + first, k + first


def _pair_of_part(
    options: tuple[Any, ...], arrays: Any, b: int, h: int, q: int, k: int
) -> tuple[int, ...]:
    return int(arrays[0][b]), h + int(arrays[1]), q, k


WRAPPERS |= dict.fromkeys(
    (_score_beyond_keys, _mask_beyond_keys), Wrapper(("first_key",), _pair_beyond_keys)
)
WRAPPERS |= dict.fromkeys(
    (_score_of_part, _mask_of_part), Wrapper(("batch", "first_head"), _pair_of_part)
)


def _wrapped(wrapper: Callable[..., Any], function: Any, *options: Any) -> functools.partial[Any]:
    function = function._function if isinstance(function, Program) else function
    return functools.partial(wrapper, function, *options)


def beyond_keys(is_mask: bool, function: Any, per_batch: bool) -> functools.partial[Any]:
    """The function for blocks of keys; its further argument is the block's first key.

    That is one integer or, where `per_batch`, one for each b.
    """
    return _wrapped(_mask_beyond_keys if is_mask else _score_beyond_keys, function, per_batch)


def of_part(is_mask: bool, function: Any) -> functools.partial[Any]:
    """The function for a part of the batch and the heads.

    Its further arguments are `batch`, for each b of the part that of the whole, and the first head.
    """
    return _wrapped(_mask_of_part if is_mask else _score_of_part, function)
