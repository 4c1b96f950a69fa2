"""Reading one split: map its bytes, find its records, decode them batch by batch. Nothing but the split is mapped.

Batches hold copies, so a mapping lives no longer than the batch after it. A file that is unlinked meanwhile stays
readable; one that is cut short is noticed before it is mapped, though not after (the kernel then ends the process, and
Spark repeats the task).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dledger.config import MIB
from pipeline.decode import DecodeContext, WalkEnd, batch_bytes_for, batches, positions_of, walk
from pipeline.decode.batches import following_context
from pipeline.decode.layout import Bytes, Ints
from pipeline.directory.files import IndexFiles
from pipeline.directory.log import walk_end_problem
from pipeline.directory.splits import Split
from pipeline.errors import BrokenRecordError, DataLossError
from pipeline.options import SPLIT_BYTES_DEFAULT
from pipeline.schema import Column

_UNITS_AT_ONCE: Final = 64 * 1024
"""2 MiB of index."""
_WALK_BYTES: Final = 32 * MIB


@dataclass(frozen=True, slots=True)
class Run:
    """Records found in a mapped window: the window, its position in the log, where they begin in it, where they end."""

    window: Bytes
    base: int
    starts: Ints
    end: int
    """The position behind the last record."""


def read_split(
    split: Split, columns: Sequence[Column], context: DecodeContext, window_bytes: int = SPLIT_BYTES_DEFAULT
) -> Iterator[pa.RecordBatch]:
    """The rows of a split. ``context`` says how to decode; framing and places are the split's.

    At most ``window_bytes`` of the file are mapped at a time, or one record if it is larger. Raises
    ``BrokenRecordError``, ``DataLossError`` if the file is gone, ``OSError``.
    """
    context = replace(context, framing=split.framing, segment=split.segment, segment_base=split.segment_base)
    if split.framing == "plain":
        context = replace(context, content="message")
    if split.begin == 0:
        context = replace(context, chain_before=0)
    step = batch_bytes_for(columns)
    for run in runs(split, window_bytes):
        yield from batches(run.window, run.starts, columns, replace(context, base=run.base), step)
        context = following_context(run.window, int(run.starts[-1]), context)


def runs(split: Split, window_bytes: int = SPLIT_BYTES_DEFAULT) -> Iterator[Run]:
    """All records of a split, those of a stretch at a time. Raises as ``read_split``."""
    try:
        file = open(split.path, "rb")  # noqa: SIM115 - closed below; opening has errors of its own
    except FileNotFoundError as error:
        raise DataLossError(
            f"segment {split.segment} is gone since the query was planned: the log was trimmed; run the query again"
        ) from error
    with file:
        reader = _SplitReader(split, file.fileno(), window_bytes)
        if split.count:
            yield from reader.by_index()
        yield from reader.by_walking()


class _SplitReader:
    def __init__(self, split: Split, fd: int, window_bytes: int) -> None:
        self._split = split
        self._fd = fd
        self._window_bytes = window_bytes
        self._at = split.begin
        self._window: Bytes = np.empty(0, np.uint8)
        self._base = split.begin

    def by_index(self) -> Iterator[Run]:
        """Where the index tells; stops where it does not agree with itself, which walking then makes good."""
        split = self._split
        index = IndexFiles(Path(split.index_directory))
        number, last = split.first_index, split.first_index + split.count
        while number < last:
            units = index.units(number, min(_UNITS_AT_ONCE, last - number))
            positions = positions_of(units, number, self._at)
            if positions is None or int(positions[-1]) > split.end:
                return
            number += len(units)
            while len(positions) > 1:
                self._map(self._at, int(positions[1]) - self._at)
                count = int(np.searchsorted(positions, self._base + len(self._window), side="right")) - 1
                yield self._run(positions[:count] - self._base, int(positions[count]))
                positions = positions[count:]

    def by_walking(self) -> Iterator[Run]:
        """From header to header."""
        split, needed = self._split, 0
        while self._at < split.end:
            left = split.end - self._at
            self._map(self._at, min(left, max(needed, min(_WALK_BYTES, self._window_bytes))))
            start = self._at - self._base
            stop = min(len(self._window), start + max(needed, _WALK_BYTES))
            found = walk(self._window.data, split.framing, start, stop)
            if len(found.starts):
                needed = 0
                yield self._run(found.starts, self._base + found.end)
            elif found.kind is WalkEnd.CUT and needed < found.needed <= left:
                needed = found.needed
            elif found.kind is WalkEnd.CUT and not found.needed and stop + self._base < split.end:
                needed = _WALK_BYTES
            elif found.kind is WalkEnd.BLANK and split.is_rest:
                return
            else:
                raise self._broken(found.kind, found.reason)

    def _run(self, starts: Ints, end: int) -> Run:
        self._at = end
        return Run(self._window, self._base, starts, end)

    def _map(self, position: int, needed: int) -> None:
        """See to it that ``needed`` bytes from ``position`` on are in the window, which ends with the split."""
        if self._base <= position and position + needed <= self._base + len(self._window):
            return
        split = self._split
        length = max(needed, min(self._window_bytes, split.end - position))
        offset = position - split.segment_base
        if os.fstat(self._fd).st_size < offset + length:
            raise BrokenRecordError(
                f"segment {split.segment} has become shorter: it ends before offset {offset + length}"
            )
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._fd, length + skipped, access=mmap.ACCESS_READ, offset=offset - skipped)
        self._window = np.frombuffer(mapped, np.uint8, length, skipped)
        self._base = position

    def _broken(self, kind: WalkEnd, reason: str) -> BrokenRecordError:
        split = self._split
        problem = walk_end_problem(kind, reason) or "the segment ends there, although more was expected"
        return BrokenRecordError(
            f"segment {split.segment}, offset {self._at - split.segment_base}: {problem}; "
            "what follows cannot be found without an index"
        )
