"""sdpa.interop.torch.flex_attention: functions of the user on tensors, and PyTorch's own name."""

import inspect
import math
import warnings
from functools import partial

import numpy as np
import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.attention.flex_attention as theirs
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from sdpa.interop.torch import flex_attention, install, uninstall

pytestmark = [ITS_OWN_WARNINGS, pytest.mark.usefixtures("torch_itself")]

B, H, L, D = 2, 3, 6, 4
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def tensor(rng, *shape, dtype=torch.float64):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype).requires_grad_()


def operands(rng, n_q=L, n_k=L, n_kv=H, d_v=D, dtype=torch.float64):
    """(query, key, value) as leaves."""
    shapes = (B, H, n_q, D), (B, n_kv, n_k, D), (B, n_kv, n_k, d_v)
    return [tensor(rng, *shape, dtype=dtype) for shape in shapes]


def indices(b, h, n_q, n_k):
    """(b, h, q, k) that broadcast to the whole matrix."""
    axes = (torch.arange(n) for n in (b, h, n_q, n_k))
    return [axis.view([-1 if i == j else 1 for j in range(4)]) for i, axis in enumerate(axes)]


def composed(q, k, v, score_mod=None, mask=None, scale=None):
    """(out, lse, scores) by the formula; a mask is a boolean tensor or a function."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    at = indices(*scores.shape)
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if mask is not None:
        visible = mask(*at) if callable(mask) else mask
        scores = torch.where(visible, scores, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0) @ v, scores.logsumexp(-1), scores


def causal(b, h, q, k):
    return q >= k


def relative(bias):
    """A function that captures a table, and bends the score."""

    def relative(score, b, h, q, k):
        return 2 * torch.tanh(score) + bias[h, q - k + L - 1]

    return relative


@pytest.fixture
def bias(rng):
    return tensor(rng, H, 2 * L - 1)


# ------------------------------------------------------------------------------- derivatives


def attended(q, k, v, bias):
    return flex_attention(q, k, v, relative(bias), causal, return_lse=True)


def test_gradients(rng, bias):
    x = (*operands(rng), bias)
    out, lse = attended(*x)
    expected, expected_lse, _ = composed(*x[:3], relative(bias), causal)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad((out, lse), x, upstream)
    formula = torch.autograd.grad((expected, expected_lse), x, upstream)
    for a, b in zip(ours, formula, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_gradcheck(rng, bias):
    assert gradcheck(
        attended, (*operands(rng), bias), check_forward_ad=True, check_batched_grad=True
    )


def test_gradgradcheck(rng, bias):
    assert gradgradcheck(
        attended, (*operands(rng), bias), check_fwd_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("score_mod", [None, relative], ids=["mask", "mask and bias"])
def test_transforms(rng, bias, score_mod):
    """Reverse over forward, of lse too, and batches, equal the formula's."""
    q, k, v, bias = (x.detach() for x in (*operands(rng), bias))
    tangents = [torch.randn_like(x) for x in (q, bias)]

    def ours(q, bias):
        return flex_attention(q, k, v, score_mod and score_mod(bias), causal, return_lse=True)

    def formula(q, bias):
        return composed(q, k, v, score_mod and score_mod(bias), causal)[:2]

    def moved(f):
        def total(q, bias):
            out_t, lse_t = torch.func.jvp(f, (q, bias), tuple(tangents))[1]
            return out_t.square().sum() + lse_t.square().sum()

        return torch.func.grad(total, (0, 1))(q, bias)

    for a, b in zip(moved(ours), moved(formula), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    tables = torch.stack([bias, -bias])
    batch = torch.func.vmap(torch.func.grad(lambda t: ours(q, t)[0].square().sum()))(tables)
    for a, table in zip(batch, tables, strict=True):
        b = torch.func.grad(lambda t: formula(q, t)[0].square().sum())(table)
        torch.testing.assert_close(a, b, **EXACT)


def test_no_third_derivatives(rng, bias):
    q, k, v = operands(rng)
    first = flex_attention(q, k, v, relative(bias)).square().sum()
    for _ in range(2):
        (first,) = torch.autograd.grad(first, q, create_graph=True)
        first = first.square().sum()
    with pytest.raises(NotImplementedError, match="third derivatives"):
        torch.autograd.grad(first, q)


def test_rows_without_keys(rng, bias):
    q, k, v = operands(rng)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        out, lse = flex_attention(
            dual, k, v, relative(bias), lambda b, h, q, k: q > k + 1, return_lse=True
        )
        assert (out[:, :, :2] == 0).all()
        assert (lse[:, :, :2] == -torch.inf).all()
        for x in (out, lse):
            assert (forward_ad.unpack_dual(x).tangent[:, :, :2] == 0).all()


# ------------------------------------------------------------------------------- what is captured


def test_captured_values_are_those_of_the_call(rng, bias):
    q, k, v = (x.detach() for x in operands(rng))
    table, f = bias.detach().clone(), relative(bias.detach())
    before = flex_attention(q, k, v, relative(table))
    table.mul_(2)
    f = relative(table)
    torch.testing.assert_close(flex_attention(q, k, v, f), composed(q, k, v, f)[0], **EXACT)
    assert not torch.equal(before, flex_attention(q, k, v, f))


def test_captured_tensors_changed_before_the_backward(rng, bias):
    table = bias * 1
    out = flex_attention(*operands(rng), relative(table))
    with torch.no_grad():
        table.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_kinds_of_captured_tensors(rng):
    """Numbers with a gradient, integers and booleans; a function of NumPy beside PyTorch's."""
    x = operands(rng)
    cap, offset = tensor(rng), torch.tensor(2)
    flags, table = torch.arange(L) % 2 == 0, tensor(rng, 4)
    rows = torch.arange(L, dtype=torch.int32) % 4

    def f(score, b, h, q, k):
        return torch.where(flags[k], score * cap, score + table[rows[q]] * (q - k + offset))

    def numpys(score, b, h, q, k):
        return np.where(flags[k], score * cap, score + table[rows[q]] * (q - k + offset))

    expected = composed(*x, f)[0]
    upstream = torch.randn_like(expected)
    formula = torch.autograd.grad(expected, (*x, cap, table), upstream)
    for score_mod in f, numpys:
        out = flex_attention(*x, score_mod)
        torch.testing.assert_close(out, expected, **EXACT)
        ours = torch.autograd.grad(out, (*x, cap, table), upstream)
        for a, b in zip(ours, formula, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


def test_mask_captures_a_parameter(rng):
    """Nothing flows through a comparison, as in PyTorch."""
    x, level = operands(rng), tensor(rng, L)
    out = flex_attention(*x, block_mask=lambda b, h, q, k: (level[k] > 0) | (k == 0))
    out.sum().backward()
    assert level.grad is None
    assert x[0].grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(rng, dtype):
    x = operands(rng, dtype=dtype)
    table = tensor(rng, H, 2 * L - 1, dtype=dtype)
    out, lse = flex_attention(*x, relative(table), causal, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    wide = [y.detach().double().requires_grad_() for y in (*x, table)]
    expected = composed(*wide[:3], relative(wide[3]), causal)[0]
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    ours = torch.autograd.grad(out.float().square().sum(), (*x, table))
    formula = torch.autograd.grad(expected.square().sum(), wide)
    for a, b in zip(ours, formula, strict=True):
        assert a.dtype == dtype
        size = float(b.abs().max().clamp(min=1))
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance["atol"] * size)


def test_autocast(rng, bias):
    x = operands(rng, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(*x, relative(bias))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), composed(*(y.double() for y in x), relative(bias))[0], rtol=0, atol=0.05
    )


# ------------------------------------------------------------------------------- semantics


def test_grouped_heads_scale_and_layout(rng, bias):
    """h is the head of the query; out has the order of query's axes in memory."""
    q, k, v = operands(rng, n_q=5, n_kv=1, d_v=7)
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    out = flex_attention(q, k, v, relative(bias), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, composed(q, k, v, relative(bias), scale=0.3)[0], **EXACT)
    assert out.transpose(1, 2).is_contiguous()
    key, value = k[:, 0, None].expand(B, H, L, D), v[:, 0, None].expand(B, H, L, 7)
    for part in q[:1], q[:, :1], q[0]:  # key and value have the axes that it lacks
        out = flex_attention(part, key, value, relative(bias))
        whole = part.expand(B, H, 5, D)
        torch.testing.assert_close(out, composed(whole, k, v, relative(bias))[0], **EXACT)
    with pytest.raises(ValueError, match="key: expected"):
        flex_attention(q[:, :2], key, value)


def test_auxiliary_results(rng, bias):
    x = operands(rng)
    expected, lse, scores = composed(*x, relative(bias), causal)
    out, aux = flex_attention(
        *x, relative(bias), causal, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(aux.lse, lse, **EXACT)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1).detach(), **EXACT)
    assert isinstance(aux, theirs.AuxOutput)
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad
    _, aux = flex_attention(*x, return_aux=AuxRequest())
    assert aux == theirs.AuxOutput(None, None)
    with pytest.raises(ValueError, match="return_lse: expected False beside return_aux"):
        flex_attention(*x, return_lse=True, return_aux=AuxRequest())


