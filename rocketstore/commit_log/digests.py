"""A plain log as its files have it: found, read and verified without opening it, and digested.

Digests say whether two brokers hold the same messages, as ``md5sum`` does in RocketMQ's guide; but they cover records
alone, each of them verified. Other bytes of a file (a blank's content, zeros, a torn end) may differ between equal
logs, and a digest of it would not tell a copy that lags from one that differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from dledger.store.format import segment_name
from dledger.store.fs import non_zero_end
from dledger.store.inspect import ProblemItem
from dledger.store.mmap_file_list import list_segments
from rocketstore.config import MIB
from rocketstore.message.columns import read_sound_records
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import BLANK
from rocketstore.types import RecordHead

_CHUNK_BYTES: Final = 8 * MIB
_RECORD_BYTES_MAX: Final = 64 * MIB
"""A record that claims more is damaged."""


@dataclass(frozen=True, slots=True)
class PlainFiles:
    """The files of a plain log, by where they start, and what is wrong with them: missing, or of another size."""

    segment_bytes: int
    paths: Mapping[int, Path]
    problems: tuple[ProblemItem, ...] = ()

    @property
    def min_offset(self) -> int:
        """Where the first file starts; 0 if there is none."""
        return min(self.paths, default=0)


def find_plain_files(directories: Sequence[Path], segment_bytes: int = 0) -> PlainFiles:
    """The files in a plain log's directories.

    Their size is ``segment_bytes`` if any file has it, otherwise that of the largest. Raises ``OSError``.
    """
    problems = [ProblemItem(path, 0, "the directory is missing") for path in directories if not path.is_dir()]
    there = [path for path in dict.fromkeys(directories) if path.is_dir()]
    sizes = {one.stat().st_size for path in there for one in path.iterdir() if one.name.isdecimal()}
    size = segment_bytes if segment_bytes in sizes else max(sizes, default=segment_bytes) or 1
    found = list_segments(there, size).segments
    files = {one.base: one for one in found}
    problems += [
        ProblemItem(one.path, min(one.size, size), f"the file has {one.size} bytes instead of {size}")
        for one in files.values()
        if one.size != size
    ]
    for base, following in pairwise(sorted(files)):
        missing = (following - base - 1) // size
        if missing:
            reason = "the file is missing" if missing == 1 else f"{missing} files from here on are missing"
            problems.append(ProblemItem(files[base].path.parent / segment_name(base + size), 0, reason))
    return PlainFiles(size, {base: one.path for base, one in files.items() if one.size == size}, tuple(problems))


class FileEnding(Enum):
    """The kind of bytes behind the last sound record of a file."""

    FULL = "full"
    """A blank, or too little room for one: the log goes on in the next file."""
    ZEROS = "zeros"
    """Nothing but zeros: the log ends here, or the file was never written."""
    OTHER = "other"
    """Neither: damage, or a torn end."""


class SoundPiece(NamedTuple):
    """Whole, verified records of one file: where they start, their bytes, and their heads."""

    offset: int
    data: bytes
    heads: Sequence[RecordHead]


class PlainFileReader:
    """Reads one file from ``start`` (of a record) on, in pieces; afterwards ``end``, ``ending`` and ``reason`` say how
    it ended.
    """

    def __init__(
        self,
        path: Path,
        base: int,
        segment_bytes: int,
        start: int | None = None,
        delay_levels: DelayLevels | None = None,
    ) -> None:
        self.path: Final = path
        self.end = base if start is None else start
        """The end of the last sound record read."""
        self.ending = FileEnding.OTHER
        self.reason = ""
        """With ``FileEnding.OTHER``: what is wrong there."""
        self._base = base
        self._file_end = base + segment_bytes
        self._delay_levels = delay_levels

    def __iter__(self) -> Iterator[SoundPiece]:
        """Raises ``OSError``."""
        with self.path.open("rb") as file:
            yield from self._pieces(file.fileno())

    def _pieces(self, fd: int) -> Iterator[SoundPiece]:
        wanted = _CHUNK_BYTES
        while (room := self._file_end - self.end) >= BLANK.size:
            data = os.pread(fd, min(wanted, room), self.end - self._base)
            found = read_sound_records(data, self.end, delay_levels=self._delay_levels)
            if found.consumed:
                begin, self.end = self.end, self.end + found.consumed
                yield SoundPiece(begin, data[: found.consumed], found.heads)
                room -= found.consumed
            if found.end == "blank" and found.needed == room:
                break
            cut_off = found.end == "more" and len(data) - found.consumed < found.needed <= min(room, _RECORD_BYTES_MAX)
            if not cut_off and not (found.end == "more" and found.consumed):
                is_zero = non_zero_end(fd, self.end - self._base, self._file_end - self._base) <= self.end - self._base
                self.ending = FileEnding.ZEROS if is_zero else FileEnding.OTHER
                self.reason = "" if is_zero else found.reason
                return
            wanted = max(_CHUNK_BYTES, found.needed)
        self.ending = FileEnding.FULL


class FileDigest(NamedTuple):
    """The content of a file: where it starts, its sound records' bytes from there on, their CRC32C and number."""

    base: int
    length: int
    crc32c: int
    records: int
    ending: FileEnding
    reason: str = ""
    """With ``FileEnding.OTHER``: what is wrong behind the records."""

    @property
    def end(self) -> int:
        """The end of the last record."""
        return self.base + self.length


