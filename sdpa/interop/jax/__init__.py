"""Attention as functions of JAX, with derivatives of any order, for arrays on the CPU.

>>> import jax
>>> import jax.numpy as jnp
>>> from sdpa.interop.jax import attention
>>> query, key, value = jnp.ones((3, 4)), jnp.eye(4), jnp.arange(8.0).reshape(4, 2)
>>> jax.grad(lambda query: (attention(query, key, value) ** 2).sum())(query).shape
(3, 4)

The functions run under `jax.jit`, `grad`, `jvp`, `vmap`, `hessian`, `checkpoint`, `lax.scan` and
`shard_map`, and are differentiable wherever `sdpa.attention_backward` has a gradient. XLA calls the
kernels itself, without Python.
"""

from __future__ import annotations

try:
    import jax  # noqa: F401
except ImportError as _error:
    raise ImportError("sdpa.interop.jax needs JAX: pip install jax") from _error

from sdpa._public import publish
from sdpa.interop.jax import _derivatives as _derivatives
from sdpa.interop.jax import _sharding as _sharding
from sdpa.interop.jax._attention import attention, dot_product_attention

__all__ = ["attention", "dot_product_attention"]


def __dir__() -> list[str]:
    return __all__


publish(__name__, globals())
