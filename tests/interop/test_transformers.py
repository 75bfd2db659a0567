"""sdpa.interop.transformers: small models with random weights, beside transformers' eager."""

import copy
import inspect
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'sdpa[peers]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install 'sdpa[peers]'"
    )

from sdpa.interop.transformers import c_attention, c_attention_mask, register

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LENGTH = 12
# The largest relative difference that two orders of summation may leave in float32 over two layers.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


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
PADDING = {
    "none": lambda n: torch.ones(2, n, dtype=torch.long),
    "left": lambda n: torch.stack([torch.ones(n).long(), (torch.arange(n) >= 5).long()]),
    "right": lambda n: torch.stack([torch.ones(n).long(), (torch.arange(n) < n - 3).long()]),
}


@pytest.fixture(autouse=True)
def registered(torch):
    register()


def pair(name):
    """The same model twice: with eager attention, and with ours."""
    torch.manual_seed(0)
    eager = MODELS[name]()
    for parameter in eager.parameters():  # weights large enough for scores that differ
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.25)
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("c_attention")
    if ours.config._attn_implementation != "c_attention":
        pytest.skip(f"{name} takes no other attention in transformers {transformers.__version__}")
    return eager.eval(), ours.eval()


def inputs(name, padding="none"):
    torch.manual_seed(1)
    found = {
        "input_ids": torch.randint(2, 64, (2, LENGTH)),
        "attention_mask": PADDING[padding](LENGTH),
    }
    if name == "t5":
        found["decoder_input_ids"] = torch.randint(2, 64, (2, 7))
    return found


def seen(name, result, given):
    """The part of a result (batch, length, ...) that is not padding."""
    x = result[0]
    return x if name == "t5" else x[given["attention_mask"].bool()]


@EVERY_MODEL
@pytest.mark.parametrize("padding", PADDING)
def test_as_eager(name, padding):
    given = inputs(name, padding)
    eager, ours = (model(**given) for model in pair(name))
    torch.testing.assert_close(seen(name, ours, given), seen(name, eager, given), **CLOSE)


@EVERY_MODEL
@pytest.mark.parametrize("padding", ["none", "left"])
def test_gradients(name, padding):
    given = inputs(name, padding)
    models = pair(name)
    for model in models:
        seen(name, model.train(False)(**given), given).square().mean().backward()
    eager, ours = (dict(model.named_parameters()) for model in models)
    assert sum(x.grad is not None for x in ours.values()) > 10
    for parameter, theirs in eager.items():
        if theirs.grad is not None:
            size = float(theirs.grad.abs().max().clamp(min=1))
            torch.testing.assert_close(ours[parameter].grad, theirs.grad, rtol=0, atol=1e-5 * size)


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
def test_output_attentions(name):
    given = inputs(name, "right")
    eager, ours = (model(**given, output_attentions=True) for model in pair(name))
    kinds = ("encoder", "decoder", "cross") if name == "t5" else ("",)
    for kind in kinds:
        field = f"{kind}_attentions".strip("_")
        field = "cross_attentions" if kind == "cross" else field
        assert len(ours[field]) == 2
        for a, b in zip(ours[field], eager[field], strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


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
    shapes = []

    def watched(*args, **options):
        shapes.append(None if (mask := options["attn_mask"]) is None else tuple(mask.shape))
        return attention(*args, **options)

    from sdpa.interop import transformers as module

    attention = module.attention
    monkeypatch.setattr(module, "attention", watched)
    for padding in "none", "left":
        pair("gemma2")[1](**inputs("gemma2", padding))
    assert shapes == [None, None, (2, 1, 1, LENGTH), (2, 1, 1, LENGTH)]


# Each version says in one of these ways that the queries are the last n of so many keys.
QUERIES = {
    "cache_position": lambda n, keys: {"cache_position": torch.arange(keys - n, keys)},
    "q_length": lambda n, keys: {"q_length": n, "q_offset": keys - n},
}
SPOKEN = inspect.signature(transformers.masking_utils.sdpa_mask).parameters


@pytest.mark.parametrize("said", QUERIES)
def test_patterns_that_are_options_of_the_attention(said):
    """No mask, or the padding alone, in the words of old and of new versions."""
    masking = transformers.masking_utils
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    for pattern in (
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
        masking.sliding_window_causal_mask_function(3),
    ):
        for n in 1, 2, 6:
            where = QUERIES[said](n, 6)
            assert c_attention_mask(2, 6, mask_function=pattern, **where) is None
            ones = torch.ones(2, 6)
            mask = c_attention_mask(2, 6, mask_function=pattern, attention_mask=ones, **where)
            assert mask is None
            mask = c_attention_mask(2, 6, mask_function=pattern, attention_mask=padding, **where)
            assert torch.equal(mask, padding.bool())
    # The last keys of a cache that slides.
    mask = c_attention_mask(2, 4, 2, attention_mask=padding, **QUERIES[said](1, 6))
    assert mask is None
    mask = c_attention_mask(2, 5, 1, attention_mask=padding, **QUERIES[said](1, 6))
    assert torch.equal(mask, padding[:, 1:].bool())


def test_other_patterns_come_as_masks():
    (said,) = [name for name in QUERIES if name in SPOKEN]
    chunks = transformers.masking_utils.chunked_causal_mask_function(3, torch.zeros(1).long())
    mask = c_attention_mask(1, 6, mask_function=chunks, **QUERIES[said](6, 6))
    i = torch.arange(6)
    expected = (i[:, None] >= i) & (i[:, None] // 3 == i // 3)
    assert torch.equal(mask[0, 0], expected)
    # A static cache is longer than its contents.
    mask = c_attention_mask(1, 6, **QUERIES[said](2, 4))
    assert torch.equal(mask[0, 0], i <= torch.tensor([[2], [3]]))


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
            found, expected = compiled(**given), eager(**given)
            torch.testing.assert_close(
                seen(name, found, given), seen(name, expected, given), **CLOSE
            )
            given["attention_mask"] = PADDING["right"](LENGTH)


def test_training_with_dropout():
    _, model = pair("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    given = inputs("llama")
    results = []
    for seed in 1, 1, 2:
        torch.manual_seed(seed)
        results.append(model.train()(**given).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    results[0].sum().backward()


@pytest.mark.parametrize("option", ["cache", "cu_seq_lens_q"])
def test_refused(option):
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError) as raised:
        c_attention(torch.nn.Module(), q, q, q, None, **{option: torch.zeros(1)})
    assert str(raised.value) == f"{option}: not available with c_attention"
