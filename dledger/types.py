"""The basic vocabulary: identifiers, roles and the entry itself.

Nothing here does anything; the module imports nothing of the project but ``records`` and ``layout``. Indexes and terms
are signed 64-bit integers on disk and on the wire; the first index is 0 and "none" is -1 (DLedger's convention, kept so
that files stay readable).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final, NewType

from dledger.layout import ENTRY, INDEX_UNIT, INDEX_UNIT_BYTES
from dledger.records import record

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
