"""Connecting on uvloop's event loop."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import uvloop

from dledger.rpc import loops
from dledger_cli import certs

NOBODY = "nobody.invalid"


@pytest.mark.parametrize("turns", range(3))
def test_who_gives_up_while_a_name_is_resolved_leaves_no_error(turns: int, caplog: pytest.LogCaptureFixture) -> None:
    """A name server that is slow would fill the log with errors of attempts that are long over."""

    async def give_up() -> None:
        connecting = asyncio.create_task(loops.connect(asyncio.Protocol, NOBODY, 1))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)

    loops.run(give_up())  # its end waits for the answer
    gc.collect()

    assert not caplog.records


def test_an_address_that_refuses_is_not_the_last_one() -> None:
    """A name may have several, such as localhost."""

    async def dial() -> object:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port: int = listening.getsockname()[1]
            transport, _ = await loops.connect(asyncio.Protocol, "localhost", port)
            peer = transport.get_extra_info("peername")
            transport.abort()
            return peer[:2] == ("127.0.0.1", port)

    assert loops.run(dial())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_who_is_not_there_refuses(host: str) -> None:
    """With the system's error, whose number says what it is."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]

    with pytest.raises(ConnectionRefusedError):
        loops.run(loops.connect(asyncio.Protocol, host, port))


def test_a_name_of_nobody_is_an_error() -> None:
    """Of the kind that callers expect of every attempt."""
    with pytest.raises(socket.gaierror):
        loops.run(loops.connect(asyncio.Protocol, NOBODY, 1))


class GivenUp(asyncio.Protocol):
    """Its connection is given up in the turn in which it is made."""

    def __init__(self, give_up: Callable[[], object]) -> None:
        self._give_up = give_up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._give_up()


@pytest.mark.parametrize("turns", [0, 9])
def test_who_gives_up_as_the_handshake_ends_leaves_no_connection(
    turns: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that does not end TLS would keep it, and a client whose other connections were refused closes the loop.

    A handshake may end even before who connects knows that it has begun, hence the turns.
    """
    certs.make_authority(tmp_path)
    pair = certs.make_node(tmp_path, "n0", ["127.0.0.1"])
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(pair.cert, pair.key)
    connecting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    may_begin = threading.Event()

    def accept_and_wait_for_its_end(listening: socket.socket) -> None:
        link, _ = listening.accept()
        link.settimeout(10)
        assert may_begin.wait(60)
        with (
            suppress(ConnectionResetError, ssl.SSLEOFError),
            accepting.wrap_socket(link, server_side=True) as stream,
            socket.fromfd(stream.fileno(), socket.AF_INET, socket.SOCK_STREAM) as below,
        ):
            below.settimeout(10)
            while below.recv(1024):
                pass

    async def give_up(listening: socket.socket) -> None:
        port = listening.getsockname()[1]
        dialling: list[asyncio.Task[object]] = []
        make = partial(GivenUp, lambda: dialling[0].cancel())
        dialling.append(asyncio.create_task(loops.connect(make, "127.0.0.1", port, context=connecting)))
        serving = asyncio.create_task(asyncio.to_thread(accept_and_wait_for_its_end, listening))
        for _ in range(turns):
            await asyncio.sleep(0)
        may_begin.set()
        await asyncio.wait(dialling)
        assert dialling[0].cancelled()
        await serving

    with socket.create_server(("127.0.0.1", 0)) as listening:
        loops.run(give_up(listening))

    assert not caplog.records


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name with two addresses; nothing listens at the first one."""

    async def found(
        _loop: object, _host: str, port: int, **_: object
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(0, 0, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(uvloop.Loop, "getaddrinfo", found)
    return "broker.example"


def test_each_address_of_a_name_is_tried(resolved: str) -> None:
    """A machine may have one that nobody serves."""

    async def dial() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            transport, _ = await loops.connect(asyncio.Protocol, resolved, listening.getsockname()[1])
            transport.abort()

    loops.run(dial())


def test_a_server_with_tls_is_checked_by_its_name(resolved: str, tmp_path: Path) -> None:
    """Not by the address that a name server gives, which a certificate need not know."""
    certs.make_authority(tmp_path)
    pair = certs.make_node(tmp_path, "n0", [resolved])
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(pair.cert, pair.key)
    connecting = ssl.create_default_context(cafile=tmp_path / "ca.crt")

    async def dial(name: str) -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=accepting)
        try:
            port = server.sockets[0].getsockname()[1]
            transport, _ = await loops.connect(asyncio.Protocol, name, port, context=connecting)
            transport.abort()
        finally:
            server.close()

    loops.run(dial(resolved))
    with pytest.raises(ssl.SSLCertVerificationError):
        loops.run(dial("other.example"))
