"""Every metric: its name, kind, labels and meaning, and its name in DLedger and RocketMQ 5.

Collectors can only emit metrics listed here (``families`` looks them up), and the table in ``docs/monitoring.md`` is
generated from it. Names follow Prometheus: base units, ``_total`` for counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()
    """Besides the labels of all metrics in its family."""
    java: str = ""
    """The equivalent, or nearly, in DLedger 0.4 or RocketMQ 5; empty if none."""

    @property
    def all_labels(self) -> tuple[str, ...]:
        if self.name.startswith(NAME_SERVER_PREFIX):
            return self.labels
        return (*(NODE_LABELS if self.name.startswith("dledger_") else BROKER_LABELS), *self.labels)


NAME_SERVER_PREFIX: Final = "rocketmq_namesrv_"
NODE_LABELS: Final = ("group", "node")
"""Labels of every ``dledger_`` metric."""
BROKER_LABELS: Final = ("cluster", "broker", "node")
"""Labels of every ``rocketmq_`` metric of a broker."""


def _gauge(name: str, meaning: str, *labels: str, java: str = "") -> Spec:
    return Spec(name, MetricKind.GAUGE, meaning, labels, java)


def _counter(name: str, meaning: str, *labels: str, java: str = "") -> Spec:
    return Spec(name, MetricKind.COUNTER, meaning, labels, java)


def _histogram(name: str, meaning: str, *labels: str, java: str = "") -> Spec:
    return Spec(name, MetricKind.HISTOGRAM, meaning, labels, java)


NODE_SPECS: Final = (
    _gauge("dledger_build_info", "Always 1; the labels describe this server.", "version", "python"),
    _gauge("dledger_role", "1 for the node's current role, 0 for the others.", "role"),
    _gauge("dledger_term", "The current term."),
    _gauge("dledger_leader_known", "Whether the node knows a leader of its term (itself included)."),
    _gauge("dledger_leader_info", "1 for the leader the node knows; absent while it knows none.", "leader"),
    _gauge("dledger_voter", "Whether its vote counts; 0 on a node with a new disk that has not caught up."),
    _gauge("dledger_members", "Members of the group, as this node knows them, by role.", "role"),
    _gauge("dledger_configuration_index", "The entry that says who they are; -1: the settings do."),
    _gauge("dledger_configuration_committed", "Whether the node knows that entry to be committed."),
    _counter("dledger_member_changes_total", "Requests to change the members, by kind and code.", "kind", "code"),
    _gauge("dledger_begin_index", "First entry kept."),
    _gauge("dledger_end_index", "Last entry stored.", java="DLedger ledgerEndIndex"),
    _gauge("dledger_committed_index", "Last entry known to be committed.", java="DLedger committedIndex"),
    _gauge("dledger_flushed_index", "Last entry durable on this node."),
    _gauge(
        "dledger_applied_index",
        "Last entry applied: by the state machine, in queues and index (broker), or else committed.",
        java="DLedger appliedIndex",
    ),
    _counter("dledger_apply_seconds_total", "State machine only: time spent in applying entries."),
    _gauge("dledger_snapshot_index", "State machine only: last entry of the newest durable snapshot; -1: none."),
    _gauge("dledger_snapshot_bytes", "State machine only: its bytes."),
    _gauge("dledger_snapshot_seconds", "State machine only: how long the last one took to write."),
    _gauge("dledger_entries", "Entries kept.", java="dledger_entries_count"),
    _gauge("dledger_begin_position_bytes", "Where the log starts."),
    _gauge("dledger_end_position_bytes", "Where the log ends."),
    _gauge("dledger_committed_position_bytes", "Up to where the log is known to be committed."),
    _gauge("dledger_flushed_position_bytes", "Up to where the log is durable on this node."),
    _gauge("dledger_pending_entries", "Entries on the leader waiting for a quorum."),
    _gauge("dledger_pending_bytes", "Their bytes."),
    _gauge("dledger_producers", "Leader only: producers whose repeated appends are recognized (max_producers)."),
    _counter("dledger_repeated_entries_total", "Repeated entries of producers that were not stored again."),
    _gauge("dledger_peer_match_index", "Leader only: last entry that the peer durably holds.", "peer"),
    _gauge("dledger_peer_lag_entries", "Leader only: entries that the peer lacks.", "peer"),
    _gauge("dledger_peer_lag_bytes", "Leader only: bytes of log that the peer lacks.", "peer"),
    _gauge("dledger_peer_ready", "Leader only: whether the learner could become a voter now.", "peer"),
    _gauge("dledger_peer_inflight_pushes", "Leader only: pushes sent to the peer and not answered.", "peer"),
    _gauge("dledger_peer_last_contact_seconds", "Leader only: time since the peer was last heard from.", "peer"),
    _counter("dledger_peer_dropped_messages_total", "Messages to the peer that could not be delivered.", "peer"),
    _gauge("dledger_disk_used_ratio", "Usage of the fullest disk (0 to 1); -1 before the first check."),
    _gauge("dledger_condition", "1 for each condition the node or plain broker has, 0 for the others.", "kind"),
    _gauge("dledger_disk_full", "Whether appends are refused because the disk is full."),
    _counter("dledger_forced_segments_total", "Segments removed before they had expired (force_clean)."),
    _counter("dledger_elections_total", "Elections this node started, each in a new term."),
    _counter("dledger_pre_votes_total", "Pre-votes this node started."),
    _counter(
        "dledger_role_changes_total", "Changes of role, term or leader, by new role and reason.", "role", "reason"
    ),
    _counter("dledger_appended_entries_total", "Entries that this node appended as leader."),
    _counter("dledger_appended_bytes_total", "Their bytes in the log, headers included."),
    _counter("dledger_received_entries_total", "Entries this node received from a leader."),
    _counter("dledger_received_bytes_total", "Their bytes in the log."),
    _counter("dledger_append_failures_total", "Appends that were refused or not confirmed, by response code.", "code"),
    _histogram(
        "dledger_append_latency_seconds",
        "From an append's arrival to its acknowledgement by a quorum.",
        java="dledger_append_entry_latency",
    ),
    _histogram("dledger_append_batch_entries", "Entries of one append.", java="dledger_append_entry_batch_count"),
    _histogram("dledger_append_batch_bytes", "Bytes of one append.", java="dledger_append_entry_batch_bytes"),
    _histogram(
        "dledger_replication_latency_seconds",
        "Leader only: from sending a push to the answer that the peer durably holds it.",
        "peer",
        java="dledger_replicate_entry_latency (remote_id)",
    ),
    _histogram(
        "dledger_replication_batch_entries",
        "Leader only: entries of one push.",
        "peer",
        java="dledger_replicate_entry_batch_count (remote_id)",
    ),
    _histogram(
        "dledger_replication_batch_bytes",
        "Leader only: bytes of one push.",
        "peer",
        java="dledger_replicate_entry_batch_bytes (remote_id)",
    ),
    _histogram("dledger_flush_latency_seconds", "One flush of the log to the disk."),
    _histogram("dledger_flush_bytes", "Bytes that one flush made durable."),
)

BROKER_SPECS: Final = (
    _gauge("rocketmq_master", "Whether the broker accepts messages (0: it is a slave)."),
    _counter(
        "rocketmq_messages_in_total",
        "Messages that arrived in the topic, on every member, since the broker started.",
        "topic",
        java="rocketmq_messages_in_total",
    ),
    _counter("rocketmq_throughput_in_bytes_total", "Their bytes.", "topic", java="rocketmq_throughput_in_total"),
    _counter(
        "rocketmq_messages_out_total",
        "Messages this broker delivered to the group.",
        "topic",
        "consumer_group",
        java="rocketmq_messages_out_total",
    ),
    _counter(
        "rocketmq_throughput_out_bytes_total",
        "Their bytes.",
        "topic",
        "consumer_group",
        java="rocketmq_throughput_out_total",
    ),
    _counter("rocketmq_puts_total", "Messages stored for producers.", java="putTps (runtime info)"),
    _counter("rocketmq_put_failures_total", "Messages whose producers must treat them as not sent."),
    _histogram(
        "rocketmq_put_latency_seconds",
        "From a message's arrival to its answer, in RocketMQ's buckets; measured in whole milliseconds.",
        java="putMessageDistributeTime (runtime info)",
    ),
    _counter(
        "rocketmq_gets_total",
        "Gets from queues, the broker's own included, by whether they found messages.",
        "result",
        java="getFoundTps, getMissTps (runtime info)",
    ),
    _gauge(
        "rocketmq_consumer_lag_messages",
        "Messages of the topic that the group has not consumed and can, by its committed offsets.",
        "topic",
        "consumer_group",
        java="rocketmq_consumer_lag_messages",
    ),
    _gauge(
        "rocketmq_consumer_lag_seconds",
        "How long the oldest message that the group has not consumed has been stored; 0 if there is none.",
        "topic",
        "consumer_group",
        java="rocketmq_consumer_lag_latency (ms)",
    ),
    _gauge(
        "rocketmq_consumer_queue_lag_messages",
        "The same in one queue, of the first metrics_topics_max queues with any lag.",
        "topic",
        "consumer_group",
        "queue",
    ),
    _gauge(
        "rocketmq_consumer_queue_lag_seconds",
        "Likewise, how long the oldest of them has been stored.",
        "topic",
        "consumer_group",
        "queue",
    ),
    _gauge(
        "rocketmq_consumer_lags_left_out",
        "Pairs of group and topic beyond metrics_topics_max, or groups not checked.",
    ),
    _gauge("rocketmq_storage_size_bytes", "Bytes of log kept.", java="rocketmq_storage_size"),
    _gauge(
        "rocketmq_storage_dispatch_behind_bytes",
        "Bytes of log that are not yet in queues and index.",
        java="rocketmq_storage_dispatch_behind_bytes",
    ),
    _gauge(
        "rocketmq_storage_flush_behind_bytes",
        "Bytes of log that are not yet durable on this node.",
        java="rocketmq_storage_flush_behind_bytes",
    ),
    _gauge(
        "rocketmq_storage_message_age_seconds",
        "How long ago the first message kept was stored; 0 if there is none.",
        java="rocketmq_storage_message_reserve_time",
    ),
    _gauge(
        "rocketmq_storage_disk_used_ratio",
        "Usage of the fuller disk of log and queues (0 to 1); -1 if unknown.",
        java="commitLogDiskRatio (runtime info)",
    ),
    _counter(
        "rocketmq_storage_forced_files_total",
        "Files of a plain log removed before they had expired (clean_file_forcibly_enable).",
    ),
    _histogram("rocketmq_flush_latency_seconds", "Plain broker only: one flush of the commit log to the disk."),
    _gauge("rocketmq_topics", "Topics.", java="rocketmq_topic_number"),
    _gauge("rocketmq_consumer_groups", "Consumer groups.", java="rocketmq_consumer_group_number"),
    _gauge("rocketmq_transactions_open", "Transactions that were begun here and have not ended; 0 on a slave."),
    _counter(
        "rocketmq_transactions_given_up_total",
        "Transactions that were given up: nobody said in transactionCheckMax checks what became of them, or they were "
        "older than fileReservedTime. Their messages are in TRANS_CHECK_MAX_TIME_TOPIC.",
    ),
    _counter(
        "rocketmq_messages_dropped_total",
        "Delayed and timed messages, and messages of transactions, whose topic was deleted while they waited.",
    ),
    _gauge("rocketmq_timed_messages_open", "Messages that wait for a time of their own."),
    _gauge("rocketmq_timed_messages_open_bytes", "Their size in the log."),
    _gauge("rocketmq_timed_messages_late", "Master only: those due for more than a second and not delivered."),
    _gauge("rocketmq_timed_messages_lag_seconds", "Master only: for how long the first of those has been due."),
    _gauge("rocketmq_timed_messages_next_due_seconds", "When the next one is due (Unix time); 0: none waits."),
    _counter("rocketmq_timed_messages_delivered_total", "Timed messages delivered since the broker was started."),
    _counter("rocketmq_timed_messages_skipped_total", "Timed messages that could never be delivered; logged."),
    _gauge("rocketmq_pulls_waiting", "Pulls that wait for messages (long polls).", java="pullRequestHold…Size"),
    _counter(
        "rocketmq_filter_errors_total",
        "Messages not delivered because a property is not a number or truth value where the consumer's SQL needs one.",
    ),
    _gauge("rocketmq_grpc_clients", "RocketMQ 5's clients that are known here: those of all members at the leader."),
    _counter("rocketmq_grpc_calls_total", "Calls of RocketMQ 5's clients."),
    _counter("rocketmq_grpc_refused_total", "Those of them that were answered with an error."),
    _gauge("rocketmq_grpc_passed_on", "Calls that came in here and wait for the leader's answer."),
    _counter(
        "rocketmq_grpc_repeated_messages_total",
        "Messages that a RocketMQ 5 client has sent again, and that were not stored again.",
    ),
    _gauge("rocketmq_pop_waiting", "Receives that wait for messages which are acknowledged singly."),
    _counter("rocketmq_pop_messages_total", "Messages given out for a time, to be acknowledged singly."),
    _counter("rocketmq_pop_acknowledged_total", "Those of them that were acknowledged."),
    _counter(
        "rocketmq_pop_redelivered_total",
        "Those that were not in time, or were given back: copies in the groups' retry topics.",
    ),
    _counter("rocketmq_pop_dead_total", "Those that were given out as often as the group permits, or were given up."),
    _counter("rocketmq_pop_changes_total", "Changes of the broker's state for all of this."),
    _gauge("rocketmq_streams", "Open send and pull streams."),
    _gauge(
        "rocketmq_send_pending_messages",
        "Messages received from producers and not yet answered.",
        java="rocketmq_processor_watermark",
    ),
    _gauge("rocketmq_send_pending_bytes", "Their bytes."),
    _gauge("rocketmq_ha_epoch", "Plain broker only: how often the log has changed its master."),
    _gauge("rocketmq_ha_copies", "Plain master only: brokers that have what is answered PUT_OK, itself included."),
    _gauge("rocketmq_ha_copies_wanted", "Plain master only: how many of them there should be."),
    _gauge("rocketmq_ha_slaves", "Plain master only: connected slaves."),
    _gauge(
        "rocketmq_ha_slave_lag_bytes",
        "Plain master only: bytes a slave has not acknowledged, by broker id; host for RocketMQ's, which send none.",
        "slave",
    ),
    _gauge("rocketmq_ha_slave_lag_seconds", "Plain master only: for how long it has not acknowledged it.", "slave"),
    _gauge("rocketmq_ha_connected", "Slave only: whether it follows its master."),
    _gauge("rocketmq_ha_lag_bytes", "Slave only: bytes it is behind what its master is known to have."),
    _gauge(
        "rocketmq_ha_lag_seconds",
        "Slave only: for how long it has not had everything that its master is known to have; -1: it never had.",
    ),
    _gauge("rocketmq_ha_contact_seconds", "Slave only: since its master said anything; -1: it never did."),
)

NAME_SERVER_SPECS: Final = (
    _gauge("rocketmq_namesrv_brokers", "Names of brokers; a group has one."),
    _gauge("rocketmq_namesrv_brokers_without_master", "Names of brokers of which no master is registered."),
    _gauge("rocketmq_namesrv_broker_addresses", "Brokers that are registered and alive."),
    _gauge("rocketmq_namesrv_topics", "Topics with a route."),
    _gauge("rocketmq_namesrv_routes", "Pairs of a topic and the name of a broker that has it."),
    _gauge("rocketmq_namesrv_values", "Values set by administrators (updateKvConfig, updateOrderConf)."),
    _gauge("rocketmq_namesrv_connections", "Open connections of brokers, clients and administrators."),
    _gauge("rocketmq_namesrv_requests_under_way", "Registrations and changes of values that are not answered yet."),
    _counter(
        "rocketmq_namesrv_requests_total",
        "Answered requests, by their name and the code of the answer; refusals have another code than 0.",
        "request",
        "code",
    ),
    _counter(
        "rocketmq_namesrv_outdated_registrations_total",
        "Registrations of former masters, ignored because a newer master is known.",
    ),
    _counter(
        "rocketmq_namesrv_expired_addresses_total",
        "Brokers removed because they had not registered for 120 s; those that disconnect are not counted.",
    ),
    _counter("rocketmq_namesrv_master_changes_total", "Changes of a master's address."),
)

SPECS: Final = {spec.name: spec for spec in (*NODE_SPECS, *BROKER_SPECS, *NAME_SERVER_SPECS)}
