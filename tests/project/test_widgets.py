"""The notebook with the knobs in a real JupyterLab, at loopback: they turn, the picture changes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install '.[notebooks]'")
pytest.importorskip("ipywidgets", reason="needs ipywidgets: pip install '.[notebooks]'")

ROOT = Path(__file__).parents[2]
PATIENCE = 180_000  # milliseconds; JupyterLab loads some megabytes of JavaScript, a kernel starts
PICTURE = ".jupyter-widgets img"  # not the one above the knobs, which stays


@pytest.fixture
def server(tmp_path):
    """The address of a JupyterLab that sees one notebook and no settings of whoever runs it."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(ROOT / "notebooks" / "explorer.ipynb", folder)
    settings = {
        name: str(tmp_path / name)
        for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ip=127.0.0.1", "--port=0", f"--ServerApp.root_dir={folder}"),
            *("--IdentityProvider.token=token", "--LabApp.news_url="),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | settings | {"PYTHONPATH": path},
    )
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            break
    else:
        pytest.fail("".join(said))
    yield found[0]
    process.terminate()
    # Kernels are told to end first.
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.uninstrumented  # the kernel misses messages of the browser
def test_knobs_turn_and_the_picture_changes(server, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(PATIENCE)

    def seen():
        return page.locator(PICTURE).get_attribute("src")

    def changed_from(before):
        page.wait_for_function(
            "([selector, before]) => {"
            " const images = document.querySelectorAll(selector);"
            " return images.length === 1 && images[0].src !== before; }",
            arg=[PICTURE, before],
        )
        return seen()

    page.goto(f"{server}/lab/tree/explorer.ipynb?token=token&reset")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.get_by_text(re.compile(r"\| Idle$")).wait_for()  # the kernel
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).first.click()
    page.locator(PICTURE).wait_for()
    first = seen()
    assert first.startswith("data:image/png;base64,")

    sliders = page.locator(".widget-slider")
    assert sliders.count() == 5
    handle = page.locator(".widget-slider [role=slider]").first
    handle.focus()
    page.keyboard.press("ArrowRight")
    wider = changed_from(first)
    assert sliders.first.locator(".widget-readout").inner_text() == "128"

    named = page.locator(".widget-dropdown select").first
    readout = sliders.nth(2).locator(".widget-readout")
    assert readout.inner_text().startswith("0.088")  # 1/sqrt(128): a named scale follows d_k
    named.select_option("1")
    unscaled = changed_from(wider)
    assert unscaled != first

    page.locator(".widget-play button").first.click()
    played = changed_from(unscaled)
    page.locator(".widget-play button").first.click()  # stands still
    assert named.input_value() == "by the slider"
    assert played != first

    # The weights, as a page in the page.
    pair = page.frame_locator("iframe").locator(".map")
    pair.press("ArrowDown")
    assert "query 1" in page.frame_locator("iframe").locator("#status").inner_text()
    page.close()
