"""What tools/census.py finds in the source of a model."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("census", ROOT / "tools" / "census.py")
census = importlib.util.module_from_spec(spec)
spec.loader.exec_module(census)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("q = self.q_norm(q)\nk = self.k_norm(k)", True),
        ("x = self.query_layernorm(x)\ny = self.key_layernorm(y)", True),
        ("q = self.norm_q(q)\nk = self.norm_k(k)", True),
        ("q, k = self.qk_norm(q, k)", True),
        ("q = self.q_norm(q)", False),
        ("self.q_norm = Norm()\nself.k_norm = Norm()", False),
        ("x = self.norm(x)\ny = self.quant_norm(y)\nz = self.kind_norm(z)", False),
    ],
)
def test_normalised_queries_and_keys(source, found):
    assert census.normalised(source) == found


def test_folders_with_attention(tmp_path):
    for name, source in {
        "one": "class SelfAttention(Module):\n    scale = self.head_dim**-0.5\n    softmax(s)",
        "other": "class Attention(Module):\n    softmax(s)\n    self.qk_norm(q)",
        "none": "class Mixer(Module):\n    pass",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"modeling_{name}.py").write_text(source)
    sources = census.sources(tmp_path)
    assert list(sources) == ["one", "other"]
    assert [census.scaled(source) for source in sources.values()] == [True, False]
    assert [census.normalised(source) for source in sources.values()] == [False, True]
