#!/bin/sh
# A base image from Debian's packages, for machines that cannot pull one: Debian 12 with its Python 3.11 and a shell.
#
#   image-base.sh FILE.tar       needs root, apt-get and Debian's keys; then: docker import FILE.tar dledger-base
#
# Packages are only unpacked: what their own scripts would do and a container needs is done here. So there is no package
# manager in it; what it consists of is in var/lib/dpkg/status.d, where scanners of images look.
set -eu
out=$1
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
work=$(mktemp -d)
root=$work/root
trap 'rm -rf "$work"' EXIT

# --- fetching, checked by Debian's signature: an apt that knows nothing of this machine's packages -------------------
mkdir -p "$work/lists/partial" "$work/archives/partial"
: >"$work/status"
echo "deb [signed-by=$keys target=Packages lang=none] $mirror bookworm main" >"$work/sources.list"
apt() {
    apt-get --quiet --yes --no-install-recommends \
        -o Acquire::Retries=3 -o APT::Sandbox::User=root \
        -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null \
        -o Dir::State::Lists="$work/lists" -o Dir::State::Status="$work/status" \
        -o Dir::State::Extended_States="$work/extended_states" -o Dir::Cache="$work" "$@"
}
apt -o APT::Update::Error-Mode=any update
apt --download-only install base-files base-passwd coreutils dash findutils grep sed libc-bin libstdc++6 usr-is-merged \
    python3-minimal libpython3-stdlib

# --- unpacking -------------------------------------------------------------------------------------------------------
mkdir -p "$root/usr" "$root/var/lib/dpkg/status.d"
for directory in bin lib lib64 sbin; do
    mkdir "$root/usr/$directory"
    ln -s "usr/$directory" "$root/$directory"
done
for package in "$work"/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" >"$work/files.tar"
    tar --extract --file "$work/files.tar" --directory "$root" --keep-directory-symlink --preserve-permissions \
        --numeric-owner --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/info/*' \
        --exclude='./usr/share/locale/*' --exclude='./usr/share/i18n/*'
    dpkg-deb --field "$package" >"$root/var/lib/dpkg/status.d/$(dpkg-deb --field "$package" Package)"
done

# --- what the packages' scripts would do -----------------------------------------------------------------------------
cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
cp "$root/usr/share/libc-bin/nsswitch.conf" "$root/etc/nsswitch.conf"
ln -s mawk "$root/usr/bin/awk"
ln -s /run "$root/var/run"
chroot "$root" ldconfig
chroot "$root" python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3.11 || true
rm -rf "$root"/var/cache/ldconfig/* "$root"/var/log/*

tar --create --file "$out" --directory "$root" --numeric-owner --sort=name .
