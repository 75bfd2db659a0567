"""Runs third-party tools on the project and its archives: `make judges`.

Each is a command that must succeed. The archives of dist/ are those that tools/release.py made.
Exceptions that a judge is told of are here or in pyproject.toml, with the reason.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WHEELS = [str(path) for path in sorted((ROOT / "dist").glob("*.whl"))]
ARCHIVES = [*WHEELS, *(str(path) for path in sorted((ROOT / "dist").glob("*.tar.gz")))]
FORMS = [str(path) for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))]
WORKFLOWS = [str(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
# Authors' address and home page come with the first release, as RELEASING.md says; an invented one
# would be worse than none.
UNASKED = "AuthorEmail,Url"
RECIPE = (
    "from rattler_build import Stage0Recipe, VariantConfig as V; "
    "r = Stage0Recipe.from_file('dist/recipe.yaml'); "
    "assert r.render(V.from_yaml('{c_compiler: [gcc], c_stdlib: [sysroot]}'))"
)
SCHEMA = ("check-jsonschema", "--builtin-schema")

COMMANDS = (
    ("repo-review", ".", "--format", "rich"),
    ("validate-pyproject", "pyproject.toml"),
    ("check-manifest",),
    ("pyroma", "--min=10", f"--skip-tests={UNASKED}", "."),
    ("zizmor", "--offline", "--persona=pedantic", ".github"),
    (*SCHEMA, "vendor.github-workflows", *WORKFLOWS),
    (*SCHEMA, "vendor.github-issue-forms", *FORMS),
    (*SCHEMA, "vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    (*SCHEMA, "vendor.dependabot", ".github/dependabot.yml"),
    ("hadolint", "packaging/Dockerfile"),
    ("python", "-c", RECIPE),
    ("pre-commit", "validate-config"),
    ("twine", "check", "--strict", *ARCHIVES),
    ("check-wheel-contents", *WHEELS),
    ("abi3audit", "--strict", *WHEELS),
    *(("auditwheel", "show", wheel) for wheel in WHEELS),
)


def main() -> None:
    """Run all; print the output of each, then the names of those that failed."""
    if len(ARCHIVES) != 2:
        sys.exit("dist/ holds no sdist and wheel, or more: make release-check")
    failed = []
    for name, *arguments in COMMANDS:
        print(f"\n=== {name} {' '.join(arguments)}", flush=True)
        if subprocess.run([BIN / name, *arguments], cwd=ROOT).returncode != 0:
            failed.append(name)
    print(f"\nnot asked of pyroma: {UNASKED}; scorecard is not run, zizmor judges the workflows")
    print(f"{len(COMMANDS) - len(failed)} of {len(COMMANDS)} judges are content", *failed)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
