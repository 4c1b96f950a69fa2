#!/bin/sh
# Regenerates dledger/pb from proto/dledger/v1. With --check: fails when what is checked in differs.
#
# Only messages are generated: services are wired by hand in dledger/rpc, which keeps bytes undecoded until a handler
# can answer garbage with a clear status. PYTHON names the interpreter that has grpcio-tools.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out=.
if [ "${1:-}" = "--check" ]; then
    out="$(mktemp -d)"
    trap 'rm -rf "$out"' EXIT
fi
"$python" -m grpc_tools.protoc -I dledger/pb=proto/dledger/v1 --python_out="$out" --pyi_out="$out" \
    proto/dledger/v1/*.proto
[ "$out" = . ] && exit 0
status=0
for name in "$out"/dledger/pb/*; do
    if ! diff -u "dledger/pb/$(basename "$name")" "$name"; then
        status=1
    fi
done
[ "$status" = 0 ] || echo "dledger/pb is stale: run 'make proto' with the grpcio-tools version of pyproject.toml" >&2
exit "$status"
