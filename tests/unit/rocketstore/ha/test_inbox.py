"""What has arrived is taken at once, and no more is read than there is room for."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dledger.rpc import loops, tls
from dledger_cli import certs
from rocketstore.ha.slave import ROOM_BYTES, Inbox
from tests.support.certificates import files

TIMEOUT_S = 60


async def connected(
    serve: Callable[[asyncio.StreamWriter], Awaitable[None]], directory: Path | None = None
) -> tuple[Inbox, asyncio.Server]:
    """An inbox at a server that does this with its connection; over TLS, with certificates in a directory."""
    accepting, connecting = (None, None) if directory is None else contexts(directory)

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=accepting)
    port = server.sockets[0].getsockname()[1]
    _, inbox = await asyncio.get_running_loop().create_connection(Inbox, "127.0.0.1", port, ssl=connecting)
    return inbox, server


def contexts(directory: Path, name: str = "b") -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of both sides, which present the certificate of this name, each to the other."""
    certs.make_authority(directory)
    certs.make_node(directory, name)
    made = tls.read(files(directory, name))
    return tls.server_context(made), tls.client_context(made)


async def everything(inbox: Inbox) -> list[bytes]:
    """The pieces until the end."""
    found: list[bytes] = []
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await inbox.wait()
            except EOFError:
                return found
            found.append(bytes(inbox.take()))


@pytest.mark.parametrize("tls", [False, True])
def test_all_that_is_sent_arrives_in_order(tmp_path: Path, tls: bool) -> None:
    """Also more than there is room for, several times."""
    sent = bytes(range(256)) * (3 * ROOM_BYTES // 256) + b"end"

    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async def run() -> list[bytes]:
        inbox, server = await connected(serve, tmp_path if tls else None)
        async with server:
            return await everything(inbox)

    pieces = loops.run(run())

    assert b"".join(pieces) == sent
    assert max(map(len, pieces)) <= ROOM_BYTES


def test_nothing_more_is_read_while_the_room_is_full() -> None:
    """What is not taken stays with the other side."""

    calls: list[str] = []

    class _Paused:
        def pause_reading(self) -> None:
            calls.append("pause")

        def resume_reading(self) -> None:
            calls.append("resume")

    async def run() -> None:
        inbox = Inbox()
        inbox.connection_made(_Paused())  # type: ignore[arg-type]  # as far as it is used
        inbox.get_buffer(-1)[:3] = b"abc"
        inbox.buffer_updated(3)
        assert calls == []
        assert len(inbox.get_buffer(-1)) == ROOM_BYTES - 3
        inbox.buffer_updated(ROOM_BYTES - 3)
        assert calls == ["pause"]
        assert len(inbox.take()) == ROOM_BYTES
        assert calls == ["pause", "resume"]
        assert len(inbox.get_buffer(-1)) == ROOM_BYTES

    loops.run(run())


def test_the_end_comes_after_what_was_sent() -> None:
    """And says why, if something else ended it."""

    async def run() -> None:
        inbox = Inbox()
        inbox.get_buffer(-1)[:3] = b"abc"
        inbox.buffer_updated(3)
        inbox.connection_lost(ConnectionResetError("reset"))
        await inbox.wait()
        assert bytes(inbox.take()) == b"abc"
        with pytest.raises(ConnectionResetError):
            await inbox.wait()

    loops.run(run())
