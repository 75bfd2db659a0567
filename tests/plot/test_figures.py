"""The figures: what is in them, and the tiles that the kernels say they skip."""

import sys

import numpy as np
import pytest
from support.helpers import BFLOAT16, normal

import sdpa

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from sdpa.plot import _figures


def weights_of(rng, *shape, **options):
    x = normal(rng, shape, np.float32)
    return sdpa.attention_weights(x, x, **options)


# ------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(("shape", "maps"), [((5, 4), 1), ((1, 5, 4), 1), ((8, 5, 4), 8)])
def test_each_head_is_a_map_and_all_share_one_colour_bar(rng, shape, maps):
    weights = weights_of(rng, *shape)
    figure = sdpa.plot.weights(weights)
    *axes, bar = figure.axes
    assert len(axes) == maps
    for found, expected in zip(axes, weights.reshape(maps, 5, 5), strict=True):
        (image,) = found.images
        np.testing.assert_array_equal(image.get_array(), expected.astype(np.float64))
        assert image.get_clim() == (0, weights.max())
    assert bar.get_ylabel() == "weight"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_tokens_stand_on_the_axes(rng):
    tokens = ["a", "$b$", "c", "d", "e"]
    figure = sdpa.plot.weights(weights_of(rng, 5, 4), query_tokens=tokens)
    axes = figure.axes[0]
    for labels in axes.get_yticklabels(), axes.get_xticklabels():
        assert [label.get_text() for label in labels] == ["a", r"\$b\$", "c", "d", "e"]
    weights = sdpa.attention_weights(np.zeros((2, 3)), np.zeros((4, 3)))
    axes = sdpa.plot.weights(weights, key_tokens=list("wxyz")).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list("wxyz")
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")


def test_long_axes_name_some_of_their_tokens(rng):
    """As many as there is room for: no two labels touch."""
    tokens = [f"token {i}" for i in range(130)]
    for heads in 1, 8:
        figure = sdpa.plot.weights(weights_of(rng, heads, 130, 4), query_tokens=tokens)
        figure.draw_without_rendering()
        labels = figure.axes[0].get_yticklabels()
        named = [label.get_text() for label in labels]
        assert named == tokens[:: tokens.index(named[1])]
        assert len(named) > 20
        places = [label.get_window_extent().y1 for label in labels]
        # The letters of a text are about as high as 0.7 of its size.
        assert -np.diff(places).max() > 0.7 * labels[0].get_size() / 72 * figure.dpi


