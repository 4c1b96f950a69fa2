"""Reads one split: maps its bytes, finds its records, decodes them batch by batch. Only the split is mapped.

Before a batch is decoded, its part of the mapping is populated with one call (``MADV_POPULATE_READ``). This is cheaper
than page faults, and if the file cannot be read, it is an error with the position, while a fault would kill the
process. Reading into our own buffer would copy bodies twice, which costs more than mapping them.

Batches hold copies, so a mapping does not outlive the next batch. A file that is unlinked meanwhile stays readable;
truncation is noticed before a batch is decoded, but not during that (the kernel then kills the process, and Spark
retries the task).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dledger.layout import MIN_BLANK_BYTES
from dledger.values import MIB
from dledger_spark.decode import DecodeContext, WalkEnd, batch_bytes_for, batches, positions_of, walk
from dledger_spark.decode.decoder import looks_at_checksums
from dledger_spark.decode.layout import Bytes, Ints
from dledger_spark.directory.files import IndexFiles
from dledger_spark.directory.lead import chain_before
from dledger_spark.directory.log import walk_end_problem
from dledger_spark.directory.splits import Split
from dledger_spark.errors import BrokenRecordError, DataLossError
from dledger_spark.options import SPLIT_BYTES_DEFAULT
from dledger_spark.schema import SchemaColumn

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
