"""The files of a log directory, and the kind of records in each segment.

A torn record ends the log in its last segment, a damaged one does not. The two look alike. Everything that a checkpoint
calls durable was intact once: damage before that is left to the readers, which report it. After it, the first
incomplete record ends the log, as when a broker starts. Without such a checkpoint, it ends the log only if no complete,
later record follows: an earlier one is a remnant of a truncation without zeroing. The found end is the end of a record
or, if there is damage that cannot be skipped, some position after it: a walk to that position fails, and reports where
it stopped.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dledger.records import BLANK_MAGIC as ENTRY_BLANK_MAGIC
from dledger.records import ENTRY, ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES
from dledger.store.format import BLANK as ENTRY_BLANK
from dledger.store.format import HEADER, UNITS, EntryHeader, is_magic, parse_segment_name
from dledger.types import Magic
from dledger.values import MIB
from dledger_spark.decode import Framing, RecordWalk, WalkEnd, walk
from dledger_spark.decode.layout import Ints
from dledger_spark.errors import LogDirectoryError
from rocketstore.message.record import (
    BLANK,
    BLANK_MAGIC,
    HEAD_V4,
    MESSAGE_MAGIC,
    MESSAGE_MAGIC_V2,
    MESSAGE_MAGICS,
    OVERHEAD,
    place_of,
    store_timestamp,
)
from rocketstore.message.scan import scan_records

DATA: Final = "data"
INDEX: Final = "index"
CHECKPOINT: Final = "checkpoint"
PLAIN_LOG: Final = "commitlog"
NODE_PREFIX: Final = "dledger-"
_PLAIN_MAGICS: Final = MESSAGE_MAGICS | {BLANK_MAGIC}
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class LogSegment:
    """One non-empty file of the log. ``base`` is the position of its first byte."""

    path: Path
    base: int
    size: int
    framing: Framing

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.base + self.size

    def read(self, position: int, length: int) -> bytes:
        """Up to ``length`` bytes from a position on. Raises ``OSError``."""
        with self.path.open("rb") as file:
            file.seek(position - self.base)
            return file.read(max(0, min(length, self.end - position)))

    def header(self, position: int) -> EntryHeader | None:
        """The header of the entry starting there; None if there is none."""
        head = self.read(position, ENTRY_HEADER_BYTES)
        if len(head) < ENTRY_HEADER_BYTES:
            return None
        header = EntryHeader(*HEADER.unpack(head))
        return header if is_magic(header.magic) and header.position == position else None


@dataclass(frozen=True, slots=True)
class LogPlaces:
    """Paths of a log's files: a plain log, a node's directory, or both after an upgrade."""

    segments: tuple[LogSegment, ...]
    node: Path | None
    """The directory with ``index`` and ``checkpoint``; None if there is no replicated log, or only its data exist."""


def find(path: Path) -> LogPlaces:
    """The segments below a path. Raises ``LogDirectoryError`` if it is not a log directory."""
    if not path.is_dir():
        raise LogDirectoryError(
            f"{path} is not a directory{' on this machine' if not path.exists() else ''}: name a node's "
            "directory, a broker's storePathRootDir, or a directory of segments"
        )
    own = _segments(path)
    if own:
        node = path.parent if path.name == DATA and (path.parent / CHECKPOINT).is_file() else None
        return LogPlaces(_checked(path, own), node)
    if (path / DATA).is_dir():
        return LogPlaces(_checked(path, _segments(path / DATA)), path)
    plain = _segments(path / PLAIN_LOG) if (path / PLAIN_LOG).is_dir() else []
    nodes = sorted(one for one in path.glob(f"{NODE_PREFIX}*") if (one / DATA).is_dir())
    if len(nodes) > 1:
        names = ", ".join(one.name for one in nodes[:_SHOWN])
        raise LogDirectoryError(f"{path} holds the logs of several nodes ({names}): name one of them, they are copies")
    node = nodes[0] if nodes else None
    if node is None and not (path / PLAIN_LOG).is_dir():
        raise LogDirectoryError(
            f"{path} holds no log: neither segments (files named by 20 digits), nor {DATA}/, {PLAIN_LOG}/ or "
            f"{NODE_PREFIX}<node>/"
        )
    return LogPlaces(_checked(path, plain + (_segments(node / DATA) if node else [])), node)


def _segments(directory: Path) -> list[LogSegment]:
    """The non-empty segments, oldest first."""
    found: list[LogSegment] = []
    for entry in os.scandir(directory):
        base = parse_segment_name(entry.name)
        if base is None or not entry.is_file():
            continue
        path = Path(entry.path)
        framing = _framing(path)
        if framing is not None:
            found.append(LogSegment(path, base, entry.stat().st_size, framing))
    return sorted(found, key=lambda one: one.base)


def _framing(path: Path) -> Framing | None:
    """The kind of records in a segment; None if it is empty. Raises ``LogDirectoryError``."""
    with path.open("rb") as file:
        head = file.read(BLANK.size)
    if not any(head):
        return None
    head = head.ljust(BLANK.size, b"\0")
    if BLANK.unpack(head)[1] in _PLAIN_MAGICS:  # in an entry, this field is the size, which is never negative
        return "plain"
    magic = ENTRY_BLANK.unpack(head)[0]
    if is_magic(magic) or magic == ENTRY_BLANK_MAGIC:
        return "entry"
    raise LogDirectoryError(f"{path} starts with neither an entry nor a message: it is not a segment, or it is damaged")


def _checked(path: Path, segments: Sequence[LogSegment]) -> tuple[LogSegment, ...]:
    """The segments, which must be contiguous. Raises ``LogDirectoryError``."""
    for before, after in pairwise(segments):
        if after.base < before.end:
            raise LogDirectoryError(
                f"segments {before.path} and {after.path} overlap, so they belong to different logs: name the "
                "directory of one of them"
            )
        if after.base > before.end:
            raise LogDirectoryError(
                f"{path}: a segment is missing: {before.name} ends at {before.end}, the next one is {after.name}"
            )
        if before.framing == "entry" and after.framing == "plain":
            raise LogDirectoryError(
                f"{after.path} belongs to a plain log, but follows the segments of a replicated one"
            )
    return tuple(segments)


class IndexFiles:
    """The index of a node's log: 32 bytes per entry, in files named by the position of their first byte."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: list[tuple[int, int, Path]] = []
        if directory.is_dir():
            for entry in os.scandir(directory):
                base = parse_segment_name(entry.name)
                if base is not None and entry.is_file():
                    self._files.append((base, entry.stat().st_size, Path(entry.path)))
        self._files.sort()

    def units(self, first_index: int, count: int) -> NDArray[np.void]:
        """Up to ``count`` units from an entry on; fewer if a file is missing or short. Raises ``OSError``."""
        parts: list[NDArray[np.void]] = []
        at, left = first_index * INDEX_UNIT_BYTES, count
        for base, size, path in self._files:
            if not left:
                break
            if base <= at < base + size:
                wanted = min(left, (base + size - at) // INDEX_UNIT_BYTES)
                part = np.fromfile(path, UNITS, wanted, offset=at - base)
                parts.append(part)
                at += len(part) * INDEX_UNIT_BYTES
                left -= len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, UNITS)

    def place(self, index: int) -> tuple[int, int] | None:
        """The position and size of one entry; None if the index does not have it."""
        if index < 0:
            return None
        units = self.units(index, 1)
        if not len(units) or int(units["index"][0]) != index or not is_magic(int(units["magic"][0])):
            return None
        return int(units["position"][0]), int(units["size"][0])


