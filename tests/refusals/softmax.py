"""Refusals of the softmax family."""

import inspect

import numpy as np
from numpy.lib.stride_tricks import as_strided
from support.calls import SOFTMAX, ones, read_only
from support.helpers import BFLOAT16, LAYOUTS
from support.protocols import elsewhere

import sdpa

FLOATS = "float16, bfloat16, float32, float64, an integer type or bool"
FORWARD = (sdpa.softmax, sdpa.log_softmax, sdpa.logsumexp)
RAGGED = [[1.0], [1.0, 2.0]]
OBJECT = object()


def reason(x):
    """NumPy's reason for not making an array of x."""
    try:
        np.asarray(x)
    except ValueError as error:
        return error
    raise AssertionError(f"{x!r} is an array")


def rows(x):
    """The rows for the function whose scores or weights have this name."""
    dtypes = (np.longdouble, np.complex64, np.complex128, object, "M8[s]", "U3", "V4")
    refused = {
        f"{x} {np.dtype(dtype)}": (
            TypeError,
            f"{x}: expected {FLOATS}, got {np.dtype(dtype)}",
            {x: np.zeros((3, 4), dtype)},
        )
        for dtype in dtypes
    }
    refused |= elsewhere(x)
    refused["no array"] = (TypeError, f"{x}: expected {FLOATS}, got object", {x: OBJECT})
    refused["ragged"] = (
        TypeError,
        f"{x}: expected an array, got <class 'list'>, which NumPy cannot take: {reason(RAGGED)}",
        {x: RAGGED},
    )
    for axis, wrong in {2: 2, 5: 5, -3: -3, 2**70: 2**70, (0, 2): 2}.items():
        text = f"axis: expected -2 to 1 for {x} of shape (3, 4), got {wrong}"
        refused[f"axis {axis}"] = (ValueError, text, {"axis": axis})
    for axis in ((0, 0), (1, -1)):
        text = f"axis: expected each axis once, got {axis[1]} twice"
        refused[f"axis {axis}"] = (ValueError, text, {"axis": axis})
    # NumPy refuses a bool as an axis, too.
    for axis in (1.0, "0", [0], OBJECT, True):
        text = f"axis: expected an integer, a tuple of integers or None, got {axis!r}"
        refused[f"axis {type(axis).__name__}"] = (TypeError, text, {"axis": axis})
        refused[f"axis ({type(axis).__name__},)"] = (TypeError, text, {"axis": (axis,)})
    return refused


SCALAR = {
    f"axis {axis} of a scalar": (
        ValueError,
        text,
        {"x": 1.0, "axis": axis},
    )
    for axis, text in {
        1: "axis: expected -1 to 0 for x of shape (), got 1",
        -2: "axis: expected -1 to 0 for x of shape (), got -2",
        (0, 0): "axis: expected each axis once, got 0 twice",
    }.items()
}
TEMPERATURE = {
    f"temperature {value}": (ValueError, f"temperature: {text}", {"temperature": value})
    for value, text in {
        0: "expected a number above 0, got 0",
        -1.0: "expected a number above 0, got -1.0",
        np.nan: "expected a finite number, got nan",
        np.inf: "expected a finite number, got inf",
        -np.inf: "expected a finite number, got -inf",
    }.items()
}
TEMPERATURE["temperature 0.0"] = (
    ValueError,
    "temperature: expected a number above 0, got 0.0",
    {"temperature": 0.0},
)
TEMPERATURE["temperature beyond"] = (
    ValueError,
    "temperature: expected a finite number, got an integer beyond float64",
    {"temperature": 10**400},
)
TEMPERATURE |= {
    f"temperature {type(value).__name__}": (
        TypeError,
        f"temperature: expected a finite number, got {value!r}",
        {"temperature": value},
    )
    for value in ("1", None, [1.0, 2.0], 1j, np.array("1"), np.complex64(2))
}
WHERE = {
    f"where {name}": (TypeError, f"where: expected bool, got {found}", {"where": where})
    for name, found, where in (
        ("integers", "int64; write where != 0", np.ones((3, 4), int)),
        ("floats", "float32; write where != 0", ones(3, 4)),
        ("1", "int64; write where != 0", 1),
        ("list", "int64; write where != 0", [0, 1, 0, 1]),
        ("text", "<U3", "yes"),
    )
}
WHERE |= {
    f"where {shape}": (
        ValueError,
        f"where: expected a shape that broadcasts to (3, 4) of x, got {shape}",
        {"where": np.ones(shape, bool)},
    )
    for shape in ((4, 3), (2, 4), (1, 3, 4), (0,), (5, 3, 4))
}
WHERE["where of rows"] = (
    ValueError,
    "where: expected a shape that broadcasts to (3, 4) of x, got (3,); write where[:, None]",
    {"where": np.ones(3, bool)},
)
WHERE["where of keys"] = (
    ValueError,
    "where: expected a shape that broadcasts to (2, 3, 5, 7) of x, got (2, 7); "
    "write where[:, None, None, :]",
    {"x": ones(2, 3, 5, 7), "where": np.ones((2, 7), bool)},
)
WHERE |= elsewhere("where")
WHERE["where of a column"] = (
    ValueError,
    "where: expected a shape that broadcasts to (3, 1) of x, got (2,)",
    {"x": np.zeros((3, 1)), "where": np.ones(2, bool)},
)
KEEPDIMS = {
    f"keepdims {value!r}": (
        TypeError,
        f"keepdims: expected True or False, got {value!r}",
        {"keepdims": value},
    )
    for value in (1, 0, None, "yes", np.ones(1, bool))
}
KEEPDIMS["out of keepdims"] = (
    ValueError,
    "out: expected shape (3, 1), got (3,)",
    {"keepdims": True, "out": ones(3)},
)


