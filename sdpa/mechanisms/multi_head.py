"""Multi-head attention with its projections, initialisers and gradients.

Projections are matrix products by NumPy's BLAS; the kernel of `sdpa.attention` runs between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sdpa import _arguments, _core
from sdpa._arguments import (
    arrays,
    checked_needs,
    checked_options,
    checked_rows,
    converted,
)
from sdpa._arrays import (
    Array,
    native,
    rounded,
    rows_in_use,
    weight_gradient,
    widen,
    widened_options,
)
from sdpa._options import LayerOptions

__all__ = ["MultiHeadAttention", "MultiHeadForward", "MultiHeadGradients", "MultiHeadSaved"]

Initialiser = Literal["1/d_model", "xavier_normal", "xavier_uniform"]
ScaleRule = Literal["1", "log d_k", "sqrt d_k", "2 sqrt d_k", "d_k", "learned"]

# The divisors of scores; a learned scale starts from 1 / sqrt(d_k).
_DIVISORS: dict[ScaleRule, Callable[[int], float]] = {
    "1": lambda d_k: 1.0,
    "log d_k": math.log,
    "sqrt d_k": math.sqrt,
    "2 sqrt d_k": lambda d_k: 2 * math.sqrt(d_k),
    "d_k": float,
    "learned": math.sqrt,
}


def _xavier_uniform(rng: np.random.Generator, rows: int, columns: int) -> Array:
    bound = math.sqrt(6 / (rows + columns))
    return rng.uniform(-bound, bound, (rows, columns))


_INITIALISERS: dict[Initialiser, Callable[[np.random.Generator, int, int], Array]] = {
    "1/d_model": lambda rng, rows, columns: rng.normal(0, math.sqrt(1 / rows), (rows, columns)),
    "xavier_normal": lambda rng, rows, columns: rng.normal(
        0, math.sqrt(2 / (rows + columns)), (rows, columns)
    ),
    "xavier_uniform": _xavier_uniform,
}
_NEEDS = ("parameters", "x", "context", "attn_mask", "sinks")


class MultiHeadSaved(NamedTuple):
    """The data that `MultiHeadAttention.backward` needs from the forward call.

    Arguments are held, not copied: they must not change until backward has been called.
    query, key and value are the kernel's operands, (..., heads, L, d), in the type of the
    arithmetic; out and lse are its results.
    """

    x: Array
    context: Array | None
    parameters: dict[str, Array]
    query: Array
    key: Array
    value: Array
    out: Array
    lse: Array
    options: dict[str, Any]


class MultiHeadForward(NamedTuple):
    """Result of `MultiHeadAttention.forward`: out (..., L, d_model), and the data for backward."""

    out: Array
    saved: MultiHeadSaved


class MultiHeadGradients(NamedTuple):
    """Result of `MultiHeadAttention.backward`, each of its argument's shape; None if not needed."""

    parameters: dict[str, Array] | None
    x: Array | None
    context: Array | None
    attn_mask: Array | None
    sinks: Array | None


