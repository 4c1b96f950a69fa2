"""Records where a plain log ended at a clean stop, so that the next start need not read its newest gigabytes.

The record is valid only after a clean stop, and while the newest files have the same names, sizes and times and the
log still ends with the same bytes. Otherwise the log is read as usual.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from dledger.errors import DiskError
from dledger.store.fs import FileSystem
from rocketstore.mapped.file import StoreFile
from rocketstore.mapped.stop_record import read_stop_record, write_stop_record

LOG_END_FILE: Final = "logEnd.json"
_TAIL_BYTES: Final = 64 * 1024

_log = logging.getLogger("rocketstore")


class LogEnd(NamedTuple):
    """The end of a log that is flushed and no longer written."""

    files: list[list[int]]
    """The start of each of the newest files, oldest first, and its modification time (ns)."""
    end: int
    last_timestamp: int
    """Store timestamp of the last record; 0 if there is none."""
    tail_crc: int
    """CRC32 of the last bytes before ``end`` in their file."""

    def is_of(self, files: Sequence[StoreFile]) -> bool:
        """Whether these files of the right size are as this stop left them. Raises ``OSError``, ``DiskError``."""
        newest = [file for file in files if file.base >= self.files[0][0]]
        return (
            _places(newest) == self.files
            and newest[-1].base <= self.end <= newest[-1].end
            and _tail_crc(newest[-1], self.end) == self.tail_crc
        )


def write_log_end(fs: FileSystem, path: Path, newest: Sequence[StoreFile], end: int, last_timestamp: int) -> None:
    """Record that the log, whose ``newest`` files are durable, ends at ``end``; if that fails, the next start reads
    them.
    """
    try:
        places = _places(newest)
        write_stop_record(fs, path, LogEnd(places, end, last_timestamp, _tail_crc(newest[-1], end)))
    except (OSError, DiskError) as error:
        _log.warning("the next start will read the newest files of the commit log: %s", error)


def read_log_end(path: Path) -> LogEnd | None:
    """The record of the last clean stop that wrote one; whether the log is still as then is shown by its files."""
    return read_stop_record(path, _parsed)


def _parsed(found: Any) -> LogEnd:  # noqa: ANN401  # JSON
    places, end, last_timestamp, tail_crc = found
    files = [[int(base), int(time_ns)] for base, time_ns in places]
    if not files:
        raise ValueError("it names no file")
    return LogEnd(files, int(end), int(last_timestamp), int(tail_crc))


def _places(files: Sequence[StoreFile]) -> list[list[int]]:
    return [[file.base, file.path.stat().st_mtime_ns] for file in files]


def _tail_crc(last: StoreFile, end: int) -> int:
    start = max(last.base, end - _TAIL_BYTES)
    return zlib.crc32(last.peek(start - last.base, end - start))
