"""sdpa.interop.transformers: small models with random weights, beside transformers' eager."""

import inspect
import warnings
from functools import partial

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install '.[peers]'"
    )

from support import small_models
from support.small_models import CLOSE, COLLECTED, HEADS, LENGTH, PADDING, SIZES, TOKENS
from transformers.generation.configuration_utils import CompileConfig

from sdpa.interop.transformers import c_attention, c_attention_mask, register

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **TOKENS))


def qwen2():
    del (heads := dict(HEADS))["head_dim"]
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **heads, **TOKENS))


def bert():
    config = transformers.BertConfig(**SIZES, num_attention_heads=4, pad_token_id=0)
    return transformers.BertModel(config)


def gemma2():
    config = transformers.Gemma2Config(
        **SIZES, **HEADS, **TOKENS, sliding_window=4, attn_logit_softcapping=2.0
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES,
        **HEADS,
        **TOKENS,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    return transformers.GptOssForCausalLM(config)


def t5():
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {f.__name__: f for f in (llama, qwen2, bert, gemma2, gpt_oss, t5)}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def registered(torch):
    register()


def pair(name):
    """The same model twice: with eager attention, and with ours."""
    eager, ours = small_models.pair(MODELS[name])
    if ours.config._attn_implementation != "c_attention":
        pytest.skip(f"{name} takes no other attention in transformers {transformers.__version__}")
    return eager, ours


def inputs(name, padding="none"):
    return small_models.inputs(padding, is_seq2seq=name == "t5")


@EVERY_MODEL
@pytest.mark.parametrize("padding", PADDING)
def test_as_eager(name, padding):
    """Padding included."""
    given = inputs(name, padding)
    eager, ours = (model(**given)[0] for model in pair(name))
    torch.testing.assert_close(ours, eager, **CLOSE)


@EVERY_MODEL
@pytest.mark.parametrize("padding", ["none", "left"])
def test_gradients(name, padding):
    given = inputs(name, padding)
    models = pair(name)
    for model in models:
        out = model.train(False)(**given)[0]
        # The queries that see no key are padding, which no loss asks for.
        out = out if name == "t5" else out[given["attention_mask"].bool()]
        out.square().mean().backward()
    eager, ours = (dict(model.named_parameters()) for model in models)
    assert sum(x.grad is not None for x in ours.values()) > 10
    for parameter, theirs in eager.items():
        if theirs.grad is not None:
            size = float(theirs.grad.abs().max().clamp(min=1))
            torch.testing.assert_close(ours[parameter].grad, theirs.grad, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_gradients_of_every_sample(name, padding):
    """By vmap, under which no tensor can be asked; of the other models some do so themselves."""
    given = inputs(name, padding)
    eager, ours = pair(name)
    parameters = {name: x.detach() for name, x in eager.named_parameters()}

    def loss(model, parameters, given):
        batch = {name: x[None] for name, x in given.items()}
        out = torch.func.functional_call(model, parameters, (), batch)[0]
        return (out.square() * batch["attention_mask"][..., None]).mean()

    theirs, found = (
        torch.func.vmap(torch.func.grad(partial(loss, model)), (None, 0))(parameters, given)
        for model in (eager.eval(), ours.eval())
    )
    for parameter, expected in theirs.items():
        size = float(expected.abs().max().clamp(min=1))
        torch.testing.assert_close(found[parameter], expected, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, padding, cache):
    given = inputs(name, padding)
    given.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 10, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    eager, ours = (model.generate(**given, **options) for model in pair(name))
    assert torch.equal(eager, ours)


@EVERY_MODEL
@pytest.mark.parametrize("padding", ["left", "right"])
def test_output_attentions(name, padding):
    given = inputs(name, padding)
    eager, ours = (model(**given, output_attentions=True) for model in pair(name))
    kinds = ("encoder", "decoder", "cross") if name == "t5" else ("",)
    for kind in kinds:
        field = f"{kind}_attentions".strip("_")
        field = "cross_attentions" if kind == "cross" else field
        assert len(ours[field]) == 2
        for a, b in zip(ours[field], eager[field], strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


@COLLECTED
def test_output_attentions_of_the_configuration():
    """A call's own word counts before it."""
    _, model = pair("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True  # refused beside all others
    model.set_attn_implementation("c_attention")
    given = inputs("llama")
    assert len(model(**given).attentions) == 2
    assert model(**given, output_attentions=False).attentions is None


@EVERY_MODEL
@pytest.mark.skipif(transformers.__version__ != "5.23.0", reason="others refuse other models")
def test_whom_pytorch_refuses(name):
    """transformers refuses PyTorch's own function where it lacks something.

    5.0 runs Gemma-2 on it, without the softcap.
    """
    model = MODELS[name]()
    if name in ("gemma2", "gpt_oss"):
        with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product_attention"):
            model.set_attn_implementation("sdpa")
    else:
        model.set_attn_implementation("sdpa")
        model(**inputs(name))


def test_no_mask_of_lq_times_lk(monkeypatch):
    """Neither padding nor windows nor causality build one."""
    from sdpa.interop import transformers as module

    shapes = []

    def watch(name):
        function = getattr(module, name)

        def watched(*args, **options):
            shapes.append(None if (mask := options["attn_mask"]) is None else tuple(mask.shape))
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    watch("attention")
    watch("attention_forward")
    for padding in "none", "left":
        pair("gemma2")[1](**inputs("gemma2", padding))
    assert shapes == [None, None, (2, 1, 1, LENGTH), (2, 1, 1, LENGTH)]


MASKING = transformers.masking_utils
SPOKEN = inspect.signature(MASKING.sdpa_mask).parameters
CHUNKS = MASKING.chunked_causal_mask_function(3, torch.zeros(2).long())
PACKED = MASKING.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 1]] * 2))
PATTERNS = {
    "causal": MASKING.causal_mask_function,
    "bidirectional": MASKING.bidirectional_mask_function,
    "window": MASKING.sliding_window_causal_mask_function(3),
    "chunks": CHUNKS,
    "packed": MASKING.and_masks(MASKING.causal_mask_function, PACKED),
    "prefix": MASKING.or_masks(
        MASKING.causal_mask_function, lambda batch, head, query, key: key < 2
    ),
}
PATTERNS["a callable"] = partial(PATTERNS["prefix"])
PATTERNS["with a callable"] = MASKING.and_masks(PATTERNS["causal"], PATTERNS["a callable"])
PATTERNS["window of nothing"] = MASKING.sliding_window_causal_mask_function(0)
if hasattr(MASKING, "sliding_window_bidirectional_mask_function"):
    PATTERNS["window of both sides"] = MASKING.sliding_window_bidirectional_mask_function(2)
