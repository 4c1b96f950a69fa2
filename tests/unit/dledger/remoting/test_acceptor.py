"""The door of remoting connections, whatever its front door does meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dledger.remoting.acceptor import RemotingAcceptor
from dledger.remoting.server import Handlers, RemotingServer, ServerLimits
from dledger.rpc import loops

TIMEOUT_S = 30
TURNS_MAX = 5
"""From an accepted socket to a connection, and some more."""


def a_server() -> RemotingServer:
    """It answers nothing."""
    limits = ServerLimits(9, 9, 9, 9, 9.0, 999, 999, unsent_bytes_max=999, host_unsent_bytes_max=999)
    return RemotingServer("test", Handlers({}, {}, lambda _: None, lambda _: None), limits)


@pytest.mark.parametrize("turns", range(1, TURNS_MAX))
def test_a_connection_given_up_while_it_is_made_is_forgotten(turns: int) -> None:
    """In whatever turn of the loop a time-out or a stop comes, it counts no longer, and the server can be closed."""

    async def main() -> None:
        server = a_server()
        door = RemotingAcceptor("test", server.protocol, None, None, TIMEOUT_S)
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            taking = asyncio.create_task(door.take_plain(accepted))
            for _ in range(turns):
                await asyncio.sleep(0)
            taking.cancel()
            was_given_up = isinstance((await asyncio.gather(taking, return_exceptions=True))[0], BaseException)
            for _ in range(TURNS_MAX):
                await asyncio.sleep(0)

            assert server.connections == (0 if was_given_up else 1)
            await server.close(0)
            assert server.connections == 0

    loops.run(asyncio.wait_for(main(), TIMEOUT_S))
