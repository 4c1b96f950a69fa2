"""A raw copy over a socket: ``python -m benchmarks.children.raw_copy send BYTES FILE…`` and ``… receive PORT FILE``.

The sender reads files and sends them; the receiver writes what arrives to a new file, and prints its rate.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1 << 20
HOST: Final = "127.0.0.1"


def send(files: Sequence[Path], bytes_max: int) -> None:
    """Say at which port, and send so much to anyone who connects."""
    with socket.create_server((HOST, 0)) as listening:
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)  # noqa: T201  # it is read by the benchmark
        link, _ = listening.accept()
    with link:
        for file in files:
            with file.open("rb", buffering=0) as source:
                while bytes_max and (data := source.read(min(CHUNK_BYTES, bytes_max))):
                    link.sendall(data)
                    bytes_max -= len(data)


def receive(port: int, file: Path) -> dict[str, float]:
    """Write what arrives; how much, and in how many seconds."""
    room = memoryview(bytearray(CHUNK_BYTES))
    received = 0
    with socket.create_connection((HOST, port)) as link, file.open("wb", buffering=0) as target:
        started = time.perf_counter()
        while count := link.recv_into(room):
            target.write(room[:count])
            received += count
        return {"bytes": received, "seconds": time.perf_counter() - started}


def main(arguments: Sequence[str]) -> None:
    """Do what the command line says."""
    if arguments[0] == "send":
        send([Path(one) for one in arguments[2:]], int(arguments[1]))
    else:
        print(json.dumps(receive(int(arguments[1]), Path(arguments[2]))), flush=True)  # noqa: T201  # as above


if __name__ == "__main__":
    main(sys.argv[1:])
