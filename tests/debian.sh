# shellcheck shell=bash
# shellcheck disable=SC2016 # fields of apt-get, not of the shell
# Makes a root of a release of Debian, of the mirror that serves this machine: RELEASE ROOT, then debootstrap's options.
make_debian() {
    local release=$1 root=$2 mirror
    shift 2
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^Debian //p' | head -n 1)
    debootstrap --variant=minbase "$@" "$release" "$root" "$mirror"
}
