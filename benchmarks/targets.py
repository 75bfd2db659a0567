"""The targets that were set before the kernels were written, and what became of each."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.after import MOST
from benchmarks.long import LENGTHS, WIDTHS, name_of
from benchmarks.masks import MASKS as DENSE
from benchmarks.programs import MASKS as HIDING
from benchmarks.results import Results, Timing


class Goal(NamedTuple):
    """A bound and its direction."""

    bound: float
    at_least: bool = True

    def margin(self, value: float) -> float:
        """How far `value` is inside the bound, as a fraction of it; negative if outside."""
        return (value / self.bound - 1) if self.at_least else (1 - value / self.bound)


class Row(NamedTuple):
    """One target with its measurement."""

    section: str
    title: str
    unit: str
    value: float
    goal: Goal | None
    """None if no goal is set for this instruction set."""
    beside: str = ""
    """The best peer."""
    among: tuple[str, ...] = ()
    """The peers of whom it is the best; another one may be in another run."""

    @property
    def label(self) -> str:
        return self.title + (f", against {self.beside}" if self.beside else "")

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """What a row has in common with the same row of other runs."""
        return self.section, self.title, self.among


# {(heads x L x d): (AVX-512 of AMD, AVX2, AVX-512 of Intel)}, in % of the FMA peak.
FORWARD = {
    "8x1024x64": (87, 85, 86),
    "8x512x64": (87, 85, 86),
    "8x2048x128": (90, 89, 88),
    "8x512x256": (90, 89, 88),
    "8x512x32": (82, 78, 78),
    "8x128x64": (85, 83, 86),
    "8x1024x64 causal": (82, 82, None),
}
BACKWARD = {
    "8x1024x64": (89, 90, 84),
    "8x512x64": (89, 90, 84),
    "8x2048x128": (90, 91, 84),
    "8x512x256": (90, 91, 84),
    "8x512x32": (82, 85, 84),
    "8x128x64": (86, 88, 84),
    "8x1024x64 causal": (80, 82, None),
}
COLUMN = {"avx512": 0, "avx512bf16": 0, "amx": 0, "avx2": 1}
INTEL = 2

RUNTIMES = ("ort", "ort-mha", "openvino", "torch", "jax")
TRAINERS = ("torch", "jax")
OURS = {"sdpa", "plain", "copy"}
LARGE = {"1x2048x64", "8x1024x64"}
"""Where threads are to share the work; elsewhere they are to do no harm."""
MASKS = {"mask of True", "mask", "bias"}
LAYOUTS = {"column-major", "reversed", "transposed"}


def rows(results: Results) -> Iterator[Row]:
    """Every target whose work was measured, in the order of the table."""
    for section in (
        _matrices,
        _dtypes,
        _threads,
        _after,
        _small,
        _short,
        _decode,
        _softmax,
        _options,
        _derived,
        _packed,
        _received,
        _variants,
        _additive,
        _bridge,
        _calls,
        _jax,
        _growth,
        _long,
        _dense,
        _programs,
    ):
        yield from section(results)
    times = results.latest("import")
    if times:
        yield Row("import", "sdpa after numpy", "ms", 1e3 * min(times), Goal(10, at_least=False))


def _column(results: Results) -> int | None:
    """Which of a row's goals are for this machine, if any.

    Intel has goals of its own: there exponentials take the units of the products, and peers use
    AVX-512.
    """
    column = COLUMN.get(results.isa)
    return INTEL if column == 0 and "Intel" in results.processor else column


def _best(found: dict[str, Timing], among: tuple[str, ...]) -> str | None:
    there = [name for name in among if name in found]
    return min(there, key=lambda name: found[name].seconds) if there else None


def _against(
    section: str, title: str, found: dict[str, Timing], among: tuple[str, ...], bound: float | None
) -> Iterator[Row]:
    """How many times as fast as the best of `among`."""
    best = _best(found, among)
    if best is not None:
        ratio = found[best].seconds / found["sdpa"].seconds
        goal = None if bound is None else Goal(bound)
        yield Row(section, title, "x", ratio, goal, best, among)


def _matrices(results: Results) -> Iterator[Row]:
    column = _column(results)
    for direction, goals in (("forward", FORWARD), ("backward", BACKWARD)):
        for name, bounds in goals.items():
            found = results.get(1, direction, name)
            if found and (peak := results.rate(found["sdpa"])):
                bound = None if column is None else bounds[column]
                goal = None if bound is None else Goal(bound)
                share = 100 * found["sdpa"].gflops / peak
                yield Row(f"{direction}, share of the FMA peak", name, "%", share, goal)
    for direction, among, factors in (
        ("forward", RUNTIMES, (1.15, 1.10, 1.10)),
        ("both", TRAINERS, (2.3, 1.15, 1.15)),
    ):
        for name in FORWARD:
            found = results.get(1, direction, name)
            bound = None if column is None else factors[column]
            section = {"both": "forward and backward"}.get(direction, direction) + ", best peer"
            yield from _against(section, name, found, among, bound)
    for direction in ("forward", "backward"):
        found = results.get(1, "causal", direction)
        if found:
            share = found["causal"].seconds / found["full"].seconds
            yield Row("causal / full, time", direction, "x", share, Goal(0.56, False))


def _dtypes(results: Results) -> Iterator[Row]:
    for direction in ("forward", "backward"):
        found = results.get(1, "dtypes", f"float64 {direction}")
        if found and (peak := results.rate(found["sdpa"], "f64")):
            share = 100 * found["sdpa"].gflops / peak
            yield Row("float64, share of its FMA peak", direction, "%", share, Goal(77))
    found = results.get(1, "dtypes", "bfloat16 forward")
    if found:
        dot = results.rate(found["sdpa"], "bf16") if results.isa == "avx512bf16" else None
        if dot:
            share = 100 * found["sdpa"].gflops / dot
            yield Row("bfloat16, share of the dot-product peak", "forward", "%", share, Goal(85))
        else:
            ratio = found["sdpa"].seconds / found["float32"].seconds
            yield Row("bfloat16 / float32, time", "forward", "x", ratio, Goal(1.05, False))


def _threads(results: Results) -> Iterator[Row]:
    for count in results.threads():
        for name in results.names(count, "threads"):
            found = results.get(count, "threads", name)
            ratio = found["one"].seconds / found["all"].seconds
            if name.split()[0] in LARGE:
                goal = Goal(1.85) if count == 2 else None
                yield Row(f"{count} threads / one", name, "x", ratio, goal)
            else:
                # "No slower", but for what two measurements of one call differ by.
                yield Row(f"{count} threads / one, no slower", name, "x", ratio, Goal(0.97))


def _after(results: Results) -> Iterator[Row]:
    """Medians, because a worker that spins costs some calls more than others."""
    for count in results.threads():
        for name in results.names(count, "after"):
            found = results.get(count, "after", name)
            if "alone" in found:
                ratio = found["after a matmul"].middle / found["alone"].middle
                section = f"right after a matmul on {count} threads, median time / alone"
                yield Row(section, name, "x", ratio, Goal(MOST, at_least=False))
            else:
                yield from _against(name, f"threads: {count}", found, ("numpy", "torch"), None)


def _small(results: Results) -> Iterator[Row]:
    found = results.get(1, "small", "(10, 64) forward")
    if found:
        section = "small, forward"
        yield from _against(section, "(10, 64)", found, ("torch",), 3.0)
        yield from _against(section, "(10, 64)", found, ("numpy",), 4.0)
        microseconds = 1e6 * found["sdpa"].seconds
        # "About a microsecond": what rounds to one.
        yield Row(section, "(10, 64)", "us", microseconds, Goal(1.5, at_least=False))
    found = results.get(1, "small", "(16, 8, 10, 64) forward")
    among = (*RUNTIMES, "numpy")
    yield from _against("small, forward", "(16, 8, 10, 64)", found, among, 2.0)


def _short(results: Results) -> Iterator[Row]:
    for count in results.threads():
        for title in results.names(count, "short"):
            found = results.get(count, "short", title)
            bound = None if "forward" in title else 1.5 if "backward" in title else 2.0
            section = f"short heads, threads: {count}"
            yield from _against(section, title, found, ("numpy",), bound)
            if "x16x" in title and "backward" in title:
                rate = found["sdpa"].gflops / count
                yield Row(section, f"{title}, a thread", "GF/s", rate, Goal(60))
    if {1, 2} <= set(results.threads()):
        for title in results.names(2, "short"):
            one, two = (results.get(count, "short", title) for count in (1, 2))
            if one:
                ratio = one["sdpa"].seconds / two["sdpa"].seconds
                yield Row("short heads, 2 threads / one", title, "x", ratio, Goal(1.8))


def _decode(results: Results) -> Iterator[Row]:
    section = "decode (one query, d = 128)"
    title = "8:8 heads, 4096 keys"
    yield from _against(section, title, results.get(1, "decode", title), ("torch",), 1.2)
    title = "32 x 8:8 heads, 1024 keys"
    yield from _against(section, title, results.get(1, "decode", title), RUNTIMES, None)
    for title in ("8:8 heads, 65536 keys", "8:1 heads, 65536 keys", "32 x 8:8 heads, 1024 keys"):
        found = results.get(1, "decode", title)
        if found:
            speed = found["sdpa"].bytes / found["sdpa"].seconds / 1e9
            share = 100 * speed / results.read_speed()
            # "Close to": four fifths. With one key head the bytes are those of K and V read once.
            yield Row("decode, share of memory's speed", title, "%", share, Goal(80))
    for title in results.names(1, "decode"):
        if " keys, " in title and (found := results.get(1, "decode", title)).get("float32"):
            section = "one query, 65536 keys of 16 bits, times as fast"
            ratio = found["float32"].seconds / found["sdpa"].seconds
            yield Row(section, f"{title}, as float32", "x", ratio, Goal(1.7))
    title = "a token into a cache, 12 heads"
    if found := results.get(1, "decode", title):
        microseconds = 1e6 * found["sdpa"].seconds
        yield Row("decode, beside the query", title, "us", microseconds, Goal(8, at_least=False))
    for count in results.threads():
        section = f"decode beside NumPy's products, threads: {count}"
        for title in results.names(count, "decode"):
            found = results.get(count, "decode", title)
            yield from _against(section, title, found, ("numpy",), 1.0)


def _softmax(results: Results) -> Iterator[Row]:
    copied = ("(1000, 1000)", "(64, 8192)")
    for title, bound in (
        ("(1000, 1000)", 1.5),
        ("(64, 8192)", 1.5),
        ("(100000, 10)", 10.0),
        ("(10,)", 1.5),
    ):
        found = results.get(1, "softmax", title)
        yield from _against("softmax", title, found, ("torch",), bound)
        if title in copied:
            yield from _against("softmax", title, found, ("ort",), 1.15)
    relatives = [
        title for title in results.names(1, "softmax") if not title.startswith(("(", "axis"))
    ]
    for title in results.names(1, "softmax"):
        if title.startswith("axis 1"):
            found = results.get(1, "softmax", title)
            yield from _against("softmax along axis 1", title, found, ("torch",), 1.0)
    for title in relatives:
        found = results.get(1, "softmax", title)
        yield from _against("softmax's relatives", title, found, ("torch",), None)
        yield from _against("softmax's relatives", title, found, ("ort",), 1.15)
    for title in (*copied, *relatives):
        found = results.get(1, "softmax", title)
        if found:
            # A copy moves two arrays, a gradient three, logsumexp one: it writes next to nothing.
            ours, copy = (found[name].bytes / found[name].seconds for name in ("sdpa", "copy"))
            section = "softmax, bytes moved per second, share of a copy's"
            yield Row(section, title, "%", 100 * ours / copy, Goal(50))


def _options(results: Results) -> Iterator[Row]:
    for direction in ("forward", "backward"):
        for work in ("masks", "spread", "layouts", "layouts of masks,", "widths"):
            found = results.get(1, "options", f"{work} {direction}")
            for name in found:
                if name not in OURS:
                    ratio = found[name].per_flop / found["plain"].per_flop
                    most = 1.1 if name in LAYOUTS else 1.15 if name in MASKS else 1.20
                    title = f"mask, {name}" if work == "layouts of masks," else name
                    limit = Goal(most, at_least=False)
                    yield Row(f"{direction}, time per FLOP / plain", title, "x", ratio, limit)
    found = results.get(1, "options", "layouts of one query")
    if found:
        ratio = found["column-major"].seconds / found["plain"].seconds
        title = "one query, column-major"
        yield Row("forward, time per FLOP / plain", title, "x", ratio, Goal(1.5, at_least=False))
    for work in results.names(1, "options"):
        if work.startswith("invariant"):
            found = results.get(1, "options", work)
            ratio = found["invariant"].seconds / found["plain"].seconds
            goal = None if "query" in work else Goal(1.10, at_least=False)
            yield Row("time of invariant=True / plain", work, "x", ratio, goal)
    for direction in ("forward", "backward"):
        found = results.get(1, "window", direction)
        for name in found:
            if name not in OURS:
                # Blocks as long as the window touch at most twice its pairs.
                ratio = found[name].per_flop / found["plain"].per_flop
                goal = Goal(2.0, at_least=False) if name == "window 128" else None
                section = f"{direction}, n = 8192, time per visible pair / full"
                yield Row(section, name, "x", ratio, goal)


def _derived(results: Results) -> Iterator[Row]:
    found = results.get(1, "derived", "8x1024x64")
    for name in found:
        if name not in OURS:
            # "Near": nine tenths.
            share = found[name].gflops / found["plain"].gflops
            yield Row("rate of products / forward's", name, "x", share, Goal(0.9))


def _packed(results: Results) -> Iterator[Row]:
    for count in results.threads():
        for direction in results.names(count, "packed"):
            found = results.get(count, "packed", direction)
            section = f"64 packed sequences of 16 to 2048, {direction}, threads: {count}"
            for name, goal in (("call by call", Goal(1.10, at_least=False)), ("padded", None)):
                ratio = found["sdpa"].seconds / found[name].seconds
                yield Row(section, f"time / {name}", "x", ratio, goal)


def _received(results: Results) -> Iterator[Row]:
    for name in results.names(1, "received"):
        yield from _against("received", name, results.get(1, "received", name), ("numpy",), 1.0)


def _variants(results: Results) -> Iterator[Row]:
    for name in results.names(1, "variants"):
        found = results.get(1, "variants", name)
        yield from _against("variants", name, found, ("torch", "numpy", "jax"), None)


def _additive(results: Results) -> Iterator[Row]:
    for name in results.names(1, "additive"):
        found = results.get(1, "additive", name)
        # "Several times as fast": three at least.
        yield from _against("additive", name, found, ("numpy", "torch", "torch compiled"), 3.0)
        ours = found["sdpa"]
        tanh, single, double = (results.rate(ours, what) for what in ("tanh", "f32", "f64"))
        if tanh and single and double and name.endswith("forward"):
            n, d = map(int, name.split()[0].split("x"))
            share = 100 * ours.gflops / tanh
            yield Row("additive", f"{name}, share of the rate of tanh", "%", share, None)
            # Also the product with the values, and the projections, which are in float64.
            least = n * n * d / tanh + 2 * n * n * d / single + 4 * n * d * d / double
            share = 1e-7 * least / ours.seconds
            yield Row("additive", f"{name}, of tanh and products", "%", share, None)


def _growth(results: Results) -> Iterator[Row]:
    few, many = (results.get(1, "growth", f"backward {n}") for n in (2048, 16384))
    if few and many:
        ratio = many["sdpa"].gflops / few["sdpa"].gflops
        yield Row("growth", "backward, rate at 16384 / at 2048", "x", ratio, Goal(0.95))


def _long(results: Results) -> Iterator[Row]:
    for d in WIDTHS:
        rates = {}
        for n in LENGTHS:
            found = results.get(1, "long", name_of(n, d))
            if found:
                rates[n] = found["sdpa"].gflops
                yield from _against("backward", name_of(n, d), found, ("torch",), 1.1)
        if {1024, 16384} <= rates.keys():
            ratio = rates[16384] / rates[1024]
            title = f"backward, d = {d}, rate at 16384 / at 1024"
            yield Row("growth", title, "x", ratio, Goal(0.95))


def _dense(results: Results) -> Iterator[Row]:
    for name, mask in DENSE.items():
        for direction in ("forward", "backward"):
            found = results.get(1, "masks", f"{name} {direction}")
            if found:
                ratio = found["sdpa"].seconds / found["plain"].seconds
                goal = Goal(mask.bound, at_least=False)
                yield Row(f"{direction}, time / plain", name, "x", ratio, goal)


def _programs(results: Results) -> Iterator[Row]:
    """Functions of the user beside options, the plain call, what a mask shows, and PyTorch."""
    limits = (
        ("softcap", "option", 1.15),
        ("ALiBi", "plain", 1.3),
        ("score as it is", "plain", 1.2),
    )
    for direction in ("forward", "backward"):
        for name, other, most in limits:
            found = results.get(1, "programs", f"{name} {direction}")
            if found:
                ratio = found["sdpa"].seconds / found[other].seconds
                section = f"functions, {direction}, time / {other}"
                yield Row(section, name, "x", ratio, Goal(most, at_least=False))
        for name in HIDING:
            found = results.get(1, "programs", f"{name} {direction}")
            if found:
                ours, plain = found["sdpa"], found["plain"]
                most = round(1.25 * ours.flops / plain.flops + 0.02, 3)
                section = f"functions that mask, {direction}, time / plain"
                yield Row(section, name, "x", ours.seconds / plain.seconds, Goal(most, False))
    for name in ("softcap", "softcap, ALiBi, causal", "T5 bias"):
        found = results.get(1, "programs", f"{name} both")
        section = "functions, forward and backward, PyTorch's formula"
        yield from _against(section, name, found, ("torch",), 2.5)


def _bridge(results: Results) -> Iterator[Row]:
    """PyTorch's own kernel against sdpa in its place; the goal is for AVX-512."""
    for name in results.names(1, "bridge"):
        found = results.get(1, "bridge", name)
        if "installed" in found:
            ratio = found["torch"].seconds / found["installed"].seconds
            goal = Goal(2.0) if name == "8x512x64" and _column(results) == 0 else None
            section = "PyTorch, forward and backward, behind install()"
            yield Row(section, name, "x", ratio, goal, "torch")


def _calls(results: Results) -> Iterator[Row]:
    """The time of a small call behind install(), in that of PyTorch's own kernel."""
    for title, most in (("(1, 1, 10, 64) forward", 2.0), ("(1, 1, 10, 64) both", 1.8)):
        found = results.get(1, "calls", title)
        if found and "installed" in found:
            ratio = found["installed"].seconds / found["torch"].seconds
            section = "PyTorch, time of a small call behind install()"
            yield Row(section, title, "x", ratio, Goal(most, at_least=False), "torch")


def _jax(results: Results) -> Iterator[Row]:
    """JAX's own function against sdpa's, both compiled."""
    for name in results.names(1, "jax"):
        found = results.get(1, "jax", name)
        if "bridge" in found:
            ratio = found["jax"].seconds / found["bridge"].seconds
            yield Row("JAX, sdpa's function", name, "x", ratio, None, "jax")
