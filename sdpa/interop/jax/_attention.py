"""The public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdpa import _arguments, _core, _table, _warnings
from sdpa._table import DIFFERENTIABLE, Option
from sdpa.interop.jax._functions import Functions, named_arguments
from sdpa.interop.jax._primitives import (
    FORWARD,
    INNER,
    NUMBERS,
    Options,
    check_sizes,
    unchecked,
)


def _stand_in(x: Any) -> Any:
    """An array of this shape and type, on which all checks run except those of the contents."""
    return None if x is None else np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _contents(x: Any) -> Any:
    """The array, with its values if these are known; XLA's handler checks traced integers."""
    return _stand_in(x) if isinstance(x, jax.core.Tracer) else x


def _packing(x: Any, n_rows: int) -> Any:
    """cu_seqlens, or if they are traced, those of empty sequences and then one with all rows."""
    if not isinstance(x, jax.core.Tracer):
        return x
    known = np.zeros(x.shape, x.dtype)
    if known.ndim:
        known[..., -1:] = n_rows
    return known


def _array(name: str, x: Any, dtype: Any = None) -> Any:
    """`x` as an array of JAX; lists and real numbers get this type."""
    if isinstance(x, jax.Array):
        return x
    try:
        with jax.ensure_compile_time_eval():  # a constant of a compiled function stays one
            found = jnp.asarray(x)  # which, unlike a conversion to a type, refuses text
            is_typed = hasattr(x, "dtype") or jnp.iscomplexobj(found)
            return found if is_typed else jnp.asarray(x, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{name}: expected an array, got {type(x)}, which JAX cannot take: {error}"
        ) from error


def _arrays(**operands: Any) -> list[Any]:
    """The operands as arrays of JAX."""
    return [_array(name, x) for name, x in operands.items()]


def _optional(name: str, x: Any, dtype: Any = None) -> Any:
    return x if x is None else _array(name, x, dtype)


def _seed(rng: Any, dropout_p: float) -> Any:
    """Two uint32, the low half of the seed first; None without dropout."""
    if _is_key(rng):
        return jax.random.bits(rng, (2,), jnp.uint32) if dropout_p else None
    if rng is None and not dropout_p:
        return None
    seed = _arguments.seed(rng, " or a key of jax.random with dropout_p > 0")
    return jnp.asarray([seed % 2**32, seed >> 32], jnp.uint32) if dropout_p else None


def _is_key(rng: Any) -> bool:
    """Whether it is a key of jax.random, also one of raw integers; raise for several."""
    if not isinstance(rng, jax.Array):
        return False
    is_typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if not is_typed and (rng.dtype != jnp.uint32 or not rng.ndim):
        return False
    if rng.ndim != (0 if is_typed else 1):
        raise ValueError(
            f"rng: expected one key of jax.random, got an array of keys of shape {rng.shape}; "
            "jax.vmap gives each call its own"
        )
    return True


def _per_entry(x: Any, shape: tuple[int, ...]) -> Any:
    return x if x is None else jnp.broadcast_to(x, shape)


def _with_axes(x: Any, n: int) -> Any:
    """`x` with axes of size 1 in front, so that it has `n` axes."""
    if x is None or x.ndim >= n:
        return x
    shape = (1,) * (n - x.ndim) + x.shape
    if isinstance(x, jax.core.Tracer):
        return x.reshape(shape)
    with jax.ensure_compile_time_eval():
        return x.reshape(shape)


def _band(n_q: Any, n_k: Any, reach: int, given: dict[str, Any]) -> tuple[dict[str, int], Any]:
    """(bounds of j - i for the handlers, query_offset or None if nothing depends on it)."""
    window, offset = _arguments.window("window", given["window"]), given["query_offset"]
    needs_positions = given["alibi_slopes"] is not None or given["functions"] is not None
    if given["is_causal"] == "lower_right":
        offset = _arguments.diagonal_offset(n_q, n_k, given["key_lengths"])
    elif offset is not None and not isinstance(offset, jax.Array):
        offset = _arguments.integers("query_offset", offset)
        if not needs_positions:
            offset, window = _arguments.nearer(offset, window, reach)
        _check_range(offset)
    left, right = window
    if given["is_causal"]:
        right = 0
    band = {} if left is None else {"has_lower": 1, "lower": -left}
    band |= {} if right is None else {"has_upper": 1, "upper": right}
    return band, offset if band or needs_positions else None


def _signed() -> Any:
    """The limits of the widest signed integers: of 32 bits or, if JAX allows, 64."""
    return np.iinfo(jnp.result_type(int))


