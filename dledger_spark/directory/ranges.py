"""Determines the requested range of a log directory, by index or by time."""

from __future__ import annotations

import mmap
from bisect import bisect_left

from dledger.layout import ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL, Magic
from dledger_spark.decode import walk
from dledger_spark.directory.files import LogSegment
from dledger_spark.directory.log import LogDirectory, first_index_of, locate
from dledger_spark.errors import DataLossError, OptionError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions
from rocketstore.message.record import HEAD, store_timestamp

_HEAD_BYTES = ENTRY_HEADER_BYTES + max(head.size for head in HEAD.values())
_TRIED = 64
"""How many entries without a message to skip when searching for a time: terms start with such entries."""


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


def _position_at(log: LogDirectory, time_ms: int) -> int:
    """The start of the first message stored at that time or later; the log's end if there is none.

    Store times increase along the log. (A new leader whose clock is behind may start slightly earlier; the binary
    search then finds one of the positions where the time is crossed.)
    """
    number = bisect_left(log.segments, time_ms, key=lambda one: _time_at(log, one, max(one.base, log.begin)) or 0)
    if number > 0:
        found = _in_segment(log, log.segments[number - 1], time_ms)
        if found is not None:
            return found
    return max(log.segments[number].base, log.begin) if number < len(log.segments) else log.end


def _in_segment(log: LogDirectory, segment: LogSegment, time_ms: int) -> int | None:
    """The first such message in a segment whose first message is older; None if there is none."""
    start, stop = max(segment.base, log.begin), min(segment.end, log.end)
    with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, segment.framing, start - segment.base, stop - segment.base)
    starts = found.starts + segment.base
    number = bisect_left(range(len(starts)), time_ms, key=lambda one: _time_at(log, segment, int(starts[one])) or 0)
    return int(starts[number]) if number < len(starts) else None


def _time_at(log: LogDirectory, segment: LogSegment, position: int) -> int | None:
    """The store time (ms) of the first message at or after a position; None if the segment ends before one.

    Raises ``OptionError`` for entries that hold no messages.
    """
    for _ in range(_TRIED):
        if position >= min(segment.end, log.end):
            return None
        head = segment.read(position, _HEAD_BYTES)
        if segment.framing == "plain":
            return store_timestamp(head)
        header = segment.header(position)
        if header is None:
            return None
        if header.magic == Magic.NORMAL and header.channel != NOOP_CHANNEL:
            if log.content() != "message":
                raise OptionError(
                    "these entries are not messages and have no timestamps: use startingOffsets, endingOffsets"
                )
            return store_timestamp(head[ENTRY_HEADER_BYTES:])
        position += header.size
    return None
