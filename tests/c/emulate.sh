#!/usr/bin/env bash
# Runs DIRECTORY/PROGRAM, linked statically, with SDPA_ISA=SET on a CPU with AVX-512 and AMX that Bochs emulates:
# emulate.sh SET DIRECTORY PROGRAM ARGUMENT... Prints what the program prints, as it comes, and returns what it returns.
# DIRECTORY keeps the files of the last run: serial.txt (what the guest printed), bochs.txt and bochs.log (what Bochs
# says). build/debian keeps what was downloaded, 90 MB.
set -euo pipefail
export LC_ALL=C
debian=$(cd "$(dirname "$0")/../.." && pwd)/build/debian
set=$1
cd "$2"
program=$3
shift 3

# Bochs has AMX from version 3.0 on, and Linux `setcpuid` from 6.15 on: Debian 13 and its backports, unpacked beside the
# system, whatever its own release is. Nothing is installed, and nobody needs to be root.
packages=(bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso cpio busybox-static coreutils util-linux)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

fetch() {
    if ! command -v apt-get >/dev/null || [ ! -e $keyring ]; then
        echo 'the emulator needs apt-get and the package debian-archive-keyring, with which it fetches Bochs' >&2
        exit 1
    fi
    rm -rf "$debian" apt
    mkdir -p "$debian" apt/lists/partial apt/cache/archives/partial
    for suite in trixie trixie-backports; do
        echo "deb [arch=amd64 signed-by=$keyring] http://deb.debian.org/debian $suite main"
    done >apt/sources.list
    cat >apt/conf <<END
Dir::State::lists "$PWD/apt/lists";
Dir::State::status "/dev/null";
Dir::Cache "$PWD/apt/cache";
Dir::Etc::sourcelist "$PWD/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Sandbox::User "root";
END
    export APT_CONFIG=$PWD/apt/conf
    apt-get update
    apt-get install --download-only --yes --no-install-recommends "${packages[@]}"
    # Not with what it depends on: tools that make it boot a machine.
    (cd apt/cache/archives && apt-get download \
        "$(apt-cache pkgnames linux-binary-7 | grep 'cloud-amd64$' | sort --version-sort | tail -n 1)")
    for package in apt/cache/archives/*.deb; do dpkg --extract "$package" "$debian"; done
    rm -rf apt
    touch "$debian/complete"
}
[ -e "$debian/complete" ] || fetch

libraries=$debian/usr/lib/x86_64-linux-gnu
run=("$debian/usr/lib64/ld-linux-x86-64.so.2" --library-path "$libraries")

rm -rf guest iso
mkdir -p guest/{bin,lib,lib64,proc,tmp} iso
cp "$debian"/usr/bin/{busybox,chrt} "$program" guest/bin
cp "$libraries/libc.so.6" guest/lib
cp "$debian/usr/lib64/ld-linux-x86-64.so.2" guest/lib64
# Bochs does not save tiles where Linux leaves a thread for another one. chrt: nothing interrupts the program, and no
# thread of it ends another's turn. The last lines need a moment on the serial line.
cat > guest/init <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
echo -1 > /proc/sys/kernel/sched_rt_runtime_us
GLIBC_TUNABLES=${GLIBC_TUNABLES:-} SDPA_ISA=$set chrt --fifo 1 $program $*
echo "exit status \$?"
sleep 1
poweroff -f
END
chmod +x guest/init
(cd guest && find . | "${run[@]}" "$debian/usr/bin/cpio" --quiet -o -H newc) | gzip -1 > iso/initrd.gz

# setcpuid: XFD, without which Linux gives tiles to nobody. Bochs does not tell of it, but registers below stand for it.
# tsc: it counts instructions, as if they were 3.5 thousand million per second; other clocks take the number from `ips`.
# panic, reboot: by a triple fault, at which Bochs ends.
cat > iso/isolinux.cfg <<'END'
default linux
label linux
kernel vmlinuz
append initrd=initrd.gz console=ttyS0 loglevel=3 mitigations=off tsc=unstable setcpuid=324 panic=-1 reboot=t
END
cp "$debian"/usr/lib/modules/*/vmlinuz iso
cp "$debian/usr/lib/ISOLINUX/isolinux.bin" "$debian/usr/lib/syslinux/modules/bios/ldlinux.c32" iso
"${run[@]}" "$debian/usr/bin/xorriso" -as mkisofs -quiet -o boot.iso -b isolinux.bin -c boot.cat -no-emul-boot \
    -boot-load-size 4 -boot-info-table iso

# Registers that Bochs lacks, with their values at the start: those of XFD, and one that says that copies are fast.
cat > msrs <<'END'
0x1a0 0 00000000 00000001 00000000 00000000 00000000 00000000
0x1c4 0 00000000 00000000 00000000 00000000 00000000 00000000
0x1c5 0 00000000 00000000 00000000 00000000 00000000 00000000
END
# la57: page tables of five levels, which nothing here needs.
cat > bochsrc <<END
megs: 512
cpu: model=sapphire_rapids, exclude_features="la57", msrs="msrs", ips=100000000, reset_on_triple_fault=0
romimage: file=$debian/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=$debian/usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path=boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
display_library: term
clock: sync=none
log: bochs.log
plugin_ctrl: speaker=0
panic: action=fatal
END
# For the debugger built into Debian's Bochs: continue; quit.
printf 'c\nq\n' > commands

# Bochs does not end upon the first signal.
: > serial.txt
export TERM=xterm LTDL_LIBRARY_PATH=$libraries/bochs/plugins _STDBUF_O=L
timeout --kill-after=1 3600 "${run[@]}" --preload "$debian/usr/libexec/coreutils/libstdbuf.so" \
    "$debian/usr/bin/bochs-bin" -q -f bochsrc -rc commands > bochs.txt 2>&1 < /dev/null &
bochs=$!
trap 'kill $bochs 2>/dev/null || true' EXIT
echo 'Linux boots in Bochs, which takes a minute'

# Bochs shows the guest's screen on a terminal that it opens, and stands still once that is full: somebody has to read.
display=
until [ -n "$display" ] || ! kill -0 $bochs 2>/dev/null; do
    sleep 0.1
    display=$(sed -n 's/^Bochs connected to screen "\(.*\)".*/\1/p' bochs.txt)
done
(stty raw -echo && cat) 2>/dev/null < "$display" > /dev/null &
tail --follow --lines=+1 --pid=$bochs serial.txt | sed --unbuffered 's/\r$//'

status=$(sed -n 's/^exit status \([0-9]*\)\r*$/\1/p' serial.txt)
if [ -z "$status" ]; then
    echo "the program did not end within an hour, or Bochs failed: see $PWD/bochs.txt and bochs.log" >&2
    exit 1
fi
exit "$status"
