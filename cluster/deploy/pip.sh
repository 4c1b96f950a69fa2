#!/bin/sh
# pip for /opt/dledger, which has none itself: the base image's, or else the one among the wheels.
set -eu
for wheel in /src/wheels/pip-*.whl; do
    if [ -e "$wheel" ]; then
        PYTHONPATH=$wheel
        export PYTHONPATH
    fi
done
exec python3 -m pip --python /opt/dledger/bin/python --disable-pip-version-check --no-cache-dir --quiet "$@"
