#!/usr/bin/env bash
# Proves that `make test` passes, without root, on a machine that has nothing but Python, make and the basic programs of
# any Linux: a clean clone of the last commit, a PATH of its own, and of the tests of `make test` those that start
# programs or look at the machine (`tools/bare-machine.sh test`: all of them). What the machine lacks must be one line of
# the summary each. The packages are those of this clone's environment.
set -euo pipefail
cd "$(dirname "$0")/.."
tier=${1:-machine}

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
chmod 755 "$place"
git clone --quiet . "$place/clone"
mkdir "$place/bin" "$place/home"
for program in awk bash env expr grep make sed sh basename cat chmod comm cp cut date dirname false getconf head kill ln ls \
    mkdir mktemp mount mv nproc readlink rm rmdir setsid sleep sort tail tee touch tr true truncate umount uname uniq \
    wc; do
    ln -s "$(type -P "$program")" "$place/bin/$program"
done

python=$(readlink -f .venv/bin/python)
packages=$(PYTHONPATH='' .venv/bin/python -c 'import pytest; print(pytest.__path__[0].rpartition("/")[0])')
lacking=(zsh fish Java)
as_user=()
if [ "$(id -u)" = 0 ]; then
    nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
    for one in "$python" "/usr/bin/$(basename "$python")"; do
        if "${nobody[@]}" test -x "$one" -a -r "$packages/pytest"; then
            python=$one as_user=("${nobody[@]}")
            break
        fi
    done
    chown -R 65534:65534 "$place"
fi
if [ "$(id -u)" = 0 ] && [ "${#as_user[@]}" = 0 ]; then
    echo "run by root: others may not read $python or $packages"
else
    lacking+=(root)
fi
ln -s "$python" "$place/bin/python3"

run() { "${as_user[@]}" env -i -C "$place/clone" PATH="$place/bin" HOME="$place/home" LANG=C.UTF-8 "$@"; }
run make .venv/.python
run bash -c "cd .venv/lib/python3.*/site-packages && printf '%s\\n' '$place/clone' '$packages' >packages.pth"
run bash -c "printf '#!%s\\nfrom dledger_cli.entry import main\\nmain()\\n' '$place/clone/.venv/bin/python' >.venv/bin/dledger"
run chmod 755 .venv/bin/dledger
run touch .venv/.installed-demo .venv/.installed
run make test PYTEST_ARGS="--tier=$tier" TESTS="${TESTS:-tests}" | tee "$place/log"

for thing in "${lacking[@]}"; do
    lines=$(grep -cE "^no $thing: [0-9]+ tests? skipped \(.+\)$" "$place/log" || true)
    [ "$lines" = 1 ] || { echo "$lines lines of the summary say that there is no $thing, instead of one" >&2; exit 1; }
done
