"""The messages between members. Every message is one-way; an answer is a message of its own.

A message is valid only for the cluster, group and addressee of its ``Envelope``, which are checked on arrival, and for
the term it carries, which is checked when it is *executed*.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum

from dledger.errors import ResponseCode
from dledger.members import Configuration
from dledger.records import record
from dledger.types import (
    NO_ENTRY,
    NO_INDEX,
    Boundary,
    CheckedRun,
    EntryId,
    EntryRun,
    LogIndex,
    NodeId,
    Position,
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
    see ``dledger.core.histories``. ``countersign``: see ``dledger.core.entry_pusher.leader_check``.
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
