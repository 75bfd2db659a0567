"""One architecture on eager attention and on c_attention, with the same random weights."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from hints import ALL_LAYERS, HINTS
from inputs import candidates
from shrink import Shrink
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sdpa.interop.transformers as ours

# Each width divided by the first number, layers up to the second, in the order of trial. Eight
# layers hold one of every kind in most models that mix them.
ATTEMPTS = ((16, 8), (8, 8), (8, 2), (8, ALL_LAYERS), (4, 2), (2, 2), (1, 2))
HEADS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
SEED = 0
# Two ways to sum differ by roundings. How far the result moves when every weight is off by one
# rounding, which is about half a unit in the last place, says how the model carries them on; a
# layer of attention rounds each number a few times.
ROUNDINGS, DRAWS = 8, 3
LEAST = 1e-5
# So many times the allowed difference must some tensor move if attention gives zeros.
SHOWN = 10
HIDDEN = "its result does not show its attention"
# Of weights, in the order of trial: less where roundings grow too large to see attention.
GAINS = 1.5, 0.5
VERDICTS = ("wrong", "refused", "equal", "own", "not built")
"""From the one that says most about an architecture, where its classes differ."""


class Case(NamedTuple):
    """Arguments, the result on eager attention and how far each tensor of another may be off."""

    name: str
    given: dict[str, Any]
    expected: Any
    allowed: list[float]


class Counted:
    """c_attention, which counts its calls, and gives zeros if it `is_silent`."""

    def __init__(self) -> None:
        self.calls, self.is_silent = 0, False

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        out, weights = ours.c_attention(*args, **options)
        return out * (not self.is_silent), weights


counted = Counted()


def register() -> None:
    ours.register()
    AttentionInterface.register(ours.NAME, counted)


def classes(model_type: str) -> list[Any]:
    """The model of AutoModel, and one that has logits of text."""
    if named := HINTS.get(model_type, {}).get("class"):
        return [getattr(transformers, named)]
    config = CONFIG_MAPPING[model_type]
    found = [modeling_auto.MODEL_MAPPING[config]]
    found += [mapping[config] for mapping in HEADS if config in mapping][:1]
    found = [kind[0] if isinstance(kind, (list, tuple)) else kind for kind in found]
    return list(dict.fromkeys(found))


def said(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    short = message if len(message) <= 200 else message[:200] + "..."
    short = re.sub(r"'?/\S*/site-packages/", "", short)
    return f"{type(error).__name__}: {short} ({where.filename.rpartition('/')[2]})"


def run(model: Any, given: dict[str, Any]) -> Any:
    torch.manual_seed(SEED)
    with torch.no_grad():
        return model(**{name: copy.deepcopy(x) for name, x in given.items()})


def randomize(model: torch.nn.Module, gain: float) -> None:
    """Weights that leave the scores of attention far from equal, and no gate shut."""
    generator = torch.Generator().manual_seed(SEED)
    for x in model.parameters():
        if not x.is_floating_point() or not x.numel():
            continue
        if x.ndim > 1:
            x.data.normal_(std=gain / x[0].numel() ** 0.5, generator=generator)
        else:  # of a norm, ones; of a bias, gate or scale of a layer, another number
            is_norm = bool((x == 1).all())
            x.data.normal_(is_norm, 0.1 if is_norm else 0.5, generator=generator)


def put_off(model: torch.nn.Module, seed: int) -> None:
    """Move each weight to the next number above or below."""
    generator = torch.Generator().manual_seed(seed)
    for x in model.parameters():
        if x.is_floating_point():
            up = torch.randint(0, 2, x.shape, generator=generator)
            x.data *= 1 + (2 * up - 1) * torch.finfo(torch.float32).eps / 2


def build(kind: Any, config: Any, name: str | dict[str, str]) -> Any:
    torch.manual_seed(SEED)
    return kind._from_config(copy.deepcopy(config), attn_implementation=name).eval()


def variants(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments, with padding on either side, and with another last token."""
    yield "plain", given
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None or mask is None or mask.shape != ids.shape or len(ids) < 2:
        return
    for side, where in ("left", slice(0, 5)), ("right", slice(-3, None)):
        padded = mask.clone()
        padded[1, where] = 0
        yield side, given | {"attention_mask": padded}
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    changed = given[name].clone()
    changed[:, -1] = torch.where(changed[:, -1] == 11, 12, 11)
    yield "last token", given | {name: changed}


