"""The messages between members. Every message is one-way; an answer is a message of its own.

A message is valid only for the cluster, group and addressee of its ``Envelope``, which are checked on arrival, and for
the term it carries, which is checked when it is *executed*.

``Outbox`` holds the effects of a step outside the node's lock, in the order in which the driver must carry them out.
The durability contract (Raft figure 2, "persistent state"; etcd's ``Ready``): the driver empties the outbox under the
lock and then, outside it, **first** makes the current hard state durable, **then** sends ``messages``, and **then**
passes on ``role_changes`` and runs ``completions``, in order. A message never overtakes the vote or term it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

from dledger.core.membership import Membership
from dledger.errors import CorruptLogError, LeaderHint, ResponseCode
from dledger.records import record
from dledger.types import (
    NO_ENTRY,
    NO_INDEX,
    Boundary,
    CheckedRun,
    Configuration,
    EntryId,
    EntryRun,
    LogIndex,
    NodeId,
    Position,
    Role,
    Standing,
    Term,
)


class VoteResult(IntEnum):
    """Why a vote was granted or refused; for people and tests, the protocol only uses ``granted``."""

    ACCEPT = 0
    REJECT_EXPIRED_TERM = 1
    REJECT_ALREADY_VOTED = 2
    REJECT_ALREADY_HAS_LEADER = 3
    REJECT_SMALL_LEDGER_END = 4
    REJECT_UNKNOWN_MEMBER = 5


@record(frozen=True, slots=True)
class CommittedEntry:
    """An entry that the sender holds as committed; its chain CRC covers all entries before it, too."""

    index: LogIndex
    chain_crc: int


@record(frozen=True, slots=True)
class VoteRequest:
    """Asks for a vote in ``term``; with ``pre_vote`` only asks whether one would be granted (dissertation §9.6).

    ``transfer`` marks a campaign started by the leader's own transfer, which a live leader does not block (§4.2.3).
    ``remembered`` is what the sender knows the addressee to have held durably (``NO_ENTRY``: nothing). ``committed``:
    see ``dledger.core.log_matching``. ``countersign``: see ``dledger.core.log_matching``.
    """

    term: Term
    last: EntryId
    pre_vote: bool = False
    transfer: bool = False
    remembered: EntryId = NO_ENTRY
    committed: tuple[CommittedEntry, ...] = ()
    countersign: int = 0


@record(frozen=True, slots=True)
class VoteResponse:
    """Answers a ``VoteRequest``; ``term`` is the voter's own, except that a granted pre-vote repeats the requested one.

    A vote granted without ``standing`` counts only if all members grant theirs. ``used``: the voter knows of committed
    entries. ``remembered`` is what it knows the candidate to have held.
    """

    term: Term
    granted: bool
    pre_vote: bool = False
    result: VoteResult = VoteResult.ACCEPT
    standing: Standing = Standing.FULL
    boot_id: int = 0
    used: bool = False
    remembered: EntryId = NO_ENTRY
    leads: bool = False
    """In answers to pre-votes: whether the member leads ``term``; then it will repeat the requested countersign."""
    begin: Boundary | None = None
    """Where its log begins, if it leads."""
    committed: tuple[CommittedEntry, ...] = ()
    """Some of the voter's committed entries."""
    other_history: bool = False
    """The voter has committed different entries than the candidate states."""
    uid: int = 0
    """The voter's (``ClusterMember.uid``)."""
    removed_at: LogIndex = NO_INDEX
    """The index of the voter's committed configuration, if the candidate is not in it."""


@record(frozen=True, slots=True)
class Readmission:
    """The leader's permission for the process ``boot_id`` of a member without standing to take it.

    The member takes standing in this term, once it durably holds all entries up to ``index`` (``NO_INDEX``: at once).
    """

    boot_id: int
    index: LogIndex


@record(frozen=True, slots=True)
class HeartbeatRequest:
    """The leader is alive; ``read_sequence`` numbers its heartbeat rounds so that reads can be confirmed.

    ``transfer_target``: the member it transfers leadership to. ``founded``: all members have had standing.
    ``watermarks``: what it knows members to have held durably, including itself and the addressee. ``doubted_boot_id``:
    the process with this id holds less than an earlier one did. ``countersign``: what the addressee asked for, which
    proves all of this.
    """

    term: Term
    read_sequence: int = 0
    client_address: str = ""
    """The leader's client address, for the hints of followers."""
    transfer_target: str = ""
    readmission: Readmission | None = None
    founded: bool = False
    watermarks: tuple[tuple[NodeId, EntryId], ...] = ()
    doubted_boot_id: int = 0
    countersign: int = 0


