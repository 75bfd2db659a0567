"""Multi-head attention with its projections, initialisers and gradients.

Projections are matrix products by NumPy's BLAS; the kernel of `sdpa.attention` runs between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _arguments, _core
from sdpa._arguments import arrays, checked_needs
from sdpa._arrays import (
    Array,
    broadcast_shapes,
    native,
    rounded,
    sum_to,
    weight_gradient,
    widen,
    widened_options,
)
from sdpa._options import LayerOptions
from sdpa._public import publish
from sdpa._repr import settings, shown
from sdpa.mechanisms._definition import Definition, Positions
from sdpa.mechanisms._multi_head_arguments import checked_call
from sdpa.mechanisms._projections import backward_placed, merged, product, project

if TYPE_CHECKING:
    import torch

__all__ = ["MultiHeadAttention", "MultiHeadForward", "MultiHeadGradients"]

_NEEDS = ("parameters", "x", "context", "attn_mask", "sinks")


@shown
class MultiHeadSaved(NamedTuple):
    """The data that `MultiHeadAttention.backward` needs from the forward call.

    Arguments are held, not copied: they must not change until backward has been called.
    query, key and value are the kernel's operands, (..., heads, L, d), out and lse its results, all
    in the type of the arithmetic but lse, which is in float64. positions are those of x and of
    context. layer has the layer's settings.
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
    positions: Positions
    layer: dict[str, Any]


@shown
class MultiHeadForward(NamedTuple):
    """Result of `MultiHeadAttention.forward`: out (..., L, d_model), and the data for backward."""

    out: Array
    saved: MultiHeadSaved


@shown
class MultiHeadGradients(NamedTuple):
    """Result of `MultiHeadAttention.backward`, each of its argument's shape; None if not needed."""

    parameters: dict[str, Array] | None
    x: Array | None
    context: Array | None
    attn_mask: Array | None
    sinks: Array | None


