#!/usr/bin/env bash
# with-dockerd.sh COMMAND…: runs the command beside a dockerd, which ends with it.
#
# If a Docker daemon answers already, the command uses that one. Otherwise, and as root, this starts one in a directory
# of its own, and tells the command by DOCKER_HOST. Commands that run at the same time share it, and the last one ends it
# with all that it holds, whatever signal ends the command. After SIGKILL of this script the next run takes it over.
# Where no dockerd can be started, the command runs without one, and one line says why.
#
# The machine's packet filter stays as it is: the daemon sets no rules (those of dockerd stay when it ends, and if
# forwarding was off, it drops what other bridges forward). So containers reach each other and this machine, and published
# ports are reached through dockerd's proxy; containers do not reach other machines.
set -euo pipefail
[ "$#" -gt 0 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 64; }

dir=${WITH_DOCKERD_DIR:-/var/lib/dledger-dockerd}
url=unix://$dir/docker.sock
patience=${WITH_DOCKERD_TRIES:-600} # tenths of a second
signals=(TERM INT HUP QUIT)
daemon='' # what this script has started

answers() { docker ${1:+--host "$1"} info >/dev/null 2>&1; }
is_running() { grep -qsF "$dir/pid" "/proc/$(cat "$dir/pid" 2>/dev/null)/cmdline"; } # never another process of that number
without() { echo "with-dockerd.sh: no Docker: $*" >&2; exec "${command[@]}"; }

start() { # exit code 1 if it does not answer within a minute
    is_running && answers "$url" && return
    halt # one that hangs
    rm -f "$dir/pid"
    # --bridge none: containers use networks made for them
    setsid dockerd --host "$url" --pidfile "$dir/pid" --data-root "$dir/data" --exec-root "$dir/exec" \
        --bridge none --iptables=false --ip6tables=false --ip-forward=false \
        </dev/null >"$dir/log" 2>&1 8>&- 9>&- &
    daemon=$!
    for ((tries = 0; tries < patience; tries++)); do
        ! answers "$url" || return 0
        kill -0 "$daemon" 2>/dev/null || return 1
        sleep 0.1
    done
    return 1
}

halt() { # what runs in this directory, or was started to
    local signal tries
    for signal in TERM KILL; do
        ! is_running || kill "-$signal" "$(cat "$dir/pid")" || true
        [ -z "$daemon" ] || kill "-$signal" "$daemon" 2>/dev/null || true # before it has written its pid
        for ((tries = 0; tries < 300; tries++)); do
            is_running || { [ "$daemon" ] && kill -0 "$daemon" 2>/dev/null; } || break 2
            sleep 0.1
        done
    done
    daemon=''
}

end() {
    if answers "$url"; then # faster than dockerd, which gives each container ten seconds
        docker --host "$url" ps --all --quiet | xargs --no-run-if-empty docker --host "$url" rm --force >/dev/null || true
        docker --host "$url" network prune --force >/dev/null || true # dockerd leaves its bridges
    fi
    halt
    awk -v dir="$dir/" 'index($2, dir) == 1 { print $2 }' /proc/self/mounts | tac | xargs --no-run-if-empty umount --lazy || true
    rm -rf "$dir/data" "$dir/exec" "$dir/pid" "$dir/docker.sock"
}

command=("$@")
! answers "" || exec "$@"
[ "$(id -u)" = 0 ] || without "no daemon answers, and only root can start one"
for tool in dockerd containerd runc; do
    command -v "$tool" >/dev/null || without "no daemon answers, and $tool is missing (apt-get install docker.io)"
done

mkdir -p -m 700 "$dir"
exec 8>"$dir/users" 9>"$dir/door" # users of the daemon hold a shared lock; it starts and ends behind the door
leave() {
    trap '' "${signals[@]}"
    flock 9
    ! flock --nonblock --exclusive 8 || end
}
trap leave EXIT
trap 'exit 143' "${signals[@]}"
flock 9
flock --shared 8
if ! start && ! start; then # dockerd gives containerd 15 s, which a busy machine may need for itself
    tail -n 5 "$dir/log" >&2
    trap - EXIT
    leave
    trap - "${signals[@]}" # a command inherits what is ignored
    exec 8>&- 9>&-
    without "dockerd does not start: see above"
fi
flock --unlock 9

# a session of its own: signals, also a terminal's, reach the command through us, once
group='' early=''
forward() {
    signalled=1
    if [ "$group" ]; then kill "-$1" -- "-$group" || kill "-$1" "$group" || true; else early=$1; fi 2>/dev/null
}
for signal in "${signals[@]}"; do
    # shellcheck disable=SC2064 # this signal
    trap "forward $signal" "$signal"
done
DOCKER_HOST=$url setsid env --default-signal=INT,QUIT "$@" <&0 8>&- 9>&- &
group=$!
[ -z "$early" ] || forward "$early"
while # a signal interrupts the wait
    signalled='' status=0
    wait "$group" || status=$?
    [ "$signalled" ]
do :; done
exit "$status"
