"""The broker's ports for clients: ``listenPort`` and the VIP port, of gRPC and remoting, and one of gRPC's own."""

from __future__ import annotations

import logging
from typing import Final

import grpc

from dledger.errors import ConfigError
from dledger.remoting.shared_port import RemotingFactory, SharedPort
from dledger.rpc import options
from dledger.rpc.clients.connections import Place
from dledger.rpc.tls_keeper import TlsKeeper
from rocketstore.broker_config import BrokerConfig

_log = logging.getLogger("rocketstore")

VIP_PORT_OFFSET: Final = -2
"""From ``listenPort`` to RocketMQ's second port (VIP channel)."""


class BrokerDoor:
    """On the broker's event loop: ``bind`` before the gRPC server starts, then ``open``, and ``close``."""

    def __init__(self, config: BrokerConfig, tls_keeper: TlsKeeper | None, remoting: RemotingFactory | None) -> None:
        self._config = config
        self._tls = tls_keeper
        self._has_remoting = remoting is not None
        self._port = SharedPort("broker", remoting, tls_keeper, config.tls_server_mode, config.effective_limits)
        self.look = self._port.look
        self.open = self._port.open
        self.stop_listening = self._port.stop_listening
        self.close = self._port.close
        self.ports: frozenset[int] = frozenset()
        """All ports listened on, once bound."""

    def bind(self, server: grpc.aio.Server) -> int:
        """Bind every port, and return ``listenPort``'s number. Raises ``ConfigError``."""
        config = self._config
        port = self._port.listen(config.bind_host, config.listen_port, "broker's")
        ports = {port, *self._listen_for_vips()}
        if config.grpc_port:
            credentials = self._tls.client_server_credentials() if self._tls is not None else None
            ports.add(options.bind(server, config.bind_host, config.grpc_port, "broker's gRPC", credentials))
        self._port.bind(server, config.store.store_path_root_dir)
        self.ports = frozenset(ports)
        return port

    def _listen_for_vips(self) -> list[int]:
        """Bind the VIP port. If it is taken, the start fails only if ``vip_port`` was set: few clients use the port."""
        config = self._config
        port = config.vip_port
        if port is None:
            port = config.listen_port + VIP_PORT_OFFSET if self._has_remoting else 0
        if port <= 0:
            return []
        try:
            return [self._port.listen(config.bind_host, port, "broker's VIP")]
        except ConfigError as error:
            if config.vip_port is not None:
                raise
            _log.warning("no VIP port, set vipPort to another one, or to 0 for none: %s", error)
            return []

    def remoting_clients(self) -> frozenset[Place]:
        """Return the clients that have remoting connections. Thread-safe."""
        return self._port.remoting_clients()
