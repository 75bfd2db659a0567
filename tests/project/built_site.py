"""The pages that `make docs` has built, in a real browser, as files and without a network."""

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
from support.pages import assert_fits, opened

SITE = Path(__file__).parents[2] / "build" / "docs"
PAGES = sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)
FIRST = SITE / "docs" / "why.html"
LIBRARY = SITE / "docs" / "site" / "index.html"
CHINESE = SITE / "zh" / "docs" / "zh" / "why.html"

# What reaches beyond the window and is in no box that scrolls.
CUT = """() => {
    const scrolls = (e) => e.tagName !== "ARTICLE" && (
        ["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    return [...document.querySelectorAll("article :not(.headerlink)")]
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e))
        .map((e) => e.outerHTML.slice(0, 80)); }"""
BROKEN = "[...document.images].filter((e) => !(e.complete && e.naturalWidth)).map((e) => e.src)"
# TeX that is no formula, unless it is quoted as code.
RAW = r"""() => document.title.includes('\\(') ||
    [...document.querySelectorAll("body *:not(code, code *, script)")].some(
        (e) => [...e.childNodes].some((t) => t.nodeType === 3 && t.data.includes('\\(')))"""


def test_all_pages_are_there():
    names = {path.relative_to(SITE).as_posix() for path in PAGES}
    reference = (SITE.parents[1] / "docs" / "site" / "reference").glob("*.rst")
    assert names >= {f"docs/site/reference/{path.stem}.html" for path in reference}
    assert names >= {"README.html", "search.html", "genindex.html"}
    assert names >= {"notebooks/attentions.html", "notebooks/explorer.html"}
    assert names >= {"docs/why.html", "zh/docs/zh/why.html", "zh/search.html"}
    assert len(names) > 60


# Lists beside the text, code and formulas that are wider than their box.
NARROW = """() => [...document.querySelectorAll(
        "article pre, .formula, .bd-sidebar-secondary, .bd-sidebar-primary, .bd-sidebar-primary a")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.checkVisibility())
    .map((e) => e.outerHTML.slice(0, 80))"""
WIDE_CODE = {"notebooks", "performance", "history"}
"""Folders whose pages have output or figures of more than 100 columns."""

# Text whose contrast to the ground is below 4.5 by WCAG 2.2.
FAINT = """() => {
    const rgba = (s) => s.match(/[\\d.]+/g).map(Number);
    const light = (c) => c.slice(0, 3)
        .map((x) => (x <= 10.3 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4))
        .reduce((sum, x, k) => sum + [0.2126, 0.7152, 0.0722][k] * x, 0);
    const ground = (e) => {
        const color = rgba(getComputedStyle(e).backgroundColor);
        return (color[3] ?? 1) > 0.99 ? color : ground(e.parentElement); };
    const contrast = (e) => {
        const [a, b] = [rgba(getComputedStyle(e).color), ground(e)].map(light);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
    return [...document.querySelectorAll("article *")]
        .filter((e) => [...e.childNodes].some((t) => t.nodeType === 3 && t.data.trim()))
        .filter((e) => e.checkVisibility({opacityProperty: true}) && contrast(e) < 4.5)
        .map((e) => e.outerHTML.slice(0, 80)); }"""


def test_every_page_fits_and_is_whole(browser):
    """In each window, light and dark: no error, nothing cut off, no picture missing, no formula in
    TeX, text that can be read; on a desk no scrolling for 100 columns, the widest of a source."""
    pictures = formulas = 0
    wrong = {}
    context = browser.new_context(offline=True)
    with opened(context, FIRST) as page:
        for path in PAGES:
            page.goto(path.as_uri())
            for width in (390, 1280, 1440):
                page.set_viewport_size({"width": width, "height": 844})
                assert_fits(page)
                checks = [CUT, BROKEN, RAW]
                if width >= 1280 and path.parent.name not in WIDE_CODE:
                    checks.append(NARROW)
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_function(
                        "(scheme) => document.documentElement.dataset.theme === scheme", arg=scheme
                    )
                    last = [FAINT] if width == 1440 else []
                    found = [page.evaluate(check) for check in checks + last]
                    if any(found):
                        wrong[path.name, width, scheme] = found
            pictures += page.locator("article img").count()
            formulas += page.locator("article math").count()
    context.close()
    assert wrong == {}
    assert pictures > 30
    assert formulas > 300


# Subscripts that do not stand below their base, of letters without a descender.
RAISED = """() => {
    const flat = (e) => /^[aceikmnorstuvwxzA-PR-Z0-9]$/.test(e.textContent.trim());
    const bottom = (e) => (e.querySelector("mi") ?? e).getBoundingClientRect().bottom;
    const scripts = [...document.querySelectorAll("msub")].map((e) => e.children)
        .filter(([base, script]) => flat(base) && flat(script));
    return [scripts.length, scripts.filter(([base, script]) => bottom(script) < bottom(base) + 1)
        .map(([base, script]) => base.textContent + "_" + script.textContent)]; }"""


