"""Writes what follows from the compiled extension: sdpa/_core.pyi, sdpa/_options.py and the list of
options in docs/api.md: `make stubs`.

Names, order, kinds and defaults of parameters come from the signatures, the types of options from
the table in src/python/options.c. Only the other types, and the differences between composed
functions and attention, are listed here.
"""

import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdpa import _core
from sdpa._table import DIFFERENTIABLE, PROGRAMS, TABLE, Option, options_of

ROOT = Path(__file__).parents[1]
WIDTH = 100  # of a line, as in pyproject.toml

# ------------------------------------------------------------------------------- _core.pyi

ARRAY, ARRAYS = "NDArray[Any]", "Sequence[ArrayLike] | NDArray[Any]"
TANGENTS = ("query_t", "key_t", "value_t", "gg_query", "gg_key", "gg_value")

# Parameters that are not options of attention. Those not listed are array_like.
OPTIONAL = (*TANGENTS, "b", "bias", "sign", "where")
PARAMETERS: dict[str, str] = dict.fromkeys(OPTIONAL, "ArrayLike | None") | {
    "axis": "_Axis",
    "keepdims": "bool",
    "lses": ARRAYS,
    "n": "int",
    "name": "str",
    "objects": "object",
    "outs": ARRAYS,
    "return_sign": "bool",
    "temperature": "float",
}
# Functions not listed return an array.
RESULTS = {
    "additive_attention_backward": "AdditiveGradients",
    "additive_attention_forward": "AttentionForward",
    "attention_backward": "AttentionGradients",
    "attention_double_backward": "AttentionSecondGradients",
    "attention_forward": "AttentionForward",
    "attention_jvp": "AttentionTangent",
    "attention_received": "AttentionReceived",
    "attention_statistics": "AttentionStatistics",
    "get_num_threads": "int",
    "merge_attention": "AttentionForward",
    "set_num_threads": "None",
    "_alloc_fail_after": "None",
    "_arrays": "list[NDArray[Any]]",
    "_check_attention": "None",
    "_check_attention_backward": "None",
    "_close_pool": "None",
    "_hint": "str",
    "_isas": "dict[str, bool]",
    "_pattern": "tuple[NDArray[Any], NDArray[np.int64]]",
    "_operations": "tuple[str, ...]",
    "_options": "tuple[tuple[str, str, str, bool, str, tuple[str, ...], str | None], ...]",
    "_views": "tuple[NDArray[Any], ...]",
    "_xla_arguments": "dict[str, Any]",
    "_xla_handlers": "dict[str, Any]",
    "_use_isa": "str",
}
# Functions whose result depends on a parameter: its name, its type and default, the result.
OVERLOADS = {
    "logsumexp": [
        ("return_sign", "Literal[False] = False", ARRAY),
        ("return_sign", "Literal[True]", "LogsumexpForward"),
        ("return_sign", "bool", f"{ARRAY} | LogsumexpForward"),
    ],
    "logsumexp_backward": [
        ("b", "None = None", ARRAY),
        ("b", "ArrayLike", "LogsumexpGradients"),
    ],
}
HEAD = """\
# Written by `make stubs`; see tools/stubs.py.
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

__version__: str
_Axis = int | tuple[int, ...] | None

"""
SHOW_CONFIG = """\
@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
"""


def option_types(function: str) -> dict[str, str]:
    """The type of each option of a function, from the table, and those of other functions."""
    rows = {option.name: option for option in reversed(TABLE)} | options_of(function)
    return {name: option.annotation.replace("'", '"') for name, option in rows.items()}


def literal(value: object) -> str:
    """A default, formatted like ruff."""
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def parameter_texts(function: Callable[..., Any], options: dict[str, str]) -> list[str]:
    """Each parameter with its type and default, and the separators / and *."""
    texts: list[str] = []
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        has_default = parameter.default is not parameter.empty
        types = PARAMETERS | options if has_default else PARAMETERS
        stars = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        text = f"{stars}{parameter.name}: {types.get(parameter.name, 'ArrayLike')}"
        texts.append(f"{text} = {literal(parameter.default)}" if has_default else text)
    n_positional = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
    return [*texts[:n_positional], "/", *texts[n_positional:]] if n_positional else texts


def function_text(name: str, function: Callable[..., Any], options: dict[str, str]) -> str:
    """A function's stub, or one for each kind of its results."""
    texts = parameter_texts(function, options)
    if name not in OVERLOADS:
        return definition(name, texts, RESULTS.get(name, ARRAY))
    found = ""
    for parameter, kind, result in OVERLOADS[name]:
        own = [f"{parameter}: {kind}" if t.startswith(f"{parameter}: ") else t for t in texts]
        found += "@overload\n" + definition(name, own, result)
    return found


def definition(name: str, texts: list[str], result: str) -> str:
    """A stub, formatted like ruff: in one line, in three, or a line per parameter."""
    result = f" -> {result}: ..."
    joined = ", ".join(texts)
    line = f"def {name}({joined}){result}\n"
    if len(line) <= WIDTH + 1:
        return line
    inner = f"    {joined}\n"
    if len(inner) > WIDTH + 1:
        inner = "".join(f"    {text},\n" for text in texts)
    return f"def {name}(\n{inner}){result}\n"


def class_text(name: str, found: type) -> str:
    """A named tuple's stub. Gradients are None where they are not asked for."""
    fields = inspect.signature(found).parameters
    optional = name.endswith("Gradients") and name != "LogsumexpGradients"
    annotation = f"{ARRAY} | None" if optional else ARRAY
    types = {"score_args": f"tuple[{ARRAY} | None, ...] | None"}
    texts = [f"    {field}: {types.get(field, annotation)}\n" for field in fields]
    return f"class {name}(NamedTuple):\n" + "".join(texts)


