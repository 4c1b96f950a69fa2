"""Builds the key index files from the log's keys: the rules of ``rocketstore.index``, for whole arrays.

A file's chains link each entry to the previous one in the same slot, so one writer writes a file in log order; it keeps
the slots in memory (4 bytes each) and streams the entries. A record's keys are never split between two files.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rocketstore.index.file import IndexShape
from rocketstore.index.format import ENTRIES, HEADER, SLOT, IndexHeader, chained, seconds_since


class IndexWriter:
    """Writes index files into a directory; keys are added in log order, all those of a record in one call."""

    def __init__(self, directory: Path, shape: IndexShape) -> None:
        """Raises ``OSError``."""
        self._directory = directory
        self._shape = shape
        self._file: _File | None = None
        self._last_name = 0
        self.files = 0
        """Files started."""
        self.entries = 0
        """Keys written."""
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, keys: NDArray[np.void]) -> None:
        """Add keys, starting the next file if a record's keys no longer fit."""
        offsets = keys["offset"]
        start = 0
        while start < len(keys):
            file = self._file or self._roll(keys, start)
            end = start + file.room
            if end < len(keys):
                end = int(np.searchsorted(offsets, offsets[end]))
                if end <= start:
                    if not file.is_empty:
                        self._roll(keys, start)
                        continue
                    end = start + file.room  # more keys than fit into a file: only these are split
            end = min(end, len(keys))
            file.put(keys[start:end])
            self.entries += end - start
            start = end

    def close(self) -> None:
        """Finish the last file and make it durable."""
        if self._file is not None:
            self._file.finish()
            self._file = None

    def _roll(self, keys: NDArray[np.void], start: int) -> _File:
        """Start the next file. RocketMQ names files by creation time; here it is the time of the first record."""
        self.close()
        stored = datetime.fromtimestamp(max(int(keys["store_ms"][start]), 0) / 1000)  # noqa: DTZ006  # as the broker does
        self._last_name = max(int(stored.strftime("%Y%m%d%H%M%S%f")[:17]), self._last_name + 1)
        self._file = _File(self._directory / f"{self._last_name:017d}", self._shape)
        self.files += 1
        return self._file


class _File:
    """A file being written: slots and header are written at the end."""

    def __init__(self, path: Path, shape: IndexShape) -> None:
        self._shape = shape
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(self._fd, shape.file_bytes)
        self._slots = np.zeros(shape.slots, np.int32)
        self._header = IndexHeader(0, 0, 0, 0, 0, 1)

    @property
    def room(self) -> int:
        """How many more entries fit."""
        return self._shape.entries - self._header.next_entry

    @property
    def is_empty(self) -> bool:
        """Whether it has no entry."""
        return self._header.next_entry <= 1

    def put(self, keys: NDArray[np.void]) -> None:
        """Add entries, which must fit."""
        old = self._header
        offsets, store_ms = keys["offset"], keys["store_ms"]
        if self.is_empty:
            old = old._replace(begin_ms=int(store_ms[0]), begin_offset=int(offsets[0]))
        first, count = old.next_entry, len(keys)
        places = keys["hash"] % np.int32(self._shape.slots)
        numbers = np.arange(first, first + count, dtype=np.int32)
        previous = chained(self._slots, places, numbers)
        block = np.empty(count, ENTRIES)
        block["hash"], block["offset"], block["previous"] = keys["hash"], offsets, previous
        block["seconds"] = seconds_since(store_ms, old.begin_ms)
        _write(self._fd, block.tobytes(), self._shape.entries_at + first * block.itemsize)
        self._header = old._replace(
            end_ms=int(store_ms[-1]),
            end_offset=int(offsets[-1]),
            used_slots=old.used_slots + int(np.count_nonzero(previous == 0)),
            next_entry=first + count,
        )

    def finish(self) -> None:
        """Write slots and header durably."""
        _write(self._fd, HEADER.pack(*self._header) + self._slots.astype(SLOT).tobytes(), 0)
        os.fsync(self._fd)
        os.close(self._fd)


def _write(fd: int, data: bytes, at: int) -> None:
    done = 0
    with memoryview(data) as view:
        while done < len(data):
            done += os.pwrite(fd, view[done:], at + done)
