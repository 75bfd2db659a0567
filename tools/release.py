"""Builds the archives of a release twice, with hashes and bill of materials: `make release-check`.

The last commit is exported into two folders and built there, the second time with other
permissions, another time zone and another name of the folder. Both sdists and both wheels must be
equal, byte by byte. `dist/` then holds them with SHA256SUMS, a bill of materials (CycloneDX) and
the recipe for conda-forge.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
RECIPE = ROOT / "packaging" / "recipe.yaml"
INDEX = "https://pypi.org/packages/source/s/sdpa"
"""Where the index will have the sdist."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Return the standard output of a command; end the program if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, text=True, stdout=subprocess.PIPE
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def versions(tags: str) -> dict[str, str | None]:
    """The version in every file that names one, and in one of these tags, given one per line."""
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = re.search(
        r"^## \[(\d[\d.]*(?:rc\d+)?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    recipe = re.search(r'^  version: "(.*)"$', RECIPE.read_text(), re.MULTILINE)
    tag = re.search(r"^v(\d.*)$", tags, re.MULTILINE)
    return {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "version"
        ],
        "CITATION.cff": citation and citation[1],
        "CHANGELOG.md": changes and changes[1],
        "recipe.yaml": recipe and recipe[1],
        "tag": tag and tag[1],
    }


def check_versions(found: dict[str, str | None]) -> None:
    """End the program if versions differ. A tag needs its section in the changelog."""
    named = {version for version in found.values() if version is not None}
    if len(named) != 1 or (found["tag"] and not found["CHANGELOG.md"]):
        sys.exit(f"versions differ: {found}")


def address() -> str:
    """The project's address, which is "" while there is none."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(told["tool"]["sdpa"]["address"]).rstrip("/")


def cite(tree: Path) -> None:
    """Write the address into the CITATION.cff of a release."""
    if where := address():
        path = tree / "CITATION.cff"
        path.write_text(f'{path.read_text()}repository-code: "{where}"\n')


def recipe_of(name: str, sha256: str) -> str:
    """Conda-forge's recipe for the sdist of this name, as the index has it."""
    text = RECIPE.read_text()
    _, start, rest = text.partition("\nschema_version")
    found = f"source:\n  url: {INDEX}/{name}\n  sha256: {sha256}\n"
    text, changed = re.subn(
        r"^source:\n  path: \.\.\n", found, start[1:] + rest, flags=re.MULTILINE
    )
    if changed != 1:
        raise ValueError(f"{RECIPE}: expected one source, a path, found {changed}")
    return text + (f"  homepage: {where}\n" if (where := address()) else "")


def build(tree: Path, commit: str, umask: int, zone: str) -> dict[str, Path]:
    """Export a commit into `tree`, build it; {name: archive}."""
    tree.mkdir(parents=True)
    exported = tree.with_suffix(".tar")
    run("git", "archive", "--format=tar", f"--output={exported}", commit)
    with tarfile.open(exported) as archive:
        # Some releases of Python 3.11 lack the parameter of this name.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(tree)
    cite(tree)
    before = os.umask(umask)
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        tree / "dist",
        cwd=tree,
        TZ=zone,
    )
    os.umask(before)
    return {path.name: path for path in (tree / "dist").iterdir()}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_materials(wheel: Path, folder: Path) -> None:
    """Write the packages that an installation of the wheel brings to dist/sbom.cdx.json."""
    environment = folder / "environment"
    venv.create(environment)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment)
    run(*pip, "install", "--quiet", wheel)
    run(
        *(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"),
        *("--pyproject", ROOT / "pyproject.toml", "--output-file", DIST / "sbom.cdx.json"),
        environment,
    )


def main() -> None:
    """Check, build, compare, and fill dist/."""
    found = versions(run("git", "tag", "--points-at", "HEAD"))
    check_versions(found)
    commit = run("git", "rev-parse", "HEAD").strip()
    print(f"version {found['pyproject.toml']} of {commit}")
    if not address():
        print(
            "The project has no address, so that the metadata have no links and those of the "
            "README lead nowhere on a package index: write it into [tool.sdpa] of pyproject.toml."
        )
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = build(folder / "first", commit, 0o022, "UTC")
        second = build(folder / "another" / "place", commit, 0o077, "Asia/Kolkata")
        sums = {name: digest(path) for name, path in sorted(first.items())}
        if sums != {name: digest(path) for name, path in sorted(second.items())}:
            DIST.mkdir()
            for number, archives in enumerate((first, second)):
                for name, path in archives.items():
                    shutil.copy(path, DIST / f"{number}-{name}")
            sys.exit("two builds differ: compare dist/0-* with dist/1-*")
        DIST.mkdir()
        for path in first.values():
            shutil.copy(path, DIST)
        text = "".join(f"{value}  {name}\n" for name, value in sums.items())
        (DIST / "SHA256SUMS").write_text(text)
        (sdist,) = [name for name in sums if name.endswith(".tar.gz")]
        (DIST / "recipe.yaml").write_text(recipe_of(sdist, sums[sdist]))
        print(f"two builds are equal:\n{text}", end="")
        (wheel,) = DIST.glob("*.whl")
        write_materials(wheel, folder)


if __name__ == "__main__":
    main()