def out(*shape):
    """The rows of `out` for a function whose result has this shape."""
    repeated, strides = as_strided(ones(12), shape, (0,) * len(shape)), (0,) * len(shape)
    refused = {
        "out list": (TypeError, "out: expected a numpy.ndarray, got <class 'list'>", {"out": [0.0]})
    }
    refused |= {
        f"out {text}": (ValueError, f"out: expected {text}", {"out": x})
        for text, x in (
            ("a writable array, got a read-only one", read_only(*shape)),
            ("an aligned array, got an unaligned one", LAYOUTS["unaligned"](ones(*shape))),
            (
                f"elements that do not share memory, got strides {strides} for shape {shape}",
                repeated,
            ),
        )
    }
    for wrong in ((4, 3), (3, 5), (3, 4, 1), (1, 3, 4), (), (1,)):
        text = f"out: expected shape {shape}, got {wrong}"
        refused[f"out {wrong}"] = (ValueError, text, {"out": ones(*wrong)})
    for dtype in map(np.dtype, (np.float64, np.float16, BFLOAT16, np.int32, ">f4")):
        text = f"out: expected dtype float32 in native byte order, got {dtype}"
        refused[f"out {dtype}"] = (ValueError, text, {"out": np.ones(shape, dtype)})
    return refused


INTEGER_OUT = {
    "out of integers": (
        ValueError,
        "out: expected dtype float64 in native byte order, got int64",
        {"x": np.zeros((3, 4), int), "out": np.empty((3, 4), int)},
    )
}


def grad(weights):
    """The rows of grad for the function whose weights have this name."""
    refused = {
        f"grad {shape}": (
            ValueError,
            f"grad: expected shape (3, 4) of {weights}, got {shape}",
            {"grad": ones(*shape)},
        )
        for shape in ((4, 3), (4,), (1, 4), (3, 4, 1), ())
    }
    refused |= {
        f"grad {dtype}": (
            TypeError,
            f"grad: expected dtype float32 of {weights}, got {read_as}; "
            f"write grad.astype({weights}.dtype)",
            {"grad": np.zeros((3, 4), dtype)},
        )
        for dtype, read_as in (
            ("float64", "float64"),
            ("float16", "float16"),
            (BFLOAT16, "bfloat16"),
            ("int64", "float64"),
        )
    }
    refused["grad complex"] = (
        TypeError,
        f"grad: expected {FLOATS}, got complex128",
        {"grad": np.zeros((3, 4), complex)},
    )
    # To write grad.astype(weights.dtype) would make it integers.
    refused["grad beside integers"] = (
        TypeError,
        f"grad: expected dtype float64 of {weights}, got float32; write grad.astype(np.float64)",
        {weights: np.ones((3, 4), int)},
    )
    return refused


def per_row(name):
    """The rows for an argument of logsumexp_backward with one value per row."""
    refused = {
        f"{name} {shape}": (
            ValueError,
            f"{name}: expected shape (3,) or (3, 1), one value per row of x, got {shape}",
            {name: ones(*shape)},
        )
        for shape in ((4,), (3, 4), (1, 3), (), (3, 1, 1))
    }
    refused |= {
        f"{name} {dtype}": (
            TypeError,
            f"{name}: expected dtype float32 of x or float32, got {dtype}; "
            f"write {name}.astype(x.dtype)",
            {name: np.zeros(3, dtype)},
        )
        for dtype in map(np.dtype, (np.float64, np.float16))
    }
    refused[f"{name} complex"] = (
        TypeError,
        f"{name}: expected {FLOATS}, got complex128",
        {name: np.zeros(3, complex)},
    )
    refused[f"{name} beside integers"] = (
        TypeError,
        f"{name}: expected dtype float64 of x or float64, got float32; "
        f"write {name}.astype(np.float64)",
        {"x": np.ones((3, 4), int), "grad": np.zeros(3), "lse": np.zeros(3), name: ones(3)},
    )
    return refused


