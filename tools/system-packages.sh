#!/usr/bin/env bash
# Installs Debian's packages for the tests that need more than Python: shells, Java, a browser, Docker, file systems.
# Exit code 1, saying what is missing, where that needs a right that we do not have, or where there is no apt.
set -euo pipefail

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo -n "$@"; else return 1; fi; }
has() { command -v "$1" >/dev/null || [ -x "/sbin/$1" ] || [ -x "/usr/sbin/$1" ]; }

missing=()
has make || missing+=(make)
has python3 || missing+=(python3)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
has ip || missing+=(iproute2)
has mkfs.ext4 || missing+=(e2fsprogs)
has iptables || missing+=(iptables)
has strace || missing+=(strace)
has dockerd || missing+=(docker.io)
has docker-compose || missing+=(docker-compose)
has promtool || missing+=(prometheus)
has chromium || missing+=(chromium)
has chromedriver || missing+=(chromium-driver)
has zsh || missing+=(zsh)
has fish || missing+=(fish)
has systemd-analyze || missing+=(systemd)
has java || missing+=(openjdk-17-jre-headless) # for Spark
[ "${#missing[@]}" -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || ! as_root true 2>/dev/null; then
    echo "not installed, for want of apt or root: ${missing[*]}"
    exit 1
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
as_root apt-get update -qq
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then # packages of servers start them: here only tests shall
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
    trap 'as_root rm -f "$policy"' EXIT
fi
as_root apt-get install -qq --no-install-recommends -y "${missing[@]}" >/dev/null
