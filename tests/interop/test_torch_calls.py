"""sdpa.interop.torch: small calls go straight to the kernels, and who looks still sees them."""

import warnings

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

from torch.utils._python_dispatch import TorchDispatchMode

from sdpa.interop import torch as interop

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_no_dispatcher_where_nobody_looks(monkeypatch, needs_grad):
    x = torch.randn(3, 1, 2, 5, 8, requires_grad=needs_grad).unbind()

    def results():
        out = interop.attention(*x)
        return [out, *(torch.autograd.grad(out, x, torch.ones_like(out)) if needs_grad else ())]

    expected = results()

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", refuse)
    assert all(map(torch.equal, results(), expected))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_modes_see_the_operators(needs_grad):
    x = torch.randn(3, 1, 2, 5, 8, requires_grad=needs_grad)
    with Seen() as seen:
        out = interop.attention(*x)
        if needs_grad:
            out.sum().backward()
    ours = {"sdpa::attention_forward"} | ({"sdpa::attention_backward"} if needs_grad else set())
    assert {name for name in seen.names if name.startswith("sdpa::")} == ours


@pytest.mark.parametrize("needs_grad", [False, True])
def test_profilers_see_the_operators(needs_grad):
    x = torch.randn(3, 1, 2, 5, 8, requires_grad=needs_grad)
    with torch.autograd.profiler.profile() as profile:
        interop.attention(*x)
    assert "sdpa::attention_forward" in {event.name for event in profile.function_events}


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traces_hold_the_operators(pre_dispatch):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 1, 2, 5, 8).unbind()
    graph = make_fx(interop.attention, pre_dispatch=pre_dispatch)(*x)
    assert "sdpa.attention_forward" in graph.code
    other = [2 * y for y in x]
    assert torch.equal(graph(*other), interop.attention(*other))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_trace_of_jit_holds_the_operators():
    x = torch.randn(3, 1, 2, 5, 8).unbind()
    traced = torch.jit.trace(interop.scaled_dot_product_attention, x)
    other = [2 * y for y in x]
    assert torch.equal(traced(*other), interop.attention(*other))


def test_subclasses_see_the_operators():
    """Fake tensors, for one, have no data."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:
        x = [mode.from_tensor(torch.randn(1, 2, 5, 8)) for _ in range(3)]
    out = interop.attention(*x)
    assert isinstance(out, FakeTensor)
    assert out.shape == (1, 2, 5, 8)
