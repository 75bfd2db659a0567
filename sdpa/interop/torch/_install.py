"""sdpa as the kernel behind PyTorch's own function."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

import sdpa
from sdpa import _core, _warnings
from sdpa.interop.torch import _batching
from sdpa.interop.torch._arrays import to_array, to_tensor
from sdpa.interop.torch._batching import BACKWARD, FORWARD
from sdpa.interop.torch._flex import Flex
from sdpa.interop.torch._layers import Layers
from sdpa.interop.torch._layout import forward_like, rows_of_heads

_16_BITS = (torch.bfloat16, torch.float16)
_HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # older versions lack it


@dataclass
class _Replacement:
    """The kernels that replace PyTorch's, and whether they compute 16-bit types themselves."""

    library: torch.library.Library
    half: bool
    layers: Layers = field(init=False)
    flex: Flex | None = None
    is_whole: bool = False
    """Whether all is in its place: not while it is put there or taken away, nor if that failed."""

    def __post_init__(self) -> None:
        self.layers = Layers(self.takes)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether tensors of this kind are computed by sdpa."""
        return x.is_cpu and (self.half or x.dtype not in _16_BITS)

    def set_flex(self, flex: bool) -> None:
        """Also put sdpa behind PyTorch's `flex_attention`, or undo that."""
        if flex and self.flex is None:
            self.flex = Flex()
            self.flex.put()
        elif not flex and self.flex is not None:
            self.flex.undo()
            self.flex = None

    def put(self, name: str, ours: Callable[..., Any]) -> None:
        """Put our kernel in front of PyTorch's of this name."""
        if self.half:
            self.library.impl(name, ours, "CPU", allow_override=True)
            return
        theirs = torch.library.get_kernel(f"aten::{name}", "CPU")

        def kernel(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
            # The second argument is the key, or after a gradient that may be None the query.
            if self.half or args[1].dtype not in _16_BITS:
                return ours(*args, **options)
            return theirs.call_boxed(keys, *args, **options)

        self.library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)


_P = ParamSpec("_P")
_R = TypeVar("_R")
_installed: list[_Replacement] = []
_lock = threading.RLock()


def _one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, for which a thread waits until no other is amid a change."""

    @functools.wraps(function)
    def locked(*args: _P.args, **options: _P.kwargs) -> _R:
        with _lock:
            return function(*args, **options)

    return locked


def _isa() -> str:
    """The instruction set in use."""
    return str(sdpa.show_config("dicts")["isa"])


def _theirs_is_faster() -> bool:
    """Whether PyTorch multiplies 16-bit types in the tiles of AMX, and sdpa does not."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(has_tiles()) and _isa() != "amx"


def _views(*tensors: torch.Tensor) -> Sequence[Any]:
    """Arrays on the memory of tensors, all at once if NumPy has their type.

    Behind the dispatcher no tensor stands for its negative, which DLPack would not tell.
    """
    if tensors[0].dtype is torch.bfloat16 or not _HAS_TABLE:
        return list(map(to_array, tensors))
    return _core._views(*tensors)


def _options(
    query: Any, key: Any, dropout_p: float, is_causal: bool, mask: Any, scale: Any
) -> dict[str, Any]:
    """Those that are given, because each costs time."""
    if dropout_p:
        raise RuntimeError(f"{FORWARD}: expected dropout_p 0, got {dropout_p}")
    options: dict[str, Any] = {"is_causal": True} if is_causal else {}
    if mask is not None:
        options["attn_mask"] = to_array(mask)
    if scale is not None:
        options["scale"] = scale
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    return options


