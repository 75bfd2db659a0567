"""PyTorch's layers of attention on sdpa.interop.torch.install, with their weights."""

import warnings
from contextlib import nullcontext

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sdpa.interop.torch import install, uninstall

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
CASES = {
    "plain": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
    "mask of heads": {"attn_mask": torch.arange(200).reshape(8, 5, 5) % 3 == 1},
    "mask and padding": {
        "attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1),
        "key_padding_mask": PADDING,
    },
}
LAYERS = {
    "plain": {"batch_first": True},
    "length first": {},
    "biases of keys": {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"batch_first": True, "kdim": 12, "vdim": 10},
}


def layer_and_inputs(name):
    layer = nn.MultiheadAttention(16, 4, **LAYERS[name])
    widths = 16, LAYERS[name].get("kdim", 16), LAYERS[name].get("vdim", 16)
    x = [torch.randn(2, 5, n, requires_grad=True) for n in widths]
    return layer, x if layer.batch_first else [y.transpose(0, 1) for y in x]


def results(layer, x, **options):
    """(output, weights, gradients of a sum that has both)."""
    out, weights = layer(*x, **options)
    total = out.square().sum() + weights.square().sum()
    return out, weights, *torch.autograd.grad(total, [*x, *layer.parameters()])


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_a_layer(calls, name, case, average):
    layer, x = layer_and_inputs(name)
    options = CASES[case] | {"average_attn_weights": average}
    theirs = results(layer, x, **options)
    assert not calls
    with install():
        ours = results(layer, x, **options)
    assert calls[:2] == ["attention_forward", "attention_weights"]
    assert "attention_backward" in calls
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    calls.clear()
    results(layer, x, **options)
    assert not calls


@pytest.mark.parametrize("grad", [False, True])
def test_rows_without_keys_are_0(calls, grad):
    """All keys of the second sequence are padding: PyTorch's result is NaN there."""
    layer, x = layer_and_inputs("plain")
    layer.eval()
    padding = torch.tensor([[False] * 5, [True] * 5])
    with torch.set_grad_enabled(grad):
        theirs = layer(*x, key_padding_mask=padding)
        with install():
            out, weights = layer(*x, key_padding_mask=padding)
            if grad:
                grads = torch.autograd.grad(out.sum() + weights.sum(), x)
                assert all(y.isfinite().all() for y in grads)
                assert not grads[1][1].any()
    assert theirs[1][1].isnan().all()
    assert torch.equal(weights[1], torch.zeros(5, 5))
    assert torch.equal(out[1], layer.out_proj.bias.expand(5, 16))
    torch.testing.assert_close((out[0], weights[0]), (theirs[0][0], theirs[1][0]))
    assert calls[:2] == ["attention_forward", "attention_weights"]


def test_without_a_batch(calls):
    layer, x = layer_and_inputs("plain")
    x = [y[0] for y in x]
    theirs = results(layer, x)
    with install():
        ours = results(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "attention_weights" in calls


class Tagged(torch.Tensor):
    """A class that overrides PyTorch's functions, to do what they do."""


class Silent(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["default device", "mode", "class"])
def test_weights_where_functions_are_overridden(calls, name):
    """PyTorch's function then calls itself; its weights were None."""
    layer, x = layer_and_inputs("plain")
    kind = Tagged if name == "class" else torch.Tensor
    x = [y.detach().as_subclass(kind) for y in x]
    scope = {"default device": torch.device("cpu"), "mode": Silent()}.get(name, nullcontext())
    with scope:
        theirs = layer(*x, average_attn_weights=False)
        with install():
            ours = layer(*x, average_attn_weights=False)
    assert all(type(found) is kind for found in (*theirs, *ours))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert calls == ["attention_forward", "attention_weights"]


def test_weights_are_those_of_the_dropout(calls):
    """Output and weights have one pattern, as in PyTorch."""
    layer = nn.MultiheadAttention(8, 1, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 8)
    identity = torch.eye(8)
    with torch.no_grad():
        layer.in_proj_weight[16:] = identity
        layer.out_proj.weight[:] = identity
        with install():
            out, weights = layer(x, x, x)
    torch.testing.assert_close(out, weights @ x)
    assert (weights == 0).any()
    assert calls == ["attention_forward", "attention_weights"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_an_encoder_layer(calls, training, grad, need_weights):
    """Also in evaluation, where PyTorch has a fast path of its own."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(training)
    if need_weights:
        own = layer.self_attn.forward
        layer.self_attn.forward = lambda *x, **o: own(*x, **(o | {"need_weights": True}))
    x = torch.randn(2, 5, 16)
    with torch.set_grad_enabled(grad):
        theirs = layer(x, src_key_padding_mask=PADDING)
        with install():
            ours = layer(x, src_key_padding_mask=PADDING)
    # The fast path leaves the rows of padding undefined.
    torch.testing.assert_close(ours[~PADDING], theirs[~PADDING], rtol=1e-4, atol=1e-5)
    assert calls == ["attention_forward", *["attention_weights"] * need_weights]


def test_everything_is_put_back():
    own = F.multi_head_attention_forward
    assert torch.backends.mha.get_fastpath_enabled()
    with install():
        with install():
            assert F.multi_head_attention_forward is not own
            assert not torch.backends.mha.get_fastpath_enabled()
        assert F.multi_head_attention_forward is not own
    assert F.multi_head_attention_forward is own
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        install()
        uninstall()
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_what_is_not_ours_goes_its_own_way(calls):
    """Tensors on another device, and causality without a mask, which PyTorch refuses."""
    layer, x = layer_and_inputs("plain")
    with install():
        shape = layer.to("meta")(*(y.to("meta") for y in x))[1].shape
        with pytest.raises((AssertionError, RuntimeError), match="is_causal"):
            layer_and_inputs("plain")[0](*x, is_causal=True)
    assert shape == (2, 5, 5)
    assert not calls


def test_compiled_layers_with_weights_are_pytorchs_own():
    torch.compiler.reset()
    layer, x = layer_and_inputs("plain")
    expected = layer(*x)
    with install():
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*x)
    torch.testing.assert_close(found, expected)
