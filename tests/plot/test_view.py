"""The page of weights: what it holds, in numbers and in a real browser."""

import base64
import json
import re
import zlib
from html import unescape

import numpy as np
import pytest
from support.helpers import normal
from support.pages import assert_fits, assert_named, opened

import sdpa

TOKENS = ["/*SCRIPT*/", " cat", "<b>sat</b>", "</script>", "“”&amp;"]


def weights_of(rng, *shape, **options):
    x = normal(rng, shape, np.float32)
    return sdpa.attention_weights(x, x, **options)


def data_of(page):
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def unpacked(page):
    """The weights as the page reads them, by a reader of our own."""
    data = data_of(page)
    steps = np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), np.uint8)
    shape = data["heads"], data["queries"], data["keys"]
    return data["largest"] * (steps.reshape(shape) / 255.0) ** 2


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (8, 200, 16)])
def test_the_page_holds_every_weight(rng, shape):
    weights = weights_of(rng, *shape, is_causal=True)
    found = unpacked(sdpa.plot.view(weights).html)
    expected = weights.reshape(found.shape).astype(np.float64)
    assert abs(found - expected).max() <= expected.max() / 255
    roots = np.sqrt([found / expected.max(), expected / expected.max()])
    np.testing.assert_allclose(roots[0], roots[1], rtol=0, atol=0.501 / 255)
    assert (found[expected == 0] == 0).all()


def test_weights_that_are_all_zero():
    assert (unpacked(sdpa.plot.view(np.zeros((2, 3))).html) == 0).all()


def test_weights_far_below_the_largest_raise_nothing():
    with np.errstate(all="raise"):
        page = sdpa.plot.view([[1e-320, 1e300]])
    np.testing.assert_array_equal(unpacked(page.html), [[[0, 1e300]]])


def test_eight_heads_of_512_tokens_fit_whatever_they_are(rng):
    weights = rng.random((8, 512, 512)) ** 2  # bytes that do not compress
    page = sdpa.plot.view(weights, query_tokens=[f"token {i}" for i in range(512)]).html
    assert 2.7e6 < len(page.encode()) <= 3e6
    assert abs(unpacked(page) - weights).max() <= 1 / 255


@pytest.mark.parametrize("shape", [(9, 512, 512), (1500, 1500), (2, 16385)], ids=str)
def test_what_does_not_fit_is_refused(shape):
    message = (
        r"^weights: expected at most 2097152 weights .*; choose some with heads= and queries= of "
        r"sdpa\.attention_weights$"
    )
    with pytest.raises(ValueError, match=message):
        sdpa.plot.view(np.broadcast_to(np.float32(0.5), shape))


def test_refused(rng):
    with pytest.raises(ValueError, match=r"^weights: .* got \(2, 8, 4, 4\); choose one batch"):
        sdpa.plot.view(weights_of(rng, 2, 8, 4, 3))
    with pytest.raises(ValueError, match=r"^weights: expected finite numbers .* nan"):
        sdpa.plot.view(np.full((2, 2), np.nan))
    with pytest.raises(TypeError, match=r"^weights: expected an array, got .*list"):
        sdpa.plot.view([[1.0, 2.0], [1.0]])
    with pytest.raises(ValueError, match=r"^query_tokens: expected Lq = 4 texts, got 1"):
        sdpa.plot.view(weights_of(rng, 4, 3), query_tokens=["a"])
    with pytest.raises(ValueError, match=r"^query_tokens: expected texts that fit .*; cut long"):
        sdpa.plot.view(weights_of(rng, 4, 3), query_tokens=["a" * 10**6] * 4)


