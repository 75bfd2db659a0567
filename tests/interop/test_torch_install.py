"""sdpa.interop.torch.install: models that call PyTorch's own function."""

import itertools
import shutil
import threading
import warnings

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from support.calls import message
from support.hostile import interrupted_after
from torch.nn.attention import flex_attention

from sdpa.interop.torch import _batching, _flex, _install, _layers, install, uninstall

CASES = {
    "plain": ((2, 3, 5, 8), (2, 3, 7, 8), {}),
    "causal": ((2, 3, 9, 8), (2, 3, 9, 8), {"is_causal": True}),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "scale": ((1, 1, 5, 8), (1, 1, 7, 8), {"scale": 0.3}),
    "boolean mask": ((2, 3, 5, 8), (2, 3, 7, 8), {"attn_mask": (torch.arange(35) % 3 > 0)}),
    "row without keys": ((2, 3, 5, 8), (2, 3, 7, 8), {"attn_mask": (torch.arange(35) > 6)}),
    "long": ((1, 2, 200, 64), (1, 2, 300, 64), {}),
}
# Relative to the largest element: sums of at most 300 terms in the type of the arithmetic; in
# 16-bit types both also round out and the result.
TOLERANCES = {"float64": 300 * 2**-53, "float32": 300 * 2**-24, "bfloat16": 2**-6, "float16": 2**-9}

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]


def problem(rng, name, dtype="float32"):
    """(query, key, value, options): leaves of which the heads of a row lie together."""
    of_query, of_key, options = CASES[name]
    leaves = []
    for batch, heads, n, d in of_query, of_key, of_key:
        x = torch.from_numpy(rng.standard_normal((batch, n, heads, d)))
        leaves.append(x.to(getattr(torch, dtype)).transpose(1, 2).requires_grad_())
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].reshape(of_query[2], of_key[2])
    return (*leaves, options)