def outputs(x: Any) -> Iterator[torch.Tensor]:
    """The floating tensors of a result, in order, without weights of attention and caches."""
    if isinstance(x, torch.Tensor):
        if x.is_floating_point():
            yield x
    elif isinstance(x, dict):
        for name, value in x.items():
            if not any(part in name for part in ("past_key_values", "cache", "attentions")):
                yield from outputs(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from outputs(value)


def differences(a: Any, b: Any) -> list[float]:
    """The largest difference in each tensor of two results, relative to its largest number."""
    first, second = list(outputs(a)), list(outputs(b))
    if [x.shape for x in first] != [x.shape for x in second]:
        raise AssertionError(
            f"{len(first)} tensors on c_attention, {len(second)} on eager, or of other shapes"
        )
    found = []
    for x, y in zip(first, second, strict=True):
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        far = torch.where(same, 0.0, x - y).abs().nan_to_num(torch.inf)
        size = torch.where(y.isfinite(), y, 0.0).abs()
        found.append(float(far.max() / (size.max() + 1e-30)) if far.numel() else 0.0)
    return found


def references(model: Any, given: dict[str, Any]) -> list[Case]:
    """The results on eager attention of all cases that the model has."""
    found = []
    for name, case in variants(given):
        try:
            found.append((name, case, run(model, case)))
        except Exception:
            if name == "plain":
                raise
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    moved = []
    for seed in range(SEED + 1, SEED + 1 + DRAWS):
        model.load_state_dict(weights, strict=False)
        put_off(model, seed)
        moved.append([differences(run(model, case), expected) for _, case, expected in found])
    return [
        Case(*each, [LEAST + ROUNDINGS * max(x) for x in zip(*draws, strict=True)])
        for each, *draws in zip(found, *moved, strict=True)
    ]


def earlier(result: Any) -> Any:
    """All logits but the last position's, or nothing."""
    logits = result.get("logits") if isinstance(result, dict) else None
    return logits[:, :-1] if isinstance(logits, torch.Tensor) and logits.ndim == 3 else []


def refusal(error: BaseException) -> str | None:
    """What sdpa.interop.transformers says when it refuses, or None for another's error."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    return str(error) if where == ours.__file__ else None


def switched(kind: Any, config: Any) -> tuple[Any, str | None]:
    """The model on c_attention, and what was said if it could not be loaded with it."""
    try:
        return build(kind, config, ours.NAME), None
    except Exception as error:
        if not (why := refusal(error)):
            raise
        model = build(kind, config, "eager")
        model.set_attn_implementation(ours.NAME)
        return model, why


def compare(model: Any, cases: list[Case]) -> dict[str, Any]:
    """The verdict on a model on c_attention by these cases, and its figures."""
    row: dict[str, Any] = {"cases": [], "difference": 0.0, "allowed": LEAST}
    counted.calls, counted.is_silent = 0, False
    results = {}
    for case in cases:
        try:
            results[case.name] = run(model, case.given)
            far = differences(results[case.name], case.expected)
        except Exception as error:
            if why := refusal(error):
                return row | {"verdict": "refused", "why": why}
            return row | {"verdict": "wrong", "why": f"{case.name}: {said(error)}"}
        for x, allowed in zip(far, case.allowed, strict=True):
            if not x <= allowed:
                return row | {"verdict": "wrong", "why": f"{case.name}: {x:.2g} > {allowed:.2g}"}
            if x / allowed >= row["difference"] / row["allowed"]:
                row |= {"difference": float(f"{x:.1e}"), "allowed": float(f"{allowed:.1e}")}
        row["cases"].append(case.name)
    plain, last = cases[0], cases[-1]
    if last.name == "last token" and len(earlier(plain.expected)):
        (on_eager,) = differences(*map(earlier, (last.expected, plain.expected)))
        (on_ours,) = differences(*map(earlier, (results["last token"], results["plain"])))
        row["causal"] = on_eager <= max(last.allowed)
        if row["causal"] and not on_ours <= max(last.allowed):
            return row | {"verdict": "wrong", "why": "earlier logits see the last token"}
    row |= {"verdict": "equal" if counted.calls else "own", "calls": counted.calls}
    if counted.calls:
        counted.is_silent = True
        far = differences(run(model, plain.given), plain.expected)
        if not any(x > SHOWN * allowed for x, allowed in zip(far, plain.allowed, strict=True)):
            return row | {"verdict": "not built", "why": HIDDEN}
    return row | remark(model)


def remark(model: Any) -> dict[str, Any]:
    """Which parts keep their own attention."""
    parts = list(model.modules())
    if counted.calls:
        keep = {type(x).__name__ for x in parts if _implementation(x) == "eager"}
        return {"why": f"{', '.join(sorted(keep))} keeps its own"} if keep else {}
    if any(re.search("att(ention|n)", type(x).__name__, re.IGNORECASE) for x in parts):
        return {}
    return {"why": "no part of it is called attention"}


def _implementation(part: Any) -> str | None:
    return getattr(getattr(part, "config", None), "_attn_implementation", None)


def judge_class(model_type: str, kind: Any) -> dict[str, Any]:
    """The verdict on a class, by the first weights that show its attention."""
    for gain in GAINS:
        row = judge_weights(model_type, kind, gain)
        if row.get("why") != HIDDEN:
            break
    return row


def judge_weights(model_type: str, kind: Any, gain: float) -> dict[str, Any]:
    """The verdict on a class, built by the first attempt that runs on eager attention."""
    hint = HINTS.get(model_type, {})
    row: dict[str, Any] = {"class": kind.__name__}
    config_class = kind.config_class if "class" in hint else CONFIG_MAPPING[model_type]
    errors: list[str] = []
    for factor, layers in hint.get("attempts", ATTEMPTS):
        if layers == ALL_LAYERS and len(errors) > len(set(errors)):
            continue  # more layers cure nothing
        try:
            config = Shrink(factor, layers, hint.get("config"))(config_class)
            model = build(kind, config, hint.get("reference", "eager"))
            randomize(model, gain)
        except Exception as error:
            errors.append(said(error))
            if isinstance(error, ImportError):
                break
            continue
        # Some models change their weights in their first call.
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        torch.manual_seed(SEED)
        for given in candidates(model, config, hint):
            try:
                cases = references(model, given)
            except Exception as error:
                errors.append(said(error))
                continue
            del model
            try:
                model, refused = switched(kind, config)
            except Exception as error:
                return row | {"verdict": "wrong", "why": said(error)}
            model.load_state_dict(weights, strict=False)
            row |= {"inputs": sorted(given)} | compare(model, cases)
            if refused and row["verdict"] in ("equal", "own"):
                row |= {"verdict": "refused", "why": refused}
            elif row["verdict"] == "equal" and "remark" in hint:
                row["why"] = hint["remark"]
            return row
    return row | {"verdict": "not built", "why": hint.get("why") or errors[0]}


def judge(model_type: str) -> dict[str, Any]:
    """The verdict on an architecture, and those on its classes."""
    try:
        rows = [judge_class(model_type, kind) for kind in classes(model_type)]
    except (ValueError, KeyError) as error:
        return {"verdict": "not built", "why": said(error), "classes": []}
    first = min(rows, key=lambda row: VERDICTS.index(row["verdict"]))
    found = {"verdict": first["verdict"]}
    if why := first.get("why"):
        found["why"] = why
    return found | {"classes": rows}
