"""The files of timed messages, one for each hour in which some are due: entries, files, and the list of them.

A record of ``TIMED_TOPIC`` is an entry of an hour's file. A message is known by its *origin*, the queue offset of its
first record. Its other records are copies that were stored before the previous one expired (the newest counts), and its
recall, after which none does. The topic has one queue, so queue offsets are in the log's order; unlike positions, they
survive an export of the log.

Pure, but for the readers, which believe nothing that is not what was written. The list of files says what is durable of
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.errors import CorruptLogError
from dledger.records import RecordLayout
from dledger.store.fs import TMP_SUFFIX
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
_ENTRY_ROW: Final = ENTRY.dtype()
ROW: Final = _ENTRY_ROW.newbyteorder("=")
_RAW: Final = np.dtype((np.void, ENTRY.size))
_PACK: Final = ENTRY.struct().pack

Entries = NDArray[np.void]
"""Rows of ``_ENTRY_ROW``, or of ``ROW`` in memory, in the log's order."""


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
    entries: Entries = np.frombuffer(data, _ENTRY_ROW, whole).astype(ROW)
    return entries


def entries_of(found: Iterable[TimedEntry]) -> Entries:
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
        rows = np.frombuffer(piece, _ENTRY_ROW)
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


HOURS_FILE: Final = "hours"
SECONDS: Final = HOUR_MS // 1000
_DIGITS: Final = 10
_MAGIC: Final = b"RSH1"
_HEAD: Final = Struct(">4sI")
_HOUR: Final = Struct(">qqI")
_CRC: Final = Struct(">I")
_NEVER_NEEDED: Final = 1 << 62
"""A position and a time that no record has."""
_INDEXED_MAX: Final = 250_000
"""Recalls known by heart, of all hours; about 100 bytes each."""


class HourMark(NamedTuple):
    """The durable part of an hour's file: how many entries, and their CRC32."""

    hour: int
    entries: int
    crc: int


def encode_hours(marks: Sequence[HourMark]) -> bytes:
    """The content of ``hours``."""
    content = _HEAD.pack(_MAGIC, len(marks)) + b"".join(_HOUR.pack(*one) for one in marks)
    return content + _CRC.pack(crc32(content))


def decode_hours(content: bytes) -> list[HourMark] | None:
    """The same, read; None if it is damaged."""
    end = len(content) - _CRC.size
    if end < _HEAD.size or _CRC.unpack_from(content, end)[0] != crc32(content[:end]):
        return None
    magic, count = _HEAD.unpack_from(content)
    if magic != _MAGIC or _HEAD.size + count * _HOUR.size != end:
        return None
    return [HourMark(*one) for one in _HOUR.iter_unpack(content[_HEAD.size : end])]


def hour_path(directory: Path, hour: int) -> Path:
    return directory / f"{hour:0{_DIGITS}d}"


def hour_of(path: Path) -> int | None:
    """The hour of a file, or of one that was to replace it; None for a file that is none of ours."""
    is_ours = len(path.stem) == _DIGITS and path.stem.isascii() and path.stem.isdigit()
    return int(path.stem) if is_ours and path.suffix in ("", TMP_SUFFIX) else None


class HourCounts(NamedTuple):
    """The sums over all entries of an hour's file."""

    at_second: NDArray[np.int32]
    bytes_open: int
    oldest: int
    oldest_ms: int


