"""sdpa.interop.torch in graphs of PyTorch: exported, saved, compiled, for other lengths."""

import io
import warnings

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from torch.export import Dim

from sdpa.interop import torch as interop
from sdpa.interop.torch import _operators
from sdpa.interop.torch._attention import _laid_out

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]


class Model(torch.nn.Module):
    """Projections, heads by a transpose, attention, heads joined by a view."""

    def __init__(self, attention, **options):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.attention, self.options = attention, options

    def forward(self, x):
        batch, n, d = x.shape
        q, k, v = self.project(x).view(batch, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v, is_causal=True, **self.options)
        return out.transpose(1, 2).reshape(batch, n, d)


MODELS = {
    "function": lambda: Model(interop.scaled_dot_product_attention),
    "options": lambda: Model(interop.attention, softcap=2.0, window=(3, 0)),
    "installed": lambda: Model(F.scaled_dot_product_attention),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    if request.param == "installed":
        with interop.install():
            yield MODELS[request.param]()
    else:
        yield MODELS[request.param]()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_comes_back_for_any_length(model, strict):
    sizes = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=4096)}
    program = torch.export.export(
        model, (torch.randn(3, 6, 8),), dynamic_shapes=(sizes,), strict=strict
    )
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    again = torch.export.load(stored).module()
    for batch, n in (3, 6), (2, 11), (5, 2), (4, 130):
        x = torch.randn(batch, n, 8)
        torch.testing.assert_close(again(x), model(x))


def test_compiled_once_for_any_length(model):
    torch.compiler.reset()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    f = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    g = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, n in (3, 6), (2, 11), (5, 7), (4, 130):
        x = torch.randn(batch, n, 8)
        assert torch.equal(f(x), model(x))
        leaves = [x.requires_grad_(), *model.parameters()]
        found, expected = (torch.autograd.grad(h(x).sin().sum(), leaves) for h in (g, model))
        torch.testing.assert_close(found, expected)
    assert len(compiles) <= 2  # once more where gradients are needed


@pytest.mark.parametrize("masked", [False, True])
def test_vmap_beside_a_loop(masked):
    x = torch.randn(3, 4, 2, 5, 8)
    options = {"attn_mask": torch.arange(25).reshape(5, 5) % 3 > 0} if masked else {}

    def f(q, k, v):
        return interop.scaled_dot_product_attention(q, k, v, **options)

    def loss(q, k, v):
        return f(q, k, v).sin().sum()

    for call in f, torch.func.grad(loss, (0, 1, 2)):
        found = torch.vmap(call)(*x)
        each = [call(*y) for y in zip(*x, strict=True)]
        expected = (
            torch.stack(each) if call is f else tuple(map(torch.stack, zip(*each, strict=True)))
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["contiguous", "rows of heads"])
@pytest.mark.parametrize("operator", ["forward", "backward", "jvp", "double_backward"])
def test_operators_with_pytorchs_layout(operator, order):
    """opcheck compares kernel and shapes, strides included."""
    x = torch.randn(3, 2, 5, 3, 4, dtype=torch.float64).transpose(2, 3)
    x = x.contiguous() if order == "contiguous" else x
    args = _laid_out(*(y.clone().requires_grad_() for y in x), is_causal=True)
    assert dict(zip(_operators.ARGUMENTS, args, strict=True))["like_query"]
    out, lse = (y.detach() for y in _operators.forward(*args))
    n = _operators.N_DIFFERENTIABLE
    tangents = [torch.ones_like(y) if i < 3 else None for i, y in enumerate(args[:n])]
    needs = [i < 3 for i in range(n)]
    leading = {
        "forward": (),
        "backward": (out, lse, out, lse, needs),
        "jvp": (*tangents, out, lse),
        "double_backward": (*tangents, out, lse, out, lse, [True, *needs]),
    }[operator]
    if operator == "double_backward":  # it has no derivative
        args = [y.detach() if isinstance(y, torch.Tensor) else y for y in args]
    name = f"attention_{operator}"
    torch.library.opcheck(getattr(torch.ops.sdpa, name).default, (*leading, *args))
