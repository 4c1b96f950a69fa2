"""Listening sockets: how a port is opened, what is said if it cannot be, and how a server of asyncio's is closed."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from dledger.errors import ConfigError
from dledger.values import address_text

_BACKLOG: Final = 1024
_TURNS_UNTIL_CONNECTED: Final = 2
"""How many turns of the loop asyncio takes from an accepted socket to ``connection_made``."""


GRPC_ADVICE: Final = "set grpcServerPort to another port, or to 0 for none"


def listen(host: str, port: int, whose: str, advice: str = "") -> list[socket.socket]:
    """Listen on every address of ``host`` (``localhost`` has two), on the same port. Raises ``ConfigError``."""
    listening: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            one.bind((address[0], listening[0].getsockname()[1] if len(listening) > 1 else port, *address[2:]))
            one.listen(_BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in listening:
            one.close()
        raise ConfigError([bind_problem(host, port, whose, advice)]) from error
    return listening


def listen_for_clients(host: str, port: int, whose: str, advice: str = "") -> list[socket.socket]:
    """``listen``, where ``0.0.0.0`` includes the addresses of IPv6, as gRPC takes it. Raises ``ConfigError``."""
    return listen("::" if host == "0.0.0.0" and socket.has_dualstack_ipv6() else host, port, whose, advice)


def bind_problem(host: str, port: int, whose: str, advice: str = "") -> str:
    """Why listening failed, and what to do."""
    address = address_text(host, port)
    return (
        f"cannot listen on the {whose} address {address}: the port is in use, or this machine does not have that "
        f"address{advice and f': {advice}'}"
    )


async def stop_serving(server: asyncio.Server) -> None:
    """Close asyncio's server, after everything that it has accepted became a connection, which its protocol knows.

    A mere ``close`` would lose sockets: asyncio makes each a transport two turns of the loop after it was accepted, and
    by then refuses to, or was cancelled before.
    """
    for one in server.sockets:
        asyncio.get_running_loop().remove_reader(one.fileno())
    for _ in range(_TURNS_UNTIL_CONNECTED):
        await asyncio.sleep(0)
    server.close()
