"""Checks of any page, for the tests of the report, the explorer and the site."""

import re
from contextlib import contextmanager

from sdpa_lab import report

COMPLAINTS = ("assert", "error", "warning")
CSS = (report.FOLDER / "page.css").read_text(encoding="utf-8")


@contextmanager
def opened(context, path, address=""):
    """The page in a tab; fails if it used the network or logged an error or a warning."""
    page = context.new_page()
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda said: said.type in COMPLAINTS and complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri() + address)
    yield page
    assert all(url.startswith(("file:", "data:")) for url in requests), requests
    assert complaints == []
    page.close()


def assert_fits(page):
    """Only scrolling boxes are wider than the window, and no text is tiny."""
    width, window = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width <= window
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('p, td, th, label, figcaption, a, summary')]"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 12


def assert_named(page):
    """Controls, pictures and scrolling regions have names for screen readers."""
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, select, button, svg, canvas, img, [tabindex]")]
        .filter((e) => !(e.labels?.length || e.ariaHidden || e.getAttribute("aria-label") || e.alt
                         || (e.tagName === "BUTTON" && e.textContent.trim())))
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert not nameless, nameless


def colors():
    """{scheme: {name: (red, green, blue)}} of the style sheet."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
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
