#!/usr/bin/env bash
# Compiles the C core and its tests without warnings for other compilers and systems, and runs them
# where they can be run here; then the extension by setup.py and every compiler, whose results must
# have the bits of gcc's, and by emcc, which makes it for Pyodide: tests/platforms.sh ZIG [NAME...]
# ZIG: the command that runs ziglang's zig, PYTHON -m ziglang. NAMEs: some of those below.
set -uo pipefail
cd "$(dirname "$0")/c"
zig=$1
shift
wanted=("$@")
jobs=-j${JOBS:-2}
# The tests of elementary functions sweep over all float32s: here over some.
flags="-O2 -g0 -DTIME_LIMIT=20"
results=()

# name, the command that runs a program ("" here, "-" nowhere), tests, then arguments of make
platform() {
    local name=$1 run=$2 tests=$3 build=../../build/c/$1 verdict
    shift 3
    if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    printf '\n=== %s\n' "$name"
    if ! make --silent "$jobs" BUILD="$build" STRIDE=4001 "$@"; then
        verdict="does not compile"
    elif [[ $run == - ]]; then
        verdict="compiles, untested"
    elif $run "$build/driver" $tests; then
        verdict="passes its tests"
    else
        verdict="fails its tests"
    fi
    results+=("$name: $verdict")
}

# Builds the extension into build/platforms/NAME: name, the compiler's command, other variables.
build() {
    local built=build/platforms/$1 cc=$2
    shift 2
    printf '\n=== extension-%s\n' "${built##*/}"
    (cd ../.. && env CC="$cc" SDPA_WERROR=1 "$@" "${zig%% *}" setup.py --quiet build \
        --build-base "$built" --build-lib "$built/lib")
}

# name, the compiler's command; gcc comes first, for the others' bits are compared with its own
extension() {
    local python=${zig%% *} built=build/platforms/$1 verdict
    if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" extension "* ]]; then return; fi
    if ! build "$1" "$2"; then
        verdict="does not compile"
    elif ! (cd ../.. && PYTHONSAFEPATH=1 PYTHONPATH=$built/lib "$python" tools/bits.py \
        >"$built/bits"); then
        verdict="fails"
    elif ! diff ../../build/platforms/gcc/bits "../../$built/bits"; then
        verdict="fails, for its bits are not gcc's"
    else
        verdict="has the bits of gcc's"
    fi
    results+=("extension-$1: $verdict")
}

# The extension as for Pyodide, whose Python is compiled by emcc; the headers are those of the Python here.
pyodide() {
    local verdict="does not compile"
    if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" extension "* ]]; then return; fi
    if build emcc "emcc -include $PWD/wasm32.h" LDSHARED="emcc -sSIDE_MODULE=1" \
        _PYTHON_HOST_PLATFORM=emscripten-4.0-wasm32; then
        verdict="compiles, untested"
    fi
    results+=("extension-emcc: $verdict")
}

zig_cc() { printf '%s cc -target %s' "$zig" "$1"; }
mapfile -t compilers < <(compgen -c | grep -Ex '(gcc|clang)-[0-9]+' | sort -Vu)
# char has no sign on aarch64, which shows in what clang, not gcc, makes of vectors of it.
for cc in "${compilers[@]}"; do platform "$cc" "" "" CC="$cc" FLAGS="$flags -funsigned-char"; done
if command -v musl-gcc >/dev/null; then
    platform musl "" "" CC=musl-gcc FLAGS="$flags -static"
fi
windows=-
if command -v wine >/dev/null; then windows="env WINEDEBUG=-all wine"; fi
# Windows has no processes that fork and no signals; WASI has no pages to protect either.
platform windows "$windows" "" CC="$(zig_cc x86_64-windows-gnu)" MACHINE=x86_64 PORTABLE=1 FLAGS="$flags"
arm=-
if command -v qemu-aarch64 >/dev/null; then arm="qemu-aarch64 -cpu max"; fi
platform aarch64 "$arm" attention CC="$(zig_cc aarch64-linux-musl)" MACHINE=aarch64 SAMPLE=5 FLAGS="$flags"
platform macos - "" CC="$(zig_cc aarch64-macos)" MACHINE=aarch64 FLAGS="$flags"
platform wasm "${zig%% *} wasi.py" "attention packed additive xla" \
    CC="$(zig_cc wasm32-wasi)" MACHINE=wasm32 PORTABLE=1 VECTORS= FLAGS="$flags -msimd128"
extension gcc gcc
for cc in "${compilers[@]}"; do extension "$cc" "$cc"; done
extension zig "$zig cc"
if command -v emcc >/dev/null; then pyodide; fi

printf '\n'
printf '%s\n' "${results[@]}"
[[ "${results[*]}" != *"does not"* && "${results[*]}" != *"fails"* ]]
