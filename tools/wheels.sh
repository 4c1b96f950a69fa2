#!/usr/bin/env bash
# Builds the wheel, and installs it in clean environments: alone and with each extra, for every Python from 3.11 to 3.14
# that this machine has, two at a time; starts the demo from each. Says in one line which those were. The programs that
# build the wheel are those of this clone's environment.
set -euo pipefail
cd "$(dirname "$0")/.."

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH
builder=$PWD/.venv/bin/python
pip() { "$1" -m pip --quiet --disable-pip-version-check "${@:2}"; }
install() { pip "$1" install --no-compile "$2"; } # modules are compiled as they are imported: most of them never are

git clone --quiet . "$place/clone"
pip "$builder" wheel --no-deps --wheel-dir "$place" "$place/clone"
wheel=$(echo "$place"/*.whl)

# What proves that an extra has what it is for.
declare -A works=(
    [bench]='import matplotlib, pysyncobj; from importlib.metadata import version; version("py-spy")'
    [compression]='import lz4.frame, zstandard'
    [console]='import uvicorn; from dledger_cli.console.server import ConsoleServer'
    [delta]='import deltalake, dledger_spark.jobs.delta_table'
    [otel]='from rocketstore.client.aio.tracing import OpenTelemetry; OpenTelemetry()'
    [spark]='import pyspark, pyarrow, dledger_spark; from pyspark_dledger import *'
    [spark-connect]='import grpc_status, pandas; from pyspark.sql.connect.session import SparkSession'
)
check() { # what it is called, and a command
    local name=$1 log=$place/${1%%:*}.log
    shift
    if (cd "$place" && "$@") >"$log" 2>&1; then
        echo "ok: $name"
    else
        echo "FAILED: $name"
        tail -40 "$log"
    fi
}

find_python() { # the newest of a version that can make environments; pyenv's are not on the PATH
    local one
    for one in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python; do
        if "$one" -c "import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            "$one" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

extras=$("$builder" - <<'END'
import tomllib
print(*sorted(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"].keys() - {"dev"}))
END
)
try_python() { # its version, the program, and its number, from 1
    local version=$1 python=$2 number=$3 venv=$place/venv-$1 extra proof
    export LOCAL_PORTS=$number/4 # demos run side by side
    check "$version: environment" "$python" -m venv "$venv"
    check "$version: wheel" install "$venv/bin/python" "$wheel"
    check "$version: no conflicts" pip "$venv/bin/python" check
    check "$version: demo" "$venv/bin/dledger" demo
    check "$version: commands" "$venv/bin/dledger" --version
    for extra in $extras; do
        # An extra without its line above fails by name.
        proof=${works[$extra]-raise SystemExit("add to tools/wheels.sh how to see that $extra works")}
        # Spark is 500 MB, and its own matter: one version shows that the extra names what it needs.
        case $extra in spark* | delta) [ "$number" = 1 ] || continue ;; esac
        check "$version: [$extra]" install "$venv/bin/python" "$wheel[$extra]"
        check "$version: [$extra] works" "$venv/bin/python" -W error::DeprecationWarning:__main__ -c "$proof"
    done
    rm -rf "$venv"
}

tried=() not_here=() running=0
for version in 3.11 3.12 3.13 3.14; do
    if ! python=$(find_python "$version"); then
        not_here+=("$version")
        continue
    fi
    tried+=("$version")
    [ "$running" -lt 2 ] || { wait -n && running=$((running - 1)); }
    try_python "$version" "$python" "${#tried[@]}" 2>&1 | tee -a "$place/lines" &
    running=$((running + 1))
done
for ((; running > 0; running--)); do wait -n; done
passed=$(grep -c '^ok: ' "$place/lines" || true) failed=$(grep -c '^FAILED: ' "$place/lines" || true)
echo "Python tried: ${tried[*]}; not on this machine: ${not_here[*]:-none}"
echo "=== $passed passed, $failed failed in ${SECONDS}.0s ==="
[ "$failed" = 0 ] && [ "$passed" != 0 ]
