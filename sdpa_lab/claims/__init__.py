"""The ledger: every claim of the five notes, judged by measurement.

`python -m sdpa claims` prints it. A claim becomes one or several figures. For each figure the
record states the value that the note claims (`Expect.claimed`), the margin within which a
measurement agrees with it (`Expect.margin`) and, where we disagree, our own prediction
(`Expect.law`). The experiment returns independent draws (whole tensors, seeds or runs, never the
entries of one matrix, which depend on each other), and `judge` compares, by one rule for all rows.

How a row is added
------------------
Write an experiment with the signature `(seed, times) -> dict`. It returns, by the name of the
figure, `Draws` (one number per independent draw, with the statistic to take of them) or, where
nothing is random, `exact(value)`; `times` multiplies the numbers of draws (`draws(1000, times)`).
Random numbers come from `stream(seed, "name of the experiment", ...)`. It may return figures that
are not judged but help to understand the others. Then put a record into the tuple `CLAIMS` of the
module:

    CLAIMS = (
        Claim(
            id="unit-var",                      # one of IDS
            claim="What the notes say, in our words.",
            claim_zh="...",
            expect=(Expect("variance scaled d_k=64", claimed=1.0, margin=0.02),),
            holds="The statement if it is reproduced: {variance scaled d_k=64}.",
            law="The statement if it is not: the right law.",
            experiment=unit_variance,
        ),
    )

and the module's name into `MODULES`, and its id into `sentences.json`, beside the words of the
notes that it judges: the notes and lines of a row are read there. Names of figures contain none of
. : ! [ ] { }, because statements refer to them in braces: {NAME} shows the value with its interval,
{NAME:FORMAT} the value alone. A claim of the form "at least" has a margin (0, None). A row that
trains or times something is `slow`, and the main job leaves it out; one that times something is
`timed` as well, and each process is a draw. Rows on training take `at_horizons`. Rows that judge
figures of one experiment share it, under `functools.cache` where it is not timed, so that it runs
once; rows whose experiments train some of the same models say so in `shares`. An experiment that
needs an extra imports it inside and does not catch the ImportError: the row is then undecided and
says so. What the claim says of the figures of pretrained models, where the experiment has them,
goes into `trained` and gets a verdict per model.
"""

from collections.abc import Callable, Iterable
from importlib import import_module

from .judge import judge
from .record import Claim, Expect, Figure, Measured, Row, draws

__all__ = [
    "IDS",
    "Claim",
    "Expect",
    "Figure",
    "Measured",
    "Row",
    "chosen",
    "claims",
    "draws",
    "judge",
    "ledger",
    "quick",
]

IDS = (
    *("mean-var", "unit-var", "product-var", "normal", "three-sigma", "init-var", "toy-512"),
    *("toy-var", "softmax-raw", "softmax-scaled", "scaled-derivative", "exp-digits", "exp-50"),
    *("jacobian", "saturated", "shift", "overflow-64", "numerical-stability", "entropy-table"),
    *("maxweight-table", "grad-law", "grad-constant", "steadier-gradients", "sqrt-optimal"),
    *("optimal-region", "dk-variance", "dk-even", "two-sqrt-variance", "log-saturates"),
    *("infer-smaller", "infer-unscaled", "depth", "scale-cost", "scale-pass"),
    *("no-scale-training", "no-scale-length", "dk-selectivity", "two-sqrt-harm"),
    *("footnote", "implicit-assumption", "table3-rowB", "additive-attribution"),
    *("additive-small-dk", "additive-no-scale", "tanh-range", "additive-time", "dot-time"),
    *("additive-memory", "additive-speed", "additive-kernels", "dot-faster", "tanh-parallel"),
    *("memory", "memory-needed", "attention-rows", "dv-differs", "backward", "weight-grad"),
    *("swap", "init-symmetric", "instances-differ", "noncommute", "divergence", "feedback"),
    *("grads-differ", "grads-structure", "tied-kv", "tied-conflict", "value-index"),
    *("cosine-no-scale", "bilinear-no-scale"),
    *("relative-factor", "batchnorm-form", "always-in-range", "temperature", "stop-learning"),
    *("unscaled-position", "dk-independence", "glorot-unit-var", "init-controls-variance"),
    *("sigma-law", "products-grow", "cosine-analogy", "fold-start", "fold-step"),
    *("expressiveness", "dot-no-params", "universal", "layer-norm", "saturated-gradient"),
    *("first-step", "unstable-training", "qk-norm", "softcap", "qk-clip", "trained-power"),
    *("longer-log-n", "longer-solved", "symmetric-share"),
)
"""Every row, in the order of the ledger."""

MODULES = (
    "numbers",
    "variance",
    "structure",
    "saturation",
    "scales",
    "effects",
    "cost",
    "additive",
    "training",
    "convergence",
    "projections",
    "stability",
    "longer",
    "variants",
    "cited",
)
"""The modules beside this one that hold the rows, each in a tuple `CLAIMS`."""


def claims() -> dict[str, Claim]:
    """Every claim by its id, in the order of IDS."""
    found = [claim for module in MODULES for claim in import_module(f".{module}", __name__).CLAIMS]
    by_id = {claim.id: claim for claim in found}
    unknown = set(by_id) - set(IDS)
    if unknown or len(by_id) < len(found):
        raise ValueError(f"claims: expected each of IDS once, got {[c.id for c in found]}")
    return {name: by_id[name] for name in IDS if name in by_id}


def quick() -> list[str]:
    """Ids of the rows that the main job judges: all that are not slow."""
    return [name for name, claim in claims().items() if not claim.slow]


def chosen(only: Iterable[str] | None = None) -> list[Claim]:
    """All claims, or those named; a ValueError where one does not exist."""
    known = claims()
    names = list(known) if only is None else list(only)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"only: expected ids of claims ({', '.join(known)}), got {unknown}")
    return [known[name] for name in names]


def ledger(
    only: Iterable[str] | None = None,
    *,
    seed: int = 0,
    times: float = 1.0,
    progress: Callable[[int], object] | None = None,
) -> list[Row]:
    """Judge all claims, or those named.

    Parameters
    ----------
    only : iterable of str, optional
        Ids.
    seed : int
        Rows that time something differ from run to run; all others depend on it alone.
    times : float
        Multiplies the numbers of draws.
    progress : callable, optional
        Called with 1 after each row.

    Returns
    -------
    list of Row

    Raises
    ------
    ValueError
        `only` names a row that does not exist.

    Examples
    --------
    >>> from sdpa_lab.claims import ledger
    >>> [row.verdict for row in ledger(["softmax-raw"])]
    ['reproduced']
    """
    rows = []
    for claim in chosen(only):
        rows.append(judge(claim, rows=len(IDS), seed=seed, times=times))
        if progress is not None:
            progress(1)
    return rows
