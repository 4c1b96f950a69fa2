"""Connections to a gRPC server behind another port: their bytes are passed on through a Unix socket, either way.

gRPC's ``context.peer()`` names the address that a client's socket is bound to, also a Unix one. So each relayed
connection is bound to a name of its own, which the kernel chooses, and ``peer_of`` knows whose it is. Nobody can take
such a name on: only this process can connect to the gRPC server's socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dledger.access.addresses import plain_host

CHUNK_BYTES: Final = 128 * 1024
"""How much is passed on at once; a connection's direction keeps no more than that for a side that takes it slowly."""
ENDED_MAX: Final = 1024
"""Names of connections that have ended that are still known: gRPC may have calls of theirs in its hands."""
_BUSY_PAUSE_S: Final = 0.01


class PeerNames:
    """Which Unix socket's name stands for which client. Thread-safe: single operations on dictionaries."""

    def __init__(self) -> None:
        self._peers: dict[str, str] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers) + len(self._ended)

    def add(self, name: str, peer: str) -> None:
        """A relay begins."""
        self._ended.pop(name, None)  # the kernel gives names again
        self._peers[name] = peer

    def end(self, name: str) -> None:
        """A relay has ended."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._ended[name] = peer
            while len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)

    def peer(self, name: str) -> str:
        """The client, as gRPC would name it if it had connected directly; ``name`` itself if it is nobody's.

        What that is then is no address: no white list means it, and all of its kind share one quota.
        """
        return self._peers.get(name) or self._ended.get(name) or name


NAMES: Final = PeerNames()
"""Of this process, as the kernel gives no two sockets the same name: who asks need not know which port it was."""


def peer_of(grpc_peer: str) -> str:
    """Who is really behind what gRPC's ``context.peer()`` says."""
    return NAMES.peer(grpc_peer) if grpc_peer.startswith("unix") else grpc_peer


def peer_name(link: socket.socket) -> str:
    """The other side of a TCP connection in gRPC's words. Raises ``OSError`` if it is gone."""
    host, port = link.getpeername()[:2]
    host = plain_host(host)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def connect(path: str) -> socket.socket:
    """A connection to the Unix socket ``path``, bound to a name of its own. Raises ``OSError``."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.setblocking(False)
        link.bind("")
        while True:
            try:
                link.connect(path)
            except BlockingIOError:  # as many as may are waiting to be accepted, and nothing tells when that is over
                await asyncio.sleep(_BUSY_PAUSE_S)
            else:
                return link
    except BaseException:
        link.close()
        raise


def _grpc_name(link: socket.socket) -> str:
    """As ``context.peer()`` will have it. The kernel's names are hexadecimal digits behind a zero byte."""
    return f"unix-abstract:{link.getsockname()[1:].decode('ascii')}"


class Relay:
    """Passes bytes on between ``outer``, a client, and ``inner``, a server, until the server or ``end`` ends it.

    On the running event loop. A client that ends its side only still gets what the server has to say.
    """

    def __init__(
        self, outer: socket.socket, inner: socket.socket, buffer: memoryview, ended: Callable[[Relay], None]
    ) -> None:
        """Owns both sockets. Raises ``OSError`` if the client is gone, and then owns neither.

        ``buffer``: of all relays of this loop; nothing stays in it.
        """
        peer = peer_name(outer)
        self._loop = asyncio.get_running_loop()
        self._outer, self._inner, self._ended = outer, inner, ended
        self._name = _grpc_name(inner)
        self._buffer = buffer
        self._over = False
        self.heard_at = self._loop.time()
        """When the client last said something."""
        NAMES.add(self._name, peer)
        self._inward = _Lane(self, outer, inner)
        self._outward = _Lane(self, inner, outer)

    def end(self) -> None:
        """Hang up on both sides. Idempotent."""
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
            self.heard_at = self._loop.time()

    def _ends(self, lane: _Lane) -> None:
        """One side has said all, and it has been passed on."""
        if lane is self._outward:
            self.end()
        else:
            self._inner.shutdown(socket.SHUT_WR)


class _Lane:
    """One direction: reads only what it can be rid of, and reads on when it is."""

    def __init__(self, relay: Relay, source: socket.socket, sink: socket.socket) -> None:
        self._relay, self._source, self._sink = relay, source, sink
        self._left = b""
        relay._loop.add_reader(source, self._read)

    def _read(self) -> None:
        relay = self._relay
        try:
            count = self._source.recv_into(relay._buffer)
            if not count:
                relay._loop.remove_reader(self._source)
                relay._ends(self)
                return
            relay._heard(self)
            data = relay._buffer[:count]
            sent = self._send(data)
        except BlockingIOError:
            return
        except OSError:  # either side is gone, and with it what the other one could want
            relay.end()
            return
        if sent < count:
            self._left = bytes(data[sent:])
            relay._loop.remove_reader(self._source)
            relay._loop.add_writer(self._sink, self._send_left)

    def _send_left(self) -> None:
        try:
            self._left = self._left[self._send(self._left) :]
        except OSError:
            self._relay.end()
            return
        if not self._left:
            self._relay._loop.remove_writer(self._sink)
            self._relay._loop.add_reader(self._source, self._read)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._sink.send(data)
        except BlockingIOError:
            return 0
