"""Works of the bridges: sdpa as the users of PyTorch, JAX and ONNX call it, beside their own."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import sdpa
from benchmarks.contenders import SHAPES, Contenders, Setting, Work, check, operands, ours, title
from benchmarks.peers import Bridge, Evaluator, JaxBridge, Operands, Peer


def bridged(setting: Setting, x: Operands, direction: str) -> Contenders:
    """sdpa on arrays; PyTorch's own kernel; sdpa installed in its place; sdpa's own function."""
    mine = ours(x)["forward" if direction == "recorded" else direction]
    found, torch = {"sdpa": mine}, setting.torch()
    if torch is None:
        return found
    from sdpa.interop.torch import install

    expected = sdpa.attention(*x[:3], is_causal=x.is_causal)
    bridge = Bridge(setting.threads)
    for name, peer, within in (
        ("torch", torch, nullcontext),
        ("installed", torch, install),
        ("function", bridge, nullcontext),
    ):
        with within():
            check(name, peer.result(peer.forward(x)), expected)
        found[name] = mine._replace(call=getattr(peer, direction)(x), within=within)
    return found


def bridge(setting: Setting) -> Iterator[Work]:
    """Forward and backward of PyTorch's tensors."""
    for heads, n, d, is_causal in [*((*shape, False) for shape in SHAPES), (*SHAPES[0], True)]:

        def build(size: Any = (heads, n, d), is_causal: bool = is_causal) -> Contenders:
            heads, n, d = size
            x = operands(heads, setting.length(n), d, is_causal=is_causal)
            return bridged(setting, x, "both")

        yield Work("bridge", title(heads, n, d, is_causal), build)


# (heads, length) from next to nothing to where sdpa, installed, is as fast as PyTorch's kernel.
SMALL = ((1, 10), (1, 64), (1, 96), (1, 128), (8, 10), (8, 24), (8, 48), (8, 64))


def calls(setting: Setting) -> Iterator[Work]:
    """What a call through PyTorch costs where there is little to compute, and when that is paid."""
    for heads, n in SMALL:
        for direction in ("forward", "recorded", "both"):

            def build(size: Any = (heads, n), direction: str = direction) -> Contenders:
                heads, n = size
                n = min(n, 10) if setting.quick else n
                return bridged(setting, operands(heads, n, 64), direction)

            yield Work("calls", f"(1, {heads}, {n}, 64) {direction}", build)


def in_jax(setting: Setting) -> Iterator[Work]:
    """Through sdpa.interop.jax, beside the same on arrays of NumPy and JAX's own function."""
    for heads, n, d in ((8, 1024, 64), (8, 128, 64), (1, 10, 64)):
        for direction in ("forward", "both"):

            def build(size: Any = (heads, n, d), direction: str = direction) -> Contenders:
                x = operands(size[0], setting.length(size[1]), size[2])
                found = {"sdpa": ours(x)[direction]}
                peers: dict[str, Peer] = {p.name: p for p in setting.peers if p.name == "jax"}
                if peers:
                    peers = {"bridge": JaxBridge(setting.threads), **peers}
                for name, peer in peers.items():
                    forward, both = peer.forward(x), peer.both(x)
                    assert forward is not None
                    assert both is not None
                    check(name, peer.result(forward), sdpa.attention(*x[:3]))
                    call = forward if direction == "forward" else both
                    found[name] = found["sdpa"]._replace(call=call)
                return found

            yield Work("jax", f"{title(heads, n, d)} {direction}", build)


def in_onnx(setting: Setting) -> Iterator[Work]:
    """A model of one causal Attention in onnx's evaluator, with its operators and with sdpa's."""
    for heads, n, d in ((1, 10, 64), (8, 128, 64), (8, 1024, 64)):

        def build(size: Any = (heads, n, d)) -> Contenders:
            x = operands(size[0], setting.length(size[1]), size[2], is_causal=True)
            found = {"sdpa": ours(x)["forward"]}
            for name, evaluator in Evaluator.both(setting.threads).items():
                call = evaluator.forward(x)
                check(name, evaluator.result(call), sdpa.attention(*x[:3], is_causal=True))
                found[name] = found["sdpa"]._replace(call=call)
            return found

        yield Work("onnx", title(heads, n, d, is_causal=True), build)