_CHECKED_BYTES: Final = 4 * MIB
"""How much of the end is verified by checksums: as much as one flush may leave torn."""
_SEARCHED_BYTES: Final = 4 * MIB
"""How much is read at a time when searching for a record."""
_MAGIC_BYTES: Final = 4
_ENTRY_MAGICS: Final = tuple(int(one).to_bytes(4, "big") for one in Magic)
_MESSAGE_MAGICS: Final = tuple(one.to_bytes(4, "big", signed=True) for one in (MESSAGE_MAGIC, MESSAGE_MAGIC_V2))


def records_end(segment: LogSegment, start: int, durable: int | None) -> tuple[Ints, int]:
    """The starts of a segment's records found by a walk from ``start``, and the end of the log.

    ``durable``: the position up to which everything is known to have been durable; None if unknown.
    """
    with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, segment.framing, start - segment.base)
    starts, end = found.starts + segment.base, found.end + segment.base
    good = _good_end(segment, starts, end, durable)
    broken = _unexpected(segment, found)
    if durable is None:
        good = _end_by_what_follows(segment, starts, good, end, broken=broken)
    elif good < durable and (good < end or broken):
        good = min(durable, segment.end)
    return starts, good


def _unexpected(segment: LogSegment, found: RecordWalk) -> bool:
    """Whether the walk did not end as it does in a full segment."""
    is_full = found.kind is WalkEnd.BLANK and segment.base + found.end + found.needed == segment.end
    return found.kind is not WalkEnd.LIMIT and not is_full