def test_tangents_of_lse_where_value_alone_has_a_batch(rng, bias):
    """Value has no part in lse, but its axis does, and so has the number of its entry."""
    q, k, v = (x.detach() for x in operands(rng))
    q, k = q[:1], k[:1]

    def score(s, b, h, i, j):
        return relative(bias)(s, b, h, i, j) + s * b

    def wide(x):
        return x.expand(B, -1, -1, -1)

    for f in torch.func.jacfwd, torch.func.hessian:
        found, expected = (
            f(lambda q, lse=lse: lse(q).sin().sum((1, 2)))(q)
            for lse in (
                lambda q: flex_attention(q, k, v, score, causal, return_lse=True)[1],
                lambda q: composed(wide(q), wide(k), v, score, causal)[1],
            )
        )
        torch.testing.assert_close(found, expected, **EXACT)


def test_the_largest_scores_under_transforms(rng, bias):
    """They have a value on every level, and no derivative."""
    q, k, v = (x.detach() for x in operands(rng))
    bias = bias.detach()

    def largest(q, bias):
        wanted = AuxRequest(max_scores=True)
        return flex_attention(q, k, v, relative(bias), causal, return_aux=wanted)[1].max_scores

    def expected(q, bias):
        return composed(q, k, v, relative(bias), causal)[2].amax(-1)

    batch = torch.stack([q, q.cos()], 1), torch.stack([bias, bias.cos()], -1)
    found, known = (torch.func.vmap(f, (1, -1))(*batch) for f in (largest, expected))
    torch.testing.assert_close(found, known, **EXACT)
    found, tangent = torch.func.jvp(largest, (q, bias), (q, bias))
    torch.testing.assert_close(found, expected(q, bias), **EXACT)
    grads = torch.func.grad(lambda *x: largest(*x).sum(), (0, 1))(q, bias)
    assert not any(x.any() for x in (tangent, *grads))


