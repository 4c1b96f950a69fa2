"""One hour's file of timed messages, and the list of all such files with what is durable of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.store.fs import TMP_SUFFIX
from rocketstore.timer.entries import ENTRY, HOUR_MS, Entries, EntryKind, HourExtent, TimedEntry, still_open

HOURS_FILE: Final = "hours"
SECONDS: Final = HOUR_MS // 1000
_DIGITS: Final = 10
_MAGIC: Final = b"RSH1"
_HEAD: Final = Struct(">4sI")
_HOUR: Final = Struct(">qqI")
_CRC: Final = Struct(">I")
NEVER_NEEDED: Final = 1 << 62
"""A position and a time that no record has."""
INDEXED_MAX: Final = 250_000
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
    """An hour's file."""
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
        return HourCounts(at_second, 0, NEVER_NEEDED, NEVER_NEEDED)
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
        self.oldest = NEVER_NEEDED
        """No record before this position is needed,"""
        self.oldest_ms = NEVER_NEEDED
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
        """One entry more."""
        self._count(entry)
        self.crc = crc32(data, self.crc)
        if entry.kind != EntryKind.RECALL and self.oldest == NEVER_NEEDED:
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
        if entries == self.entries or counted.oldest != NEVER_NEEDED:
            self.oldest, self.oldest_ms = counted.oldest, counted.oldest_ms


class RecallIndex:
    """Which messages were recalled, by hour, in memory, so that a recall need not read the file of its hour. Pure.

    Bounded: an hour whose recalls would be too many is not known from then on, and its file must be read.
    """

    def __init__(self, indexed_max: int = INDEXED_MAX) -> None:
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
