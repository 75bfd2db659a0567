"""Small configurations: the defaults of a class, with its sizes divided and its layers counted off.

Dividing all widths by one number keeps the relations between them (a hidden size is heads times
the size of a head, a projection is as wide as the next model), which names alone do not tell.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from transformers import PreTrainedConfig

# The vocabulary, from which inputs take FIRST_TOKEN up to FIRST_ID, and special tokens the rest.
VOCABULARY, FIRST_TOKEN, FIRST_ID = 320, 10, 200

_LAYERS = re.compile(
    r"(^|_)(num_hidden_layers|num_layers|n_layers?|layers|depth|num_transformer_layers)$"
)
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_CHOSEN = re.compile(r"experts_per_tok$|top_?k(_experts)?$|^moe_k$|num_selected_experts")
_WINDOW = re.compile(r"(sliding_window|local_attention|attention_window|chunk_size)$")
_ID = re.compile(r"(token_id|token_index|_token|bos_id|eos_id|pad_id|start_id|end_id)$")
_WIDTH = re.compile(
    r"hidden|embd|embed|dim|size|width|channels|d_model|d_ff|d_kv|d_inner|ffn|inner|feature|rank|"
    r"units|projection|filters|scalar|upsample_groups"
)
_NO_WIDTH = re.compile(
    r"image|patch|kernel|window|vocab|stride|chunk|batch|block|^num_|_num_|^n_(?!embd|inner)|max_|min_|position|"
    r"token|grid|codebook_size|^in_channels|num_channels|^input_size|frame|level|layer_idx|"
    r"state|conv_dim$|sampling|rate|bins|embeddings$|pool|mask_feature|context|tubelet|act|cross_|group(?!s$)"
)


class Shrink:
    """Makes configurations, of which all parts agree on the numbers of special tokens."""

    def __init__(self, factor: int, layers: int, changes: dict[str, Any] | None = None) -> None:
        self.factor, self.layers, self.changes = factor, layers, changes or {}
        self.ids: dict[str, int] = {}

    def __call__(self, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
        return self._of(kind, kind(), "")

    def _of(self, kind: Any, given: Any, path: str) -> Any:
        """A small one of the class; what `given` has that is not a default stays, made small."""
        plain = kind()
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            name = field.name
            if name in ("_out_features", "_out_indices"):
                continue
            value = _get(given, name)
            if name in kind.sub_configs or isinstance(value, PreTrainedConfig):
                if isinstance(value, PreTrainedConfig):
                    changes[name] = self._of(type(value), value, f"{path}{name}.")
                continue
            default = _default(field)
            explicit = not _same(value, _get(plain, name))
            value = value if explicit else default
            small = self._value(name, value, given)
            if explicit or not _same(small, default):
                changes[name] = small
        if _get(given, "out_features") and hasattr(given, "stage_names"):
            changes["out_features"] = given.out_features
        for name, value in self.changes.items():
            head, _, last = name.rpartition(".")
            if (head + "." if head else "") == path or (head == "*" and hasattr(plain, last)):
                changes[last] = value
        return kind(**changes)

    def _value(self, name: str, value: Any, config: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and name in ("depths", "num_block_repeats"):
            return type(value)(min(x, 2) for x in value)
        if isinstance(value, (list, tuple)) and name.endswith("layer_types"):
            return value[: self.layers]
        if isinstance(value, (list, tuple)):
            return type(value)(self._value(name, x, config) for x in value)
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if _ID.search(name):
            return value if value < FIRST_TOKEN else self._id(name)
        if name.endswith("vocab_size"):
            return min(value, VOCABULARY)
        if name == "image_size":
            patch = getattr(config, "patch_size", None)
            return min(value, 4 * patch if isinstance(patch, int) and patch > 4 else 64)
        if name in ("num_attention_heads", "num_heads", "attention_heads"):
            wide = _get(config, "hidden_size") or _get(config, "embed_dim")
            if isinstance(wide, int) and _get(config, "head_dim") is None:
                return math.gcd(value, self._value("hidden_size", wide, config))
        if _LAYERS.search(name) and _get(config, "stage_names") is None:
            return min(value, self.layers)
        if _EXPERTS.search(name):
            return min(value, 4)
        if _CHOSEN.search(name):
            return min(value, 2)
        if name in ("n_group", "topk_group", "first_k_dense_replace"):
            return min(value, 1)
        if _WINDOW.search(name):
            return min(value, 4)
        wide = value >= 32 and value % self.factor == 0
        if wide and _WIDTH.search(name) and not _NO_WIDTH.search(name):
            return value // self.factor
        return value

    def _id(self, name: str) -> int:
        return self.ids.setdefault(name, FIRST_ID + len(self.ids))


def _get(config: Any, name: str) -> Any:
    """The attribute, or None where it differs from layer to layer, which follows from others."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return a is b
