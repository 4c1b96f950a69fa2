"""Requests to other programs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FLAG_ONEWAY, Frame
from dledger.remoting.server import Handlers, RemotingServer, ServerLimits
from dledger.rpc import loops

_CODE = 1
MIB = 1 << 20


def _with_server(test: Callable[[RemotingClient, str, list[int]], Awaitable[None]]) -> None:
    """``test`` gets a client, a server's address, and the bodies of the requests in the order in which they came."""

    async def run() -> None:
        came: list[int] = []

        def take(connection: RemotingConnection, frame: Frame) -> None:
            came.append(int(frame.body))
            connection.done(frame, frame.answer())

        handlers = Handlers({_CODE: take}, {}, lambda _: None, lambda _: None)
        server = RemotingServer("test", handlers, ServerLimits(9, 9, 9, 9, 9.0, *[MIB] * 4))
        listening = await asyncio.get_running_loop().create_server(server.protocol, "127.0.0.1", 0)
        host, port = listening.sockets[0].getsockname()
        client = RemotingClient()
        try:
            await asyncio.wait_for(test(client, f"{host}:{port}", came), 30)
        finally:
            await client.close()
            await server.close(0)
            listening.close()

    loops.run(run())


def test_requests_arrive_in_the_order_in_which_they_are_made_also_while_connecting() -> None:
    """A slave passes on a client's messages: those of an ordered queue must not overtake each other."""

    async def test(client: RemotingClient, address: str, came: list[int]) -> None:
        calls: list[asyncio.Task[object]] = []
        while not came:  # some in every turn of the loop until it is connected, and those turns above all
            for _ in range(2):
                request = Frame(_CODE, 0, body=b"%d" % len(calls))
                calls.append(asyncio.create_task(client.call(address, request, 30)))
            oneway = Frame(_CODE, 0, body=b"%d" % len(calls), flag=FLAG_ONEWAY)
            calls.append(asyncio.create_task(client.tell(address, oneway)))
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
        while len(came) < len(calls):
            await asyncio.sleep(0)
        assert came == list(range(len(calls)))

    _with_server(test)


def test_a_call_that_gives_up_lets_the_others_go_on() -> None:
    """It may have waited for its turn, or for its answer."""

    async def test(client: RemotingClient, address: str, came: list[int]) -> None:
        calls = [asyncio.create_task(client.call(address, Frame(_CODE, 0, body=b"%d" % n), 30)) for n in range(9)]
        await asyncio.sleep(0)
        for one in calls[:5]:
            one.cancel()
        assert [answer.code for answer in await asyncio.gather(*calls[5:])] == [0] * 4
        assert came == [5, 6, 7, 8]

    _with_server(test)


def test_whoever_wants_to_know_is_told_of_connections_that_end() -> None:
    """A restarted name server has forgotten who registered. Closing the client itself is no news."""

    async def run() -> None:
        lost: list[str] = []
        links: list[asyncio.StreamWriter] = []

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            links.append(writer)

        listening = await asyncio.start_server(accept, "127.0.0.1", 0)
        host, port = listening.sockets[0].getsockname()
        address = f"{host}:{port}"
        client = RemotingClient(lost=lost.append)
        for number in range(2):
            await client.tell(address, Frame(_CODE, 0))
            while len(links) == number:
                await asyncio.sleep(0)
            assert lost == [address] * number
            if not number:
                links[0].close()
                while not lost:
                    await asyncio.sleep(0)
        await client.close()
        links[1].close()
        listening.close()
        await listening.wait_closed()
        assert lost == [address]

    loops.run(asyncio.wait_for(run(), 30))
