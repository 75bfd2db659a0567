"""One architecture on eager attention and on c_attention, with the same random weights."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from hints import HINTS
from inputs import candidates
from shrink import Shrink
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sdpa.interop.transformers as ours

ALL_LAYERS = 99
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
ROUNDINGS = 8
LEAST = 1e-5
VERDICTS = ("wrong", "refused", "equal", "own", "not built")
"""From the one that says most about an architecture, where its classes differ."""

calls = 0


class CannotBuild(Exception):
    """No configuration was found whose model runs on eager attention."""


class Built(NamedTuple):
    config: Any
    weights: dict[str, torch.Tensor]
    model: Any
    given: dict[str, Any]


def register() -> None:
    """c_attention, counting its calls."""
    ours.register()

    def counting(*args: Any, **options: Any) -> Any:
        global calls
        calls += 1
        return ours.c_attention(*args, **options)

    AttentionInterface.register(ours.NAME, counting)


def classes(model_type: str) -> list[Any]:
    """The model of AutoModel, and one that has logits of text."""
    if named := HINTS.get(model_type, {}).get("class"):
        return [getattr(transformers, named)]
    config = CONFIG_MAPPING[model_type]
    try:
        found = [modeling_auto.MODEL_MAPPING[config]]
    except (ValueError, KeyError) as error:
        raise CannotBuild(said(error)) from error
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


def randomize(model: torch.nn.Module) -> None:
    """Weights that leave the scores of attention far from equal, and no gate shut."""
    generator = torch.Generator().manual_seed(SEED)
    for x in model.parameters():
        if not x.is_floating_point() or not x.numel():
            continue
        if x.ndim > 1:
            x.data.normal_(std=1.5 / x[0].numel() ** 0.5, generator=generator)
        else:  # of a norm, ones; of a bias, gate or scale of a layer, another number
            is_norm = bool((x == 1).all())
            x.data.normal_(is_norm, 0.1 if is_norm else 0.5, generator=generator)


def build(kind: Any, config: Any, name: str) -> Any:
    torch.manual_seed(SEED)
    return kind._from_config(copy.deepcopy(config), attn_implementation=name).eval()


def first_that_runs(model_type: str, kind: Any, attempts: Any) -> Built:
    """A small model on eager attention, and arguments that it takes."""
    hint = HINTS.get(model_type, {})
    config_class = kind.config_class if "class" in hint else CONFIG_MAPPING[model_type]
    errors: list[str] = []
    for factor, layers in hint.get("attempts", attempts):
        if layers == ALL_LAYERS and len(errors) > len(set(errors)):
            continue  # more layers cure nothing
        try:
            config = Shrink(factor, layers, hint.get("config"))(config_class)
            model = build(kind, config, "eager")
            randomize(model)
            # Some models change their weights in their first call.
            weights = {name: x.clone() for name, x in model.state_dict().items()}
        except Exception as error:
            errors.append(said(error))
            if isinstance(error, ImportError):
                break
            continue
        torch.manual_seed(SEED)
        for given in candidates(model, config, hint):
            try:
                run(model, given)
            except Exception as error:
                errors.append(said(error))
            else:
                return Built(config, weights, model, given)
    raise CannotBuild(hint.get("why") or errors[0])


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


def difference(a: Any, b: Any) -> float:
    """The largest difference of two results, relative to the largest number of each tensor."""
    worst = 0.0
    first, second = list(outputs(a)), list(outputs(b))
    if len(first) != len(second):
        raise AssertionError(f"{len(first)} tensors on c_attention, {len(second)} on eager")
    for x, y in zip(first, second, strict=True):
        if x.shape != y.shape:
            raise AssertionError(f"a result of shape {tuple(x.shape)}, {tuple(y.shape)} on eager")
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        far = torch.where(same, 0.0, x - y).abs()
        if far.numel():
            size = torch.where(y.isfinite(), y, 0.0).abs().max()
            worst = max(worst, float(far.nan_to_num(torch.inf).max() / (size + 1e-30)))
    return worst


def off_by_one_rounding(model: Any) -> Any:
    """A copy of the model, in which each weight has the next number above or below."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(SEED + 1)
    for x in model.parameters():
        if x.is_floating_point():
            up = torch.randint(0, 2, x.shape, generator=generator)
            x.data *= 1 + (2 * up - 1) * torch.finfo(torch.float32).eps / 2
    return model


