"""A name server's metrics, read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dledger.remoting.server import UNKNOWN
from dledger_cli.metrics.families import Families
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode

_NAMES = {int(one): one.name for one in RequestCode} | {UNKNOWN: "unknown"}


class NameServerMetrics(Collector):
    """``rocketmq_namesrv_…``."""

    def __init__(self, server: NameServer) -> None:
        self._server = server

    def describe(self) -> Iterable[Metric]:
        """Empty: registration needs nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics as of now. Raises ``ShutdownError``."""
        found, now = Families(), self._server.measure()
        found.gauge("rocketmq_namesrv_brokers", now.brokers)
        found.gauge("rocketmq_namesrv_brokers_without_master", now.without_master)
        found.gauge("rocketmq_namesrv_broker_addresses", now.addresses)
        found.gauge("rocketmq_namesrv_topics", now.topics)
        found.gauge("rocketmq_namesrv_routes", now.places)
        found.gauge("rocketmq_namesrv_values", now.values)
        found.gauge("rocketmq_namesrv_connections", now.connections)
        found.gauge("rocketmq_namesrv_requests_under_way", now.requests_under_way)
        for (request, code), count in now.requests.items():
            found.counter("rocketmq_namesrv_requests_total", count, _NAMES[request], str(code))
        found.counter("rocketmq_namesrv_outdated_registrations_total", now.outdated)
        found.counter("rocketmq_namesrv_expired_addresses_total", now.expired)
        found.counter("rocketmq_namesrv_master_changes_total", now.master_changes)
        return found.all()