def _quietly(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """The results without a warning, because PyTorch's signature keeps its meaning."""
    if not options:  # without one nothing warns
        return function(*arrays)
    with _warnings.silenced():
        return function(*arrays, **options)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = _views(query, key, value)
    options = _options(arrays[0], arrays[1], dropout_p, is_causal, attn_mask, scale)
    out, lse = _quietly(forward_like, query, *arrays, **options)
    return out, to_tensor(rows_of_heads(lse, -2))


def _backward(
    grad_out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    if grad_out is None:  # PyTorch's undefined gradient, which is 0
        return tuple(map(torch.zeros_like, (query, key, value)))
    arrays = _views(grad_out, query, key, value, out, logsumexp)
    options = _options(arrays[1], arrays[2], dropout_p, is_causal, attn_mask, scale)
    grads = _quietly(sdpa.attention_backward, *arrays, **options)
    return tuple([to_tensor(rows_of_heads(x)) for x in grads[:3]])


class Installation:
    """Result of `install`: a context manager whose exit undoes it."""

    def __init__(self, before: tuple[bool, bool] | None) -> None:
        self._before = before  # half, flex; None: nothing was installed

    def __enter__(self) -> Installation:
        return self

    @_one_at_a_time
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is None:
            uninstall()
        elif _installed:
            _installed[0].half, flex = self._before
            _installed[0].set_flex(flex)


@_one_at_a_time
def install(*, half: bool = False, flex: bool = False) -> Installation:
    """Make sdpa the kernel behind PyTorch's fused attention on the CPU, in the whole process.

    From then on `torch.nn.functional.scaled_dot_product_attention` runs on sdpa wherever PyTorch
    would choose its own fused kernel, forward and backward, in eager mode, under `torch.compile`,
    `torch.func.grad` and `torch.func.vmap`; so does every model that calls it. PyTorch still uses
    its own code for tensors without exactly four axes (2.14 also takes three), dropout, masks that
    need a gradient and d_v != d_k, and still refuses forward mode and second derivatives of the
    fused kernel.

    `torch.nn.MultiheadAttention` and the layers made of it run on sdpa also where they return their
    weights, which are 0 in rows without keys, and in evaluation: their fast path is switched off.

    On CPUs with AMX PyTorch multiplies bfloat16 and float16 in tiles, several times as fast as
    sdpa's vectors. Where sdpa does not use its own kernels for AMX (SDPA_ISA=avx512), these types
    stay with PyTorch there unless `half` is True.

    Parameters
    ----------
    half : bool, default False
        Run bfloat16 and float16 on sdpa on every CPU. A second call can switch this on, not off.
    flex : bool, default False
        Also run `torch.nn.attention.flex_attention.flex_attention` on sdpa for tensors on the CPU,
        also where it was imported before: see `flex_attention`. Functions that a program cannot
        compute are errors then. A second call can switch this on, not off.

    Returns
    -------
    Installation
        A context manager whose exit undoes this call: it is `uninstall`, unless sdpa was installed
        before.

    Raises
    ------
    TypeError
        half or flex is not True or False.

    Examples
    --------
    >>> import torch
    >>> import torch.nn.functional as F
    >>> from sdpa.interop.torch import install
    >>> q, k, v = torch.rand(3, 2, 4, 6, 8)
    >>> theirs = F.scaled_dot_product_attention(q, k, v)
    >>> with install():
    ...     ours = F.scaled_dot_product_attention(q, k, v)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    for name, given in (("half", half), ("flex", flex)):
        if not isinstance(given, bool):
            raise TypeError(f"{name}: expected True or False, got {given!r}")
    half = half or not _theirs_is_faster()
    if _installed and not _installed[0].is_whole:
        uninstall()
    if _installed:
        replacement = _installed[0]
        before = replacement.half, replacement.flex is not None
        try:
            replacement.set_flex(flex or before[1])
            replacement.half = replacement.half or half
        except BaseException:
            replacement.set_flex(before[1])
            raise
        return Installation(before)
    replacement = _Replacement(torch.library.Library("aten", "IMPL"), half)
    _installed.append(replacement)
    try:
        replacement.layers.put()
        with warnings.catch_warnings():
            # PyTorch warns about every kernel that is replaced, but here that is the purpose.
            warnings.filterwarnings("ignore", message=r"\s*(Warning only once|Overriding)")
            replacement.put(FORWARD, _forward)
            replacement.put(BACKWARD, _backward)
            _batching.put(replacement.library)
        replacement.set_flex(flex)
        replacement.is_whole = True
    except BaseException:
        uninstall()
        raise
    return Installation(None)


@_one_at_a_time
def uninstall() -> None:
    """Undo `install`: PyTorch runs its own kernel again.

    Examples
    --------
    >>> from sdpa.interop.torch import install, uninstall
    >>> _ = install()
    >>> uninstall()
    """
    if _installed:
        replacement = _installed[0]
        replacement.is_whole = False
        replacement.library._destroy()
        replacement.layers.undo()
        replacement.set_flex(False)
        _installed.clear()  # last, so that a call after an interrupt undoes the rest
