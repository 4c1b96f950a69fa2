"""What the gRPC services and the peer transport need from the node and from its log.

``dledger.server`` implements ``Receiver`` and ``LogNode``, ``dledger.store`` the others: ``rpc`` may import neither.
Nothing here knows protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dledger.conditions import Condition
from dledger.core.messages import Envelope
from dledger.errors import DLedgerError, LeaderHint
from dledger.records import record
from dledger.types import (
    AppendedBatch,
    BlockDigest,
    Boundary,
    Entry,
    LogChunk,
    LogIndex,
    LogPlace,
    LogRange,
    NodeId,
    Position,
    ProducerBatch,
    Role,
    Term,
)


class Receiver(Protocol):
    """Where a transport delivers what arrives. Called from the transport's own threads; must be thread-safe."""

    def request(self, envelope: Envelope) -> Envelope:
        """Answer a ``VoteRequest`` or ``HeartbeatRequest``; may wait for the hard state to be durable.

        Raises ``IdentityError`` or ``UnknownMemberError`` for a message of another cluster, group or member.
        """

    def receive(self, envelope: Envelope) -> None:
        """Take anything else: pushes, responses, ``TakeLeadership``. Never blocks; raises as ``request`` does."""

    def connection_lost(self, peer: NodeId) -> None:
        """The push connection towards ``peer`` broke: what was in flight on it is lost."""


class PeerLog(Protocol):
    """The log for members whose own is damaged, or that compare. Thread-safe; everything may wait for the disk."""

    @property
    def begin(self) -> Boundary:
        """See ``Log``."""

    @property
    def committed_index(self) -> LogIndex:
        """See ``Log``."""

    def copy_committed(self, position: int, length: int) -> bytes | None:
        """Exactly these committed bytes; None if they are not all kept, committed and in one segment."""

    def chain_crc_at(self, index: LogIndex) -> int:
        """See ``Log``: proven, or ``CorruptLogError``."""


@record(frozen=True, slots=True)
class MemberStatus:
    """One member as another sees it; ``client_address`` is empty until it was heard from."""

    node_id: NodeId
    peer_address: str
    client_address: str = ""


@record(frozen=True, slots=True)
class PeerStatus:
    """How far the leader has brought one follower. ``last_contact_ms`` is -1 before its first answer."""

    node_id: NodeId
    match_index: LogIndex
    next_index: LogIndex
    state: str
    lag_entries: int
    inflight: int
    last_contact_ms: int


@record(frozen=True, slots=True)
class NodeStatus:
    """Everything a node tells about itself (the ``Metadata`` RPC). ``peers`` is empty unless it leads."""

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
    """What is the matter with it, oldest first."""

    @property
    def client_address(self) -> str:
        """Where it says that clients find it; empty if it does not say so."""
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
    """The commit index as a node knows it moved forward."""

    committed_index: LogIndex


NodeEvent = RoleEvent | CommitEvent


class BulkLog(Protocol):
    """The committed log for those who read a lot of it. Thread-safe; everything may wait for the disk.

    Raises ``IndexBeforeBeginError`` (saying what is lost), ``IndexOutOfRangeError`` and ``CorruptLogError``
    (naming file and offset; an unreadable sector is damage, too).
    """

    def committed_range(self) -> LogRange:
        """What there is."""

    def read_chunk(self, first_index: LogIndex, end_index: LogIndex, max_bytes: int) -> LogChunk:
        """Entries from ``first_index`` to before ``end_index``, at least one, of one segment, within ``max_bytes``."""

    def place_of_index(self, index: LogIndex) -> LogPlace:
        """Where an entry begins; the committed log's end for the one after the last."""

    def place_at_position(self, position: int) -> LogPlace:
        """The first committed entry that begins at or after ``position``."""

    def place_at_time(self, store_time_ms: int) -> LogPlace:
        """The first committed message that was stored then or later. Raises ``UntimedLogError`` for other logs."""

    def digest(self, position: int, end_position: int, block_bytes: int) -> BlockDigest | None:
        """The checksum of the block that ``position`` lies in, before ``end_position``; None if nothing is there."""


class LogNode(Protocol):
    """The node as the client service sees it. Thread-safe; ``submit_*`` never block for a quorum or a disk.

    Every ``done`` is called exactly once, possibly before ``submit_*`` returns, on any thread, and must not block.
    """

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

        With ``producer``, what the log holds already is not appended again; done when a quorum has that, too.
        """

    def submit_producer(self, name: str, done: Callable[[int | DLedgerError], None]) -> None:
        """The number of the next entry of a producer, 0 for an unknown one, once all that it counts is committed."""

    def submit_read_index(self, done: Callable[[LogIndex | DLedgerError], None]) -> None:
        """Confirm leadership (ReadIndex) and give the index up to which a linearizable read must see."""

    def submit_transfer(self, target: NodeId | None, done: Callable[[LeaderHint | DLedgerError], None]) -> None:
        """Hand leadership to ``target`` (None: the most caught-up member)."""

    def read(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        """Stored entries, as ``Log.read_range``; the caller bounds ``last_index``. May wait for the disk."""

    def status(self) -> NodeStatus:
        """The present state."""

    def subscribe(self, listener: Callable[[NodeEvent], None]) -> Callable[[], None]:
        """Call ``listener`` for every event from now on, on any thread, until the returned function is called.

        Role events come in order; a commit event may be overtaken by a later one.
        """
