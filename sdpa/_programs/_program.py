"""Programs, and what the core gets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._programs._closures import FOREIGN, Copies, Scan, foreign
from sdpa._programs._graph import Node, Source
from sdpa._programs._text import WORDS, program_text
from sdpa._programs._trace import Signature, Trace, argument_of, traced
from sdpa._programs._values import kind_of
from sdpa._programs._variants import Codes, codes_of, remembered

__all__ = ["Program", "mask_program", "score_program"]

_LETTERS = {"r": "f", "i": "i", "b": "b"}


class Prepared(NamedTuple):
    """What the core gets; src/program.h describes codes."""

    codes: tuple[bytes | None, ...]
    reals: bytes
    integers: bytes
    arrays: tuple[Any, ...]
    kinds: str
    n_args: int
    names: tuple[str, ...]
    name: str
    pair: Any
    """From the arrays, b, h, q and k to what the user counts, for messages; None: the same."""


class Entry:
    """A traced function, without the values of arrays that a later call may change.

    Attributes
    ----------
    places : list of int, None
        Where in `Scan.arrays` the captured arrays are; None if they are held here.
    """

    def __init__(self, trace: Trace, n_given: int, scan: Scan) -> None:
        self.codes: Codes = codes_of(trace)
        self.root: Node = trace.root
        self.graph = trace.graph
        self.sources: list[Source] = trace.sources
        self.kinds = "".join(_LETTERS[source.kind] for source in trace.sources)
        self.names = tuple([source.name for source in trace.sources])
        self.n_given, self.n_args, self.pair = n_given, trace.n_args, trace.pair
        captured = trace.sources[n_given:]
        known = {id(array): place for place, array in enumerate(scan.arrays)}
        places = [known.get(id(source.value)) for source in captured]
        self.places = None if None in places else places
        self._held = [source.value for source in captured] if self.places is None else []
        # What is not held here must not outlive the caller's own references.
        for source in captured:
            source.value = None

    def captured(self, scan: Scan) -> list[Any]:
        """The captured arrays, in the order of the core."""
        if self.places is None:
            return self._held
        return [scan.arrays[place] for place in self.places]  # type: ignore[index]

    def prepared(self, arrays: tuple[Any, ...], captured: list[Any]) -> Prepared:
        """What the core gets for these arguments and captured arrays."""
        if FOREIGN:
            captured = [_array(x) for x in captured]
        return Prepared(
            *self.codes,
            (*arrays, *captured),
            self.kinds,
            self.n_args,
            self.names,
            self.graph.function,
            self.pair,
        )


_ENTRIES: dict[Any, Entry] = {}


def entry_of(
    is_mask: bool, function: Any, signature: Signature, **options: Any
) -> tuple[Entry, list[Any]]:
    """The trace of a function, made now or known, and the arrays that it captures now."""
    if not callable(function):
        raise TypeError(
            f"{argument_of(is_mask)}: expected a function of "
            f"({'' if is_mask else 'score, '}b, h, q, k, *args), got {function!r:.60}"
        )
    scan = Scan(function)
    key = (is_mask, *options.items(), signature, *scan.tokens)
    entry = None if scan.unknown else _ENTRIES.get(key)
    if entry is None:
        trace = traced(is_mask, function, signature, scan, **options)
        entry = Entry(trace, len(signature), scan)
        if not scan.unknown and not trace.in_place:
            remembered(_ENTRIES, key, entry)
    return entry, entry.captured(scan)


def given_arrays(is_mask: bool, args: Any) -> tuple[tuple[Any, ...], Signature]:
    """The arguments as arrays, with their types and shapes."""
    if args is None:
        return (), ()
    name = "mask_args" if is_mask else "score_args"
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{name}: expected a tuple of arrays, got {args!r:.60}; put it in a tuple")
    arrays = tuple(args)
    if not all(type(x) is np.ndarray for x in arrays):
        arrays = tuple(_core._arrays(**{f"{name}[{i}]": _array(x) for i, x in enumerate(args)}))
    return arrays, tuple([(x.dtype, x.shape) for x in arrays])


def _array(value: Any) -> Any:
    known = foreign(value)
    return known.convert(value) if known else value


def prepare(is_mask: bool, function: Any, args: Any) -> Prepared:
    """What the core needs to run a function or a program on these arguments."""
    arrays, signature = given_arrays(is_mask, args)
    if isinstance(function, Program):
        function._check(is_mask, signature)
        return function._entry.prepared(arrays, function._captured)
    entry, captured = entry_of(is_mask, function, signature)
    return entry.prepared(arrays, captured)


def lifted(
    is_mask: bool, function: Any, args: Any, dtypes: tuple[tuple[str, Any], ...] = ()
) -> tuple[Program, list[Any]]:
    """A program whose captured arrays of another library are further arguments, and these arrays.

    Parameters
    ----------
    dtypes : sequence of (kind, dtype)
        What `score.dtype` is inside the function, for the kinds "r", "i" and "b".
    """
    _, signature = given_arrays(is_mask, args)
    program = Program.__new__(Program)
    entry, captured = entry_of(is_mask, function, signature, lift=True, dtypes=dtypes)
    n_lifted = entry.n_args - len(signature)
    program._hold(is_mask, function, entry, captured[n_lifted:])
    return program, captured[:n_lifted]


class Program:
    """A function on scores or on masks, ready to run: what `score_program` returns.

    Called with arrays, it computes what the function computes, in NumPy. It shows its operations.
    Names that the function captures keep the meaning that they have now.
    """

    def __init__(self, is_mask: bool, function: Any, args: Any) -> None:
        _, signature = given_arrays(is_mask, args)
        self._hold(is_mask, function, *entry_of(is_mask, function, signature))
        self._function = _frozen(function)

    def _hold(self, is_mask: bool, function: Any, entry: Entry, captured: list[Any]) -> None:
        self._is_mask, self._given, self._function = is_mask, function, function
        self._entry, self._captured = entry, captured

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, with the function as given, which pickle finds by its name."""
        return vars(self) | {"_function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._function = _frozen(self._given)

    def _check(self, is_mask: bool, signature: Signature) -> None:
        """Raise a TypeError or a ValueError if it cannot run on such arguments."""
        entry, word = self._entry, "mask" if is_mask else "score"
        if is_mask != self._is_mask:
            other = "score" if is_mask else "mask"
            raise TypeError(
                f"{word}_mod: expected a {word} program, got a {other} program; "
                f"pass it as {other}_mod"
            )
        if len(signature) != entry.n_args:
            raise TypeError(
                f"{word}_args: expected the {entry.n_args} arrays of {entry.graph.function}, "
                f"got {len(signature)}"
            )
        for source, (dtype, shape) in zip(entry.sources, signature, strict=False):
            if source.shape != shape:
                raise ValueError(
                    f"{word}_args: expected {source.name} of shape {source.shape}, as the program "
                    f"of {entry.graph.function} was made for, got {shape}"
                )
            if kind_of(dtype) != source.kind:
                raise TypeError(
                    f"{word}_args: expected {source.name} of {WORDS[source.kind]}, as the program "
                    f"of {entry.graph.function} was made for, got {dtype}"
                )

    def __call__(self, *arrays: Any) -> Any:
        return self._function(*arrays)

    def __repr__(self) -> str:
        return program_text(self._is_mask, self._entry.graph, self._entry.root, self._entry.sources)


def _frozen(function: Any) -> Any:
    """A copy of the function, for which names keep the meaning that they have now."""
    return Copies(lambda array: array).of(function)


def score_program(score_mod: Callable[..., Any], score_args: Sequence[ArrayLike] = ()) -> Program:
    """The program of a function of scores: traced, checked and differentiated once.

    Wherever a function is accepted as `score_mod`, so is its program. A call with the function
    itself finds the program of an earlier call; one made here says at once what is wrong with a
    function, and shows what will be computed.

    Parameters
    ----------
    score_mod : callable
        ``f(score, b, h, q, k, *score_args)``, for one pair of a query and a key: b counts the
        leading axes as one, h the query heads, q and k are positions. It is called once, with
        values that stand for all pairs. It computes with operators, comparisons and functions of
        NumPy, and reads arrays by an index per axis: ``slopes[h]``, ``table[h, q - k]``.

        The functions are exp, exp2, expm1, log, log2, log10, log1p, sqrt, square, tanh, absolute,
        sign, floor, ceil, trunc, reciprocal, power, minimum, maximum, clip, where, logical_and,
        logical_or, logical_xor, logical_not, those behind operators, and astype. // and % are for
        integers.
    score_args : sequence of array_like, optional
        Further arguments: floats, integers or booleans, whose shapes and kinds count here. Values
        come with each call. An array that the function captures is a constant, whose gradient
        nobody gets; names that are bound again later mean to the program what they meant.

    Returns
    -------
    Program
        ``program(score, b, h, q, k, *score_args)`` calls the function itself, with arrays.

    Raises
    ------
    TypeError
        The function does what a program cannot: an ``if``, ``and`` or a loop over values of a
        pair, another function, a whole array in arithmetic. The message has the expression.
    IndexError
        A constant index is beyond its axis.

    See Also
    --------
    mask_program : that of a function of which pairs attend.

    Examples
    --------
    >>> import numpy as np
    >>> import sdpa
    >>> def capped(score, b, h, q, k, slopes):
    ...     return 20 * np.tanh(score / 20) - slopes[h] * (q - k)
    >>> program = sdpa.score_program(capped, (np.array([0.5, 0.25]),))
    >>> program
    score program of capped
      slopes: floats (2,)
      1  x1 = score / 20.0
      2  x2 = tanh(x1)
      3  x3 = 20.0 * x2
      4  x4 = slopes[h]
      5  x5 = q - k
      6  x6 = float(x5)
      7  x7 = x4 * x6
      8  x3 - x7
    >>> round(float(program(30.0, 0, 1, 4, 2, np.array([0.5, 0.25]))), 3)
    17.603
    """
    return Program(False, score_mod, score_args)


def mask_program(mask_mod: Callable[..., Any], mask_args: Sequence[ArrayLike] = ()) -> Program:
    """The program of a function of masks: traced and checked once.

    Parameters
    ----------
    mask_mod : callable
        ``f(b, h, q, k, *mask_args)``, True where query q may attend to key k. See
        `score_program`.
    mask_args : sequence of array_like, optional
        Further arguments, as there.

    Returns
    -------
    Program
        ``program(b, h, q, k, *mask_args)`` calls the function itself, with arrays.

    Raises
    ------
    TypeError, IndexError
        As in `score_program`; and if the result is a number.

    See Also
    --------
    score_program : that of a function of scores, and what functions may use.

    Examples
    --------
    >>> import numpy as np
    >>> import sdpa
    >>> document = np.array([0, 0, 1, 1])
    >>> program = sdpa.mask_program(
    ...     lambda b, h, q, k, document: (document[q] == document[k]) & (q >= k), (document,)
    ... )
    >>> q, k = np.ogrid[:4, :4]
    >>> program(0, 0, q, k, document).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """
    return Program(True, mask_mod, mask_args)


score_program.__module__ = mask_program.__module__ = "sdpa"
