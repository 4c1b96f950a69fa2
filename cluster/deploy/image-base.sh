#!/bin/sh
# A base image from Debian's packages, for machines that cannot pull one: Debian 12 with its Python 3.11.
#
#   image-base.sh FILE.tar       needs root and debootstrap; then: docker import FILE.tar dledger-base
set -eu
out=$1
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
work=$(mktemp -d)
root=$work/root
trap 'rm -rf "$work"' EXIT
mkdir "$root" "$work/packages"

# One of a hundred downloads fails now and then: what is there is not fetched again.
attempt=1
until debootstrap --download-only --cache-dir="$work/packages" --variant=minbase \
    --include=python3-minimal,libpython3-stdlib bookworm "$root" "$mirror"; do
    [ "$attempt" -lt 3 ] || exit 1
    attempt=$((attempt + 1))
done
debootstrap --cache-dir="$work/packages" --variant=minbase \
    --include=python3-minimal,libpython3-stdlib bookworm "$root" "$mirror"

rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*
rm -rf "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/* "$root"/usr/share/locale/*
rm -rf "$root"/usr/share/zoneinfo/* "$root"/usr/share/i18n/*
find "$root"/usr/lib/python3* -name __pycache__ -prune -exec rm -rf {} +
rm -f "$root"/etc/resolv.conf "$root"/etc/hostname
chroot "$root" python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3.11 || true

tar --create --file "$out" --directory "$root" --numeric-owner --sort=name .