ROWS = {
    "none": None,
    "ones": [[1] * 6, [1] * 6],
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "both sides": [[0, 1, 1, 1, 0, 0], [1] * 6],
    "empty": [[0] * 6, [1] * 6],
}
# Queries and keys, and the place of the first of each.
PLACES = {
    "prompt": (6, 6, 0, 0),
    "rest": (2, 6, 4, 0),
    "token": (1, 6, 5, 0),
    "slid": (1, 4, 5, 2),
    "static": (2, 6, 2, 0),
}


def both_masks(pattern, rows, place, **options):
    """Eager's mask and ours, in the words of this version."""
    n_q, n_k, q_offset, kv_offset = PLACES[place]
    where = {"q_length": n_q, "q_offset": q_offset}
    if "q_length" not in SPOKEN:
        where = {"cache_position": torch.arange(q_offset, q_offset + n_q)}
    options |= {
        "batch_size": 2,
        "kv_length": n_k,
        "kv_offset": kv_offset,
        "mask_function": PATTERNS[pattern],
        "attention_mask": None if ROWS[rows] is None else torch.tensor(ROWS[rows]).bool(),
    }
    return MASKING.eager_mask(**options, **where), c_attention_mask(**options, **where)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mask_is_eagers_to_everyone(pattern, rows, place):
    eager, ours = both_masks(pattern, rows, place)
    assert isinstance(ours, torch.Tensor)
    assert (ours.shape, ours.ndim, ours.dtype, len(ours)) == (eager.shape, 4, eager.dtype, 2)
    assert torch.equal(ours + 0, eager)
    assert torch.equal(torch.cat([ours, eager], -1), torch.cat([eager, eager], -1))
    assert torch.equal(ours[:, :, :, 1:] < 0, eager[:, :, :, 1:] < 0)
    assert torch.equal(ours.masked_fill(eager == 0, 7.0), eager.masked_fill(eager == 0, 7.0))
    assert torch.equal(torch.where(eager < 0, 1.0, ours), torch.where(eager < 0, 1.0, eager))
    assert ours.to(torch.float64).dtype == torch.float64


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mask_carries_its_pattern(pattern, rows, place):
    """Attention is that with eager's mask, also of queries that see no key but the lone one."""
    eager, ours = both_masks(pattern, rows, place)
    torch.manual_seed(0)
    n_q, n_k, *_ = PLACES[place]
    q, k, v = torch.randn(2, 4, n_q, 8), torch.randn(2, 2, n_k, 8), torch.randn(2, 2, n_k, 8)
    for bias in None, torch.randn(1, 4, n_q, n_k):
        found, weights = c_attention(
            torch.nn.Module(), q, k, v, ours, position_bias=bias, output_attentions=True
        )
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5 + (0 if bias is None else bias)
        expected = (scores + eager).softmax(-1)
        if n_q == 1:
            expected = expected * (eager == 0).any(-1, keepdim=True)
        torch.testing.assert_close(weights, expected, **CLOSE)
        expected = (expected @ v.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("is_blind", [False, True])
def test_autocast(is_blind):
    """The output has autocast's type, also where a query sees no key."""
    q, k, v = (torch.randn(2, 4, 3, 8) for _ in range(3))
    seen = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    seen[1, 0, 1] = not is_blind
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = c_attention(torch.nn.Module(), q, k, v, seen)
    assert found.dtype == torch.bfloat16
    if is_blind:
        torch.testing.assert_close(found[1, 1], v[1].mean(1).to(torch.bfloat16))


def test_no_keys():
    """As eager: nothing is the sum of nothing."""
    q = torch.randn(2, 1, 3, 8)
    out, weights = c_attention(
        torch.nn.Module(), q, q[:, :, :0], q[:, :, :0], q[:, :, :, :0], output_attentions=True
    )
    assert torch.equal(out, torch.zeros(2, 3, 1, 8))
    assert weights.shape == (2, 1, 3, 0)


def test_a_mask_for_other_lengths_is_broadcast_as_eagers():
    _, ours = both_masks("causal", "left", "token")
    q, k = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 6, 8)
    found, _ = c_attention(torch.nn.Module(), q, k, k, ours)
    expected, _ = c_attention(torch.nn.Module(), q, k, k, ours + 0)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("mask[0] = 1", "__setitem__"),
        ("mask.masked_fill_(torch.tensor(True), 1.0)", "masked_fill_"),
        ("mask += 1", "add_"),
        ("torch.add(torch.zeros(2, 1, 6, 6), 1, out=mask)", "add"),
    ],
)
def test_the_mask_is_not_changed_in_place(change, name):
    """A change of what was built would be lost."""
    _, mask = both_masks("causal", "none", "prompt")
    with pytest.raises(NotImplementedError) as raised:
        exec(change, {"mask": mask, "torch": torch})
    assert str(raised.value) == (
        f"attention_mask: expected to stay as it is with c_attention, got {name}; change a clone "
        "of it"
    )
    clone = mask.clone()
    clone[0] = 1
    assert float(clone[0, 0, 0, 5]) == 1