def test_a_notebook_shows_the_page_in_a_frame(rng, tmp_path):
    page = sdpa.plot.view(weights_of(rng, 2, 5, 4), query_tokens=TOKENS)
    (source,) = re.findall(
        r'<iframe title="Attention weights" srcdoc="([^"]*)"', page._repr_html_()
    )
    assert unescape(source) == page.html
    path = page.save(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == page.html
    assert repr(page) == "<sdpa.plot.View: heads=2, Lq=5, Lk=5; save(path) writes the page>"


def test_the_page_asks_for_nothing(rng):
    page = sdpa.plot.view(weights_of(rng, 5, 4)).html
    assert not re.search(r"https?:|\bsrc=|@import|url\(", page)


def test_tokens_are_data_not_markup(rng):
    page = sdpa.plot.view(weights_of(rng, 5, 4), query_tokens=TOKENS).html
    assert page.count("</script>") == 2
    assert data_of(page)["query_tokens"] == data_of(page)["key_tokens"] == TOKENS


# ---------------------------------------------------------------------------------- a browser


@pytest.fixture
def weights(rng):
    return weights_of(rng, 3, 5, 4, is_causal=True)


@pytest.fixture
def page(context, weights, tmp_path):
    path = sdpa.plot.view(weights, query_tokens=TOKENS).save(tmp_path / "page.html")
    with opened(context, path) as page:
        page.wait_for_selector("body[data-ready]")
        yield page


def status(page):
    """The words of the status line, and its weights by head."""
    text = re.sub(r"\s+", " ", page.locator("#status").text_content())
    return text, {int(h): float(w) for h, w in re.findall(r"head (\d+) ([\d.e-]+)", text)}


def test_the_page_fits_and_everything_has_a_name(page):
    assert_fits(page)
    assert_named(page)
    assert page.title() == "Attention weights: 3 heads, 5 queries, 5 keys"


def test_pointing_at_a_pair_tells_its_weights(page, weights):
    box = page.locator(".map canvas").nth(1).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.9)
    text, found = status(page)
    assert text.startswith("query 4 ““”&amp;” looks at key 1 “ cat”:")
    for head, weight in found.items():
        assert abs(weight - weights[head, 4, 1]) <= weights.max() / 255
    assert list(found) == [0, 1, 2]


def test_keys_move_the_pair_and_stop_at_the_ends(page):
    page.locator(".map").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("View.current") == {"i": 1, "j": 0}
    page.keyboard.press("End")
    assert page.evaluate("View.current") == {"i": 1, "j": 4}
    page.keyboard.press("Control+End")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("View.current") == {"i": 4, "j": 4}
    page.locator("#queries").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#queries").get_attribute("aria-activedescendant") == "queries-3"
    assert page.locator("#queries [aria-selected=true]").count() == 1


def test_every_weight_is_the_one_given(page, weights):
    found = page.evaluate(
        """[0, 1, 2].map((h) => [0, 1, 2, 3, 4].map((i) => [0, 1, 2, 3, 4].map((j) =>
        View.weightAt(h, i, j))))"""
    )
    assert abs(np.array(found) - weights).max() <= weights.max() / 255


def pixels(page, head):
    """The colours of a map, (Lq, Lk, 3)."""
    found = page.evaluate(
        f"""[...document.querySelectorAll(".map canvas")[{head}].getContext("2d")
        .getImageData(0, 0, 5, 5).data]"""
    )
    return np.array(found).reshape(5, 5, 4)[..., :3]


def test_maps_are_darker_or_lighter_with_the_weight(page, weights):
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    for head in range(3):
        order = np.argsort(weights[head], axis=None)
        light = pixels(page, head).mean(-1).ravel()[order]
        steps = np.diff(light)
        assert (steps >= 0).all() if dark else (steps <= 0).all()


def test_heads_are_shown_and_hidden(page):
    page.locator("#heads input").nth(1).uncheck()
    assert page.locator("figure:visible").count() == 2
    assert list(status(page)[1]) == [0, 2]
    page.get_by_role("button").click()
    assert page.locator("figure:visible").count() == 3
    page.get_by_role("button").click()
    assert page.locator("figure:visible").count() == 0
    page.get_by_role("button").click()
    assert list(status(page)[1]) == [0, 1, 2]


