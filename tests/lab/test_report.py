"""The report: what is in the file, in text and in a real browser."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from string import Formatter

import pytest
from support.pages import assert_fits, assert_named, opened

import sdpa_lab as lab
from sdpa.__main__ import main
from sdpa_lab import claims, report
from sdpa_lab.claims import Expect, Figure, chinese
from sdpa_lab.report import axis, cards, screen, words

FEW_CLAIMS = ("softmax-raw", "value-index", "softmax-scaled", "table3-rowB")
BY_SURPRISE = ("softmax-scaled", "value-index", "table3-rowB", "softmax-raw")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Smaller sizes wherever the report takes time."""
    monkeypatch.setattr(lab, "speed", partial(lab.speed, [(10, 64)], seconds=0.0))
    monkeypatch.setattr(claims, "quick", lambda: list(FEW_CLAIMS))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "report.html"
    main(["--draws", "30", "--report", str(path)])
    return path


def test_the_file_is_written_where_it_should(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["--draws", "30", "--no-report"])
    assert list(tmp_path.iterdir()) == []
    main(["--draws", "30"])
    assert [path.name for path in tmp_path.iterdir()] == ["sdpa-report.html"]
    assert "Next: open sdpa-report.html |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is a folder$"),
        ("nowhere/report.html", "there is no folder .*nowhere$"),
        ("file/report.html", ""),
        ("x" * 300, ""),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    name, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(lab, "scale_effect", None)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"cannot write .*: {reason}"):
        main(["--report", str(tmp_path / name)])
    assert capsys.readouterr().out == ""


def test_figures_of_text_json_and_report_are_the_same(tmp_path, capsys):
    path = tmp_path / "report.html"
    main(["--draws", "30", "--json", "--report", str(path)])
    result = json.loads(capsys.readouterr().out)
    html = path.read_text(encoding="utf-8")
    assert [row["id"] for row in result["claims"]] == list(FEW_CLAIMS)
    for row in result["claims"]:
        assert f'id="claim-{row["id"]}"' in html
        assert row["claim_zh"] in html
        assert re.search(
            rf'id="claim-{row["id"]}"><details.*>\s*<summary><h3><span '
            rf'class="verdict {row["verdict"]}"',
            html,
        )
    for name in ("digits", "random"):
        if result[name] is not None:
            assert f"{name}: gradients, 30 inputs" in html
    assert result["machine"]["processor"] in html


def test_without_matplotlib_and_scikit_learn_it_says_how_to_get_them(tmp_path, monkeypatch):
    for name in ("sklearn", "sklearn.datasets", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "report.html"
    main(["--draws", "30", "--report", str(path)])
    html = path.read_text(encoding="utf-8")
    assert 'class="plot' not in html
    html = re.sub('<span class="zh".*?</span>', "", html)
    notes = re.findall(r'<p class="note">(?:<span.*?>)?(.*?)(?:</span>)?</p>', html)
    assert len(notes) == 3
    assert {note.rpartition(": ")[2] for note in notes} == {
        "pip install matplotlib",
        "pip install scikit-learn",
    }


def test_what_the_ledger_says_is_text_not_markup(monkeypatch):
    monkeypatch.setitem(chinese.FINDINGS, "shift", ("reproduced", "是：<i> {x:.2f}"))
    claim = claims.Claim(
        id="shift",
        claim="a < b & c",
        claim_zh="甲 < 乙",
        expect=(claims.Expect("x", 1.0, 0.1, 2.0),),
        holds="yes: <b>",
        law="no",
        experiment=lambda seed, times: {"x": lab.Estimate(1.0, 1.0, 1.0, 1)},
    )
    html = cards.card(claims.judge(claim, rows=1))
    assert "a &lt; b &amp; c" in html
    assert "甲 &lt; 乙" in html
    assert "yes: &lt;b&gt;" in html
    assert "是：&lt;i&gt; 1.00" in html
    assert "<td>1 (n = 1)</td><td>1 ± 0.1</td><td>2</td>" in html


def colors():
    """{scheme: {name: (red, green, blue)}} of the style sheet."""
    css = (report.FOLDER / "page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    schemes = {}
    for scheme, block in ("light", light), ("dark", dark):
        found = re.findall(r"--(\w+): #(\w{6})", block)
        schemes[scheme] = {name: tuple(bytes.fromhex(value)) for name, value in found}
    return schemes


def contrast(a, b):
    """The contrast of two colours by WCAG 2.2, from 1 to 21."""

    def luminance(color):
        parts = [c / 255 for c in color]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_can_be_read():
    """WCAG 2.2, AA: 4.5 for text, 3 for what is drawn."""
    for scheme, color in colors().items():
        for ground in ("page", "panel"):
            for name in ("ink", "quiet", *(verdict.split()[0] for verdict in report.VERDICTS)):
                assert contrast(color[name], color[ground]) >= 4.5, (scheme, name, ground)
            for name in ("blue", "law", "point", "orange"):
                assert contrast(color[name], color[ground]) >= 3, (scheme, name, ground)


# ----------------------------------------------------------------------------------- languages


def fields(template):
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def test_both_languages_say_the_same():
    """Every sentence has both, with the same measured values in them."""
    assert len(words.sentences()) > 80
    for name, texts in words.sentences().items():
        assert tuple(texts) == words.LANGUAGES, name
        assert fields(texts["en"]) == fields(texts["zh"]), name
        letters = re.search("[\u4e00-\u9fff]", texts["zh"])
        assert letters or not re.search("[a-z]{3}", re.sub("{.*?}", "", texts["zh"])), name
        assert not re.search("[\u4e00-\u9fff]", texts["en"]), name


def test_every_sentence_is_said():
    """By its name in Python, in the page of the explorer or in a script."""
    files = [path for path in report.FOLDER.iterdir() if path.suffix in (".py", ".js", ".html")]
    said = "".join(path.read_text(encoding="utf-8") for path in files)
    families = ("column-", "head-", "label-", "means-", "name-", "panel-", "section-")
    families += (*report.VERDICTS, "depends", "digits", "random", "forward", "backward")
    families += ("script-entropy", "script-jacobian")
    lost = [
        name
        for name in words.sentences()
        if not name.startswith(families)
        and not re.search(rf'["\']{name}["\']|{{{{{name}}}}}', said)
    ]
    assert lost == []


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "en_GB", "LANG": "zh_TW"}, "en"),
        ({"LC_ALL": "", "LC_MESSAGES": "zh_CN"}, "zh"),
    ],
)
def test_the_language_is_that_of_the_system(environment, language, monkeypatch):
    monkeypatch.setattr(words.locale, "getlocale", lambda: (None, None))
    assert words.preferred(environment) == language
    monkeypatch.setattr(words.locale, "getlocale", lambda: ("Chinese (Simplified)_China", "936"))
    assert words.preferred({}) == "zh"


