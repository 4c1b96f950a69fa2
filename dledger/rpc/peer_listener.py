"""The one peer port: pushes go to the push server, anything else is gRPC and is passed on to the gRPC server.

gRPC cannot share a port and does not serve sockets that others accepted, so what is not a push connection by its first
bytes is relayed to it through a Unix socket. Only votes, heartbeats, handshakes, health and reflection pass that way: a
few small messages per second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
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
        self._listening: list[socket.socket] = []

    def start(self, host: str, port: int) -> None:
        """Listen. Raises ``ConfigError`` if the address cannot be had."""
        listening = _listen(host, port)
        self.port = listening[0].getsockname()[1]
        self._bridge = bridge = self._loop.start()
        bridge.post(partial(self._listen, listening))

    def close(self) -> None:
        """End everything and join the thread. Idempotent."""
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            bridge.run(self._end())
        self._loop.stop()

    async def _end(self) -> None:
        for one in self._listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self, listening: Iterable[socket.socket]) -> None:
        for one in listening:
            self._listening.append(one)
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    def _accept(self, listening: socket.socket) -> None:
        """Take one connection. Not with ``sock_accept``: what it has accepted is lost if it is cancelled just then."""
        loop = asyncio.get_running_loop()
        try:
            link, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the caller hung up already
            return
        except OSError as error:  # out of descriptors: it stays acceptable, so look away for a while
            _LOG.warning("a connection to the peer port was not accepted: %s", error)
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        link.setblocking(False)
        task = loop.create_task(self._sort(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Whoever is cancelled before its first step has closed nothing.
        task.add_done_callback(partial(_close_if_cancelled, link))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

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


def _close_if_cancelled(link: socket.socket, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        link.close()


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


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host`` (``localhost`` has two), on the same port."""
    listening: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            one.bind((address[0], listening[0].getsockname()[1] if len(listening) > 1 else port, *address[2:]))
            one.listen(_BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in listening:
            one.close()
        raise ConfigError([options.bind_problem(host, port, "peer")]) from error
    return listening
