"""Rows that cannot be measured here, judged from published figures in cited.json."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ..tools.estimate import Estimate, exact
from .record import Claim, Expect, Measured
from .sentences import of_row
from .variants import other_scores


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


def footnote(seed: int, times: float) -> Measured:
    """How many of the words that the note quotes differ, and whether the footnote is explicit."""
    cited = publications()["footnote"]
    words = cited["text"].split()
    differ = 0
    for quoted in (
        s.words.replace("$", "").split() for s in of_row("footnote") if s.words.isascii()
    ):
        start = words.index(quoted[0])
        pairs = zip(quoted, words[start : start + len(quoted)], strict=True)
        differ += sum(one.strip(",.") != other.strip(",.") for one, other in pairs)
    return {
        "quoted words that differ": exact(differ),
        "page": exact(cited["page"]),
        "times that the paper states the assumption": exact("assume that" in cited["text"]),
    }


def attribution(seed: int, times: float) -> Measured:
    """What the paper's own experiments compare."""
    found = publications()["additive-attribution"]["experiments"]
    return {f"experiments of the paper {what}": exact(count) for what, count in found.items()}


def relative(seed: int, times: float) -> Measured:
    """Models with relative positions by their factor, and what two kinds do to the variance."""
    rows = publications()["relative-factor"]["rows"]
    return {
        "models with relative positions and another factor": exact(sum(r["changed"] for r in rows)),
        "models with relative positions and the same factor": exact(
            sum(not row["changed"] for row in rows)
        ),
    } | {
        name: figure
        for name, figure in other_scores(seed, times).items()
        if name.startswith(("variance with", "variance in row, three terms"))
    }


CLAIMS = (
    Claim(
        id="footnote",
        claim="A footnote on page 4 of the Transformer paper says: for independent components of "
        "mean 0 and variance 1 the dot product has mean 0 and variance d_k.",
        claim_zh="Transformer 论文第 4 页脚注写道：若分量独立、均值为 0、方差为 1，则点积的均值"
        "为 "
        "0、方差为 d_k。",
        expect=(Expect("quoted words that differ", 0.0, 0.0), Expect("page", 4.0, 0.0)),
        holds="It does, word for word.",
        law="{quoted words that differ:.0f} words differ.",
        experiment=footnote,
        cited=True,
    ),
    Claim(
        id="implicit-assumption",
        claim="The authors of the paper make the assumption of independent components of mean 0 "
        "and variance 1 implicitly.",
        claim_zh="分量独立、均值为 0、方差为 1，是论文作者的隐含假设。",
        expect=(
            Expect("times that the paper states the assumption", 0.0, 0.4, law=1.0, law_margin=0.4),
        ),
        holds="The paper does not state it.",
        law="It is explicit: footnote 4 begins with it.",
        experiment=footnote,
        cited=True,
    ),
    Claim(
        id="additive-attribution",
        claim="Experiments of the Transformer paper show how additive attention and the dot "
        "product compare at small and at large d_k.",
        claim_zh="小 d_k 时两者相当、大 d_k 时点积下降，是 Transformer 论文的实验所示。",
        expect=(
            Expect("experiments of the paper with additive attention", 1.0, (0.5, None)),
            Expect("experiments of the paper without the scale", 1.0, (0.5, None)),
        ),
        holds="It has such experiments.",
        law="The paper has neither a model with additive attention nor one without the scale. Its "
        "section 3.2.1 takes the comparison from Britz et al. 2017 (arXiv:1703.03906), on "
        "recurrent translation models.",
        experiment=attribution,
        cited=True,
    ),
    Claim(
        id="relative-factor",
        claim="Some variants with relative positions adjust the scaling factor.",
        claim_zh="某些带相对位置编码的变体会额外调整缩放因子。",
        expect=(Expect("models with relative positions and another factor", 1.0, (0, None)),),
        holds="Some do: DeBERTa has three terms in its score and 1/sqrt(3 d_k), T5 a bias and no "
        "scale. Others keep 1/sqrt(d_k), though relative vectors of variance 1 multiply the "
        "variance of the scores by {variance with relative vectors over without, d_k=64}; "
        "rotations do not change it.",
        law="None do.",
        experiment=relative,
        cited=True,
    ),
    Claim(
        id="table3-rowB",
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