def test_the_language_changes_what_is_said_and_not_what_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}
    for language in words.LANGUAGES:
        monkeypatch.setenv("LC_ALL", {"en": "C", "zh": "zh_CN.UTF-8"}[language])
        main(["--draws", "30"])
        assert (words.say("question", language)) in capsys.readouterr().out.splitlines()
        html = (tmp_path / "sdpa-report.html").read_text(encoding="utf-8")
        assert f'<html lang="{language}"' in html
        main(["--draws", "30", "--json", "--no-report"])
        result = json.loads(capsys.readouterr().out)
        found[language] = [result["digits"], [row["statement"] for row in result["claims"]]]
    assert found["en"] == found["zh"]
    with pytest.raises(SystemExit) as caught:
        main(["--lang", "fr"])
    assert caught.value.code == 2


# ------------------------------------------------------------------------------------- claims


@pytest.fixture(scope="module")
def rows():
    return claims.ledger(FEW_CLAIMS)


def test_claims_are_sorted_by_surprise(rows):
    assert tuple(row.claim.id for row in screen.by_surprise(rows)) == BY_SURPRISE
    assert [row.claim.id for row in screen.surprising(rows)] == list(BY_SURPRISE[:2])
    html = cards.ledger(rows, 0)
    assert tuple(re.findall('<article.* id="claim-(.*)">', html)) == BY_SURPRISE
    # A surprising claim that turned out as the note says is no surprise.
    held = [replace(row, verdict="reproduced") for row in rows]
    assert screen.surprising(held) == []


def test_the_figure_that_decides_is_the_one_furthest_outside(rows):
    (row,) = [row for row in rows if row.claim.id == "softmax-scaled"]
    figure, expect = axis.decisive(row.figures, row.claim.expect)
    low, high = expect.claimed_region()
    assert figure.high < low or figure.low > high
    inside, outside = Figure("inside", 1.0, 0.9, 1.1, 5), Figure("outside", 1.0, 0.9, 1.1, 5)
    near = Figure("near", 1.0, 0.9, 1.1, 5)
    expected = [Expect("inside", 1.0, 0.5), Expect("near", 1.5, 0.2), Expect("outside", 3.0, 0.2)]
    assert axis.decisive([inside, near, outside], expected) == (outside, expected[2])
    assert axis.decisive([inside], expected[:1]) == (inside, expected[0])
    assert axis.decisive([], expected) is None


