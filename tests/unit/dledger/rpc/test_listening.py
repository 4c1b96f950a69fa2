"""The end of a listening server of asyncio's."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from contextlib import suppress

import pytest

from dledger.rpc import loops
from dledger.rpc.listening import stop_serving

TIMEOUT_S = 120.0


@pytest.mark.parametrize("turns", range(6))
def test_a_server_that_stops_loses_no_connection_that_it_has_accepted(turns: int) -> None:
    """Each is known to a protocol, or was never accepted, however many turns of the loop ago it came."""
    made: list[asyncio.BaseTransport] = []

    class Known(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Known, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname(), TIMEOUT_S) as link:
            for _ in range(turns):
                await asyncio.sleep(0)
            await stop_serving(server)
            known = list(made)
            for one in known:
                one.close()
            link.setblocking(False)
            with suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(link, 1) == b""
            assert made == known, "none came later"

    with warnings.catch_warnings(record=True) as lost:
        warnings.simplefilter("always", ResourceWarning)
        loops.run(asyncio.wait_for(main(), TIMEOUT_S))
        gc.collect()
    assert [str(one.message) for one in lost] == []
