"""The interfaces that the core needs, declared where they are used.

``Log`` is the core's view of the store, which it may not import: ``dledger.store`` implements it in files, and the
simulator in memory; one contract test suite covers both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dledger.core.noop_payload import ProducerSnapshot
from dledger.errors import DLedgerError
from dledger.records import record
from dledger.types import (
    AppendedBatch,
    Body,
    Boundary,
    CheckedRun,
    Configuration,
    Entry,
    EntryId,
    EntryRun,
    FlushMark,
    LogIndex,
    Magic,
    Position,
    Term,
)

BatchHook = Callable[[Sequence[int], Sequence[Body]], Sequence[Body]]
"""Called on the leader once per part of a batch of NORMAL entries that lies in one segment, after positions are fixed,
before CRCs.

From positions and bodies it returns the bodies to store, of unchanged lengths: the same objects, changed in place, if
they are ``bytearray``. Followers never run hooks: they receive the patched bytes (RocketMQ stores position + 48 at
record byte 76 this way).
"""


class PreparedAppend(Protocol):
    """A batch that depends on the log's contents, for example on numbers assigned entry by entry.

    Both methods run under the node's lock, one right after the other, so nothing is appended in between; neither is
    called unless the node leads. They must be quick and must not raise: an exception stops the node.
    """

    def bodies(self, term: Term, stored: int = 0) -> Sequence[Body] | DLedgerError:
        """The batch to append as leader of ``term``, without its first ``stored`` entries, or why there is none.

        The log already holds those (``ProducerBatch``); if it holds all, neither this nor ``placed`` is called.
        """

    def placed(self, batch: AppendedBatch | None) -> None:
        """Where the batch was written (not yet committed); None: it was refused, and nothing was written.

        Called exactly once after ``bodies`` has returned a batch.
        """


class Log(Protocol):
    """Entries ``(begin.index, last.index]``. Writers and all methods up to ``set_committed`` need the node's lock.

    Nothing here waits for a disk except ``flush``; a written entry is in the page cache until then. After any failed
    write or flush the log is poisoned: every further write and flush raises ``DiskError``.
    """

    @property
    def begin(self) -> Boundary:
        """The entry before the first kept one; ``GENESIS`` for a log that was never cut at the front."""

    @property
    def last(self) -> EntryId:
        """The last entry's id, or that of ``begin`` when the log holds none."""

    @property
    def last_chain_crc(self) -> int:
        """The chain CRC that seeds the next entry."""

    @property
    def end_position(self) -> Position:
        """Where the next byte goes (a tail blank may have to be written there first)."""

    @property
    def flushed(self) -> FlushMark:
        """How far the log is durable; its index never exceeds ``last``. Updated by ``flush``."""

    @property
    def write_sequence(self) -> int:
        """The number of changes so far; a change is durable when ``flushed.sequence`` has reached its number."""

    @property
    def committed_index(self) -> LogIndex:
        """The last value of ``set_committed``; after a restart, that of the checkpoint (never beyond ``last``)."""

    @property
    def disk_full(self) -> bool:
        """Whether appends are currently refused for lack of space; runs that need no new file are not."""

    def term_at(self, index: LogIndex) -> Term:
        """The term of an entry from ``begin.index`` to ``last.index``, both included.

        Raises ``IndexOutOfRangeError`` or ``IndexBeforeBeginError`` outside, and ``CorruptLogError`` if it is damaged:
        values that decide are verified by the log's chain, here and in the methods that refer to this one.
        """

    def chain_crc_at(self, index: LogIndex) -> int:
        """The chain CRC of an entry, over the same range and with the same errors as ``term_at``."""

    def first_index_of_term(self, term: Term) -> LogIndex:
        """The first kept index whose term is >= ``term``; ``last.index + 1`` if there is none. Terms never decrease."""

    def append_as_leader(
        self, term: Term, bodies: Sequence[Body], magic: Magic = Magic.NORMAL, *, channel: int = 0
    ) -> AppendedBatch:
        """Append a batch in order, all of it or (raising) nothing; computes both CRCs after running the hooks.

        ``magic`` and ``channel`` are stored as given; hooks run on what is stored with magic 1.

        Raises ``InvalidRequestError`` for an empty batch, ``EntryTooLargeError``, ``DiskFullError`` (nothing written).
        """

    def check_append(self, bodies: Sequence[Body]) -> None:
        """Raise what ``append_as_leader`` would raise for this batch before it writes anything."""

    def append_run(self, checked: CheckedRun, from_index: LogIndex) -> EntryId:
        """Append the run's entries from ``from_index`` on, which must be ``last.index + 1``; returns the new ``last``.

        The bytes are copied unchanged, so positions are identical; for a run that starts at the next segment the log
        writes its own tail blank first. Raises ``MisplacedRunError`` (nothing written) if the run does not continue the
        log in index, term, chain CRC or position, and ``DiskFullError``. A full disk does not refuse what fits into
        the files that are there: a new leader's first entry must get through, or nobody is served until there is room.
        """

    def slice_run(self, first_index: LogIndex, max_bytes: int) -> LogIndex:
        """The last index of the longest run from ``first_index`` in one segment within ``max_bytes``; >= first."""

    def truncate(self, from_index: LogIndex) -> None:
        """Drop entries from ``from_index`` on and wipe the first dropped header, so that they never come back.

        No effect when ``from_index`` > last. Raises ``InvariantError`` when it is <= ``committed_index`` or <= begin.
        """

    def reset(self, begin: Boundary, configuration: Configuration | None = None) -> None:
        """Drop everything and start an empty log after ``begin`` (the leader no longer has what this log lacks).

        ``configuration``: the leader's newest committed one, which is durable before anything is dropped (M10). Raises
        ``DiskFullError`` if there is no room for it (nothing dropped).
        """

    def set_committed(self, index: LogIndex) -> None:
        """Set the commit index for readers and for the next checkpoint. Never decreases; never beyond ``last``."""

    # Below: safe without the node's lock, from any thread.

    def check_run(self, run: EntryRun) -> CheckedRun:
        """Verify a received run by itself: headers, contiguous indexes, terms that never decrease, both CRCs, no rest.

        Raises ``InvalidRequestError`` naming the first bad entry.
        """

    def flush(self) -> FlushMark:
        """Make everything written so far durable (one fdatasync per touched segment) and return the new mark.

        After a failure it raises ``DiskError`` from then on: a flush is never retried.
        """

    def read_run(self, first_index: LogIndex, last_index: LogIndex, *, verified: bool = False) -> EntryRun:
        """The raw bytes of a range returned by ``slice_run``. Raises the errors of ``term_at`` if it is gone by now.

        ``verified``: check all of it against the chain and its CRCs, which is unnecessary for entries just written.
        """

    def read(self, index: LogIndex) -> Entry:
        """One entry, both CRCs verified. Raises the errors of ``term_at`` and ``CorruptLogError``."""

    def read_range(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        """Entries from ``first_index`` to at most ``last_index``: at least one, then as many as fit ``max_bytes``."""

    def read_at(self, position: Position) -> Entry:
        """The entry whose record starts at ``position``. Raises ``IndexOutOfRangeError`` if none does."""

    def positions(self, first_index: LogIndex, last_index: LogIndex) -> tuple[int, ...]:
        """Where the records of a range of entries start. Raises the errors of ``term_at``."""

    def channel_runs(self, first_index: LogIndex, last_index: LogIndex) -> list[tuple[int, int, int]]:
        """The ``channel`` fields of a range of entries: (channel, first index, count) of each run of equal ones.

        That of a NOOP is ``NOOP_CHANNEL``, whatever its magic. Reads headers only, and verifies each; raises the errors
        of ``term_at``.
        """

    def close(self) -> None:
        """Flush, record a clean stop and release the directory. Idempotent."""


@record(frozen=True, slots=True)
class ProducersAt:
    """The table of producers as of the entry ``index``, which a snapshot of a state machine holds."""

    index: LogIndex
    producers: ProducerSnapshot


class MachineState(Protocol):
    """How far a member's state machine is. Read under the node's lock, so quick; none of them goes back.

    A member whose log was reset to a snapshot lacks the entries before: its machine is the only one to know them.
    """

    @property
    def applied_index(self) -> LogIndex:
        """The last entry that its state includes."""

    @property
    def snapshot_index(self) -> LogIndex:
        """The last entry of the newest durable snapshot; ``NO_INDEX`` if there is none."""

    @property
    def producers(self) -> ProducersAt | None:
        """The producers as of that entry; None if there is no snapshot."""

    def wall_ms(self) -> int:
        """This member's clock (Unix time), which it records in the log as leader (``core.noop_payload``)."""


class Random(Protocol):
    """The only kind of randomness the core uses."""

    def randrange(self, start: int, stop: int, /) -> int:
        """An integer in ``[start, stop)``."""
