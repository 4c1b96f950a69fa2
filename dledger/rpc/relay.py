"""Relays TCP connections to a gRPC server behind a Unix socket, and remembers who the clients are.

gRPC's ``context.peer()`` returns the address that the client's socket is bound to, also for a Unix socket. So each
relay binds its socket to a unique name, chosen by the kernel, and ``peer_of`` maps that name to the real client. Names
cannot be forged: only this process can connect to the gRPC server's socket.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dledger.access.addresses import plain_host

CHUNK_BYTES: Final = 128 * 1024
"""The limit of bytes relayed at once, and of bytes kept for a slow receiver (for each direction of a connection)."""
ENDED_MAX: Final = 1024
"""The limit of names remembered after their connections have ended: gRPC may still be delivering calls of them."""
_BUSY_PAUSE_S: Final = 0.01


class PeerNames:
    """Maps names of Unix sockets to clients. Thread-safe: each method uses single operations on dictionaries."""

    def __init__(self) -> None:
        self._peers: dict[str, str] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers) + len(self._ended)

    def add(self, name: str, peer: str) -> None:
        """A relay begins."""
        self._ended.pop(name, None)  # the kernel reuses names
        self._peers[name] = peer

    def end(self, name: str) -> None:
        """A relay has ended."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._ended[name] = peer
            while len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)

    def peer(self, name: str) -> str:
        """Return the client as gRPC would name it on a direct connection; ``name`` itself if it is unknown.

        An unknown name is no address: it matches no white list, and all unknown clients share one quota.
        """
        return self._peers.get(name) or self._ended.get(name) or name


NAMES: Final = PeerNames()
"""One table for the process, because the kernel gives no two sockets the same name."""


def peer_of(grpc_peer: str) -> str:
    """Return the real client for what gRPC's ``context.peer()`` returned."""
    return NAMES.peer(grpc_peer) if grpc_peer.startswith("unix") else grpc_peer


def peer_name(link: socket.socket) -> str:
    """Return gRPC's name of a TCP connection's peer. Raises ``OSError`` if it is gone."""
    host, port = link.getpeername()[:2]
    host = plain_host(host)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def connect(path: str) -> socket.socket:
    """Connect to the Unix socket ``path``, from a socket bound to a unique name. Raises ``OSError``."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.setblocking(False)
        link.bind("")
        while True:
            try:
                link.connect(path)
            except BlockingIOError:  # the backlog is full, and no event says when it is not
                await asyncio.sleep(_BUSY_PAUSE_S)
            else:
                return link
    except BaseException:
        link.close()
        raise


def _grpc_name(link: socket.socket) -> str:
    """Return what ``context.peer()`` will return. The kernel's names are a zero byte and hexadecimal digits."""
    return f"unix-abstract:{link.getsockname()[1:].decode('ascii')}"


class Relay:
    """Relays between ``outer`` (the client) and ``inner`` (the server) until the server closes or ``end`` is called.

    On the running event loop. A client that closes only its sending side still receives the server's answers.
    """

    def __init__(
        self, outer: socket.socket, inner: socket.socket, buffer: memoryview, ended: Callable[[Relay], None]
    ) -> None:
        """Takes both sockets over. Raises ``OSError`` if the client is gone, and then has taken neither.

        ``buffer`` is shared by all relays of an event loop; nothing stays in it between calls.
        """
        peer = peer_name(outer)
        self._loop = asyncio.get_running_loop()
        self._outer, self._inner, self._ended = outer, inner, ended
        self._name = _grpc_name(inner)
        self._buffer = buffer
        self._over = False
        self.heard_at = time.monotonic()
        """When the client last sent something."""
        NAMES.add(self._name, peer)
        self._inward = _Lane(self, outer, inner)
        self._outward = _Lane(self, inner, outer)

    def end(self) -> None:
        """Close both connections. Idempotent."""
        if self._over:
            return
        self._over = True
        for link in (self._outer, self._inner):
            self._loop.remove_reader(link)
            self._loop.remove_writer(link)
            link.close()
        NAMES.end(self._name)
        self._ended(self)

    def _heard(self, lane: _Lane) -> None:
        if lane is self._inward:
            self.heard_at = time.monotonic()

    def _ends(self, lane: _Lane) -> None:
        """One side has closed its sending side, and everything it sent was relayed."""
        if lane is self._outward:
            self.end()
        else:
            self._inner.shutdown(socket.SHUT_WR)


class _Lane:
    """One direction: stops reading while the receiver is slow, and continues when everything was sent."""

    def __init__(self, relay: Relay, source: socket.socket, sink: socket.socket) -> None:
        self._relay, self._source, self._sink = relay, source, sink
        self._left = b""
        self._is_broken = False  # the source's connection was reset: what it had sent before may still be here
        relay._loop.add_reader(source, self._read)

    def _read(self) -> None:
        relay = self._relay
        try:
            count = self._source.recv_into(relay._buffer)
            if not count and self._is_broken:
                relay.end()
                return
            if not count:
                relay._loop.remove_reader(self._source)
                relay._ends(self)
                return
            relay._heard(self)
            data = relay._buffer[:count]
            sent = self._send(data)
            if not self._is_broken and self._source.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._is_broken = True  # uvloop has told of it for the last time
                relay._loop.remove_reader(self._source)
        except BlockingIOError:
            return
        except OSError:  # one side is gone, so the other one is of no use
            relay.end()
            return
        if sent < count:
            self._left = bytes(data[sent:])
            relay._loop.remove_reader(self._source)
            relay._loop.add_writer(self._sink, self._send_left)
        elif self._is_broken:
            relay._loop.call_soon(self._read)

    def _send_left(self) -> None:
        try:
            self._left = self._left[self._send(self._left) :]
        except OSError:
            self._relay.end()
            return
        if not self._left:
            self._relay._loop.remove_writer(self._sink)
            if self._is_broken:
                self._relay._loop.call_soon(self._read)
            else:
                self._relay._loop.add_reader(self._source, self._read)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._sink.send(data)
        except BlockingIOError:
            return 0
