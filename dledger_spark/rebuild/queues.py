"""Builds a consume queue's files from its units: the rules of ``rocketstore.consume_queue.queue``, for whole arrays.

Fillers take the places without messages: before the first unit of a queue that starts inside a file, and for queue
offsets missing in the log. A repeated offset is ignored, as by the broker.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dledger.store.format import segment_name
from dledger_spark.decode.layout import Ints
from dledger_spark.errors import PipelineError
from rocketstore.consume_queue.files import FILLER_BYTES, UNIT_BYTES

_GAP_FILES_MAX: Final = 16
"""As in the broker: a longer gap is damage, and must not fill the disk."""
_FILLERS_AT_ONCE: Final = 1 << 16


class QueueWriter:
    """Writes one queue into its directory, from its first unit on. ``close`` makes the files durable."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        """``file_bytes`` is a multiple of 20. Raises ``OSError``."""
        self._directory = directory
        self._file_bytes = file_bytes
        self._next: int | None = None
        self._fd = -1
        self._at = 0
        self.units = 0
        """Messages written."""
        self.repeated = 0
        """Messages ignored because their offset was taken."""
        directory.mkdir(parents=True)

    def append(self, offsets: Ints, units: NDArray[np.void]) -> None:
        """Append units at these queue offsets, in log order. Raises ``PipelineError`` for an implausible gap."""
        per_file = self._file_bytes // UNIT_BYTES
        for first, last in _consecutive(offsets):
            offset = int(offsets[first])
            if self._next is None:
                self._next = offset - offset % per_file
                self._at = self._next * UNIT_BYTES
            skipped = min(max(self._next - offset, 0), last - first)
            self.repeated += skipped
            first, offset = first + skipped, offset + skipped
            if first == last:
                continue
            gap = offset - self._next
            if gap > _GAP_FILES_MAX * per_file:
                raise PipelineError(
                    f"{self._directory.parent.name}, queue {self._directory.name}: after queue offset {self._next - 1} "
                    f"comes {offset}, of the record at {int(units['offset'][first])}: the log is damaged there"
                )
            for missing in range(gap, 0, -_FILLERS_AT_ONCE):
                self._write(FILLER_BYTES * min(missing, _FILLERS_AT_ONCE))
            self._write(units[first:last].tobytes())
            self._next = offset + last - first
            self.units += last - first

    def close(self) -> None:
        """Make the last file durable."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        done = 0
        with memoryview(data) as view:
            while done < len(data):
                inside = self._at % self._file_bytes
                if self._fd < 0 or not inside:
                    self._open_next()
                count = os.pwrite(self._fd, view[done : done + self._file_bytes - inside], inside)
                done += count
                self._at += count

    def _open_next(self) -> None:
        self.close()
        path = self._directory / segment_name(self._at - self._at % self._file_bytes)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(self._fd, self._file_bytes)


def _consecutive(offsets: Ints) -> list[tuple[int, int]]:
    """Runs of consecutive offsets, as (first, end) positions in the array."""
    if not len(offsets):
        return []
    cuts = (np.flatnonzero(np.diff(offsets) != 1) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(offsets)], strict=True))
