"""The resources shared by the groups of a process: ports, event loops, certificates, access rules, timer threads.

Each group's member (``dledger.server.DLedgerServer``) has its own directory, lock, flusher, dispatchers and links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dledger.access.guard import AccessControl, AccessGuard
from dledger.client_server import ClientServer, ServedLog
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import InvariantError
from dledger.rpc.peers.port import PeerPort
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.runtime.supervisor import Supervisor
from dledger.runtime.tasks import Housekeeping, Task
from dledger.values import address_text

_TLS_INTERVAL_MS: Final = 2000

Failed = Callable[[str, BaseException], None]
"""Told which group's member has failed, and why."""


def _nowhere(_group: str, _error: BaseException) -> None:
    """A member alone in its process ends it."""


class Host:
    """In this order: its groups ``add`` their logs, ``start``, ``accept`` once the members are started; the members'
    transports are closed, ``close_ports``, the members' work ends, ``stop``.
    """

    def __init__(
        self, configs: Sequence[ServerConfig], clock: Clock, supervisor: Supervisor, failed: Failed = _nowhere
    ) -> None:
        """``configs``: of its groups, which agree on what is the process's (``host_settings``).

        ``supervisor`` is told if what they share fails, ``failed`` if one of them does, on any thread. Raises
        ``ConfigError``.
        """
        self._config = config = configs[0]
        self._clock = clock
        self._supervisor = supervisor
        self.groups: Final = tuple(one.group for one in configs)
        """The names of its groups."""
        self.failed: Final = failed
        self.tls: Final = TlsKeeper.of(config)
        """The certificates in use; None for plaintext."""
        self.housekeeping: Final = Housekeeping(config.node_id, clock, supervisor)
        self.peer_port: Final = PeerPort(config, self.groups, self.tls, supervisor.report)
        self._access = AccessControl.of(config.access, name=config.node_id, clock=clock)
        self._logs: list[ServedLog] = []
        self._clients: ClientServer | None = None
        self._renewal = None if self.tls is None else Task(self.housekeeping.clean, self._renew_tls, supervisor)

    def add(self, log: ServedLog) -> None:
        """Serve a group's log to clients; before ``start``."""
        self._logs.append(log)

    @property
    def clients(self) -> ClientServer:
        """The server for clients, from ``start`` on. Raises ``InvariantError`` before."""
        if self._clients is None:
            raise InvariantError("the host is not started")
        return self._clients

    @property
    def client_address(self) -> str:
        """The address for clients; its port is 0 before ``start``, if it is chosen freely."""
        if self._clients is not None:
            return self._clients.address
        return address_text(self._config.client_host or self._config.self_member.host, self._config.client_bind_port)

    @property
    def guard(self) -> AccessGuard | None:
        """Access control of all its groups; None: everything is allowed."""
        return None if self._access is None else self._access.guard

    def start(self, *, client_ports: bool = True) -> None:
        """Open the ports; members are connected only from ``accept`` on. Raises ``ConfigError`` if a port is taken.

        ``client_ports`` False: clients are served by others, on the event loop of ``clients``.
        """
        self._clients = clients = ClientServer(self._logs, self.guard, self.tls, self._supervisor.report)
        clients.start(ports=client_ports)
        if self._access is not None:
            self._access.start(clients.bridge.post, self._supervisor.thread)
        self.peer_port.open()
        self.housekeeping.start()
        if self._renewal is not None:
            self._renewal.start()

    def accept(self) -> None:
        """Take the connections of the groups' members, whose transports are started."""
        self.peer_port.accept()

    def close_ports(self) -> None:
        """Serve nobody any more. Idempotent."""
        self.peer_port.close()
        if self._clients is not None:
            self._clients.close()
        if self._access is not None:
            self._access.close()

    def stop(self) -> None:
        """Close the ports, and end the threads. Idempotent."""
        self.close_ports()
        self.housekeeping.stop()

    def _renew_tls(self) -> int:
        if self.tls is not None:
            self.tls.refresh()
        return self._clock.monotonic_ms() + _TLS_INTERVAL_MS
