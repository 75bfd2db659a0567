"""The report: what is in the file, in text and in a real browser."""

import json
import re
import sys
from functools import partial

import pytest
from support.pages import assert_fits, assert_named, colors, contrast, opened

from sdpa import lab
from sdpa.__main__ import main
from sdpa.lab import claims, report

FEW_CLAIMS = ("softmax-raw",)


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


@pytest.mark.parametrize("name", ["", "nowhere/report.html"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(lab, "scale_effect", None)
    with pytest.raises(SystemExit, match="cannot write"):
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
        assert re.search(rf"{row['verdict']}</span> {row['id']}", html)
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
    assert "<img" not in html
    notes = re.findall(r'<p class="note">(.*?)</p>', html)
    assert len(notes) == 3
    assert all("pip install &#x27;sdpa[lab]&#x27;" in note for note in notes)


def test_what_the_ledger_says_is_text_not_markup():
    claim = claims.Claim(
        id="shift",
        notes=("004",),
        claim="a < b & c",
        claim_zh="甲 < 乙",
        expect=(claims.Expect("x", 1.0, 0.1, 2.0),),
        holds="yes: <b>",
        law="no",
        experiment=lambda seed, times: {"x": lab.Estimate(1.0, 1.0, 1.0, 1)},
    )
    html = report._row(claims.judge(claim, rows=1))
    assert "a &lt; b &amp; c" in html
    assert "甲 &lt; 乙" in html
    assert "yes: &lt;b&gt;" in html
    assert "<td>1</td><td>2</td>" in html


def test_every_colour_can_be_read():
    """WCAG 2.2, AA: 4.5 for text, 3 for what is drawn."""
    for scheme, color in colors().items():
        for ground in ("page", "panel"):
            for name in ("ink", "quiet", *report.VERDICTS):
                assert contrast(color[name], color[ground]) >= 4.5, (scheme, name, ground)
            for name in ("blue", "law", "point"):
                assert contrast(color[name], color[ground]) >= 3, (scheme, name, ground)


def test_in_a_browser(context, path):
    with opened(context, path) as page:
        assert_fits(page)
        assert_named(page)
        assert page.locator("h1").count() == 1
        pictures = page.evaluate(
            "[...document.images].map((image) => image.complete && image.naturalWidth)"
        )
        assert len(pictures) == 2  # digits and speed: random numbers come with --all
        assert all(width > 300 for width in pictures)
        links = page.evaluate("[...document.querySelectorAll('nav a')].map((a) => a.hash)")
        assert links == [f"#{name}" for name in report.SECTIONS]
        assert all(page.locator(link).count() == 1 for link in links)
        badge = page.locator(".claim .verdict").first
        assert badge.inner_text() in report.VERDICTS
        border, text = badge.evaluate(
            "(e) => [getComputedStyle(e).borderTopColor, getComputedStyle(e).color]"
        )
        assert border == text != page.evaluate("getComputedStyle(document.body).color")


def test_the_explorer_in_it_works_and_leaves_its_links_alone(context, path):
    with opened(context, path, "#speed") as page:
        assert page.evaluate("location.hash") == "#speed"
        before = page.locator(".summary").inner_text()
        page.locator("[name=scale]").select_option("one")
        assert page.locator(".summary").inner_text() != before
        assert "scale=one" in page.evaluate("location.hash")


def test_light_and_dark_differ(browser, path):
    grounds = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, offline=True)
        with opened(context, path) as page:
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert len(grounds) == 2
