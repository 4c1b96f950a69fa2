"""A log directory as a whole: its start, and its known committed end.

The committed end is in the node's checkpoint, which is written after every flush: a directory copied from a running or
killed node, or still in use, may know less than the group. Reading stops there. A log without a checkpoint is refused,
unless ``allow_uncommitted`` selects the end of the records.

A plain log has no group: all its records count, up to the point where a crash has torn it (``tail``).
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from struct import error as struct_error
from typing import Final

from dledger.errors import CorruptLogError
from dledger.layout import BLANK_MAGIC, ENTRY_HEADER_BYTES
from dledger.store.durable_state import LogCheckpoint, Mark, read_checkpoint
from dledger.store.format import BLANK
from dledger.store.java_files import java_committed
from dledger.types import NO_INDEX, NOOP_CHANNEL, Magic
from dledger_spark.decode import Content, WalkEnd, walk
from dledger_spark.directory.files import CHECKPOINT, INDEX, PLAIN_LOG, IndexFiles, LogSegment, find
from dledger_spark.directory.tail import records_end
from dledger_spark.errors import BrokenRecordError, LogDirectoryError
from rocketstore.message.record import BLANK as MESSAGE_HEAD
from rocketstore.message.record import MESSAGE_MAGICS
from rocketstore.store.directory import UNKNOWN, decode_checkpoint

_LOOKED_AT: Final = 64
"""How many entries to examine to determine the log's contents: those that start terms are inconclusive."""


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """A log on disk, as of when it was opened."""

    path: Path
    segments: tuple[LogSegment, ...]
    index: IndexFiles | None
    begin: int
    """The position of the first kept record."""
    end: int
    """The end of the last readable record."""
    committed: int
    """The last readable entry; -1 for a plain log, and if there is none."""
    boundary: tuple[int, int] | None = None
    """The start of the entries according to the checkpoint, and the chain CRC that the first one continues.

    None if it has none; the start of an imported log is unknown, and 0 there.
    """

    def segment_at(self, position: int) -> LogSegment | None:
        """The segment containing a position."""
        number = bisect_right(self.segments, position, key=lambda one: one.base) - 1
        found = self.segments[number] if number >= 0 else None
        return found if found is not None and position < found.end else None

    def content(self) -> Content:
        """The contents of records, determined from the first ones."""
        for segment in self.segments:
            if segment.framing == "plain":
                return "message"
            found = _content(segment, max(self.begin, segment.base), min(self.end, segment.end))
            if found is not None:
                return found
        return "entry"


def open_directory(path: str | Path, *, allow_uncommitted: bool = False) -> LogDirectory:
    """Open a log directory. Raises ``LogDirectoryError``, ``BrokenRecordError``, ``OSError``."""
    path = Path(path)
    durable = _plain_durable(path)  # before listing files: it must not refer to newer ones
    places = find(path)
    segments = places.segments
    if not segments:
        return LogDirectory(path, (), None, 0, 0, NO_INDEX)
    replicated = next((one for one in segments if one.framing == "entry"), None)
    if replicated is None:
        return _plain_log(path, segments, durable, incomplete=allow_uncommitted)
    index = IndexFiles(places.node / INDEX) if places.node is not None else None
    begin = segments[0].base
    checkpoint = _checkpoint(places.node)
    flushed = checkpoint.flushed if isinstance(checkpoint, LogCheckpoint) else None
    if flushed is not None and flushed.position > segments[-1].end:
        segments = find(path).segments  # another one may have been started meanwhile
    if isinstance(checkpoint, LogCheckpoint):
        begin = max(begin, checkpoint.begin.position) if segments[0] is replicated else begin
    elif segments[0] is replicated:
        begin += _leading_blank(replicated)
    committed = checkpoint.committed if isinstance(checkpoint, LogCheckpoint) else checkpoint
    log = LogDirectory(path, segments, index, begin, segments[-1].end, NO_INDEX)
    if allow_uncommitted:
        committed, end = _written(log, flushed)
    elif committed is None:
        raise LogDirectoryError(
            f"{path} has no checkpoint to tell what is committed: copy the node's whole directory, or set "
            "allowUncommitted=true to read all records"
        )
    elif flushed is not None and committed == flushed.index and flushed.position <= segments[-1].end:
        end = flushed.position
    elif committed == NO_INDEX:
        end = replicated.base
    else:
        end = _end_of(log, committed)
    kept = tuple(one for one in segments if one.base < end and one.end > begin)
    mark = checkpoint.begin if isinstance(checkpoint, LogCheckpoint) else None
    boundary = (mark.position, mark.chain_crc) if mark is not None and mark.chain_crc else None
    return LogDirectory(path, kept, index, begin, max(begin, end), committed, boundary)


def _leading_blank(segment: LogSegment) -> int:
    """The length of a blank at the start: Java's DLedger 0.4 blanks out what a reset drops."""
    magic, size = BLANK.unpack(segment.read(segment.base, BLANK.size).ljust(BLANK.size, b"\0"))
    return int(size) if magic == BLANK_MAGIC and 0 < size < segment.size else 0


