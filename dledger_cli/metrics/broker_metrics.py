"""A broker's metrics, read from its state at each scrape."""

from __future__ import annotations

import time

from dledger_cli.metrics.families import Families
from dledger_cli.metrics.histogram import cumulative
from dledger_cli.metrics.recorder import MetricsRecorder
from rocketstore.broker.statistics import BrokerMeasurements, PopCounters, ServiceCounters
from rocketstore.broker.timed.service import TimedCounts
from rocketstore.remoting.runtime import NEVER, HaFacts
from rocketstore.server import BrokerServer
from rocketstore.store.stats import LATENCY_BOUNDS_MS, StoreStats
from rocketstore.types import BrokerRole

_LEAST_LATENCY_S = 0.001
"""RocketMQ's first bucket counts latencies below a millisecond."""
_LATENCY_BOUNDS_S = tuple(max(_LEAST_LATENCY_S, bound / 1000) for bound in LATENCY_BOUNDS_MS)


class BrokerMetrics:
    """``rocketmq_…``."""

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