def places(svg):
    """Left and right end of each mark on an axis."""
    (margin,) = re.findall(r'class="margin" x="([\d.]+)" width="([\d.]+)"', svg)
    left, width = map(float, margin)
    found = {"margin": (left, left + width)}
    for name in ("claimed", "measured"):
        found[name] = float(re.search(rf'circle class="{name}" cx="([\d.]+)"', svg)[1])
    found["interval"] = tuple(
        map(float, re.search(r'class="interval" d="M([\d.]+) \d+H([\d.]+)"', svg).groups())
    )
    law = re.search(r'class="law-mark" d="M([\d.]+) ', svg)
    return found | ({"law": float(law[1])} if law else {})


def test_marks_on_an_axis_lie_as_the_numbers_do():
    figure = Figure("x", 2.0, 1.8, 2.3, 16)
    found = places(axis.drawn(figure, Expect("x", 1.0, 0.25, 2.0)))
    low, high = found["margin"]
    assert (low + high) / 2 == pytest.approx(found["claimed"], abs=0.2)
    assert high < found["interval"][0] < found["measured"] == found["law"] < found["interval"][1]
    unit = found["measured"] - found["claimed"]
    assert high - low == pytest.approx(0.5 * unit, abs=0.2)
    assert found["interval"][1] - found["interval"][0] == pytest.approx(0.5 * unit, abs=0.2)


def test_axes_of_bounds_of_points_and_of_laws_about_something_else():
    figure = Figure("x", 2.0, 1.8, 2.3, 16)
    low, high = places(axis.drawn(figure, Expect("x", 1.0, (0, None))))["margin"]
    assert high > axis.WIDTH - axis.EDGE > low
    low, high = places(axis.drawn(figure, Expect("x", 3.0, (None, 0))))["margin"]
    assert low < axis.EDGE < high
    other = Expect("x", 0.0, 1e-6, 0.0, None, "y")
    assert "law-mark" not in axis.drawn(figure, other)
    assert "0, of the y" in axis.described(figure, other)
    for value in (0.0, 5.0, -1e-12):
        point = axis.drawn(Figure("x", value, value, value, 1), Expect("x", value, 0.0))
        assert "nan" not in point
        assert places(point)["claimed"] == places(point)["measured"] == axis.WIDTH / 2


# ------------------------------------------------------------------------------ in the browser


def test_in_a_browser(context, path):
    with opened(context, path) as page:
        assert_fits(page)
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        assert_fits(page)
        assert_named(page)
        assert page.locator("h1").count() == 1
        links = page.evaluate("[...document.querySelectorAll('nav a')].map((a) => a.hash)")
        assert links == [f"#{name}" for name in report.SECTIONS]
        sections = page.evaluate("[...document.querySelectorAll('section')].map((e) => '#' + e.id)")
        assert sections == links
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))
        badge = page.locator(".claim .verdict").first
        assert badge.inner_text().split()[0] in report.VERDICTS
        border, text = badge.evaluate(
            "(e) => [getComputedStyle(e).borderTopColor, getComputedStyle(e).color]"
        )
        assert border == text != page.evaluate("getComputedStyle(document.body).color")


def test_the_answer_and_its_figure_come_first(context, path):
    with opened(context, path) as page:
        answer = page.locator("section").first
        assert answer.locator("li").count() == 5
        # Figures of digits and of speed: random numbers come with --all.
        captions = page.locator(".numbered > figcaption")
        assert captions.count() == 2
        assert all(caption.is_visible() for caption in captions.all())
        panels = answer.locator(".row > figure")
        assert panels.count() == 3
        assert all(panel.locator("figcaption").is_visible() for panel in panels.all())
        places = [panel.bounding_box() for panel in panels.all()]
        fixed = {"x"} if page.viewport_size["width"] == 390 else {"y"}
        assert {
            axis for axis in ("x", "y") if len({round(place[axis]) for place in places}) == 1
        } == fixed


def test_claims_are_filtered_by_verdict(context, path):
    shown = (
        "[...document.querySelectorAll('.claim')].filter((e) => e.offsetParent).map((e) => e.id)"
    )
    everything = [f"claim-{name}" for name in BY_SURPRISE]
    with opened(context, path) as page:
        assert page.evaluate(shown) == everything
        page.get_by_label(re.compile("^2 corrected")).check()
        assert page.evaluate(shown) == everything[:2]
        page.keyboard.press("ArrowRight")
        assert page.evaluate(shown) == ["claim-table3-rowB"]
        page.get_by_label(re.compile("^1 reproduced")).check()
        assert page.evaluate(shown) == ["claim-softmax-raw"]
        page.get_by_label(re.compile("^4 all")).check()
        assert page.evaluate(shown) == everything
        assert page.get_by_label(re.compile("^0 undecided")).is_disabled()
        for card in page.locator(".claim").all():
            if not card.locator(".found").is_visible():
                card.locator("summary").first.click()
            assert card.locator(".verdict-axis").is_visible()
            assert card.locator("dt").all_inner_texts()[:2] == ["○ claimed", "● measured"]