def _end_by_what_follows(segment: LogSegment, starts: Ints, good: int, end: int, *, broken: bool) -> int:
    """The log's end if the durable position is unknown; ``broken``: the walk did not end as it should."""
    last = int(starts[-1]) if len(starts) else None
    if broken and _whole_record_behind(segment, end, last) is not None and not _is_whole(segment, end):
        return segment.end  # if the record is intact now, it was still being written during the walk
    if good == end:
        return end
    number = int(starts.searchsorted(good))
    following = _whole_record_behind(segment, good, int(starts[number - 1]) if number else None)
    if following is None:
        return good
    number = int(starts.searchsorted(following, side="right")) - 1
    return end if int(starts[number]) != good else following  # inside the record, whose length must then be wrong


def _good_end(segment: LogSegment, starts: Ints, end: int, durable: int | None) -> int:
    """The start of the first record that fails its checksums; only the end of the log is verified."""
    if not len(starts):
        return end
    first = max(0, int(starts.searchsorted(end - _CHECKED_BYTES)) - 1)
    if durable is not None:
        first = max(first, int(starts.searchsorted(durable, side="right")) - 1)
    at = int(starts[first])
    data = segment.read(at, end - at)
    if segment.framing == "plain":
        return at + scan_records(data, at, check_crc=True).consumed
    view = memoryview(data)
    for start in starts[first:].tolist():
        if not _whole_entry(view[start - at :], start):
            return int(start)
    return end


def _whole_entry(data: memoryview, position: int) -> bool:
    """Whether an intact entry starts there."""
    if len(data) < ENTRY_HEADER_BYTES:
        return False
    header = EntryHeader(*HEADER.unpack_from(data))
    if not is_magic(header.magic) or (header.position, header.size) != (position, header.body_length + HEADER.size):
        return False
    body = data[ENTRY_HEADER_BYTES : header.size]
    unchecked = header.chain_crc == 0 == header.body_crc  # Java's
    return len(body) == header.body_length and (unchecked or crc32c(body) == header.body_crc)


def _whole_record_behind(segment: LogSegment, position: int, last: int | None) -> int | None:
    """The start of the first intact record anywhere after a position that was written after the ``last`` one."""
    plain = segment.framing == "plain"
    magics, layout, own = (_MESSAGE_MAGICS, HEAD_V4, "physical_offset") if plain else (_ENTRY_MAGICS, ENTRY, "position")
    magic_at, own_at, own_end = layout.at("magic"), layout.at(own), layout.behind(own)
    for base, data in _stretches(segment, position + 1):
        if data.count(0) == len(data):
            continue
        for place in sorted(place for magic in magics for place in _places(data, magic)):
            start = place - magic_at
            at = base + start
            told = data[start + own_at : start + own_end]  # every record contains its own position
            if at <= position or (len(told) == own_end - own_at and int.from_bytes(told, "big") != at):
                continue
            if _is_whole(segment, at) and (last is None or _is_later(segment, at, last)):
                return at
    return None


def _is_later(segment: LogSegment, position: int, last: int) -> bool:
    """Whether a record was written after another one at a lower position."""
    if segment.framing == "plain":
        old, new = (store_timestamp(segment.read(one, OVERHEAD)) for one in (last, position))
        return old <= new
    before, after = segment.header(last), segment.header(position)
    return before is not None and after is not None and before.index < after.index and before.term <= after.term


def is_whole_entry(segment: LogSegment, position: int) -> bool:
    """Whether an intact entry of a replicated log starts there."""
    header = segment.header(position)
    return header is not None and _whole_entry(memoryview(segment.read(position, header.size)), position)


def _is_whole(segment: LogSegment, position: int) -> bool:
    if segment.framing == "plain":
        head = segment.read(position, OVERHEAD)
        place = place_of(head, position) if len(head) == OVERHEAD else None
        if place is None or place.size < OVERHEAD:
            return False
        return bool(scan_records(segment.read(position, place.size), position, check_crc=True).heads)
    return is_whole_entry(segment, position)


def _places(data: bytes, magic: bytes) -> Iterator[int]:
    at = data.find(magic)
    while at >= 0:
        yield at
        at = data.find(magic, at + 1)


def _stretches(segment: LogSegment, position: int) -> Iterator[tuple[int, bytes]]:
    """The rest of a segment without holes, in parts with their positions; they overlap by less than a magic number."""
    with segment.path.open("rb") as file:
        at, end = position - segment.base, segment.size
        while at < end:
            try:
                at = max(at, os.lseek(file.fileno(), at, os.SEEK_DATA))
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole follows
                    return
                raise
            data = os.pread(file.fileno(), min(_SEARCHED_BYTES, end - at), at)
            if not data:
                return
            yield segment.base + at, data
            if at + len(data) >= end:
                return
            at += max(1, len(data) - _MAGIC_BYTES + 1)
