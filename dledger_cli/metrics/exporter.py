"""The metrics endpoint of one server process: the collectors and the port.

The port is open before the server is created, so that a long recovery can be watched, and a port in use is reported at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from dledger.types import LogIndex, Position
from dledger_cli.metrics.broker_metrics import BrokerMetrics
from dledger_cli.metrics.families import Collection, MetricsSource
from dledger_cli.metrics.http import MetricsPort, text_page
from dledger_cli.metrics.name_server_metrics import NameServerMetrics
from dledger_cli.metrics.node_metrics import NodeMetrics
from dledger_cli.metrics.recorder import MetricsRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from dledger.hosted_groups import GroupsServer, HostedGroups, MemberT
    from dledger.server import DLedgerServer
    from rocketstore.nameserver.server import NameServer
    from rocketstore.server import BrokerServer, BrokersServer


@dataclass(slots=True)
class _Probes:
    alive: Callable[[], tuple[bool, str]]
    ready: Callable[[], tuple[bool, str]]


class Exporter:
    """A context manager that serves the port. The constructor raises ``ConfigError`` if the port is in use."""

    def __init__(self, host: str, port: int) -> None:
        self.instruments = MetricsRecorder()
        """To be passed to the server."""
        self._recorders: dict[str, MetricsRecorder] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._probes = _Probes(alive=lambda: (True, "starting"), ready=lambda: (False, "starting"))
        self._port = MetricsPort(
            host,
            port,
            {
                "/metrics": self._metrics,
                "/healthz": text_page(lambda: self._probes.alive()),
                "/readyz": text_page(lambda: self._probes.ready()),
            },
        )

    def __enter__(self) -> Self:
        self._port.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._port.stop()

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._port.port

    def instruments_of(self, group: str) -> MetricsRecorder:
        """To be passed to the member of one of several groups."""
        return self._recorders.setdefault(group, MetricsRecorder())

    def watch_groups(self, server: GroupsServer) -> None:
        """Export the members of several groups, created with ``instruments_of``; call before starting them.

        Ready: all of them are.
        """
        nodes = []
        for group, member in server.servers.items():
            recorder = self.instruments_of(group)
            member.add_role_change_handler(recorder)
            nodes.append(NodeMetrics(member, recorder))
        self._registry.register(Collection(lambda: nodes))
        self._probes = _Probes(alive=lambda: _alive(server.fatal), ready=lambda: _all_ready(server, _node_ready))

    def watch_node(self, server: DLedgerServer) -> None:
        """Export a node created with ``instruments``; call before starting it."""
        server.add_role_change_handler(self.instruments)
        metrics = NodeMetrics(server, self.instruments)
        self._registry.register(Collection(lambda: [metrics]))
        self._probes = _Probes(
            alive=lambda: _alive(server.fatal),
            ready=lambda: _node_ready(server),
        )

    def watch_broker(self, broker: BrokerServer) -> None:
        """Export a broker created with ``instruments``, and its node; call before starting it."""
        sources = _sources_of(broker, self.instruments)
        self._registry.register(Collection(lambda: sources))
        self._probes = _Probes(alive=lambda: _alive(broker.fatal), ready=lambda: _broker_ready(broker))

    def watch_brokers(self, server: BrokersServer) -> None:
        """Export several brokers, created with ``instruments_of``, and their nodes; call before starting them.

        Ready: all of them are. One that has failed is told of by the conditions of the others only.
        """
        sources = {group: _sources_of(one, self.instruments_of(group)) for group, one in server.servers.items()}

        def living() -> list[MetricsSource]:
            failed = server.failures  # their stores are closed
            return [source for group, its in sources.items() if group not in failed for source in its]

        self._registry.register(Collection(living))
        self._probes = _Probes(alive=lambda: _alive(server.fatal), ready=lambda: _all_ready(server, _broker_ready))

    def watch_name_server(self, server: NameServer) -> None:
        """Export a name server; call before starting it."""
        self._registry.register(NameServerMetrics(server))
        self._probes = _Probes(
            alive=lambda: _alive(server.fatal),
            ready=lambda: (server.measure().connections >= 0, "ready"),  # the loop has answered
        )

    def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        """Always in the plain text format: OpenMetrics costs half as much again."""
        encode, kind = choose_encoder("")
        return HTTPStatus.OK, kind, encode(self._registry)


def _alive(fatal: BaseException | None) -> tuple[bool, str]:
    return (True, "alive") if fatal is None else (False, f"failed: {fatal}")


def _sources_of(broker: BrokerServer, recorder: MetricsRecorder) -> list[MetricsSource]:
    """The metrics of a broker, and of its node, if any."""
    node, sources = broker.node, list[MetricsSource]()
    if node is not None:
        node.add_role_change_handler(recorder)

        def applied() -> LogIndex:
            return node.log.last_index_before(Position(broker.store.dispatch_position))

        sources.append(NodeMetrics(node, recorder, applied))
    return [*sources, BrokerMetrics(broker, recorder)]


def _all_ready(server: HostedGroups[MemberT], ready_of: Callable[[MemberT], tuple[bool, str]]) -> tuple[bool, str]:
    for group, member in server.servers.items():
        if (error := server.failures.get(group)) is not None:
            return False, f"group {group} has failed: {error}"
        ready, why = ready_of(member)
        if not ready:
            return False, f"group {group}: {why}"
    return True, "ready"


def _node_ready(server: DLedgerServer) -> tuple[bool, str]:
    return _ready(known=server.fatal is None and server.status().leader is not None, lost=server.removed)


def _broker_ready(broker: BrokerServer) -> tuple[bool, str]:
    return _ready(known=broker.is_ready)


def _ready(*, known: bool, lost: str = "") -> tuple[bool, str]:
    if lost:
        return False, lost
    return (True, "ready") if known else (False, "no known leader")
