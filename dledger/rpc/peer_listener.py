"""The one peer port: pushes go to the push server, anything else is gRPC and is passed on to the gRPC server.

gRPC cannot share a port and does not serve sockets that others accepted, so what is not a push connection by its first
bytes is relayed to it through a Unix socket. Only votes, heartbeats, handshakes, health and reflection pass that way: a
few small messages per second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

from dledger.errors import ConfigError
from dledger.rpc import options, push_frames
from dledger.rpc.bridge import LoopBridge, LoopThread

_LOG = logging.getLogger(__name__)

FIRST_BYTES_TIMEOUT_S: Final = 5.0
"""How long a connection may stay without showing what it is."""
_CHUNK_BYTES: Final = 64 * 1024
_BACKLOG: Final = 1024
_ACCEPT_PAUSE_S: Final = 0.1

TakePush = Callable[[socket.socket], None]


class PeerListener:
    """Listens from ``start`` to ``close``, on an event loop of its own: neither clients nor pushes can hold it up."""

    def __init__(self, name: str, grpc_socket: str, take_push: TakePush) -> None:
        self.port = 0
        """The port listened on, once started."""
        self._grpc_socket = grpc_socket
        self._take_push = take_push
        self._loop = LoopThread(name)
        self._bridge: LoopBridge | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, host: str, port: int) -> None:
        """Listen. Raises ``ConfigError`` if the address cannot be had."""
        listening = _listen(host, port)
        self.port = listening.getsockname()[1]
        self._bridge = self._loop.start()
        self._bridge.post(lambda: self._begin(self._accept(listening)))

    def close(self) -> None:
        """End everything and join the thread. Idempotent."""
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            bridge.run(self._end())
        self._loop.stop()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    link, _ = await loop.sock_accept(listening)
                except OSError as error:  # out of descriptors, or the caller hung up already
                    _LOG.warning("a connection to the peer port was not accepted: %s", error)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                self._begin(self._sort(link))

    async def _sort(self, link: socket.socket) -> None:
        head = b""
        try:
            push_frames.tune(link)
            async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
                while len(head) < len(push_frames.PREAMBLE):
                    more = await asyncio.get_running_loop().sock_recv(link, len(push_frames.PREAMBLE) - len(head))
                    if not more:
                        link.close()
                        return
                    head += more
        except (OSError, TimeoutError):
            link.close()
            return
        except asyncio.CancelledError:
            link.close()
            raise
        if head == push_frames.PREAMBLE:
            link.setblocking(True)
            self._take_push(link)
        else:
            await self._relay(link, head)

    async def _relay(self, link: socket.socket, head: bytes) -> None:
        reader, writer = await asyncio.open_connection(sock=link)
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._grpc_socket)
            try:
                inner_writer.write(head)
                await _race(_pump(reader, inner_writer), _pump(inner_reader, writer))
            finally:
                inner_writer.close()
        except OSError:  # the gRPC server has been stopped
            return
        finally:
            writer.close()


async def _race(*works: Coroutine[object, object, None]) -> None:
    """Run all until the first ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # either side hung up: so does the relay
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError([options.bind_problem(host, port, "peer")]) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError([options.bind_problem(host, port, "peer")]) from error
    listening.setblocking(False)
    return listening