def _checkpoint(node: Path | None) -> LogCheckpoint | int | None:
    """Our checkpoint, or the commit index in Java's; None if there is none. Raises ``LogDirectoryError``."""
    if node is None or not (node / CHECKPOINT).is_file():
        return None
    try:
        return read_checkpoint(node / CHECKPOINT)
    except (CorruptLogError, struct_error) as error:
        committed = java_committed(node / CHECKPOINT)
        if committed is None:
            raise LogDirectoryError(f"{node / CHECKPOINT} is unreadable: {error}") from error
        return committed


def locate(log: LogDirectory, index: int) -> tuple[int, int] | None:
    """The start and end of an entry; None if the log lacks it. Uses the index, otherwise walks one segment."""
    if log.index is not None:
        place = log.index.place(index)
        segment = log.segment_at(place[0]) if place is not None else None
        if place is not None and segment is not None and segment.framing == "entry":
            header = segment.header(place[0])
            if header is not None and header.index == index and header.size == place[1]:
                return place[0], place[0] + place[1]
    segments = [one for one in log.segments if one.framing == "entry"]
    number = bisect_right(segments, index, key=lambda one: first_index_of(log, one)) - 1
    return _walk_to(log, segments[number], index) if number >= 0 else None


def first_index_of(log: LogDirectory, segment: LogSegment) -> int:
    """The index of a segment's first entry. Raises ``BrokenRecordError`` if it does not start with an entry."""
    start = max(segment.base, log.begin)
    header = segment.header(start)
    if header is None:
        raise BrokenRecordError(f"segment {segment.name}, offset {start - segment.base}: no entry starts here")
    return header.index


def _walk_to(log: LogDirectory, segment: LogSegment, index: int) -> tuple[int, int] | None:
    start = max(segment.base, log.begin)
    first = first_index_of(log, segment)
    with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, "entry", start - segment.base)
        if index - first >= len(found.starts):
            return None
        begin = int(found.starts[index - first])
        _, size = BLANK.unpack_from(mapped, begin)
    return segment.base + begin, segment.base + begin + size


def _end_of(log: LogDirectory, committed: int) -> int:
    place = locate(log, committed)
    if place is None:
        raise LogDirectoryError(
            f"{log.path} records entry {committed} as committed, but does not hold it: the copy is incomplete"
        )
    return place[1]


def _written(log: LogDirectory, flushed: Mark | None) -> tuple[int, int]:
    """The last whole entry and its end, committed or not. Damage in the flushed part does not end the log."""
    segment = log.segments[-1]
    durable = None if flushed is None else min(flushed.position, segment.end)
    starts, end = records_end(segment, max(segment.base, log.begin), durable)
    number = int(starts.searchsorted(end)) - 1
    last = segment.header(int(starts[number])) if number >= 0 else None
    index = last.index if last is not None else NO_INDEX
    if flushed is not None and end >= flushed.position:  # the last record may be the damaged one
        index = max(index, flushed.index)
    return index, end


def _plain_log(path: Path, segments: tuple[LogSegment, ...], durable: int | None, *, incomplete: bool) -> LogDirectory:
    """A plain broker's log. ``incomplete``: its end may be missing. Raises ``LogDirectoryError``."""
    last = segments[-1]
    if durable is not None and durable > last.end and not incomplete:
        raise LogDirectoryError(
            f"{path} ends at {last.end} with segment {last.name}, but everything before {durable} was durable: "
            "the copy is incomplete, or a file was lost; set allowUncommitted=true to read what is there"
        )
    _, end = records_end(last, last.base, durable)
    return LogDirectory(path, segments, None, segments[0].base, end, NO_INDEX)


def _plain_durable(path: Path) -> int | None:
    """The durable end of a plain log according to the broker's checkpoint; None if unknown."""
    root = path.parent if path.name == PLAIN_LOG else path
    try:
        known = decode_checkpoint((root / CHECKPOINT).read_bytes()).replay_from
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if known == UNKNOWN else known


def _content(segment: LogSegment, start: int, end: int) -> Content | None:
    """The contents of the first entry that is not a NOOP; None if all examined ones are."""
    position = start
    for _ in range(_LOOKED_AT):
        if position >= end:
            return None
        header = segment.header(position)
        if header is None:
            return None
        if header.magic == Magic.NORMAL and header.channel != NOOP_CHANNEL:
            head = segment.read(position + ENTRY_HEADER_BYTES, MESSAGE_HEAD.size)
            size, magic = MESSAGE_HEAD.unpack(head.ljust(MESSAGE_HEAD.size, b"\0"))
            return "message" if magic in MESSAGE_MAGICS and size == header.body_length else "entry"
        position += header.size
    return None


def walk_end_problem(kind: WalkEnd, reason: str) -> str:
    """Why a walk must not have ended as it did; empty if it may."""
    if kind in (WalkEnd.LIMIT, WalkEnd.BLANK):
        return ""
    if kind is WalkEnd.CUT:
        return "a record extends beyond the end of the data"
    return reason or "zeros where a record was expected"
