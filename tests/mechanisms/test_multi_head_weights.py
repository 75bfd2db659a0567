"""Weights of MultiHeadAttention: from PyTorch's module, and back to it, or from initialisers."""

import math

import numpy as np
import pytest
from support.calls import FLOATS, message
from support.helpers import assert_same_bits, normal
from support.layers import D_CONTEXT, D_MODEL, HEADS, made

import sdpa

# ------------------------------------------------------------------------------- PyTorch's module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_context", [D_MODEL, D_CONTEXT])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-13], ids=["float32", "float64"])
def test_weights_from_and_to_torch(torch, rng, bias, d_context, tolerance):
    """The module's values and gradients, and the module again; of float64 to its rounding."""
    dtype = torch.float32 if tolerance == 1e-6 else torch.float64
    theirs = torch.nn.MultiheadAttention(
        D_MODEL, HEADS, bias=bias, kdim=d_context, vdim=d_context, batch_first=True, dtype=dtype
    )
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.tensor(rng.standard_normal(p.shape)) / 4)
    layer = sdpa.MultiHeadAttention.from_torch(theirs)
    again = layer.to_torch()
    assert layer.bias is bias
    assert again.batch_first
    assert theirs.state_dict().keys() == again.state_dict().keys()
    for name, w in theirs.state_dict().items():
        assert torch.equal(w, again.state_dict()[name])

    x = normal(rng, (2, 6, D_MODEL), layer.dtype)
    context = normal(rng, (2, 7, d_context), layer.dtype)
    padding = np.arange(7) >= np.array([[7], [4]])
    out, saved = layer.forward(x, context, key_lengths=np.array([7, 4]))
    grad_out = normal(rng, out.shape, layer.dtype)
    grads = layer.backward(grad_out, saved)
    for module in (theirs, again):
        tx, tc = (torch.tensor(y, requires_grad=True) for y in (x, context))
        expected, _ = module(tx, tc, tc, key_padding_mask=torch.tensor(padding))
        expected.backward(torch.tensor(grad_out))
        # The gradients have the module's own layout: a layer from it takes them apart.
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(p.grad)
        wanted = sdpa.MultiHeadAttention.from_torch(module).parameters
        pairs = [(out, expected.detach().numpy()), (grads.x, tx.grad.numpy())]
        pairs += [(grads.context, tc.grad.numpy())]
        pairs += [(grads.parameters[name], w) for name, w in wanted.items()]
        assert grads.parameters.keys() == wanted.keys()
        for ours, other in pairs:
            np.testing.assert_allclose(ours, other, rtol=tolerance, atol=4 * tolerance)


def test_weights_of_torch_are_copied(torch, dtype, rng):
    """In each type, and into memory of the layer's own, and back."""
    layer, x, _ = made(rng, "biased", dtype)
    module = layer.to_torch()
    again = sdpa.MultiHeadAttention.from_torch(module)
    before = again(x)
    assert_same_bits(layer(x), before)
    assert again.dtype == dtype
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    assert_same_bits(again(x), before)
    assert_same_bits(layer(x), before)
    assert all(w.flags.c_contiguous for w in again.parameters.values())


@pytest.mark.parametrize("name", ["in_proj_bias", "out_proj.bias"])
def test_a_bias_that_was_taken_from_the_module(torch, rng, name):
    module = torch.nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for p in (module.in_proj_bias, module.out_proj.bias):
            p.copy_(torch.tensor(rng.standard_normal(p.shape)))
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, None)
    x = rng.standard_normal((2, 6, D_MODEL))
    expected = module(*[torch.tensor(x)] * 3)[0].detach().numpy()
    ours = sdpa.MultiHeadAttention.from_torch(module)(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-13, atol=4e-13)


def test_parameters_that_are_not_the_layer_s(torch):
    layer = sdpa.MultiHeadAttention(8, 2)
    for value, exception, text in (
        (np.zeros((3, 3), np.float32), ValueError, "expected (8, 8), got (3, 3)"),
        (np.eye(8) * 1j, TypeError, "expected the layer's dtype float32, got complex128"),
    ):
        layer.parameters["w_query"] = value
        assert message(exception, layer.to_torch) == f"parameters['w_query']: {text}"


class Renamed(sdpa.MultiHeadAttention):
    pass


