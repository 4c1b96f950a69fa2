"""The basic vocabulary: identifiers, roles, the entry itself, and the members of a group.

Little here does anything; the module imports nothing of the project but ``records``. Indexes and terms are signed
64-bit integers on disk and on the wire; the first index is 0 and "none" is -1 (DLedger's convention, kept so that files
stay readable).

A configuration of members is an entry of the log. Before the first one, the configured ``peers`` are the voters: the
*implicit* configuration, at index -1. Rules, named M1 to M16: docs/protocol.md, "Membership".

``BaseLog`` is the older log that a log continues: its files, on which the members must agree. Raft replicates only what
is appended from now on. Members whose older files differ would serve different messages under the same offsets, so they
must not talk to each other at all, not even vote: the handshake compares both sides' base logs
(``dledger.rpc.peers.identity``). Files expire on every member by itself; what has expired on one side is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NewType

from dledger.records import ENTRY, INDEX_UNIT, INDEX_UNIT_BYTES, record

NodeId = NewType("NodeId", str)
"""A member's name inside its group, for example ``n0``."""
Term = NewType("Term", int)
"""Raft's election epoch; 0 before the first election."""
LogIndex = NewType("LogIndex", int)
"""An entry's number in the log, counted from 0."""
Position = NewType("Position", int)
"""An absolute byte offset in the log; the same on every node for the same entry."""

NO_INDEX: Final = LogIndex(-1)
NO_TERM: Final = Term(-1)


class Role(StrEnum):
    """The current role of a member (Raft figure 4)."""

    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEADER = "LEADER"


class Magic(IntEnum):
    """The first field of an entry record; any other value is not an entry."""

    NORMAL = 1
    NOOP = 2
    CONFIG_CHANGE = 3


NOOP_CHANNEL: Final = 0x4E4F4F50
"""In the otherwise unused ``channel`` field of a record with magic 1: it is a NOOP (the field's bytes read NOOP).

Readers of the Java line before 0.4 know no other magic and take every body for the application's.
"""

Body = bytes | bytearray
"""The content of an entry, as given by appenders; an append hook may change a ``bytearray`` in place."""


@record(frozen=True, slots=True, order=True)
class EntryId:
    """Identifies one entry. Ordered as Raft's election restriction orders logs: by term, then by index (§5.4.1)."""

    term: Term
    index: LogIndex


NO_ENTRY: Final = EntryId(NO_TERM, NO_INDEX)
"""The entry before the first one."""


@record(frozen=True, slots=True)
class Entry:
    """One stored entry.

    ``position`` is the record's first byte; ``body`` starts 48 bytes later. ``body_crc`` and ``chain_crc`` are unsigned
    CRC32C values (see ``dledger.store.format``). ``magic`` is the entry's meaning: a NOOP stored with magic 1
    (``NOOP_CHANNEL``) is a NOOP here.
    """

    index: LogIndex
    term: Term
    position: Position
    body: bytes
    magic: Magic = Magic.NORMAL
    channel: int = 0
    body_crc: int = 0
    chain_crc: int = 0


@record(frozen=True, slots=True)
class EntryColumns:
    """Consecutive stored entries, all verified, by columns: an object for each costs too much where all are read.

    ``channel_runs``: (channel, first index, count) of each run of entries with equal channels, ``NOOP_CHANNEL`` being
    that of every NOOP. ``end_position`` and ``chain_crc`` are those behind the last entry.
    """

    first_index: LogIndex
    terms: Sequence[Term]
    bodies: Sequence[bytes]
    channel_runs: Sequence[tuple[int, int, int]]
    end_position: Position
    chain_crc: int

    @property
    def end(self) -> Boundary:
        """The last entry, as what a log begins after."""
        last = LogIndex(self.first_index + len(self.bodies) - 1)
        return Boundary(last, self.terms[-1], self.end_position, self.chain_crc)


@record(frozen=True, slots=True)
class Boundary:
    """The known facts about the entry just before the first one that a log still holds.

    An empty or complete log starts after ``GENESIS``. ``position`` is where the first kept entry starts (bytes);
    ``chain_crc`` seeds that entry's chain.
    """

    index: LogIndex
    term: Term
    position: Position
    chain_crc: int


GENESIS: Final = Boundary(NO_INDEX, NO_TERM, Position(0), 0)


@record(frozen=True, slots=True)
class ProducerBatch:
    """The producer of a batch, and the number of its first entry, by which repetitions are recognized.

    ``sequence`` counts the producer's entries, from 0. ``count`` is the number of entries; it is needed only with a
    ``PreparedAppend``, which must not be asked for its entries before it is known how many of them are new.
    """

    producer: str
    sequence: int
    count: int = 0