class MultiHeadAttention:
    """Multi-head attention: softmax(Q K^T / c) V in every head, between projections.

    With x (..., Lq, d_model) and context (..., Lk, d_context), which is x in self-attention:

        Q = x W^Q    K = context W^K    V = context W^V    out = concat(heads) W^O

    Vaswani et al., "Attention is all you need" (2017), section 3.2.2. There are no bias terms.

    Parameters
    ----------
    d_model : int
        Width of x and of the result.
    heads : int
        Number of query heads.
    kv_heads : int, optional
        Number of key and value heads, which divides heads; None = heads (Ainslie et al., "GQA",
        2023).
    d_k, d_v : int, optional
        Widths per head of queries and keys, and of values; None = d_model // heads, and d_k.
    d_context : int, optional
        Width of context in cross-attention; None = d_model.
    init : {"xavier_uniform", "xavier_normal", "1/d_model"}
        Distribution of the entries of each matrix of r rows and c columns: uniform or normal of
        variance 2 / (r + c) (Glorot and Bengio, 2010, section 4.2.1), or normal of variance 1 / r.
        That is 1 / d_model for the projections of x, which keep components at variance 1.
    scale : {"sqrt d_k", "1", "log d_k", "2 sqrt d_k", "d_k", "learned"}
        The divisor of scores. "learned" multiplies them by a parameter of each head instead, which
        starts from 1 / sqrt(d_k).
    fold_scale : bool, default False
        Multiply W^Q by the scale once, at initialisation (as T5 does), and let the kernel multiply
        by 1. The function stays the same, but its gradient with respect to W^Q does not: see
        `learning_rate_factors`.
    tied_kv : bool, default False
        V = context W^K: one projection for keys and values, which then have d_v = d_k.
    swap_roles : bool, default False
        The rows of softmax belong to the keys: out = softmax(K Q^T / c) V with V = x W^V, of length
        Lk. This is not the transpose of softmax(Q K^T / c), in which the queries' rows sum to 1.
    dtype : dtype, default float32
        The dtype of the parameters and of the calls' arguments: float16, bfloat16, float32 or
        float64. The 16-bit types are computed in float32.
    rng : int, numpy.random.Generator or None
        Seed of the parameters, or the generator to draw them from; None means fresh entropy.

    Attributes
    ----------
    parameters : dict of ndarray
        "w_query" (d_model, heads d_k), "w_key" (d_context, kv_heads d_k), "w_value"
        (d_context, kv_heads d_v; absent if tied), "w_out" (heads d_v, d_model), and "scale"
        (heads,) if learned. Optimisers may change them in place; `forward` also takes others.

    Raises
    ------
    TypeError
        The dtype is not accepted.
    ValueError
        Sizes do not fit, or a rule is unknown.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> layer = sdpa.MultiHeadAttention(16, 4, rng=0)
    >>> x = np.random.default_rng(1).standard_normal((2, 5, 16), np.float32)
    >>> out, saved = layer.forward(x, is_causal=True)
    >>> out.shape
    (2, 5, 16)
    >>> grads = layer.backward(np.ones_like(out), saved)
    >>> sorted(grads.parameters)
    ['w_key', 'w_out', 'w_query', 'w_value']
    >>> for name, grad in grads.parameters.items():
    ...     layer.parameters[name] -= 0.01 * grad
    """

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
        scale: ScaleRule = "sqrt d_k",
        fold_scale: bool = False,
        tied_kv: bool = False,
        swap_roles: bool = False,
        dtype: DTypeLike = np.float32,
        rng: int | np.random.Generator | None = None,
    ) -> None:
        d_model = _arguments.size("d_model", d_model, 1)
        heads = _arguments.size("heads", heads, 1)
        if d_k is None and d_model % heads:
            raise ValueError(f"d_model: expected a multiple of heads={heads}, got {d_model}")
        self.d_model: int = d_model
        self.heads: int = heads
        self.kv_heads: int = _size("kv_heads", kv_heads, heads)
        self.d_k: int = _size("d_k", d_k, d_model // heads)
        self.d_v: int = _size("d_v", d_v, self.d_k)
        self.d_context: int = _size("d_context", d_context, d_model)
        self.init: Initialiser = _arguments.choice("init", init, _INITIALISERS)
        self.scale: ScaleRule = _arguments.choice("scale", scale, _DIVISORS)
        self.fold_scale: bool = _arguments.boolean("fold_scale", fold_scale)
        self.tied_kv: bool = _arguments.boolean("tied_kv", tied_kv)
        self.swap_roles: bool = _arguments.boolean("swap_roles", swap_roles)
        self.dtype: np.dtype[Any] = _arguments.float_dtype("dtype", dtype)
        self._check_sizes()
        self._check_rules()
        shapes = self._shapes()
        rng = _arguments.generator("rng", rng)
        self.parameters: dict[str, NDArray[Any]] = {
            name: _INITIALISERS[init](rng, *shape).astype(self.dtype)
            for name, shape in shapes.items()
            if name != "scale"
        }
        if "scale" in shapes:
            self.parameters["scale"] = np.full(heads, self._factor, self.dtype)
        if self.fold_scale:
            folded = widen(self.parameters["w_query"]) * self._factor
            self.parameters["w_query"] = folded.astype(self.dtype)

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
        if self.scale == "log d_k" and self.d_k == 1:
            raise ValueError("scale: expected another rule for d_k=1, got 'log d_k', which is 0")
        if self.fold_scale and self.scale == "learned":
            raise ValueError("fold_scale: expected False with scale='learned', got True")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        value_rows = self.d_model if self.swap_roles else self.d_context
        shapes: dict[str, tuple[int, ...]] = {
            "w_query": (self.d_model, self.heads * self.d_k),
            "w_key": (self.d_context, self.kv_heads * self.d_k),
            "w_value": (value_rows, self.kv_heads * self.d_v),
            "w_out": (self.heads * self.d_v, self.d_model),
            "scale": (self.heads,),
        }
        if self.tied_kv:
            del shapes["w_value"]
        if self.scale != "learned":
            del shapes["scale"]
        return shapes

    @property
    def _factor(self) -> float:
        return 1 / _DIVISORS[self.scale](self.d_k)

    @property
    def _kernel_scale(self) -> float:
        """The factor of scores that is left to the kernel."""
        return 1.0 if self.fold_scale or self.scale == "learned" else self._factor

    def learning_rate_factors(self, optimiser: Literal["sgd", "adam"]) -> dict[str, float]:
        """Factors of each parameter's learning rate with which folding changes nothing.

        A layer with fold_scale=True holds c W^Q, where c is the scale. Its gradient is the gradient
        of W^Q divided by c, and its steps should be c times as long. SGD (with momentum or not)
        moves by the learning rate times the gradient: the factor is c^2. Adam's steps do not depend
        on the size of the gradient: the factor is c, up to its epsilon. Training then takes the
        same path as with the scale in the kernel. All factors are 1 without fold_scale.

        Parameters
        ----------
        optimiser : {"sgd", "adam"}

        Returns
        -------
        dict of float

        Raises
        ------
        ValueError
            The optimiser is another one.

        Examples
        --------
        >>> import sdpa
        >>> layer = sdpa.MultiHeadAttention(16, 1, fold_scale=True)
        >>> layer.learning_rate_factors("sgd")["w_query"]
        0.0625
        """
        powers: dict[Literal["sgd", "adam"], int] = {"sgd": 2, "adam": 1}
        optimiser = _arguments.choice("optimiser", optimiser, powers)
        factors = dict.fromkeys(self.parameters, 1.0)
        if self.fold_scale:
            factors["w_query"] = self._factor ** powers[optimiser]
        return factors

    # --------------------------------------------------------------------------- calls

    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        parameters: Mapping[str, ArrayLike] | None = None,
        **options: Unpack[LayerOptions],
    ) -> Array:
        """The result of `forward` alone, (..., L, d_model)."""
        return self.forward(x, context, parameters=parameters, **options).out

    def forward(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        parameters: Mapping[str, ArrayLike] | None = None,
        **options: Unpack[LayerOptions],
    ) -> MultiHeadForward:
        """Project, attend, project, and keep the data that `backward` needs.

        Parameters
        ----------
        x : array_like, (..., Lq, d_model)
        context : array_like, (..., Lk, d_context), optional
            The source of keys and values; None means x: self-attention.
        parameters : mapping of array_like, optional
            Used in place of the layer's parameters, which stay unchanged.
        **options : attn_mask, dropout_p, is_causal, window, sinks, ...
            As in `sdpa.attention_forward` for arrays (..., heads, L, d), but without scale,
            enable_gqa and out.

        Returns
        -------
        MultiHeadForward
            Named tuple: out (..., Lq, d_model; Lk with swap_roles), and saved.

        Raises
        ------
        TypeError
            An argument has another dtype than the layer, or its name is unknown.
        ValueError
            Shapes do not fit, or a value is out of range.
        """
        given, x, source, checked = self._checked(self.forward, x, context, parameters, options)
        query, key, value = self._project(given, x, source)
        rows = query.shape[:-1]
        lead = np.broadcast_shapes(rows[:-2], key.shape[:-3], value.shape[:-3])
        # Put length before heads, so that heads lie side by side for the last product.
        heads_out = np.empty((*lead, rows[-1], self.heads, self.d_v), query.dtype)
        heads_out, lse = _core.attention_forward(
            query, key, value, out=np.swapaxes(heads_out, -3, -2),
            **widened_options(checked, self.dtype),
        )  # fmt: skip
        with np.errstate(all="ignore"):
            out = cast(Array, rounded(_product(_merged(heads_out), widen(given["w_out"])), x))
        own = None if context is None else source
        saved = MultiHeadSaved(x, own, given, query, key, value, heads_out, lse, checked)
        return MultiHeadForward(out, saved)

    def backward(
        self,
        grad_out: ArrayLike,
        saved: MultiHeadSaved,
        *,
        needs: Iterable[str] = ("parameters", "x", "context"),
    ) -> MultiHeadGradients:
        """Gradients of <grad_out, out>, down to the projections and the inputs.

        With dQ, dK, dV the gradients of attention, H the concatenated heads, and rows flattened,

            dW^Q = x^T dQ    dW^K = context^T dK    dW^V = context^T dV    dW^O = H^T grad_out
            dx = dQ (W^Q)^T    dcontext = dK (W^K)^T + dV (W^V)^T

        where dx is the sum of both in self-attention. A learned scale s of a head receives
        sum <dQ, Q> / s, computed without the division. A token that no query sees, and that is not
        a query itself, adds nothing, even if it holds NaN.

        Parameters
        ----------
        grad_out : array_like, of the shape and dtype of out
        saved : MultiHeadSaved
            From the forward call.
        needs : sequence of {"parameters", "x", "context", "attn_mask", "sinks"}
            The gradients to compute; the gradient of context is None in self-attention.

        Returns
        -------
        MultiHeadGradients
            Named tuple (parameters, x, context, attn_mask, sinks), each with the shapes and dtypes
            of its argument, None where not in needs; parameters is a dict like the layer's.

        Raises
        ------
        TypeError, ValueError
            grad_out does not fit, or a name in needs is unknown.
        """
        needs = checked_needs(needs, _NEEDS)
        if not isinstance(saved, MultiHeadSaved):
            raise TypeError(f"saved: expected the saved of a forward call, got {type(saved)}")
        (grad_out,) = arrays(grad_out=grad_out)
        x, context, given = saved.x, saved.context, saved.parameters
        shape = (*saved.out.shape[:-3], saved.out.shape[-2], self.d_model)
        if grad_out.shape != shape:
            raise ValueError(f"grad_out: expected {shape}, got {grad_out.shape}")
        if native(grad_out.dtype) != native(x.dtype):
            raise TypeError(
                f"grad_out: expected {x.dtype}, got {grad_out.dtype}; "
                "write grad_out.astype(x.dtype)"
            )
        inner = ("query", "key", "value", *(n for n in ("attn_mask", "sinks") if n in needs))
        with np.errstate(all="ignore"):
            grad = widen(grad_out)
            heads_shape = (*grad.shape[:-1], self.heads, self.d_v)
            by_heads = _product(grad, widen(given["w_out"]).T).reshape(heads_shape)
            g = _core.attention_backward(
                np.swapaxes(by_heads, -3, -2), saved.query, saved.key, saved.value, saved.out,
                saved.lse, **widened_options(saved.options, self.dtype), needs=inner,
            )  # fmt: skip
            parameters, grad_x, grad_context = self._backward_projections(saved, grad, g)
        mask = saved.options.get("attn_mask")
        return MultiHeadGradients(
            {name: cast(Array, rounded(y, given[name])) for name, y in parameters.items()}
            if "parameters" in needs
            else None,
            rounded(grad_x, x) if "x" in needs else None,
            rounded(grad_context, x) if context is not None and "context" in needs else None,
            None if mask is None else rounded(g.attn_mask, mask),
            g.sinks,
        )

    def attention_weights(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        parameters: Mapping[str, ArrayLike] | None = None,
        **options: Unpack[LayerOptions],
    ) -> Array:
        """The weights of every head: (..., heads, Lq, Lk), with swap_roles (..., heads, Lk, Lq).

        Parameters
        ----------
        x, context, parameters, **options
            As in `forward`.

        Returns
        -------
        ndarray
        """
        function = self.attention_weights
        given, x, source, checked = self._checked(function, x, context, parameters, options)
        query, key, _ = self._project(given, x, source)
        weights = _core.attention_weights(query, key, **widened_options(checked, self.dtype))
        return cast(Array, rounded(weights, x))

    # --------------------------------------------------------------------------- parts

    def _checked(
        self,
        function: Callable[..., Any],
        x: ArrayLike,
        context: ArrayLike | None,
        parameters: Mapping[str, ArrayLike] | None,
        options: Mapping[str, Any],
    ) -> tuple[dict[str, Array], Array, Array, dict[str, Any]]:
        """Return parameters, x, context (x if there is none) and the options of the kernel."""
        checked = checked_options(function, options, LayerOptions.__annotations__)
        checked["enable_gqa"] = self.kv_heads != self.heads
        checked["scale"] = self._kernel_scale
        given = self._checked_parameters(self.parameters if parameters is None else parameters)
        (x,), (given_context,), checked = converted(checked, {"context": context}, x=x)
        self._check_input("x", x, self.d_model)
        source = x if given_context is None else given_context
        if context is not None or self.d_context != self.d_model:
            self._check_input("context" if context is not None else "x", source, self.d_context)
        try:
            np.broadcast_shapes(x.shape[:-2], source.shape[:-2])
        except ValueError:
            raise ValueError(
                f"context: expected leading axes that broadcast with {x.shape[:-2]}, "
                f"got {source.shape[:-2]}"
            ) from None

        def like(y: Array, heads: int, width: int) -> Array:
            shape = (*y.shape[:-2], heads, y.shape[-2], width)
            return np.broadcast_to(np.zeros((), self.dtype), shape)

        query, key = like(x, self.heads, self.d_k), like(source, self.kv_heads, self.d_k)
        value = like(x if self.swap_roles else source, self.kv_heads, self.d_v)
        query, key = (key, query) if self.swap_roles else (query, key)
        _core._check_attention(query, key, value, **checked)
        return given, x, source, checked

    def _check_input(self, name: str, x: Array, width: int) -> None:
        checked_rows(name, x, f"L, {width}")
        if x.shape[-1] != width:
            raise ValueError(f"{name}: expected (..., L, {width}), got {x.shape}")
        if native(x.dtype) != self.dtype:
            raise TypeError(
                f"{name}: expected the layer's dtype {self.dtype}, got {x.dtype}; "
                f"write {name}.astype(layer.dtype)"
            )

    def _checked_parameters(self, parameters: Mapping[str, ArrayLike]) -> dict[str, Array]:
        shapes = self._shapes()
        if not isinstance(parameters, Mapping):
            raise TypeError(
                f"parameters: expected a mapping of {sorted(shapes)}, got {type(parameters)}"
            )
        if set(parameters) != set(shapes):
            raise ValueError(f"parameters: expected {sorted(shapes)}, got {sorted(parameters)}")
        names = {f"parameters[{name!r}]": parameters[name] for name in shapes}
        given = dict(zip(shapes, arrays(**names), strict=True))
        for name, y in given.items():
            if y.shape != shapes[name]:
                raise ValueError(f"parameters[{name!r}]: expected {shapes[name]}, got {y.shape}")
            if native(y.dtype) != self.dtype:
                raise TypeError(
                    f"parameters[{name!r}]: expected the layer's dtype {self.dtype}, got {y.dtype}"
                )
        return given

    @np.errstate(all="ignore")
    def _project(
        self, given: Mapping[str, Array], x: Array, source: Array
    ) -> tuple[Array, Array, Array]:
        """Query, key and value for the kernel, a learned scale in the query."""
        query = _heads(x, given["w_query"], self.heads)
        key = _heads(source, given["w_key"], self.kv_heads)
        of_value = x if self.swap_roles else source
        if not self.tied_kv:
            value = _heads(of_value, given["w_value"], self.kv_heads)
        else:
            value = key if of_value is source else _heads(of_value, given["w_key"], self.kv_heads)
        if self.scale == "learned":
            query = query * widen(given["scale"])[:, None, None]
        return (key, query, value) if self.swap_roles else (query, key, value)

    def _backward_projections(
        self, saved: MultiHeadSaved, grad: Array, g: _core.AttentionGradients
    ) -> tuple[dict[str, Array], Array, Array]:
        """Gradients of the parameters, of x and of context; in self-attention x's holds both."""
        given, x = saved.parameters, widen(saved.x)
        source = x if saved.context is None else widen(saved.context)
        by_query, by_key, by_value = (cast(Array, y) for y in g[:3])
        if self.swap_roles:
            by_query, by_key = by_key, by_query
        parameters = {}
        if self.scale == "learned":
            scale = widen(given["scale"])[:, None, None]
            query = _heads(x, given["w_query"], self.heads)
            products = np.where(rows_in_use(by_query), by_query * query, 0)
            parameters["scale"] = products.sum(axis=(*range(products.ndim - 3), -2, -1))
            by_query = by_query * scale

        grad_x, grad_source = np.zeros_like(x), np.zeros_like(source)
        if saved.context is None:
            grad_source = grad_x
        of_value, grad_of_value = (x, grad_x) if self.swap_roles else (source, grad_source)
        paths = [
            ("w_query", x, grad_x, by_query),
            ("w_key", source, grad_source, by_key),
            ("w_key" if self.tied_kv else "w_value", of_value, grad_of_value, by_value),
        ]
        for name, y, into, by in paths:
            merged = _merged(by)
            own = weight_gradient(y, merged, given[name].shape)
            parameters[name] = parameters[name] + own if name in parameters else own
            into += _product(merged, widen(given[name]).T)
        parameters["w_out"] = weight_gradient(_merged(saved.out), grad, given["w_out"].shape)
        return parameters, grad_x, grad_source


def _size(name: str, value: int | None, default: int) -> int:
    return default if value is None else _arguments.size(name, value, 1)


def _product(x: Array, w: Array) -> Array:
    """x w as one matrix product over all rows: (..., L, d), (d, h) -> (..., L, h)."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ w).reshape(*x.shape[:-1], w.shape[-1])


def _heads(x: Array, w: Array, heads: int) -> Array:
    """x w, its columns split into heads: (..., L, d) -> (..., heads, L, width), a view."""
    projected = _product(widen(x), widen(w))
    return np.swapaxes(projected.reshape(*x.shape[:-1], heads, w.shape[-1] // heads), -3, -2)


def _merged(x: Array) -> Array:
    """The reverse of the split: (..., heads, L, width) -> (..., L, heads width)."""
    x = np.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