def _check_range(offset: Any) -> None:
    """Raise a ValueError if ALiBi needs an offset that JAX cannot represent."""
    limits = _signed()
    beyond = offset[(offset < limits.min) | (offset > limits.max)]
    if beyond.size:
        raise ValueError(
            f"query_offset: expected integers of {limits.bits} bits with alibi_slopes, "
            f"got {beyond[0]}; jax_enable_x64 gives 64"
        )


def _integers(name: str, x: Any) -> Any:
    """Integers as the handlers take them, signed; those beyond become the nearest."""
    if x is None:
        return None
    limits = _signed()
    if not isinstance(x, jax.Array):
        return jnp.asarray(_arguments.integers(name, x).clip(limits.min, limits.max), limits.dtype)
    if x.dtype in (np.int32, np.int64):
        return x
    if np.iinfo(x.dtype).max > limits.max:
        x = jnp.minimum(x, x.dtype.type(limits.max))
    return x.astype(limits.dtype)


_DEFAULTS = {name: option.default for name, option in _table.WITH_PROGRAMS.items()}
_OF_ENTRIES, _OF_SEQUENCES, _OF_PAIRS = (
    [name for name, option in _table.OPTIONS.items() if option.axes == axes]
    for axes in ("", "s", "hqk")
)
_FLOATS = [x for x in _table.OPTIONS.values() if x.is_array and not x.is_integers]


def _float_array(option: Option, x: Any, dtype: Any) -> Any:
    """An operand as an array of JAX; numbers of differentiable ones per head get this type."""
    if option.name in NUMBERS and isinstance(x, (int, float, np.number)):
        return None
    is_typed = option.name in DIFFERENTIABLE and option.name not in _OF_PAIRS
    return _optional(option.name, x, dtype if is_typed else None)


def _check(operands: Sequence[Any], given: dict[str, Any], rows_first: bool) -> None:
    """Raise the errors that `sdpa.attention` would."""
    checked = [x.swapaxes(-3, -2) if rows_first else x for x in map(_stand_in, operands)]
    given = dict(given)
    for option in _FLOATS:
        x = given[option.name]
        if option.name in _OF_PAIRS:
            given[option.name] = _contents(x)  # ones and zeros are warned of
        elif isinstance(x, jax.Array):
            given[option.name] = _stand_in(x)
    unknown = any(isinstance(given[name], jax.core.Tracer) for name in _OF_SEQUENCES)
    for name in _OF_ENTRIES:
        given[name] = _stand_in(_optional(name, given[name])) if unknown else _contents(given[name])
    for name, x in zip(_OF_SEQUENCES, checked, strict=False):
        given[name] = _packing(given[name], x.shape[0] if x.ndim else 0)
    for name in "score_args", "mask_args":
        if given[name]:
            given[name] = tuple(
                _stand_in(x) if isinstance(x, jax.Array) else x for x in given[name]
            )
    _core._check_attention(*checked, **given | {"rng": 0})


def _forward(
    query: Any, key: Any, value: Any, *, rows_first: bool = False, **given: Any
) -> tuple[Any, Any]:
    """Compute (out, lse) for the options of `attention`.

    With rows_first, the axes are (batch, L, heads, d), and so are those of out.
    """
    query, key, value = _arrays(query=query, key=key, value=value)
    check_sizes(query=query, key=key, value=value)
    given = _DEFAULTS | given
    arrays = {x.name: _float_array(x, given[x.name], query.dtype) for x in _FLOATS}
    given |= {name: x for name, x in arrays.items() if x is not None}
    _check((query, key, value), given, rows_first)

    functions = Functions(given["score_mod"], given["mask_mod"])
    given["functions"] = functions if any(functions) else None
    integers = [name for name in (*_OF_SEQUENCES, *_OF_ENTRIES) if name != "query_offset"]
    arrays |= {name: _integers(name, given[name]) for name in integers}
    is_packed = arrays[_OF_SEQUENCES[0]] is not None
    rows_first = rows_first or is_packed
    n_q, n_k = (x.shape[-3 if rows_first else -2] for x in (query, key))
    reach = n_q + n_k
    if is_packed:
        n_q, n_k = (jnp.diff(arrays[name]) for name in _OF_SEQUENCES)
    band, offset = _band(n_q, n_k, reach, given | arrays)
    arrays["query_offset"] = _integers("query_offset", offset)
    if is_packed:
        arrays |= {name: _per_entry(arrays[name], n_q.shape) for name in _OF_ENTRIES}
    if given["scale"] is None:
        given["scale"] = _arguments.default_scale(query.shape[-1])
    known = {name: x for name, x in given.items() if arrays.get(name) is None}
    known["workers"] = min(_arguments.integer("workers", given["workers"] or 0), 2**31 - 1)
    options = Options.of(known | band | {"rows_first": rows_first})
    rank = max(3, query.ndim, key.ndim, value.ndim)
    named = {"query": query, "key": key, "value": value, **arrays}
    named = {name: _with_axes(x, rank - 2 + INNER[name]) for name, x in named.items()}
    named |= named_arguments(given)
    named["seed"] = _seed(given["rng"], given["dropout_p"])
    out, lse = FORWARD({n: x for n, x in named.items() if x is not None}, options)
    if max(query.ndim, key.ndim, value.ndim) == 2:  # remove the axis of heads, which none had
        return out[0], lse[0]
    return out, lse