@record(frozen=True, slots=True)
class HeartbeatResponse:
    """Repeats ``read_sequence``; ``term`` above the leader's own makes it step down."""

    term: Term
    read_sequence: int = 0
    disk_full: bool = False
    client_address: str = ""
    standing: Standing = Standing.FULL
    boot_id: int = 0
    uid: int = 0
    removed_at: LogIndex = NO_INDEX
    """As in a ``VoteResponse``."""


@record(frozen=True, slots=True)
class PushCompare:
    """Is your entry at ``previous.index`` of term ``previous.term`` with this chain CRC?

    ``flushed_only``: this leader counts only flushed entries, whatever the follower's own ``flush_mode``.
    ``configuration``: as in a ``PushInstall``, because the follower may hold only older ones.
    """

    term: Term
    epoch: int
    previous: EntryId
    previous_chain_crc: int
    flushed_only: bool = False
    configuration: Configuration | None = None


@record(frozen=True, slots=True)
class PushTruncate:
    """Drop everything from ``conflict.index`` on, if your entry there is not of ``conflict.term`` (the leader's)."""

    term: Term
    epoch: int
    conflict: EntryId
    chain_crc: int


@record(frozen=True, slots=True)
class LoadRun:
    """Never on the wire: makes the driver read these entries (outside the lock) and send them as ``PushAppend``."""

    term: Term
    epoch: int
    commit_index: LogIndex
    first_index: LogIndex
    last_index: LogIndex
    cold: bool = False
    """It may have to be read from the disk, so not on a thread that others wait for."""


@record(frozen=True, slots=True)
class CheckedAppend:
    """Never on the wire: a ``PushAppend`` whose bytes the receiving driver has verified (outside the lock)."""

    term: Term
    epoch: int
    commit_index: LogIndex
    run: CheckedRun


@record(frozen=True, slots=True)
class PushAppend:
    """Store these bytes. ``commit_index`` is the leader's."""

    term: Term
    epoch: int
    commit_index: LogIndex
    run: EntryRun


@record(frozen=True, slots=True)
class PushCommit:
    """The leader's commit index, when no append carries it."""

    term: Term
    epoch: int
    commit_index: LogIndex


@record(frozen=True, slots=True)
class PushInstall:
    """The leader no longer has the entries you lack: start an empty log at ``position``, after entry ``before_begin``.

    The commit log's snapshot (Raft §7) is its own begin: entries before it have expired on the leader.
    ``configuration``: the newest explicit one that the leader knows to be committed, wherever its entry is.
    """

    term: Term
    epoch: int
    before_begin: EntryId
    chain_crc: int
    position: Position
    configuration: Configuration | None = None


PushRequest = PushCompare | PushTruncate | PushAppend | PushCommit | PushInstall
ReceivedPush = PushCompare | PushTruncate | CheckedAppend | PushCommit | PushInstall


class PushKind(IntEnum):
    """Which push a ``PushResponse`` answers; ``APPEND`` also for acknowledgements that a flush alone triggered."""

    COMPARE = 0
    TRUNCATE = 1
    APPEND = 2
    COMMIT = 3
    INSTALL = 4


@record(frozen=True, slots=True)
class PushResponse:
    """The state of the follower's log.

    ``verified_index``: last entry proven equal to the leader's in this term. ``flushed_index``: the durable part of it,
    which is all that may count towards a quorum. ``end_index``: its last entry, equal or not. After a refused COMPARE,
    ``conflict`` is its own term at the compared index with the first index it has of that term, or ``NO_ENTRY`` if its
    log is shorter. ``boot_id`` changes when the process restarts: earlier watermarks are void then. Without
    ``standing`` the watermark only shows its progress and counts for nothing.
    """

    term: Term
    epoch: int
    kind: PushKind
    code: ResponseCode
    verified_index: LogIndex
    flushed_index: LogIndex
    end_index: LogIndex
    conflict: EntryId
    boot_id: int
    standing: Standing = Standing.FULL


@record(frozen=True, slots=True)
class TakeLeadership:
    """The leader asks the addressee to campaign at once (dissertation §3.10's TimeoutNow)."""

    term: Term


Message = (
    VoteRequest
    | VoteResponse
    | HeartbeatRequest
    | HeartbeatResponse
    | PushCompare
    | PushTruncate
    | LoadRun
    | PushAppend
    | CheckedAppend
    | PushCommit
    | PushInstall
    | PushResponse
    | TakeLeadership
)


@record(frozen=True, slots=True)
class Envelope:
    """A message with its addresses; receivers drop messages for others."""

    cluster_id: str
    group: str
    sender: NodeId
    target: NodeId
    message: Message
    connection: int = field(default=0, compare=False)
    """For received pushes: a number that grows with every connection; never on the wire."""


