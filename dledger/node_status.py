"""A node's status and its measurements, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dledger import __version__
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.dispatcher import EntryDispatcher
from dledger.core.member_state import Leader
from dledger.core.messages import RoleChange
from dledger.core.node import Node
from dledger.errors import LeaderHint
from dledger.monitoring import Conditions
from dledger.rpc.ports import MemberStatus, NodeStatus, PeerStatus
from dledger.runtime.driver import NodeDriver
from dledger.statemachine.host import MachineHost
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, LogIndex, MemberProgress, NodeId, Position, Role
from dledger.values import address_text

_NO_PROGRESS: Final = MemberProgress(NodeId(""), "", NO_INDEX, 0, 0, 0, -1)
"""Of a peer that leaves."""


class NodeReports:
    """``client_address_of``: a member's, empty if unknown; ``grpc_port``: in use at this moment, 0 if none."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        node: Node,
        log: FileStore,
        conditions: Conditions,
        clock: Clock,
        client_address_of: Callable[[NodeId], str],
        grpc_port: Callable[[], int],
        has_failed: Callable[[], bool],
        machine: MachineHost | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._conditions = conditions
        self._clock = clock
        self._client_address_of = client_address_of
        self._grpc_port = grpc_port
        self._has_failed = has_failed
        self._machine = machine
        self._role_since = (node.state.role_name, node.state.term), clock.monotonic_ms()

    def role_changed(self, change: RoleChange) -> None:
        """Note since when it has its role."""
        role = change.role, change.term
        if role != self._role_since[0]:
            self._role_since = role, self._clock.monotonic_ms()

    def measure(self, driver: NodeDriver, dropped: dict[NodeId, int]) -> NodeMeasurements:
        """Holds the node's lock as briefly as ``status``. ``dropped``: messages to each peer that could not be sent."""
        status, pending_bytes, elector, acks, producers = driver.look(
            lambda node: (
                self.status(node),
                node.quorum_ack.pending_bytes,
                node.elector,
                node.quorum_ack,
                _producers(node),
            )
        )
        log, end = self._log, status.end_position
        return NodeMeasurements(
            status=status,
            peers=tuple(PeerMeasurements(peer, max(0, end - log.end_of(peer.match_index))) for peer in status.peers),
            pending_bytes=pending_bytes,
            committed_position=log.committed_position,
            flushed_position=log.flushed_position,
            pre_votes=elector.pre_votes,
            elections=elector.elections,
            dropped_messages=dropped,
            producers=producers,
            repeated_entries=acks.duplicates,
            disk_used_ratio=log.disk_used_ratio,
            forced_segments=log.forced_segments,
            apply_s=0.0 if self._machine is None else self._machine.applier.apply_s,
            snapshot_s=0.0 if self._machine is None else self._machine.snapshot_s,
        )

    def status(self, node: Node) -> NodeStatus:
        """Under the node's lock."""
        config, state, log, members = self._config, node.state, self._log, node.state.membership
        failed = self._has_failed()  # in a process of several groups, which goes on: then it leads nobody any more
        machine = self._machine
        return NodeStatus(
            cluster_id=config.effective_cluster_id,
            group=config.group,
            node_id=config.node_id,
            role=Role.FOLLOWER if failed else state.role_name,
            term=state.term,
            leader=None if failed else self.hint(state.leader_id),
            members=tuple(
                MemberStatus(
                    one.node_id,
                    address_text(one.host, one.port),
                    self._client_address_of(one.node_id),
                    one.role,
                    one.number,
                    one.uid,
                    one.promote,
                    one.replaces,
                )
                for one in members.current.members
            ),
            begin_index=LogIndex(log.begin.index + 1),
            end_index=log.last.index,
            committed_index=state.commit_index,
            flushed_index=log.flushed.index,
            begin_position=log.begin.position,
            end_position=log.end_position,
            flush_mode=config.store.flush_mode.value,
            disk_full=log.disk_full,
            voter=state.has_standing,
            pending_entries=node.quorum_ack.pending_entries,
            peers=() if failed else self._peer_statuses(node),
            version=__version__,
            committed_position=log.committed_position,
            is_broker=not config.client_appends and config.replication.noop_compatible,
            conditions=self._conditions.now(),
            role_age_ms=self._role_age_ms(node),
            grpc_port=self._grpc_port(),
            configuration_index=members.current.index,
            configuration_term=members.current.term,
            configuration_committed=members.is_committed,
            change_id=members.current.change_id,
            applied_index=None if machine is None else machine.applied_index,
            snapshot_index=NO_INDEX if machine is None else machine.snapshot_index,
            snapshot_bytes=0 if machine is None else machine.snapshot_bytes,
        )

    def hint(self, leader: NodeId | None) -> LeaderHint | None:
        """Where clients find the leader."""
        return None if leader is None else LeaderHint(leader, self._client_address_of(leader))

    def _role_age_ms(self, node: Node) -> int:
        role, since_ms = self._role_since
        return self._clock.monotonic_ms() - since_ms if role == (node.state.role_name, node.state.term) else 0

    def _peer_statuses(self, node: Node) -> tuple[PeerStatus, ...]:
        leader = node.state.role
        if not isinstance(leader, Leader):
            return ()
        now_ms, end = self._clock.monotonic_ms(), self._log.last.index
        known = {one.node_id: one for one in node.changes.progress(now_ms)}

        def status(peer: NodeId, dispatcher: EntryDispatcher) -> PeerStatus:
            progress = known.get(peer, _NO_PROGRESS)
            return PeerStatus(
                node_id=peer,
                match_index=leader.match[peer],
                next_index=dispatcher.next_index,
                state=dispatcher.state.value,
                lag_entries=end - leader.match[peer],
                inflight=dispatcher.in_flight,
                last_contact_ms=progress.last_contact_ms,
                health=progress.state,
                lag_bytes=progress.lag_bytes,
                rate=progress.rate,
                not_ready=progress.not_ready,
            )

        return tuple(status(peer, one) for peer, one in node.dispatchers.items() if peer in leader.match)


def _producers(node: Node) -> int:
    return len(node.state.role.producers) if isinstance(node.state.role, Leader) else 0


@dataclass(frozen=True, slots=True)
class PeerMeasurements:
    """One follower as its leader sees it; ``lag_bytes`` are log bytes that it is not known to hold."""

    status: PeerStatus
    lag_bytes: int


@dataclass(frozen=True, slots=True)
class NodeMeasurements:
    """One node at one moment. ``peers`` is empty unless it leads."""

    status: NodeStatus
    peers: tuple[PeerMeasurements, ...]
    pending_bytes: int
    committed_position: Position
    flushed_position: Position
    pre_votes: int
    """Pre-votes since it started; ``elections``: its campaigns."""
    elections: int
    dropped_messages: dict[NodeId, int]
    """Undeliverable messages per peer since it started."""
    producers: int
    """Producers remembered as leader; ``repeated_entries``: their entries received again since it started."""
    repeated_entries: int
    disk_used_ratio: float
    """Of the fuller one of the disks that new segments need; -1 before the first measurement."""
    forced_segments: int
    """Segments removed before they had expired, since it started."""
    apply_s: float = 0.0
    """The time its state machine has spent in applying since it started."""
    snapshot_s: float = 0.0
    """How long its last snapshot took to write."""
