"""A port for several protocols: accepts connections, identifies them by their first bytes, and passes them on.

gRPC cannot share a port and does not serve sockets accepted by others, so its connections are relayed to it through a
Unix socket, TLS and all. The first bytes are only peeked at: a connection handed over to a taker is still unread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

from dledger.rpc.relay import CHUNK_BYTES, Relay, connect

_LOG = logging.getLogger(__name__)

UNKNOWN_MAX: Final = 256
"""The limit of connections not identified yet; one more closes the oldest of the host with the most.

Silent ones occupy no place and no thread that others need, because these are assigned only after identification.
"""
FIRST_BYTES_TIMEOUT_S: Final = 5.0
"""How long a new connection may take to identify itself, including what its taker requires of it (a TLS handshake)."""
LOOK_BYTES_MAX: Final = 17 * 1024
"""The limit of bytes peeked at: enough for a TLS record of the largest size."""
_ACCEPT_PAUSE_S: Final = 0.1


class Verdict(Enum):
    """What to do with a connection that no taker wants."""

    RELAY = auto()
    CLOSE = auto()


Take = Callable[[socket.socket], Coroutine[object, object, None]]
"""Takes over an unread, non-blocking connection, and owns the socket from the call on.

Until it returns, the connection counts as unidentified: it may be cancelled by the time-out, or to make room.
"""
Look = Callable[[bytes], "Verdict | Take | int"]
"""Identifies a connection by its first bytes; a number is the least number of bytes that it needs to decide."""


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Limits of the connections to one port."""

    relayed_max: int
    """Relayed connections, with three descriptors each; one more closes the one whose client was silent longest."""
    unknown_max: int = UNKNOWN_MAX
    first_bytes_timeout_s: float = FIRST_BYTES_TIMEOUT_S


@dataclass(slots=True, eq=False)
class _Arrival:
    link: socket.socket
    is_ours: bool = True
    """Whether the front door must close it."""


class FrontDoor:
    """Listens from ``open`` to ``close``, on the event loop that calls them."""

    def __init__(self, whose: str, look: Look, relay_to: str, limits: DoorLimits) -> None:
        """``relay_to``: the path of gRPC's Unix socket. ``whose``: the name of the port in log lines."""
        self._whose = whose
        self._look = look
        self._relay_to = relay_to
        self._limits = limits
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown: dict[asyncio.Task[None], str] = {}  # with their hosts, in order of arrival
        self._relays: set[Relay] = set()
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def open(self, listening: Iterable[socket.socket]) -> None:
        """Accept connections from these sockets (see ``listen``), and own them. May be called again."""
        for one in listening:
            self._listening.append(one)
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    def stop_listening(self) -> None:
        """Stop accepting; relayed connections continue. Idempotent."""
        listening, self._listening = self._listening, []
        for one in listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()

    async def close(self) -> None:
        """Close everything except connections that were taken over. Idempotent."""
        self.stop_listening()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for relay in tuple(self._relays):
            relay.end()

    # -- accepting -----------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection. Not with ``sock_accept``: cancelling it could lose a connection just accepted."""
        loop = asyncio.get_running_loop()
        try:
            link, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client hung up already
            return
        except OSError as error:  # out of descriptors: it stays acceptable, so pause accepting
            _LOG.warning("cannot accept a connection to the %s port: %s", self._whose, error)
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        link.setblocking(False)
        if len(self._unknown) >= self._limits.unknown_max:
            self._make_room()
        arrival = _Arrival(link)
        task = loop.create_task(self._sort(arrival))
        self._tasks.add(task)
        self._unknown[task] = str(address[0])
        task.add_done_callback(partial(self._sorted, arrival))

    def _make_room(self) -> None:
        """Close the oldest unidentified connection of the host with the most."""
        (host, _), *_ = Counter(self._unknown.values()).most_common(1)
        oldest = next(task for task, its_host in self._unknown.items() if its_host == host)
        del self._unknown[oldest]
        oldest.cancel()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    # -- sorting -------------------------------------------------------------------------------------------------------

    async def _sort(self, arrival: _Arrival) -> None:
        with suppress(OSError, EOFError, TimeoutError):  # it left, or took too long
            async with asyncio.timeout(self._limits.first_bytes_timeout_s):
                verdict = await self._verdict(arrival.link)
                if verdict is Verdict.RELAY:
                    await self._relay(arrival)
                elif not isinstance(verdict, Verdict):
                    arrival.is_ours = False
                    await verdict(arrival.link)

    def _sorted(self, arrival: _Arrival, task: asyncio.Task[None]) -> None:
        """Runs in any case, also when the task was cancelled before its first step."""
        self._tasks.discard(task)
        self._unknown.pop(task, None)
        if arrival.is_ours:
            hang_up(arrival.link)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a connection to the %s port was lost", self._whose, exc_info=error)

    async def _verdict(self, link: socket.socket) -> Verdict | Take:
        """Identify a connection. Raises ``EOFError`` if it ends before that."""
        head = b""
        verdict = self._look(head)
        try:
            while isinstance(verdict, int):
                if verdict > LOOK_BYTES_MAX:
                    return Verdict.CLOSE
                head = await _peek(link, verdict)
                verdict = self._look(head)
        finally:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return verdict

    async def _relay(self, arrival: _Arrival) -> None:
        arrival.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        inner = await connect(self._relay_to)
        if len(self._relays) >= self._limits.relayed_max:
            min(self._relays, key=lambda one: one.heard_at).end()
        try:
            self._relays.add(Relay(arrival.link, inner, self._buffer, self._relays.discard))
        except OSError:
            inner.close()
            raise
        arrival.is_ours = False


async def _peek(link: socket.socket, count: int) -> bytes:
    """Return the first ``count`` bytes or more without consuming them. Raises ``EOFError`` if it ends before."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)  # else fewer would wake us again and again
    head = b""
    while len(head) < count:
        await _readable(link)
        with suppress(BlockingIOError):
            before, head = head, link.recv(LOOK_BYTES_MAX, socket.MSG_PEEK)
            if len(head) < count and len(head) == len(before):
                raise EOFError("connection closed")
    return head


def hang_up(link: socket.socket) -> None:
    """Close a connection that has sent no more than its first bytes: read them, else the client would see a reset."""
    with suppress(OSError):  # nothing has arrived, or the client is gone
        link.recv(LOOK_BYTES_MAX)
    link.close()


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    told = loop.create_future()
    loop.add_reader(link, _tell, told)
    try:
        await told
    finally:
        loop.remove_reader(link)


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