def test_other_tensors_take_the_mask():
    """A buffer, for one, that a model fills in place."""
    eager, mask = both_masks("causal", "left", "prompt")
    for fill in (lambda x: x.copy_(mask), lambda x: x.__setitem__(0, mask), lambda x: x.add_(mask)):
        buffer = torch.zeros(1, *eager.shape)
        fill(buffer)
        assert torch.equal(buffer[0], eager)


@pytest.mark.parametrize("pattern", ["causal", "bidirectional", "window"])
@pytest.mark.parametrize("place", ["prompt", "rest", "token", "slid"])
def test_patterns_that_are_options_of_the_attention(pattern, place):
    """The mask has the padding alone, or nothing."""
    for rows in "none", "ones":
        _, mask = both_masks(pattern, rows, place)
        assert mask.options["attn_mask"] is None
    _, mask = both_masks(pattern, "left", place)
    n_k, kv_offset = PLACES[place][1], PLACES[place][3]
    if kv_offset:  # of the keys that are left all are there
        assert mask.options["attn_mask"] is None
    else:
        assert mask.options["attn_mask"].shape == (2, 1, 1, n_k)


@pytest.mark.parametrize("pattern", ["causal", "bidirectional", "window"])
def test_a_mask_that_may_not_be_left_out_is_there(pattern):
    """allow_is_causal_skip and allow_is_bidirectional_skip, both False, are kept to."""
    eager, mask = both_masks(pattern, "none", "prompt", allow_is_causal_skip=False)
    assert torch.equal(mask + 0, eager)
    if pattern != "bidirectional":  # of which the attention has nothing to be told
        assert not mask.options["is_causal"]
        assert torch.equal(mask.options["attn_mask"].expand(eager.shape), eager == 0)