def results(f, q, k, v, options):
    out = f(q, k, v, **options)
    return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_same_results_and_layout(rng, calls, name, dtype):
    x = problem(rng, name, dtype)
    theirs = results(F.scaled_dot_product_attention, *x)
    assert not calls
    with install():
        ours = results(F.scaled_dot_product_attention, *x)
    assert calls == ["attention_forward", "attention_backward"]
    again = results(F.scaled_dot_product_attention, *x)
    assert len(calls) == 2
    for a, b, c in zip(ours, theirs, again, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(b, c)
        size = b.detach().abs().max().clamp(min=1)
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES[dtype] * float(size))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(rng, calls, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs g++, with which PyTorch compiles")
    torch.compiler.reset()
    q, k, v, options = problem(rng, "causal")

    def f(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return out.transpose(1, 2).reshape(2, 9, 24) * 2

    expected = results(f, q, k, v, {})
    with install():
        found = results(torch.compile(f, fullgraph=True, backend=backend), q, k, v, {})
    assert calls == ["attention_forward", "attention_backward"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_torch_func(rng, calls):
    q, k, v, options = problem(rng, "grouped")
    x = [y.detach() for y in (q, k, v)]
    gradient = torch.func.grad(
        lambda *x: F.scaled_dot_product_attention(*x, **options).square().sum(), (0, 1, 2)
    )
    expected = gradient(*x)
    with install():
        found = gradient(*x)
    assert calls == ["attention_forward", "attention_backward"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_runs_on_it(rng, calls):
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.from_numpy(rng.standard_normal((2, 5, 16))).float()
    expected, _ = layer(x, x, x, need_weights=False)
    with install():
        found, _ = layer(x, x, x, need_weights=False)
    assert calls == ["attention_forward"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", ["dropout", "d_v", "bias that is trained", "empty"])
def test_what_is_not_covered_goes_its_own_way(rng, calls, what):
    q, k, v, options = problem(rng, "plain")
    if what == "dropout":
        options["dropout_p"] = 0.5
    elif what == "d_v":
        v = v[..., :4]
    elif what == "bias that is trained":
        options["attn_mask"] = torch.zeros(5, 7, requires_grad=True)
    elif what == "empty":
        q = q[:, :, :0]

    def run():
        torch.manual_seed(1)
        return F.scaled_dot_product_attention(q, k, v, **options)

    expected = run()
    with install():
        found = run()
    assert not calls
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_operands_without_a_batch(rng, calls, name):
    """PyTorch's kernel takes them since 2.14; the layers of heads are no batch entries."""
    *x, options = problem(rng, name, "float64")
    x = [y.detach()[0].requires_grad_() for y in x]
    expected = results(F.scaled_dot_product_attention, *x, options)
    with install():
        found = results(F.scaled_dot_product_attention, *x, options)
    is_covered = torch.__version__ >= (2, 14)
    assert calls == (["attention_forward", "attention_backward"] if is_covered else [])
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES["float64"] * 10)


def test_second_derivatives_stay_refused(rng):
    q, k, v, _ = problem(rng, "plain")
    with install():
        out = F.scaled_dot_product_attention(q, k, v)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="is not implemented"):
            grad.sum().backward()


def test_nested_and_repeated(rng, calls):
    q, k, v, _ = problem(rng, "plain")
    with install():
        with install():
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
        assert len(calls) == 2
    F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 2
    uninstall()
    install()
    install()
    uninstall()
    F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 2


def test_threads_that_install_at_once(monkeypatch):
    """None takes away what another one is putting in its place."""
    layer, code = F.multi_head_attention_forward, flex_attention.flex_attention.__code__
    put, found = _batching.put, []
    is_amid, others_came = threading.Event(), threading.Event()

    def slowly(library):
        is_amid.set()
        others_came.wait(0.2)
        put(library)

    def change():
        is_amid.wait()
        with install(flex=True):
            found.append(flex_attention.flex_attention.__code__ is not code)
        others_came.set()

    monkeypatch.setattr(_batching, "put", slowly)
    others = [threading.Thread(target=change) for _ in range(3)]
    for thread in others:
        thread.start()
    install(flex=True)
    for thread in others:
        thread.join()
    assert found == [True] * 3
    assert _install._installed
    uninstall()
    assert F.multi_head_attention_forward is layer
    assert flex_attention.flex_attention.__code__ is code


def test_dropout_is_refused_by_the_kernel():
    q = torch.zeros(1, 1, 2, 4)
    with install(), pytest.raises(RuntimeError) as raised:
        getattr(torch.ops.aten, _batching.FORWARD)(q, q, q, 0.5)
    assert str(raised.value) == f"{_batching.FORWARD}: expected dropout_p 0, got 0.5"


# ------------------------------------------------------------------------------------------- tiles


@pytest.fixture
def tiles(monkeypatch):
    """PyTorch multiplies 16-bit types in tiles, which our kernels lack."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["causal", "grouped", "boolean mask", "long"])
def test_tiles_keep_16_bit_types(rng, calls, name, dtype):
    """Their results are PyTorch's, bit for bit; the other types run on sdpa."""
    x = problem(rng, name, dtype)
    theirs = results(F.scaled_dot_product_attention, *x)
    with install():
        ours = results(F.scaled_dot_product_attention, *x)
    is_half = dtype in ("bfloat16", "float16")
    assert calls == ([] if is_half else ["attention_forward", "attention_backward"])
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride()
        assert not is_half or torch.equal(a, b)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_keeps_16_bit_types_as_well(rng, calls, backend):
    torch.compiler.reset()
    *x, options = problem(rng, "causal", "bfloat16")

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **options) * 2

    expected = results(f, *x, {})
    with install():
        found = results(torch.compile(f, fullgraph=True, backend=backend), *x, {})
    assert not calls
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("tiles")
def test_insisting(rng, calls):
    """It holds until its block ends, also within another one, and is not undone by a plain call."""
    *x, _ = problem(rng, "plain", "bfloat16")

    def run():
        calls.clear()
        F.scaled_dot_product_attention(*x)
        return calls == ["attention_forward"]

    with install(half=True):
        assert run()
        with install():
            assert run()
        assert run()
    assert not run()
    with install():
        assert not run()
        with install(half=True):
            assert run()
        assert not run()
    install(half=True)
    assert run()
    uninstall()
    with install():
        assert not run()


def test_tiles_of_our_own_take_16_bit_types(rng, calls, tiles, monkeypatch):
    """Kernels with tiles do not exist yet; they will go by this name."""
    monkeypatch.setattr(_install, "_isa", lambda: "amx")
    *x, _ = problem(rng, "plain", "bfloat16")
    with install():
        F.scaled_dot_product_attention(*x)
    assert calls == ["attention_forward"]


def test_a_pytorch_that_does_not_tell_of_tiles(rng, calls, monkeypatch):
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    *x, _ = problem(rng, "plain", "bfloat16")
    with install():
        F.scaled_dot_product_attention(*x)
    assert calls == ["attention_forward"]


@pytest.mark.parametrize("half", [None, 1, "bfloat16"])
def test_half_is_true_or_false(half):
    assert message(TypeError, install, half=half) == f"half: expected True or False, got {half!r}"
    assert not _install._installed


def test_an_undefined_gradient_is_0():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    x = torch.randn(3, 1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    with install():
        out = Stop.apply(F.scaled_dot_product_attention(*x))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not grad.any()
        assert torch.autograd.gradcheck(F.scaled_dot_product_attention, tuple(x))


def test_an_installation_that_fails_leaves_nothing(monkeypatch):
    def fail(_):
        raise RuntimeError("no such operator")

    before = F.multi_head_attention_forward
    monkeypatch.setattr(_batching, "put", fail)
    assert message(RuntimeError, install) == "no such operator"
    assert F.multi_head_attention_forward is before
    assert not _install._installed


CHANGES = {
    "install": (uninstall, lambda: install(half=True, flex=True)),
    "install again": (lambda: install(half=True), lambda: install(half=True, flex=True)),
    "uninstall": (lambda: install(half=True, flex=True), uninstall),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_interrupted_change_can_be_undone_and_made_again(case, rng, calls):
    """On any line: nothing stays behind of which `uninstall` no longer knows."""
    x, layer = problem(rng, "plain"), F.multi_head_attention_forward

    def ours():
        calls.clear()
        F.scaled_dot_product_attention(*x[:3])
        flex = flex_attention.flex_attention
        return (
            bool(calls),
            F.multi_head_attention_forward is not layer,
            not torch.backends.mha.get_fastpath_enabled(),
            flex.__code__ is _flex._instead.__code__,
            flex.__kwdefaults__ is None,
        )

    prepare, change = CHANGES[case]
    try:
        for lines in itertools.count():
            prepare()
            try:
                with interrupted_after(lines, _install, _layers, _flex):
                    change()
            except KeyboardInterrupt:
                with install(half=True, flex=True):
                    assert all(ours())
                uninstall()
                assert not any(ours())
            else:
                break
    finally:
        uninstall()
    assert lines > 5
