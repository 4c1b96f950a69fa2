"""Cuts a log into splits, and reads one: stretches of records, one per task, of similar size, each within one segment.

With an index, a binary search finds the cuts, so that planning reads a few pages per split. Without one (plain logs
have none) segments are walked, unless there are many: then each becomes one split. Planning only records where the
entries before a split are, whose checksum chain its first entry continues. If checksums matter, the task reads two of
them, located by the index; without an index it walks the headers of the preceding segment.

A task maps its split only, finds its records, and decodes them batch by batch. Before a batch is decoded, its part of
the mapping is populated with one call (``MADV_POPULATE_READ``). This is cheaper than page faults, and if the file
cannot be read, it is an error with the position, while a fault would kill the process. Reading into our own buffer
would copy bodies twice, which costs more than mapping them.

Batches hold copies, so a mapping does not outlive the next batch. A file that is unlinked meanwhile stays readable;
truncation is noticed before a batch is decoded, but not during that (the kernel then kills the process, and Spark
retries the task).
"""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dledger.records import BLANK_MAGIC, ENTRY_HEADER_BYTES, MIN_BLANK_BYTES
from dledger.store.format import BLANK
from dledger.values import MIB
from dledger_spark.decode import DecodeContext, Framing, WalkEnd, batch_bytes_for, batches, positions_of, walk
from dledger_spark.decode.decoder import chain_after, looks_at_checksums
from dledger_spark.decode.layout import Bytes, Ints
from dledger_spark.decode.records import CHAIN_BEGIN, Chain
from dledger_spark.directory.files import IndexFiles, LogSegment
from dledger_spark.directory.log import LogDirectory, first_index_of, walk_end_problem
from dledger_spark.errors import BrokenRecordError, DataLossError
from dledger_spark.options import SPLIT_BYTES_DEFAULT
from dledger_spark.schema import SchemaColumn


@dataclass(frozen=True, slots=True)
class Lead:
    """A stretch of entries that ends where a split starts, apart from a blank. Positions are those of the log."""

    segment: LogSegment
    begin: int
    end: int


def chain_before(lead: Lead, index_directory: str, first_index: int) -> Chain | None:
    """The chain before the split's first entry; None if unknown. ``first_index``: that entry's; -1 if unknown.

    It is also unknown if the preceding entries were trimmed or truncated meanwhile. Raises ``OSError``.
    """
    try:
        return _chain_before(lead, index_directory, first_index)
    except (FileNotFoundError, ValueError):  # a file that became shorter cannot be mapped
        return None


def _chain_before(lead: Lead, index_directory: str, first_index: int) -> Chain | None:
    places = _by_index(lead, IndexFiles(Path(index_directory)), first_index) if first_index > 0 else ()
    if not places:
        places = _by_walking(lead)
    if not places:
        return None
    heads = b"".join(lead.segment.read(one, ENTRY_HEADER_BYTES) for one in places)
    if len(heads) != len(places) * ENTRY_HEADER_BYTES:
        return None
    return chain_after(np.frombuffer(heads, np.uint8), np.arange(len(places), dtype=np.int64) * ENTRY_HEADER_BYTES)


def _by_index(lead: Lead, index: IndexFiles, first_index: int) -> Sequence[int]:
    """The starts of the last two entries, or of one if the other is outside the stretch; none if not in the index."""
    last = index.place(first_index - 1)
    if last is None or not lead.begin <= last[0] < last[0] + last[1] <= lead.end:
        return ()
    before = index.place(first_index - 2)
    if before is None or before[0] < lead.begin or sum(before) != last[0]:
        return (last[0],)
    return before[0], last[0]


def _by_walking(lead: Lead) -> Sequence[int]:
    segment = lead.segment
    with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, segment.framing, lead.begin - segment.base, lead.end - segment.base)
    if found.kind not in (WalkEnd.LIMIT, WalkEnd.BLANK):
        return ()
    return [int(one) + segment.base for one in found.starts[-2:]]


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


_UNITS_AT_ONCE: Final = 16 * 1024
"""512 KiB of index: data derived from it stay in the processor's cache."""
_RUN_BYTES: Final = 32 * MIB
_MADV_POPULATE_READ: Final = 22
"""Linux's value (since 5.14), which Python's ``mmap`` does not define."""


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Records in a mapped window: the window, its log position, the records' starts in it, and the end."""

    window: Bytes
    base: int
    starts: Ints
    end: int
    """The position after the last record."""
    told: Ints | None = None
    """Their magic numbers in the index; None if it was not used."""


def read_split(
    split: Split, columns: Sequence[SchemaColumn], context: DecodeContext, window_bytes: int = SPLIT_BYTES_DEFAULT
) -> Iterator[pa.RecordBatch]:
    """The rows of a split. ``context`` says how to decode; framing and positions come from the split.

    At most ``window_bytes`` of the file are mapped at a time, or one record if it is larger. Raises
    ``BrokenRecordError``, ``DataLossError`` if the file is gone, ``OSError``.
    """
    context = replace(context, framing=split.framing, segment=split.segment, segment_base=split.segment_base)
    if split.framing == "plain":
        context = replace(context, content="message")
    elif looks_at_checksums(columns, context):
        lead = split.lead
        before = split.chain_before if lead is None else chain_before(lead, split.index_directory, split.first_index)
        context = replace(context, chain_before=before)
    step = batch_bytes_for(columns)
    for run in runs(split, window_bytes, step):
        if context.base != run.base:
            context = replace(context, base=run.base)
        context = yield from batches(run.window, run.starts, columns, context, step, run.told)


