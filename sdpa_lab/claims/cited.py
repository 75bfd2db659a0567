"""Rows that cannot be measured here, judged from published figures in cited.json."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ..tools.estimate import Estimate, exact
from .record import Claim, Expect, Measured


@cache
def publications() -> dict[str, Any]:
    """The contents of cited.json: by row of the ledger, the source and its figures."""
    text = files(__package__).joinpath("cited.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def table3_row_b(seed: int, times: float) -> Measured:
    """Figures of the paper's table 3, the interval that of their rounding."""
    cited = publications()["table3-rowB"]
    rows = {row["d_k"]: row for row in cited["rows"]}
    measured: dict[str, Estimate] = {}
    for name, half in cited["rounding"].items():
        for width, row in rows.items():
            value = row[name]
            measured[f"{name} d_k={width}"] = Estimate(value, value - half, value + half, 1)
        for width in (32, 16):
            change = rows[width][name] - rows[64][name]
            interval = (change - 2 * half, change + 2 * half)
            measured[f"change of {name} from d_k=64 to {width}"] = Estimate(change, *interval, 1)
    unscaled = sum(not row["scaled"] for row in rows.values())
    return measured | {"unscaled models in the rows": exact(unscaled)}


def variants(seed: int, times: float) -> Measured:
    """How the models of transformers scale, and publications with another rule, by kind."""
    cited = publications()["universal"]
    rules = [row["rule"] for row in cited["rows"]]
    census = cited["census"]
    share = census["with 1/sqrt of a width"] / census["with attention"]
    return {
        "share of models with 1/sqrt of a width": exact(share),
        "models with attention": exact(census["with attention"]),
        "families with another rule, cited": exact(len(rules)),
        "of these without any scale": exact(rules.count("1")),
        "of these with a learned scale": exact(sum("learned" in rule for rule in rules)),
    }


CLAIMS = (
    Claim(
        id="table3-rowB",
        notes=("002",),
        claim="Table 3, row B, of the Transformer paper: without the scale BLEU rises when d_k "
        "falls from 64 to 32, with it the performance is stable.",
        claim_zh="Transformer 论文表 3 的 B 行：不缩放时 d_k 从 64 降到 32，BLEU 上升；缩放后性能"
        "稳定。",
        # Stable: within the rounding of two figures. Without an unscaled model nothing is shown.
        expect=(
            Expect("unscaled models in the rows", 2.0, 0.5),
            Expect("change of BLEU from d_k=64 to 32", 0.0, 0.1),
        ),
        holds="The table has the unscaled model, and it is better at 32.",
        law="Row B varies d_k of the scaled model: BLEU falls from 25.8 at d_k = 64 to 25.4 at 32 "
        "and 25.1 at 16, perplexity rises from 4.92 to 5.01 and 5.16. The table has no model "
        "without the scale; the paper concludes that small keys hurt.",
        experiment=table3_row_b,
        cited=True,
    ),
    Claim(
        id="universal",
        notes=("000",),
        claim="Almost all variants of the Transformer use this scale.",
        claim_zh="几乎所有 Transformer 变体都采用这一缩放。",
        # Nine in ten is what "almost all" asks for.
        expect=(Expect("share of models with 1/sqrt of a width", 0.9, (0, None)),),
        holds="Of the {models with attention:.0f} model folders of transformers 5.23.0 that "
        "define attention, {share of models with 1/sqrt of a width:.1%} divide by the square root "
        "of a width somewhere in their source. The rest do otherwise, or divide where the search "
        "does not look: T5 and its kin and GPT-Neo have no scale (T5 folds it into the initial "
        "W^Q), DeBERTa has 1/sqrt(3 d_k), Granite a constant of its configuration, Swin V2 a "
        "learned factor on cosines. Outside that library muP has 1/d_k and SSMax a factor log n.",
        law="{share of models with 1/sqrt of a width:.1%} of {models with attention:.0f} model "
        "folders use it.",
        experiment=variants,
        cited=True,
    ),
)
