"""Listening sockets: how a port is opened, what is said if it cannot be, and how a server of asyncio's is closed.

``Acceptor`` accepts connections; each must prove what it is before it occupies a place that others need. Until then it
costs one of a limited number of places, which silent connections cannot take from others, and only for a few seconds:
there is a thread and a place of its server for it only afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from dledger.errors import ConfigError
from dledger.values import address_text

_BACKLOG: Final = 1024
_TURNS_UNTIL_CONNECTED: Final = 2
"""How many turns of the loop asyncio takes from an accepted socket to ``connection_made``."""


GRPC_ADVICE: Final = "set grpcServerPort to another port, or to 0 for none"


def listen(host: str, port: int, whose: str, advice: str = "") -> list[socket.socket]:
    """Listen on every address of ``host`` (``localhost`` has two), on the same port. Raises ``ConfigError``."""
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
        raise ConfigError([bind_problem(host, port, whose, advice)]) from error
    return listening


def listen_for_clients(host: str, port: int, whose: str, advice: str = "") -> list[socket.socket]:
    """``listen``, where ``0.0.0.0`` includes the addresses of IPv6, as gRPC takes it. Raises ``ConfigError``."""
    return listen("::" if host == "0.0.0.0" and socket.has_dualstack_ipv6() else host, port, whose, advice)


def bind_problem(host: str, port: int, whose: str, advice: str = "") -> str:
    """Why listening failed, and what to do."""
    address = address_text(host, port)
    return (
        f"cannot listen on the {whose} address {address}: the port is in use, or this machine does not have that "
        f"address{advice and f': {advice}'}"
    )


async def stop_serving(server: asyncio.Server) -> None:
    """Close asyncio's server, after everything that it has accepted became a connection, which its protocol knows.

    A mere ``close`` would lose sockets: asyncio makes each a transport two turns of the loop after it was accepted, and
    by then refuses to, or was cancelled before.
    """
    for one in server.sockets:
        asyncio.get_running_loop().remove_reader(one.fileno())
    for _ in range(_TURNS_UNTIL_CONNECTED):
        await asyncio.sleep(0)
    server.close()


_LOG = logging.getLogger(__name__)

UNKNOWN_MAX: Final = 256
"""The limit of unidentified connections; one more closes the oldest of the host with the most."""
FIRST_BYTES_MAX: Final = 64 * 1024
"""The limit of bytes read from a refused connection, so that its end is no reset."""
TLS_HANDSHAKE: Final = 0x16
"""The first byte of a connection with TLS."""
_ACCEPT_PAUSE_S: Final = 0.1


class Arrival:
    """An accepted connection, non-blocking, that is not identified yet."""

    __slots__ = ("_is_taken", "host", "link")

    def __init__(self, link: socket.socket, host: str) -> None:
        self.link: Final = link
        self.host: Final = host
        self._is_taken = False

    def take(self) -> socket.socket:
        """Take the connection over: the caller closes it from now on, whatever happens."""
        self._is_taken = True
        return self.link

    def end(self) -> None:
        """Close it unless it was taken: unread data are read first, or the client would see a reset."""
        if not self._is_taken:
            with suppress(OSError):  # nothing has arrived, or the client is gone
                self.link.recv(FIRST_BYTES_MAX)
            self.link.close()


Identify = Callable[[Arrival], Coroutine[object, object, None]]
"""Identifies an arrival and takes it over, or returns without. It is cancelled at the time-out, or to make room."""


class Acceptor:
    """Accepts from ``open`` to ``close``, on the event loop that calls them."""

    def __init__(self, whose: str, identify: Identify, timeout_s: float, unknown_max: int = UNKNOWN_MAX) -> None:
        """``whose``: the name of the port in log lines. ``timeout_s``: how long ``identify`` may take."""
        self._whose = whose
        self._identify = identify
        self._timeout_s = timeout_s
        self._unknown_max = unknown_max
        self._listening: list[socket.socket] = []
        self._unknown: dict[asyncio.Task[None], str] = {}  # with their hosts, in order of arrival
        self._tasks: set[asyncio.Task[None]] = set()  # these, and those that end because others needed room

    def open(self, listening: Iterable[socket.socket]) -> None:
        """Accept connections from these sockets (see ``listen``), and own them. May be called again."""
        for one in listening:
            self._listening.append(one)
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    def stop_listening(self) -> None:
        """Stop accepting. Idempotent."""
        listening, self._listening = self._listening, []
        for one in listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()

    async def close(self) -> None:
        """Stop accepting, and end the connections that nobody has taken over. Idempotent."""
        self.stop_listening()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        if len(self._unknown) >= self._unknown_max:
            self._make_room()
        arrival = Arrival(link, str(address[0]))
        task = loop.create_task(self._greet(arrival))
        self._tasks.add(task)
        self._unknown[task] = arrival.host
        task.add_done_callback(partial(self._greeted, arrival))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _make_room(self) -> None:
        """Close the oldest unidentified connection of the host with the most."""
        (host, _), *_ = Counter(self._unknown.values()).most_common(1)
        oldest = next(task for task, its_host in self._unknown.items() if its_host == host)
        del self._unknown[oldest]
        oldest.cancel()

    async def _greet(self, arrival: Arrival) -> None:
        with suppress(OSError, EOFError, TimeoutError):  # it left, or took too long
            async with asyncio.timeout(self._timeout_s):
                await self._identify(arrival)

    def _greeted(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        """Runs in any case, also when the task was cancelled before its first step."""
        self._tasks.discard(task)
        self._unknown.pop(task, None)
        arrival.end()
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a connection to the %s port was lost", self._whose, exc_info=error)


async def peek(link: socket.socket) -> int:
    """The first byte, left unread. Raises ``EOFError`` if the connection ends before."""
    loop = asyncio.get_running_loop()
    while True:
        readable = loop.create_future()
        loop.add_reader(link, _tell, readable)
        try:
            await readable
        finally:
            loop.remove_reader(link)
        try:
            head = link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        if not head:
            raise EOFError("connection closed")
        return head[0]


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
