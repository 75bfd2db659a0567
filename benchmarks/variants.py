"""Works that need no option of their own: attentions composed of ordinary calls.

Each contender computes the same result, which is checked before it is timed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sdpa
from benchmarks.contenders import Array, Contender, Contenders, Setting, Work, check
from sdpa_lab.experiments.speed import numpy_weights
from sdpa_lab.tools.clock import Call

Attention = Callable[..., Any]
"""(query, key, value, mask) to out, on the arrays of one library."""


def attentions(setting: Setting) -> dict[str, tuple[Callable[[Array], Any], Attention]]:
    """{name: (an array as the library's own, its attention)} of sdpa and the peers."""
    found: dict[str, tuple[Callable[[Array], Any], Attention]] = {"sdpa": (np.asarray, _sdpa)}
    for peer in setting.peers:
        if peer.name == "numpy":
            found["numpy"] = (np.asarray, _numpy)
        elif peer.name == "torch":
            found["torch"] = _torch()
        elif peer.name == "jax":
            found["jax"] = _jax()
    return found


def _sdpa(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    return sdpa.attention(q, k, v, mask, enable_gqa=True)


def _numpy(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    if mask is None:
        return np.asarray(numpy_weights(q, k) @ v)
    s = q @ k.swapaxes(-1, -2)
    s *= np.float32(q.shape[-1] ** -0.5)
    s[..., ~mask] = -np.inf
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return np.asarray(s @ v)


def _torch() -> tuple[Callable[[Array], Any], Attention]:
    import torch

    return torch.from_numpy, torch.nn.functional.scaled_dot_product_attention


def _jax() -> tuple[Callable[[Array], Any], Attention]:
    import jax

    def own(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        """In jax.numpy: jax.nn's function takes no values of another width than the keys."""
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if mask is None else jax.numpy.where(mask, s, -jax.numpy.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    return jax.numpy.asarray, own


def _contenders(
    setting: Setting,
    arrays: list[Array | None],
    compute: Callable[..., Any],
    flops: float,
    bytes_: float,
) -> Contenders:
    """`compute(attention, *arrays)` by everybody."""
    found: Contenders = {}
    for name, (own, attention) in attentions(setting).items():
        x = [None if a is None else own(a) for a in arrays]
        call = _call(name, attention, compute, x)
        if found:
            check(name, np.asarray(call()), np.asarray(found["sdpa"].call()))
        found[name] = Contender(call, flops, bytes_)
    return found


def _call(name: str, attention: Attention, compute: Callable[..., Any], x: list[Any]) -> Call:
    if name != "jax":
        return lambda: compute(attention, *x)
    import jax

    compiled = jax.jit(lambda *x: compute(attention, *x))
    return lambda: compiled(*x).block_until_ready()


# --------------------------------------------------------------------------- latent attention


def latent(setting: Setting) -> Iterator[Work]:
    """Multi-head latent attention as it is decoded: 128 query heads share one key of 576 numbers.

    The value is the key's first 512, a view of the same memory: DeepSeek-AI, "DeepSeek-V2" (2024),
    section 2.1, with the projections absorbed into query and output.
    """

    def build(n_k: int) -> Contenders:
        rng = np.random.default_rng(4)
        query = rng.standard_normal((1, 128, 1, 576), np.float32)
        cache = rng.standard_normal((1, 1, n_k, 576), np.float32)

        def compute(attention: Attention, q: Any, k: Any) -> Any:
            if attention is not _sdpa:  # heads as rows: one product, which the others have faster
                q = q.reshape(1, 1, 128, 576)
            return attention(q, k, k[..., :512]).reshape(1, 128, 1, 512)

        count = 2.0 * 128 * n_k * (576 + 512)
        return _contenders(setting, [query, cache], compute, count, float(cache.nbytes))

    for n_k in (4096, 32768):
        yield Work("variants", f"latent, {n_k} keys", lambda n=n_k: build(setting.length(n)))


# ---------------------------------------------------------------------- differential attention


def differential(setting: Setting) -> Iterator[Work]:
    """The difference of two attentions over the same values, of 8 heads.

    Ye et al., "Differential transformer" (2024), equation 1: one map minus lambda times another.
    """

    def build(n: int) -> Contenders:
        rng = np.random.default_rng(5)
        queries, keys = rng.standard_normal((2, 2, 8, n, 64), np.float32)
        value = rng.standard_normal((1, 8, n, 128), np.float32)

        def compute(attention: Attention, q: Any, k: Any, v: Any) -> Any:
            first, second = (attention(q[i : i + 1], k[i : i + 1], v) for i in (0, 1))
            return first - 0.8 * second

        count = 2.0 * 2 * 8 * n * n * (64 + 128)
        return _contenders(setting, [queries, keys, value], compute, count, 0.0)

    for n in (1024, 4096):
        yield Work("variants", f"differential, {n}", lambda n=n: build(setting.length(n)))


# --------------------------------------------------------------------------------- tree decoding


def tree_mask(n_past: int, n_nodes: int, branches: int = 2) -> Array:
    """(nodes, past + nodes), True where a node sees the past, its ancestors and itself."""
    mask = np.zeros((n_nodes, n_past + n_nodes), bool)
    mask[:, :n_past] = True
    for node in range(n_nodes):
        at = node
        while True:
            mask[node, n_past + at] = True
            if at == 0:
                break
            at = (at - 1) // branches
    return mask


def tree(setting: Setting) -> Iterator[Work]:
    """Candidates of speculative decoding, a binary tree of 63 tokens, verified in one call.

    Miao et al., "SpecInfer" (2024), section 4: a boolean mask lets each token see the past and its
    ancestors.
    """

    def build(n_past: int) -> Contenders:
        rng = np.random.default_rng(6)
        query = rng.standard_normal((1, 8, 63, 128), np.float32)
        key, value = rng.standard_normal((2, 1, 8, n_past + 63, 128), np.float32)
        mask = tree_mask(n_past, 63)

        def compute(attention: Attention, q: Any, k: Any, v: Any, mask: Any) -> Any:
            return attention(q, k, v, mask)

        count = 4.0 * 8 * 63 * (n_past + 63) * 128
        return _contenders(
            setting, [query, key, value, mask], compute, count, 2.0 * key.nbytes + query.nbytes
        )

    for n in (1024, 8192):
        yield Work("variants", f"tree, {n} past keys", lambda n=n: build(setting.length(n)))


def variants(setting: Setting) -> Iterator[Work]:
    """The work of all variants."""
    for works in (latent, differential, tree):
        yield from works(setting)