@record(frozen=True, slots=True)
class StoredRun:
    """Entries of a producer that the log already held, at contiguous indexes.

    ``first_index`` is 0 (where no producer's entry is) when their place is not remembered; then ``term`` is -1.
    ``positions`` are where their records start; empty if that is not known (any more).
    """

    first_index: LogIndex
    count: int
    term: Term = NO_TERM
    positions: tuple[int, ...] = ()


@record(frozen=True, slots=True)
class AppendedBatch:
    """Where a leader's batch was written: contiguous indexes and one start position per entry.

    ``duplicates``: the first entries of a producer's batch, which were already there; the others are as above. If all
    were, there is nothing else: no positions, ``first_index`` 0 and ``last_index`` -1.
    """

    term: Term
    first_index: LogIndex
    last_index: LogIndex
    positions: tuple[int, ...]
    duplicates: tuple[StoredRun, ...] = ()


@record(frozen=True, slots=True)
class QueryAnswer:
    """A state machine's answer to a query; its state included ``applied_index`` then, and perhaps more."""

    result: bytes
    applied_index: LogIndex


@record(frozen=True, slots=True)
class SnapshotState:
    """A durable snapshot of a state machine: its last entry, and the bytes of its files."""

    index: LogIndex
    size: int


@record(frozen=True, slots=True)
class LogBytes:
    """Raw committed log bytes of one segment from ``position`` on, without its blank; empty at the end.

    ``data`` starts with a record. Its last record may be cut: continue reading where that one starts.
    """

    position: Position
    data: bytes


@record(frozen=True, slots=True)
class LogChunk:
    """Committed entries as they are stored: whole records of one segment, headers included, without blanks.

    ``data`` holds ``count`` records from the one of ``first_index`` on; its first byte is at ``position`` of the log,
    and at ``position - segment_base`` of its segment file. ``committed_index`` and ``begin_index`` (the first kept
    entry) are those of the answering node at that time. The node has verified the entries; a client that receives them
    does not.
    """

    first_index: LogIndex
    count: int
    position: Position
    segment_base: Position
    data: bytes
    committed_index: LogIndex
    begin_index: LogIndex

    @property
    def end_index(self) -> LogIndex:
        """Where to continue."""
        return LogIndex(self.first_index + self.count)


@record(frozen=True, slots=True)
class LogPlace:
    """An entry's index, and where its record begins in the log; the committed log's end for one that does not exist."""

    index: LogIndex
    position: Position


@record(frozen=True, slots=True)
class LogRange:
    """The committed entries of a node: from ``begin`` to before ``end``."""

    begin: LogPlace
    end: LogPlace


@record(frozen=True, slots=True)
class BlockDigest:
    """A checksum of ``size`` stored bytes of the committed log from ``position`` on, blanks included.

    Entries ``first_index`` to ``last_index`` begin in it (``first_index == last_index + 1``: none does). ``chain_crc``
    is that of entry ``last_index``: it vouches for all headers, and so all bodies' checksums, up to there.
    """

    position: Position
    size: int
    crc32c: int
    first_index: LogIndex
    last_index: LogIndex
    chain_crc: int


@record(frozen=True, slots=True)
class EntryRun:
    """Contiguous raw log bytes of whole entries, as one push carries them.

    ``data`` starts with the record of ``first_index``, ends after the record of ``last_index``, lies in one segment and
    holds no blank. ``previous`` and ``previous_chain_crc`` describe the entry before it (``NO_ENTRY`` and 0 at the
    start of the log). ``position`` is the absolute offset of the first byte.
    """

    previous: EntryId
    previous_chain_crc: int
    first_index: LogIndex
    last_index: LogIndex
    position: Position
    data: bytes


@record(frozen=True, slots=True)
class CheckedRun:
    """An ``EntryRun`` whose every header, ``bodyCrc`` and ``chainCrc`` was verified (``Log.check_run``).

    ``index_units`` are the 32 byte index units of its entries, ready to be stored (absolute positions inside).
    ``noops``: the indexes of its no-ops, in whichever form.
    """

    run: EntryRun
    last: EntryId
    last_chain_crc: int
    index_units: bytes
    noops: tuple[LogIndex, ...] = ()

    def term_of(self, index: LogIndex) -> Term:
        """The term of an entry of the run."""
        return Term(_UNIT_TERM.unpack_from(self.index_units, (index - self.run.first_index) * INDEX_UNIT_BYTES)[0])

    def offset_of(self, index: LogIndex) -> int:
        """Where the entry's record starts in ``run.data``, in bytes."""
        unit = (index - self.run.first_index) * INDEX_UNIT_BYTES
        position: int = _UNIT_POSITION.unpack_from(self.index_units, unit)[0]
        return position - self.run.position

    def chain_crc_of(self, index: LogIndex) -> int:
        """The chain CRC of an entry of the run."""
        crc: int = _ENTRY_CHAIN_CRC.unpack_from(self.run.data, self.offset_of(index))[0]
        return crc


