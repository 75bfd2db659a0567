"""The pretrained model that several tests of the laboratory measure."""

import pytest
from support.examples import loaded

from sdpa_lab import minilm


@pytest.fixture(scope="session")
def model():
    return loaded(minilm.MiniLM)


@pytest.fixture(autouse=True)
def english(monkeypatch):
    """What tests read does not depend on the locale of the system."""
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
