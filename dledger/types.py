"""The words everything else is written in: identifiers, roles and the entry itself.

Nothing here does anything; the module imports nothing of the project but ``records`` and ``layout``. Indexes and terms
are signed 64-bit integers on disk and on the wire; the first index is 0 and "none" is -1 (DLedger's convention, kept so
that files stay readable).
"""

from __future__ import annotations

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
    """What a member is at this moment (Raft figure 4)."""

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
"""What an entry holds, as appenders give it; a ``bytearray`` may be changed in place by an append hook."""


@record(frozen=True, slots=True, order=True)
class EntryId:
    """Names one entry. Ordered as Raft's election restriction orders logs: by term, then by index (§5.4.1)."""

    term: Term
    index: LogIndex


NO_ENTRY: Final = EntryId(NO_TERM, NO_INDEX)
"""The entry before the first one."""


@record(frozen=True, slots=True)
class Entry:
    """One entry as it is stored.

    ``position`` is the record's first byte; ``body`` starts 48 bytes later. ``body_crc`` and ``chain_crc`` are unsigned
    CRC32C values (see ``dledger.store.format``). ``magic`` is what the entry means: a NOOP that is stored with magic 1
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

    @property
    def entry_id(self) -> EntryId:
        """This entry's term and index."""
        return EntryId(self.term, self.index)


@record(frozen=True, slots=True)
class Boundary:
    """What is known of the entry just before the first one that a log still holds.

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
    """Who appends a batch, and the number of its first entry: what makes a repetition of it known.

    ``sequence`` counts the producer's entries, from 0. ``count`` is how many there are; it need be given only with a
    ``PreparedAppend``, which nobody may ask for its entries before it is known how many of them are new.
    """

    producer: str
    sequence: int
    count: int = 0


@record(frozen=True, slots=True)
class StoredRun:
    """Entries of a producer that the log held before, at contiguous indexes.

    ``first_index`` is 0 (no producer's entry is there) when it is not remembered where they are; then ``term`` is -1.
    ``positions`` are where their records start; empty if that is not known (any more).
    """

    first_index: LogIndex
    count: int
    term: Term = NO_TERM
    positions: tuple[int, ...] = ()


@record(frozen=True, slots=True)
class AppendedBatch:
    """Where a leader's batch went: contiguous indexes and one start position per entry.

    ``duplicates``: the first entries of a producer's batch that were there before; the others are as above. If all
    were, there is nothing else: no positions, ``first_index`` 0 and ``last_index`` -1.
    """

    term: Term
    first_index: LogIndex
    last_index: LogIndex
    positions: tuple[int, ...]
    duplicates: tuple[StoredRun, ...] = ()


@record(frozen=True, slots=True)
class LogBytes:
    """Raw committed log bytes of one segment from ``position`` on, without its blank; empty if there is nothing more.

    ``data`` starts with a record. Its last record may be cut: read on from where that one starts.
    """

    position: Position
    data: bytes


@record(frozen=True, slots=True)
class LogChunk:
    """Committed entries as they are stored: whole records of one segment, headers included, without blanks.

    ``data`` holds ``count`` records from the one of ``first_index`` on; its first byte is at ``position`` of the log,
    and at ``position - segment_base`` of its segment file. ``committed_index`` and ``begin_index`` (the first kept
    entry) are what the node that gave it knew then. Nothing is verified but where the first and last record are.
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
        """Where to go on."""
        return LogIndex(self.first_index + self.count)


@record(frozen=True, slots=True)
class LogPlace:
    """An entry's index, and where its record begins in the log; the committed log's end for one that is not there."""

    index: LogIndex
    position: Position


@record(frozen=True, slots=True)
class LogRange:
    """The committed entries that a node has: from ``begin`` up to before ``end``."""

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
    """Contiguous raw log bytes holding whole entries, as one push carries them.

    ``data`` starts with the record of ``first_index``, ends after the record of ``last_index``, lies in one segment
    and holds no blank. ``previous`` and ``previous_chain_crc`` describe the entry before it (``NO_ENTRY`` and 0 at the
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
    """

    run: EntryRun
    last: EntryId
    last_chain_crc: int
    index_units: bytes

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

    ``sequence`` numbers the store's changes (appends, truncations, resets) of this process; it makes "my truncation is
    durable" something that can be waited for.
    """

    index: LogIndex
    sequence: int


class Standing(IntEnum):
    """What a member's memory of its votes and acknowledgements is worth; the numbers are those on the wire.

    Without standing (``BLANK``, ``DOUBTFUL``) a member takes part but counts for nothing, except where everybody must
    agree: see "Standing" in docs/protocol.md.
    """

    VOTER = 0
    """It knows whatever it said."""
    FOUNDER = 1
    """As ``VOTER``, of a group of which it is not known whether all members have standing yet."""
    DOUBTFUL = 2
    """Its log or its votes may lack what it once said."""
    BLANK = 3
    """It began with an empty directory: it knows nothing of what an earlier life may have said."""

    @property
    def counts(self) -> bool:
        """Whether its votes and acknowledgements count."""
        return self in _WITH_STANDING


_WITH_STANDING: Final = (Standing.VOTER, Standing.FOUNDER)


@record(frozen=True, slots=True)
class HardState:
    """What must be durable before a node speaks: its term, whom it voted for in it, and what its memory is worth.

    ``doubt`` tells people why it is ``DOUBTFUL``. ``fenced``: its history is not the group's, for the reason in
    ``doubt``, and nothing of what it holds may be believed.
    """

    term: Term = Term(0)
    vote: NodeId | None = None
    standing: Standing = Standing.BLANK
    doubt: str = ""
    fenced: bool = False

    @property
    def voter(self) -> bool:
        """Whether its vote and its acknowledgements count."""
        return self.standing.counts

    def doubted(self, reason: str) -> HardState:
        """The same without standing, because of ``reason``; a member that has none keeps what it is."""
        return HardState(self.term, self.vote, Standing.DOUBTFUL, reason) if self.voter else self

    def fence(self, reason: str) -> HardState:
        """The same, fenced because of ``reason``."""
        return HardState(self.term, self.vote, Standing.DOUBTFUL, reason, fenced=True)
