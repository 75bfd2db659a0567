#!/usr/bin/env bash
# Tests one wheel on the Pythons of Debian unstable:
# tests/pythons.sh WHEEL ROOT VERSION... [-- TESTS]
# ROOT is made by debootstrap if it is not there: half a gigabyte. Needs the rights of root and
# changes nothing outside ROOT.
set -euo pipefail
wheel=$1 root=$2
shift 2
versions=()
while (($#)) && [[ $1 != -- ]]; do
    versions+=("$1")
    shift
done
(($#)) && shift
tests=("$@")
if ((${#tests[@]} == 0)); then
    tests=(tests/kernels/test_config.py tests/kernels/test_process.py tests/refusals)
    tests+=(tests/attention/test_{unit,cache,semantics}.py tests/softmax/test_unit.py)
fi
here=$(cd "$(dirname "$0")/.." && pwd)

if [[ ! -x $root/usr/bin/apt-get ]]; then
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^Debian //p' | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates,gcc,libc6-dev sid "$root" "$mirror"
fi
# What pip was told here, it is told there; certificates too.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
if [[ -e /etc/pip.conf ]]; then cp /etc/pip.conf "$root/etc/"; fi
inside() { chroot "$root" env OMP_NUM_THREADS= "$@"; }
unmount() { umount --lazy "$root/proc" "$root/dev" 2>/dev/null || true; }
trap unmount EXIT
mount --bind /dev "$root/dev"
mount -t proc proc "$root/proc"

failed=()
for version in "${versions[@]}"; do
    [[ -x $root/usr/bin/python$version ]] ||
        inside apt-get install --yes --no-install-recommends "python$version-venv"
    place=/tmp/sdpa-$version
    rm -rf "${root:?}$place"
    mkdir -p "$root$place"
    cp -r "$here"/{tests,src,tools,setup.py,pyproject.toml} "$wheel" "$root$place/"
    inside "python$version" -m venv "$place/venv"
    inside "$place/venv/bin/pip" install --quiet "$place/${wheel##*/}[test]"
    inside "$place/venv/bin/python" -c 'import platform, numpy, sdpa
print("=== Python", platform.python_version(), "NumPy", numpy.__version__, sdpa.__file__)'
    options="-q -p no:cacheprovider --numprocesses=${JOBS:-2} --dist=loadfile"
    inside sh -c "cd $place && venv/bin/pytest $options ${tests[*]}" || failed+=("$version")
done
echo "${#versions[@]} Pythons, failed: ${failed[*]:-none}"
((${#failed[@]} == 0))
