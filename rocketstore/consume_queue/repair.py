"""Determines how much of a queue's files is good after a crash or damage.

Consume queues are derived from the log: inconsistent parts are cut, and the caller learns from where the log must be
dispatched again. Consistent units are never changed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dledger.store.format import parse_segment_name
from dledger.store.fs import FileSystem
from rocketstore.consume_queue.units import UNIT_BYTES, unit_columns
from rocketstore.mapped.file import StoreFile

_log = logging.getLogger(__name__)
_FIRST_CHUNK_BYTES: Final = UNIT_BYTES * (1 << 9)
"""Most queues are short: only the last file's end is read, thousands of times per start."""
_CHUNK_BYTES: Final = UNIT_BYTES * (1 << 15)


class QueueRecovery(NamedTuple):
    """The findings of recovery, for one queue or combined for all.

    ``max_physical_offset``: the end of the furthest record that has a unit, -1 if none. ``replay_from``: queues were
    damaged; records from this physical offset on (-1: all) must be appended again. None: nothing is known to be
    missing, though after a crash something may be. ``repairs`` says what was cut, for people.
    """

    max_physical_offset: int
    replay_from: int | None
    repairs: tuple[str, ...]


class FileScan(NamedTuple):
    """How far a file's units are good, in bytes, and the end of the last record they refer to."""

    good_bytes: int
    max_physical_offset: int


def prepare_directory(fs: FileSystem, directory: Path, file_bytes: int) -> list[str]:
    """Remove files that cannot belong to the queue, so that the rest is contiguous; returns what was removed.

    Only the last file may be short; it is cut to whole units. Raises ``OSError``.
    """
    if not directory.is_dir():
        return []
    found = [(base, path) for path in directory.iterdir() if (base := parse_segment_name(path.name)) is not None]
    found.sort()
    good = 0
    for base, path in found:
        size = path.stat().st_size
        if base != found[0][0] + good * file_bytes or base % file_bytes or size > file_bytes:
            break
        good += 1
        if size < file_bytes:
            _blank_partial_unit(fs, path, size)
            break
    repairs = [
        f"{path} was removed: a file before it is missing or short, or its size is wrong" for _, path in found[good:]
    ]
    for _, path in reversed(found[good:]):
        fs.unlink(path)
    if repairs:
        fs.sync_dir(directory)
    return repairs


def _blank_partial_unit(fs: FileSystem, path: Path, size: int) -> None:
    """Clear a truncated unit, so that it does not look complete once zeros follow it."""
    if size % UNIT_BYTES:
        fd = fs.open(path)
        try:
            fs.write(fd, bytes(size % UNIT_BYTES), size - size % UNIT_BYTES)
        finally:
            fs.close(fd)


def scan_file(file: StoreFile, max_physical_offset: int, limit: int) -> FileScan:
    """Read units while they are good: written, in ascending order of records, none of which ends after ``limit``.

    Of two that are out of order, either may be wrong, so neither is good. Fillers are good, but refer to no record.
    Raises ``DiskError``.
    """
    start, length = 0, _FIRST_CHUNK_BYTES
    while start < file.size:
        data = file.read(start, min(length, file.size - start), cold=True) or b""
        offsets, sizes, fillers = unit_columns(data)
        ends = np.where(fillers, max_physical_offset, offsets + sizes)
        before = np.maximum.accumulate(np.concatenate(([max_physical_offset], ends)))
        unordered = ~fillers & (offsets >= 0) & (sizes > 0) & (offsets < before[:-1])
        ending = np.flatnonzero((sizes <= 0) | (offsets < 0) | unordered | (ends > limit))
        count = int(ending[0]) if len(ending) else len(sizes)
        if count < len(sizes) and unordered[count]:
            earlier = np.flatnonzero(~fillers[:count])
            count = int(earlier[-1]) if len(earlier) else count
        max_physical_offset = int(before[count])
        if count < len(sizes):
            return FileScan(start + count * UNIT_BYTES, max_physical_offset)
        start += len(data)
        length = _CHUNK_BYTES
    return FileScan(file.size, max_physical_offset)


def last_record_offset(file: StoreFile, end_bytes: int) -> int:
    """The offset of the last record referred to by a file's first ``end_bytes``; -1 if they are only fillers."""
    for end in range(end_bytes, 0, -_CHUNK_BYTES):
        start = max(0, end - _CHUNK_BYTES)
        offsets, _, fillers = unit_columns(file.read(start, end - start, cold=True) or b"")
        real = np.flatnonzero(~fillers)
        if len(real):
            return int(offsets[real[-1]])
    return -1
