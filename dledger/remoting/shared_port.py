"""A port for gRPC and remoting, told apart by their first bytes.

A remoting frame begins with its length, which is below 16 MiB, so its first byte is zero. gRPC begins with HTTP/2's
preface, or with TLS that offers HTTP/2 (ALPN); remoting clients use TLS without ALPN. gRPC handles its own TLS; TLS of
remoting connections is handled by ``RemotingAcceptor``.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from dledger.access.addresses import place_of
from dledger.config import ConnectionLimits
from dledger.remoting.acceptor import REMOTING_FRAME, RemotingAcceptor
from dledger.rpc.client_hello import HANDSHAKE_RECORD, protocols_offered
from dledger.rpc.clients.connections import Place
from dledger.rpc.front_door import DoorLimits, FrontDoor, Take, Verdict
from dledger.rpc.listening import listen
from dledger.rpc.private_socket import PrivateSocket
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import TlsServerMode

RemotingFactory = Callable[[], asyncio.Protocol]
"""Creates the protocol object of a new remoting connection."""
_PRUNE_LEAST: Final = 64
_PREFACE: Final = b"PRI * HTTP/2.0"
_GRPC_PROTOCOLS: Final = frozenset({b"h2", b"grpc-exp"})


class SharedPort:
    """On an event loop: ``bind`` before the gRPC server starts, then ``open``, and ``close``."""

    def __init__(
        self,
        whose: str,
        remoting: RemotingFactory | None,
        tls_keeper: TlsKeeper | None,
        mode: TlsServerMode | None,
        limits: ConnectionLimits,
    ) -> None:
        """``whose``: the program's name in log lines. ``remoting`` None: only gRPC is served."""
        self._whose = whose
        self._tls = tls_keeper
        self._limits = limits
        handshake_s_max = limits.handshake_ms_max / 1000
        self._clients = RemotingAcceptor(whose, remoting, tls_keeper, mode, handshake_s_max, self._remember)
        self._listening: list[socket.socket] = []
        self._socket: PrivateSocket | None = None
        self._door: FrontDoor | None = None
        self._remoting_links: dict[Place, weakref.ref[asyncio.Protocol]] = {}
        self._prune_at = _PRUNE_LEAST

    def bind(self, server: grpc.aio.Server, spare_place: Path) -> None:
        """Let the gRPC server listen where connections are relayed to; see ``PrivateSocket``."""
        credentials = self._tls.client_server_credentials() if self._tls is not None else None

        def listen_privately(address: str) -> None:
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)

        self._socket = PrivateSocket(listen_privately, spare_place)

    def listen(self, host: str, port: int, name: str) -> int:
        """Listen, before ``open``; returns the port's number. Raises ``ConfigError``, which calls the port ``name``."""
        if host == "0.0.0.0" and socket.has_dualstack_ipv6():  # as gRPC interprets it
            host = "::"
        listening = listen(host, port, name)
        self._listening += listening
        bound: int = listening[0].getsockname()[1]
        return bound

    def open(self) -> None:
        """Start accepting clients."""
        if self._socket is None:
            return
        limits = DoorLimits(
            2 * self._limits.connections_max, first_bytes_timeout_s=self._limits.handshake_ms_max / 1000
        )
        self._door = FrontDoor(f"{self._whose}'s", self.look, self._socket.path, limits)
        self._door.open(self._listening)
        self._listening = []

    def stop_listening(self) -> None:
        """Stop accepting clients. Idempotent."""
        for one in self._listening:
            one.close()
        self._listening = []
        if self._door is not None:
            self._door.stop_listening()

    async def close(self) -> None:
        """Close relayed connections; remoting connections belong to their factory. Idempotent."""
        self.stop_listening()
        if self._door is not None:
            await self._door.close()
        if self._socket is not None:
            private, self._socket = self._socket, None
            private.close()

    # -- sorting -------------------------------------------------------------------------------------------------------

    def look(self, head: bytes) -> Verdict | Take | int:
        """Identify a connection; see ``Look``."""
        if not head:
            return 1
        if head[0] == REMOTING_FRAME:
            return self._clients.take_plain
        if head[0] == HANDSHAKE_RECORD:
            return self._look_at_tls(head)
        if len(head) < len(_PREFACE) and _PREFACE.startswith(head):
            return len(_PREFACE)
        return Verdict.RELAY if head.startswith(_PREFACE) else Verdict.CLOSE

    def _look_at_tls(self, head: bytes) -> Verdict | Take | int:
        try:
            offered = protocols_offered(head)
        except ValueError:
            return Verdict.CLOSE
        if isinstance(offered, int):
            return offered
        if _GRPC_PROTOCOLS.intersection(offered):
            return Verdict.RELAY  # also without TLS here: the server's answer tells clients why TLS fails
        return Verdict.CLOSE if offered else self._clients.take_sealed

    # -- remoting ------------------------------------------------------------------------------------------------------

    def _remember(self, peer: str, protocol: asyncio.Protocol) -> None:
        """Until its transport, which uvloop gives no weak references to, lets go of it at its end."""
        self._remoting_links[place_of(peer)] = weakref.ref(protocol)
        if len(self._remoting_links) > self._prune_at:
            present = self.remoting_clients()
            self._remoting_links = {place: one for place, one in self._remoting_links.items() if place in present}
            self._prune_at = max(_PRUNE_LEAST, 2 * len(self._remoting_links))

    def remoting_clients(self) -> frozenset[Place]:
        """Return the clients that have remoting connections. Thread-safe."""
        return frozenset(place for place, one in tuple(self._remoting_links.items()) if one() is not None)
