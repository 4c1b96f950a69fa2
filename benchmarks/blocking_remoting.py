"""Remoting requests without an event loop, for figures of one request: one connection per address, one at a time."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final

from dledger.remoting.client import ADDRESSES_MAX, CONNECT_TIMEOUT_S, UnreachableError, reason_of
from dledger.remoting.codes import FrameError
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, LENGTH_BYTES, Frame, decode, encode, frame_length
from dledger.values import parse_address

_CHUNK_BYTES: Final = 256 * 1024
_OPAQUE_MASK: Final = (1 << 31) - 1


class BlockingRemotingClient:
    """Sends requests to other programs, as ``RemotingClient`` does with asyncio. With ``tls``, over TLS."""

    def __init__(self, *, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        self._tls = tls
        self._lock = threading.Lock()  # guards what follows
        self._links: dict[str, _Link] = {}
        self._is_closed = False

    def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        """Return the answer of ``address``, whatever its code; the time includes connecting.

        Raises ``UnreachableError``, ``DisconnectedError`` and ``TimeoutError``; after the last two the request may have
        been executed.
        """
        with self._lock:
            if self._is_closed:
                raise UnreachableError("this client is closed")
            link = self._links.pop(address, None) or _Link(address, self._tls)
            self._links[address] = link  # the last used is the last
            if len(self._links) > ADDRESSES_MAX:
                self._links.pop(next(iter(self._links))).close()
        return link.call(request, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Close all connections; requests under way fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            links = tuple(self._links.values())
            self._links.clear()
        for link in links:
            link.close()


class _Link:
    """The connection to one address."""

    def __init__(self, address: str, tls: Callable[[], ssl.SSLContext] | None) -> None:
        self._address = address
        self._tls = tls
        self._turn = threading.Lock()  # one request at a time
        self._socket: socket.socket | None = None
        self._opaques = count(1)
        self._is_closed = False

    def call(self, request: Frame, deadline: float) -> Frame:
        """Return the answer; a connection without one is closed."""
        if not self._turn.acquire(timeout=_left(deadline)):
            raise UnreachableError(f"{self._address} did not answer an earlier request in time")
        try:
            if self._is_closed:
                raise UnreachableError("this client is closed")
            link = self._socket
            if link is not None and _is_readable(link):  # closed by the other side, or with an answer too late
                link.close()
                self._socket = link = None
            self._socket = link = link or self._connect(deadline)
            if self._is_closed:
                raise UnreachableError("this client is closed")
            try:
                return self._ask(link, request, deadline)
            except BaseException:
                self._socket = None
                link.close()
                raise
        finally:
            self._turn.release()
            if self._is_closed:  # perhaps while we had the turn
                self.close()

    def close(self) -> None:
        """Close the connection; a request under way fails, and closes it."""
        self._is_closed = True
        if (link := self._socket) is not None:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self._turn.acquire(blocking=False):
            try:
                if self._socket is not None:
                    self._socket.close()
            finally:
                self._turn.release()

    def _connect(self, deadline: float) -> socket.socket:
        try:
            host, port = parse_address(self._address)
            link = socket.create_connection((host, port), min(CONNECT_TIMEOUT_S, _left(deadline)))
            try:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return link if self._tls is None else self._tls().wrap_socket(link, server_hostname=host)
            except BaseException:
                link.close()
                raise
        except (OSError, ValueError) as error:  # TLS errors and time-outs are OS errors, too
            raise UnreachableError(f"cannot connect to {self._address}: {reason_of(error)}") from error

    def _ask(self, link: socket.socket, request: Frame, deadline: float) -> Frame:
        opaque = next(self._opaques) & _OPAQUE_MASK
        try:
            link.settimeout(_left(deadline))
            link.sendall(encode(request._replace(opaque=opaque)))
            while True:
                answer = _receive(link, deadline)
                if answer.is_response and answer.opaque == opaque:
                    return answer
        except TimeoutError as error:
            raise TimeoutError(f"{self._address} did not answer in time") from error
        except (OSError, EOFError, FrameError) as error:
            raise DisconnectedError(f"the connection to {self._address} ended: {error}") from error


def _is_readable(link: socket.socket) -> bool:
    poll = select.poll()  # select itself cannot handle descriptors above 1023
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))


def _receive(link: socket.socket, deadline: float) -> Frame:
    data = bytearray()
    _fill(link, data, LENGTH_BYTES, deadline)
    _fill(link, data, LENGTH_BYTES + frame_length(memoryview(data)), deadline)
    return decode(memoryview(data), header_bytes_max=ANSWER_HEADER_BYTES_MAX)


def _fill(link: socket.socket, data: bytearray, length: int, deadline: float) -> None:
    while len(data) < length:
        link.settimeout(_left(deadline))
        more = link.recv(min(_CHUNK_BYTES, length - len(data)))
        if not more:
            raise EOFError("the other side hung up")
        data += more


def _left(deadline: float) -> float:
    """Return the remaining time, and never 0, which would mean not to block."""
    return max(deadline - time.monotonic(), 0.001)
