"""A node's metrics, read from its state at each scrape."""

from __future__ import annotations

import platform
from collections.abc import Callable

from dledger.members import MemberRole
from dledger.node_status import NodeMeasurements
from dledger.rpc.ports import NodeStatus
from dledger.server import DLedgerServer
from dledger.types import LogIndex, Role
from dledger_cli.metrics.families import Families
from dledger_cli.metrics.recorder import MetricsRecorder


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
