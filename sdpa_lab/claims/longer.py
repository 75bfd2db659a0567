"""Rows on sequences that are longer than in training, by the factor of the scores.

The task is that of `sdpa_lab.experiments.longer`: 512 symbols, so that 512 keys can be told apart.
They take longer to learn than the 32 of the other rows, and so the horizons are later.
"""

from functools import cache

from ..experiments.longer import TRAINED, longer
from ..tools.estimate import Draws
from .record import Claim, at_horizons, shown_at
from .training import Measured, drawn, harmless, loss, n_seeds

HORIZONS = (600, 2000, 5000)
RULES = ("as trained", "sqrt(ln n)", "ln n", "YaRN", "SSMax", "best")
TIMES = (4, 16)
"""The trained length."""


@cache
def by_factor(seed: int, times: float) -> Measured:
    """Loss of a head on sequences longer than in training; a draw is a model."""
    found: Measured = {}
    for steps in HORIZONS:
        table = longer(
            n=(TRAINED, *(TRAINED * s for s in TIMES)),
            steps=steps,
            draws=n_seeds(times / 2),
            seed=seed,
        )
        own = drawn(table.row(n=TRAINED, rule="as trained"), "loss").values
        found[f"loss at the trained length, {steps} steps"] = loss(own)
        for s in TIMES:
            where = f"{s} times the length, {steps} steps"
            losses = {r: drawn(table.row(n=TRAINED * s, rule=r), "loss").values for r in RULES}
            for rule, values in losses.items():
                found[f"loss {rule}, {where}"] = loss(values)
            by_log = losses["ln n"]
            found[f"loss added by ln n over the best constant, {where}"] = Draws(
                by_log - losses["best"]
            )
            found[f"loss added by the length with ln n, {where}"] = Draws(by_log - own)
    return found


def _lost(rule: str, s: int) -> str:
    return shown_at(f"loss {rule}, {s} times the length", HORIZONS)


_FOUND = (
    "At 16 times the length the loss after 600, 2000 and 5000 steps of training is "
    f"{_lost('ln n', 16)} nats with ln n / ln n_0, {_lost('best', 16)} with the best constant, "
    f"{_lost('YaRN', 16)} with YaRN's factor, {_lost('sqrt(ln n)', 16)} with the root of that of "
    f"ln n and {_lost('as trained', 16)} with none."
)

CLAIMS = (
    Claim(
        id="longer-log-n",
        claim="Beyond the length of training the factor that scores need is ln n / ln n_0: no "
        "constant does better.",
        claim_zh="超出训练长度后，分数应再乘 ln n / ln n_0：没有别的常数更好。",
        expect=at_horizons(
            *(
                harmless(f"loss added by ln n over the best constant, {s} times the length")
                for s in TIMES
            ),
            horizons=HORIZONS,
        ),
        holds=f"For a head that looks for one key it is. {_FOUND}",
        law=_FOUND,
        depends=f"For a head that looks for one key it is at first; the longer it is trained, the "
        f"more it can stand. {_FOUND}",
        experiment=by_factor,
        slow=True,
        more=4,
    ),
    Claim(
        id="longer-solved",
        claim="With ln n / ln n_0 a head is worth as much on longer sequences as on those of its "
        "training.",
        claim_zh="分数再乘 ln n / ln n_0 之后，头在更长的序列上与在训练长度上一样好。",
        expect=at_horizons(
            *(harmless(f"loss added by the length with ln n, {s} times the length") for s in TIMES),
            horizons=HORIZONS,
        ),
        holds=f"It is. {_FOUND}",
        law="Part of what length costs no factor gives back, because the largest of more other "
        "scores is higher. After 2000 steps the loss is {loss at the trained length, 2000 steps} "
        "nats at the trained length, {loss ln n, 4 times the length, 2000 steps} at 4 times and "
        "{loss ln n, 16 times the length, 2000 steps} at 16 times with ln n / ln n_0, where "
        "without a factor it is {loss as trained, 4 times the length, 2000 steps} and {loss as "
        "trained, 16 times the length, 2000 steps}.",
        experiment=by_factor,
        slow=True,
        more=4,
    ),
)
