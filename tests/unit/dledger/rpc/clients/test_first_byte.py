"""The relay that decides by the first byte, between sockets and two servers that answer with the name of their port."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from dledger.rpc.clients.grpc_server import PRIVATE_HOST, FirstByteRelay
from dledger.rpc.listening import listen
from dledger.rpc.loops import run

TIMEOUT_S = 120.0
LOOKS = 100
"""As long as so many looks, a millisecond apart, find the same, nothing moves."""
TLS, PLAINTEXT = b"\x16...", b"PRI *"


class Behind:
    """Two private servers: each says its name, then repeats what it receives; or, told ``floods``, sends for ever."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.flooded = 0
        self.floods = False
        self.ports: list[int] = []
        self._servers: list[asyncio.Server] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        for name in (b"tls ", b"plaintext "):

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: bytes = name) -> None:
                self._writers.append(writer)
                host, port = writer.get_extra_info("peername")
                self.peers.append(f"ipv4:{host}:{port}")
                writer.write(name)
                try:
                    while self.floods:
                        writer.write(bytes(65536))
                        await writer.drain()
                        self.flooded += 65536
                    while data := await reader.read(65536):
                        writer.write(data)
                        await writer.drain()
                    writer.write(b" end")
                except ConnectionError:
                    pass
                writer.close()

            self._servers.append(await asyncio.start_server(serve, PRIVATE_HOST, 0))
            self.ports.append(self._servers[-1].sockets[0].getsockname()[1])

    async def close(self) -> None:
        for one in self._servers:
            one.close()
        for writer in self._writers:
            writer.transport.abort()


class World:
    """A relay with the servers behind it."""

    def __init__(self, behind: Behind, relay: FirstByteRelay, port: int) -> None:
        self.behind, self.relay, self.port = behind, relay, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def world(first_byte_s_max: float = TIMEOUT_S) -> AsyncIterator[World]:
    behind = Behind()
    await behind.start()
    relay = FirstByteRelay("test's", behind.ports[0], behind.ports[1], first_byte_s_max)
    listening = listen("127.0.0.1", 0, "test's")
    relay.open(listening)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield World(behind, relay, listening[0].getsockname()[1])
    finally:
        await relay.close()
        await behind.close()


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until it holds; the caller's time-out ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("first", "name"), [(TLS, b"tls "), (PLAINTEXT, b"plaintext ")])
def test_the_first_byte_decides(first: bytes, name: bytes) -> None:
    """All bytes arrive in both directions, also after one of them has ended, and the end does."""

    async def test() -> None:
        async with world() as here:
            reader, writer = await here.connect()
            writer.write(first)
            expected = name + first
            assert await reader.readexactly(len(expected)) == expected
            long = bytes(range(256)) * 8192
            writer.write(long)
            writer.write_eof()
            assert await reader.read(-1) == long + b" end"
            writer.close()

    run(test())


def test_the_client_behind_a_relayed_connection_is_named_as_long_as_it_lasts() -> None:
    """So that limits, white lists and logs are about clients, not about the relay."""

    async def test() -> None:
        async with world() as here:
            reader, writer = await here.connect()
            writer.write(PLAINTEXT)
            await reader.readexactly(15)
            (peer,) = here.behind.peers
            own = writer.get_extra_info("sockname")[1]
            assert here.relay.client_of(peer) == f"ipv4:127.0.0.1:{own}"
            writer.close()
            await until(lambda: here.relay.client_of(peer) == peer)

    run(test())


def test_a_client_that_does_not_read_stops_the_server() -> None:
    """Flow control: what is on its way stays bounded, and goes on when the client reads."""

    async def test() -> None:
        async with world() as here:
            here.behind.floods = True
            link = socket.create_connection(("127.0.0.1", here.port))
            link.sendall(PLAINTEXT)
            looks: deque[int] = deque(maxlen=LOOKS)

            def is_stuck() -> bool:
                looks.append(here.behind.flooded)
                return 0 < looks[0] == looks[-1] and len(looks) == LOOKS

            await until(is_stuck)
            seen = looks[-1]
            assert seen < 32 << 20
            link.setblocking(False)
            taken = 0
            while taken <= seen:
                taken += len(await asyncio.get_running_loop().sock_recv(link, 1 << 20))
            await until(lambda: here.behind.flooded > seen)
            link.close()

    run(test())


def test_a_silent_client_is_hung_up_on() -> None:
    """It takes one of the acceptor's limited places only for a while."""

    async def test() -> None:
        async with world(first_byte_s_max=0.05) as here:
            reader, writer = await here.connect()
            assert await reader.read(1) == b""
            writer.close()
            assert here.behind.peers == []

    run(test())


def test_clients_are_hung_up_on_when_the_server_is_gone_or_ends() -> None:
    """Whether it hung up, is there no more, or the relay itself ends."""

    async def test() -> None:
        async with world() as here:
            served, late = await here.connect(), await here.connect()
            served[1].write(PLAINTEXT)
            await served[0].readexactly(15)
            await here.behind.close()
            assert await has_ended(served)
            late[1].write(PLAINTEXT)
            assert await has_ended(late)
        async with world() as here:
            served = await here.connect()
            served[1].write(TLS)
            await served[0].readexactly(8)
            await here.relay.close()
            assert await has_ended(served)

    run(test())


async def has_ended(link: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """Wait for its end, by a reset or without; False: more came."""
    try:
        return await link[0].read(1) == b""
    except ConnectionError:
        return True
    finally:
        link[1].close()
