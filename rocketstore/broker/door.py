"""The broker's ports for clients: gRPC and RocketMQ's remoting protocol on one port, identified by their first bytes.

A remoting frame begins with its length, which is below 16 MiB, so its first byte is zero. gRPC begins with HTTP/2's
preface, or with TLS that offers HTTP/2 (ALPN); remoting clients use TLS without ALPN. gRPC handles its own TLS; TLS of
remoting connections is handled by ``dledger.remoting.acceptor``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import weakref
from collections.abc import Callable
from typing import Final

import grpc

from dledger.access.addresses import place_of
from dledger.errors import ConfigError
from dledger.remoting.acceptor import REMOTING_FRAME, RemotingAcceptor
from dledger.rpc import options
from dledger.rpc.client_hello import HANDSHAKE_RECORD, protocols_offered
from dledger.rpc.clients.connections import Place
from dledger.rpc.front_door import DoorLimits, FrontDoor, Take, Verdict, listen
from dledger.rpc.private_socket import PrivateSocket
from dledger.rpc.tls_keeper import TlsKeeper
from rocketstore.broker_config import BrokerConfig

_log = logging.getLogger("rocketstore")

RemotingFactory = Callable[[], asyncio.Protocol]
"""Creates the protocol object of a new remoting connection."""
VIP_PORT_OFFSET: Final = -2
"""From ``listenPort`` to RocketMQ's second port (VIP channel)."""
_PRUNE_LEAST: Final = 64
_PREFACE: Final = b"PRI * HTTP/2.0"
_GRPC_PROTOCOLS: Final = frozenset({b"h2", b"grpc-exp"})


class BrokerDoor:
    """On the broker's event loop: ``bind`` before the gRPC server starts, then ``open``, and ``close``."""

    def __init__(self, config: BrokerConfig, tls_keeper: TlsKeeper | None, remoting: RemotingFactory | None) -> None:
        self._config = config
        self._tls = tls_keeper
        self._remoting = remoting
        self._clients = RemotingAcceptor(
            "broker",
            remoting,
            tls_keeper,
            config.tls_server_mode,
            config.effective_limits.handshake_ms_max / 1000,
            self._remember,
        )
        self._listening: list[socket.socket] = []
        self._socket: PrivateSocket | None = None
        self._door: FrontDoor | None = None
        self._remoting_links: dict[Place, weakref.ref[asyncio.Protocol]] = {}
        self._prune_at = _PRUNE_LEAST
        self.ports: frozenset[int] = frozenset()
        """All ports listened on, once bound."""

    def bind(self, server: grpc.aio.Server) -> int:
        """Bind every port, and return ``listenPort``'s number. Raises ``ConfigError``."""
        config = self._config
        host = config.bind_host
        if host == "0.0.0.0" and socket.has_dualstack_ipv6():  # as gRPC interprets it
            host = "::"
        self._listening = listen(host, config.listen_port, "broker's")
        port: int = self._listening[0].getsockname()[1]
        vip = self._listen_for_vips(host)
        self._listening += vip
        credentials = self._tls.client_server_credentials() if self._tls is not None else None
        grpc_ports = []
        if config.grpc_port:
            grpc_ports.append(options.bind(server, config.bind_host, config.grpc_port, "broker's gRPC", credentials))

        def listen_privately(address: str) -> None:
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)

        self._socket = PrivateSocket(listen_privately, config.store.store_path_root_dir)
        self.ports = frozenset({one.getsockname()[1] for one in self._listening}.union(grpc_ports))
        return port

    def _listen_for_vips(self, host: str) -> list[socket.socket]:
        """Bind the VIP port. If it is taken, the start fails only if ``vip_port`` was set: few clients use the port."""
        config = self._config
        port = config.vip_port
        if port is None:
            port = config.listen_port + VIP_PORT_OFFSET if self._remoting is not None else 0
        if port <= 0:
            return []
        try:
            return listen(host, port, "broker's VIP")
        except ConfigError as error:
            if config.vip_port is not None:
                raise
            _log.warning("no VIP port, set vipPort to another one, or to 0 for none: %s", error)
            return []

    def open(self) -> None:
        """Start accepting clients."""
        if self._socket is None:
            return
        limits = self._config.effective_limits
        self._door = FrontDoor(
            "broker's",
            self.look,
            self._socket.path,
            DoorLimits(2 * limits.connections_max, first_bytes_timeout_s=limits.handshake_ms_max / 1000),
        )
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