def test_a_map_of_more_weights_than_pixels_shows_the_largest_of_each_cell(rng):
    """A diagonal stays whole, and the colour bar says what is shown."""
    n = 500
    weights = np.zeros((4, n, n))
    weights[:] = np.eye(n)
    figure = sdpa.plot.weights(weights, mask=np.ones((n, n), bool))
    *axes, bar = figure.axes
    (image,) = axes[0].images
    size = int(bar.get_ylabel().removeprefix("largest weight of up to ").split(" x ")[0])
    assert size > 1
    np.testing.assert_array_equal(image.get_array(), np.eye(-(-n // size)))
    assert axes[0].get_xlim() == (-0.5, n - 0.5)
    assert axes[0].get_ylim() == (n - 0.5, -0.5)
    figure.draw_without_rendering()
    box = axes[0].get_window_extent()
    assert min(box.width, box.height) >= n / size  # each cell has its pixel


def edge_colours(figure, axes):
    """The colours of the pixels around the middle of each edge of axes, 0 to 255."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3]  # from below, as boxes are
    box = axes.get_window_extent()
    x, y = int((box.x0 + box.x1) / 2), int((box.y0 + box.y1) / 2)
    return [
        pixels[y, int(box.x0) - 3 : int(box.x0) + 4],
        pixels[y, int(box.x1) - 3 : int(box.x1) + 4],
        pixels[int(box.y0) - 3 : int(box.y0) + 4, x],
        pixels[int(box.y1) - 3 : int(box.y1) + 4, x],
    ]


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("n", [2000, 2029])
def test_the_first_and_the_last_of_many_weights_are_seen(heads, n):
    """Where a cell has one pixel: not under the frame, and not less than a pixel at the end."""
    weights = np.zeros((heads, n, n))
    weights[:, [0, -1]] = weights[:, :, [0, -1]] = 1
    figure = sdpa.plot.weights(weights)
    *maps, _ = figure.axes
    for axes in maps:
        (image,) = axes.images
        largest = image.to_rgba(np.ones(1), bytes=True)[0, :3]
        for colours in edge_colours(figure, axes):
            assert (colours == largest).all(axis=-1).any()


@pytest.mark.parametrize("shape", [(1, 9), (9, 1)])
def test_axes_count_in_integers(shape):
    """Of one query or one key, too."""
    for figure in (
        sdpa.plot.weights(np.ones(shape)),
        sdpa.plot.pattern(shape),
        sdpa.plot.statistics(sdpa.attention_statistics(np.ones((shape[0], 2)), np.ones((3, 2)))),
    ):
        for axis in figure.axes[0].xaxis, figure.axes[0].yaxis:
            places = axis.get_ticklocs()
            np.testing.assert_array_equal(places, np.round(places))


def hatched(axes, shape):
    """The pairs whose centres lie in what is hatched."""
    (patch,) = [patch for patch in axes.patches if patch.get_gid() == "forbidden"]
    assert patch.get_hatch()
    centres = np.stack(np.meshgrid(*map(np.arange, shape[::-1])), -1).reshape(-1, 2)
    return patch.get_path().contains_points(centres).reshape(shape)


@pytest.mark.parametrize("kind", [bool, np.float32, BFLOAT16])
def test_forbidden_pairs_are_hatched(rng, kind):
    visible = rng.random((3, 5, 6)) < 0.5
    visible[1] = True
    mask = visible if kind is bool else np.where(visible, 0, -np.inf).astype(kind)
    weights = sdpa.attention_weights(np.zeros((3, 5, 2)), np.zeros((3, 6, 2)), attn_mask=visible)
    axes = sdpa.plot.weights(weights, mask=mask).axes
    np.testing.assert_array_equal(hatched(axes[0], (5, 6)), ~visible[0])
    assert not axes[1].patches
    np.testing.assert_array_equal(hatched(axes[2], (5, 6)), ~visible[2])


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32, np.float64])
def test_a_number_below_the_range_of_the_arithmetic_forbids(dtype):
    x, mask = np.zeros((2, 3), dtype), np.array([[0, -1e39], [-np.inf, 0]])
    weights = sdpa.attention_weights(x, x[:2], attn_mask=mask)
    axes = sdpa.plot.weights(weights, mask=mask).axes[0]
    expected = [[False, dtype != np.float64], [True, False]]
    np.testing.assert_array_equal(hatched(axes, (2, 2)), expected)


def test_one_head_can_be_drawn_in_axes_that_exist(rng):
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert sdpa.plot.weights(weights_of(rng, 5, 4), ax=right) is figure
    assert len(right.images) == 1
    assert not left.images


def test_weights_that_are_all_zero_can_be_drawn():
    assert sdpa.plot.weights(np.zeros((2, 3))).axes[0].images[0].get_clim() == (0, 1)


NAN = np.full((2, 3, 3), 0.5)
NAN[1, 2, 0] = np.nan
REFUSED = {
    "batch": (
        {"weights": np.zeros((2, 8, 3, 3))},
        r"weights: expected \(Lq, Lk\) or \(heads, Lq, Lk\), got \(2, 8, 3, 3\); "
        r"choose one batch entry, weights\[0\]",
    ),
    "two-batches": ({"weights": np.zeros((2, 2, 8, 3, 3))}, r"weights: .*weights\[0, 0\]"),
    "row": ({"weights": np.zeros(3)}, r"weights: expected .* got \(3,\)"),
    "empty": ({"weights": np.zeros((0, 3))}, r"weights: expected .* got \(0, 3\)"),
    "nan": ({"weights": NAN}, "weights: expected finite .* nan in head 1, query 2, key 0"),
    "negative": ({"weights": -np.eye(3)}, "weights: expected .* from 0 on, got -1.0 in head 0"),
    "texts": ({"weights": np.array([["a"]])}, "weights: expected numbers, got <U1"),
    "numbers-as-texts": ({"weights": np.array([["1"]])}, "weights: expected numbers, got <U1"),
    "complex": ({"weights": np.eye(3) + 0j}, "weights: expected numbers, got complex128"),
    "nothing": ({"weights": None}, "weights: expected numbers, got object"),
    "ragged": ({"weights": [[1.0, 2.0], [1.0]]}, "weights: expected an array, got .*list"),
    "masked": (
        {"weights": np.ma.array(np.eye(3))},
        "weights: expected a plain array",
    ),
    "no-texts": ({"query_tokens": 3}, "query_tokens: expected a sequence of 3 texts, got 3"),
    "mask-ragged": ({"mask": [[True], []]}, "mask: expected an array, got .*list"),
    "no-axes": ({"ax": 1}, r"ax: expected matplotlib\.axes\.Axes, got 1"),
    "one-text": ({"query_tokens": "abc"}, "query_tokens: expected a sequence of 3 texts"),
    "bytes": ({"query_tokens": b"abc"}, "query_tokens: expected a sequence of 3 texts, got b'abc'"),
    "set": ({"key_tokens": {"a", "b", "c"}}, "key_tokens: expected a sequence of 3 texts, got {"),
    "text-of-an-array": (
        {"query_tokens": np.array("abc")},
        "query_tokens: expected a sequence of 3 texts, got array",
    ),
    "few-tokens": ({"query_tokens": ["a"]}, "query_tokens: expected Lq = 3 texts, got 1"),
    "key-tokens": ({"key_tokens": ["a"]}, "key_tokens: expected Lk = 3 texts, got 1"),
    "mask-shape": ({"mask": np.ones((2, 3), bool)}, r"mask: expected a shape that broadcasts"),
    "mask-dtype": ({"mask": np.ones((3, 3), int)}, "mask: expected bool .* got int64"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        sdpa.plot.weights(**{"weights": np.eye(3)} | given)


def test_axes_for_several_heads_are_refused(rng):
    with pytest.raises(ValueError, match=r"^ax: expected None for 2 heads, got Axes"):
        sdpa.plot.weights(weights_of(rng, 2, 5, 4), ax=Figure().subplots())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: sdpa.plot.weights(np.eye(3)),
        lambda: sdpa.plot.statistics(sdpa.attention_statistics(np.eye(3), np.eye(3))),
        lambda: sdpa.plot.pattern((3, 3)),
    ],
    ids=["weights", "statistics", "pattern"],
)
def test_without_matplotlib_the_message_says_what_to_install(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^sdpa\.plot needs matplotlib .*pip install matplotlib"):
        draw()


# ---------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("heads", [(), (3,)])
def test_statistics_are_maps_of_heads_and_positions(rng, heads):
    x = normal(rng, (*heads, 7, 4), np.float32)
    rows = sdpa.attention_statistics(x, x)
    figure = sdpa.plot.statistics(rows)
    for axes, values in zip(figure.axes, (rows.entropy, rows.max_weight), strict=False):
        np.testing.assert_allclose(axes.images[0].get_array(), values.reshape(-1, 7))
    assert [axes.get_title() for axes in figure.axes[:2]] == ["entropy, nats", "largest weight"]


def test_statistics_of_more_queries_than_pixels(rng):
    x = normal(rng, (2, 1500, 4), np.float32)
    rows = sdpa.attention_statistics(x, x)
    entropy, largest, *_ = sdpa.plot.statistics(rows).axes
    assert entropy.get_title() == "mean entropy, nats, each of 3 queries"
    assert largest.get_title() == "largest weight, each of 3 queries"
    blocks = rows.entropy.reshape(2, 500, 3).astype(np.float64)
    np.testing.assert_allclose(entropy.images[0].get_array(), blocks.mean(axis=-1))
    blocks = rows.max_weight.reshape(2, 500, 3)
    np.testing.assert_array_equal(largest.images[0].get_array(), blocks.max(axis=-1))
    assert entropy.get_xlim() == (-0.5, 1499.5)


def test_entropies_that_are_all_zero_have_the_colour_of_zero(rng):
    x = normal(rng, (2, 4, 3), np.float32)
    axes = sdpa.plot.statistics(sdpa.attention_statistics(x, x[:, :1])).axes[0]
    assert axes.images[0].get_clim() == (0, 1)


def test_statistics_refused(rng):
    with pytest.raises(TypeError, match=r"^rows: expected the result of .*, got .* ndarray"):
        sdpa.plot.statistics(np.eye(3))
    x = normal(rng, (2, 3, 4, 5), np.float32)
    with pytest.raises(ValueError, match=r"^rows: expected .* got \(2, 3, 4\); choose one batch"):
        sdpa.plot.statistics(sdpa.attention_statistics(x, x))
    x = np.full((3, 2), np.nan)
    with pytest.raises(ValueError, match=r"^rows: expected numbers, got nan"):
        sdpa.plot.statistics(sdpa.attention_statistics(x, x))


# ------------------------------------------------------------------------------------- pattern


def counted(visible, rows, columns):
    """The kinds of the tiles, from all pairs."""
    n_q, n_k = visible.shape
    tiles = [
        [visible[i : i + rows, j : j + columns] for j in range(0, n_k, columns)]
        for i in range(0, n_q, rows)
    ]
    return np.array([[int(tile.any()) + int(tile.all()) for tile in row] for row in tiles])


def visible_pairs(n_q, n_k, options):
    """The pairs that have any weight, from the definition."""
    given = {"is_causal", "window", "key_lengths", "query_offset", "attn_mask", "where"}
    zeros = [np.zeros((n, 1)) for n in (n_q, n_k)]
    biased = sdpa.reference.attention_weights(
        *zeros, stage="biased", **{name: options[name] for name in given & options.keys()}
    )
    return biased > -np.inf


SHAPES = [(1, 1), (1, 4096), (7, 5), (48, 128), (200, 300), (301, 129), (500, 1030)]
OPTIONS = {
    "none": lambda rng, n_q, n_k: {},
    "causal": lambda rng, n_q, n_k: {"is_causal": "upper_left"},
    "lower-right": lambda rng, n_q, n_k: {"is_causal": "lower_right"},
    "window": lambda rng, n_q, n_k: {"window": (n_k // 4, n_k // 8)},
    "narrow": lambda rng, n_q, n_k: {"window": (0, 0)},
    "offset": lambda rng, n_q, n_k: {"is_causal": True, "query_offset": n_k // 3},
    "before": lambda rng, n_q, n_k: {"is_causal": True, "query_offset": -n_q // 2},
    "lengths": lambda rng, n_q, n_k: {"key_lengths": n_k // 2},
    "no-key": lambda rng, n_q, n_k: {"key_lengths": 0},
    "random": lambda rng, n_q, n_k: {"attn_mask": rng.random((n_q, n_k)) < 0.999},
    "blocks": lambda rng, n_q, n_k: {
        "attn_mask": np.kron(rng.random((n_q // 64 + 1, n_k // 64 + 1)) < 0.5, np.ones((64, 64)))[
            :n_q, :n_k
        ].astype(bool)
    },
    "rows": lambda rng, n_q, n_k: {"attn_mask": rng.random((n_q, 1)) < 0.5},
    "columns": lambda rng, n_q, n_k: {"attn_mask": np.arange(n_k) % 300 < 140},
    "floats": lambda rng, n_q, n_k: {
        "attn_mask": np.where(np.arange(n_k) % 300 < 140, np.float32(0.5), -np.float32(np.inf))
    },
    "alibi": lambda rng, n_q, n_k: {"alibi_slopes": 0.5, "is_causal": "upper_left"},
    "invariant": lambda rng, n_q, n_k: {"invariant": True, "window": (n_k // 4, 0)},
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_are_those_that_hold_visible_pairs(rng, isa, option, shape):
    options = OPTIONS[option](rng, *shape)
    kinds, tile = _figures._tiles(*shape, options)
    np.testing.assert_array_equal(kinds, counted(visible_pairs(*shape, options), *tile))


@pytest.mark.parametrize("shape", [(200, 300), (301, 700)], ids=str)
def test_of_two_masks_a_tile_is_never_skipped_that_holds_a_pair(rng, isa, shape):
    block = np.kron(rng.random((16, 16)) < 0.5, np.ones((64, 64), bool)) > 0
    options = {
        "attn_mask": block[: shape[0], : shape[1]],
        "where": block.T[: shape[0], : shape[1]],
        "is_causal": True,
        "window": (100, None),
    }
    kinds, tile = _figures._tiles(*shape, options)
    expected = counted(visible_pairs(*shape, options), *tile)
    assert (expected[kinds == 0] == 0).all()
    assert (expected[kinds == 2] == 2).all()
    assert (kinds == 0).any()


def test_heads_of_several_problems_have_their_own_tiles(rng):
    query, key = np.zeros((3, 2, 200, 128)), np.zeros((3, 2, 300, 128))
    lengths = np.array([300, 0, 130])
    kinds, (rows, columns) = sdpa._core._pattern(query, key, key_lengths=lengths)
    for entry, length in zip(kinds, lengths, strict=True):
        visible = np.broadcast_to(np.arange(300) < length, (200, 300))
        for head in entry:
            np.testing.assert_array_equal(head, counted(visible, rows, columns))


def test_the_pattern_shows_the_tiles():
    figure = sdpa.plot.pattern((500, 700), is_causal=True)
    kinds, (rows, columns) = _figures._tiles(500, 700, {"is_causal": True})
    (mesh,) = figure.axes[0].collections
    np.testing.assert_array_equal(mesh.get_array().reshape(kinds.shape), kinds)
    title = (
        f"{(kinds > 0).sum()} of {kinds.size} tiles of {rows} queries by {columns} keys computed"
    )
    assert figure.axes[0].get_title() == title
    counts = [text.get_text().rpartition(": ")[2] for text in figure.legends[0].get_texts()]
    assert counts == [str((kinds == kind).sum()) for kind in range(3)]


def test_of_more_tiles_than_pixels_none_that_is_computed_vanishes():
    """A cell shows the most of its tiles, those at the edges too; the legend fits the figure."""

    def border(b, h, q, k):
        return (q < 24) | (k < 128) | (q > 29990) | (k > 79990)

    figure = sdpa.plot.pattern((30000, 80000), mask_mod=border)
    (axes,), (legend,) = figure.axes, figure.legends
    assert legend.get_title().get_text().startswith("each cell: the most of ")
    colours = [255 * np.array(to_rgb(color)) for color in _figures.KIND_COLORS[1:]]
    for found in edge_colours(figure, axes):
        assert any((abs(found - color) <= 1).all(axis=-1).any() for color in colours)
    counts = [int(text.get_text().rpartition(": ")[2]) for text in legend.get_texts()]
    title = axes.get_title().split()
    assert int(title[0]) == counts[1] + counts[2]
    assert int(title[2]) == sum(counts)
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_the_pattern_of_a_function():
    """Documents as a function leave the tiles that they leave as an array."""
    documents = np.arange(700) // 130

    def same(b, h, q, k, documents):
        return documents[q] == documents[k]

    figure = sdpa.plot.pattern((700, 700), mask_mod=same, mask_args=(documents,))
    (mesh,) = figure.axes[0].collections
    _, (rows, columns) = _figures._tiles(700, 700, {"mask_mod": same, "mask_args": (documents,)})
    expected = counted(documents[:, None] == documents, rows, columns)
    np.testing.assert_array_equal(mesh.get_array().reshape(expected.shape), expected)


def test_the_pattern_is_drawn_where_it_is_told():
    axes = Figure().subplots(1, 2)
    figure = sdpa.plot.pattern((500, 700), is_causal=True, ax=axes[1])
    assert figure is axes[0].figure
    alone = sdpa.plot.pattern((500, 700), is_causal=True)
    assert axes[1].get_title() == alone.axes[0].get_title()
    texts = [text.get_text() for text in axes[1].get_legend().get_texts()]
    assert texts == [text.get_text() for text in alone.legends[0].get_texts()]


def test_pattern_refused():
    with pytest.raises(TypeError, match=r"^shape: expected \(Lq, Lk\), got 3"):
        sdpa.plot.pattern(3)
    with pytest.raises(ValueError, match=r"^shape: expected two positive integers.* got \(0, 3\)"):
        sdpa.plot.pattern((0, 3))
    with pytest.raises(ValueError, match=r"^attn_mask: expected a shape that broadcasts"):
        sdpa.plot.pattern((3, 3), attn_mask=np.ones((2, 3, 3), bool))
    with pytest.raises(TypeError, match=r"^ax: expected matplotlib\.axes\.Axes, got <Figure"):
        sdpa.plot.pattern((3, 3), ax=Figure())
    for name, hint in {"causal": r"\. Did you mean 'is_causal'\?", "cu_seqlens_q": ""}.items():
        refused = rf"^pattern\(\) got an unexpected keyword argument '{name}'{hint}$"
        with pytest.raises(TypeError, match=refused):
            sdpa.plot.pattern((3, 3), **{name: [0, 3]})
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: expected None"):
        sdpa._core._pattern(
            np.zeros((4, 1, 8)), np.zeros((4, 1, 8)), cu_seqlens_q=[0, 2, 4], cu_seqlens_k=[0, 2, 4]
        )