def weighted(given):
    """The rows for b, for a function that takes `given` beside it."""
    return {
        f"b {name}": (exception, f"b: {text}", given | {"b": b})
        for name, exception, text, b in (
            ("complex", TypeError, f"expected {FLOATS}, got complex128", np.zeros(4, complex)),
            ("longdouble", TypeError, f"expected {FLOATS}, got float128", np.ones(4, "g")),
            ("no array", TypeError, f"expected {FLOATS}, got object", OBJECT),
            ("shape", ValueError, "expected a shape that broadcasts with (3, 4) of x, got (3,)",
             ones(3)),
        )
    } | {
        "b half": (
            TypeError,
            "b: expected a dtype that has a common one with float16 of x, got bfloat16",
            given | {"x": np.ones((3, 4), np.float16), "b": np.ones(4, BFLOAT16)},
        ),
        "x beside b": (TypeError, f"x: expected {FLOATS}, got complex128",
                       given | {"x": np.zeros((3, 4), complex), "b": 1.0}),
        "axis beside b": (ValueError, "axis: expected -2 to 1 for x of shape (3, 4), got 2",
                          given | {"b": 1.0, "axis": 2}),
    }  # fmt: skip


RETURN_SIGN = {
    f"return_sign {value!r}": (
        TypeError,
        f"return_sign: expected True or False, got {value!r}",
        {"return_sign": value},
    )
    for value in (1, None, "yes")
}
WEIGHTED_OUT = {
    "out beside b": (ValueError, "out: expected shape (3,), got (4,)", {"b": 1.0, "out": ones(4)}),
    "where beside b": (
        TypeError,
        "where: expected bool, got int64; write where != 0",
        {"b": 1.0, "where": np.ones((3, 4), int)},
    ),
}
SIGN = {
    "sign complex": (
        TypeError,
        f"sign: expected {FLOATS}, got complex128",
        {"b": ones(4), "sign": np.zeros(3, complex)},
    ),
    "sign shape": (
        ValueError,
        "sign: expected shape (3,) or (3, 1), one value per row of x, got (4,)",
        {"b": ones(4), "sign": ones(4)},
    ),
    "grad beside b": (
        ValueError,
        "grad: expected shape (3,) or (3, 1), one value per row of x, got (4,)",
        {"b": ones(4), "grad": ones(4)},
    ),
}
HALF = {
    "grad of half": (
        TypeError,
        "grad: expected dtype float16 of x or float32, got float64; write grad.astype(x.dtype)",
        {"x": np.ones((3, 4), np.float16), "grad": np.zeros(3)},
    )
}
MANY_AXES = {
    "axes of a Jacobian": (
        ValueError,
        "axis: expected a Jacobian of at most 64 axes, got 80",
        {"weights": np.zeros((1,) * 40), "axis": None},
    )
}


def unknown(name):
    text = f"{{function}}() got an unexpected keyword argument '{name}'"
    return {name: (TypeError, text, {name: True})}


MISSPELT = {
    "temprature": (
        TypeError,
        "{function}() got an unexpected keyword argument 'temprature'. Did you mean 'temperature'?",
        {"temprature": 2.0},
    ),
    "scale": (
        TypeError,
        "{function}() got an unexpected keyword argument 'scale'. Did you mean 'temperature'? The "
        "scores are divided by it",
        {"scale": 2.0},
    ),
}
DIM = {
    "dim": (
        TypeError,
        "{function}() got an unexpected keyword argument 'dim'. Did you mean 'axis'?",
        {"dim": -1},
    )
}
MASK = {
    "mask": (
        TypeError,
        "{function}() got an unexpected keyword argument 'mask'. Did you mean 'where'?",
        {"mask": True},
    )
}

BACKWARD = {sdpa.softmax_backward: "weights", sdpa.log_softmax_backward: "log_weights"}
NAMES = BACKWARD | {sdpa.softmax_jacobian: "weights"}
TABLE = [(function, rows(NAMES.get(function, "x"))) for function in SOFTMAX]
TABLE += [
    (function, TEMPERATURE | MISSPELT)
    for function in SOFTMAX
    if "temperature" in inspect.signature(function).parameters
]
TABLE += [(function, WHERE | SCALAR | MASK) for function in FORWARD]
TABLE += [(function, DIM) for function in SOFTMAX]
TABLE += [(function, grad(weights)) for function, weights in BACKWARD.items()]
TABLE += [
    (sdpa.softmax, out(3, 4) | INTEGER_OUT | unknown("keepdims")),
    (sdpa.log_softmax, out(3, 4) | INTEGER_OUT),
    (sdpa.logsumexp, out(3) | KEEPDIMS | unknown("temperature")),
    (sdpa.logsumexp, weighted({}) | RETURN_SIGN | WEIGHTED_OUT),
    (sdpa.logsumexp_backward, per_row("grad") | per_row("lse") | HALF),
    (sdpa.logsumexp_backward, weighted({}) | SIGN),
    (sdpa.softmax_jacobian, MANY_AXES | unknown("where")),
]
