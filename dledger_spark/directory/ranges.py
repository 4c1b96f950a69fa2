"""Determines the requested range of a log directory, by index or by time."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from dledger.layout import BLANK_MAGIC, ENTRY_HEADER_BYTES
from dledger.store.format import BLANK
from dledger.types import NOOP_CHANNEL, Magic
from dledger_spark.decode import walk
from dledger_spark.directory.files import LogSegment
from dledger_spark.directory.log import LogDirectory, first_index_of, locate
from dledger_spark.directory.tail import is_whole_entry
from dledger_spark.errors import BrokenRecordError, DataLossError, OptionError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions
from rocketstore.message.record import HEAD, store_timestamp

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
