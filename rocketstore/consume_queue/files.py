"""The files of consume queues: their units (``QUEUE_UNIT``), directories, recovery, and ends.

Consume queues are derived from the log. After a crash or damage, inconsistent parts are cut, and the caller learns from
where the log must be dispatched again. Consistent units are never changed.

A clean stop records where every queue ended, so that a start need read but the last unit of ten thousand queues. The
record is written after the checkpoint and names it. It is valid only after a clean stop, with that checkpoint, and for
queues whose files still have the same names, sizes and times. All other queues are read as usual.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger.store.format import parse_segment_name
from dledger.store.fs import FileSystem
from rocketstore.mapped.file import StoreFile, read_stop_record, write_stop_record
from rocketstore.message.columns import UnitColumns
from rocketstore.types import QUEUE_UNIT, QueueKey, QueueUnit, RecordHead

UNIT_BYTES: Final = QUEUE_UNIT.size
FILLER: Final = QueueUnit(0, 0x7FFF_FFFF, 0)
"""A place without a message."""
BROKEN: Final = QueueUnit(-1, 0, 0)
"""Stands for a unit that looks never written, between units that were."""
_UNIT: Final = QUEUE_UNIT.struct()
FILLER_BYTES: Final = _UNIT.pack(*FILLER)
UNIT: Final = QUEUE_UNIT.dtype()
"""The dtype of stored units."""
_of_head: Final = operator.itemgetter(2, 3, 4)


def pack_unit(unit: QueueUnit) -> bytes:
    return _UNIT.pack(*unit)


def pack_units(heads: Sequence[RecordHead]) -> bytes:
    """The units of records, in this order."""
    return b"".join(starmap(_UNIT.pack, map(_of_head, heads)))


def pack_columns(columns: UnitColumns) -> bytes:
    """Like ``pack_units``."""
    units = np.empty(len(columns.offsets), UNIT)
    units["offset"], units["size"], units["tags_code"] = columns.offsets, columns.sizes, columns.tags_codes
    return units.tobytes()


def parse_units(data: bytes) -> list[QueueUnit]:
    """Parse units, including fillers, up to the first one never written; ``data`` may end inside a unit."""
    units = list(map(QueueUnit._make, _UNIT.iter_unpack(data[: len(data) - len(data) % UNIT_BYTES])))
    sizes = [unit[1] for unit in units]
    if sizes and min(sizes) <= 0:
        return units[: next(number for number, unit in enumerate(units) if unit[1] <= 0)]
    return units


def unit_columns(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Offsets and sizes of the whole units in ``data``, and which of them are fillers."""
    units = np.frombuffer(data, UNIT, len(data) // UNIT_BYTES)
    offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
    fillers = (offsets == FILLER.offset) & (sizes == FILLER.size) & (units["tags_code"] == FILLER.tags_code)
    return offsets, sizes, fillers


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


QUEUE_ENDS_FILE: Final = "queueEnds.json"


class QueueEnd(NamedTuple):
    """One queue. ``end`` is in bytes, ``begin`` in units."""

    files: list[list[int]]
    """The start of each file, and its modification time (ns)."""
    end: int
    begin: int
    begin_for: tuple[int, int]
    """Valid while the log's begin is between these two."""
    max_physical: int


def write_queue_ends(fs: FileSystem, path: Path, place: tuple[int, int], ends: Mapping[QueueKey, QueueEnd]) -> None:
    """Replace the file. ``place``: replay position and queue units of the checkpoint. Raises ``OSError``."""
    topics: dict[str, dict[str, QueueEnd]] = {}
    for (topic, queue_id), end in ends.items():
        topics.setdefault(topic, {})[str(queue_id)] = end
    write_stop_record(fs, path, {"checkpoint": place, "queues": topics})


def read_queue_ends(path: Path, place: tuple[int, int]) -> dict[QueueKey, QueueEnd]:
    """The contents of the file if it belongs to that checkpoint; otherwise empty."""

    def parse(found: Any) -> dict[QueueKey, QueueEnd]:  # noqa: ANN401  # JSON
        if found["checkpoint"] != [*place]:
            return {}
        return {
            (topic, int(queue_id)): QueueEnd(*end)
            for topic, queues in found["queues"].items()
            for queue_id, end in queues.items()
        }

    return read_stop_record(path, parse) or {}


class QueueDirectories:
    """Creates directories for all queues of a table. Many are created at a time, so new directory entries are made
    durable once for all of them.
    """

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self.making: Final = threading.Lock()
        """Held while directories are created, and while an empty topic directory is removed."""
        self._syncing = threading.Lock()  # held until everything is durable, so that no caller returns before that
        self._unsynced: dict[Path, None] = {}

    def make(self, directory: Path) -> None:
        """Make a queue's directory and the topic's above it. Raises ``OSError``."""
        with self.making:
            self._fs.make_dir(directory.parent)
            self._fs.make_dir(directory)
        self._unsynced.update({directory.parent: None, directory.parent.parent: None})

    @contextmanager
    def synced_by_caller(self) -> Iterator[None]:
        """Regard everything created before as durable once the context, which syncs the whole file system, succeeds."""
        with self._syncing:
            found: dict[Path, None] = {}
            while self._unsynced:  # others may add to it meanwhile
                found[self._unsynced.popitem()[0]] = None
            try:
                yield
            except BaseException:
                self._unsynced.update(found)
                raise

    def sync(self) -> None:
        """Make everything created before durable. Raises ``OSError``."""
        with self._syncing:
            while self._unsynced:
                directory, _ = self._unsynced.popitem()
                try:
                    self._fs.sync_dir(directory)
                except FileNotFoundError:
                    continue  # the topic was deleted
                except OSError:
                    self._unsynced[directory] = None
                    raise
