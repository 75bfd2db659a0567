"""sdpa.interop.transformers on models whose pattern only their mask tells, and on those it refuses.

One small model for each way in which flags and names mislead; docs/transformers.md has all.
"""

import logging
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install '.[peers]'"
    )

from support import small_models
from support.small_models import CLOSE, COLLECTED, HEADS, PADDING, SIZES, TOKENS, pair

from sdpa.interop.transformers import c_attention, register

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def registered(torch):
    register()


def pegasus_x():
    """Its decoder has no is_causal."""
    config = transformers.PegasusXConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=64,
        block_size=4,
        num_global_tokens=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.PegasusXForConditionalGeneration(config)


def splinter():
    """An encoder without is_causal."""
    return transformers.SplinterModel(transformers.SplinterConfig(**SIZES, num_attention_heads=4))


def doge():
    """It adds its own weights to the mask, which must be there."""
    config = transformers.DogeConfig(**SIZES, **HEADS, **TOKENS, keep_window_size=6)
    return transformers.DogeForCausalLM(config)


def deepseek_v32():
    """Keys are chosen for each query, and given by number under other names than eager."""
    config = transformers.DeepseekV32Config(
        **SIZES,
        **TOKENS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV32ForCausalLM(config)


def t5gemma2():
    """It joins the masks of itself and of the encoder."""
    text = SIZES | HEADS | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    encoder = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(
        encoder=encoder, decoder=text, image_token_index=60, eoi_token_index=61, **TOKENS
    )
    return transformers.T5Gemma2ForConditionalGeneration(config)


def mllama_text():
    """Its attention to images says is_causal, and so do its masks of padding."""
    config = transformers.MllamaConfig(
        text_config={
            **SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "cross_attention_layers": [1],
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 96,
            "intermediate_layers_indices": [0, 1],
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
    )
    return transformers.MllamaForCausalLM(config.text_config)


DECODERS = {f.__name__: f for f in (pegasus_x, doge, deepseek_v32, t5gemma2, mllama_text)}
MODELS = DECODERS | {"splinter": splinter}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def inputs(name, padding="none"):
    is_seq2seq = name in ("pegasus_x", "t5gemma2")
    found = small_models.inputs(padding, is_seq2seq=is_seq2seq, end=60)
    if name == "mllama_text":
        found["cross_attention_states"] = torch.randn(2, 9, 32)
    return found


def result(model, given):
    with torch.no_grad():
        return model(**given)[0]


@EVERY_MODEL
@pytest.mark.parametrize("padding", PADDING)
def test_as_eager(name, padding):
    """Padding included: a model may let it flow into the rest."""
    given = inputs(name, padding)
    eager, ours = (result(model, given) for model in pair(MODELS[name]))
    torch.testing.assert_close(ours, eager, **CLOSE)


@pytest.mark.parametrize("name", DECODERS)
def test_no_decoder_sees_the_future(name):
    _, ours = pair(MODELS[name])
    given = inputs(name)
    changed = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    before = result(ours, given)
    given[changed] = given[changed].clone()
    given[changed][:, -1] = (given[changed][:, -1] + 1) % 60
    after = result(ours, given)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS))


def opt():
    config = transformers.OPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        vocab_size=64,
        word_embed_proj_dim=32,
        **TOKENS,
    )
    return transformers.OPTForCausalLM(config)


def siglip():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.SiglipVisionConfig(
        **sizes, num_attention_heads=4, image_size=28, patch_size=14
    )
    return transformers.SiglipVisionModel(config)


@COLLECTED
@pytest.mark.parametrize("make", [gpt2, opt, siglip])
def test_weights_of_parts_that_the_model_does_not_tell(make):
    """Their own forward keeps output_attentions to itself."""
    given = {"pixel_values": torch.ones(1, 3, 28, 28)} if make is siglip else inputs("", "left")
    eager, ours = (model(**given, output_attentions=True).attentions for model in pair(make))
    assert len(eager) == len(ours) == 2
    for theirs, own in zip(eager, ours, strict=True):
        torch.testing.assert_close(own, theirs, **CLOSE)


def git():
    sizes = SIZES | {"num_attention_heads": 4}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    return transformers.GitConfig(**sizes, **TOKENS, vision_config=vision)


def falcon():
    return transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **TOKENS
    )


TABLES = {
    git: ("GitForCausalLM", "GIT_SELF_ATTENTION_CLASSES", "eager"),
    falcon: ("FalconForCausalLM", "FALCON_ATTENTION_CLASSES", "eager, sdpa, flash_attention_2"),
}


@pytest.mark.parametrize("config", TABLES)
def test_own_tables_of_attentions_are_refused_by_name(config):
    name, table, names = TABLES[config]
    kind = getattr(transformers, name)
    for each in kind, type("Derived", (kind,), {}):
        with pytest.raises(ValueError, match="attn_implementation") as raised:
            each._from_config(config(), attn_implementation="c_attention")
        assert str(raised.value) == (
            f"attn_implementation: expected one of {names} for {each.__name__}, by its own "
            f"{table}, got c_attention; load it with one of these, after which "
            "set_attn_implementation switches the parts without such a table"
        )


@pytest.mark.parametrize("config", TABLES)
@pytest.mark.parametrize("padding", PADDING)
def test_after_the_refusal_the_parts_are_right(config, padding):
    """Where the text keeps its own attention, it reads our mask as it reads eager's."""
    given = inputs("", padding)
    kind = getattr(transformers, TABLES[config][0])
    models = pair(lambda: kind._from_config(config(), attn_implementation="eager"))
    eager, ours = (result(model, given) for model in models)
    torch.testing.assert_close(ours, eager, **CLOSE)


def test_a_model_that_asks_no_registry_keeps_its_own(caplog):
    config = transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=64)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = transformers.XLNetModel._from_config(config, attn_implementation="c_attention")
    finally:
        logger.removeHandler(caplog.handler)
    assert model.config._attn_implementation == "eager"
    assert "XLNetModel keeps its own attention: it does not ask the registry" in caplog.text


@pytest.mark.parametrize(
    "name", ["sinks", "block_indices", "cache", "cu_seq_lens_q", "of_tomorrow"]
)
def test_unknown_keywords_are_refused_by_name(name):
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError) as raised:
        c_attention(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1)})
    assert str(raised.value) == (
        f"{name}: expected None with c_attention, got Tensor; use attn_implementation='eager'"
    )
    out, _ = c_attention(torch.nn.Module(), q, q, q, None, **{name: None})
    assert out.shape == (1, 3, 2, 4)


@pytest.mark.parametrize(
    "name",
    [
        *("input_ids", "logits_to_keep", "grid_thw", "use_cache", "labels"),
        *("token_type_ids", "mm_token_type_ids"),
    ],
)
def test_keywords_about_other_things_change_nothing(name):
    """Models hand on what their own forward got, which eager attention ignores."""
    q = torch.randn(1, 2, 3, 4)
    out, _ = c_attention(torch.nn.Module(), q, q, q, None, **{name: [2]})
    expected, _ = c_attention(torch.nn.Module(), q, q, q, None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("said", [True, False, None])
def test_without_a_mask_every_query_sees_every_key(said):
    """As on eager attention, whatever flags say."""
    module = torch.nn.Module()
    module.is_causal = True
    value = torch.arange(3.0).reshape(1, 1, 3, 1)
    out, _ = c_attention(
        module,
        torch.zeros(1, 1, 3, 4),
        torch.zeros(1, 1, 3, 4),
        value,
        None,
        is_causal=said,
        sliding_window=1,
    )
    torch.testing.assert_close(out, torch.ones(1, 3, 1, 1))