@shown
class MultiHeadAttention(Definition):
    """Multi-head attention: softmax(c Q K^T) V in every head, between projections.

    With x (..., Lq, d_model) and context (..., Lk, d_context), which is x in self-attention:

        Q = x W^Q    K = context W^K    V = context W^V    out = concat(heads) W^O

    Vaswani et al., "Attention is all you need" (2017), section 3.2.2. With `bias` each of the four
    products has a vector added; with `qk_norm` and `rotary` Q and K are normalised, then rotated.

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
    scale : float or {"1/sqrt d_k", "1/d_k", "1/log d_k", "1/(2 sqrt d_k)", "learned"}, optional
        c, the factor of scores; None = "1/sqrt d_k". "learned" is a parameter of each head, which
        starts from 1 / sqrt(d_k).
    fold_scale : bool, default False
        Multiply W^Q by the scale once, at initialisation (as T5 does), and let the kernel multiply
        by 1. The function stays the same, but its gradient with respect to W^Q does not: see
        `learning_rate_factors`.
    tied_kv : bool, default False
        V = context W^K: one projection for keys and values, which then have d_v = d_k.
    bias : bool, default False
        Add a vector to each of the four products, as `torch.nn.MultiheadAttention` does. They start
        from 0.
    qk_norm : bool, default False
        Divide each query and key of a head by its root mean square and multiply it by a gain for
        each component, which starts from 1 (Zhang and Sennrich, "Root mean square layer
        normalization", 2019, section 4; for queries and keys Henry et al., "Query-key
        normalization for transformers", 2020). scale="learned" adds a temperature for each head.
    norm_eps : float, default 1e-6
        Added to the mean square, above 0.
    rotary : bool, default False
        Rotate queries and keys by their positions, see `rotary_embedding`. Values stay.
    rotary_base, rotary_dim, rotary_interleaved : float, int, bool
        base, rotary_dim and interleaved of `rotary_embedding`.
    swap_roles : bool, default False
        The rows of softmax belong to the keys: out = softmax(c K Q^T) V with V = x W^V, of length
        Lk. This is not the transpose of softmax(c Q K^T), in which the queries' rows sum to 1.
    dtype : dtype, default float32
        The dtype of the parameters and of the calls' arguments: float16, bfloat16, float32 or
        float64. The 16-bit types are computed in float32.
    rng : int, numpy.random.Generator or None
        Seed of the parameters, or the generator to draw them from; None means fresh entropy.

    Attributes
    ----------
    parameters : dict of ndarray
        "w_query" (d_model, heads d_k), "w_key" (d_context, kv_heads d_k), "w_value"
        (d_context, kv_heads d_v; absent if tied), "w_out" (heads d_v, d_model); with bias
        "b_query", "b_key", "b_value" (absent if tied) and "b_out", of their products' widths; with
        qk_norm "g_query" and "g_key" (d_k,); "scale" (heads,) if learned. Optimisers may change
        them in place; `forward` also takes others.

    Raises
    ------
    TypeError
        The dtype is not accepted.
    ValueError
        Sizes do not fit, a rule is unknown, or a folded scale takes w_query out of its range.

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

    def _shown(self) -> tuple[dict[str, Any], str]:
        numbers = sum(value.size for value in self.parameters.values())
        return settings(self), f"{numbers:,} numbers in {len(self.parameters)} parameters"

    def learning_rate_factors(self, optimizer: Literal["sgd", "adam"]) -> dict[str, float]:
        """Factors of each parameter's learning rate with which folding changes nothing.

        A layer with fold_scale=True holds c W^Q, where c is the scale; likewise its bias. Its
        gradient is the gradient of W^Q divided by c, and its steps should be c times as long. SGD
        (with momentum or not) moves by the learning rate times the gradient: the factor is c^2.
        Adam's steps have the gradient's sign, not its size: the factor is |c|, up to its epsilon.
        Training then takes the same path as with the scale in the kernel. All factors are 1 without
        fold_scale.

        Parameters
        ----------
        optimizer : {"sgd", "adam"}

        Returns
        -------
        dict of float

        Raises
        ------
        ValueError
            The optimizer is another one.

        Examples
        --------
        >>> import sdpa
        >>> layer = sdpa.MultiHeadAttention(16, 1, fold_scale=True)
        >>> layer.learning_rate_factors("sgd")["w_query"]
        0.0625
        """
        powers: dict[Literal["sgd", "adam"], int] = {"sgd": 2, "adam": 1}
        optimizer = _arguments.choice("optimizer", optimizer, powers)
        factors = dict.fromkeys(self.parameters, 1.0)
        if self.fold_scale:
            folded = {"w_query", "b_query"} & factors.keys()
            factors |= dict.fromkeys(folded, abs(self._factor) ** powers[optimizer])
        return factors

    # --------------------------------------------------------------------------- PyTorch

    @classmethod
    def from_torch(cls, module: torch.nn.MultiheadAttention) -> Self:
        """The layer that computes what a module of PyTorch does, with copies of its weights.

        Its x is the module's query, context its key and value, batch first whatever batch_first
        says. Dropout is an option of each call: dropout_p=module.dropout in training.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
            In float16, bfloat16, float32 or float64, on any device.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        ImportError
            PyTorch is not installed.
        TypeError
            It is another module, has a forward of its own, or its dtype is not accepted.
        ValueError
            It has add_bias_kv, add_zero_attn, a kdim beside another vdim, or no weights yet.

        Examples
        --------
        >>> import torch, sdpa
        >>> module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> layer, x = sdpa.MultiHeadAttention.from_torch(module), torch.randn(2, 5, 16)
        >>> out, _ = module(x, x, x)
        >>> torch.allclose(torch.from_numpy(layer(x)), out, atol=1e-6)
        True
        """
        from sdpa.mechanisms._torch_weights import from_module

        return from_module(cls, module)

    def to_torch(self) -> torch.nn.MultiheadAttention:
        """The module of PyTorch that computes what this layer does, with copies of its parameters.

        Returns
        -------
        torch.nn.MultiheadAttention
            With batch_first=True, without dropout.

        Raises
        ------
        ImportError
            PyTorch is not installed.
        ValueError
            The module has no such thing: its heads divide d_model and have keys and values of their
            own, its scale is 1 / sqrt(d_k), and it neither normalises nor rotates.

        Examples
        --------
        >>> import torch, sdpa
        >>> layer = sdpa.MultiHeadAttention(16, 4, bias=True, rng=0)
        >>> module, x = layer.to_torch(), torch.randn(2, 5, 16)
        >>> torch.allclose(torch.from_numpy(layer(x)), module(x, x, x)[0], atol=1e-6)
        True
        """
        from sdpa.mechanisms._torch_weights import to_module

        return to_module(self)

    # --------------------------------------------------------------------------- calls

    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        parameters: Mapping[str, ArrayLike] | None = None,
        positions: ArrayLike | None = None,
        context_positions: ArrayLike | None = None,
        **options: Unpack[LayerOptions],
    ) -> Array:
        """The result of `forward` alone, (..., L, d_model)."""
        given = {"positions": positions, "context_positions": context_positions}
        return self.forward(x, context, parameters=parameters, **given, **options).out

    def forward(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        parameters: Mapping[str, ArrayLike] | None = None,
        positions: ArrayLike | None = None,
        context_positions: ArrayLike | None = None,
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
        positions : array_like of int or float, broadcastable to (..., Lq), optional
            Of x, for a layer with rotary; None means 0, 1, 2, ...
        context_positions : array_like of int or float, broadcastable to (..., Lk), optional
            Of context, likewise; self-attention has the positions of x.
        **options : attn_mask, dropout_p, is_causal, window, sinks, ...
            As in `sdpa.attention_forward` for arrays (..., heads, L, d), but without scale,
            enable_gqa, out, lse_dtype, invariant, cu_seqlens_q, cu_seqlens_k, score_mod and
            mask_mod. dropout_p needs rng, an int.

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
        own = parameters, positions, context_positions
        given, x, source, at, checked = checked_call(self, self.forward, x, context, own, options)
        query, key, value = project(self, given, x, source, at)
        rows = query.shape[:-1]
        lead = broadcast_shapes(rows[:-2], key.shape[:-3], value.shape[:-3])
        # Put length before heads, so that heads lie side by side for the last product.
        heads_out = np.empty((*lead, rows[-1], self.heads, self.d_v), query.dtype)
        heads_out, lse = _core.attention_forward(
            query, key, value, out=np.swapaxes(heads_out, -3, -2),
            **checked, lse_dtype=np.float64,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            out = product(merged(heads_out), widen(given["w_out"]))
            if self.bias:
                out += widen(given["b_out"])
            out = cast(Array, rounded(out, x))
        other = None if context is None else source
        saved = MultiHeadSaved(
            x, other, given, query, key, value, heads_out, lse, checked, at, self._settings()
        )
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

        where dx is the sum of both in self-attention; with norm and rotation dQ and dK go back
        through these first. A bias receives the sum of its product's rows, a gain that of its own
        products, a learned scale attention's gradient of `scale`. A token that no query sees, and
        that is not a query itself, adds nothing, even if it holds NaN.

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
            grad_out does not fit, saved is that of another layer, or a name in needs is unknown.
        """
        needs = checked_needs(needs, _NEEDS)
        self._check_saved(saved)
        (grad_out,) = arrays(grad_out=grad_out)
        x, context, given = saved.x, saved.context, saved.parameters
        shape = (*saved.out.shape[:-3], saved.out.shape[-2], self.d_model)
        if native(grad_out.dtype) != native(x.dtype):
            raise TypeError(
                f"grad_out: expected {x.dtype}, got {grad_out.dtype}; "
                "write grad_out.astype(x.dtype)"
            )
        if grad_out.shape != shape:
            raise ValueError(f"grad_out: expected {shape}, got {grad_out.shape}")
        inner = ("query", "key", "value", *(n for n in ("attn_mask", "sinks") if n in needs))
        inner += ("scale",) if self.scale == "learned" else ()
        with np.errstate(all="ignore"):
            grad = widen(grad_out)
            heads_shape = (*grad.shape[:-1], self.heads, self.d_v)
            grad_heads = product(grad, widen(given["w_out"]).T).reshape(heads_shape)
            g = _core.attention_backward(
                np.swapaxes(grad_heads, -3, -2), saved.query, saved.key, saved.value, saved.out,
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
        positions: ArrayLike | None = None,
        context_positions: ArrayLike | None = None,
        **options: Unpack[LayerOptions],
    ) -> Array:
        """The weights of every head: (..., heads, Lq, Lk), with swap_roles (..., heads, Lk, Lq).

        Parameters
        ----------
        x, context, parameters, positions, context_positions, **options
            As in `forward`.

        Returns
        -------
        ndarray
            Of the layer's dtype.

        Raises
        ------
        TypeError, ValueError
            As `forward`.
        """
        function = self.attention_weights
        own = parameters, positions, context_positions
        given, x, source, at, checked = checked_call(self, function, x, context, own, options)
        query, key, _ = project(self, given, x, source, at)
        weights = _core.attention_weights(query, key, **checked)
        return cast(Array, rounded(weights, x))

    def _check_saved(self, saved: object) -> None:
        if not isinstance(saved, MultiHeadSaved):
            raise TypeError(f"saved: expected the saved of a forward call, got {type(saved)}")
        for name, own in self._settings().items():
            if saved.layer[name] != own:
                raise ValueError(
                    f"saved: expected that of a layer with {name}={own!r}, got one with "
                    f"{name}={saved.layer[name]!r}; each layer takes what its own forward has saved"
                )

    def _backward_projections(
        self, saved: MultiHeadSaved, grad: Array, g: _core.AttentionGradients
    ) -> tuple[dict[str, Array], Array, Array]:
        """Gradients of the parameters, of x and of context; in self-attention x's holds both."""
        given, x = saved.parameters, widen(saved.x)
        source = x if saved.context is None else widen(saved.context)
        by_query, by_key, by_value = (cast(Array, y) for y in g[:3])
        if self.swap_roles:
            by_query, by_key = by_key, by_query
        at, other_at = saved.positions
        by_query, own_gain = backward_placed(self, given, "query", x, at, by_query)
        by_key, key_gain = backward_placed(self, given, "key", source, other_at, by_key)
        parameters = own_gain | key_gain

        grad_x, grad_source = np.zeros_like(x), np.zeros_like(source)
        if saved.context is None:
            grad_source = grad_x
        of_value, grad_of_value = (x, grad_x) if self.swap_roles else (source, grad_source)
        paths = [
            ("query", x, grad_x, by_query),
            ("key", source, grad_source, by_key),
            ("key" if self.tied_kv else "value", of_value, grad_of_value, by_value),
        ]

        def add(kind: str, y: Array, by: Array) -> None:
            w, b = f"w_{kind}", f"b_{kind}"
            own = {w: weight_gradient(y, by, given[w].shape)}
            if self.bias:
                own[b] = sum_to(by, given[b].shape)
            for name, more in own.items():
                parameters[name] = parameters[name] + more if name in parameters else more

        for kind, y, into, by in paths:
            by = merged(by)
            add(kind, y, by)
            into += product(by, widen(given[f"w_{kind}"]).T)
        add("out", merged(saved.out), grad)
        if self.scale == "learned":
            parameters["scale"] = cast(Array, g.scale)
        return parameters, grad_x, grad_source


publish("sdpa", globals())
