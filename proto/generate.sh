#!/bin/sh
# Regenerates dledger/pb and rocketstore/pb from proto/. With --check: fails when what is checked in differs.
#
# Only messages are generated: services are wired by hand, which keeps bytes undecoded until a handler can answer garbage
# with a clear status. RocketMQ's messages are in a pool of their own, so that a process can import RocketMQ's Python
# client besides, which registers the same names. PYTHON names the interpreter that has grpcio-tools.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out=.
if [ "${1:-}" = "--check" ]; then
    out="$(mktemp -d)"
    trap 'rm -rf "$out"' EXIT
fi
status=0
"$python" -m grpc_tools.protoc -I dledger/pb=proto/dledger/v1 --python_out="$out" --pyi_out="$out" proto/dledger/v1/*.proto

made="$(mktemp -d)"
"$python" -m grpc_tools.protoc -I proto --python_out="$made" --pyi_out="$made" proto/apache/rocketmq/v2/*.proto
mkdir -p "$out/rocketstore/pb"
for name in "$made"/apache/rocketmq/v2/*; do
    sed -e 's/^from apache\.rocketmq\.v2 import/from rocketstore.pb import/' \
        -e 's/^from google\.protobuf import descriptor_pool as _descriptor_pool$/from rocketstore.pb.pool import POOL as _POOL/' \
        -e 's/_descriptor_pool\.Default()/_POOL/' \
        -e "s/'apache\.rocketmq\.v2\./'rocketstore.pb./" "$name" > "$out/rocketstore/pb/$(basename "$name")"
done
rm -r "$made"
if [ "$out" != . ]; then
    for name in "$out/dledger/pb"/* "$out/rocketstore/pb"/*; do
        if ! diff -u "${name#"$out"/}" "$name"; then
            status=1
        fi
    done
fi
[ "$status" = 0 ] || echo "generated code is stale: run 'make proto' with the grpcio-tools version of pyproject.toml" >&2
exit "$status"
