"""What results, layers and tables show of themselves."""

import copy
import pickle
from html.parser import HTMLParser

import numpy as np
import pytest

import sdpa
import sdpa_lab as lab

X = np.zeros((8, 64, 16), np.float32)
OUT = sdpa.attention_forward(X, X, X)
LAYER = sdpa.MultiHeadAttention(64, 8, kv_heads=2, scale="learned", rng=0)
FORWARD = LAYER.forward(np.zeros((2, 5, 64), np.float32), is_causal=True)
ADDITIVE = (np.zeros((16, 4), np.float32), np.zeros((16, 4), np.float32), np.zeros(4, np.float32))
ADDITIVE_OUT = sdpa.additive_attention_forward(X, X, X, *ADDITIVE)


def cache():
    made = sdpa.KVCache(2, 4, 8, capacity=7, window=(2, 0))
    made.append(np.zeros((2, 4, 5, 8)), np.zeros((2, 4, 5, 8)), [3, 5])
    return made


SHOWN = {
    "forward": (OUT, "AttentionForward(out: float32 (8, 64, 16); lse: float32 (8, 64))"),
    "backward": (
        sdpa.attention_backward(X, X, X, X, *OUT),
        "AttentionGradients(query, key, value: float32 (8, 64, 16);\n"
        "    attn_mask, sinks, scale, score_args: None)",
    ),
    "jvp": (
        sdpa.attention_jvp(X, X, X, X, X, X),
        "AttentionTangent(out, out_t: float32 (8, 64, 16))",
    ),
    "double": (
        sdpa.attention_double_backward(X, X, X, X, X, X, X, *OUT),
        "AttentionSecondGradients(grad_out, query, key, value: float32 (8, 64, 16);\n"
        "    attn_mask, sinks, scale, score_args: None)",
    ),
    "statistics": (
        sdpa.attention_statistics(X, X),
        "AttentionStatistics(\n"
        "    lse, entropy, max_weight, sum_p2, sum_p3, score_mean, score_var: float32 (8, 64))",
    ),
    "received": (
        sdpa.attention_received(X, X),
        "AttentionReceived(total, largest: float32 (8, 64))",
    ),
    "additive": (
        sdpa.additive_attention_backward(X, X, X, X, *ADDITIVE, None, *ADDITIVE_OUT),
        "AdditiveGradients(query, key, value: float32 (8, 64, 16);",
    ),
    "cosine": (
        sdpa.cosine_attention_backward(X, X, X, X, *sdpa.cosine_attention_forward(X, X, X)),
        "CosineGradients(query, key, value: float32 (8, 64, 16);",
    ),
    "layer-forward": (FORWARD, "MultiHeadForward(out: float32 (2, 5, 64); saved: MultiHeadSaved)"),
    "layer-saved": (FORWARD.saved, "MultiHeadSaved(x: float32 (2, 5, 64); context: None;"),
    "layer-backward": (
        LAYER.backward(FORWARD.out, FORWARD.saved),
        "MultiHeadGradients(parameters: dict of 5; x: float32 (2, 5, 64);",
    ),
}
OBJECTS = {
    "cache": (
        cache(),
        "KVCache(batch=2, heads=4, d_k=8, d_v=8, capacity=7, dtype=float32, window=(2, 0))\n"
        "holds 3 to 5 positions of 3 to 5 appended, in 0.00358 MB",
    ),
    "empty-cache": (sdpa.KVCache(0, 4, 8, capacity=7), "KVCache(batch=0, heads=4, d_k=8,"),
    "layer": (
        LAYER,
        "MultiHeadAttention(d_model=64, heads=8, kv_heads=2, d_k=8, d_v=8, d_context=64,\n"
        "    scale='learned', dtype=float32)\n"
        "10,248 numbers in 5 parameters",
    ),
    "whole-layer": (
        sdpa.MultiHeadAttention(
            64,
            8,
            kv_heads=2,
            d_context=32,
            bias=True,
            qk_norm=True,
            rotary=True,
            rotary_interleaved=True,
            scale="learned",
            init="xavier_normal",
        ),
        "MultiHeadAttention(d_model=64, heads=8, kv_heads=2, d_k=8, d_v=8, d_context=32,",
    ),
    "table": (
        lab.Table("Widths & more", [{"d_k": 4, "variance": 1.0}, {"d_k": 64, "variance": 2.0}]),
        "Table 'Widths & more', 2 rows: d_k, variance",
    ),
    "empty-table": (lab.Table("None", []), "Table 'None', 0 rows:"),
}
ALL = SHOWN | OBJECTS


