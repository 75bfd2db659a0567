"""Calls the public functions with arguments drawn from the bytes of a fuzzer: `make fuzz`.

Whatever the arguments, a call raises TypeError or ValueError, or its results are those of
sdpa.reference. Most arguments fit each other, some are wrong in type, shape or value. In one call
in six an argument has hooks that change another or raise: the address sanitizer judges those.
"""

import contextlib
import inspect
import os
import sys
from pathlib import Path

import atheris
import ml_dtypes
import numpy as np

# Without its feedback the fuzzer draws the same calls whatever the code: `make fuzz-ci`.
BLIND = os.environ.get("SDPA_FUZZ_BLIND") == "1"
with contextlib.nullcontext() if BLIND else atheris.instrument_imports(include=["sdpa"]):
    import sdpa
    from sdpa import reference

    sys.path.append(str(Path(__file__).parents[1]))
    from fuzz import programs
    from support import calls, hostile

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ODD_DTYPES = [
    ">f4",
    ">f8",
    np.int64,
    bool,
    np.complex64,
    object,
    np.longdouble,
    "S3",
    "M8[s]",
    ">f2",
]
LARGE = [2**31, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**80)]
ODD = [None, True, "x", b"", 1.5, np.nan, np.inf, -1, 0, (), [], {}, object(), np.float32(1), 2j]


class Draw:
    """Values from bytes; where there are no more, the first of each choice."""

    def __init__(self, data):
        self.bytes = atheris.FuzzedDataProvider(data)
        self.rng = np.random.default_rng(self.bytes.ConsumeIntInRange(0, 255))

    def integer(self, low, high):
        return self.bytes.ConsumeIntInRange(low, high)

    def rarely(self, n=12):
        """Return True once in n draws, and not at the end of the bytes."""
        return self.integer(0, n - 1) == n - 1

    def choice(self, values):
        return values[self.integer(0, len(values) - 1)]

    def mostly(self, values, wrong):
        """Return one of the values, seldom something wrong."""
        return self.choice(wrong if self.rarely(20) else values)

    def number(self, low, high):
        """Return an integer within the bounds, or any other thing."""
        if self.rarely(20):
            return self.choice(LARGE + ODD)
        return self.integer(low, high)

    def array(self, shape, dtype, sign=None):
        """Return an array of that shape and type, or of nearly those, in any layout."""
        shape = list(shape)
        if shape and self.rarely(20):
            shape[self.integer(0, len(shape) - 1)] = self.integer(0, 3)
        if self.rarely(20):
            shape = shape[1:] if self.rarely(2) else [self.integer(0, 2), *shape]
        if self.rarely(20):
            dtype = self.choice(DTYPES + ODD_DTYPES)
        x = self.rng.standard_normal(shape)
        x = x if sign is None else sign * abs(x)
        if np.dtype(dtype).kind in "SMO":
            x = np.zeros(shape)
        with np.errstate(all="ignore"):
            x = x.astype(dtype)
        match self.integer(0, 7):
            case 1:
                x = np.asfortranarray(x)
            case 2:
                x = np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x
            case 3:
                x = x[::-1] if x.ndim else x
            case 4:
                x = np.broadcast_to(x[:1], x.shape) if x.ndim and len(x) else x
            case 5:
                x = x.astype(x.dtype.newbyteorder())
            case 6:
                x = x.tolist() if self.rarely(4) and x.dtype.kind == "f" else x
        return x


def shape_of(draw, lead):
    """Return a shape that broadcasts to `lead`."""
    keep = draw.integer(0, len(lead))
    return [draw.choice([n, n, 1]) for n in lead[len(lead) - keep :]]