def test_the_page_says_how_many_lines_it_draws(page, weights):
    steps = np.rint(255 * np.sqrt(weights.astype(np.float64) / weights.max()))
    for least in (0, 64, 200):
        page.locator("#least input").fill(str(least))
        page.wait_for_timeout(100)
        drawn = ((steps > 0) & (steps >= least)).sum()
        assert page.locator("#drawn").text_content().startswith(f"{drawn} of 75 lines drawn")


def test_too_many_lines_are_not_drawn_and_the_page_says_so(context, rng, tmp_path):
    path = sdpa.plot.view(rng.random((8, 256, 256)) + 0.5).save(tmp_path / "page.html")
    with opened(context, path) as page:
        page.wait_for_selector("body[data-ready]")
        said = page.locator("#drawn").text_content()
        assert said == "524288 of 524288 weights are as large, too many lines: those of query 0."


def test_lines_have_the_colour_of_their_head(page):
    for head in (0, 2):
        page.locator("#heads input").nth(head).uncheck()
    strongest = page.evaluate(
        """(() => { const canvas = document.querySelector("#lines canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let best = [0, 0, 0, 0];
        for (let k = 0; k < data.length; k += 4) {
            if (data[k + 3] > best[3]) best = [...data.slice(k, k + 4)];
        }
        return best; })()"""
    )
    expected = page.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--head1').trim()"
    )
    np.testing.assert_allclose(strongest[:3], list(bytes.fromhex(expected[1:])), atol=3)


def test_ranks_are_sorted(page, weights):
    page.locator("#queries li").nth(4).click()
    assert page.locator("#most-title").text_content().endswith("the 5 largest of 5 weights")
    for head in range(3):
        cells = page.locator(f"#most tbody td:nth-child({head + 2})").all_text_contents()
        order = [int(cell.split()[1]) for cell in cells]
        assert (np.diff(weights[head, 4, order]) <= 2 * weights.max() / 255).all()
        assert sorted(order) == list(range(5))


def test_the_largest_page_works(context, rng, tmp_path):
    weights = rng.dirichlet(np.full(512, 0.1), (8, 512))
    path = sdpa.plot.view(weights).save(tmp_path / "page.html")
    with opened(context, path) as page:
        page.wait_for_selector("body[data-ready]")
        assert_fits(page)
        page.locator("#queries").focus()
        for _ in range(30):
            page.keyboard.press("ArrowDown")
        assert page.evaluate("View.current.i") == 30
        item, box = (page.locator(what).bounding_box() for what in ("#queries-30", "#lines"))
        assert box["y"] <= item["y"] < box["y"] + box["height"]
        found = page.evaluate("[...Array(512).keys()].map((j) => View.weightAt(7, 511, j))")
        assert abs(np.array(found) - weights[7, 511]).max() <= weights.max() / 255


def test_a_small_map_shows_the_largest_weight_of_each_pixel(context, tmp_path):
    weights = np.eye(700)
    path = sdpa.plot.view(weights).save(tmp_path / "page.html")
    with opened(context, path) as page:
        page.wait_for_selector("body[data-ready]")
        width, height, diagonal = page.evaluate(
            """(() => { const canvas = document.querySelector(".map canvas");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const at = (i) => [...data.slice(4 * i * (width + 1), 4 * i * (width + 1) + 3)];
            return [width, height, Array.from({ length: width }, (_, i) => at(i))]; })()"""
        )
        assert width == height < 700
        assert len({tuple(color) for color in diagonal}) == 1
        assert tuple(diagonal[0]) in {(0x00, 0x26, 0x3B), (0xEA, 0xF6, 0xFF)}


def test_more_heads_than_fit_are_a_click_away(context, rng, tmp_path):
    path = sdpa.plot.view(weights_of(rng, 12, 5, 4)).save(tmp_path / "page.html")
    with opened(context, path) as page:
        page.wait_for_selector("body[data-ready]")
        assert page.locator("figure:visible").count() == 8
        assert "8 of 12 heads" in page.locator("legend").text_content()
        page.locator("#heads input").nth(11).check()
        assert "9 of 12 heads" in page.locator("legend").text_content()
