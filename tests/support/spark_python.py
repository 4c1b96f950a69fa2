"""What Spark runs as its Python in tests: has ``python -m MODULE …`` forked from a process that has the modules loaded.

Whoever starts this sees a process as ever: the other has its files, arguments and environment, gets its SIGTERM, and
this ends with the other's status. Copied to where Spark finds it, and run without ``site``, so it knows no package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORKS = "TESTS_SPARK_FORKS"
"""Names the socket of ``spark_forks``."""


def main() -> None:
    """Have it forked, and stay until it has ended."""
    words = sys.argv[1:]
    if words[:1] != ["-m"]:
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[FORKS])
        wish = json.dumps({"words": words[1:], "environment": dict(os.environ), "directory": os.getcwd()}).encode()
        socket.send_fds(connection, [len(wish).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(wish)
        forked = int.from_bytes(connection.recv(4), "big")
        for descriptor in (0, 1):  # whose ends tell something, and are the other's alone now
            os.close(descriptor)
        if forked:
            signal.signal(signal.SIGTERM, lambda number, _frame: os.kill(forked, number))
        status = connection.recv(1)
    sys.exit(status[0] if status else 1)


if __name__ == "__main__":
    main()
