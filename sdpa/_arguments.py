"""Readers of arguments, in the words of src/python/parse.c and options.c, and their defaults.

Integers saturate: one beyond int64 becomes the nearest that int64 holds, so that sys.maxsize and
2**70 mean "no bound" wherever a bound is read.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sdpa import _core
from sdpa._arrays import Array, native

Choice = TypeVar("Choice", bound=str)
Shape = tuple[int, ...]
Integers = NDArray[np.int64]
Window = tuple[int | None, int | None]
Alignment = Literal["none", "upper_left", "lower_right"]
ALIGNMENTS: tuple[Alignment, ...] = ("none", "upper_left", "lower_right")

_INT64 = np.iinfo(np.int64)
# A bound of the window this large excludes nothing, since offsets and indices are smaller.
_WIDEST = 1 << 62
LARGEST_OFFSET = 1 << 60
# More elements than any memory has addresses for.
_LARGEST_SIZE = 1 << 48


# ------------------------------------------------------------------------------- arrays and names


def arrays(**arguments: ArrayLike) -> list[Array]:
    """Each argument as an array; a TypeError names the one that NumPy cannot convert.

    Converting one may run code that changes another, so all are converted before any is looked at.
    """
    return _core._arrays(**arguments)


def converted(
    options: Mapping[str, Any], optional: Mapping[str, Any], **arguments: ArrayLike
) -> tuple[list[Array], list[Array | None], dict[str, Any]]:
    """`arrays` of the arguments, of the optional ones, which may be None, and of the options."""
    own = {
        name: options[name]
        for name, takes_number in _ARRAYS.items()
        if name in options and not (takes_number and isinstance(options[name], _NUMBER))
    }
    given = {name: x for name, x in {**optional, **own}.items() if x is not None}
    found = dict(zip([*arguments, *given], arrays(**arguments, **given), strict=True))
    whole = {**options, **{name: found.get(name) for name in own}}
    return [found[name] for name in arguments], [found.get(name) for name in optional], whole


# Those of floats or of a mask, and whether a number may stand for the array; integers have readers
# of their own.
_ARRAYS = {
    name: "float" in annotation
    for name, _, annotation, *_, axes in _core._options()
    if axes and axes != "s"
}
_NUMBER = (numbers.Number, str)  # a string is refused where the number is read


def checked_rows(name: str, x: Array, axes: str) -> None:
    """Raise a ValueError for an array of fewer than two axes, of which `axes` are the last."""
    if x.ndim < 2:
        remedy = f"; write {name}[None]" if x.ndim else ""
        raise ValueError(
            f"{name}: expected at least two axes, (..., {axes}), got {x.shape}{remedy}"
        )


def checked_broadcast(name: str, own: Shape, shape: Shape) -> None:
    """Raise a ValueError for a shape that does not broadcast to another, with an index that helps.

    The index adds axes behind the first ones.
    """
    if broadcasts(own, shape):
        return
    remedy, added = "", len(shape) - len(own)
    for lead in range(len(own), 0, -1):
        if added > 0 and broadcasts(own[:lead] + (1,) * added + own[lead:], shape):
            index = [":"] * lead + ["None"] * added + [":"] * (len(own) - lead)
            remedy = f"; write {name}[{', '.join(index)}]"
    raise ValueError(f"{name}: expected a shape that broadcasts to {shape}, got {own}{remedy}")


def broadcasts(own: Shape, shape: Shape) -> bool:
    """Whether a shape broadcasts to another one."""
    added = len(shape) - len(own)
    return added >= 0 and all(n in (1, size) for n, size in zip(own, shape[added:], strict=True))


def checked_float(name: str, x: Array) -> None:
    """Raise a TypeError for a dtype that the kernels do not accept."""
    wide = {"i": "np.float32", "u": "np.float32", "f": "np.float64"}.get(x.dtype.kind)
    _check_dtype(name, x.dtype, x.dtype, f"; write {name}.astype({wide})" if wide else "")


def checked_like_query(name: str, x: Array, query: Array) -> None:
    """Raise a TypeError for another dtype than query's."""
    if native(x.dtype) != native(query.dtype):
        remedy = f"; write {name}.astype(query.dtype)" if is_real(x.dtype) else ""
        raise TypeError(f"{name}: expected query's dtype {query.dtype}, got {x.dtype}{remedy}")


def check_overlap(out: Any, inputs: Mapping[str, Any]) -> None:
    """Raise if an array of NumPy among these inputs has elements in the memory of out."""
    for name, x in inputs.items():
        arrays = isinstance(x, np.ndarray) and isinstance(out, np.ndarray)
        if arrays and np.shares_memory(out, x):
            raise ValueError(
                f"out: expected memory not shared with an input, got an array that overlaps {name}"
            )


