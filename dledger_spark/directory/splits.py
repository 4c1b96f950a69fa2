"""Cuts a log into splits: stretches of records, one per task, of similar size, each within one segment.

With an index, a binary search finds the cuts, so that planning reads a few pages per split. Without one (plain logs
have none) segments are walked, unless there are many: then each becomes one split.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from dledger.layout import BLANK_MAGIC
from dledger.store.format import BLANK
from dledger_spark.decode import Framing, walk
from dledger_spark.decode.context import CHAIN_BEGIN, Chain
from dledger_spark.directory.files import LogSegment
from dledger_spark.directory.lead import Lead
from dledger_spark.directory.log import LogDirectory, first_index_of

WALKED_SEGMENTS_MAX: Final = 8
"""If more segments than this lack an index, each becomes one split: walking them would delay the first task."""


@dataclass(frozen=True, slots=True)
class Split:
    """The stretch of one segment that one task reads. Positions are those of the log; ``end`` is exclusive."""

    path: str
    segment: str
    segment_base: int
    framing: Framing
    begin: int
    end: int
    """The end of the last record; if ``is_rest``, the end of the segment or of its readable part."""
    is_rest: bool = False
    first_index: int = -1
    """Index of the first entry; -1 if the index is unusable here."""
    count: int = 0
    """The number of entries according to the index; 0 without one."""
    index_directory: str = ""
    lead: Lead | None = None
    """The preceding entries; None at the start of the log, or in a plain log."""
    chain_before: Chain | None = None
    """The chain before the log's first entry; for other splits, see ``lead``."""


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Limits for splits; 0: none."""

    split_bytes: int
    min_partitions: int = 0
    max_records: int = 0


def plan_splits(log: LogDirectory, begin: int, end: int, sizes: SplitSizes) -> list[Split]:
    """The splits of ``[begin, end)``, in order. Both are bounds of records. Raises ``BrokenRecordError``."""
    parts = [one for one in log.segments if one.base < end and one.end > begin]
    total = max(0, min(end, log.end) - max(begin, log.begin))
    if sizes.min_partitions:
        sizes = replace(sizes, split_bytes=max(1, min(sizes.split_bytes, -(-total // sizes.min_partitions))))
    whole = [_whole(log, segment, number, parts, (begin, end)) for number, segment in enumerate(parts)]
    unindexed = sum(1 for one in whole if one.is_rest)
    walks = unindexed <= WALKED_SEGMENTS_MAX or sizes.max_records > 0 or len(whole) < sizes.min_partitions
    splits: list[Split] = []
    for one in whole:
        if not one.is_rest:
            splits += _cut_by_index(log, one, sizes)
        elif walks:
            splits += _cut_by_walk(one, sizes)
        elif one.begin < one.end:
            splits.append(one)
    return [_led(log, one) if one.framing == "entry" else one for one in splits]


def _led(log: LogDirectory, split: Split) -> Split:
    """The split with its preceding entries."""
    if split.lead is not None:
        return split
    segment = log.segment_at(split.begin - 1) if split.begin > log.begin else None
    if segment is not None and segment.framing == "entry":
        end = min(split.begin, segment.end)
        return replace(split, lead=Lead(segment, max(segment.base, log.begin), end))
    if log.boundary is not None and log.boundary[0] == split.begin:
        return replace(split, chain_before=(log.boundary[1], log.boundary[1]))
    return replace(split, chain_before=CHAIN_BEGIN) if split.begin == 0 else split


def _whole(
    log: LogDirectory, segment: LogSegment, number: int, parts: Sequence[LogSegment], bounds: tuple[int, int]
) -> Split:
    """The requested part of a segment as one split; ``is_rest`` if the index does not confirm it."""
    start, stop = max(segment.base, bounds[0], log.begin), min(segment.end, bounds[1], log.end)
    rest = Split(str(segment.path), segment.name, segment.base, segment.framing, start, stop, is_rest=True)
    index = log.index
    if segment.framing != "entry" or index is None or start >= stop:
        return rest
    first = segment.header(start)
    last = _last_index(log, parts, number, bounds[1])
    if first is None or last is None or last < first.index:
        return rest
    begin_place, end_place = index.place(first.index), index.place(last)
    if begin_place is None or end_place is None or begin_place[0] != start:
        return rest
    end = sum(end_place)
    if not start < end <= stop or (end != stop and not _is_blank(segment, end)):
        return rest
    return replace(
        rest,
        end=end,
        is_rest=False,
        first_index=first.index,
        count=last - first.index + 1,
        index_directory=str(index.directory),
    )


def _last_index(log: LogDirectory, parts: Sequence[LogSegment], number: int, end: int) -> int | None:
    """The last requested entry of a segment; None if unknown."""
    if number + 1 < len(parts):
        return first_index_of(log, parts[number + 1]) - 1
    if end >= log.end:
        return log.committed
    segment = log.segment_at(end)
    header = segment.header(end) if segment is not None else None
    return header.index - 1 if header is not None else None


def _is_blank(segment: LogSegment, position: int) -> bool:
    magic, length = BLANK.unpack(segment.read(position, BLANK.size).ljust(BLANK.size, b"\0"))
    return bool(magic == BLANK_MAGIC and position + length == segment.end)


def _cut_by_index(log: LogDirectory, whole: Split, sizes: SplitSizes) -> Iterator[Split]:
    index = log.index
    pieces = _pieces(whole.end - whole.begin, sizes.split_bytes)
    last = whole.first_index + whole.count
    cuts = [whole.first_index]
    for number in range(1, pieces):
        target = whole.begin + (whole.end - whole.begin) * number // pieces

        def position(one: int) -> int:
            place = index.place(one) if index is not None else None
            return place[0] if place is not None else whole.end

        cuts.append(bisect_left(range(cuts[-1], last), target, key=position) + cuts[-1])
    cuts.append(last)
    for first, following in pairwise(cuts):
        for low, high in _by_count(first, following, sizes.max_records):
            begin = whole.begin if low == whole.first_index else _position(log, low)
            end = whole.end if high == last else _position(log, high)
            if begin is None or end is None:  # the index changed meanwhile: read the rest without it
                yield replace(whole, begin=begin or whole.begin, is_rest=True, first_index=-1, count=0)
                return
            yield replace(whole, begin=begin, end=end, first_index=low, count=high - low)


def _position(log: LogDirectory, index: int) -> int | None:
    place = log.index.place(index) if log.index is not None else None
    return place[0] if place is not None else None


def _cut_by_walk(whole: Split, sizes: SplitSizes) -> Iterator[Split]:
    if whole.begin >= whole.end:
        return
    if whole.end - whole.begin <= sizes.split_bytes and not sizes.max_records:
        yield whole
        return
    base = whole.segment_base
    with open(whole.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, whole.framing, whole.begin - base, min(whole.end - base, len(mapped)))
    starts, end = found.starts + base, found.end + base
    pieces = _pieces(end - whole.begin, sizes.split_bytes)
    targets = [whole.begin + (end - whole.begin) * number // pieces for number in range(pieces)]
    cuts = [*(int(one) for one in starts.searchsorted(targets)), len(starts)]
    lows = [low for first, following in pairwise(cuts) for low, _ in _by_count(first, following, sizes.max_records)]
    for number, low in enumerate(lows):
        begin, lead = int(starts[low]), None
        if low and whole.framing == "entry":
            segment = LogSegment(Path(whole.path), base, whole.end - base, whole.framing)
            lead = Lead(segment, int(starts[max(0, low - 2)]), begin)
        if number + 1 < len(lows):
            yield replace(whole, begin=begin, end=int(starts[lows[number + 1]]), is_rest=False, lead=lead)
        else:
            yield replace(whole, begin=begin, lead=lead)  # to the end, where the reader finds out why the walk ended
    if not lows:
        yield whole


def _pieces(total: int, size: int) -> int:
    return max(1, -(-total // size))


def _by_count(first: int, following: int, most: int) -> Iterator[tuple[int, int]]:
    """``[first, following)`` in about equal parts of at most ``most``; none if it is empty."""
    pieces = _pieces(following - first, most) if most else 1
    for number in range(pieces):
        low = first + (following - first) * number // pieces
        high = first + (following - first) * (number + 1) // pieces
        if low < high:
            yield low, high
