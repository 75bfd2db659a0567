#!/usr/bin/env bash
# Runs DIRECTORY/PROGRAM, linked statically, with SDPA_ISA=avx512 on a CPU with AVX-512 that Bochs emulates:
# emulate.sh DIRECTORY PROGRAM ARGUMENT... Prints what the program prints, as it comes, and returns what it returns.
# DIRECTORY keeps what was downloaded, and the files of the last run: serial.txt (what the guest printed), bochs.txt and
# bochs.log (what Bochs says).
set -euo pipefail
export LC_ALL=C
cd "$1"
program=$2
shift 2

packages=(bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso cpio)
has_packages() { dpkg --status "${packages[@]}" >/dev/null 2>&1; }

# Not installed: the kernel would go into the machine's boot menu, and the static busybox replaces the other one.
fetch() {
    apt-get download "$1"
    dpkg --extract "$1"_*.deb debian
    rm "$1"_*.deb
}

if ! has_packages || [ ! -e debian/complete ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update
        apt-get install --yes --no-install-recommends "${packages[@]}"
    elif ! has_packages; then
        echo "the emulator needs, on Debian: apt-get install ${packages[*]}" >&2
        exit 1
    fi
    rm -rf debian
    fetch "$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: //p')"
    fetch busybox-static
    touch debian/complete
fi

rm -rf guest iso
mkdir -p guest/bin guest/proc guest/tmp iso
cp debian/bin/busybox "$program" guest/bin
# The last lines need a moment on the serial line.
cat > guest/init <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
GLIBC_TUNABLES=${GLIBC_TUNABLES:-} SDPA_ISA=avx512 $program $*
echo "exit status \$?"
sleep 1
poweroff -f
END
chmod +x guest/init
(cd guest && find . | cpio --quiet -o -H newc) | gzip -1 > iso/initrd.gz

# clearcpuid: Bochs 2.7 gives a wrong size for what these two save, upon which Linux does without AVX altogether.
# tsc: it counts instructions, as if they were 3.5 thousand million per second; other clocks take the number from `ips`.
# panic, reboot: by a triple fault, at which Bochs ends.
cat > iso/isolinux.cfg <<'END'
default linux
label linux
kernel vmlinuz
append initrd=initrd.gz console=ttyS0 loglevel=3 mitigations=off tsc=unstable clearcpuid=xsavec,xsaves panic=-1 reboot=t
END
cp debian/boot/vmlinuz-* iso/vmlinuz
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 iso
xorriso -as mkisofs -quiet -o boot.iso -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table iso

# Linux hangs on Bochs's models of newer CPUs.
cat > bochsrc <<'END'
megs: 512
cpu: model=corei7_skylake_x, ips=100000000, reset_on_triple_fault=0
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
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
TERM=xterm timeout --kill-after=1 3600 stdbuf -oL bochs -q -f bochsrc -rc commands > bochs.txt 2>&1 < /dev/null &
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
