"""What `sdpa.MultiHeadAttention` is: its arguments, its rules and the shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sdpa import _arguments, _core
from sdpa._arrays import Array, allocating, widen

P = ParamSpec("P")
Initialiser = Literal["1/d_model", "xavier_normal", "xavier_uniform"]
ScaleRule = Literal["1/sqrt d_k", "1/d_k", "1/log d_k", "1/(2 sqrt d_k)", "learned"]
Positions = tuple[Array | None, Array | None]
"""Of x and of context, where queries and keys are rotated."""

# One over the factors of scores; a learned scale starts from 1 / sqrt(d_k).
_DIVISORS: dict[ScaleRule, Callable[[int], float]] = {
    "1/sqrt d_k": math.sqrt,
    "1/d_k": float,
    "1/log d_k": math.log,
    "1/(2 sqrt d_k)": lambda d_k: 2 * math.sqrt(d_k),
    "learned": math.sqrt,
}


def _xavier_uniform(rng: np.random.Generator, rows: int, columns: int) -> Array:
    bound = math.sqrt(6 / (rows + columns))
    return rng.uniform(-bound, bound, (rows, columns))


INITIALISERS: dict[Initialiser, Callable[[np.random.Generator, int, int], Array]] = {
    "1/d_model": lambda rng, rows, columns: rng.normal(0, math.sqrt(1 / rows), (rows, columns)),
    "xavier_normal": lambda rng, rows, columns: rng.normal(
        0, math.sqrt(2 / (rows + columns)), (rows, columns)
    ),
    "xavier_uniform": _xavier_uniform,
}


# What other libraries call the arguments.
_WORDS = {
    "d_model": ("embed_dim", "hidden_size", "n_embd", "features"),
    "heads": ("num_heads", "n_heads", "nhead", "n_head", "num_attention_heads"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    "d_k": ("head_dim", "head_size", "key_dim"),
    "d_v": ("value_dim",),
    "bias": ("use_bias", "add_bias", "attention_bias"),
    "rng": ("seed",),
}


def _meant(name: str, known: list[str]) -> str:
    """What the error of an unknown keyword ends with."""
    from sdpa import _table  # not needed to import the package

    if name in _table.options_of("attention") or name in ("dropout", "causal"):
        return "; options of attention are arguments of the layer's calls"
    meant = [own for own, words in _WORDS.items() if name in words]
    return f". Did you mean '{meant[0]}'?" if meant else _core._hint(name, known)


def _hinting(init: Callable[P, None]) -> Callable[P, None]:
    """Name the layer in errors of arguments, and the one that was meant by an unknown keyword."""
    expected = signature(init)

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            expected.bind(*args, **kwargs)
        except TypeError as error:
            known, said = list(expected.parameters), str(error)
            for name in [name for name in kwargs if name not in known][:1]:
                said = f"got an unexpected keyword argument '{name}'{_meant(name, known)}"
            raise TypeError(f"MultiHeadAttention() {said}") from None
        init(*args, **kwargs)

    return checked


class Definition:
    """The layer without its calls; `sdpa.MultiHeadAttention` documents the arguments."""

    @_hinting
    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        d_context: int | None = None,
        init: Initialiser = "xavier_uniform",
        scale: float | ScaleRule | None = "1/sqrt d_k",
        fold_scale: bool = False,
        tied_kv: bool = False,
        swap_roles: bool = False,
        bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        rotary_dim: int | None = None,
        rotary_interleaved: bool = False,
        dtype: DTypeLike = np.float32,
        rng: int | np.random.Generator | None = None,
    ) -> None:
        self.d_model: int = _arguments.size("d_model", d_model, 1)
        self.heads: int = _arguments.size("heads", heads, 1)
        if d_k is None and self.d_model % self.heads:
            raise ValueError(f"d_model: expected a multiple of heads={heads}, got {d_model}")
        self.kv_heads: int = _size("kv_heads", kv_heads, self.heads)
        self.d_k: int = _size("d_k", d_k, self.d_model // self.heads)
        self.d_v: int = _size("d_v", d_v, self.d_k)
        self.d_context: int = _size("d_context", d_context, self.d_model)
        self.init: Initialiser = _arguments.choice("init", init, INITIALISERS)
        self.scale: float | ScaleRule = _scale(scale)
        self.fold_scale: bool = _arguments.boolean("fold_scale", fold_scale)
        self.tied_kv: bool = _arguments.boolean("tied_kv", tied_kv)
        self.swap_roles: bool = _arguments.boolean("swap_roles", swap_roles)
        self.bias: bool = _arguments.boolean("bias", bias)
        self.qk_norm: bool = _arguments.boolean("qk_norm", qk_norm)
        self.norm_eps: float = _arguments.positive("norm_eps", norm_eps)
        self.rotary: bool = _arguments.boolean("rotary", rotary)
        self.rotary_base: float = _arguments.rotary_base("rotary_base", rotary_base)
        self.rotary_dim: int | None = (
            None if rotary_dim is None else _arguments.integer("rotary_dim", rotary_dim)
        )
        self.rotary_interleaved: bool = _arguments.boolean("rotary_interleaved", rotary_interleaved)
        self.dtype: np.dtype[Any] = _arguments.float_dtype("dtype", dtype)
        self._check()
        rng = _arguments.generator("rng", rng)
        self.parameters: dict[str, NDArray[Any]] = {
            name: self._initial(name, shape, rng) for name, shape in self._shapes().items()
        }

    @np.errstate(all="ignore")
    def _initial(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        if name.startswith("w_"):
            with allocating(shape, np.float64):
                w = INITIALISERS[self.init](rng, *shape).astype(self.dtype)
            return self._folded(w) if self.fold_scale and name == "w_query" else w
        return np.full(shape, {"b": 0.0, "g": 1.0, "s": self._factor}[name[0]], self.dtype)

    def _folded(self, w: Array) -> Array:
        """W^Q times the scale: as rounded first, which a user's own folding of a layer gives."""
        folded = (widen(w) * self._factor).astype(self.dtype)
        if not np.isfinite(folded).all():
            raise ValueError(
                f"scale: expected a factor with which w_query stays in the range of {self.dtype}, "
                f"got {self._factor}"
            )
        return folded

    def _check(self) -> None:
        self._check_sizes()
        self._check_rules()
        self._check_positions_and_norm()

    def _check_sizes(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: expected a number that divides heads={self.heads}, got {self.kv_heads}"
            )
        if self.tied_kv and self.d_v != self.d_k:
            raise ValueError(f"d_v: expected d_k={self.d_k} with tied_kv=True, got {self.d_v}")
        if self.swap_roles and self.kv_heads != self.heads:
            raise ValueError(
                f"kv_heads: expected heads={self.heads} with swap_roles=True, got {self.kv_heads}"
            )
        if self.swap_roles and self.tied_kv and self.d_context != self.d_model:
            raise ValueError(
                f"d_context: expected d_model={self.d_model} with swap_roles=True and "
                f"tied_kv=True, got {self.d_context}"
            )

    def _check_rules(self) -> None:
        if self.scale == "1/log d_k" and self.d_k == 1:
            raise ValueError(
                "scale: expected another rule for d_k=1, got '1/log d_k', which divides by 0"
            )
        if self.fold_scale and self.scale == "learned":
            raise ValueError("fold_scale: expected False with scale='learned', got True")
        if self.fold_scale and self.qk_norm:
            raise ValueError(
                "fold_scale: expected False with qk_norm=True, which divides it out again, got True"
            )

    def _check_positions_and_norm(self) -> None:
        defaults = {"rotary_base": 10000.0, "rotary_dim": None, "rotary_interleaved": False}
        owners = {"norm_eps": (1e-6, "qk_norm")} | {n: (x, "rotary") for n, x in defaults.items()}
        for name, (default, owner) in owners.items():
            if not getattr(self, owner) and getattr(self, name) != default:
                raise ValueError(
                    f"{name}: expected {default} without {owner}=True, got {getattr(self, name)!r}"
                )
        width = self.d_k if self.rotary_dim is None else self.rotary_dim
        if self.rotary and (not 0 <= width <= self.d_k or width % 2):
            raise ValueError(
                f"rotary_dim: expected an even number from 0 to d_k={self.d_k}, got {width}"
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        value_rows = self.d_model if self.swap_roles else self.d_context
        shapes: dict[str, Any] = {
            "w_query": (self.d_model, self.heads * self.d_k),
            "w_key": (self.d_context, self.kv_heads * self.d_k),
            "w_value": (value_rows, self.kv_heads * self.d_v),
            "w_out": (self.heads * self.d_v, self.d_model),
        }
        if self.tied_kv:
            del shapes["w_value"]
        if self.bias:
            shapes |= {f"b_{name[2:]}": (columns,) for name, (_, columns) in shapes.items()}
        if self.qk_norm:
            shapes |= {"g_query": (self.d_k,), "g_key": (self.d_k,)}
        if self.scale == "learned":
            shapes["scale"] = (self.heads,)
        return shapes

    def _settings(self) -> dict[str, Any]:
        """The arguments that say what calls compute, of whatever parameters."""
        return {name: getattr(self, name) for name in _SETTINGS}

    @property
    def _factor(self) -> float:
        if isinstance(self.scale, float):
            return self.scale
        return 1 / _DIVISORS[self.scale](self.d_k)

    def _kernel_scale(self, parameters: Mapping[str, Any]) -> Any:
        """The factor of scores that is left to the kernel."""
        if self.scale == "learned":
            return parameters["scale"]
        return 1.0 if self.fold_scale else self._factor

    @property
    def _rotation(self) -> dict[str, Any]:
        """The options of `rotary_embedding`."""
        return {
            "base": self.rotary_base,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.rotary_interleaved,
        }


_SETTINGS = [name for name in signature(Definition).parameters if name not in ("init", "rng")]


def _scale(value: float | ScaleRule | None) -> float | ScaleRule:
    if value is None:
        return "1/sqrt d_k"
    if not isinstance(value, str):
        return _arguments.finite("scale", value)
    for rule in _DIVISORS:
        if value == rule:
            return rule
    # Divisors, as other texts write them, would be factors the wrong way round.
    factor = {"1": "1.0", "2 sqrt d_k": "'1/(2 sqrt d_k)'"} | {
        rule[2:]: repr(rule) for rule in ("1/sqrt d_k", "1/d_k", "1/log d_k")
    }
    remedy = f"; scores are multiplied by it: write {factor[value]}" if value in factor else ""
    *others, last = map(repr, _DIVISORS)
    raise ValueError(
        f"scale: expected a number, {', '.join(others)} or {last}, got {value!r}{remedy}"
    )


def _size(name: str, value: int | None, default: int) -> int:
    return default if value is None else _arguments.size(name, value, 1)
