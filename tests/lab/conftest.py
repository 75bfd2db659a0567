"""The pretrained model that several tests of the laboratory measure."""

import pytest
from support.examples import loaded

from sdpa_lab import minilm


@pytest.fixture(scope="session")
def model():
    return loaded(minilm.MiniLM)