_UNIT_TERM: Final = INDEX_UNIT.struct("term")
_UNIT_POSITION: Final = INDEX_UNIT.struct("position")
_ENTRY_CHAIN_CRC: Final = ENTRY.struct("chain_crc")


@record(frozen=True, slots=True)
class FlushMark:
    """How far a store is durable: every entry ≤ ``index``, and every change counted by ``sequence``.

    ``sequence`` numbers this process's changes of the store (appends, truncations, resets), so that a caller can wait
    for its truncation to be durable.
    """

    index: LogIndex
    sequence: int


class Standing(IntEnum):
    """How reliable a member's memory of its votes and acknowledgements is; the numbers are those on the wire.

    Without standing (``BLANK``, ``DOUBTFUL``) a member takes part but counts for nothing, except where all members must
    agree: see "Standing" in docs/protocol.md.
    """

    FULL = 0
    """It remembers everything it has stated."""
    FOUNDER = 1
    """Like ``FULL``, in a group in which not all members are known to have standing yet."""
    DOUBTFUL = 2
    """Its log or its votes may lack what it once stated."""
    BLANK = 3
    """It began with an empty directory, or lost flushed entries: statements of an earlier life may be recorded nowhere
    else."""

    @property
    def counts(self) -> bool:
        """Whether its votes and acknowledgements count."""
        return self in _WITH_STANDING


_WITH_STANDING: Final = (Standing.FULL, Standing.FOUNDER)


@record(frozen=True, slots=True)
class HardState:
    """The state that must be durable before a node sends messages: its term, its vote in that term, and its standing.

    ``doubt`` tells people why it is ``DOUBTFUL``. ``fenced``: its history is not the group's, for the reason in
    ``doubt``, and nothing that it holds may be believed. ``lost``: it is ``BLANK`` because flushed entries were set
    aside, so no new group may begin with it.
    """

    term: Term = Term(0)
    vote: NodeId | None = None
    standing: Standing = Standing.BLANK
    doubt: str = ""
    fenced: bool = False
    lost: bool = False

    @property
    def voter(self) -> bool:
        """Whether its vote and its acknowledgements count."""
        return self.standing.counts

    def doubted(self, reason: str) -> HardState:
        """The same without standing, because of ``reason``; a member without standing is unchanged."""
        return HardState(self.term, self.vote, Standing.DOUBTFUL, reason) if self.voter else self

    def after_loss(self, reason: str) -> HardState:
        """The same without its flushed entries, because of ``reason``; a fenced member is unchanged: it says more."""
        return self if self.fenced else HardState(self.term, self.vote, Standing.BLANK, reason, lost=True)

    def fence(self, reason: str) -> HardState:
        """The same, fenced because of ``reason``."""
        return HardState(self.term, self.vote, Standing.DOUBTFUL, reason, fenced=True)


class TlsServerMode(StrEnum):
    """The transports of remoting clients: plaintext, both, or TLS."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


VOTERS_MAX: Final = 9
LEARNERS_MAX: Final = 4
MEMBERS_MAX: Final = VOTERS_MAX + LEARNERS_MAX


class MemberRole(IntEnum):
    """A member's part in the group; the numbers are those in the log and on the wire."""

    VOTER = 1
    """It counts for elections, commits, check-quorum and linearizable reads, while it has standing."""
    LEARNER = 2
    """It receives the log and votes when asked, but never campaigns and never counts."""


@record(frozen=True, slots=True)
class ClusterMember:
    """A member in a configuration.

    ``number`` is given once and never again (a broker's id is it plus 1); ``uid`` names one memory of the member, 0 if
    not known. ``promote``: a learner that becomes a voter when it has caught up. ``replaces``: the voter that leaves
    for it (empty: none). Both stay until that is done, so that any later leader carries it on.
    """

    node_id: NodeId
    host: str
    port: int
    role: MemberRole = MemberRole.VOTER
    number: int = 0
    uid: int = 0
    promote: bool = False
    replaces: str = ""


@record(frozen=True, slots=True)
class Configuration:
    """All members of a group, as of the entry ``index`` (``NO_INDEX``: as configured), in the order of their ids.

    ``change_id`` is that of the request which made it, 0 if none did, so that a repeated request changes nothing.
    ``next_number``: of the next new member.
    """

    members: tuple[ClusterMember, ...] = ()
    index: LogIndex = NO_INDEX
    term: Term = NO_TERM
    next_number: int = 0
    change_id: int = 0

    @property
    def voters(self) -> tuple[NodeId, ...]:
        return tuple(one.node_id for one in self.members if one.role is MemberRole.VOTER)

    @property
    def learners(self) -> tuple[NodeId, ...]:
        return tuple(one.node_id for one in self.members if one.role is MemberRole.LEARNER)

    @property
    def quorum(self) -> int:
        """How many voters are a majority."""
        return len(self.voters) // 2 + 1

    def find(self, node_id: str) -> ClusterMember | None:
        """The member with this id, if there is one."""
        return next((one for one in self.members if one.node_id == node_id), None)