def options_of(draw, lead, n_q, n_k, dtype):
    """Return options of attention, each in a third of all calls."""
    batch = lead[:-1]
    makers = {
        "attn_mask": lambda: draw.array(
            shape_of(draw, [*lead, n_q, n_k]), draw.choice([bool, dtype, np.float32])
        ),
        "is_causal": lambda: draw.mostly([True, "upper_left", "lower_right", False], [1, "x"]),
        "scale": lambda: draw.mostly([0.5, None, 0, -0.25, 1e-3], [np.nan, np.inf, "x"]),
        "softcap": lambda: draw.mostly([1.5, None, 20, 1e4], [0, -1, np.nan, "x"]),
        "window": lambda: (
            draw.choice([None, draw.number(0, 9)]),
            draw.choice([None, draw.number(0, 9)]),
        ),
        "sinks": lambda: draw.array(shape_of(draw, lead), dtype),
        "alibi_slopes": lambda: draw.array(shape_of(draw, lead), dtype),
        "key_lengths": lambda: draw.choice(
            [draw.number(0, n_k), draw.rng.integers(0, n_k + 1, shape_of(draw, batch))]
        ),
        "query_offset": lambda: draw.choice(
            [draw.number(-9, 9), draw.rng.integers(-9, 9, shape_of(draw, batch))]
        ),
        "dropout_p": lambda: draw.mostly([0.5, 0, 1, 0.1], [-1, 2, np.nan, "x"]),
        "invariant": lambda: draw.mostly([True, False], [1, None]),
        "workers": lambda: draw.number(1, 3),
        "enable_gqa": lambda: True,
    }
    options = {name: make() for name, make in makers.items() if draw.integer(0, 2) == 2}
    if "dropout_p" in options:
        options["rng"] = draw.number(0, 2**64 - 1)
    return options


def near(x):
    """Return integers moved to where int64 does not overflow: beyond all indices, as they were."""
    if isinstance(x, tuple):
        return tuple(near(n) for n in x)
    return max(-(10**6), min(10**6, x)) if isinstance(x, int) and not isinstance(x, bool) else x


def expected(name, arguments, options):
    """Return what the oracle computes, in float64."""
    if "b" in options:
        return weighted(*arguments, **options)
    unknown = ["workers", "invariant"]
    if name == "attention_statistics":
        unknown += ["dropout_p", "rng"]  # they are those of the weights before dropout
    options = {n: x for n, x in options.items() if n not in unknown}
    options |= {n: near(x) for n, x in options.items() if n in ("window", "query_offset")}
    return getattr(reference, name)(*(np.asarray(x) for x in arguments), **options)


def weighted(x, axis=-1, *, b=1, return_sign=False, where=None, keepdims=False):
    """Return what sdpa.logsumexp of these weights is, from more digits than those of float64."""
    x, b = (np.asarray(y, np.float64).astype(np.longdouble) for y in np.broadcast_arrays(x, b))
    seen = (b != 0) & (True if where is None else np.asarray(where))
    shift = np.max(x, axis, keepdims=True, initial=-np.inf, where=seen)
    total = np.sum(np.where(seen, b * np.exp(x - shift), 0), axis, keepdims=True)
    lse, sign = shift + np.log(abs(total)), np.sign(total)
    if not return_sign:
        lse = np.where(sign < 0, np.nan, lse)
    found = (y if keepdims else np.squeeze(y, axis) for y in (lse, sign))
    return tuple(found) if return_sign else next(found)


def check(name, found, oracle, arguments):
    """Compare results; the bound finds what is computed of wrong numbers, not a last digit."""
    found = found if isinstance(found, tuple) else (found,)
    oracle = oracle if isinstance(oracle, tuple) else (oracle,)
    eps = max(float(ml_dtypes.finfo(x.dtype).eps) for x in found if x is not None)
    for a, b in zip(found, oracle, strict=True):
        if a is None:
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (name, a.shape, b.shape)
        finite = np.abs(b[np.isfinite(b)])
        atol = 200 * eps * (1 + finite.max(initial=0))
        assert np.allclose(a, b, rtol=0, atol=atol, equal_nan=True), (name, arguments, a, b)


def attention(draw):
    """One of the functions of attention."""
    batch = [draw.integer(0, 2) for _ in range(draw.integer(0, 2))]
    group = draw.choice([1, 1, 2])
    key_heads = draw.choice([1, 2, 3, 0])
    n_q, n_k, d_k, d_v = (draw.integer(0, draw.choice([6, 40])) for _ in range(4))
    dtype = draw.choice(DTYPES)
    lead = [*batch, key_heads * group]
    options = options_of(draw, lead, n_q, n_k, dtype)
    if group > 1 and not draw.rarely():
        options["enable_gqa"] = True
    options |= programs.options_of(draw)
    narrow = dtype
    if dtype == np.float32 or draw.rarely(20):
        narrow = draw.choice([dtype, dtype, np.float16, ml_dtypes.bfloat16])
    query = draw.array([*lead, n_q, d_k], dtype)
    key = draw.array([*batch, key_heads, n_k, d_k], narrow)
    value = draw.array([*batch, key_heads, n_k, d_v], narrow)
    name = "attention" + draw.choice(
        ["", "_forward", "_backward", "_jvp", "_weights", "_statistics", "_received"]
    )
    arguments = [query, key]
    if name in ("attention_weights", "attention_statistics", "attention_received"):
        if name == "attention_weights":
            options["stage"] = draw.mostly(["weights", "scores", "capped", "biased"], ["x"])
        if name == "attention_statistics" and not draw.rarely(20):
            options.pop("dropout_p", None)
        return name, arguments, options
    arguments.append(value)
    if name == "attention_jvp":
        arguments += [draw.array(np.shape(x), np.asarray(x).dtype) for x in arguments]
    if name == "attention_backward":
        out, lse = sdpa.attention_forward(*arguments, **options)
        grad_out = draw.array(out.shape, dtype)
        arguments = [grad_out, *arguments, out, lse]
    return name, arguments, options