def runs(split: Split, window_bytes: int = SPLIT_BYTES_DEFAULT, run_bytes: int = _RUN_BYTES) -> Iterator[RecordRun]:
    """All records of a split, about ``run_bytes`` at a time. Raises the same errors as ``read_split``."""
    try:
        file = open(split.path, "rb")  # noqa: SIM115 - closed below; opening has errors of its own
    except FileNotFoundError as error:
        raise DataLossError(
            f"segment {split.segment} was trimmed after the query was planned: run the query again"
        ) from error
    with file:
        reader = _SplitReader(split, file.fileno(), window_bytes, run_bytes)
        if split.count:
            yield from reader.by_index()
        yield from reader.by_walking()


class _SplitReader:
    def __init__(self, split: Split, fd: int, window_bytes: int, run_bytes: int) -> None:
        self._split = split
        self._fd = fd
        self._window_bytes = window_bytes
        self._run_bytes = run_bytes
        self._at = split.begin
        self._mapped: mmap.mmap | None = None
        self._window: Bytes = np.empty(0, np.uint8)
        self._base = split.begin

    def by_index(self) -> Iterator[RecordRun]:
        """Locates records by the index; stops where it is inconsistent, and ``by_walking`` continues."""
        split = self._split
        index = IndexFiles(Path(split.index_directory))
        number, last = split.first_index, split.first_index + split.count
        known = np.array([self._at], np.int64)  # the starts of the next entries, and the end of the last one
        told = np.empty(0, np.int64)
        while number < last or len(known) > 1:
            if number < last and int(known[-1]) <= self._at + self._run_bytes:
                units = index.units(number, min(_UNITS_AT_ONCE, last - number))
                found = positions_of(units, number, int(known[-1]))
                if found is None or int(found[-1]) > split.end:
                    return
                number += len(units)
                known = np.concatenate((known[:-1], found))
                told = np.concatenate((told, units["magic"].astype(np.int64)))
                continue
            self._map(self._at, int(known[1]) - self._at)
            end = min(self._at + self._run_bytes, self._base + len(self._window))
            count = max(1, int(np.searchsorted(known, end, side="right")) - 1)
            self._populate(self._at, int(known[count]))
            yield self._run(known[:count] - self._base, int(known[count]), told[:count])
            known, told = known[count:], told[count:]

    def by_walking(self) -> Iterator[RecordRun]:
        """Locates records by walking the headers."""
        split, needed = self._split, 0
        while self._at < split.end:
            left = split.end - self._at
            self._map(self._at, min(left, max(needed, min(self._run_bytes, self._window_bytes))))
            start = self._at - self._base
            stop = min(len(self._window), start + max(needed, self._run_bytes))
            self._populate(self._at, self._base + stop)
            found = walk(self._window.data, split.framing, start, stop)
            if len(found.starts):
                needed = 0
                yield self._run(found.starts, self._base + found.end)
            elif found.kind is WalkEnd.CUT and needed < found.needed <= left:
                needed = found.needed
            elif found.kind is WalkEnd.CUT and not found.needed and stop + self._base < split.end:
                needed = MIN_BLANK_BYTES  # enough to know the record's length
            elif found.kind is WalkEnd.BLANK and split.is_rest:
                return
            else:
                raise self._broken(found.kind, found.reason)

    def _run(self, starts: Ints, end: int, told: Ints | None = None) -> RecordRun:
        self._at = end
        return RecordRun(self._window, self._base, starts, end, told)

    def _map(self, position: int, needed: int) -> None:
        """Ensure that the window, which ends with the split, contains ``needed`` bytes from ``position`` on."""
        if self._base <= position and position + needed <= self._base + len(self._window):
            return
        split = self._split
        length = max(needed, min(self._window_bytes, split.end - position))
        offset = position - split.segment_base
        if os.fstat(self._fd).st_size < offset + length:
            raise BrokenRecordError(
                f"segment {split.segment} was shortened: it now ends before offset {offset + length}"
            )
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._fd, length + skipped, access=mmap.ACCESS_READ, offset=offset - skipped)
        self._mapped = mapped
        self._window = np.frombuffer(mapped, np.uint8, length, skipped)
        self._base = position

    def _populate(self, begin: int, end: int) -> None:
        """Read the mapped part of this range into memory. Raises ``BrokenRecordError`` if it is unreadable."""
        if self._mapped is None:
            return
        skipped = len(self._mapped) - len(self._window) - self._base  # converts positions to offsets in the mapping
        start = (begin + skipped) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mapped.madvise(_MADV_POPULATE_READ, start, end + skipped - start)
        except OSError as error:
            if error.errno == errno.EINVAL:  # not supported by this kernel: use page faults
                return
            raise BrokenRecordError(
                f"segment {self._split.segment}, from offset {begin - self._split.segment_base}: the file was "
                f"shortened, or its disk is failing ({error.strerror})"
            ) from error

    def _broken(self, kind: WalkEnd, reason: str) -> BrokenRecordError:
        split = self._split
        problem = walk_end_problem(kind, reason) or "the segment ends early"
        return BrokenRecordError(
            f"segment {split.segment}, offset {self._at - split.segment_base}: {problem}; the records after it "
            "cannot be found without an index"
        )