@unchecked()
def attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """`sdpa.attention` on arrays of JAX, with the gradients of `sdpa.attention_backward`.

    Parameters
    ----------
    query, key, value : jax.Array
        (..., heads, L, d), of float16, bfloat16, float32 or float64; shapes as in `sdpa.attention`.
    *args, **options
        The options of `sdpa.attention` except out. Those that are arrays there may be traced, the
        others are known when the function is traced. rng, required with dropout_p > 0, is an int,
        which gives the pattern of `sdpa.attention`, or a key of jax.random. score_mod and mask_mod
        are static; score_args and mask_args are arrays that may be traced, the first with
        derivatives. A call with functions goes through Python, by `jax.pure_callback`; under
        `jax.vmap` its calls run one after another, each with b and h of its own.

    Returns
    -------
    (..., heads, Lq, d_v) jax.Array
        softmax(scale query key^T + attn_mask) value, of query's dtype: Vaswani et al., "Attention
        is all you need" (2017), equation 1. With cu_seqlens_q it is (total_q, heads, d_v).

    Raises
    ------
    TypeError, ValueError
        As `sdpa.attention`.
    jax.errors.JaxRuntimeError
        When a compiled function runs with key_lengths outside [0, Lk], or cu_seqlens that decrease
        or do not end at the number of rows.
    NotImplementedError
        For a derivative in alibi_slopes; for third derivatives, and forward mode over forward mode,
        of dropout; for symbolic shapes; where the computation is compiled for another platform than
        the CPU.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from sdpa.interop.jax import attention
    >>> value = jnp.array([[1.0], [3.0]])  # equal scores: their mean
    >>> def total(value):
    ...     return attention(jnp.zeros((1, 2)), jnp.zeros((2, 2)), value, softcap=5.0).sum()
    >>> out, gradient = jax.value_and_grad(total)(value)
    >>> out.item(), gradient.tolist()
    (2.0, [[0.5], [0.5]])
    """
    given = _table.given(attention, args, options, _table.WITH_PROGRAMS)
    out, _ = _forward(query, key, value, **given)
    return out


_function: Any = attention
_function.__signature__ = _table.signature(Any, _table.WITH_PROGRAMS)


# --------------------------------------------------------------------------- jax.nn's own function


def _check_shape(name: str, x: Any, shape: Sequence[int | str]) -> None:
    """Raise a ValueError unless the sizes match; a name stands for any size."""
    if x.ndim == len(shape) and all(
        isinstance(n, str) or n == size for n, size in zip(shape, x.shape, strict=True)
    ):
        return
    expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    raise ValueError(f"{name}: expected shape ({expected}), got {x.shape}")


def _check_layout(query: Any, key: Any, value: Any) -> None:
    """Check for (B, T, N, H), (B, S, K, H) and (B, S, K, any)."""
    if query.ndim not in (3, 4):
        raise ValueError(f"query: expected shape (B, T, N, H) or (T, N, H), got {query.shape}")
    lead = query.shape[:-3]
    n_heads, d = query.shape[-2:]
    _check_shape("key", key, (*lead, "S", "K", d))
    _check_shape("value", value, (*lead, *key.shape[-3:-1], "H"))
    k_heads = key.shape[-2]
    if n_heads % k_heads if k_heads else n_heads:
        raise ValueError(
            f"key: expected a number of heads that divides query's {n_heads}, got {k_heads}"
        )


def _lengths(name: str, lengths: Any, n_batch: int) -> Any:
    """Integers (B,)."""
    if isinstance(lengths, jax.Array) and not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {lengths.dtype}")
    lengths = _integers(name, lengths)
    if lengths is not None:
        _check_shape(name, lengths, (n_batch,))
    return lengths


