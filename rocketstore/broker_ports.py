"""The broker's ports for clients: ``listenPort`` and the VIP port, of remoting and still of gRPC, and gRPC's own."""

from __future__ import annotations

import logging

import grpc

from dledger.errors import ConfigError
from dledger.remoting.shared_port import RemotingFactory, SharedPort
from dledger.rpc import options
from dledger.rpc.clients.connections import Place
from dledger.rpc.tls_keeper import TlsKeeper
from rocketstore.broker_config import BrokerConfig

_log = logging.getLogger("rocketstore")


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
        self.grpc_port = 0
        """The port of gRPC, once bound; 0: none."""

    def bind(self, server: grpc.aio.Server) -> int:
        """Bind every port, and return ``listenPort``'s number. Raises ``ConfigError``."""
        config = self._config
        port = self._port.listen(config.bind_host, config.listen_port, "broker's")
        ports = {port, *self._listen_for_vips()}
        if config.grpc_bind_port is not None:
            credentials = self._tls.client_server_credentials() if self._tls is not None else None
            self.grpc_port = options.bind(server, config.bind_host, config.grpc_bind_port, "gRPC", credentials)
            ports.add(self.grpc_port)
        self._port.bind(server, config.store.store_path_root_dir)
        self.ports = frozenset(ports)
        return port

    def _listen_for_vips(self) -> list[int]:
        """Bind the VIP port. If it is taken, the start fails only if ``vip_port`` was set: few clients use the port."""
        config = self._config
        port = config.vip_bind_port
        if not port or (config.vip_port is None and not self._has_remoting):
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
