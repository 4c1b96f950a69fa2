"""Crowds of clients: those that cannot come in."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.children.crowd import Crowd


async def connect_to_a_server_that_hangs_up() -> None:
    """One client, at a server that answers nothing."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server, asyncio.timeout(10):
        await Crowd(server.sockets[0].getsockname()[1]).connect(1)


def test_a_client_that_is_hung_up_on_fails_the_crowd_at_once() -> None:
    """Waiting for it until the time-out says nothing of the reason."""
    with pytest.raises((ConnectionError, EOFError)):
        asyncio.run(connect_to_a_server_that_hangs_up())
