"""The interfaces that the gRPC services and the peer transport need from the node and its log.

``dledger.server`` implements ``Receiver`` and ``LogNode``, ``dledger.store`` the others: ``rpc`` may import neither.
Nothing here depends on protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from dledger.errors import DLedgerError, LeaderHint
from dledger.monitoring import Condition
from dledger.records import record
from dledger.types import (
    NO_INDEX,
    NO_TERM,
    AppendedBatch,
    BlockDigest,
    Boundary,
    Configuration,
    Entry,
    LogChunk,
    LogIndex,
    LogPlace,
    LogRange,
    MemberChange,
    MemberRole,
    NodeId,
    Position,
    ProducerBatch,
    QueryAnswer,
    Role,
    SnapshotState,
    Term,
)

if TYPE_CHECKING:  # clients, which start often, have no use for the members' messages
    from dledger.core.messages import Envelope


class Receiver(Protocol):
    """Receives what a transport delivers, on the transport's own threads; must be thread-safe."""

    def request(self, envelope: Envelope, patience_s: float | None = None) -> Envelope:
        """Answer a ``VoteRequest`` or ``HeartbeatRequest``; may wait for the hard state to be durable.

        ``patience_s``: how long to wait for the node's lock, before ``NodeBusyError`` is raised; None: any time. Raises
        ``IdentityError`` or ``UnknownMemberError`` for a message of another cluster, group or member.
        """

    def receive(self, envelope: Envelope, patience_s: float | None = None) -> None:
        """Take anything else: pushes, responses, ``TakeLeadership``. Raises like ``request``."""

    def connection_lost(self, peer: NodeId) -> None:
        """The push connection to ``peer`` broke, and everything in flight on it is lost."""

    def follows(self, peer: NodeId) -> Term | None:
        """The term in which this member follows ``peer``, if it does."""

    def leader_lost(self, peer: NodeId, term: Term, *, gone: bool) -> None:
        """The connection of ``peer``, followed in ``term``, broke.

        ``gone``: its address refuses another one; otherwise something accepts connections there.
        """


class PeerLog(Protocol):
    """The log for peers that repair or compare theirs. Thread-safe; every method may wait for the disk."""

    @property
    def begin(self) -> Boundary:
        """See ``Log``."""

    @property
    def committed_index(self) -> LogIndex:
        """See ``Log``."""

    def copy_committed(self, position: int, length: int) -> bytes | None:
        """Exactly these committed bytes; None if they are not all kept, committed and in one segment."""

    def chain_crc_at(self, index: LogIndex) -> int:
        """See ``Log``: proven, or raises ``CorruptLogError``."""


class OfferedSnapshot(Protocol):
    """A snapshot that stays here while a peer reads it."""

    @property
    def description(self) -> bytes:
        """The content of its ``meta.json``."""

    def piece(self, file: str, offset: int, bytes_max: int) -> bytes:
        """Bytes of one of its files; none at the end. Raises ``DamagedSnapshotError``."""


class PeerSnapshots(Protocol):
    """The snapshots for peers whose log cannot be continued. Thread-safe; every method may wait for the disk."""

    def offered(self, at_least: LogIndex, index: LogIndex) -> AbstractContextManager[OfferedSnapshot]:
        """The snapshot of ``index`` if there is one, else the newest. Raises ``DLedgerError`` if that is older than
        ``at_least``; a newer one is written then, for which the peer asks later.
        """

    def doubt(self, index: LogIndex) -> None:
        """A peer received that snapshot damaged: look whether it is."""


@record(frozen=True, slots=True)
class MemberStatus:
    """One member as another sees it; ``client_address`` is empty until known. The others: see ``ClusterMember``."""

    node_id: NodeId
    peer_address: str
    client_address: str = ""
    role: MemberRole = MemberRole.VOTER
    number: int = 0
    uid: int = 0
    promote: bool = False
    replaces: str = ""


@record(frozen=True, slots=True)
class PeerStatus:
    """A follower's progress as the leader knows it. ``last_contact_ms`` is -1 before the first answer.

    ``health``, ``lag_bytes``, ``rate`` and ``not_ready``: see ``MemberProgress``; ``state`` is that of the pushes.
    """

    node_id: NodeId
    match_index: LogIndex
    next_index: LogIndex
    state: str
    lag_entries: int
    inflight: int
    last_contact_ms: int
    health: str = ""
    lag_bytes: int = 0
    rate: int = 0
    not_ready: str = ""


