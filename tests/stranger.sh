#!/usr/bin/env bash
# What a stranger does: clones the last commit, runs the README's commands and what else it names,
# with nothing set but PATH and HOME. `make test` collects all tests, which shows that its own extras
# are enough, and runs a few: the rest takes long, and runs elsewhere. `make docs` meets none of the
# libraries that have bridges but those of its extra. A folder as argument is taken for such a clone,
# and keeps what has been compiled, which takes most of the three minutes.
set -euo pipefail
clone=${1:-}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
if [[ ! $clone ]]; then
    clone=$place/sdpa
    git -c safe.directory="*" clone --quiet --no-local "$(dirname "$0")/.." "$clone"
fi
cd "$clone"

alone() {
    printf '\n--- %s\n' "$*"
    env -i PATH="$PATH" HOME="$HOME" "$@"
}
alone make demo
# Runs the examples of the README as one program.
sed -n '/^```python$/,/^```$/{/^```/!p}' README.md > "$place/readme.py"
[[ $(grep -c '^assert ' "$place/readme.py") -ge 4 ]]
alone .venv/bin/python - <"$place/readme.py"
alone .venv/bin/python -m sdpa info
alone .venv/bin/python examples/digits.py
alone make test PYTEST_ARGS='-k test_config'
alone make docs
