"""One record of ``TIMED_TOPIC`` as an entry of an hour's file, and which messages of many entries are open.

A message is known by its *origin*, the queue offset of its first record. Its other records are copies that were stored
before the previous one expired (the newest counts), and its recall, after which none does. The topic has one queue, so
queue offsets are in the log's order; unlike positions, they survive an export of the log.

Pure, but for the readers of hour files at the end, which believe nothing that is not what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.errors import CorruptLogError
from dledger.layout import RecordLayout
from rocketstore.message.columns import RecordColumns
from rocketstore.message.timed import waiting_of
from rocketstore.types import TIMED_TOPIC, RecordHead

HOUR_MS: Final = 3_600_000
ENTRY: Final = RecordLayout(
    (
        ("due_ms", "i8"),
        ("queue_offset", "i8"),
        ("origin", "i8"),
        ("position", "i8"),
        ("store_timestamp", "i8"),
        ("size", "i4"),
        ("kind", "i4"),
    )
)
ENTRY_ROW: Final = ENTRY.dtype()
ROW: Final = ENTRY_ROW.newbyteorder("=")
_RAW: Final = np.dtype((np.void, ENTRY.size))
_PACK: Final = ENTRY.struct().pack

Entries = NDArray[np.void]
"""Rows of ``ENTRY_ROW``, or of ``ROW`` in memory, in the log's order."""


class EntryKind(IntEnum):
    """The kind of record."""

    MESSAGE = 0
    COPY = 1
    """Of a message that would expire before it is due."""
    RECALL = 2


class TimedEntry(NamedTuple):
    """When a message is due (ms, Unix time), and where its record is: in the topic's queue, and in the log.

    ``store_timestamp``: when the record was stored (ms), ``size`` its length.
    """

    due_ms: int
    queue_offset: int
    origin: int
    position: int
    store_timestamp: int
    size: int
    kind: int = EntryKind.MESSAGE

    @property
    def hour(self) -> int:
        """Of its file: hours since 1970."""
        return self.due_ms // HOUR_MS

    def encode(self) -> bytes:
        """As stored."""
        return _PACK(*self)


def entry_of(head: RecordHead) -> TimedEntry | None:
    """Of a record in ``TIMED_TOPIC``; None if it does not say when it is due."""
    found = waiting_of(head.properties)
    if found is None:
        return None
    due_ms, origin, recalled = found
    kind = EntryKind.RECALL if recalled >= 0 else EntryKind.COPY if origin >= 0 else EntryKind.MESSAGE
    origin = recalled if recalled >= 0 else origin if origin >= 0 else head.queue_offset
    return TimedEntry(due_ms, head.queue_offset, origin, head.offset, head.store_timestamp, head.size, kind)


def timed_heads(heads: Sequence[RecordHead]) -> Iterable[RecordHead]:
    """The records in ``TIMED_TOPIC``. Costs little if there are none."""
    if not isinstance(heads, RecordColumns):
        return [head for head in heads if head.topic == TIMED_TOPIC]
    if all(queue.topic != TIMED_TOPIC for queue in heads.by_queue):
        return ()
    return [heads[at] for at, topic in enumerate(heads.topics) if topic == TIMED_TOPIC]


def decode_entries(data: bytes | bytearray | memoryview) -> Entries:
    """Of a file's whole entries, for calculations. A copy."""
    whole = len(data) // ENTRY.size
    entries: Entries = np.frombuffer(data, ENTRY_ROW, whole).astype(ROW)
    return entries


def entries_of(found: Iterable[TimedEntry]) -> Entries:
    """Entries as rows."""
    return np.array(list(map(tuple, found)), ROW)


def select(entries: Entries, which: NDArray[np.bool_] | NDArray[np.intp]) -> Entries:
    """Some entries, as whole rows: four times as fast as field by field."""
    found: Entries = entries.view(_RAW)[which].view(entries.dtype)
    return found


def open_entries(entries: Entries) -> Entries:
    """The newest record of every message that is not recalled, by due time and queue offset."""
    kept = still_open(entries)
    return select(kept, np.argsort(kept["due_ms"], kind="stable"))


def still_open(entries: Entries) -> Entries:
    """The same in the log's order, at less cost."""
    recalls = entries["kind"] == EntryKind.RECALL
    if recalls.any():
        recalled = entries["origin"][recalls]
        entries = select(entries, ~(recalls | np.isin(entries["origin"], recalled)))
    if (entries["kind"] == EntryKind.COPY).any():
        by_origin = np.lexsort((entries["queue_offset"], entries["origin"]))
        origins = entries["origin"][by_origin]
        newest = by_origin[np.append(origins[1:] != origins[:-1], True)]
        entries = select(entries, np.sort(newest))
    return entries