def softmax(draw):
    """One of the softmax family."""
    shape = [draw.integer(0, draw.choice([4, 40])) for _ in range(draw.integer(0, 3))]
    x = draw.array(shape, draw.choice(DTYPES))
    options = {}
    if draw.rarely(3):
        options["axis"] = draw.mostly([draw.number(-3, 3), None, (0, 1)], [(-1, -1), "x"])
    if draw.rarely(3):
        options["where"] = draw.array(shape_of(draw, shape), bool)
    name = draw.choice(["softmax", "log_softmax", "logsumexp"])
    if draw.rarely(3):
        option = "keepdims" if name == "logsumexp" else "temperature"
        valid = [True, False] if name == "logsumexp" else [0.5, 1e3]
        options[option] = draw.mostly(valid, [0, -1, np.nan, "x"])
    if name == "logsumexp" and draw.rarely(2):
        # Of one sign: where terms cancel, no digit may be left.
        sign, dtype = draw.choice([1, -1]), draw.choice(DTYPES)
        options["b"] = draw.array(shape_of(draw, shape), dtype, sign)
        options["return_sign"] = draw.mostly([True, False], [1, "x"])
    return name, [x], options


def places(arguments):
    """Where the arguments are, those in lists too: (container, its key, the argument)."""
    for name, x in arguments.items():
        yield arguments, name, x
        if isinstance(x, list):
            yield from ((x, i, y) for i, y in enumerate(x) if isinstance(y, np.ndarray))


def hostile_call(draw):
    """Any public function, with an argument whose hooks change another one or raise."""
    function = draw.choice(list(calls.CALLS))
    arguments = calls.everything(function)
    options = {"scale": 0.5, "window": (3, 4), "rng": 7, "workers": 2, "axis": -1}

    def biased(score, b, h, q, k, table):
        if draw.rarely(3):
            act()  # while it is traced
        return score + table[h % 2, abs(q - k) % 5]

    if draw.rarely(3):
        options |= {"score_mod": biased, "score_args": [draw.rng.standard_normal((2, 5))]}
    parameters = inspect.signature(function).parameters
    arguments |= {name: x for name, x in options.items() if name in parameters}
    found = list(places(arguments))
    arrays = [x for _, _, x in found if isinstance(x, np.ndarray)]
    if not arrays:
        return
    container, key, own = draw.choice(found)
    victim, change = draw.choice(arrays), draw.choice(hostile.CHANGES)
    quiet, exception = draw.integer(0, 3), draw.choice(hostile.RAISES)
    raises = draw.rarely(3)

    def act():
        nonlocal quiet
        quiet -= 1
        if quiet < 0 and raises:
            raise exception
        if quiet == -1:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                change(victim)

    hook = draw.choice(hostile.ARRAYS) if isinstance(own, np.ndarray) else hostile.scalar
    container[key] = hook(own, act)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        function(**arguments)


def one_input(data):
    """Make one call."""
    draw = Draw(data)
    options = None
    try:
        name, arguments, options = draw.choice([attention, attention, attention, softmax])(draw)
        if draw.rarely(6):
            hostile_call(draw)
            return
        found = getattr(sdpa, name)(*arguments, **options)
    except (TypeError, ValueError):
        return
    except IndexError:  # of a function, also in a call that draws an lse
        assert options is None or {"score_mod", "mask_mod"} & options.keys(), options
        return
    if options.get("dropout_p") and options["rng"] is None:
        return  # a fresh seed, which nobody else knows
    offset = options.get("query_offset")
    if "alibi_slopes" in options and near(offset) is not offset:
        return  # the bias of such a distance leaves no digit of the scores
    with np.errstate(all="ignore"):
        oracle = expected(name, arguments, options)
    check(name, found, oracle, (arguments, options))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
