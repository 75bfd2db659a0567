"""Claims and figures made up for tests of the ledger."""

from sdpa_lab.claims import Claim, Expect
from sdpa_lab.claims.record import at_horizons
from sdpa_lab.tools.estimate import Estimate

HARM = at_horizons(Expect("x", 1.0, 0.1, law=2.0), horizons=(10, 20, 30))
"""A figure at three horizons."""


def figure(low, high):
    return Estimate((low + high) / 2, low, high, 10)


def claim(expect, experiment, **other):
    text = {"claim": "c", "claim_zh": "c", "holds": "holds: {x}", "law": "law: {x:.1f}"}
    record = {"id": "test", **text, **other}
    return Claim(expect=tuple(expect), experiment=experiment, **record)
