"""Finds the end of a plain commit log at startup, and decides whether the bytes after it may be cut.

A crash may tear the last record, and after a power cut any pages of the unflushed end may be missing. Those are cut
off. Anything that a crash cannot explain is damage, and is refused without changing anything: a bad record before the
durable end, or one followed by records two or more files later (a file is durable before the next but one is started);
or, if the durable end is unknown, one followed by records in any later file.

A clean stop records where the log ended, so that the next start need not read its newest gigabytes. The record is valid
only after a clean stop, and while the newest files have the same names, sizes and times and the log still ends with the
same bytes, and there. Otherwise the log is read as usual.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from dledger.errors import CorruptLogError, DiskError
from dledger.store.fs import FileSystem
from rocketstore.mapped.file import StoreFile, read_stop_record, write_stop_record
from rocketstore.mapped.queue import MappedFileQueue
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import BLANK
from rocketstore.message.scan import scan_records
from rocketstore.types import RecordHead

CHUNK_BYTES: Final = 8 * 1024 * 1024
CLEAN_FILES: Final = 3
"""After a clean stop, this many files at the end are read."""
_ADVICE: Final = (
    "Restore the file from a copy. To give up everything from there on, move this file and all later ones away "
    "and start with the files before it"
)

HeadsSink = Callable[[Sequence[RecordHead]], None]


@dataclass(frozen=True, slots=True)
class PlainRecoveryReport:
    """The findings and changes of recovery, for the log line. Offsets are physical."""

    start: int
    end: int
    records: int
    last_timestamp: int = 0
    """Store timestamp of the last record read; 0 if there was none."""
    cut_reason: str = ""
    """Why bytes from ``end`` on were cut; empty if there were only zeros."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a scan, and what follows it."""

    offset: int
    reason: str
    blank_behind: bool
    """Whether the rest of the file is zero."""
    records_behind: tuple[int, ...]
    """The starts of later non-empty files."""


def judge(ending: Ending, *, file_bytes: int, durable_offset: int | None) -> str:
    """Why a log that ends like this must be refused; empty if the bytes after its end may be cut.

    Everything before ``durable_offset`` is known to have been durable; None if nothing is known.
    """
    if durable_offset is not None and ending.offset < durable_offset:
        return f"{ending.reason}; everything before offset {durable_offset} was durable"
    if not ending.records_behind:
        return ""
    newest = ending.records_behind[-1]
    if durable_offset is None:
        return f"{ending.reason}, yet the file at {newest} holds records"
    if newest - (ending.offset - ending.offset % file_bytes) > file_bytes:
        return (
            f"{ending.reason}, yet the file at {newest} holds records, and was started only when this one was durable"
        )
    return ""


class Recovery:
    """One recovery of an opened log."""

    def __init__(self, queue: MappedFileQueue, *, check_crc: bool, delay_levels: DelayLevels) -> None:
        self._queue = queue
        self._check_crc = check_crc
        self._delay_levels = delay_levels
        self._last_timestamp = 0

    def clean_start(self) -> int:
        """Where to start reading after a clean stop: the third last non-empty file."""
        files = list(self._queue.files())
        while len(files) > 1 and files[-1].is_blank():
            files.pop()
        return files[-CLEAN_FILES:][0].base if files else 0

    def start_by_timestamp(self, timestamp_ms: int) -> int:
        """Where to start reading after a crash, given that everything stored up to ``timestamp_ms`` is durable and
        dispatched.

        The newest file whose first record is at least that old; otherwise the oldest file.
        """
        files = self._queue.files()
        for file in reversed(files):
            first = self._first_record(file)
            if first is not None and 0 < first.store_timestamp <= timestamp_ms:
                return file.base
        return files[0].base if files else 0

    def _first_record(self, file: StoreFile) -> RecordHead | None:
        size, _ = BLANK.unpack(file.peek(0, BLANK.size))
        if not 0 < size <= file.size:
            return None
        heads = scan_records(file.peek(0, size), file.base, check_crc=False).heads
        return heads[0] if heads else None

    def run(self, start: int, durable_offset: int | None, on_heads: HeadsSink | None) -> PlainRecoveryReport:
        """Read from ``start`` (of a file or record), pass on sound records, and cut what follows them.

        Raises ``CorruptLogError`` without changing anything if that must not be cut; ``DiskError``.
        """
        files = self._queue.files()
        offset, reason, records = start, "", 0
        ended: StoreFile | None = None
        for file in files:
            if file.base + file.size <= start:
                continue
            offset, reason, found = self._read_file(file, max(start, file.base), on_heads)
            records += found
            if reason:
                ended = file
                break
        if ended is not None:
            reason = self._decide(ended, offset, reason, durable_offset)
        self._queue.truncate(offset, keep_first=bool(files) and files[0].base > 0)
        for file in self._queue.files()[-CLEAN_FILES:]:
            file.sync()  # a killed process leaves data written, but not durable
        self._queue.set_end(offset)
        return PlainRecoveryReport(start, offset, records, self._last_timestamp, reason)

    def _read_file(self, file: StoreFile, start: int, on_heads: HeadsSink | None) -> tuple[int, str, int]:
        """Read one file: returns its end, why it ends early (empty if it does not), and the number of records."""
        offset, records, wanted = start, 0, CHUNK_BYTES
        file_end = file.base + file.size
        while offset + BLANK.size <= file_end:
            data = file.peek(offset - file.base, wanted)
            outcome = scan_records(data, offset, check_crc=self._check_crc, delay_levels=self._delay_levels)
            if outcome.heads:
                self._last_timestamp = max(self._last_timestamp, outcome.heads[-1].store_timestamp)
                if on_heads is not None:
                    on_heads(outcome.heads)
            records += len(outcome.heads)
            offset += outcome.consumed
            if outcome.end == "blank":
                if outcome.needed == file_end - offset:
                    return file_end, "", records
                return offset, f"{outcome.reason}, which does not match the rest of the file", records
            if outcome.end == "damaged" or outcome.needed > file_end - offset:
                return offset, outcome.reason, records
            wanted = max(CHUNK_BYTES, outcome.needed)
        return (file_end, "", records) if offset == file_end else (offset, "too little room for a record", records)

    def _decide(self, file: StoreFile, offset: int, reason: str, durable_offset: int | None) -> str:
        """The reason for a cut; empty if there are only zeros to cut. Raises ``CorruptLogError``."""
        later = tuple(one.base for one in self._queue.files() if one.base > file.base and not one.is_blank())
        ending = Ending(offset, reason, file.is_blank(offset - file.base), later)
        refusal = judge(ending, file_bytes=file.size, durable_offset=durable_offset)
        if refusal:
            raise CorruptLogError(file.path, offset - file.base, refusal, _ADVICE)
        return "" if ending.blank_behind and not later else reason


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
    """CRC32 of the last bytes before ``end`` in their file, and of those where a next record would begin."""

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
    return zlib.crc32(last.peek(start - last.base, end - start + BLANK.size))