def float_dtype(name: str, value: DTypeLike) -> np.dtype[Any]:
    """A dtype that the kernels accept, in native byte order."""
    try:
        dtype = native(np.dtype(value))
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    # NumPy knows this name once ml_dtypes has been imported.
    remedy = "; write ml_dtypes.bfloat16" if isinstance(value, str) and value == "bfloat16" else ""
    _check_dtype(name, dtype, repr(value) if dtype is None else dtype, remedy)
    return cast(np.dtype[Any], dtype)


def _check_dtype(name: str, dtype: np.dtype[Any] | None, got: object, remedy: str = "") -> None:
    if dtype is None or not is_float(dtype):
        raise TypeError(
            f"{name}: expected float16, bfloat16, float32 or float64, got {got}{remedy}"
        )


@functools.lru_cache(64)  # the name of a dtype takes microseconds
def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether the kernels compute with it."""
    return dtype.name in ("float16", "bfloat16", "float32", "float64")


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether its values are real numbers, bool among them."""
    return dtype.kind in "biuf" or is_float(dtype)


def checked_options(
    function: Callable[..., Any], options: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """A copy of `function`'s options; a TypeError if one is unknown."""
    for name in options:
        if name not in known:
            raise TypeError(_unexpected(function, name, known))
    return dict(options)


def checked_needs(needs: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names of the gradients that are asked for."""
    try:
        names: tuple[Any, ...] | None = None if isinstance(needs, str) else tuple(needs)
    except TypeError:
        names = None
    if names is None:
        raise TypeError(
            f"needs: expected a sequence of names such as {tuple(known[:2])}, got {needs!r}"
        )
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValueError(
                f"needs: expected names among {', '.join(map(repr, known))}, got {name!r}"
            )
    return names


def _unexpected(function: Callable[..., Any], name: str, known: Collection[str]) -> str:
    """CPython's message for an unknown keyword, as the functions of the extension word it."""
    parameters = inspect.signature(function).parameters.values()
    own = [p.name for p in parameters if p.default is not p.empty]
    hint = _core._hint(name, [*own, *known])
    return f"{function.__qualname__}() got an unexpected keyword argument '{name}'{hint}"


# ------------------------------------------------------------------------------- single values


def boolean(name: str, value: Any) -> bool:
    """True or False, of Python or NumPy."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {value!r}")


def finite(name: str, value: Any) -> float:
    """One finite number."""
    try:
        # Of NumPy, float would read text and drop an imaginary part.
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "cSTUV":
            raise TypeError
        # Unlike float, it refuses strings.
        is_finite = math.isfinite(value)
    except TypeError:
        raise TypeError(f"{name}: expected a finite number, got {value!r}") from None
    except OverflowError:
        raise ValueError(
            f"{name}: expected a finite number, got an integer beyond float64"
        ) from None
    if not is_finite:
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """One finite number above 0."""
    number = finite(name, value)
    if number <= 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return number


def rotary_base(name: str, value: Any) -> float:
    """The base of the angles, which are at most its reciprocal for each position."""
    number = positive(name, value)
    if math.isinf(1 / number):
        raise ValueError(
            f"{name}: expected a number above 0 with a finite reciprocal, got {value!r}"
        )
    return number


def choice(name: str, value: Any, known: Iterable[Choice]) -> Choice:
    """One of these strings."""
    *others, last = known
    for word in (*others, last):
        if isinstance(value, str) and value == word:
            return word
    expected = f"{', '.join(map(repr, others))} or {last!r}"
    raise (ValueError if isinstance(value, str) else TypeError)(
        f"{name}: expected {expected}, got {value!r}"
    )


def integer(name: str, value: Any) -> int:
    """One integer."""
    try:
        # A number that torch.compile traces as unknown would become a constant in operator.index.
        number = value if type(value) is int else operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if _INT64.min <= number <= _INT64.max:
        return number
    return int(_INT64.min if number < 0 else _INT64.max)


def count(name: str, value: Any, least: int = 0) -> int:
    """One integer, at least `least`."""
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {value!r}")
    return number


def size(name: str, value: Any, least: int = 0) -> int:
    """The size of an axis that is allocated."""
    number = count(name, value, least)
    if number > _LARGEST_SIZE:
        raise ValueError(f"{name}: expected at most 2^48, got {value!r}")
    return number


# ------------------------------------------------------------------------------- options


def integers(name: str, value: Any) -> Integers:
    """One integer or an array of them; an empty list counts as such."""
    if isinstance(value, int) and not isinstance(value, bool):
        return np.asarray(integer(name, value))
    (x,) = _core._arrays(**{name: value})
    if x.size and x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
    large = x[x > _INT64.max]
    if large.size:
        raise ValueError(f"{name}: expected integers below 2^63, got {large[0]}")
    return x.astype(np.int64)


def offset(name: str, value: Any) -> int:
    """The position of query 0 among the keys, the same for the whole batch."""
    x = integers(name, value)
    if x.ndim:
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    number = int(x)
    if abs(number) > LARGEST_OFFSET:
        raise ValueError(f"{name}: expected integers from -2^60 to 2^60, got {number}")
    return number


def window(name: str, value: Any) -> Window:
    """The bounds of a window, None where it excludes nothing."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: expected a pair (left, right), got {value!r}")

    def bound(side: Any) -> int | None:
        if side is None:
            return None
        number = integer(name, side)
        if number < 0:
            raise ValueError(
                f"{name}: expected bounds of at least 0, or None for no bound, got {value!r}"
            )
        return number if number < _WIDEST else None

    return bound(value[0]), bound(value[1])


def generator(name: str, value: Any) -> np.random.Generator:
    """The Generator itself, or a new one from a seed; None means fresh entropy."""
    try:
        return np.random.default_rng(value)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name}: expected an int of at least 0, a numpy.random.Generator or None, "
            f"got {value!r}"
        ) from None


