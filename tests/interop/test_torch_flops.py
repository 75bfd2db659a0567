"""FLOPs of the operators of sdpa.interop.torch, as PyTorch's counter sees them."""

import warnings

import pytest
from support.process import run
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter

from sdpa.interop import torch as interop
from sdpa.interop.torch import _additive, _operators

pytestmark = ITS_OWN_WARNINGS


def flops(call):
    with flop_counter.FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_every_operator_has_a_formula():
    names = {*_operators.KERNELS, *_additive._KERNELS}
    assert {getattr(torch.ops.sdpa, name) for name in names} <= set(flop_counter.flop_registry)


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_counts_as_pytorchs(grouped):
    """Its forward by products of matrices, its backward by the formula of its fused kernels."""
    shapes = (2, 4, 5, 8), (2, 2 if grouped else 4, 7, 8)
    q, k = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = flops(lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=grouped))
    ours = flops(lambda: interop.attention(q, k, k, enable_gqa=grouped))
    assert ours == theirs == 2 * 2 * 4 * 5 * 7 * (8 + 8)
    of_backward = flop_counter.sdpa_backward_flop_count(shapes[0], shapes[0], shapes[1], shapes[1])
    both = flops(lambda: interop.attention(q, k, k, enable_gqa=grouped).sum().backward())
    assert both - ours == of_backward


@pytest.mark.parametrize("causal", [False, True])
def test_other_operators(causal):
    q, k, v = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((5, 4), (7, 4), (7, 3)))
    pair = 2 * 2 * 5 * 7
    assert flops(lambda: interop.attention_weights(q, k, is_causal=causal)) == pair * 4

    def f(*x):
        return interop.attention(*x, is_causal=causal)

    forward = pair * (4 + 3)
    assert flops(lambda: torch.func.jvp(f, (q, k, v), (q, k, v))) == forward + pair * 18
    x = [y.requires_grad_() for y in (q, k, v)]
    first = flops(lambda: torch.autograd.grad(f(*x).square().sum(), x, create_graph=True))
    grads = torch.autograd.grad(f(*x).square().sum(), x, create_graph=True)
    total = sum(y.square().sum() for y in grads)
    second = flops(lambda: torch.autograd.grad(total, x))
    assert first == forward + pair * 18
    # The gradient of the output, and through it the first backward once more.
    assert second == pair * (7 * 4 + 5 * 3) + pair * 18


def test_packed_sequences_count_their_own_pairs():
    x = torch.randn(9, 4, 8)
    cu = torch.tensor([0, 2, 6, 9])
    found = flops(lambda: interop.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu))
    assert found == 2 * 4 * (4 + 16 + 9) * (8 + 8)


def test_additive_attention():
    """As its formula, in PyTorch's operations."""
    x = [
        torch.randn(*s, requires_grad=True) for s in ((5, 4), (7, 4), (7, 3), (4, 6), (4, 6), (6,))
    ]
    pairs, projected = 5 * 7, (5 + 7) * 4 * 6
    forward = 2 * (pairs * (6 + 3) + projected)
    assert flops(lambda: interop.additive_attention(*x)) == forward
    both = flops(lambda: interop.additive_attention(*x).sum().backward())
    assert both - forward == 2 * (pairs * (3 * 6 + 2 * 3) + 3 * projected)


def test_nothing_is_logged_where_triton_is_missing():
    """PyTorch's counter says so when it is imported, of kernels that are not ours."""
    said = run(
        """
import torch
os.dup2(1, 2)
sys.modules["triton"], torch.version.cuda = None, "13.0"
import sdpa.interop.torch
import torch.utils.flop_counter
assert torch.ops.sdpa.attention_forward in torch.utils.flop_counter.flop_registry
assert not torch.utils.flop_counter.log.disabled
"""
    )
    assert not said
