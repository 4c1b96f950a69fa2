"""One port for TLS and plaintext: gRPC's own ports are of one kind each, so both are private, and bytes are passed on.

Clients of either kind wait for nothing before they send, and the first byte tells which they are: TLS begins with a
handshake record, HTTP/2 with its preface. gRPC cannot take over a connection that somebody else has accepted.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from dledger.rpc.acceptor import TLS_HANDSHAKE, Acceptor, Arrival, peek
from dledger.values import address_text

PRIVATE_HOST: Final = "127.0.0.1"


class FirstByteRelay:
    """Accepts from ``open`` to ``close``, on the event loop that calls them.

    gRPC limits how many connections there are at once, and how long a handshake takes. Its private ports can be reached
    from this machine, which gains nothing: anyone who connects there is treated like a client at the public port.
    """

    def __init__(self, whose: str, tls_port: int, plaintext_port: int, first_byte_s_max: float) -> None:
        self._ports: Final = (plaintext_port, tls_port)
        self._acceptor = Acceptor(whose, self._identify, first_byte_s_max)
        self._peers: dict[str, str] = {}
        self._links: set[asyncio.Transport] = set()
        self.open = self._acceptor.open
        self.stop_listening = self._acceptor.stop_listening

    def client_of(self, peer: str) -> str:
        """gRPC's name of the client behind a connection that it names ``peer``."""
        return self._peers.get(peer, peer)

    async def close(self) -> None:
        """Accept nothing more, and hang up on everybody. Idempotent."""
        await self._acceptor.close()
        for one in tuple(self._links):
            one.abort()

    async def _identify(self, arrival: Arrival) -> None:
        is_tls = await peek(arrival.link) == TLS_HANDSHAKE
        loop = asyncio.get_running_loop()
        inner, outer = _Side(), _Side()
        private, _ = await loop.create_connection(lambda: inner, PRIVATE_HOST, self._ports[is_tls])
        peer = f"ipv4:{address_text(*private.get_extra_info('sockname')[:2])}"
        self._peers[peer] = peer_name(arrival.link)
        self._links.add(private)
        inner.on_end = partial(self._ended, peer, private)
        outer.other = private
        try:
            arrival.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client, _ = await loop.connect_accepted_socket(lambda: outer, arrival.take())
        except BaseException:
            private.abort()
            raise
        inner.meets(client)

    def _ended(self, peer: str, private: asyncio.Transport) -> None:
        self._peers.pop(peer, None)
        self._links.discard(private)


class _Side(asyncio.Protocol):
    """One of the two connections: received data go to the other one, as fast as that takes them."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        """None: not there yet."""
        self.is_lost = False
        self.on_end: Callable[[], None] = _nothing
        self._early = b""

    def meets(self, other: asyncio.Transport) -> None:
        """The other connection is there."""
        self.other = other
        if self._early and not other.is_closing():
            other.write(self._early)
        self._early = b""
        if self.is_lost:
            other.close()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is None:
            self._early += data  # gRPC's settings, which it sends at once: some dozen bytes
        elif not self.other.is_closing():
            self.other.write(data)

    def eof_received(self) -> bool:
        """The other side learns it, too, and may go on sending."""
        if self.other is not None and not self.other.is_closing():
            with suppress(OSError):  # it is gone
                self.other.write_eof()
        return True

    def pause_writing(self) -> None:
        """This connection does not take what the other one receives."""
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        """It does again."""
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """The end of both."""
        self.is_lost = True
        self.on_end()
        if self.other is not None and not self.other.is_closing():
            self.other.close()


def _nothing() -> None:
    pass


def peer_name(link: socket.socket) -> str:
    """gRPC's name of who is at the other end."""
    host, port = link.getpeername()[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
