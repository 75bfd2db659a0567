"""What is timed: every line of work with its contenders, by group."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise, product
from typing import Any

import numpy as np

import sdpa
from benchmarks import additive
from benchmarks.after import after
from benchmarks.bridges import bridge, calls, in_jax, in_onnx
from benchmarks.contenders import (
    SHAPES,
    SHORT,
    Array,
    Contender,
    Contenders,
    Setting,
    Work,
    against_peers,
    check,
    flops,
    operands,
    ours,
    title,
)
from benchmarks.long import long
from benchmarks.masks import masks
from benchmarks.peers import Operands
from benchmarks.programs import programs
from benchmarks.softmax import softmax
from benchmarks.threads import threads
from benchmarks.variants import variants
from sdpa_lab.experiments.speed import numpy_backward, numpy_weights
from sdpa_lab.tools.clock import Call


def matrices(setting: Setting) -> Iterator[Work]:
    """Forward, backward, and both against the peers, on ordinary shapes."""
    for heads, n, d, is_causal in [*((*shape, False) for shape in SHAPES), (*SHAPES[0], True)]:
        size = (heads, setting.length(n), d)

        def draw(size: tuple[int, ...] = size, is_causal: bool = is_causal) -> Operands:
            return operands(*size, is_causal=is_causal)

        name = title(heads, n, d, is_causal)
        yield Work("forward", name, lambda draw=draw: against_peers(setting, draw(), "forward"))
        yield Work("backward", name, lambda draw=draw: {"sdpa": ours(draw())["backward"]})
        yield Work("both", name, lambda draw=draw: against_peers(setting, draw(), "both"))


def causal(setting: Setting) -> Iterator[Work]:
    """Causal and full attention, alternating."""
    for direction in ("forward", "backward"):

        def build(direction: str = direction) -> Contenders:
            size = (8, setting.length(1024), 64)
            return {
                "full": ours(operands(*size))[direction],
                "causal": ours(operands(*size, is_causal=True))[direction],
            }

        yield Work("causal", direction, build)


def narrow_dtypes() -> dict[str, Any]:
    """The types of 16 bits that there are."""
    found: dict[str, Any] = {"float16": np.float16}
    with suppress(ImportError):
        import ml_dtypes

        found["bfloat16"] = ml_dtypes.bfloat16
    return found


def dtypes(setting: Setting) -> Iterator[Work]:
    """float64 beside its own peak; 16-bit types beside float32."""
    size = (8, setting.length(1024), 64)
    for direction in ("forward", "backward"):

        def double(direction: str = direction) -> Contenders:
            return {"sdpa": ours(operands(*size, dtype=np.float64))[direction]}

        yield Work("dtypes", f"float64 {direction}", double)
    yield Work(
        "dtypes",
        "float64 both",
        lambda: against_peers(setting, operands(*size, dtype=np.float64), "both"),
    )
    for name, dtype in narrow_dtypes().items():

        def half(dtype: Any = dtype) -> Contenders:
            x = operands(*size, dtype=dtype)
            found = {"float32": ours(operands(*size))["forward"], "sdpa": ours(x)["forward"]}
            torch = setting.torch()
            if torch is not None and (call := torch.forward(x)) is not None:
                check("torch", torch.result(call), sdpa.attention(*x[:3]))
                found["torch"] = found["sdpa"]._replace(call=call)
            return found

        yield Work("dtypes", f"{name} forward", half)


def small(setting: Setting) -> Iterator[Work]:
    """Calls whose work is little: what comes around it counts."""
    for direction in ("forward", "both"):

        def one(direction: str = direction) -> Contenders:
            x = operands(1, 10, 64)
            found = against_peers(setting, x, direction)
            matrix = Operands(*(a[0, 0] for a in x[:4]))
            q, k, v, g, _ = matrix
            if direction == "forward":
                return found | {
                    "sdpa": found["sdpa"]._replace(call=lambda: sdpa.attention(q, k, v))
                }

            def both() -> object:
                out, lse = sdpa.attention_forward(q, k, v)
                return sdpa.attention_backward(g, q, k, v, out, lse)

            return found | {"sdpa": found["sdpa"]._replace(call=both)}

        yield Work("small", f"(10, 64) {direction}", one)
        yield Work(
            "small",
            f"(16, 8, 10, 64) {direction}",
            lambda d=direction: against_peers(setting, operands(8, 10, 64, batch=16), d),
        )


def short(setting: Setting) -> Iterator[Work]:
    """Many short heads: gradients beside NumPy's, for which its forward kept the weights."""

    def build(x: Operands, direction: str) -> Contenders:
        q, k, v, g, _ = x
        kept = numpy_weights(q, k)
        found = {"sdpa": ours(x, setting.threads)[direction]}
        calls = {
            "forward": lambda: numpy_weights(q, k) @ v,
            "backward": lambda: numpy_backward(g, q, k, v, kept),
            "both": lambda: numpy_backward(g, q, k, v, numpy_weights(q, k)),
        }
        return found | {"numpy": found["sdpa"]._replace(call=calls[direction])}

    for batch, heads, n, d in SHORT:
        size = max(batch // 32, 1) if setting.quick else batch
        for direction in ("forward", "backward", "both"):

            def draw(b: int = size, h: int = heads, n: int = n, d: int = d) -> Operands:
                return operands(h, n, d, batch=b)

            name = f"{batch}x{title(heads, n, d)} {direction}"
            yield Work("short", name, lambda draw=draw, to=direction: build(draw(), to))


def decode(setting: Setting) -> Iterator[Work]:
    """One query over many keys; at 65536 keys, or with a batch, K and V come from memory."""
    for heads, key_heads, keys in ((8, 8, 4096), (8, 8, 65536), (8, 1, 65536)):

        def build(heads: int = heads, key_heads: int = key_heads, keys: int = keys) -> Contenders:
            x = operands(heads, 1, 128, key_heads=key_heads, keys=setting.length(keys))
            return against_peers(setting, x, "forward")

        yield Work("decode", f"{heads}:{key_heads} heads, {keys} keys", build)
    yield Work(
        "decode",
        "32 x 8:8 heads, 1024 keys",
        lambda: against_peers(
            setting, operands(8, 1, 128, batch=32, keys=setting.length(1024)), "forward"
        ),
    )
    for (name, dtype), heads, d in product(narrow_dtypes().items(), (1, 8), (64, 128)):

        def narrow(dtype: Any = dtype, heads: int = heads, d: int = d) -> Contenders:
            x = operands(heads, 1, d, keys=setting.length(65536))
            mixed = x._replace(key=x.key.astype(dtype), value=x.value.astype(dtype))
            found = {"float32": ours(x)["forward"], "sdpa": ours(mixed)["forward"]}
            numpy = next(peer for peer in setting.peers if peer.name == "numpy")
            call = numpy.forward(x)
            assert call is not None
            check("numpy", numpy.result(call), sdpa.attention(*x[:3]))
            return found | {"numpy": found["float32"]._replace(call=call)}

        yield Work("decode", f"{name} keys, {heads} heads, d = {d}", narrow)

    def append() -> Contenders:
        """Beside 200 positions; a window, so that the cache never fills up."""
        held, new = (operands(12, n, 64)[1:3] for n in (200, 1))
        cache = sdpa.KVCache(1, 12, 64, capacity=1024, window=(200, 0))
        cache.append(*held)
        size = 2.0 * (new[0].nbytes + new[1].nbytes)

        def join() -> object:
            return [np.concatenate(pair, axis=2) for pair in zip(held, new, strict=True)]

        return {
            "sdpa": Contender(lambda: cache.append(*new), bytes=size),
            "numpy": Contender(join, bytes=size),
        }

    yield Work("decode", "a token into a cache, 12 heads", append)


def columns(x: Array) -> Array:
    """Each matrix column by column."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def column_major(x: Operands) -> Operands:
    """As `DataFrame.to_numpy()` returns arrays."""
    return Operands(*(columns(a) for a in x[:4]))


def options(setting: Setting) -> Iterator[Work]:
    """What should cost nothing extra, beside the ordinary call ("plain"), per FLOP."""
    n = setting.length(1024)

    def masks(direction: str) -> Contenders:
        x = operands(8, n, 64)
        rng = np.random.default_rng(1)
        bias = rng.standard_normal((n, n), np.float32)
        rows = np.where(rng.random((n, 1)) < 0.1, -np.inf, bias).astype(np.float32)
        entries = np.where(rng.random((n, n)) < 0.1, -np.inf, bias).astype(np.float32)
        kept = np.ones((n, n), bool)
        found = {
            "plain": {},
            "mask of True": {"attn_mask": kept},
            "mask": {"attn_mask": np.isfinite(entries)},
            "bias": {"attn_mask": bias},
            "-inf rows": {"attn_mask": rows},
            "-inf entries": {"attn_mask": entries},
        }
        return {name: ours(x, **each)[direction] for name, each in found.items()}

    def spread(direction: str) -> Contenders:
        x = operands(8, n, 64)
        return {
            "plain": ours(x)[direction],
            "std 25": ours(x._replace(query=x.query * np.float32(25)))[direction],
            "std 900": ours(x._replace(query=x.query * np.float32(900)))[direction],
        }

    def layouts(direction: str) -> Contenders:
        x = operands(8, n, 64)
        arrays = (np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in x[:4])
        return {
            "plain": ours(x)[direction],
            "GQA 8:1": ours(operands(8, n, 64, key_heads=1))[direction],
            "BLHD": ours(Operands(*arrays))[direction],
            "column-major": ours(column_major(x))[direction],
            "reversed": ours(Operands(*(a[..., ::-1] for a in x[:4])))[direction],
        }

    def mask_layouts(direction: str) -> Contenders:
        x = operands(8, n, 64)
        mask = np.random.default_rng(1).random((n, n)) < 0.9
        found = {"plain": mask, "transposed": columns(mask), "reversed": mask[::-1, ::-1].copy()}
        found["reversed"] = found["reversed"][::-1, ::-1]
        return {name: ours(x, attn_mask=each)[direction] for name, each in found.items()}

    def widths(direction: str) -> Contenders:
        all_d = (64, 40, 72, 80, 96, 100)
        found = {f"d={d}": ours(operands(8, setting.length(512), d))[direction] for d in all_d}
        return {"plain": found.pop("d=64"), **found}

    for direction in ("forward", "backward"):
        for name, build in (
            ("masks", masks),
            ("spread", spread),
            ("layouts", layouts),
            ("layouts of masks,", mask_layouts),
            ("widths", widths),
        ):
            yield Work("options", f"{name} {direction}", lambda b=build, d=direction: b(d))

    def one_query() -> Contenders:
        x = operands(6, 1, 64, keys=640)
        return {"plain": ours(x)["forward"], "column-major": ours(column_major(x))["forward"]}

    yield Work("options", "layouts of one query", one_query)
    yield from invariant(setting)


def invariant(setting: Setting) -> Iterator[Work]:
    """What bits cost that do not depend on the rest of the call: prompts, and one query."""

    def build(x: Operands, direction: str) -> Contenders:
        return {
            "plain": ours(x)[direction],
            "invariant": ours(x, invariant=True)[direction],
        }

    prompts = ((8, 512, 32), (8, 1024, 64), (8, 1024, 128))
    for (heads, n, d), is_causal in product(prompts, (False, True)):
        for direction in ("forward", "backward"):

            def prompt(
                size: Any = (heads, n, d), is_causal: bool = is_causal, direction: str = direction
            ) -> Contenders:
                heads, n, d = size
                x = operands(heads, setting.length(n), d, is_causal=is_causal)
                return build(x, direction)

            yield Work("options", f"invariant {title(heads, n, d, is_causal)} {direction}", prompt)
    for d in (64, 128):

        def token(d: int = d) -> Contenders:
            return build(operands(8, 1, d, keys=setting.length(65536)), "forward")

        yield Work("options", f"invariant, one query, d = {d}", token)


def window(setting: Setting) -> Iterator[Work]:
    """A sliding window of w keys, itself included, at length 8192: FLOPs of the pairs it sees."""

    def build(direction: str) -> Contenders:
        n = setting.length(8192)
        x = operands(1, n, 64)
        found = {"plain": ours(x)[direction]}
        for w in (128, 256, 1024):
            size = setting.length(w)
            pairs = size * n - size * (size - 1) / 2
            share = pairs / n**2
            call = ours(x, window=(size - 1, 0))[direction]
            found[f"window {w}"] = call._replace(flops=call.flops * share)
        return found

    for direction in ("forward", "backward"):
        yield Work("window", direction, lambda d=direction: build(d))


PRODUCTS = {"statistics": 1, "jvp": 6, "double backward": 16}
"""Matrix products per pair of blocks, as src/kernels/statistics.h and tangent.h count them; the
forward has two."""


def derived(setting: Setting) -> Iterator[Work]:
    """Statistics, forward-mode and second derivatives."""

    def build() -> Contenders:
        x = operands(8, setting.length(1024), 64)
        q, k, v, g, _ = x
        rng = np.random.default_rng(2)
        tq, tk, tv = (rng.standard_normal(a.shape, np.float32) for a in (q, k, v))
        out, lse = sdpa.attention_forward(q, k, v)
        plain = ours(x)["forward"]
        calls: dict[str, Call] = {
            "statistics": lambda: sdpa.attention_statistics(q, k),
            "jvp": lambda: sdpa.attention_jvp(q, k, v, tq, tk, tv),
            "double backward": lambda: sdpa.attention_double_backward(
                tq, tk, tv, g, q, k, v, out, lse
            ),
        }
        return {"plain": plain} | {
            name: Contender(call, plain.flops / 2 * PRODUCTS[name]) for name, call in calls.items()
        }

    yield Work("derived", "8x1024x64", build)


LENGTHS = np.random.default_rng(3).permutation(np.linspace(16, 2048, 64).astype(int))
"""Of the packed sequences: uneven, and in no order."""


def packed(setting: Setting) -> Iterator[Work]:
    """Sequences of many lengths: packed, one call after the other, and padded to the longest."""

    def build(direction: str) -> Contenders:
        n = [setting.length(int(length)) for length in LENGTHS]
        cu = np.concatenate([[0], np.cumsum(n)])
        slices = [slice(*pair) for pair in pairwise(cu.tolist())]
        x = operands(int(cu[-1]), 2, 64)
        q, k, v, g = (np.ascontiguousarray(a[0]) for a in x[:4])
        together = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        heads_first = [[a[s].swapaxes(0, 1) for a in (q, k, v, g)] for s in slices]
        shape = (len(n), 2, max(n), 64)
        padded = [np.zeros(shape, np.float32) for _ in range(4)]
        for s, arrays in enumerate(heads_first):
            for to, a in zip(padded, arrays, strict=True):
                to[s, :, : a.shape[1]] = a
        calls: dict[str, Call] = {
            "sdpa": lambda: sdpa.attention(q, k, v, **together),
            "call by call": lambda: [sdpa.attention(*each[:3]) for each in heads_first],
            "padded": lambda: sdpa.attention(*padded[:3], key_lengths=n),
        }
        if direction == "backward":
            saved = sdpa.attention_forward(q, k, v, **together)
            each = [(*sdpa.attention_forward(*a[:3]), a) for a in heads_first]
            whole = sdpa.attention_forward(*padded[:3], key_lengths=n)
            calls = {
                "sdpa": lambda: sdpa.attention_backward(g, q, k, v, *saved, **together),
                "call by call": lambda: [
                    sdpa.attention_backward(a[3], *a[:3], out, lse) for out, lse, a in each
                ],
                "padded": lambda: sdpa.attention_backward(
                    padded[3], *padded[:3], *whole, key_lengths=n
                ),
            }
        count = 4.0 * 2 * 64 * sum(length**2 for length in n)
        count *= 2.5 if direction == "backward" else 1
        return {name: Contender(call, count) for name, call in calls.items()}

    for direction in ("forward", "backward"):
        yield Work("packed", direction, lambda d=direction: build(d))


def received(setting: Setting) -> Iterator[Work]:
    """What keys receive, by its two products, beside the columns of NumPy's weights."""

    def build(heads: int, n: int) -> Contenders:
        q, k = operands(heads, setting.length(n), 64)[:2]

        def by_numpy() -> tuple[Array, Array]:
            p = numpy_weights(q, k)
            return p.sum(axis=-2), p.max(axis=-2)

        work = 4.0 * heads * q.shape[-2] * k.shape[-2] * 64
        return {
            "sdpa": Contender(lambda: sdpa.attention_received(q, k), work),
            "numpy": Contender(by_numpy, work),
        }

    for heads, n in ((8, 1024), (1, 4096)):
        yield Work("received", f"{heads}x{n}x64", lambda h=heads, n=n: build(h, n))


def sweep(setting: Setting) -> Iterator[Work]:
    """Speed over n and over d, for the plots."""
    for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        size = (8, setting.length(n), 64)
        yield Work(
            "sweep", f"n={n}", lambda s=size: against_peers(setting, operands(*s), "forward")
        )
    for d in (16, 32, 48, 64, 80, 96, 128, 192, 256):
        size = (8, setting.length(512), d)
        yield Work(
            "sweep", f"d={d}", lambda s=size: against_peers(setting, operands(*s), "forward")
        )


def growth(setting: Setting) -> Iterator[Work]:
    """Growth of time with n, for one head with d = 64."""

    def forward(n: int) -> Contenders:
        x = operands(1, setting.length(n), 64)
        # Without the forward that a backward needs first, which takes seconds here.
        call = Contender(lambda: sdpa.attention(*x[:3]), flops(x), 4.0 * x.query.nbytes)
        return {"sdpa": call}

    def backward(n: int) -> Contenders:
        return {"sdpa": ours(operands(1, setting.length(n), 64))["backward"]}

    for n in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        yield Work("growth", f"forward {n}", lambda n=n: forward(n))
        if n <= 16384:
            yield Work("growth", f"backward {n}", lambda n=n: backward(n))


def additive_attention(setting: Setting) -> Iterator[Work]:
    """Additive attention, counted in tanh; a compiler beside PyTorch lets it compile."""
    for n, d in additive.SHAPES:
        for direction in ("forward", "both"):

            def build(n: int = n, d: int = d, direction: str = direction) -> Contenders:
                x = additive.draw(setting.length(n), d)
                compiled = not setting.quick and shutil.which("g++") is not None
                found = additive.calls(x, setting.peers, direction, compiled=compiled)
                expected = np.asarray(found["sdpa"]())
                for name, call in found.items():
                    check(name, np.asarray(call()), expected)
                return {name: Contender(call, x.count) for name, call in found.items()}

            yield Work("additive", f"{n}x{d} {direction}", build)


GROUPS = {
    "forward": matrices,
    "backward": matrices,
    "both": matrices,
    "causal": causal,
    "dtypes": dtypes,
    "threads": threads,
    "after": after,
    "small": small,
    "short": short,
    "jax": in_jax,
    "onnx": in_onnx,
    "decode": decode,
    "softmax": softmax,
    "options": options,
    "window": window,
    "derived": derived,
    "packed": packed,
    "received": received,
    "variants": variants,
    "additive": additive_attention,
    "bridge": bridge,
    "calls": calls,
    "sweep": sweep,
    "growth": growth,
    "long": long,
    "masks": masks,
    "programs": programs,
}


WITH_THREADS = {
    *("forward", "both", "threads", "after", "small", "short", "decode", "softmax", "packed")
}
"""What is measured with more than one thread; the rest says nothing new there."""


def works(setting: Setting, only: set[str]) -> list[Work]:
    """All work of the groups with these names."""
    found: dict[tuple[str, str], Work] = {}
    for group, make in GROUPS.items():
        if group in only and (setting.threads == 1 or group in WITH_THREADS):
            found |= {(w.group, w.name): w for w in make(setting) if w.group == group}
    return list(found.values())
