"""The explorer in a real browser: its knobs turn, the scale and the steps play, the map tells."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from support.explorer import current, go
from support.pages import opened

from sdpa_lab import report


def test_an_address_is_a_state_and_the_reverse(page):
    page.locator("[name=scale]").select_option("one")
    page.locator("[name=input]").select_option("digits")
    page.locator("[name=seed]").fill("42")
    address = page.evaluate("location.hash")
    text = page.locator(".summary").inner_text()
    page.reload()
    assert page.evaluate("location.hash") == address
    assert page.locator("[name=scale]").input_value() == "one"
    assert page.locator("[name=seed]").input_value() == "42"
    assert page.locator(".summary").inner_text() == text
    page.get_by_role("button", name="Next draw").click()
    assert page.locator("[name=seed]").input_value() == "43"
    assert page.locator(".summary").inner_text() != text


def test_an_address_that_makes_no_sense_is_brought_into_range(page):
    go(page, "#d_k=100&n=1e9&rho=7&seed=123&scale=toString&input=<b>")
    state = page.evaluate("Explorer.current().state")
    assert state == {
        **{"input": "random", "scale": "sqrt", "d_k": 128},
        **{"n": 4, "rho": 1, "seed": 123},
    }


def test_the_keyboard_reaches_and_turns_every_knob(page):
    reached = []
    page.locator("[name=scale]").focus()
    for _ in range(9):
        reached.append(page.evaluate("document.activeElement.name"))
        page.keyboard.press("Tab")
    assert reached == ["scale", "factor", "play", "input", "d_k", "n", "rho", "seed", "redraw"]
    page.locator("[name=d_k]").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("Explorer.current().state.d_k") == 128
    assert "d_k=128" in page.evaluate("location.hash")
    assert page.locator("[name=d_k]").get_attribute("aria-valuetext") == "128"


def test_pictures_change_with_the_knobs(page):
    def seen():
        return page.evaluate(
            "[...document.querySelectorAll('.panels svg')].map((e) => e.innerHTML)"
            ".concat(document.querySelector('canvas').toDataURL())"
        )

    before = seen()
    page.locator("[name=scale]").select_option("one")
    assert all(a != b for a, b in zip(before, seen(), strict=True))
    circles = page.locator("circle.point")
    assert circles.count() == 2


def test_the_setting_before_stays_as_a_ghost(page):
    assert page.locator(".ghost").count() == 0
    assert not page.locator(".maps .before").is_visible()
    before = [f"{row['rms']:.3g}" for row in page.evaluate("Explorer.current().gradients")]
    weights = page.evaluate("document.querySelector('.weights').toDataURL()")
    places = [circle.get_attribute("cx") for circle in page.locator("circle.point").all()]
    page.locator("[name=scale]").select_option("one")
    assert page.locator(".histogram path.ghost").count() == 1
    ghosts = [circle.get_attribute("cx") for circle in page.locator("circle.ghost").all()]
    assert ghosts == places
    assert [circle.get_attribute("cx") for circle in page.locator("circle.point").all()] != places
    assert page.evaluate("document.querySelector('.before canvas').toDataURL()") == weights
    assert page.locator(".gradients td:nth-child(3)").all_inner_texts() == before
    assert "scale 1/√d_k, d_k 64" in page.locator(".previous").inner_text()


def test_one_ghost_for_all_of_a_turn(page):
    """A slider that is dragged reports every step; the ghost is where it started."""
    for value in (7, 8, 9):
        page.locator("[name=d_k]").evaluate(
            """(e, value) => {
            e.value = value;
            e.dispatchEvent(new Event("input", {bubbles: true}));
            }""",
            value,
        )
    assert page.evaluate("Explorer.current().state.d_k") == 512
    assert "d_k 64" in page.locator(".previous").inner_text()
    page.locator("[name=d_k]").dispatch_event("change")
    page.get_by_role("button", name="Next draw").click()
    assert "d_k 512, n 16, correlation 0.00, seed 0" in page.locator(".previous").inner_text()


def test_a_ghost_much_wider_than_the_scores_is_cut(page):
    """An outline without a point would be an error, which the fixture sees."""
    go(page, "#scale=4&d_k=512&seed=1")
    go(page, "#scale=0.001&d_k=4&seed=2")
    left, right = page.evaluate(
        """() => { const box = document.querySelector(".histogram .ghost").getBBox();
        return [box.x, box.x + box.width]; }"""
    )
    assert left == pytest.approx(46, abs=1)
    assert right == pytest.approx(388, abs=1)


@pytest.mark.parametrize(
    ("address", "density", "curves"),
    [
        ("#scale=one&seed=3", 1, 2),
        ("#rho=0.5&seed=3", 1, 0),
        ("#input=digits&seed=3", 0, 0),
    ],
)
def test_laws_are_drawn_only_where_they_apply(page, address, density, curves):
    go(page, address)
    assert page.locator(".histogram .law").count() == density
    assert page.locator(".entropy .law, .jacobian .law").count() == curves
    assert page.locator(".entropy .reference, .jacobian .reference").count() == 2 - curves
    captions = " ".join(page.locator(".panels figcaption").all_inner_texts())
    assert ("No law is drawn" in captions) == (density == 0)
    assert captions.count("The law does not apply") == 2 - curves


# ------------------------------------------------------------------------------ the scale plays


def scale(page):
    return page.evaluate("Explorer.current().scale")


def test_the_slider_takes_every_scale(page):
    slider = page.locator("[name=factor]")
    assert float(slider.input_value()) == math.log2(1 / 8)
    slider.fill("-1.737")
    assert scale(page) == 0.3
    assert page.locator("[name=scale]").input_value() == "own"
    assert slider.get_attribute("aria-valuetext") == "0.300"
    slider.dispatch_event("change")
    assert "scale=0.3&" in page.evaluate("location.hash")
    page.reload()
    assert scale(page) == 0.3
    # A scale of the slider stays where the others turn; a named one turns with d_k.
    page.locator("[name=d_k]").fill("8")
    assert scale(page) == 0.3
    page.locator("[name=scale]").select_option("sqrt")
    assert scale(page) == 1 / 16
    assert float(slider.input_value()) == -4
    assert "scale by" not in page.locator(".previous").inner_text()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("1e9", 4), ("1e-9", 2**-10), ("-1", 1 / 8), ("nan", 1 / 8), ("0x", 1 / 8)],
)
def test_a_scale_of_the_address_is_brought_into_range(page, address, expected):
    go(page, f"#scale={address}&seed=3")
    assert scale(page) == pytest.approx(expected, rel=1e-3)


def test_the_scale_plays_and_pauses(page):
    play = page.get_by_role("button", name="Play", exact=True)
    start = scale(page)
    play.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => Explorer.current().scale > 0.2")
    assert page.locator(".summary").get_attribute("aria-live") == "off"
    page.keyboard.press("Enter")
    assert page.locator(".summary").get_attribute("aria-live") == "polite"
    paused = scale(page)
    assert paused > start
    page.wait_for_timeout(200)
    assert scale(page) == paused
    assert f"scale={paused}" in page.evaluate("location.hash")
    # One ghost for all of the play, where it began.
    assert "scale 1/√d_k" in page.locator(".previous").inner_text()
    page.locator("[name=scale]").select_option("one")
    assert f"scale {paused}" in page.locator(".previous").inner_text()


def test_playing_ends_at_the_largest_and_begins_again_at_the_smallest(page):
    go(page, "#scale=3.9&seed=1")
    play = page.locator("[name=play]")
    play.click()
    page.wait_for_function("() => Explorer.current().scale === 4")
    page.wait_for_function("() => document.querySelector('[name=play]').textContent === 'Play'")
    play.click()
    page.wait_for_function("() => Explorer.current().scale < 0.01")
    page.locator("[name=n]").press("ArrowRight")  # another knob pauses
    assert play.inner_text() == "Play"


def test_less_motion_plays_by_octaves_and_leaps_over_steps(browser, explorer_path):
    context = browser.new_context(offline=True, reduced_motion="reduce")
    with opened(context, explorer_path) as page:
        page.locator("[name=play]").click()
        page.wait_for_function("() => Explorer.current().scale === 0.25")
        page.locator("[name=play]").click()
        page.get_by_role("button", name="Play the steps").click()
        assert page.evaluate("Steps.place()") == 0
    context.close()


def test_a_long_drag_leaves_the_address_alone(page):
    """Chromium takes 200 addresses in half a minute, and complains about more."""
    page.evaluate(
        """() => { const slider = document.querySelector("[name=factor]");
        for (let k = 0; k < 220; k++) {
          slider.value = -10 + k / 22;
          slider.dispatchEvent(new Event("input", {bubbles: true}));
        } }"""
    )
    assert page.evaluate("location.hash") == ""
    page.locator("[name=factor]").dispatch_event("change")
    assert "scale=" in page.evaluate("location.hash")


# ------------------------------------------------------------------ from products to weights

BARS = """() => [...document.querySelectorAll(".steps rect")].map((e) => ({
    kind: e.getAttribute("class"),
    ...Object.fromEntries(["x", "y", "width", "height"].map((a) => [a, +e.getAttribute(a)]))}))"""


def at_step(page, name, place):
    page.locator(".steps").get_by_role("radio", name=name, exact=True).check()
    page.wait_for_function("(place) => Steps.place() === place", arg=place)
    return page.evaluate(BARS)


def proportional(bars, values):
    """Bars rise by what the values say, in one unit; the least is half a pixel high."""
    heights, values = np.array([bar["height"] for bar in bars]), np.abs(values)
    unit = heights.max() / values.max()
    np.testing.assert_allclose(heights, np.maximum(unit * values, 0.5), atol=0.02)


def test_products_become_a_sum_a_score_and_a_weight(page):
    go(page, "#scale=0.4&d_k=16&n=8&seed=6")
    page.locator(".map").press("ArrowDown")
    page.locator(".map").press("ArrowRight")
    page.locator(".map").press("ArrowRight")
    found = current(page)
    query, key = found["operands"]["q"][1], found["operands"]["k"][2]
    products = query * key

    bars = at_step(page, "products", 0)
    assert {bar["kind"] for bar in bars} == {"chosen"}
    assert len(bars) == 16
    proportional(bars, products)
    # All rise from, or hang from, one line.
    zero = {
        round(bar["y"] + (bar["height"] if x > 0 else 0), 1)
        for bar, x in zip(bars, products, strict=True)
        if bar["height"] > 0.5
    }
    assert len(zero) == 1

    bars = at_step(page, "sum", 1)
    proportional(bars, products)
    # Each begins where the one before has ended.
    for (a, b), (x, y) in zip(pairwise(bars), pairwise(products), strict=True):
        end = a["y"] + (a["height"] if x < 0 else 0)
        begin = b["y"] + (b["height"] if y > 0 else 0)
        assert end == pytest.approx(begin, abs=0.52)
    assert f"{products.sum():.3g}" in page.locator(".said").inner_text()
    assert page.locator(".steps .law").count() == 2

    for name, place, values in (
        ("scores", 2, found["result"]["s"][1]),
        ("softmax", 3, found["result"]["p"][1]),
    ):
        bars = at_step(page, name, place)
        assert [bar["kind"] for bar in bars] == ["bar"] * 2 + ["chosen"] + ["bar"] * 5
        proportional(bars, values)
    assert f"{found['result']['p'][1, 2]:.3f} for key 2" in page.locator(".said").inner_text()


def test_the_row_becomes_one_bar_as_the_scale_grows(page):
    heights = []
    for address in ("0.001", "0.125", "4"):
        go(page, f"#scale={address}&seed={len(heights) + 1}")
        heights.append(max(bar["height"] for bar in page.evaluate(BARS)))
    full = 240 - 24 - 10
    assert heights[0] == pytest.approx(full / 16, rel=0.02)
    assert heights[0] < heights[1] < heights[2]
    assert heights[2] > 0.95 * full


def test_the_steps_play(page):
    button = page.get_by_role("button", name="Play the steps")
    button.click()
    assert button.inner_text() == "Pause"
    for place in (0.5, 1.5, 2.5):
        page.wait_for_function("(place) => Steps.place() > place", arg=place)
    page.wait_for_function("() => Steps.place() === 3")
    assert button.inner_text() == "Play"
    button.click()
    page.wait_for_function("() => Steps.place() > 0.7 && Steps.place() < 3")
    button.click()
    assert page.evaluate("Number.isInteger(Steps.place())")


def test_the_law_of_the_sum_is_drawn_only_where_it_applies(page):
    for address in ("#rho=0.5&seed=3", "#input=digits&seed=4"):
        go(page, address)
        at_step(page, "sum", 1)
        assert page.locator(".steps .law").count() == 0
        assert "law" not in page.locator(".said").inner_text()
        at_step(page, "softmax", 3)


# -------------------------------------------------------------------------------- the map


def test_the_map_tells_the_pair_under_the_pointer(page):
    found = current(page)
    box = page.locator(".map").bounding_box()
    page.locator(".map").hover(
        position={"x": box["width"] * 7.5 / 16, "y": box["height"] * 3.5 / 16}
    )
    assert page.evaluate("Explorer.pair()") == {"i": 3, "j": 7}
    q, k = found["operands"]["q"][3], found["operands"]["k"][7]
    s, p = found["result"]["s"][3, 7], found["result"]["p"][3, 7]
    said = f"Query 3, key 7: q·k = {q @ k:.3g}, score {s:.3g}, weight {p:.3f}"
    assert page.locator(".pair").inner_text() == said
    assert "key 7" in page.locator(".said").inner_text()
    row = page.locator(".map .row").bounding_box()
    assert row["y"] == pytest.approx(box["y"] + box["height"] * 3 / 16, abs=1)
    assert row["height"] == pytest.approx(box["height"] / 16, abs=1)


def test_keys_move_over_the_map_and_stay_in_it(page):
    at = page.locator(".map")
    for key, expected in (
        ("ArrowUp", (0, 0)),
        ("ArrowDown", (1, 0)),
        ("End", (1, 15)),
        ("ArrowRight", (1, 15)),
        ("Home", (1, 0)),
        ("ArrowRight", (1, 1)),
    ):
        at.press(key)
        assert page.evaluate("Explorer.pair()") == dict(zip("ij", expected, strict=True)), key
    at.press("End")
    page.locator("[name=n]").press("ArrowLeft")  # of the pair, what is left
    assert page.evaluate("Explorer.pair()") == {"i": 1, "j": 7}


def test_other_draws_scatter_as_much_as_the_table_says(page):
    """A fresh draw lies within the range of 38 of 40 with the probability 38/41."""
    inside = dict.fromkeys("SQKV", 0)
    seeds, probability = 20, 38 / 41
    for seed in range(1, seeds + 1):
        go(page, f"#scale=one&d_k=8&n=4&seed={seed}")
        page.wait_for_function("() => 'settled' in document.getElementById('explorer').dataset")
        rows = page.evaluate("Explorer.current().gradients")
        cells = page.locator(".gradients .scatter").all_inner_texts()
        for row, cell in zip(rows, cells, strict=True):
            low, high = map(float, cell.split(" – "))
            inside[row["to"]] += low <= float(f"{row['rms']:.3g}") <= high
    for to, n in inside.items():
        error = math.sqrt(probability * (1 - probability) / seeds)
        assert abs(n / seeds - probability) < 5 * error, to


# ------------------------------------------------------------------------------- on a phone


def test_knobs_stay_beside_the_pictures(context, explorer_path):
    with opened(context, explorer_path) as page:
        narrow = page.viewport_size["width"] == 390
        assert page.locator(".more summary").is_visible() == narrow
        assert page.locator("[name=d_k]").is_visible() != narrow
        for selector in (".steps svg", ".map", ".histogram", ".jacobian", ".gradients"):
            page.locator(selector).evaluate("(e) => e.scrollIntoView({block: 'end'})")
            knobs = page.locator(".knobs").bounding_box()
            assert knobs["y"] >= 0
            picture = page.locator(selector).bounding_box()
            assert picture["y"] >= knobs["y"] + knobs["height"] - 1, selector
        page.locator("[name=scale]").select_option("one")
        assert scale(page) == 1
        if narrow:
            page.locator(".more summary").press("Enter")
            knobs = page.locator(".knobs").bounding_box()
            assert knobs["y"] >= 0
            assert knobs["height"] < 0.45 * page.viewport_size["height"]
            page.locator("[name=d_k]").press("ArrowRight")
            assert "d_k 128" in page.locator(".more summary").inner_text()


def test_keys_reach_nothing_that_the_knobs_cover(context, explorer_path):
    with opened(context, explorer_path) as page:
        covered = """() => { const knobs = document.querySelector(".knobs").getBoundingClientRect();
            const e = document.activeElement, box = e.getBoundingClientRect();
            const apart = box.top >= knobs.bottom - 1 || box.bottom <= knobs.top;
            return e === document.body || e.closest(".knobs") || apart ? null : e.outerHTML; }"""
        page.locator("[name=scale]").focus()
        reached = set()
        for key in ["Tab"] * 12 + ["Shift+Tab"] * 12:
            page.keyboard.press(key)
            assert page.evaluate(covered) is None
            reached.add(page.evaluate("document.activeElement.className"))
        assert {"map", "scroll"} <= reached


def test_knobs_stick_below_the_links_of_a_report(context, tmp_path):
    nav = "<nav><a href='#explorer'>Explorer</a></nav>"
    html = (
        report.explorer()
        .replace("<main>", f"<main>{nav}")
        .replace("</main>", "<p style='height: 60rem'>below</p></main>")
    )
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    with opened(context, path) as page:
        page.locator(".gradients").scroll_into_view_if_needed()
        nav, knobs = (page.locator(name).bounding_box() for name in ("nav", ".knobs"))
        assert knobs["y"] == pytest.approx(nav["y"] + nav["height"], abs=1)
        # Where the explorer ends the knobs leave behind the links, not over them.
        page.locator(".explorer").evaluate("(e) => scrollTo(0, e.offsetTop + e.offsetHeight - 40)")
        above = "document.elementFromPoint(innerWidth / 2, 10).closest('nav, form')?.tagName"
        assert page.evaluate(above) == "NAV"


def test_the_explorer_in_chinese(page):
    """Every step and every button that plays, also those that play while the language changes."""
    page.get_by_role("button", name="Play", exact=True).click()
    page.locator("[name=scale]").select_option("one")  # a ghost
    page.get_by_role("button", name="Play", exact=True).click()
    page.locator("[data-language=zh]").click()
    play = page.locator("[name=play]")
    assert play.inner_text() == "暂停"
    play.click()
    assert play.inner_text() == "播放"
    for place, name in enumerate(("乘积", "求和", "分数", "softmax")):
        at_step(page, name, place)
        assert re.search("[\u4e00-\u9fff]", page.locator(".said").inner_text())
    words = re.findall("[A-Za-z]{3,}", page.locator("main").inner_text())
    assert set(words) == {"softmax", "English"}
    page.locator("[data-language=en]").click()
    assert play.inner_text() == "Play"
    assert re.findall("[\u4e00-\u9fff]+", page.locator("main").inner_text()) == ["中文"]
