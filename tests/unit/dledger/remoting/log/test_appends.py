"""Appends that wait for room, on the loop that they wait on."""

from __future__ import annotations

import asyncio
from typing import cast

from dledger.config import ReplicationConfig, ServerConfig
from dledger.monitoring import Conditions
from dledger.remoting.frame import Frame, cut, encode
from dledger.remoting.log_codec import LogCode
from dledger.remoting.log_service import LogHandlers, log_server
from dledger.rpc import loops
from dledger.rpc.clients.log_requests import LogRequests
from dledger.rpc.loops import LoopBridge
from tests.support.fake_node import FakeNode
from tests.unit.dledger.remoting.log.harness import append_body
from tests.unit.dledger.remoting.test_connection import Transport

TURNS = 5
"""After which a task that was woken has run."""


def test_no_append_overtakes_one_that_has_just_got_room() -> None:
    """It arrives in the very turn in which there is room again, before those in the line go on."""

    async def test() -> None:
        node = FakeNode(hold=True)
        config = ServerConfig(client_port=0, replication=ReplicationConfig(pending_entries_max=2))
        requests = LogRequests(config, node, LoopBridge(), None, Conditions("n0"))
        server = log_server(requests, LogHandlers(requests))
        connection, transport = server.protocol(), Transport("192.0.2.1")
        transport.protocol = connection
        connection.connection_made(cast("asyncio.Transport", transport))

        def arrive(*numbers: int) -> None:
            frames = [encode(Frame(LogCode.APPEND, number, body=append_body(b"%d" % number))) for number in numbers]
            connection.data_received(b"".join(frames))

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        arrive(1, 2, 3)
        await turns()
        assert node.batches == [(b"1",)]
        node.hold = False
        node.release()
        arrive(4)
        await turns()

        assert node.batches == [(b"1",), (b"2",), (b"3",), (b"4",)]
        assert [one.opaque for one in cut(bytes(transport.written))[0]] == [1, 2, 3, 4]
        await server.close(0)
        requests.close()

    loops.run(asyncio.wait_for(test(), 30))