def test_a_boolean_mask_marks_the_keys_seen():
    """As for PyTorch's own function; some models give one, which eager adds as 0 or 1."""
    q = torch.randn(2, 2, 3, 4)
    mask = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
    out, _ = c_attention(torch.nn.Module(), q, q, q, mask[None, None])
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(out, expected.transpose(1, 2), **CLOSE)


def test_none_where_eager_has_none():
    for rows in ROWS:
        eager, ours = both_masks("bidirectional", rows, "prompt", allow_is_bidirectional_skip=True)
        assert (ours is None) == (eager is None)


@pytest.mark.slow
@EVERY_MODEL
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler, about itself
def test_compile(name):
    """The whole model is one graph for all values of the padding."""
    torch.compiler.reset()
    given = inputs(name, "left")
    eager, ours = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(**given)[0], eager(**given)[0], **CLOSE)
            given["attention_mask"] = PADDING["right"](LENGTH)


@pytest.mark.slow
@EVERY_MODEL
def test_export(name):
    """Without dynamo too, whose tensors take no other class; length and padding are inputs."""
    given = inputs(name)
    eager, ours = pair(name)
    if name != "bert":
        given["use_cache"] = False  # a cache is no result of a graph
    length = torch.export.Dim("length", max=64)
    shapes = dict.fromkeys(given) | {x: {1: length} for x in ("input_ids", "attention_mask")}
    with torch.no_grad():
        exported = torch.export.export(ours, (), given, dynamic_shapes=shapes, strict=False)
        given["input_ids"] = torch.randint(2, 64, (2, LENGTH + 3))
        given["attention_mask"] = PADDING["left"](LENGTH + 3)
        found, expected = exported.module()(**given)[0], eager(**given)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler, about itself
def test_training_with_dropout(compiled):
    """Compiled in one graph, which draws another pattern each time."""
    torch.compiler.reset()
    _, model = pair("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    given = inputs("llama")
    model.train()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    results = []
    for seed in 1, 1, 2:
        torch.manual_seed(seed)
        results.append(run(**given).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    results[0].sum().backward()


def test_the_weights_with_dropout_are_those_of_the_result():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    out, weights = c_attention(
        torch.nn.Module().train(), q, k, v, None, dropout=0.5, output_attentions=True
    )
    assert 0 < (weights == 0).sum() < weights.numel()
    torch.testing.assert_close(out, (weights @ v).transpose(1, 2), **CLOSE)


@pytest.mark.slow
def test_a_graph_may_break_between_the_mask_and_the_attention():
    torch.compiler.reset()
    given = inputs("gemma2", "left")
    eager, ours = pair("gemma2")
    expected = eager(**given)[0]
    layer = ours.model.layers[0]
    layer.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    with torch.no_grad():
        found = torch.compile(ours, backend="aot_eager")(**given)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    given = inputs("gemma2", "left")
    _, model = pair("gemma2")
    model.train()
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(**given)[0].square().mean().backward()
        grads.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for once, twice in zip(*grads, strict=True):
        torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler, about itself
def test_generate_compiles_once(padding):
    """One graph serves a static cache from the first token to the last."""
    given = inputs("llama", padding)
    eager, ours = pair("llama")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiler = CompileConfig(fullgraph=True, backend=backend, dynamic=None, mode=None)
    compiler._compile_all_devices = True
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    torch.compiler.reset()
    found = ours.generate(**given, **options, compile_config=compiler)
    assert len(graphs) == 1
    assert torch.equal(found, eager.generate(**given, **options, disable_compile=True))
