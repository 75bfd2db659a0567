"""The options of attention, as the table in src/python/options.c has them.

Functions in other libraries take their options, operands and gradients from here, so that a new row
of that table reaches all of them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sdpa import _core
from sdpa._arguments import checked_options


class Option(NamedTuple):
    """A row of the table."""

    name: str
    default: Any
    annotation: str
    keyword_only: bool
    kind: str
    """ "operand", "position", "packing", "score", "weight", "call", "derivative" or "program":
    options.h."""
    functions: tuple[str, ...]
    axes: str | None
    """Of an array, its own axes: "hqk" or "h" behind those of the batch; "" for one integer per
    batch entry, "s" for the bounds of packed sequences. None: not an array."""

    @property
    def is_array(self) -> bool:
        return self.axes is not None

    @property
    def is_integers(self) -> bool:
        return self.axes in ("", "s")

    @property
    def takes_number(self) -> bool:
        """Whether a number can stand for the array; it is known when a function is traced."""
        return self.is_array and "float" in self.annotation

    @property
    def words(self) -> tuple[str, ...]:
        """The strings that it may be."""
        return tuple(re.findall(r"'(\w+)'", self.annotation))

    @property
    def n_inner(self) -> int:
        """The number of axes behind the heads; -1 if there is none of heads either."""
        return len(self.axes or "") - 1


TABLE: tuple[Option, ...] = tuple(
    Option(*row)._replace(default=ast.literal_eval(row[1])) for row in _core._options()
)


def options_of(function: str) -> dict[str, Option]:
    """The options of a function of `sdpa`, in the order of its signature."""
    return {option.name: option for option in TABLE if function in option.functions}


# Those of a function that returns a new array.
_ALL = {n: x for n, x in options_of("attention").items() if n != "out"}
# score_mod and mask_mod with their arguments; `OPTIONS` are the others.
PROGRAMS: tuple[str, ...] = tuple(n for n, x in _ALL.items() if x.kind == "program")
OPTIONS: dict[str, Option] = {n: x for n, x in _ALL.items() if n not in PROGRAMS}
WITH_PROGRAMS: dict[str, Option] = OPTIONS | {n: _ALL[n] for n in PROGRAMS}
OPERANDS: tuple[str, ...] = tuple(inspect.signature(_core.attention).parameters)[:3]
DIFFERENTIABLE: tuple[str, ...] = tuple(
    name for name in _core.AttentionGradients._fields if name != "score_args"
)
DIFFERENTIABLE_OPTIONS: tuple[str, ...] = DIFFERENTIABLE[len(OPERANDS) :]
# The options that are arrays without a gradient.
CONSTANTS: tuple[str, ...] = tuple(
    name for name, option in OPTIONS.items() if option.is_array and name not in DIFFERENTIABLE
)
_POSITIONAL = tuple(name for name, option in OPTIONS.items() if not option.keyword_only)


def signature(result: Any, options: Mapping[str, Option] = OPTIONS) -> inspect.Signature:
    """The signature of `sdpa.attention` for other arrays, returning `result`."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, by_position, annotation=Any) for name in OPERANDS]
    parameters += [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY if option.keyword_only else by_position,
            default=option.default,
            annotation=Any if option.is_array else option.annotation,
        )
        for option in options.values()
    ]
    return inspect.Signature(parameters, return_annotation=result)


def given(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    known: Mapping[str, Option] = OPTIONS,
) -> dict[str, Any]:
    """The options by name, from the arguments of `function` behind its operands."""
    if not args:
        return checked_options(function, options, known)
    if len(args) > len(_POSITIONAL):
        n = len(OPERANDS)
        raise TypeError(
            f"{function.__name__}() takes from {n} to {n + len(_POSITIONAL)} positional arguments "
            f"but {n + len(args)} were given"
        )
    by_position = dict(zip(_POSITIONAL, args, strict=False))
    for name in by_position:
        if name in options:
            raise TypeError(f"{function.__name__}() got multiple values for argument '{name}'")
    return by_position | checked_options(function, options, known)