def test_modules_that_the_layer_is_not(torch):
    module = torch.nn.MultiheadAttention
    assert type(Renamed.from_torch(module(8, 2))) is Renamed
    convert = sdpa.MultiHeadAttention.from_torch
    for bad, text in (
        (module(8, 2, add_bias_kv=True), "module: expected add_bias_kv=False, got True"),
        (module(8, 2, add_zero_attn=True), "module: expected add_zero_attn=False, got True"),
        (
            module(8, 2, kdim=4, vdim=6),
            "module: expected keys and values of one context, kdim = vdim, got kdim=4, vdim=6",
        ),
        (
            module(8, 2, device="meta"),
            "module: expected weights, got a module on meta, which has none",
        ),
    ):
        assert message(ValueError, convert, bad) == text
    text = "module: expected a torch.nn.MultiheadAttention, got Linear"
    assert message(TypeError, convert, torch.nn.Linear(2, 2)) == text
    text = f"module: expected {FLOATS}, got float8_e5m2"
    assert message(TypeError, convert, module(8, 2).to(torch.float8_e5m2)) == text


def test_a_module_that_computes_in_its_own_way(torch):
    """Whatever it does with its weights; a parametrised one has another class, and is plain."""

    class Halved(torch.nn.MultiheadAttention):
        def forward(self, query, key, value):
            return super().forward(query, key, value)[0] / 2

    text = (
        "module: expected the forward of torch.nn.MultiheadAttention, got Halved, which has its "
        "own; if that computes the same, load its state_dict into a torch.nn.MultiheadAttention"
    )
    assert message(TypeError, sdpa.MultiHeadAttention.from_torch, Halved(8, 2)) == text
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    torch.nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = module(x, x, x)[0].detach().numpy()
    layer = sdpa.MultiHeadAttention.from_torch(module)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "expected", "got"),
    [
        ("kv_heads", 4, 2),
        ("d_k", 3, 5),
        ("d_v", 3, 2),
        ("scale", "1/sqrt d_k", "1/d_k"),
        ("scale", "1/sqrt d_k", 0.25),
        ("fold_scale", False, True),
        ("tied_kv", False, True),
        ("swap_roles", False, True),
        ("qk_norm", False, True),
        ("rotary", False, True),
    ],
)
def test_layers_that_the_module_is_not(torch, name, expected, got):
    more = {"d_k": {"d_v": 3}, "rotary": {"rotary_dim": 2}}.get(name, {})
    layer = sdpa.MultiHeadAttention(D_MODEL, HEADS, **{name: got}, **more)
    assert message(ValueError, layer.to_torch) == (
        f"{name}: expected {expected!r}, as torch.nn.MultiheadAttention has it, got {got!r}"
    )


# ------------------------------------------------------------------------------- initialisers


@pytest.mark.parametrize("init", ["1/d_model", "xavier_normal", "xavier_uniform"])
def test_initialisers(init):
    """Mean and variance of each matrix within 5 standard errors; bounds and kurtosis of uniform."""
    layer = sdpa.MultiHeadAttention(
        192, 3, d_k=40, d_v=80, d_context=256, init=init, dtype=np.float64, rng=7
    )
    for w in layer.parameters.values():
        rows, columns = w.shape
        variance = 1 / rows if init == "1/d_model" else 2 / (rows + columns)
        excess = -1.2 if init == "xavier_uniform" else 0.0
        assert abs(w.mean()) < 5 * math.sqrt(variance / w.size)
        assert abs(w.var() / variance - 1) < 5 * math.sqrt((2 + excess) / w.size)
        kurtosis = (w**4).mean() / (w**2).mean() ** 2 - 3
        assert abs(kurtosis - excess) < 5 * math.sqrt(24 / w.size)
        if init == "xavier_uniform":
            assert abs(w).max() < math.sqrt(3 * variance)


def test_entries_below_the_normal_numbers_raise_nothing():
    with np.errstate(all="raise"):
        layer = sdpa.MultiHeadAttention(64, 2, dtype=np.float16, rng=0)
    assert (abs(layer.parameters["w_out"]) < np.finfo(np.float16).tiny).any()


def test_parameters_are_the_seeds():
    a, b, c = (sdpa.MultiHeadAttention(8, 2, rng=seed).parameters for seed in (3, 3, 4))
    for name in a:
        assert_same_bits(a[name], b[name])
        assert (a[name] != c[name]).any()
    assert a["w_query"].dtype == np.float32
    assert {n: w.shape for n, w in a.items()} == dict.fromkeys(a, (8, 8))


@pytest.mark.parametrize("sizes", [(2**40, 1), (1, 2**48)])
def test_more_bytes_than_there_are_numbers_for(sizes):
    with pytest.raises(MemoryError, match=r"^no memory for an array of shape .* of float64$"):
        sdpa.MultiHeadAttention(*sizes, d_k=2**48)
