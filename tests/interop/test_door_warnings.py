"""Doors warn of what is probably not meant, at the caller's line, unless their convention says it.

A function runs with a floating mask of zeros and ones, or with one causal query over many keys.
"""

import warnings

import numpy as np
import pytest

MASK, CAUSAL = "attn_mask: expected a bias", "is_causal: True lets one query see key 0 alone"
ONES = np.tri(5, 7, dtype=np.float32)


def said(call):
    """The UserWarnings of a call, once each, as (first words, file)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = {(str(x.message), x.filename) for x in caught if x.category is UserWarning}
    return sorted((text[: text.index(";")].partition(",")[0], file) for text, file in found)


def operands(n_q):
    x = np.random.default_rng(0).standard_normal((3, 2, 4, 7, 8)).astype(np.float32)
    return [x[0, :, :, :n_q].copy(), *x[1:]]


def of_torch(name):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")
    from sdpa.interop import torch as door

    function = getattr(door, name)

    def call(x, attn_mask=None, **options):
        x = [torch.tensor(a, requires_grad=True) for a in x[: 2 if name.endswith("s") else 3]]
        mask = None if attn_mask is None else torch.tensor(attn_mask)
        out = function(*x, attn_mask=mask, **options)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return call


def of_installed():
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")
    from sdpa.interop.torch import install

    def call(x, attn_mask=None, **options):
        x = [torch.tensor(a, requires_grad=True) for a in x]
        mask = None if attn_mask is None else torch.tensor(attn_mask)
        with install():
            out = torch.nn.functional.scaled_dot_product_attention(*x, mask, **options)
            out.sum().backward()

    return call


def of_jax():
    pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")
    from sdpa.interop.jax import attention

    return lambda x, **options: attention(*x, **options).block_until_ready()


def of_jax_nn():
    pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")
    from sdpa.interop.jax import dot_product_attention

    def call(x, attn_mask=None, **options):
        x = [a.swapaxes(1, 2) for a in x]
        bias = None if attn_mask is None else attn_mask[None, None]
        dot_product_attention(*x, bias=bias, **options).block_until_ready()

    return call


def of_autograd():
    pytest.importorskip("autograd", reason="needs autograd: pip install '.[autograd]'")
    from sdpa.interop.autograd import attention

    return lambda x, **options: attention(*x, **options)


def of_dask():
    da = pytest.importorskip("dask.array", reason="needs dask: pip install '.[dask]'")
    from sdpa.interop.dask import attention

    def call(x, **options):
        query = da.from_array(x[0], chunks=(2, 4, 3, 8))
        attention(query, *x[1:], **options).compute(scheduler="threads")

    return call


def of_onnx():
    pytest.importorskip("onnx", reason="needs onnx: pip install '.[peers]'")
    from onnx import TensorProto, helper

    from sdpa.interop.onnx import Backend

    def call(x, attn_mask=None, is_causal=0):
        given = dict(zip("qkv", x, strict=True))
        given |= {} if attn_mask is None else {"m": attn_mask}
        node = helper.make_node("Attention", list(given), ["y"], is_causal=int(is_causal))
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape)
            for name, a in given.items()
        ]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, x[0].shape)
        graph = helper.make_graph([node], "g", inputs, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
        Backend.prepare(model).run(list(given.values()))

    return call


WARN = {
    "torch.attention": lambda: of_torch("attention"),
    "torch.attention_forward": lambda: of_torch("attention_forward"),
    "torch.attention_weights": lambda: of_torch("attention_weights"),
    "jax.attention": of_jax,
    "autograd.attention": of_autograd,
    "dask.attention": of_dask,
}
SILENT = {
    "torch.scaled_dot_product_attention": lambda: of_torch("scaled_dot_product_attention"),
    "torch.install": of_installed,
    "jax.dot_product_attention": of_jax_nn,
    "onnx": of_onnx,
}


@pytest.mark.parametrize("door", WARN)
def test_doors_of_sdpas_own_functions_warn_where_the_caller_is(door):
    call = WARN[door]()
    assert said(lambda: call(operands(1), is_causal=True)) == [(CAUSAL, __file__)]
    assert said(lambda: call(operands(5), attn_mask=ONES)) == [(MASK, __file__)]
    bias = ONES * np.float32(0.5)
    assert said(lambda: call(operands(5), attn_mask=bias, is_causal="lower_right")) == []


@pytest.mark.parametrize("door", SILENT)
def test_doors_with_a_convention_of_their_own_do_not(door):
    call = SILENT[door]()
    assert said(lambda: call(operands(1), is_causal=True)) == []
    assert said(lambda: call(operands(5), attn_mask=ONES)) == []


def test_pytorchs_signature_does_not_warn_when_it_is_compiled():
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")
    from sdpa.interop.torch import attention, scaled_dot_product_attention

    x = [torch.tensor(a) for a in operands(1)]
    ours = torch.compile(lambda *x: attention(*x, is_causal=True), backend="eager")
    theirs = torch.compile(
        lambda *x: scaled_dot_product_attention(*x, is_causal=True), backend="eager"
    )
    assert said(lambda: ours(*x)) == [(CAUSAL, __file__)]
    assert said(lambda: theirs(*x)) == []
    x, mask = [torch.tensor(a) for a in operands(5)], torch.tensor(ONES)
    theirs = torch.compile(lambda *x: scaled_dot_product_attention(*x, mask), backend="eager")
    assert said(lambda: theirs(*x)) == []