def earlier(result: Any) -> Any:
    """All logits but the last position's, or nothing."""
    logits = result.get("logits") if isinstance(result, dict) else None
    return logits[:, :-1] if isinstance(logits, torch.Tensor) and logits.ndim == 3 else []


def refusal(error: BaseException) -> str | None:
    """What sdpa.interop.transformers says when it refuses, or None for another's error."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    return str(error) if where == ours.__file__ else None


def switched(kind: Any, built: Built) -> tuple[Any, str | None]:
    """The model on c_attention, and what was said if it could not be loaded with it."""
    try:
        model = build(kind, built.config, ours.NAME)
    except Exception as error:
        if not (why := refusal(error)):
            raise
        model = build(kind, built.config, "eager")
        model.load_state_dict(built.weights, strict=False)
        model.set_attn_implementation(ours.NAME)
        return model, why
    model.load_state_dict(built.weights, strict=False)
    return model, None


def compare(kind: Any, built: Built) -> dict[str, Any]:
    """The verdict on one class, and its figures."""
    global calls
    calls = 0
    row: dict[str, Any] = {"cases": [], "difference": 0.0, "allowed": LEAST}
    try:
        model, refused = switched(kind, built)
    except Exception as error:
        return row | {"verdict": "wrong", "why": said(error)}
    off = off_by_one_rounding(built.model)
    plain: Any = None
    for name, case in variants(built.given):
        try:
            expected = run(built.model, case)
        except Exception:
            continue  # a case that the model does not have
        try:
            result = run(model, case)
            far = difference(result, expected)
        except Exception as error:
            if why := refusal(error):
                return row | {"verdict": "refused", "why": why}
            return row | {"verdict": "wrong", "why": f"{name}: {said(error)}"}
        allowed = LEAST + ROUNDINGS * difference(run(off, case), expected)
        if not far <= allowed:
            return row | {"verdict": "wrong", "why": f"{name}: {far:.2g} > {allowed:.2g}"}
        row["cases"].append(name)
        if far / allowed >= row["difference"] / row["allowed"]:
            row |= {"difference": float(f"{far:.1e}"), "allowed": float(f"{allowed:.1e}")}
        if name == "plain":
            plain = earlier(expected), earlier(result)
        elif name == "last token" and len(plain[0]):
            row["causal"] = difference(earlier(expected), plain[0]) <= allowed
            if row["causal"] and not difference(earlier(result), plain[1]) <= allowed:
                return row | {"verdict": "wrong", "why": "earlier logits see the last token"}
    return row | verdict(model, refused)


def verdict(model: Any, refused: str | None) -> dict[str, Any]:
    """The verdict on a model that computes what it does on eager attention."""
    if refused:
        return {"verdict": "refused", "why": refused, "calls": calls}
    if calls:
        parts = model.modules()
        keeps = {type(x).__name__ for x in parts if _implementation(x) == "eager"}
        why = {"why": f"{', '.join(sorted(keeps))} keeps its own"} if keeps else {}
        return {"verdict": "equal", "calls": calls, **why}
    if any(re.search("att(ention|n)", type(part).__name__, re.I) for part in model.modules()):
        return {"verdict": "own"}
    return {"verdict": "own", "why": "no part of it is called attention"}


def _implementation(part: Any) -> str | None:
    return getattr(getattr(part, "config", None), "_attn_implementation", None)


def judge_class(model_type: str, kind: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"class": kind.__name__}
    try:
        built = first_that_runs(model_type, kind, ATTEMPTS)
    except CannotBuild as error:
        return row | {"verdict": "not built", "why": str(error)}
    found = compare(kind, built)
    if found["verdict"] == "own" and "why" not in found:  # attention may come in later layers only
        try:
            built = first_that_runs(model_type, kind, ((16, ALL_LAYERS), (8, ALL_LAYERS)))
            found = compare(kind, built)
        except CannotBuild:
            pass
    return row | {"inputs": sorted(built.given)} | found


def judge(model_type: str) -> dict[str, Any]:
    """The verdict on an architecture, and those on its classes."""
    try:
        rows = [judge_class(model_type, kind) for kind in classes(model_type)]
    except CannotBuild as error:
        return {"verdict": "not built", "why": str(error), "classes": []}
    first = min(rows, key=lambda row: VERDICTS.index(row["verdict"]))
    found = {"verdict": first["verdict"]}
    if why := "; ".join(f"{row['class']}: {row['why']}" for row in rows if "why" in row):
        found["why"] = why if len(rows) > 1 else rows[0]["why"]
    return found | {"classes": rows}