class ChangeKind(StrEnum):
    """The kinds of requests."""

    ADD = "add"
    """A learner, which becomes a voter when it has caught up unless ``MemberChange.promote`` is false."""
    PROMOTE = "promote"
    """Make a learner that has caught up a voter."""
    DEMOTE = "demote"
    """Make a voter a learner."""
    REMOVE = "remove"
    """Remove a member; of a learner that was being added, this cancels the addition."""
    UPDATE = "update"
    """Give a member another address."""


ANY_CONFIGURATION: Final = LogIndex(-2)


@record(frozen=True, slots=True)
class MemberChange:
    """A request to change the members.

    ``host``, ``port``: for ``ADD`` and ``UPDATE``. ``promote``, ``replaces``: for ``ADD``; see ``ClusterMember``.
    ``expected_index``: the index of the configuration that the caller saw; if it is another one by now, nothing is
    changed. ``change_id``: random and positive; a request with that of the current configuration succeeds at once.
    """

    kind: ChangeKind
    node_id: NodeId
    change_id: int
    host: str = ""
    port: int = 0
    promote: bool = True
    replaces: str = ""
    expected_index: LogIndex = ANY_CONFIGURATION


@record(frozen=True, slots=True)
class MemberProgress:
    """A leader's knowledge of another member.

    ``rate`` in bytes per second. ``not_ready``: why a learner cannot become a voter now, empty if it can.
    """

    node_id: NodeId
    state: str
    """``in sync``, ``catching up``, ``installing``, ``unreachable``, ``never seen``, ``no standing``, ``disk full``."""
    match_index: LogIndex
    lag_entries: int
    lag_bytes: int
    rate: int
    last_contact_ms: int
    """Milliseconds since it was last heard; -1: never."""
    not_ready: str = ""


DIGESTS_MAX: Final = 8192
"""How many of the newest files are compared: their digests fit a handshake."""
_ADVICE: Final = "Stop the members and compare their old logs: dledger upgrade check"


@dataclass(frozen=True, slots=True)
class BaseLog:
    """The files of an older log, all of ``file_bytes``, as they were when it was taken over. Positions in bytes."""

    begin: int
    end: int
    """Where the older log ends and the replicated one begins."""
    file_bytes: int
    digests: tuple[int, ...]
    """CRC32C of what each file holds, for the newest ``DIGESTS_MAX`` of them, oldest first."""
    kept_from: int
    """The start of the first file that is still there; ``end`` if all have expired."""

    @property
    def digests_from(self) -> int:
        """The start of the first file with a digest."""
        return self.end - len(self.digests) * self.file_bytes

    def digest_at(self, base: int) -> int:
        """The digest of the file that starts at ``base``, which must be one of those with a digest."""
        return self.digests[(base - self.digests_from) // self.file_bytes]


def why_apart(ours: BaseLog | None, theirs: BaseLog | None, our_name: str, their_name: str) -> str:
    """Why two members must not replicate with each other; empty if they may. None: the log continues no other."""
    if ours is None or theirs is None:
        return _of_one(ours, their_name, our_name) or _of_one(theirs, our_name, their_name)
    if ours.end != theirs.end or ours.file_bytes != theirs.file_bytes:
        return (
            f"the old log of {their_name} ends at {theirs.end} with files of {theirs.file_bytes} bytes, that of "
            f"{our_name} at {ours.end} with files of {ours.file_bytes} bytes. {_ADVICE}"
        )
    for base in range(max(ours.digests_from, theirs.digests_from), ours.end, ours.file_bytes):
        if ours.digest_at(base) != theirs.digest_at(base):
            return f"the old logs of {their_name} and {our_name} differ in file {base:020d}. {_ADVICE}"
    return _lacking(ours, theirs, our_name, their_name) or _lacking(theirs, ours, their_name, our_name)


def _of_one(one: BaseLog | None, without: str, having: str) -> str:
    if one is None or one.kept_from >= one.end:
        return ""
    return (
        f"{without} has no old log, and {having} still has the files of {one.kept_from} to {one.end}: copy them to "
        f"{without} before its first start. {_ADVICE} --align"
    )


def _lacking(one: BaseLog, other: BaseLog, name: str, other_name: str) -> str:
    """The files that ``one`` never had and ``other`` still has, as a sentence."""
    if one.begin <= other.kept_from or other.kept_from >= other.end:
        return ""
    return (
        f"the old log of {name} begins at {one.begin}, and {other_name} still has it from {other.kept_from} on: copy "
        f"the older files to {name} before its first start. {_ADVICE} --align"
    )
