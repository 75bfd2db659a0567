"""The parts of a release: versions that agree, pinned workflows."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
USED = re.compile(r"^ +-? *uses: (.*)$", re.MULTILINE)


@pytest.fixture
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_versions_agree(release):
    found = release.versions("")
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:rc\d+)?", found["pyproject.toml"])
    release.check_versions(found)
    release.check_versions(release.versions(f"other\nv{found['pyproject.toml']}\n"))


@pytest.mark.parametrize("changed", [{"CITATION.cff": "0.0.9"}, {"CHANGELOG.md": "0.0.9"}])
def test_files_that_differ_are_refused(release, changed):
    with pytest.raises(SystemExit, match=r"versions differ.*0\.0\.9"):
        release.check_versions(release.versions("") | changed)


@pytest.mark.parametrize("changes", ["9.0.0", None])
def test_a_tag_that_no_file_knows_is_refused(release, changes):
    with pytest.raises(SystemExit, match=r"versions differ.*9\.0\.0"):
        release.check_versions(release.versions("v9.0.0") | {"CHANGELOG.md": changes})


@pytest.mark.parametrize("address", ["", "https://example.org/a/sdpa"])
def test_a_release_is_cited_by_the_address(release, monkeypatch, tmp_path, address):
    path = tmp_path / "CITATION.cff"
    path.write_text((ROOT / "CITATION.cff").read_text())
    monkeypatch.setattr(release, "address", lambda: address)
    release.cite(tmp_path)
    line = f'repository-code: "{address}"\n' if address else ""
    assert path.read_text() == (ROOT / "CITATION.cff").read_text() + line


def test_the_recipe_of_a_release_builds_its_sdist(release):
    text = release.recipe_of("sdpa-0.1.0rc1.tar.gz", "12ab")
    assert (
        "  url: https://pypi.org/packages/source/s/sdpa/sdpa-0.1.0rc1.tar.gz\n  sha256: 12ab\n"
        in text
    )
    assert "path:" not in text
    assert text.startswith("schema_version: 1\n")
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())
    host = re.search(r"^  host:\n((?:    - .*\n)+)", text, re.MULTILINE)[1]
    for line in required["build-system"]["requires"][:2]:
        assert f"    - {line.replace('>=', ' >=')}\n" in host


def test_the_image_copies_what_a_build_reads(tmp_path):
    text = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall("^COPY (.*)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            to = tmp_path / target / ("" if target == source else source.rpartition("/")[2])
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("*.so"))
            else:
                to.parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, to)
    call = "from setuptools.build_meta import build_sdist; print(build_sdist('.'))"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        made = {name.partition("/")[2] for name in archive.getnames()}
    # What setup.py asks of the folder when it compiles, beside what it needs to start.
    for path in [
        *ROOT.glob("src/**/*.[ch]"),
        *ROOT.glob("src/python/doc/*"),
        *ROOT.glob("sdpa/**/*.py"),
    ]:
        assert str(path.relative_to(ROOT)) in made


def test_actions_are_pinned_by_hash_and_the_same_everywhere():
    used = [line for path in WORKFLOWS for line in USED.findall(path.read_text(encoding="utf-8"))]
    assert len(used) > 5
    pins = {}
    for line in used:
        pinned = re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+", line)
        assert pinned, line
        pins.setdefault(pinned[1], set()).add(line)
    assert all(len(lines) == 1 for lines in pins.values()), pins


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_that_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = " ".join(re.findall(r"^([a-z][\w -]*):", makefile, re.MULTILINE)).split()
    used = re.findall(r"\bmake ([a-z][a-z-]*)", path.read_text(encoding="utf-8"))
    assert used
    assert set(used) <= set(targets)