@dataclass(frozen=True, slots=True)
class LogDigest:
    """A whole log's digest: its files that hold anything, oldest first, and everything that is wrong with it."""

    segment_bytes: int
    min_offset: int
    files: tuple[FileDigest, ...]
    problems: tuple[ProblemItem, ...] = ()
    torn: ProblemItem | None = None
    """The bytes that an unclean stop left behind the last record; the next start cuts them."""

    @property
    def end(self) -> int:
        """The end of the last record; where the log begins if there is none."""
        return self.files[-1].end if self.files else self.min_offset

    @property
    def divided(self) -> int:
        """Where a group goes on that continues this log: the end of the last file that holds anything."""
        return self.files[-1].base + self.segment_bytes if self.files else self.min_offset

    def difference(self, other: LogDigest) -> str:
        """Why a group cannot continue both logs; empty if they hold the same, apart from what has expired in one.

        A damaged log is equal to none.
        """
        if damaged := (*self.problems, *other.problems):
            return f"{damaged[0].path}: offset {damaged[0].offset}: {damaged[0].reason}"
        if self.files and other.files and self.segment_bytes != other.segment_bytes:
            return f"files of {self.segment_bytes} bytes, and of {other.segment_bytes}"
        if self.end != other.end:
            return f"one ends at offset {self.end}, the other at {other.end}"
        begin = max(self.min_offset, other.min_offset)
        ours, theirs = ({one.base: one[1:3] for one in log.files if one.base >= begin} for log in (self, other))
        unlike = [base for base in sorted(ours.keys() | theirs.keys()) if ours.get(base) != theirs.get(base)]
        return f"the records of file {segment_name(unlike[0])} differ" if unlike else ""


def digest_file(path: Path, base: int, segment_bytes: int) -> FileDigest:
    """Read and verify one file. Raises ``OSError``."""
    reader = PlainFileReader(path, base, segment_bytes)
    crc = records = 0
    for piece in reader:
        crc, records = crc32c(piece.data, crc), records + len(piece.heads)
    return FileDigest(base, reader.end - base, crc, records, reader.ending, reader.reason)


def digest_log(files: PlainFiles, advance: Callable[[], None] = lambda: None) -> LogDigest:
    """Read and verify all of a log; ``advance`` is called after each file. Raises ``OSError``."""
    found = []
    for base, path in sorted(files.paths.items()):
        found.append(digest_file(path, base, files.segment_bytes))
        advance()
    return digest_of(files, found)


def digest_of(files: PlainFiles, found: list[FileDigest]) -> LogDigest:
    """The log's digest, given those of its files, oldest first. A torn end is damage if a later file has records."""
    problems, torn = list(files.problems), None
    while found and not found[-1].length and found[-1].ending is FileEnding.ZEROS:
        found.pop()
    for number, one in enumerate(found):
        if one.ending is FileEnding.FULL or (one.ending is FileEnding.ZEROS and number == len(found) - 1):
            continue
        place = ProblemItem(
            files.paths[one.base], one.length, one.reason or "the records end, and the next file has more"
        )
        if number == len(found) - 1:
            torn = place
        else:
            problems.append(place)
    return LogDigest(files.segment_bytes, files.min_offset, tuple(found), tuple(problems), torn)