def test_claims_that_hold_are_closed_and_on_a_phone_all(context, path):
    def is_open(page):
        return page.evaluate(
            "[...document.querySelectorAll('.claim')].map((e) => e.firstElementChild.open)"
        )

    with opened(context, path) as page:
        narrow = page.viewport_size["width"] == 390
        assert is_open(page) == ([False] * 4 if narrow else [True, True, True, False])
        for card in page.locator(".claim").all():
            assert card.locator(".verdict").is_visible()
            assert card.locator("q").is_visible()
        tall = page.evaluate("document.querySelector('.claims').offsetHeight")
        assert tall < 900 or not narrow
    with opened(context, path, "#claim-softmax-raw") as page:
        assert is_open(page)[-1]
        assert page.locator("#claim-softmax-raw .found").is_visible()


def test_buttons_switch_the_language(context, path):
    with opened(context, path) as page:
        buttons = {
            language: page.locator(f"[data-language={language}]") for language in report.NAMES
        }
        for language, button in buttons.items():
            button.click()
            assert page.evaluate("document.documentElement.lang") == language
            assert page.title() == words.say("title", language)
            assert page.locator("h1").inner_text() == words.say("title", language)
            assert page.locator("nav").get_attribute("aria-label") == words.say(
                "aria-sections", language
            )
            assert [button.get_attribute("aria-pressed") for button in buttons.values()] == [
                str(name == language).lower() for name in buttons
            ]
            options = page.locator("[name=scale] option").all_inner_texts()
            assert words.say("option-one", language) in options
            assert words.say("section-speed", language) in page.locator("nav").inner_text()
            assert_fits(page)
            for label in "label-entropy", "label-law", "label-time":
                drawn = page.locator(".plot svg text", has_text=words.say(label, language)).first
                assert drawn.is_visible(), label
            shown = page.locator("main").inner_text()
            letters = len(re.findall("[\u4e00-\u9fff]", shown))
            assert (letters > 1000) if language == "zh" else (letters == len("中文"))
        figure = page.locator(".numbered > figcaption").first
        before = figure.evaluate("(e) => getComputedStyle(e, '::before').content")
        assert before.startswith('"图 "')


def test_every_label_of_a_plot_is_in_both_languages(path):
    pictures = "".join(re.findall("<svg.*?</svg>", path.read_text(encoding="utf-8"), re.DOTALL))
    for name, texts in words.sentences().items():
        if name.startswith("label-"):
            assert f">{texts['zh']}</text>" in pictures, name


def test_the_explorer_in_it_works_and_leaves_its_links_alone(context, path):
    with opened(context, path, "#speed") as page:
        assert page.evaluate("location.hash") == "#speed"
        before = page.locator(".summary").inner_text()
        page.locator("[name=scale]").select_option("one")
        assert page.locator(".summary").inner_text() != before
        assert "scale=one" in page.evaluate("location.hash")


def test_links_keep_the_setting_of_the_explorer(context, path):
    setting = "Explorer.current().state.scale"
    with opened(context, path) as page:
        page.locator("[name=scale]").select_option("one")
        text = page.locator(".summary").inner_text()
        for name in ("speed", "explorer"):
            page.locator(f"nav a[href='#{name}']").click()
            page.wait_for_function("(hash) => location.hash === hash", arg=f"#{name}")
            assert page.evaluate(setting) == "one"
            assert page.locator("[name=scale]").input_value() == "one"
            assert page.locator(".summary").inner_text() == text
        page.reload()
        assert page.evaluate("location.hash") == "#explorer"
        assert page.evaluate(setting) == "one"
        page.go_back()
        assert page.evaluate(setting) == "one"


def test_figures_follow_the_page_from_light_to_dark(browser, path):
    seen = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, offline=True)
        with opened(context, path) as page:
            ground, ink = page.evaluate(
                """(({backgroundColor, color}) => [backgroundColor, color])(
                getComputedStyle(document.body))"""
            )
            texts = page.evaluate(
                """[...document.querySelectorAll(".plot svg text")].map(
                (e) => getComputedStyle(e).fill)"""
            )
            assert len(texts) > 20
            assert set(texts) == {ink}
            seen.add((ground, ink))
        context.close()
    assert len({ground for ground, _ in seen}) == len({ink for _, ink in seen}) == 2
    pictures = re.findall("<svg.*?</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
    assert len(pictures) > 4
    assert not re.search("#[0-9a-f]{6}[^0-9a-f-]", "".join(pictures), re.IGNORECASE)