def test_the_scale_is_a_number(rng):
    """A derivative in it is refused, not 0."""
    x = [y.detach() for y in operands(rng)]

    def f(scale):
        return flex_attention(*x, scale=scale).sum()

    half = torch.tensor(0.5)
    assert f(half) == f(0.5)
    for way in torch.func.grad(f), torch.func.jacfwd(f), lambda c: f(c.clone().requires_grad_()):
        with pytest.raises(NotImplementedError, match="scale: has no derivative; pass a number"):
            way(half)
    with pytest.raises(TypeError, match="scale: expected a number or None, got tensor"):
        f(torch.ones(H))


def test_block_masks(rng):
    """create_block_mask's result, the function itself, and a mask that is its blocks alone."""
    n = 256
    x = operands(rng, n, n)
    expected = composed(*x, mask=causal)[0]
    made = create_block_mask(causal, B, H, n, n, device="cpu")
    for mask in made, causal:
        torch.testing.assert_close(flex_attention(*x, block_mask=mask), expected, **EXACT)
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    columns = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(counts, columns, seq_lengths=(n, n))
    swapped = composed(*x, mask=lambda b, h, q, k: q // 128 != k // 128)[0]
    torch.testing.assert_close(flex_attention(*x, block_mask=blocks), swapped, **EXACT)
    every = create_block_mask(theirs.noop_mask, 1, 1, n, n, device="cpu")
    torch.testing.assert_close(flex_attention(*x, block_mask=every), composed(*x)[0], **EXACT)
    with pytest.raises(ValueError, match="block_mask: expected one with its function, got a slice"):
        flex_attention(*x, block_mask=made[:, :, :1])
    with pytest.raises(ValueError, match=r"block_mask: expected one for \(Lq, Lk\) = \(6, 6\)"):
        flex_attention(*operands(rng), block_mask=made)


def test_block_masks_of_any_callable(rng):
    def noop_mask(b, h, q, k):
        """One of the user's, although it has the name of PyTorch's."""
        return q >= k

    x = operands(rng)
    expected = composed(*x, mask=causal)[0]
    for mask in noop_mask, partial(lambda reach, b, h, q, k: q - k >= reach, 0):
        made = create_block_mask(mask, None, None, L, L, device="cpu")
        torch.testing.assert_close(flex_attention(*x, block_mask=made), expected, **EXACT)


def test_refusals(rng, bias):
    x = operands(rng)
    with pytest.raises(TypeError, match="return_aux: expected an AuxRequest or None, got True"):
        flex_attention(*x, return_aux=True)
    with pytest.raises(ValueError, match="query: expected a tensor on the CPU, got meta"):
        flex_attention(x[0].to("meta"), *x[1:])
    with pytest.raises(ValueError, match="score_mod, mask_mod: expected a tensor on the CPU"):
        flex_attention(*x, relative(bias.detach().to("meta")))
    with pytest.raises(TypeError, match=r"score_mod: .* got the truth of q > k"):
        flex_attention(*x, lambda s, b, h, q, k: s if q > k else -s)
    with pytest.raises(TypeError, match="mask_mod: expected a function"):
        flex_attention(*x, block_mask=3)
    with pytest.raises(IndexError, match="bias"):
        flex_attention(*x, lambda s, b, h, q, k: s + bias[h, q - k])
    assert flex_attention(*x, lambda s, b, h, q, k: s + bias[h, q - k], causal).isfinite().all()


# ------------------------------------------------------------------------------- behind a name


def test_install(rng, bias, calls):
    """The call that raises in PyTorch runs, also by a name that was imported before."""
    imported, signature = theirs.flex_attention, inspect.signature(theirs.flex_attention)
    x = (*operands(rng, dtype=torch.float32), bias)

    def loss():
        return imported(*x[:3], score_mod=relative(bias)).square().sum()

    def refused():
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            loss()

    with install():
        refused()
        with install(flex=True):
            grads = torch.autograd.grad(loss(), x)
            assert calls == ["attention_forward", "attention_backward"]
        refused()
    install(flex=True)
    with install():
        loss()
    loss()
    uninstall()
    refused()
    assert inspect.signature(theirs.flex_attention) == signature
    formula = torch.autograd.grad(
        composed(*(y.double() for y in x[:3]), relative(bias))[0].square().sum(), x
    )
    for a, b in zip(grads, formula, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="flex: expected True or False, got 1"):
        install(flex=1)


def test_install_leaves_other_devices_to_pytorch():
    with install(flex=True), pytest.raises(ValueError, match="FlexAttention is only supported on"):
        theirs.flex_attention(*(torch.zeros(1, 1, 2, 4, device="meta"),) * 3)


def test_compile(rng):
    x = operands(rng)

    def model(q, k, v):
        return flex_attention(2 * q, k, v, lambda s, b, h, q, k: torch.tanh(s), causal) + 1

    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*x).sum(), x) for f in (compiled, model)), strict=True):
        assert torch.equal(a, b)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="flex_attention: sdpa traces"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*x)


