"""Builds the metric families of one scrape. Only metrics in the catalog can be added.

A node, a broker and a name server are read at each scrape.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dledger.monitoring import Condition, ConditionKind
from dledger.node_status import NodeMeasurements
from dledger.remoting.server import UNKNOWN
from dledger.rpc.ports import NodeStatus
from dledger.server import DLedgerServer
from dledger.types import LogIndex, MemberRole, Role
from dledger_cli.metrics.catalog import SPECS
from dledger_cli.metrics.recorder import Histogram, MetricsRecorder, cumulative
from rocketstore.broker.statistics import BrokerMeasurements, PopCounters, ServiceCounters
from rocketstore.broker.timed.service import TimedCounts
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import NEVER, HaFacts
from rocketstore.server import BrokerServer
from rocketstore.store.stats import LATENCY_BOUNDS_MS, StoreStats
from rocketstore.types import BrokerRole

_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)


class Families:
    """Adds samples by metric name; ``labels`` are the values of this collector's common labels."""

    def __init__(self, *labels: str) -> None:
        self._labels: Final = labels
        self._found: dict[str, Metric] = {}

    def of(self, *labels: str) -> Families:
        """The same families, for samples with other values of the common labels."""
        other = Families(*labels)
        other._found = self._found
        return other

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """Add a gauge's sample."""
        self._family(name, GaugeMetricFamily).add_metric((*self._labels, *labels), value)

    def counter(self, name: str, value: float, *labels: str) -> None:
        """Add a counter's sample."""
        self._family(name, CounterMetricFamily).add_metric((*self._labels, *labels), value)

    def histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add a histogram's samples."""
        buckets, total = histogram.read()
        self.buckets(name, buckets, total, *labels)

    def buckets(self, name: str, buckets: Sequence[tuple[str, float]], total: float, *labels: str) -> None:
        """Add a histogram's samples, given its buckets."""
        self._family(name, HistogramMetricFamily).add_metric((*self._labels, *labels), buckets, total)

    def conditions(self, now: Sequence[Condition]) -> None:
        """Add every kind of condition, present or not, so that alerts end."""
        held = {one.kind for one in now}
        for kind in ConditionKind:
            self.gauge("dledger_condition", kind in held, kind)

    def all(self) -> list[Metric]:
        """All families added."""
        return list(self._found.values())

    def _family(self, name: str, make: type[_Family]) -> _Family:
        found = self._found.get(name)
        if found is None:
            spec = SPECS[name]
            found = self._found[name] = make(name, spec.meaning, labels=spec.all_labels)
        if not isinstance(found, make) or found.type != SPECS[name].kind:
            raise TypeError(f"{name} is a {SPECS[name].kind}, not a {found.type}")
        return found


class MetricsSource(Protocol):
    """A node or broker."""

    def add_to(self, families: Families) -> None:
        """Add all its metrics as of now."""