@pytest.mark.parametrize("font", ["of formulas", "serif"])
@pytest.mark.parametrize("name", ["theory", "derivations"])
def test_subscripts_stand_below_with_a_font_for_formulas_and_without(context, name, font):
    with opened(context, SITE / "docs" / f"{name}.html") as page:
        if font == "serif":
            page.add_style_tag(content="math { font-family: serif !important; }")
        number, raised = page.evaluate(RAISED)
        assert number > 5
        assert raised == []


def test_a_table_of_a_docstring_has_the_rows_that_were_meant(context):
    """Text that goes on in the first column of a simple table begins another row."""
    with opened(context, SITE / "docs/site/reference/interop.html") as page:
        table = page.locator("#where-a-derivative-comes-from table")
        assert table.locator("tr td:first-child").all_inner_texts() == [
            "reverse",
            "forward",
            "reverse of reverse, reverse of forward, forward of reverse",
            "all others",
        ]


def test_links_lead_somewhere():
    """Those that Sphinx does not check too: of the theme, of downloads, of the index."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    links = {
        urljoin(path.as_uri(), unescape(link))
        for path, text in texts.items()
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text)
    }
    lost, inside = [], [link for link in links if link.startswith("file:")]
    for link in inside:
        address, anchor = map(unquote, urldefrag(link))
        path = Path(urlparse(address).path)
        if not path.is_file() or (anchor and path in anchors and anchor not in anchors[path]):
            lost.append(link)
    assert lost == []
    assert len(inside) > 500


def test_long_lines_of_code_scroll_in_their_box(context):
    with opened(context, LIBRARY) as page:
        scrolled = page.evaluate(
            """[...document.querySelectorAll("article pre")].map((e) => {
            e.scrollLeft = 9999; return e.scrollLeft > 0; })"""
        )
        assert scrolled == [page.viewport_size["width"] == 390] * 2


def test_the_page_of_the_library_starts_with_installation_and_first_call(context):
    with opened(context, LIBRARY) as page:
        for text in "pip install .", "sdpa.attention(":
            place = page.locator("article :is(code, pre)", has_text=text).first.bounding_box()
            assert place["y"] + place["height"] < page.viewport_size["height"], text
        for name, heading in ("Start", "Install"), ("Reference", "Reference"):
            page.locator("article").get_by_role("link", name=name, exact=True).click()
            page.get_by_role("heading", name=heading).first.wait_for()
            page.go_back()


@pytest.mark.parametrize(("path", "language"), [(FIRST, "en"), (CHINESE, "zh-CN")])
def test_the_first_page_says_why(context, path, language):
    """Thesis on the first screen, five figures, the way to the other language."""
    with opened(context, path) as page:
        window = page.viewport_size
        assert page.locator("html").get_attribute("lang") == language
        thesis = page.locator("article p").first.bounding_box()
        assert thesis["y"] < window["height"] / 2
        figures = page.locator("article img").all()
        assert len(figures) == 5
        for box in (figure.bounding_box() for figure in figures):
            assert box["width"] <= window["width"] - box["x"]
            assert box["height"] > 200
        other = {"en": "中文", "zh-CN": "English"}[language]
        page.locator("article").get_by_role("link", name=other, exact=True).click()
        page.get_by_role("heading", level=1).wait_for()
        assert page.locator("html").get_attribute("lang") != language
        page.go_back()
        # Every other link out of the Chinese build, too.
        for link in page.locator("article a").all():
            address = link.evaluate("(e) => e.href")
            if address.startswith("file:") and "#" not in address:
                assert Path(unquote(urlparse(address).path)).is_file(), address


@pytest.mark.parametrize("words", ["熵", "梯度消失", "信息熵 优化器", "Adam", "softmax 饱和"])
def test_the_search_in_chinese(context, words):
    """One letter, words that no space divides, both kinds of letters."""
    page = context.new_page()
    page.goto((SITE / "zh" / "search.html").as_uri() + f"?q={words}")
    results = page.locator("#search-results")
    found = results.get_by_role("link", name=re.compile("为什么"))
    if words.startswith("信息熵"):  # which the page does not say
        page.locator("#search-summary, .search-summary").filter(
            has_text=re.compile(".")
        ).first.wait_for()
        assert found.count() == 0
    else:
        found.first.wait_for()
    page.close()


def test_search_leads_to_the_reference(context):
    """From the button of the first page. Summaries of what is found need a server, not a file."""
    page = context.new_page()
    page.goto(FIRST.as_uri())
    page.get_by_role("button", name="Search").locator("visible=true").click()
    page.keyboard.type("logsumexp")
    page.keyboard.press("Enter")
    results = page.locator("#search-results")
    results.get_by_role("link", name="sdpa.logsumexp", exact=True).click()
    entry = page.locator("[id='sdpa.logsumexp']")
    entry.wait_for()
    assert page.url.endswith("docs/site/reference/softmax.html#sdpa.logsumexp")
    assert 0 <= entry.bounding_box()["y"] < page.viewport_size["height"]
    page.close()
