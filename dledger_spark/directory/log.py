"""A log directory as a whole: its start, and its known committed end.

The committed end is in the node's checkpoint, which is written after every flush: a directory copied from a running or
killed node, or still in use, may know less than the group. Reading stops there. A log without a checkpoint is refused,
unless ``allow_uncommitted`` selects the end of the records.

A plain log has no group: all its records count, up to the point where a crash has torn it (``files``).

The range that is read is requested by index or by time.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import error as struct_error
from typing import Final

from dledger.errors import CorruptLogError
from dledger.records import BLANK_MAGIC, ENTRY_HEADER_BYTES
from dledger.store.durable_state import LogCheckpoint, Mark, read_checkpoint
from dledger.store.format import BLANK
from dledger.store.java_files import java_committed
from dledger.types import NO_INDEX, NOOP_CHANNEL, Magic
from dledger_spark.decode import Content, WalkEnd, walk
from dledger_spark.directory.files import (
    CHECKPOINT,
    INDEX,
    PLAIN_LOG,
    IndexFiles,
    LogSegment,
    find,
    is_whole_entry,
    records_end,
)
from dledger_spark.errors import BrokenRecordError, DataLossError, LogDirectoryError, OptionError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions
from rocketstore.message.record import BLANK as MESSAGE_HEAD
from rocketstore.message.record import HEAD, MESSAGE_MAGICS, store_timestamp
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


_HEAD_BYTES = ENTRY_HEADER_BYTES + max(head.size for head in HEAD.values())
_LATER = 1 << 63
"""Later than any store time: that of entries after which there is no message."""


def range_of(log: LogDirectory, options: ReadOptions) -> tuple[int, int]:
    """The start and end positions selected by the options; each is the start of a record, or the log's end.

    Raises ``OptionError``, ``DataLossError``, ``BrokenRecordError``.
    """
    begin, end = log.begin, log.end
    if options.starting == LATEST:
        raise OptionError("option startingOffsets: latest is for streams only; a batch that starts there is empty")
    if options.starting is not None and options.starting != EARLIEST:
        begin = _position_of(log, options.starting, options)
    elif options.starting_ms is not None:
        begin = _position_at(log, options.starting_ms)
    if options.ending is not None and options.ending != LATEST:
        end = _position_of(log, options.ending, options)
    elif options.ending_ms is not None:
        end = _position_at(log, options.ending_ms)
    return begin, max(begin, end)


@dataclass(frozen=True, slots=True)
class TimeBounds:
    """Store times in ms: from one on, and before another; None: unbounded."""

    since_ms: int | None = None
    until_ms: int | None = None

    def both(self, other: TimeBounds) -> TimeBounds:
        """The times within both."""
        since = [one for one in (self.since_ms, other.since_ms) if one is not None]
        until = [one for one in (self.until_ms, other.until_ms) if one is not None]
        return TimeBounds(max(since, default=None), min(until, default=None))


def within_times(log: LogDirectory, begin: int, end: int, times: TimeBounds) -> tuple[int, int]:
    """The part of a range that holds all its messages of these times.

    That is all of it where a search cannot be relied on: in logs whose times may go back (plain ones, and those that
    RocketMQ wrote, whose entries have no checksums), and where an entry that the search meets is damaged.
    """
    if times == TimeBounds() or not _times_ascend(log):
        return begin, end
    try:
        if times.since_ms is not None:
            begin = max(begin, _position_at(log, times.since_ms, verified=True))
        if times.until_ms is not None:
            end = min(end, _position_at(log, times.until_ms, verified=True))
    except BrokenRecordError:
        return begin, end
    return min(begin, end), end


def _times_ascend(log: LogDirectory) -> bool:
    if not log.segments or log.segments[0].framing == "plain":
        return False
    first = log.segments[0].header(max(log.segments[0].base, log.begin))
    return first is not None and (first.chain_crc, first.body_crc) != (0, 0)


def _position_of(log: LogDirectory, index: int, options: ReadOptions) -> int:
    """The start of an entry. Raises ``OptionError``, ``DataLossError``."""
    first_segment = next((one for one in log.segments if one.framing == "entry"), None)
    if first_segment is None:
        if log.segments:
            raise OptionError("a plain commit log has no indexes: use startingTimestamp and endingTimestamp")
        return log.end
    first, following = first_index_of(log, first_segment), log.committed + 1
    if first <= index < following:
        place = locate(log, index)
        if place is not None:
            return place[0]
    if options.fail_on_data_loss and index != following:
        kept = f"entries {first} to {log.committed} are kept and committed in {log.path}"
        lost = f"entry {index} was requested" if index >= following else f"entries {index} to {first - 1} are gone"
        raise DataLossError(f"{lost}: {kept}; set failOnDataLoss=false to read what is there")
    return log.end if index >= following else max(first_segment.base, log.begin)


def _position_at(log: LogDirectory, time_ms: int, *, verified: bool = False) -> int:
    """The start of the first message stored at that time or later; the log's end if there is none.

    ``verified``: raises ``BrokenRecordError`` for a damaged entry on the way.

    Store times increase along the log. (A new leader whose clock is behind may start slightly earlier; the binary
    search then finds one of the positions where the time is crossed.)
    """

    def time_at(number: int, position: int) -> int:
        """As of the next message, in whichever segment: an entry without one would seem older than those before it."""
        for following in range(number, len(log.segments)):
            found = _time_at(log, log.segments[following], position, verified=verified)
            if found is not None:
                return found
            position = log.segments[following].end
        return _LATER

    numbers = range(len(log.segments))
    number = bisect_left(numbers, time_ms, key=lambda one: time_at(one, max(log.segments[one].base, log.begin)))
    if number > 0:
        found = _in_segment(log, number - 1, time_ms, time_at)
        if found is not None:
            return found
    return max(log.segments[number].base, log.begin) if number < len(log.segments) else log.end


def _in_segment(log: LogDirectory, number: int, time_ms: int, time_at: Callable[[int, int], int]) -> int | None:
    """The first such message in a segment whose first message is older; None if there is none."""
    segment = log.segments[number]
    try:
        return _by_index(log, number, time_ms, time_at)
    except LookupError:
        pass
    start, stop = max(segment.base, log.begin), min(segment.end, log.end)
    with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, segment.framing, start - segment.base, stop - segment.base)
    starts = [int(one) + segment.base for one in found.starts]
    place = bisect_left(starts, time_ms, key=lambda one: time_at(number, one))
    return starts[place] if place < len(starts) else None


def _by_index(log: LogDirectory, number: int, time_ms: int, time_at: Callable[[int, int], int]) -> int | None:
    """The same without reading the segment between its probes. Raises ``LookupError`` if the index lacks one."""
    segment, index = log.segments[number], log.index
    if index is None or segment.framing == "plain":
        raise LookupError

    def start(entry: int) -> int:
        place = index.place(entry)
        if place is None or not segment.base <= place[0] < segment.end:
            raise LookupError
        return place[0]

    following = log.segments[number + 1] if number + 1 < len(log.segments) else None
    entries = range(
        first_index_of(log, segment), log.committed + 1 if following is None else first_index_of(log, following)
    )
    found = bisect_left(entries, time_ms, key=lambda one: time_at(number, start(one)))
    return start(entries[found]) if found < len(entries) else None


def _time_at(log: LogDirectory, segment: LogSegment, position: int, *, verified: bool = False) -> int | None:
    """The store time (ms) of the first message at or after a position; None if the segment ends before one.

    0 if an entry on the way is damaged, whose size is not known either.
    Raises ``OptionError`` for entries that hold no messages; if ``verified``, ``BrokenRecordError`` for damaged ones.
    """
    while position < min(segment.end, log.end):
        head = segment.read(position, _HEAD_BYTES)
        if segment.framing == "plain":
            return store_timestamp(head)
        if BLANK.unpack(head[: BLANK.size].ljust(BLANK.size, b"\0"))[0] == BLANK_MAGIC:
            return None
        header = segment.header(position)
        if verified and not is_whole_entry(segment, position):
            raise BrokenRecordError(f"segment {segment.name}, offset {position - segment.base}: a damaged entry")
        if header is None or header.size < ENTRY_HEADER_BYTES:
            return 0
        if header.magic == Magic.NORMAL and header.channel != NOOP_CHANNEL:
            if log.content() != "message":
                raise OptionError(
                    "these entries are not messages and have no timestamps: use startingOffsets, endingOffsets"
                )
            return store_timestamp(head[ENTRY_HEADER_BYTES:])
        position += header.size
    return None
