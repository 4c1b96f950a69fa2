"""One address for all members, as a service of Kubernetes gives: for clients that take only one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress

_CHUNK_BYTES = 64 * 1024


@contextmanager
def balancer(ports: Sequence[int]) -> Iterator[str]:
    """An address meanwhile; whoever connects there is connected to one of these ports of this host that accepts it."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(ports, started)), name="balancer")
    thread.start()
    address, loop, ended = started.result()
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


async def _serve(ports: Sequence[int], started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    turn = 0
    passing: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turn
        turn += 1
        in_turn = [ports[(turn + number) % len(ports)] for number in range(len(ports))]
        task = asyncio.ensure_future(_pass(reader, writer, in_turn))
        passing.add(task)
        task.add_done_callback(passing.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    ended = asyncio.Event()
    started.set_result((f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asyncio.get_running_loop(), ended))
    await ended.wait()
    server.close()
    for task in passing:
        task.cancel()
    await asyncio.gather(*passing, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ports: Sequence[int]) -> None:
    """Both ways, to the first port that accepts."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, writer)
        for port in ports:
            with suppress(OSError):
                there = await asyncio.open_connection("127.0.0.1", port)
                stack.push_async_callback(_close, there[1])
                await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
                return


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
