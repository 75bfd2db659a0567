"""The pretrained model and the explorer, which several tests of the laboratory need."""

import pytest
from support.examples import loaded
from support.pages import opened

from sdpa.__main__ import main
from sdpa_lab import minilm


@pytest.fixture(scope="session")
def model():
    return loaded(minilm.MiniLM)


@pytest.fixture(autouse=True)
def english(monkeypatch):
    """What tests read does not depend on the locale of the system."""
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


@pytest.fixture(scope="session")
def explorer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    main(["--lang", "en", "explorer", str(path)])
    return path


@pytest.fixture
def page(browser, explorer_path):
    """The explorer in a tab."""
    context = browser.new_context(offline=True)
    with opened(context, explorer_path) as page:
        yield page
    context.close()