@record(frozen=True, slots=True)
class NodeStatus:
    """A node's status (the ``Metadata`` RPC). ``peers`` is empty unless it leads."""

    cluster_id: str
    group: str
    node_id: NodeId
    role: Role
    term: Term
    leader: LeaderHint | None
    members: tuple[MemberStatus, ...]
    begin_index: LogIndex
    end_index: LogIndex
    committed_index: LogIndex
    flushed_index: LogIndex
    begin_position: Position
    end_position: Position
    flush_mode: str
    disk_full: bool
    voter: bool
    pending_entries: int
    peers: tuple[PeerStatus, ...] = ()
    version: str = ""
    committed_position: Position = Position(0)  # a NewType is no call
    """The end of the last committed entry's record."""
    is_broker: bool = False
    """The log is a broker's: the bodies of its entries are RocketMQ records."""
    conditions: tuple[Condition, ...] = ()
    """Its present problems, oldest first."""
    role_age_ms: int = -1
    """For how long it has had this role in this term; -1: an older version does not tell."""
    grpc_port: int = 0
    """Its port of gRPC; 0: none."""
    configuration_index: LogIndex = NO_INDEX
    """Of the entry with these members; -1: the settings have them."""
    configuration_term: Term = NO_TERM
    configuration_committed: bool = True
    """Whether it knows them to be committed."""
    change_id: int = 0
    """Of the request that made these members; 0: none did."""
    applied_index: LogIndex | None = None
    """The last entry that its state machine has applied; None: there is no machine."""
    snapshot_index: LogIndex = NO_INDEX
    """The last entry of its newest durable snapshot."""
    snapshot_bytes: int = 0

    @property
    def client_address(self) -> str:
        """The address it advertises to clients; empty if it does not."""
        return next((one.client_address for one in self.members if one.node_id == self.node_id), "")


@record(frozen=True, slots=True)
class RoleEvent:
    """A node's role, term or known leader changed."""

    node_id: NodeId
    role: Role
    term: Term
    leader: LeaderHint | None


@record(frozen=True, slots=True)
class CommitEvent:
    """A node's commit index moved forward."""

    committed_index: LogIndex


NodeEvent = RoleEvent | CommitEvent


class BulkLog(Protocol):
    """The committed log for large reads. Thread-safe; every method may wait for the disk.

    Raises ``IndexBeforeBeginError`` (saying what is lost), ``IndexOutOfRangeError`` and ``CorruptLogError`` (naming
    file and offset; an unreadable sector counts as damage).
    """

    def committed_range(self) -> LogRange:
        """The committed entries held."""

    def read_chunk(self, first_index: LogIndex, end_index: LogIndex, max_bytes: int) -> LogChunk:
        """Entries from ``first_index`` to before ``end_index``, at least one, of one segment, within ``max_bytes``."""

    def place_of_index(self, index: LogIndex) -> LogPlace:
        """Where an entry begins; the committed log's end for the one after the last."""

    def place_at_position(self, position: int) -> LogPlace:
        """The first committed entry that begins at or after ``position``."""

    def place_at_time(self, store_time_ms: int) -> LogPlace:
        """The first committed message stored at that time or later. Raises ``UntimedLogError`` for other logs."""

    def digest(self, position: int, end_position: int, block_bytes: int) -> BlockDigest | None:
        """The checksum of the block containing ``position``, before ``end_position``; None if there are no entries."""


class LogNode(Protocol):
    """The node as the client service sees it. Thread-safe; ``submit_*`` never block for a quorum or a disk."""

    @property
    def bulk(self) -> BulkLog:
        """Its committed log, for large reads."""

    def submit_append(
        self,
        bodies: Sequence[bytes],
        done: Callable[[AppendedBatch | DLedgerError], None],
        producer: ProducerBatch | None = None,
    ) -> None:
        """Append a batch, all or nothing; done when a quorum has it (flushed, unless the node runs async flush).

        With ``producer``, entries that the log already holds are not appended again; done when a quorum has those, too.
        """

    def submit_commands(
        self,
        commands: Sequence[bytes],
        done: Callable[[tuple[bytes, ...] | DLedgerError], None],
        producer: ProducerBatch | None = None,
    ) -> None:
        """Append commands as ``submit_append`` does; done with their results, once the state machine here has applied
        them. ``NoStateMachineError`` without one, here and in the two below.
        """

    def submit_query(
        self,
        request: bytes,
        done: Callable[[QueryAnswer | DLedgerError], None],
        *,
        linearizable: bool = True,
        after: LogIndex = NO_INDEX,
        wait_ms: int = 0,
    ) -> None:
        """Ask the state machine, if ``linearizable`` as leader (ReadIndex), and then once it has applied that index.

        Otherwise its present state; with ``wait_ms`` once an entry after ``after`` is applied, or that time later.
        """

    def submit_snapshot(self, done: Callable[[SnapshotState | DLedgerError], None]) -> None:
        """Write a snapshot of what is applied by now; done when it is durable."""

    def submit_producer(self, name: str, done: Callable[[int | DLedgerError], None]) -> None:
        """The number of a producer's next entry, 0 for an unknown one, once all earlier entries are committed."""

    def submit_read_index(self, done: Callable[[LogIndex | DLedgerError], None]) -> None:
        """Confirm leadership (ReadIndex) and return the index that a linearizable read must include."""

    def submit_transfer(self, target: NodeId | None, done: Callable[[LeaderHint | DLedgerError], None]) -> None:
        """Transfer leadership to ``target`` (None: the most up-to-date member)."""

    def submit_member_change(self, change: MemberChange, done: Callable[[Configuration | DLedgerError], None]) -> None:
        """Change the members; done when the new configuration is committed."""

    def read(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        """Stored entries, like ``Log.read_range``; the caller bounds ``last_index``. May wait for the disk."""

    def status(self) -> NodeStatus:
        """The current status."""

    def subscribe(self, listener: Callable[[NodeEvent], None]) -> Callable[[], None]:
        """Call ``listener`` for every event from now on, on any thread, until the returned function is called.

        Role events come in order; a commit event may be overtaken by a later one.
        """