class Collection(Collector):
    """The metrics of all ``sources``, which are asked for at each scrape."""

    def __init__(self, sources: Callable[[], Iterable[MetricsSource]]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """Empty: registration needs nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics as of now."""
        found = Families()
        for source in self._sources():
            source.add_to(found)
        return found.all()


class NodeMetrics:
    """``dledger_…``. ``applied`` returns the application's last applied entry; without one, the commit index counts."""

    def __init__(
        self, server: DLedgerServer, recorder: MetricsRecorder, applied: Callable[[], LogIndex] | None = None
    ) -> None:
        self._server = server
        self._recorder = recorder
        self._applied = applied

    def add_to(self, families: Families) -> None:
        """Add all metrics as of now."""
        now = self._server.measure()
        found = families.of(now.status.group, now.status.node_id)
        self._protocol(found, now)
        self._log(found, now)
        self._peers(found, now)
        self._work(found, now)

    def _protocol(self, found: Families, now: NodeMeasurements) -> None:
        status, record = now.status, self._recorder
        found.gauge("dledger_build_info", 1, status.version, platform.python_version())
        for role in Role:
            found.gauge("dledger_role", status.role is role, role.lower())
        found.gauge("dledger_term", status.term)
        found.gauge("dledger_leader_known", status.leader is not None)
        if status.leader is not None:
            found.gauge("dledger_leader_info", 1, status.leader.node_id)
        found.gauge("dledger_voter", status.voter)
        for member_role in MemberRole:
            count = sum(one.role is member_role for one in status.members)
            found.gauge("dledger_members", count, member_role.name.lower())
        found.gauge("dledger_configuration_index", status.configuration_index)
        found.gauge("dledger_configuration_committed", status.configuration_committed)
        for (kind, code), count in record.member_changes().items():
            found.counter("dledger_member_changes_total", count, kind, code)
        found.conditions(status.conditions)
        found.counter("dledger_elections_total", now.elections)
        found.counter("dledger_pre_votes_total", now.pre_votes)
        for (role_name, reason), count in record.role_changes().items():
            found.counter("dledger_role_changes_total", count, role_name, reason)

    def _log(self, found: Families, now: NodeMeasurements) -> None:
        status = now.status
        found.gauge("dledger_begin_index", status.begin_index)
        found.gauge("dledger_end_index", status.end_index)
        found.gauge("dledger_committed_index", status.committed_index)
        found.gauge("dledger_flushed_index", status.flushed_index)
        found.gauge("dledger_applied_index", self._applied_index(status))
        if status.applied_index is not None:
            found.counter("dledger_apply_seconds_total", now.apply_s)
            found.gauge("dledger_snapshot_index", status.snapshot_index)
            found.gauge("dledger_snapshot_bytes", status.snapshot_bytes)
            found.gauge("dledger_snapshot_seconds", now.snapshot_s)
        found.gauge("dledger_entries", status.end_index - status.begin_index + 1)
        found.gauge("dledger_begin_position_bytes", status.begin_position)
        found.gauge("dledger_end_position_bytes", status.end_position)
        found.gauge("dledger_committed_position_bytes", now.committed_position)
        found.gauge("dledger_flushed_position_bytes", now.flushed_position)
        found.gauge("dledger_disk_used_ratio", now.disk_used_ratio)
        found.gauge("dledger_disk_full", status.disk_full)
        found.counter("dledger_forced_segments_total", now.forced_segments)

    def _applied_index(self, status: NodeStatus) -> LogIndex:
        if status.applied_index is not None:
            return status.applied_index
        return status.committed_index if self._applied is None else self._applied()

    def _peers(self, found: Families, now: NodeMeasurements) -> None:
        learners = {one.node_id for one in now.status.members if one.role is MemberRole.LEARNER}
        for peer in now.peers:
            status, name = peer.status, peer.status.node_id
            found.gauge("dledger_peer_match_index", status.match_index, name)
            found.gauge("dledger_peer_lag_entries", status.lag_entries, name)
            found.gauge("dledger_peer_lag_bytes", peer.lag_bytes, name)
            if name in learners:
                found.gauge("dledger_peer_ready", not status.not_ready, name)
            found.gauge("dledger_peer_inflight_pushes", status.inflight, name)
            found.gauge("dledger_peer_last_contact_seconds", status.last_contact_ms / 1000, name)
        for name, dropped in now.dropped_messages.items():
            found.counter("dledger_peer_dropped_messages_total", dropped, name)
        members = {one.node_id for one in now.status.members}
        for name, record in sorted(self._recorder.peers.copy().items()):
            if name not in members:
                continue
            found.histogram("dledger_replication_latency_seconds", record.latency_s, name)
            found.histogram("dledger_replication_batch_entries", record.entries, name)
            found.histogram("dledger_replication_batch_bytes", record.size_bytes, name)

    def _work(self, found: Families, now: NodeMeasurements) -> None:
        record = self._recorder
        found.gauge("dledger_pending_entries", now.status.pending_entries)
        found.gauge("dledger_pending_bytes", now.pending_bytes)
        found.gauge("dledger_producers", now.producers)
        found.counter("dledger_repeated_entries_total", now.repeated_entries)
        found.counter("dledger_appended_entries_total", record.append_entries.read()[1])
        found.counter("dledger_appended_bytes_total", record.append_bytes.read()[1])
        found.counter("dledger_received_entries_total", record.received_entries)
        found.counter("dledger_received_bytes_total", record.received_bytes)
        for code, count in record.failures().items():
            found.counter("dledger_append_failures_total", count, code)
        found.histogram("dledger_append_latency_seconds", record.append_latency_s)
        found.histogram("dledger_append_batch_entries", record.append_entries)
        found.histogram("dledger_append_batch_bytes", record.append_bytes)
        found.histogram("dledger_flush_latency_seconds", record.flush_latency_s)
        found.histogram("dledger_flush_bytes", record.flush_bytes)


_LEAST_LATENCY_S = 0.001
"""RocketMQ's first bucket counts latencies below a millisecond."""
_LATENCY_BOUNDS_S = tuple(max(_LEAST_LATENCY_S, bound / 1000) for bound in LATENCY_BOUNDS_MS)


class BrokerMetrics:
    def __init__(self, broker: BrokerServer, recorder: MetricsRecorder) -> None:
        self._broker = broker
        self._recorder = recorder

    def add_to(self, families: Families) -> None:
        """Add all metrics as of now."""
        config, now = self._broker.config, self._broker.measure()
        found = families.of(config.cluster_name, config.name, config.node_id)
        found.gauge("rocketmq_master", now.role is not BrokerRole.SLAVE)
        self._store(found, now)
        self._counters(found, self._broker.store.stats)
        self._topics(found, now)
        found.gauge("rocketmq_pulls_waiting", now.service.pulls_waiting)
        found.counter("rocketmq_filter_errors_total", now.service.filter_errors)
        found.gauge("rocketmq_streams", now.service.streams)
        found.gauge("rocketmq_transactions_open", now.service.transactions_open)
        found.counter("rocketmq_transactions_given_up_total", now.service.transactions_given_up)
        found.counter("rocketmq_messages_dropped_total", now.service.dropped_messages)
        self._timed(found, self._broker.timed.counts())
        self._grpc(found, now.service)
        self._pop(found, now.service.pop)
        found.gauge("rocketmq_send_pending_messages", now.service.messages_pending)
        found.gauge("rocketmq_send_pending_bytes", now.service.bytes_pending)
        if self._broker.replication is not None:
            add_replication(found, self._broker.replication.facts())
        if self._broker.node is None:  # otherwise it reports the conditions of both
            families.of(config.name, config.node_id).conditions(self._broker.conditions.now())

    @staticmethod
    def _pop(found: Families, pop: PopCounters) -> None:
        found.gauge("rocketmq_pop_waiting", pop.waiting)
        found.counter("rocketmq_pop_messages_total", pop.delivered)
        found.counter("rocketmq_pop_acknowledged_total", pop.acknowledged)
        found.counter("rocketmq_pop_redelivered_total", pop.copied)
        found.counter("rocketmq_pop_dead_total", pop.dead)
        found.counter("rocketmq_pop_changes_total", pop.ticks)

    @staticmethod
    def _timed(found: Families, now: TimedCounts) -> None:
        found.gauge("rocketmq_timed_messages_open", now.open)
        found.gauge("rocketmq_timed_messages_open_bytes", now.open_bytes)
        found.gauge("rocketmq_timed_messages_late", now.late)
        found.gauge("rocketmq_timed_messages_lag_seconds", now.lag_ms / 1000)
        found.gauge("rocketmq_timed_messages_next_due_seconds", max(now.next_due_ms, 0) / 1000)
        found.counter("rocketmq_timed_messages_delivered_total", now.delivered)
        found.counter("rocketmq_timed_messages_skipped_total", now.skipped)

    @staticmethod
    def _grpc(found: Families, service: ServiceCounters) -> None:
        found.gauge("rocketmq_grpc_clients", service.grpc_clients)
        found.counter("rocketmq_grpc_calls_total", service.grpc_calls)
        found.counter("rocketmq_grpc_refused_total", service.grpc_refused)
        found.gauge("rocketmq_grpc_passed_on", service.grpc_passed_on)
        found.counter("rocketmq_grpc_repeated_messages_total", service.grpc_repeated)

    def _store(self, found: Families, now: BrokerMeasurements) -> None:
        begin_ms = now.earliest_message_ms
        found.gauge("rocketmq_storage_size_bytes", now.end_offset - now.min_offset)
        found.gauge("rocketmq_storage_dispatch_behind_bytes", now.dispatch_behind_bytes)
        found.gauge("rocketmq_storage_flush_behind_bytes", now.flush_behind_bytes)
        found.gauge(
            "rocketmq_storage_message_age_seconds", max(0.0, time.time() - begin_ms / 1000) if begin_ms > 0 else 0
        )
        found.gauge("rocketmq_storage_disk_used_ratio", now.disk_used_ratio)
        if self._broker.node is None:  # otherwise the node's metrics contain the log's figures
            found.histogram("rocketmq_flush_latency_seconds", self._recorder.flush_latency_s)
        found.counter("rocketmq_storage_forced_files_total", now.forced_files)

    def _counters(self, found: Families, stats: StoreStats) -> None:
        found.counter("rocketmq_puts_total", stats.puts)
        found.counter("rocketmq_put_failures_total", stats.failed_puts)
        buckets = cumulative(_LATENCY_BOUNDS_S, stats.latency())
        found.buckets("rocketmq_put_latency_seconds", buckets, stats.latency_sum_s())
        found.counter("rocketmq_gets_total", stats.gets_found, "found")
        found.counter("rocketmq_gets_total", stats.gets_missed, "missed")

    def _topics(self, found: Families, now: BrokerMeasurements) -> None:
        found.gauge("rocketmq_topics", now.topic_count)
        found.gauge("rocketmq_consumer_groups", now.group_count)
        for topic, arrived in now.topics.items():
            found.counter("rocketmq_messages_in_total", arrived.messages, topic)
            found.counter("rocketmq_throughput_in_bytes_total", arrived.size_bytes, topic)
        for (group, topic), given in now.groups.items():
            found.counter("rocketmq_messages_out_total", given.messages, topic, group)
            found.counter("rocketmq_throughput_out_bytes_total", given.size_bytes, topic, group)
        for lag in now.lags:
            found.gauge("rocketmq_consumer_lag_messages", lag.messages, lag.topic, lag.group)
            if lag.age_ms is not None:
                found.gauge("rocketmq_consumer_lag_seconds", lag.age_ms / 1000, lag.topic, lag.group)
        for one in now.queue_lags:
            place = one.topic, one.group, str(one.queue_id)
            found.gauge("rocketmq_consumer_queue_lag_messages", one.messages, *place)
            found.gauge("rocketmq_consumer_queue_lag_seconds", one.age_ms / 1000, *place)
        found.gauge("rocketmq_consumer_lags_left_out", now.lags_left_out)


def add_replication(found: Families, facts: HaFacts) -> None:
    """Add the metrics of a plain broker's side of replication."""
    found.gauge("rocketmq_ha_epoch", facts.epoch)
    if facts.is_slave:
        found.gauge("rocketmq_ha_connected", facts.is_connected)
        found.gauge("rocketmq_ha_lag_bytes", facts.lag_bytes)
        found.gauge("rocketmq_ha_lag_seconds", _seconds(facts.lag_ms))
        found.gauge("rocketmq_ha_contact_seconds", _seconds(facts.contact_ms))
        return
    found.gauge("rocketmq_ha_copies", facts.copies)
    found.gauge("rocketmq_ha_copies_wanted", facts.copies_wanted)
    found.gauge("rocketmq_ha_slaves", len(facts.followers))
    worst: dict[str, tuple[int, int]] = {}  # one may be connected twice for a while
    for one in facts.followers:
        name = one.address.rpartition(":")[0] if one.broker_id < 0 else str(one.broker_id)
        worst[name] = max(worst.get(name, (0, 0)), (one.lag_bytes, one.lag_ms))
    for name, (lag_bytes, lag_ms) in worst.items():
        found.gauge("rocketmq_ha_slave_lag_bytes", lag_bytes, name)
        found.gauge("rocketmq_ha_slave_lag_seconds", lag_ms / 1000, name)


def _seconds(span_ms: int) -> float:
    return -1 if span_ms == NEVER else span_ms / 1000


_NAMES = {int(one): one.name for one in RequestCode} | {UNKNOWN: "unknown"}


class NameServerMetrics(Collector):
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
