#!/usr/bin/env bash
# Tests one wheel on several Pythons, and free-threaded ones, which have a wheel of their own:
# tests/pythons.sh WHEEL ROOTS VERSION... [-- TESTS [-- UNITS]]
# VERSION: 3.13       Debian unstable's; trixie:3.13: that of another release, each in a root of its own in ROOTS
#          path:3.12  python3.12 of the PATH, without a root
#          3.13t      free-threaded, from Debian's source; also with each test in four threads at once
#          3.13t-tsan its extension under ThreadSanitizer, the tests where threads meet; in four threads those of
#                     the cache, and of float32 on the best instruction set: other types and sets run the same code
#                     between threads
#          any of them with /2.0: with NumPy 2.0. The version of PYTHON needs no root.
# TESTS: all but those of the repository itself, if not given; UNITS: those that run in four threads at once. Both may
# hold options of pytest.
# Roots are made by debootstrap if they are not there: half a gigabyte, two with compilers and sources.
# Needs the rights of root and changes nothing outside ROOTS but the folder of WHEEL.
set -euo pipefail
shopt -s inherit_errexit
wheel=$(realpath "$1") roots=$(realpath --canonicalize-missing "$2")
shift 2
versions=() tests=() units=()
for list in versions tests units; do
    declare -n words=$list
    while (($#)) && [[ $1 != -- ]]; do
        words+=("$1")
        shift
    done
    if (($#)); then shift; fi
done
((${#units[@]})) || units=(tests/attention/test_{unit,cache,semantics}.py tests/softmax/test_unit.py)
# The laboratory reads models with safetensors, which has no wheel for a free-threaded Python.
laboratory=()
if ((${#tests[@]} == 0)); then
    tests=(tests/{attention,interop,kernels,mechanisms,plot,programs,refusals,softmax}) laboratory=(tests/{examples,lab})
fi
here=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=tests/debian.sh
source "$here/tests/debian.sh"
own_python=${PYTHON:-python3}
own=$("$own_python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
jobs=${JOBS:-2}

mounted=()

make_root() {
    if [[ ! -x $root/usr/bin/apt-get ]]; then
        make_debian "$release" "$root" --include=ca-certificates,gcc,libc6-dev
    fi
    # What pip and apt were told here, they are told there; certificates too.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    if [[ -e /etc/pip.conf ]]; then cp /etc/pip.conf "$root/etc/"; fi
    apt-config dump Acquire::Check-Valid-Until >"$root/etc/apt/apt.conf.d/99-as-outside"
    mount_once --bind /dev "$root/dev"
    mount_once -t proc proc "$root/proc"
}

mount_once() {
    if mountpoint --quiet "${@: -1}"; then return; fi
    mount "$@"
    mounted+=("${@: -1}")
}
unmount() { if ((${#mounted[@]})); then umount --lazy "${mounted[@]}"; fi; }
trap unmount EXIT

inside() { "${prefix[@]}" env --unset=OMP_NUM_THREADS "$@"; }
install() { inside apt-get install --yes --no-install-recommends "$@"; }

# Builds the free-threaded CPython of this version from Debian's source, in /opt/pythonVERSIONt.
build_free_threaded() {
    local version=$1 mirror
    mirror=$(awk '$1 == "deb" { print $2; exit }' "$root/etc/apt/sources.list")
    # The mirror may have moved on since the list of unstable was made; stable stays.
    printf "deb-src $mirror %s main\n" sid trixie >"$root/etc/apt/sources.list.d/source.list"
    inside apt-get update
    install dpkg-dev make pkgconf zlib1g-dev libffi-dev libssl-dev libbz2-dev liblzma-dev
    inside sh -euc "rm -rf /usr/src/$version && mkdir -p /usr/src/$version/build && cd /usr/src/$version
        apt-get source python$version || apt-get source python$version/trixie
        cd build
        ../python$version-*/configure --quiet --prefix=/opt/python${version}t --disable-gil \
            --disable-test-modules --with-ensurepip=no 'OPT=-DNDEBUG -O1'
        make -s -j$jobs && make -s install"
}

# Sets `python` to the command that runs this version, `prefix` to what enters its `root`, and `preload` to the variable
# that gives Python, which is not instrumented, the library of its extension's sanitizer.
provide() {
    local release=${2:-sid} version=${1%-tsan}
    preload=() root=$roots/$release
    if [[ $2 == path || ($version == "$own" && ! $2) ]]; then
        prefix=() python=$own_python
        [[ $2 != path ]] || python=python$version
        return
    fi
    make_root
    prefix=(chroot "$root")
    if [[ $version == *t ]]; then
        python=/opt/python$version/bin/python3
        [[ -x $root$python ]] || build_free_threaded "${version%t}"
    else
        python=python$version
        inside dpkg --status "$python-venv" >/dev/null 2>&1 || install "$python-venv"
    fi
    if [[ $1 == *-tsan ]]; then preload=("LD_PRELOAD=$(inside gcc -print-file-name=libtsan.so)"); fi
}

# Of packages whose newest version has no wheel for a free-threaded Python, an older one will do.
pip_takes=PIP_ONLY_BINARY=:all:

# An environment with the wheel and NumPy alone, the `packages`, in `place`, which is `outside` out here.
make_environment() {
    local version=$1 numpy=$2 name=${1}${2:+-numpy-$2} package=${wheel##*/}
    place=/tmp/sdpa-$name outside=$root/tmp/sdpa-$name
    if ((${#prefix[@]} == 0)); then place=${wheel%/*}/$name outside=$place; fi
    rm -rf "${outside:?}"
    mkdir -p "$outside"
    cp -r "$here"/{tests,src,tools,examples,notebooks,docs,setup.py,pyproject.toml} "$wheel" "$outside/"
    inside "$python" -m venv "$place/venv"
    # Debian's patch of site.py does not know that a free-threaded Python has a t in its folder.
    if [[ $version == *t* ]]; then ln -s "python${version%-tsan}" "$outside/venv/lib/python${version%%t*}"; fi
    if [[ $version == *t* ]]; then package=$(build_wheel "$version"); fi
    packages=("$place/$package" "numpy${numpy:+==$numpy.*}")
    inside "$pip_takes" "$place/venv/bin/pip" install --quiet "${packages[@]}"
    cat >"$outside/versions.py" <<'END'
import platform, sys, numpy, sdpa

gil = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else "without the GIL, "
print(f"=== Python {platform.python_version()}, {gil}NumPy {numpy.__version__}, {sys.argv[1]}")
print(sdpa.__file__)
END
    inside "${preload[@]}" "$place/venv/bin/python" "$place/versions.py" "$package"
}

# Adds what the tests need.
add_tests() {
    local extras="test${laboratory:+,lab}"
    if [[ $1 == *t* ]]; then
        extras="test"
        packages+=(pytest-run-parallel)
    fi
    inside "$pip_takes" "$place/venv/bin/pip" install --quiet "${packages[0]}[$extras]" "${packages[@]:1}"
}

# Prints the name of a wheel of its own, which it builds in `place`.
build_wheel() {
    local variables=(SDPA_WERROR=1 "$pip_takes")
    if [[ $1 == *-tsan ]]; then variables+=(SDPA_SANITIZE=thread); fi
    mkdir "$outside/tree"
    cp -r "$here"/{sdpa,sdpa_lab,src,tools,setup.py,pyproject.toml,README.md,LICENSE} "$outside/tree/"
    rm -f "$outside"/tree/sdpa/*.so
    inside "${variables[@]}" "$place/venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$place/wheels" \
        "$place/tree" >&2
    mv "$outside"/wheels/*.whl "$outside/"
    basename "$outside"/sdpa-*t-*.whl
}

# pytest, with these variables of its environment (words) and arguments.
run() {
    inside sh -c "cd $place && env $1 venv/bin/pytest -q -p no:cacheprovider --dist=loadfile $2"
}

# The reports of ThreadSanitizer that are about the extension: races between two of its accesses, and whatever else
# names it. Python and NumPy are not instrumented, so memory that they free and use again under their own locks looks
# like a race, even where a call of the extension made them do so.
reports() {
    cat "$outside"/report.* 2>/dev/null | awk '
        # Whether the first function that is not the sanitizer is the extension, or the stack was not kept.
        function own(access, lines, n, i) {
            if (access ~ /failed to restore/) return 1
            n = split(access, lines, "\n")
            for (i = 1; i <= n; i++) if (lines[i] ~ /^ +#/ && lines[i] !~ /libtsan/) return lines[i] ~ /_core\./
        }
        BEGIN { RS = "=====+" }
        !/_core\./ { next }
        /data race/ {
            split($0, access, "\n\n")
            if (!own(access[1]) || !own(access[2])) next
        }
        1'
}

# The tests of threads, and the units in four threads at once, without a report; before them a race
# that has to be reported. Reports go to files: nobody looks at how a worker of pytest ends.
run_sanitized() {
    local isa options=TSAN_OPTIONS=log_path=$place/report:exitcode=0
    cat >"$outside/race.py" <<'END'
import threading
import numpy as np
import sdpa

x = np.ones((4, 400, 32), np.float32)
out, start = np.empty_like(x), threading.Barrier(6)

def write():
    start.wait()
    for _ in range(8):
        sdpa.attention(x, x, x, workers=1, out=out)

threads = [threading.Thread(target=write) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
END
    inside "${preload[@]}" "$options" SDPA_ISA=generic "$place/venv/bin/python" "$place/race.py"
    if [[ -z $(reports) ]]; then
        echo 'a race went unreported' >&2
        return 1
    fi
    rm "$outside"/report.*
    run "${preload[*]} $options" "--numprocesses=$jobs tests/kernels/test_threads.py" || return 1
    isa=$(inside "${preload[@]}" "$place/venv/bin/python" -c 'import sdpa; sdpa.show_config()' | sed -n 's/^isa: //p')
    run "${preload[*]} $options" "--parallel-threads=4 -k 'test_cache or f32 and $isa' ${units[*]}" || return 1
    reports | tee "$outside/races"
    [[ ! -s $outside/races ]]
}

# Results must have the bits of the build here: neither Python nor NumPy nor the compiler changes them. Unlike the tests
# this needs nothing but NumPy.
same_bits() {
    inside "${preload[@]}" "$place/venv/bin/python" "$place/tools/bits.py" >"$outside/bits" || return 1
    diff "$bits" "$outside/bits"
}

bits=${wheel%/*}/bits
"$own_python" "$here/tools/bits.py" >"$bits"
results=() failed=0
for name in "${versions[@]}"; do
    version=${name%%/*} release='' faults=()
    numpy=${name#"$version"}
    if [[ $version == *:* ]]; then release=${version%:*} version=${version#*:}; fi
    provide "$version" "$release"
    make_environment "$version" "${numpy#/}"
    same_bits || faults+=("other bits")
    add_tests "$version"
    case $version in
    *-tsan) run_sanitized || faults+=("failed under ThreadSanitizer") ;;
    *t)
        run "" "--numprocesses=$jobs ${tests[*]}" || faults+=("failed")
        run "" "--parallel-threads=4 ${units[*]}" || faults+=("failed in four threads")
        ;;
    *) run "" "--numprocesses=$jobs ${tests[*]} ${laboratory[*]}" || faults+=("failed") ;;
    esac
    if ((${#faults[@]})); then failed=1; else faults=(passed); fi
    results+=("$name: $(IFS=,; echo "${faults[*]}")")
done
printf '%s\n' "${results[@]}"
exit $failed