def count_hour(entries: Entries) -> HourCounts:
    """Of the messages that wait."""
    messages = still_open(entries)
    at_second = np.bincount(messages["due_ms"] // 1000 % SECONDS, minlength=SECONDS).astype(np.int32)
    if not len(messages):
        return HourCounts(at_second, 0, _NEVER_NEEDED, _NEVER_NEEDED)
    oldest, oldest_ms = int(messages["position"].min()), int(messages["store_timestamp"].min())
    return HourCounts(at_second, int(messages["size"].sum()), oldest, oldest_ms)


class HourFile:
    """One hour's entries: their number and checksum, and what is known of them without reading."""

    __slots__ = (
        "at_second",
        "bytes_open",
        "crc",
        "entries",
        "is_dirty",
        "is_inexact",
        "last",
        "oldest",
        "oldest_ms",
        "path",
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = 0
        self.crc = 0
        self.last = -1
        """The queue offset of the last record."""
        self.oldest = _NEVER_NEEDED
        """No record before this position is needed,"""
        self.oldest_ms = _NEVER_NEEDED
        """nor one stored before this time."""
        self.bytes_open = 0
        self.at_second = np.zeros(SECONDS, np.int32)
        """How many messages are due in each second of the hour."""
        self.is_dirty = False
        self.is_inexact = False
        """Whether a copy or a recall came since the last count, so that less may be needed."""

    @property
    def extent(self) -> HourExtent:
        """Its content as of now."""
        return HourExtent(self.path, self.entries * ENTRY.size, self.crc)

    def note(self, entry: TimedEntry, data: bytes) -> None:
        self._count(entry)
        self.crc = crc32(data, self.crc)
        if entry.kind != EntryKind.RECALL and self.oldest == _NEVER_NEEDED:
            self.oldest, self.oldest_ms = entry.position, entry.store_timestamp
        self.entries += 1
        self.last = entry.queue_offset
        self.is_dirty = True
        self.is_inexact = self.is_inexact or entry.kind != EntryKind.MESSAGE

    def _count(self, entry: TimedEntry) -> None:
        sign = {EntryKind.MESSAGE: 1, EntryKind.RECALL: -1}.get(EntryKind(entry.kind), 0)
        self.at_second[entry.due_ms // 1000 % SECONDS] += sign
        self.bytes_open += entry.size * sign

    def take_over(self, entries: Entries, crc: int) -> None:
        """The whole file's entries, and their checksum."""
        self.entries, self.crc = len(entries), crc
        self.last = int(entries["queue_offset"][-1]) if len(entries) else -1
        self.set_counts(count_hour(entries), len(entries))

    def set_counts(self, counted: HourCounts, entries: int) -> None:
        """Counted from the first ``entries``; if there are more by now, only what these cannot change counts."""
        if entries == self.entries:
            self.at_second, self.bytes_open = counted.at_second, counted.bytes_open
            self.is_inexact = False
        if entries == self.entries or counted.oldest != _NEVER_NEEDED:
            self.oldest, self.oldest_ms = counted.oldest, counted.oldest_ms


class RecallIndex:
    """Which messages were recalled, by hour, in memory, so that a recall need not read the file of its hour. Pure.

    Bounded: an hour whose recalls would be too many is not known from then on, and its file must be read.
    """

    def __init__(self, indexed_max: int = _INDEXED_MAX) -> None:
        self._indexed_max = indexed_max
        self._size = 0
        self._known: dict[int, set[int]] = {}
        self._overflown: set[int] = set()

    def __len__(self) -> int:
        return self._size

    def add(self, hour: int, origin: int) -> None:
        """A message of this hour was recalled."""
        if hour in self._overflown:
            return
        known = self._known.setdefault(hour, set())
        if origin in known:
            return
        if self._size >= self._indexed_max:
            self.forget(hour)
            self._overflown.add(hour)
            return
        known.add(origin)
        self._size += 1

    def replace(self, hour: int, origins: Iterable[int]) -> None:
        """These are all recalls of an hour."""
        self.forget(hour)
        for origin in origins:
            self.add(hour, origin)

    def forget(self, hour: int) -> None:
        """An hour is over."""
        self._size -= len(self._known.pop(hour, ()))
        self._overflown.discard(hour)

    def is_recalled(self, hour: int, origin: int) -> bool | None:
        """None: the file of the hour knows."""
        return None if hour in self._overflown else origin in self._known.get(hour, ())


class HourRepair:
    """One hour's file of timed messages while it is built again from the log, because it was damaged. Pure.

    ``known`` gets the entries of records before ``until`` (a queue offset), ``added`` those that come meanwhile.

    The caller serializes: one thread adds to ``known``, dispatch to ``added`` under the files' lock.
    """

    def __init__(self, hour: int, until: int) -> None:
        self.hour: Final = hour
        self.until: Final = until
        self.known = bytearray()
        self.added: list[TimedEntry] = []

    def take(self, entries: Iterable[TimedEntry]) -> None:
        """Entries of the log, in its order; those of other hours are left out."""
        for entry in entries:
            if entry.hour == self.hour and entry.queue_offset < self.until:
                self.known += entry.encode()