# ------------------------------------------------------------------------------- attention-gym


def gym(part):
    needs = "needs attn-gym: pip install '.[peers]'"
    return pytest.importorskip(f"attn_gym.{part}", reason=needs).__dict__


N = 48
OFFSETS = torch.tensor([0, 10, 24, N], dtype=torch.int32)
MASKS = {
    "causal": lambda g: g["causal_mask"],
    "window": lambda g: g["generate_sliding_window"](7),
    "dilated": lambda g: g["generate_dilated_sliding_window"](4, 2),
    "longformer": lambda g: g["generate_global_sliding_window"](3, torch.arange(N) % 17 == 0),
    "prefix": lambda g: g["generate_prefix_lm_mask"](11),
    "documents": lambda g: g["generate_doc_mask_mod"](g["causal_mask"], OFFSETS),
    "packed": lambda g: g["generate_packed_causal_doc_mask_mod"](OFFSETS),
    "shared prefix": lambda g: g["generate_shared_prefix_mask_mod"](OFFSETS, torch.zeros(3).int()),
    "natten": lambda g: g["generate_natten"](8, 6, 3, 5),
    "tiled natten": lambda g: g["generate_tiled_natten"](8, 6, 3, 3, 4, 2),
    "block diffusion": lambda g: g["generate_block_diffusion_mask"](24, 4),
    "jetspec": lambda g: g["generate_jetspec_training_mask_mod"](0, 4),
    "batches": lambda g: g["batchify_mask_mod"](g["causal_mask"], 16),
    "tiles": lambda g: g["generate_sta_mask_mod_2d"]((8, 6), (4, 2), (2, 2)),
    "tiles of video": lambda g: g["generate_sta_mask_mod_3d"]((4, 4, 3), (2, 2, 1), (2, 2, 1)),
    "heads in space": lambda g: g["generate_spatial_head_mask_mod"](8, 4, 10, 2, round_width=8),
    "heads in time": lambda g: g["generate_temporal_head_mask_mod"](8, 4, 10, 2),
    "flamingo": lambda g: g["generate_vision_cross_attention_mask_mod"](
        torch.tensor([[0, 20], [5, 30], [30, N]]), N // 3
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_attention_gym(rng, name):
    mask_mod = MASKS[name](gym("masks"))
    expected = theirs.create_mask(mask_mod, B, H, N, N, device="cpu")
    q, k, _ = operands(rng, N, N)
    identity = torch.eye(N, dtype=q.dtype).expand(B, H, N, N)
    weights = flex_attention(q, k, identity, block_mask=mask_mod)
    assert torch.equal(weights > 0, expected)
    torch.testing.assert_close(weights, composed(q, k, identity, mask=expected)[0], **EXACT)


def test_a_mask_that_counts_is_refused_by_name(rng):
    """A row of a table is compared as a whole, which is no value per pair."""
    mask_mod = gym("masks")["generate_vsa_mask_mod"](torch.zeros(B, H, 1, 1).int(), N)
    with pytest.raises(TypeError, match=r"mask_mod: .* in vsa_topk_t48_k1, got \(k // 48\)"):
        flex_attention(*operands(rng, N, N), block_mask=mask_mod)


@pytest.fixture
def graph(rng):
    """(distances, types of edges, lengths of paths) of random graphs, as Graphormer has them."""
    mods = gym("mods")
    near = torch.from_numpy(rng.random((B, N, N)) < 0.05)
    near = near | near.mT
    types = torch.from_numpy(rng.integers(0, 3, (B, N, N)))
    paths = mods["shortest_path_edge_types"](near, types, 3)
    return mods["shortest_path_distances"](near, 4), *paths


SCORES = {
    "alibi": lambda g, *_: g["generate_alibi_bias"](H),
    "sandwich": lambda g, *_: g["generate_sandwich_bias"](H, N),
    "softcap": lambda g, *_: g["generate_tanh_softcap"](5),
    "relu": lambda g, *_: g["generate_activation_score_mod"](torch.nn.functional.relu),
    "distances": lambda g, x, graph: g["generate_graphormer_spatial_bias"](x[0], graph[0]),
    "paths": lambda g, x, graph: g["generate_graphormer_edge_bias"](x[1], *graph[1:]),
}


# Its function multiplies two tables of float32 in that type, where a program has the score's.
ROUNDED = {"sandwich": {"rtol": 1e-5, "atol": 1e-6}}


@pytest.fixture
def float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64_by_default")  # of powers of integers
@pytest.mark.parametrize("name", SCORES)
def test_scores_of_attention_gym(rng, name, graph):
    tables = tensor(rng, H, 6), tensor(rng, H, 3, 3)
    score_mod = SCORES[name](gym("mods"), tables, graph)
    leaves = [*operands(rng, N, N), *tables]
    ours, (formula, *_) = (f(*leaves[:3], score_mod) for f in (flex_attention, composed))
    tolerance = ROUNDED.get(name, {"rtol": 1e-11, "atol": 1e-12})
    torch.testing.assert_close(ours, formula, **tolerance)
    upstream = torch.randn_like(ours)
    grads = [torch.autograd.grad(x, leaves, upstream, allow_unused=True) for x in (ours, formula)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# ------------------------------------------------------------------------------- training


def buckets(distance):
    """T5's buckets of relative positions, one direction of 8, of which 4 are exact."""
    far = 4 + (torch.log(distance.clamp(min=1) / 4) / math.log(32 / 4) * 4).floor().to(torch.int64)
    return torch.where(distance < 4, distance, far.clamp(max=7))


def natten(b, h, q, k):
    """Neighbours within 1 row and 1 column on a canvas of 8 x 6."""
    return ((q // 8 - k // 8).abs() <= 1) & ((q % 8 - k % 8).abs() <= 1)


@pytest.mark.parametrize("block_mask", [natten, causal], ids=["natten", "causal"])
def test_training_steps(rng, block_mask):
    """Two steps of a layer with T5's bias, its table trained too, equal the formula's."""
    distances = buckets(torch.arange(N))
    weights = tensor(rng, 3, H * D, H * D), tensor(rng, 8, H)
    tokens, target = (tensor(rng, B, N, H * D).detach() for _ in range(2))

    def steps(attend):
        projections, table = (w.detach().clone().requires_grad_() for w in weights)
        optimizer = torch.optim.SGD([projections, table], lr=0.05)

        def t5(score, b, h, q, k):
            return score + table[distances[(q - k).abs()], h]

        losses = []
        for _ in range(3):
            q, k, v = ((tokens @ w).unflatten(-1, (H, D)).transpose(1, 2) for w in projections / 4)
            out = attend(q, k, v, t5, block_mask).transpose(1, 2).flatten(2)
            loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            assert table.grad.abs().max() > 0
            optimizer.step()
            losses.append(loss.item())
        return losses, projections, table

    ours = steps(flex_attention)
    formula = steps(lambda *args: composed(*args)[0])
    assert ours[0] == sorted(ours[0], reverse=True)
    for a, b in zip(ours, formula, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