def core_stub() -> str:
    """The text of sdpa/_core.pyi."""
    order = sorted(vars(_core), key=lambda name: (name.startswith("_"), name))
    found: dict[str, Any] = {name: x for name in order if callable(x := getattr(_core, name))}
    classes = [class_text(name, x) for name, x in found.items() if isinstance(x, type)]
    functions = [
        SHOW_CONFIG if name == "show_config" else function_text(name, x, option_types(name))
        for name, x in found.items()
        if not isinstance(x, type)
    ]
    return HEAD + "\n".join(classes) + "\n" + "".join(functions)


# ------------------------------------------------------------------------------- _options.py

# Each class has the options of attention except out and some others; some types are
# narrower. Mechanisms use BLAS, whose bits depend on shapes, so they cannot be invariant.
PACKED = {"cu_seqlens_q", "cu_seqlens_k"}
WHOLE = PACKED | {"invariant", *PROGRAMS}
COMPOSED = {
    "CosineOptions": (
        "Options of `cosine_attention`: the temperature is its scale.",
        {"scale"} | WHOLE,
        {},
    ),
    "BilinearOptions": ("Options of `bilinear_attention`.", WHOLE, {}),
    "BlockOptions": (
        "Options of `sdpa.blocks.attend`: the mask may lie in a store, too. Blocks change bits.",
        {"invariant"},
        dict.fromkeys(("attn_mask", "where"), "Any"),
    ),
    "LayerOptions": (
        "Options of `MultiHeadAttention.forward`: heads and scale are the layer's.",
        {"scale", "enable_gqa"} | WHOLE,
        {},
    ),
    "ShawOptions": (
        "Options of `shaw_attention`: one diagonal for the whole batch.",
        WHOLE | {"where"},
        {"query_offset": "int | None", "scale": "float | None"},
    ),
    "T5Options": (
        "Options of `t5_attention_backward`: one diagonal, and no other bias than T5's.\n\n"
        "    Dropout is left out because its pattern depends on the index of the query.",
        {"attn_mask", "where", "alibi_slopes", "dropout_p", "rng"} | WHOLE,
        {"query_offset": "int"},
    ),
}
OPTIONS_HEAD = '''\
"""Options of the composed functions. Written by `make stubs`; see tools/stubs.py."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from numpy.typing import ArrayLike
'''


def options_module() -> str:
    """The text of sdpa/_options.py."""
    # out would have the widened dtype. Derivatives could not repeat a Generator's draws.
    types = option_types("attention") | {"rng": "int | None"}
    names = [name for name in options_of("attention") if name != "out"]
    text = OPTIONS_HEAD
    for name, (summary, left_out, narrower) in COMPOSED.items():
        end = "\n    " if "\n" in summary else ""
        text += f'\n\nclass {name}(TypedDict, total=False):\n    """{summary}{end}"""\n\n'
        for option in names:
            if option not in left_out:
                text += f"    {option}: {(types | narrower)[option]}\n"
    return text


# ------------------------------------------------------------------------------- docs/api.md

FAMILY = list(dict.fromkeys(name for option in TABLE for name in option.functions))
TORCH = "scaled_dot_product_attention"
UNBROKEN: Any = {"break_long_words": False, "break_on_hyphens": False}
BEGIN, END = "<!-- Written by `make stubs`. -->\n", "<!-- End. -->\n"


def documentation(option: Option) -> tuple[str, str]:
    """(type, first sentence) in the docstring of the first function with this option."""
    lines = inspect.getdoc(getattr(_core, option.functions[0])).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"{option.name} : "))
    body = itertools.takewhile(lambda line: line.startswith("    "), lines[first + 1 :])
    sentence = re.split(r"\. |\.$", " ".join(map(str.strip, body)))[0]
    return lines[first].partition(" : ")[2], sentence


def functions_text(functions: Sequence[str]) -> str:
    """Which functions take an option, where not all do; PyTorch's has a sentence of its own."""
    missing = [name for name in FAMILY if name not in functions and name != TORCH]
    if len(missing) > len(FAMILY) / 2:
        return f" Of {', '.join(f'`{name}`' for name in functions)} alone."
    return f" Not of {', '.join(f'`{name}`' for name in missing)}." if missing else ""


def list_of_options() -> str:
    """An item for each option of `attention`, as Markdown."""
    items = []
    for name, option in options_of("attention").items():
        functions = [f for x in TABLE if x.name == name for f in x.functions]
        kind, meaning = documentation(option)
        gradient = " It has a gradient." if name in DIFFERENTIABLE else ""
        text = f"`{name}`: {kind}. {meaning}.{gradient}{functions_text(functions)}"
        items.append(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", **UNBROKEN))
    theirs = ", ".join(f"`{name}`" for name in options_of(TORCH))
    note = f"`{TORCH}` has those of PyTorch's alone: {theirs}."
    return "\n".join([*items, "", textwrap.fill(note, WIDTH, **UNBROKEN), ""])


def api_page() -> str:
    """The text of docs/api.md."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{list_of_options()}\n{END}{rest.partition(END)[2]}"


FILES = {
    "sdpa/_core.pyi": core_stub,
    "sdpa/_options.py": options_module,
    "docs/api.md": api_page,
}

if __name__ == "__main__":
    for file, text in FILES.items():
        (ROOT / file).write_text(text(), encoding="utf-8")