class TimedProgress(NamedTuple):
    """How far timed messages have been delivered: three numbers that describe everything a leader has done. Pure.

    Settled (delivered, recalled, dropped) are entries due by ``due_ms`` whose queue offset is below ``offset``, and
    those due one millisecond later whose queue offset is below ``part``.

    No number ever becomes smaller, but ``part``, when ``due_ms`` grows. So a message that is stored when its time has
    passed is not settled: its queue offset is ``offset`` or more.
    """

    due_ms: int = 0
    offset: int = 0
    part: int = 0

    def settles(self, due_ms: int, queue_offset: int) -> bool:
        """Whether an entry is settled."""
        return (due_ms <= self.due_ms and queue_offset < self.offset) or (
            due_ms == self.due_ms + 1 and queue_offset < self.part
        )

    def settled(self, entries: Entries) -> NDArray[np.bool_]:
        """Which entries are settled."""
        due, offset = entries["due_ms"], entries["queue_offset"]
        passed: NDArray[np.bool_] = (due <= self.due_ms) & (offset < self.offset)
        at_the_edge: NDArray[np.bool_] = (due == self.due_ms + 1) & (offset < self.part)
        return passed | at_the_edge

    def includes(self, other: TimedProgress) -> bool:
        """Whether everything that ``other`` settles is settled, as of one leader's later progress."""
        return (
            self.due_ms >= other.due_ms
            and self.offset >= other.offset
            and (self.due_ms > other.due_ms or self.part >= other.part)
        )


NOTHING_DELIVERED: Final = TimedProgress()


ADVICE: Final = "It is built again from the log, and the messages of its hour wait for that: try again"
CHANGED: Final = "it is not what was written"
PIECE_BYTES: Final = 16_384 * ENTRY.size
"""Read at a time to find one message, or a page."""
Wanted = Callable[[Entries], NDArray[np.bool_]]
"""Which of some entries are."""


class HourExtent(NamedTuple):
    """The content of an hour's file: its size (bytes) and its checksum."""

    path: Path
    size: int
    crc: int


def read_rest(extent: HourExtent, size: int = 0, crc: int = 0) -> bytes:
    """The bytes after the first ``size`` bytes, whose checksum is ``crc``. Raises ``OSError``, ``CorruptLogError``."""
    return b"".join(_pieces(extent, size, crc, extent.size))


def length(extent: HourExtent) -> int:
    """The bytes of a file, all of which are read. Raises ``OSError``, ``CorruptLogError``."""
    return sum(map(len, _pieces(extent, 0, 0, PIECE_BYTES)))


def entries_with(extent: HourExtent, origin: int) -> Entries:
    """The entries of one message, of a file that is read piece by piece. Raises ``OSError``, ``CorruptLogError``."""
    found = [b""]
    for piece in _pieces(extent, 0, 0, PIECE_BYTES):
        rows = np.frombuffer(piece, ENTRY_ROW)
        found.append(rows[rows["origin"] == origin].tobytes())
    return decode_entries(b"".join(found))


class FirstDue(NamedTuple):
    """Entries of an hour, in the log's order; ``next_ms``: when the first that was left out is due, or -1."""

    entries: Entries
    next_ms: int = -1

    def cut(self, count: int) -> FirstDue:
        """The first ``count`` by due time, and what is due at the same millisecond as the last of these."""
        due_ms = self.entries["due_ms"]
        if len(due_ms) <= count:
            return self
        is_first = due_ms <= np.partition(due_ms, count - 1)[count - 1]
        left = due_ms[~is_first].tolist() + ([self.next_ms] if self.next_ms >= 0 else [])
        return FirstDue(select(self.entries, is_first), min(left, default=-1))


def first_due(extent: HourExtent, wanted: Wanted, count: int) -> FirstDue:
    """The wanted entries of a file, ``cut`` to ``count``.

    It is read piece by piece, so that an hour of millions takes the memory of these. Raises ``OSError``,
    ``CorruptLogError``.
    """
    found = FirstDue(decode_entries(b""))
    room = 2 * count
    for piece in _pieces(extent, 0, 0, PIECE_BYTES):
        rows = decode_entries(piece)
        found = found._replace(entries=np.concatenate((found.entries, select(rows, wanted(rows)))))
        if len(found.entries) > room:
            found = found.cut(count)
            room = len(found.entries) + count  # those of one millisecond may be many
    return found.cut(count)


def _pieces(extent: HourExtent, done: int, crc: int, size_max: int) -> Iterator[bytes]:
    with extent.path.open("rb") as opened:
        opened.seek(done)
        while done < extent.size and (piece := opened.read(min(size_max, extent.size - done))):
            done, crc = done + len(piece), crc32(piece, crc)
            if len(piece) % ENTRY.size:
                break
            yield piece
    if done != extent.size or crc != extent.crc:
        raise CorruptLogError(extent.path, 0, CHANGED, ADVICE)
