"""Free TCP ports of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listened on a moment ago, all different."""
    with ExitStack() as sockets:
        found = []
        for _ in range(count):
            one = sockets.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(one.getsockname()[1])
    return found
