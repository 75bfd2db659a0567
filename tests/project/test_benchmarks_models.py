"""The contenders of the benchmarks of models compute the same."""

import sys

import numpy as np
import pytest
from support.examples import ROOT, loaded

import sdpa
from sdpa_lab import minilm, smollm2

sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

from benchmarks import embeddings, models


def cached(rng, *parts):
    """(query of the last part, cache) after parts of so many tokens."""
    cache = sdpa.KVCache(1, 3, 64, capacity=sum(parts))
    for n in parts:
        query = rng.standard_normal((1, 9, n, 64), np.float32)
        cache.append(*rng.standard_normal((2, 1, 3, n, 64), np.float32))
    return query, cache


@pytest.mark.parametrize("parts", [(40,), (40, 1)], ids=["prompt", "token"])
@pytest.mark.parametrize("contender", models.CONTENDERS)
def test_attention_of_all_contenders_is_the_same(contender, parts, rng, request):
    if contender.startswith("PyTorch"):
        request.getfixturevalue("torch")
    query, cache = cached(rng, *parts)
    expected = smollm2.attention(0, query, cache)
    got = models.ATTENTION[contender](0, query, cache)
    # Weighted means of numbers near 1, of at most 41 terms.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_figures_of_a_run_become_a_line():
    run = {"contender": "sdpa", "length": 512, "prefill": 2.0, "prefill attention": 0.5}
    run |= {"token": 0.05, "token attention": 0.005, "peak": 700_000_000}
    line = models.table([run]).splitlines()[1].split()
    assert line == ["512", "sdpa", "2.00", "25%", "20.0", "10%", "700"]


@pytest.fixture
def model():
    return loaded(minilm.MiniLM)


def test_the_graph_for_onnx_runtime_is_the_model(model, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install '.[peers]'")
    file = tmp_path / "minilm.onnx"
    file.write_bytes(embeddings.graph(model.weights).SerializeToString())
    texts = ["A cat sleeps.", "A kitten naps on the roof of the world.", "", "word " * 300]
    got = embeddings.OnnxMiniLM(file).embed(texts)
    np.testing.assert_allclose(got, model.embed(texts), rtol=0, atol=1e-6)