class Wake:
    """Which workers have new work: bits of a plain ``int``.

    ``enum.Flag`` creates an object per operation, and an append needs some thirty operations.
    """

    NONE: Final = 0
    ELECTOR: Final = 1
    DISPATCHERS: Final = 2
    HANDLER: Final = 4
    QUORUM_ACK: Final = 8
    FLUSH: Final = 16


class RoleReason(StrEnum):
    """Why a member's role, term or known leader changed: for people, logs and counters; decides nothing."""

    ELECTION_TIMEOUT = "election_timeout"
    """No leader was heard for an election timeout: the member asks for votes (or, alone in its group, leads)."""
    LEADER_GONE = "leader_gone"
    """Its leader's process has ended: the member asks for votes at once."""
    PRE_VOTE_WON = "pre_vote_won"
    """A quorum would vote for it: it campaigns in a new term."""
    LEADERSHIP_OFFERED = "leadership_offered"
    """The leader transfers leadership to it: it campaigns at once."""
    ELECTED = "elected"
    """A quorum voted for it."""
    LEADER_HEARD = "leader_heard"
    """A leader of its term or of a later one spoke to it."""
    HIGHER_TERM = "higher_term"
    """A message carried a later term."""
    QUORUM_LOST = "quorum_lost"
    """It led, and a quorum has not answered for an election timeout."""
    NO_PROGRESS = "no_progress"
    """It led, and nothing was committed for several election time-outs although something waited."""
    DISK_FULL = "disk_full"
    """Its disk has no room for a new leader's first entry."""
    UNREADABLE_PRODUCERS = "unreadable_producers"
    """Its log's producer records are of a later version."""
    STANDING_LOST = "standing_lost"
    """It led or campaigned, and learned that it lacks what it once had, or that its history is not the group's."""
    NO_VOTER = "no_voter"
    """It is a learner, or was removed or not added yet: it neither campaigns nor leads."""
    DAMAGED_LOG = "damaged_log"
    """Its log's producer records are damaged: it could not recognize repeats."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The member's role, term or known leader changed."""

    role: Role
    term: Term
    leader: NodeId | None
    reason: RoleReason | None = field(default=None, compare=False)
    """The cause; None if the record's creator does not know it."""


@record(frozen=True, slots=True)
class SnapshotFetch:
    """This member's state machine needs entries that ``leader`` does not keep any more.

    It needs a snapshot of ``at_least`` that entry, or of a later one, from the leader or from any member whose chain
    CRC there equals the leader's.
    """

    leader: NodeId
    at_least: LogIndex


@dataclass(slots=True)
class Outbox:
    """Effects gathered since the driver last took them."""

    messages: list[tuple[NodeId, Message]] = field(default_factory=list)
    completions: list[Callable[[], None]] = field(default_factory=list)
    role_changes: list[RoleChange] = field(default_factory=list)
    committed: LogIndex | None = None
    """The new commit index, if it moved."""
    wake: int = Wake.NONE
    """Bits of ``Wake``."""
    damage: list[CorruptLogError] = field(default_factory=list)
    """Damage that a part found in the own log: it has done nothing that depends on it, and will retry."""
    fenced: str = ""
    """Why this member was just fenced."""
    membership: Membership | None = None
    """A copy of the member's, if the configuration in force, the one known to be committed, or the members with which
    this one still speaks have changed. The driver acts on it before it sends ``messages``.
    """
    fetch_snapshot: SnapshotFetch | None = None
    """The snapshot that this member lacks; repeated while it does, so the driver ignores it during a fetch."""

    def take(self) -> Outbox:
        """Return everything gathered and start empty."""
        taken = Outbox(
            self.messages,
            self.completions,
            self.role_changes,
            self.committed,
            self.wake,
            self.damage,
            self.fenced,
            self.membership,
            self.fetch_snapshot,
        )
        self.messages, self.completions, self.role_changes = [], [], []
        if taken.damage:
            self.damage = []
        self.committed, self.wake, self.fenced, self.membership = None, Wake.NONE, "", None
        self.fetch_snapshot = None
        return taken

    def __bool__(self) -> bool:
        return bool(
            self.messages
            or self.completions
            or self.role_changes
            or self.committed is not None
            or self.wake
            or self.damage
            or self.fenced
            or self.membership is not None
            or self.fetch_snapshot is not None
        )


def hint(leader: NodeId | None) -> LeaderHint | None:
    """A leader hint without an address; the server adds the address it has learned."""
    return None if leader is None else LeaderHint(leader)