def _rows_in_use(lengths: Any, n_q: int) -> Any:
    """Which rows are not padding, for (B, T, N)."""
    return None if lengths is None else (jnp.arange(n_q)[None] < lengths[:, None])[..., None]


def _key_lengths(lengths: Any, n_batch: int, n_k: int) -> Any:
    name = "key_value_seq_lengths"
    lengths = _lengths(name, lengths, n_batch)
    if lengths is None or isinstance(lengths, jax.core.Tracer):
        return lengths
    known = np.asarray(lengths)  # within a compiled function an operation of JAX would be traced
    outside = known[(known < 0) | (known > n_k)]
    if outside.size:
        raise ValueError(f"{name}: expected integers from 0 to S = {n_k}, got {outside[0]}")
    return lengths


def _masks(bias: Any, mask: Any, wide: Any) -> dict[str, Any]:
    """The options for a bias and a boolean mask."""
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"mask: expected bool (True = attend), got {mask.dtype}; see bias")
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias: expected a floating type, got {bias.dtype}")
    return {"attn_mask": None if bias is None else bias.astype(wide), "where": mask}


@unchecked()
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`: the same arguments, layout and results.

    Parameters
    ----------
    query, key, value : jax.Array
        (B, T, N, H), (B, S, K, H) and (B, S, K, H), or all three without B; N is a multiple of K.
        Of float16, bfloat16, float32 or float64. They are not transposed in memory.
    bias, mask : jax.Array, optional
        Broadcast to (B, N, T, S); added to the scaled scores, and boolean with True = attend.
    scale : float, optional
        Factor of the scores; 1 / sqrt(H) by default. Known when the function is traced.
    is_causal : bool, default False
        Query i attends to keys 0 to i.
    query_seq_lengths, key_value_seq_lengths : jax.Array of integers, (B,), optional
        Rows of query, and of key and value, that are not padding. Other rows of the result are 0.
    local_window_size : int or (int, int), optional
        Query i attends to keys from i - left to i + right.
    implementation : None
        Other values are refused: they name implementations of `jax.nn`.
    return_residual : bool, default False
        Return the logarithm of the sum of the exponentials, too.

    Returns
    -------
    (B, T, N, H) jax.Array, or with the residual (B, T, N)
        Of query's dtype. The residual has no gradient, as in JAX.

    Raises
    ------
    TypeError, ValueError
        Before anything is computed, naming the argument.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from sdpa.interop.jax import dot_product_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 4, 8), np.float32)
    >>> theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    >>> bool(jnp.allclose(dot_product_attention(q, k, v, is_causal=True), theirs, atol=1e-6))
    True
    """
    is_causal = _arguments.boolean("is_causal", is_causal)
    return_residual = _arguments.boolean("return_residual", return_residual)
    if implementation is not None:
        raise ValueError(
            f"implementation: expected None, got {implementation!r}; "
            "jax.nn.dot_product_attention has the others"
        )
    query, key, value = _arrays(query=query, key=key, value=value)
    bias, mask = _optional("bias", bias), _optional("mask", mask)
    check_sizes(query=query, key=key, value=value)
    _check_layout(query, key, value)
    plain = query.ndim == 3
    query, key, value = (_with_axes(x, 4) for x in (query, key, value))
    n_batch, n_q, n_heads = query.shape[:3]
    for name, x in ("bias", bias), ("mask", mask):
        if x is not None:
            _arguments.checked_broadcast(name, x.shape, (n_batch, n_heads, n_q, key.shape[1]))
    rows = _rows_in_use(_lengths("query_seq_lengths", query_seq_lengths, n_batch), n_q)
    if rows is not None:  # the others may hold NaN, which gradients would multiply with 0
        query = jnp.where(rows[..., None], query, 0)
    window = local_window_size
    if window is not None and not isinstance(window, (tuple, list)):
        window = window, window
    with _warnings.silenced():  # a bias has its own argument here
        out, lse = _forward(
            *(query, key, value),
            **_masks(bias, mask, _wide(query, bias)),
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
            window=_arguments.window("local_window_size", window),
            key_lengths=_key_lengths(key_value_seq_lengths, n_batch, key.shape[1]),
            rows_first=True,
        )
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2).astype(query.dtype)
    if rows is not None:
        out = jnp.where(rows[..., None], out, 0)
        residual = jnp.where(rows, residual, -jnp.inf)
    if plain:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _wide(query: Any, bias: Any) -> Any:
    """The type in which a bias is added: its own, if the kernels take it."""
    if bias is None or bias.dtype in (query.dtype, np.float32):
        return bias if bias is None else bias.dtype
    return np.float64 if query.dtype == np.float64 else np.float32
