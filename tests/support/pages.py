"""Checks of any page, for the tests of the report, the explorer and the site."""

from contextlib import contextmanager

COMPLAINTS = ("assert", "error", "warning")


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
