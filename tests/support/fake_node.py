"""A node without a group: keeps entries in a list and commits them when told to. For tests of services and clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dledger.access.guard import AccessGuard
from dledger.config import ServerConfig
from dledger.errors import (
    DLedgerError,
    IndexBeforeBeginError,
    LeaderHint,
    NotLeaderError,
    OutOfOrderSequenceError,
    StaleConfigurationError,
    UnknownProducerError,
)
from dledger.host import ClientServer, ServedLog
from dledger.monitoring import Condition, Conditions
from dledger.records import ENTRY_HEADER_BYTES
from dledger.rpc.ports import CommitEvent, LogNode, MemberStatus, NodeEvent, NodeStatus, PeerStatus, RoleEvent
from dledger.types import (
    ANY_CONFIGURATION,
    NO_INDEX,
    AppendedBatch,
    ChangeKind,
    ClusterMember,
    Configuration,
    Entry,
    LogIndex,
    MemberChange,
    MemberRole,
    NodeId,
    Position,
    ProducerBatch,
    QueryAnswer,
    Role,
    SnapshotState,
    StoredRun,
    Term,
)
from dledger.values import address_text, parse_address
from tests.support.fake_bulk import FakeBulkLog


def client_server(config: ServerConfig, node: LogNode, guard: AccessGuard | None = None) -> ClientServer:
    """A server for the clients of one log, not started yet."""
    return ClientServer([ServedLog(config, node, Conditions(config.node_id))], guard)


AppendDone = Callable[[AppendedBatch | DLedgerError], None]


@dataclass(slots=True)
class Held:
    """An append that waits for ``FakeNode.release``."""

    batch: AppendedBatch
    done: AppendDone


@dataclass
class FakeNode:
    """Implements ``LogNode``. Leads unless ``leader`` names somebody else."""

    group: str = "default"
    node_id: NodeId = NodeId("n0")  # noqa: RUF009  # a NewType is no call
    term: Term = Term(1)  # noqa: RUF009
    leader: LeaderHint | None = None
    begin_index: int = 0
    hold: bool = False
    """Keep appends pending until ``release``."""
    fail_appends: list[DLedgerError | None] = field(default_factory=list)
    """What the next appends fail with, first one first; None lets one pass."""
    members: tuple[MemberStatus, ...] = ()
    entries: list[Entry] = field(default_factory=list)
    committed: int = -1
    held: list[Held] = field(default_factory=list)
    batches: list[tuple[bytes, ...]] = field(default_factory=list)
    producers: dict[str, list[int]] = field(default_factory=dict)
    """The indexes of each producer's entries."""
    repeated: int = 0
    """Entries that came again."""
    read_index_error: DLedgerError | None = None
    changes: list[MemberChange] = field(default_factory=list)
    """The changes of members that were asked for."""
    change_error: DLedgerError | None = None
    configuration_index: int = -1
    configuration_committed: bool = True
    change_id: int = 0
    peers: tuple[PeerStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
    queries: list[tuple[bytes, bool, LogIndex, int]] = field(default_factory=list)
    """Those of the state machine, which answers with the request itself."""
    listeners: list[Callable[[NodeEvent], None]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    bulk: FakeBulkLog = field(init=False)

    def __post_init__(self) -> None:
        self.bulk = FakeBulkLog(self)

    def submit_append(self, bodies: Sequence[bytes], done: AppendDone, producer: ProducerBatch | None = None) -> None:
        with self.lock:
            result = self._refusal() or (self._store(bodies) if producer is None else self._store_as(producer, bodies))
            if isinstance(result, AppendedBatch):
                if self.hold:
                    self.held.append(Held(result, done))
                    return
                self.committed = max(self.committed, result.last_index)
        done(result)
        if isinstance(result, AppendedBatch):
            self.tell(CommitEvent(LogIndex(self.committed)))

    def submit_commands(
        self,
        commands: Sequence[bytes],
        done: Callable[[tuple[bytes, ...] | DLedgerError], None],
        producer: ProducerBatch | None = None,
    ) -> None:
        self.submit_append(
            commands, lambda result: done(result if isinstance(result, DLedgerError) else tuple(commands)), producer
        )

    def submit_query(
        self,
        request: bytes,
        done: Callable[[QueryAnswer | DLedgerError], None],
        *,
        linearizable: bool = True,
        after: LogIndex = NO_INDEX,
        wait_ms: int = 0,
    ) -> None:
        self.queries.append((request, linearizable, after, wait_ms))
        done((self._not_leader() if linearizable else None) or QueryAnswer(request, LogIndex(self.committed)))

    def submit_snapshot(self, done: Callable[[SnapshotState | DLedgerError], None]) -> None:
        done(SnapshotState(LogIndex(self.committed), 77))

    def submit_producer(self, name: str, done: Callable[[int | DLedgerError], None]) -> None:
        done(self._not_leader() or len(self.producers.get(name, ())))

    def release(self, count: int | None = None, error: DLedgerError | None = None) -> None:
        """Complete held appends, all of them by default."""
        with self.lock:
            ready, self.held = self.held[:count], self.held[len(self.held) if count is None else count :]
            if ready and error is None:
                self.committed = max(self.committed, ready[-1].batch.last_index)
        for one in ready:
            one.done(error or one.batch)
        self.tell(CommitEvent(LogIndex(self.committed)))

    def submit_read_index(self, done: Callable[[LogIndex | DLedgerError], None]) -> None:
        done(self.read_index_error or self._not_leader() or LogIndex(self.committed))

    def submit_transfer(self, target: NodeId | None, done: Callable[[LeaderHint | DLedgerError], None]) -> None:
        done(self._not_leader() or LeaderHint(target or NodeId("n1")))

    def submit_member_change(self, change: MemberChange, done: Callable[[Configuration | DLedgerError], None]) -> None:
        known = change.change_id == self.change_id
        refused = self._not_leader() or self.change_error or (None if known else self._stale(change))
        if refused is None and not known:
            self.changes.append(change)
            self._change(change)
        done(refused or self.configuration())

    def configuration(self) -> Configuration:
        """The members."""
        places = ((one, parse_address(one.peer_address)) for one in self.members)
        members = tuple(
            ClusterMember(one.node_id, *place, one.role, one.number, one.uid, one.promote, one.replaces)
            for one, place in places
        )
        return Configuration(members, LogIndex(self.configuration_index), self.term, change_id=self.change_id)

    def read(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        if first_index < self.begin_index:
            raise IndexBeforeBeginError(f"index {first_index} was removed: the log begins at {self.begin_index}")
        found: list[Entry] = []
        for entry in self.entries[first_index : last_index + 1]:
            max_bytes -= len(entry.body) + ENTRY_HEADER_BYTES
            if found and max_bytes < 0:
                break
            found.append(entry)
        return found

    def status(self) -> NodeStatus:
        return NodeStatus(
            cluster_id="c",
            group=self.group,
            node_id=self.node_id,
            role=Role.FOLLOWER if self.leader else Role.LEADER,
            term=self.term,
            leader=self.leader or LeaderHint(self.node_id),
            members=self.members,
            begin_index=LogIndex(self.begin_index),
            end_index=LogIndex(len(self.entries) - 1),
            committed_index=LogIndex(self.committed),
            flushed_index=LogIndex(len(self.entries) - 1),
            begin_position=Position(0),
            end_position=Position(self._end_position()),
            flush_mode="sync",
            disk_full=False,
            voter=True,
            pending_entries=len(self.held),
            version="test",
            committed_position=self.bulk.committed_range().end.position,
            peers=() if self.leader else self.peers,
            conditions=self.conditions,
            configuration_index=LogIndex(self.configuration_index),
            configuration_committed=self.configuration_committed,
            change_id=self.change_id,
        )

    def subscribe(self, listener: Callable[[NodeEvent], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def tell(self, event: NodeEvent) -> None:
        """Publish an event."""
        for listener in tuple(self.listeners):
            listener(event)

    def become(self, leader: LeaderHint | None) -> None:
        """Lead (None) or follow ``leader``, in a new term."""
        self.leader, self.term = leader, Term(self.term + 1)
        status = self.status()
        self.tell(RoleEvent(self.node_id, status.role, self.term, status.leader))

    def bodies(self) -> list[bytes]:
        """What was appended."""
        return [entry.body for entry in self.entries]

    def _refusal(self) -> DLedgerError | None:
        if self.leader is not None:
            return self._not_leader()
        return self.fail_appends.pop(0) if self.fail_appends else None

    def _not_leader(self) -> DLedgerError | None:
        return NotLeaderError(f"{self.node_id} does not lead", leader=self.leader) if self.leader else None

    def _stale(self, change: MemberChange) -> DLedgerError | None:
        if change.expected_index in (ANY_CONFIGURATION, self.configuration_index):
            return None
        return StaleConfigurationError(f"the configuration is {self.configuration_index}, not {change.expected_index}")

    def _change(self, change: MemberChange) -> None:
        """At once, whatever the rules say."""
        self.configuration_index, self.change_id = self.configuration_index + 10, change.change_id
        others = {one.node_id: one for one in self.members}
        before = others.pop(change.node_id, MemberStatus(change.node_id, ""))
        if change.kind is not ChangeKind.REMOVE:
            learns = change.kind in (ChangeKind.ADD, ChangeKind.DEMOTE)
            keeps = change.kind is ChangeKind.UPDATE
            others[change.node_id] = replace(
                before,
                peer_address=address_text(change.host, change.port) if change.host else before.peer_address,
                role=before.role if keeps else MemberRole.LEARNER if learns else MemberRole.VOTER,
                promote=change.kind is ChangeKind.ADD and change.promote,
                replaces=change.replaces,
            )
        self.members = tuple(others[one] for one in sorted(others))

    def _store_as(self, producer: ProducerBatch, bodies: Sequence[bytes]) -> AppendedBatch | DLedgerError:
        """As the core does it: what the producer has stored before is only found again."""
        name, sequence = producer.producer, producer.sequence
        places = self.producers.get(name)
        if places is None and sequence:
            return UnknownProducerError(f"{name} is not known")
        places = self.producers.setdefault(name, [])
        if sequence > len(places):
            return OutOfOrderSequenceError(f"{name} is at {len(places)}, not {sequence}")
        stored = places[sequence : sequence + len(bodies)]
        new = bodies[len(stored) :]
        batch = self._store(new) if new else AppendedBatch(self.term, LogIndex(0), LogIndex(-1), ())
        places += range(batch.first_index, batch.last_index + 1)
        self.repeated += len(stored)
        runs = (self.entries[index] for index in stored)
        return replace(batch, duplicates=tuple(StoredRun(one.index, 1, one.term, (one.position,)) for one in runs))

    def _store(self, bodies: Sequence[bytes]) -> AppendedBatch:
        first, positions = len(self.entries), []
        self.batches.append(tuple(bodies))
        for body in bodies:
            position = self._end_position()
            positions.append(position)
            self.entries.append(Entry(LogIndex(len(self.entries)), self.term, Position(position), body))
        last = LogIndex(len(self.entries) - 1)
        return AppendedBatch(self.term, LogIndex(first), last, tuple(positions))

    def _end_position(self) -> int:
        if not self.entries:
            return 0
        last = self.entries[-1]
        return last.position + ENTRY_HEADER_BYTES + len(last.body)