def seed(value: Any, others: str = "") -> int:
    """The seed of dropout; `others` says what else the caller takes."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"rng: expected an int from 0 to 2^64 - 1{others}, got {value!r}")
    if not 0 <= number < 1 << 64:
        raise ValueError(f"rng: expected an int from 0 to 2^64 - 1, got {value!r}")
    return number


def alignment(value: Any) -> Alignment:
    """What is_causal says: no diagonal, or the corner of the scores from which it starts."""
    if isinstance(value, (bool, np.bool_)):
        return "upper_left" if value else "none"
    for corner in ALIGNMENTS[1:]:
        if isinstance(value, str) and value == corner:
            return corner
    raise (ValueError if isinstance(value, str) else TypeError)(
        f"is_causal: expected False, True, 'upper_left' or 'lower_right', got {value!r}"
    )


# ------------------------------------------------------------------------------- defaults


def default_scale(d_k: int) -> float:
    """The factor of scores where none is given: 1 / sqrt(d_k).

    It is 1 for queries of width 0, all of whose scores are 0.
    """
    return 1 / math.sqrt(max(d_k, 1))


# ------------------------------------------------------------------------------- positions


def diagonal_offset(n_q: Any, n_k: Any, key_lengths: Any = None) -> Any:
    """The query_offset of is_causal="lower_right": the last query sees the last key in use.

    Numbers, or arrays with one number for each sequence.
    """
    return (n_k if key_lengths is None else key_lengths) - n_q


def pop_query_offset(options: dict[str, Any], n_q: int, n_k: int) -> int:
    """Remove the position of query 0 among the keys from the options, and return it.

    It is one integer, because functions composed around distances have one diagonal for the whole
    batch. is_causal="lower_right" becomes True.
    """
    given = options.pop("query_offset", None)
    if options.get("is_causal") != "lower_right":
        return 0 if given is None else offset("query_offset", given)
    if given is not None:
        raise ValueError(
            "query_offset: expected None with is_causal='lower_right', which sets the offset itself"
        )
    options["is_causal"] = True
    length = options.get("key_lengths")
    if length is not None:
        if np.ndim(length):
            raise TypeError(
                "key_lengths: expected one integer with is_causal='lower_right', got "
                f"{length!r}; call each batch entry by itself"
            )
        length = integer("key_lengths", length)
    return int(diagonal_offset(n_q, n_k, length))


def sequences(*cu_seqlens: Any) -> Iterator[tuple[slice, ...]]:
    """For each packed sequence its rows in every array: one slice for each cu_seqlens given."""
    ends = (x.tolist() if hasattr(x, "tolist") else x for x in cu_seqlens)
    return zip(*([slice(*pair) for pair in pairwise(x)] for x in ends), strict=True)


def nearer(offset: Any, bounds: Window, reach: int) -> tuple[Integers, Window]:
    """Offsets and a window of small numbers, through which the same pairs (i, j) are seen.

    `reach` is above every |j - i|; the results are at most 6 of it. ALiBi's distances change.
    """
    offset, (left, right), far = np.asarray(offset, np.int64), bounds, 4 * reach
    # A bound this far hides keys only from offsets that are as far on its side. The other bound
    # shows these all keys or none, so they can move together with the first.
    if left is not None and left > far:
        moved = np.clip(offset - left, -reach, reach) + far
        offset, left = np.where(offset > 2 * reach, moved, offset), far
    if right is not None and right > far:
        moved = np.clip(offset + right, -reach, reach) - far
        offset, right = np.where(offset < -2 * reach, moved, offset), far
    return np.clip(offset, -6 * reach, 6 * reach), (left, right)