@pytest.mark.parametrize(("thing", "start"), ALL.values(), ids=ALL)
def test_a_few_lines_say_what_it_is(thing, start):
    text = repr(thing)
    assert text.startswith(start)
    lines = text.splitlines()
    assert len(lines) <= 4
    assert max(map(len, lines)) <= 88


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects the texts of cells."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("th", "td", "caption"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells[-1] += data


@pytest.mark.parametrize(("thing", "start"), ALL.values(), ids=ALL)
def test_a_notebook_shows_a_table(thing, start):
    cells = Reader(thing._repr_html_()).cells
    assert cells[0].startswith((type(thing).__name__, "Widths & more", "None"))
    if hasattr(thing, "_fields"):
        assert cells[1:4] == ["field", "dtype", "shape"]
        assert tuple(cells[4::3]) == thing._fields


@pytest.mark.parametrize(("result", "start"), SHOWN.values(), ids=SHOWN)
def test_results_are_tuples_as_before(result, start):
    assert isinstance(result, tuple)
    assert tuple(result) == tuple(getattr(result, name) for name in result._fields)
    assert repr(pickle.loads(pickle.dumps(result))) == repr(copy.copy(result)) == repr(result)
    assert result._replace(**{result._fields[0]: None})[0] is None


def test_anything_can_be_in_a_field():
    result = sdpa.AttentionForward("<b>" + "long " * 100, np.arange(3))
    assert repr(result).count("\n") <= 3
    assert "int64 (3,)" in repr(result)
    assert Reader(result._repr_html_()).cells[5].startswith("'<b>long")
    assert repr(sdpa.AttentionForward(*[result] * 2)).startswith("AttentionForward(out, lse: ")


def test_ipython_prints_what_python_prints():
    pretty = pytest.importorskip("IPython.lib.pretty")
    for thing, _ in ALL.values():
        assert pretty.pretty(thing) == repr(thing)


def test_the_caption_of_a_narrow_table_is_one_line(browser):
    """A caption is as wide as its table, unless it may not break."""
    page = browser.new_page()
    for shown in sdpa.MultiHeadAttention(64, 4), sdpa.KVCache(1, 4, 16, capacity=32):
        page.set_content(shown._repr_html_())
        height = page.locator("caption").bounding_box()["height"]
        page.set_content("<table><caption>A</caption><tr><td>1</td></tr></table>")
        assert height == page.locator("caption").bounding_box()["height"]
    page.close()


def test_no_cell_of_a_table_of_the_laboratory_breaks(browser):
    """JupyterLab breaks cells at spaces rather than scroll: "0.00 [0.00, 0.06]" in three lines."""
    share = lab.Estimate(0.0, 0.0, 0.06, 9)
    table = lab.Table("Shares", [{f"share {i}": share for i in range(20)}])
    page = browser.new_page(viewport={"width": 400, "height": 400})
    page.set_content("<style>th, td { white-space: normal }</style>" + table._repr_html_())
    heights = {cell.bounding_box()["height"] for cell in page.locator("th, td").all()}
    page.set_content("<table><tr><th>1</th></tr><tr><td>1</td></tr></table>")
    assert heights == {cell.bounding_box()["height"] for cell in page.locator("th, td").all()}
    page.close()
