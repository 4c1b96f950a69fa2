"""A plain log as its files have it, and the record of the one that a group's log continues.

``PlainFileReader`` and ``digest_log`` find, read and verify the files without opening the log. Digests say whether two
brokers hold the same messages, as ``md5sum`` does in RocketMQ's guide; but they cover records alone, each of them
verified. Other bytes of a file (a blank's content, zeros, a torn end) may differ between equal logs, and a digest of it
would not tell a copy that lags from one that differs.

The record says what the plain log held when the group took it over: a file in the node's directory, written once,
before the group's log has its first entry. While it exists, the plain log's files are part of the broker's log, up to
the record's end; nothing is appended to them any more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from dledger.errors import CorruptLogError
from dledger.store.durable_state import read_checkpoint
from dledger.store.format import parse_segment_name, segment_name
from dledger.store.fs import FileSystem, make_dirs_durably, non_zero_end, read_whole, replace_durably
from dledger.store.identity import CHECKPOINT_FILE
from dledger.store.inspect import ProblemItem
from dledger.store.mmap_file import list_segments
from dledger.types import DIGESTS_MAX, NO_INDEX, BaseLog
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


class _SoundPiece(NamedTuple):
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

    def __iter__(self) -> Iterator[_SoundPiece]:
        """Raises ``OSError``."""
        with self.path.open("rb") as file:
            yield from self._pieces(file.fileno())

    def _pieces(self, fd: int) -> Iterator[_SoundPiece]:
        wanted = _CHUNK_BYTES
        while (room := self._file_end - self.end) >= BLANK.size:
            data = os.pread(fd, min(wanted, room), self.end - self._base)
            found = read_sound_records(data, self.end, delay_levels=self._delay_levels)
            if found.consumed:
                begin, self.end = self.end, self.end + found.consumed
                yield _SoundPiece(begin, data[: found.consumed], found.heads)
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


OLD_LOG_FILE: Final = "old-log"
_EXPIRED_FILE: Final = "old-log-expired"
_HEAD_BYTES: Final = 8
_VERSION: Final = 1
_ADVICE: Final = (
    "Copy the file of this name from another member of the group: it is the same on all of them, if their old logs are"
)
_DAMAGE_ADVICE: Final = "Restore the file from a copy, or from another broker: dledger upgrade check --align"


def read_base_log(node_directory: Path) -> BaseLog | None:
    """The record; None if the group's log continues no other. Raises ``CorruptLogError``, ``OSError``."""
    path = node_directory / OLD_LOG_FILE
    if not path.exists():
        return None
    try:
        found = _decode(read_whole(path))
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found is None:
        raise CorruptLogError(path, 0, "the record of the old log is unreadable", _ADVICE)
    return found


def base_log_now(node_directory: Path) -> BaseLog | None:
    """The record, and from where its files must still be there. Raises the same as ``read_base_log``."""
    found = read_base_log(node_directory)
    if found is None:
        return None
    return replace(found, kept_from=max(found.begin, ExpiredFiles(FileSystem(), node_directory).end()))


class ExpiredFiles:
    """How far a member's old files may have expired, in a file of its own: any other that is not there is missing.

    Its text is a position: files removed by hand are accepted once their end is written there. It is changed in place,
    in one sector, because old files must go most of all when the disk has no room for another file.
    """

    def __init__(self, fs: FileSystem, node_directory: Path) -> None:
        self._fs = fs
        self._path: Final = node_directory / _EXPIRED_FILE

    def end(self) -> int:
        """The end of what may have expired; 0 if nothing has. Raises ``CorruptLogError``, ``OSError``."""
        try:
            return int(read_whole(self._path))
        except FileNotFoundError:
            return 0
        except ValueError:
            reason = "it holds no position in the old log"
            raise CorruptLogError(self._path, 0, reason, "Write the start of the first old file into it") from None

    def prepare(self) -> None:
        """Create the file, so that ``note`` needs no space. Raises ``OSError``."""
        if not self._path.exists():
            replace_durably(self._fs, self._path, _text_of(0))

    def note(self, end: int) -> None:
        """Durably, before the file that ends at ``end`` is removed. Raises ``OSError``."""
        fd = self._fs.open(self._path)
        try:
            self._fs.write(fd, _text_of(end), 0)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)


def _text_of(position: int) -> bytes:
    return b"%020d\n" % position


def group_has_begun(node_directory: Path) -> bool:
    """Whether the member's log in ``node_directory`` has entries that follow a plain log's. Raises ``OSError``."""
    written = [parse_segment_name(path.name) for path in written_segments(node_directory / "data")]
    if written and 0 not in written:
        return True
    if not (node_directory / OLD_LOG_FILE).exists():
        return False
    try:
        return read_checkpoint(node_directory / CHECKPOINT_FILE).flushed.index != NO_INDEX  # its data may be elsewhere
    except CorruptLogError:
        return True


def written_segments(directory: Path) -> Iterator[Path]:
    """The non-empty segments of a directory; none if there is no such directory. Raises ``OSError``."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _is_written(path):
                yield path


def _is_written(path: Path) -> bool:
    if parse_segment_name(path.name) is None or not path.is_file():
        return False
    with path.open("rb") as file:
        return any(file.read(_HEAD_BYTES))


def _decode(text: bytes) -> BaseLog | None:
    """The record in a file; None, or what Python raises, if it is not one."""
    content = json.loads(text)
    record = content["record"]
    if content["version"] != _VERSION or crc32c(_text(record)) != content["crc32c"]:
        return None
    begin, end, file_bytes = (int(record[name]) for name in ("begin", "end", "file_bytes"))
    return BaseLog(begin, end, file_bytes, tuple(int(one) for one in record["digests"]), begin)


def write_base_log(fs: FileSystem, node_directory: Path, base_log: BaseLog) -> None:
    """Replace the record durably. Raises ``OSError``."""
    record = asdict(base_log)
    del record["kept_from"]
    make_dirs_durably(fs, node_directory)
    content = {"version": _VERSION, "crc32c": crc32c(_text(record)), "record": record}
    replace_durably(fs, node_directory / OLD_LOG_FILE, json.dumps(content, indent=2).encode() + b"\n")


def _text(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":"), sort_keys=True).encode()


def describe(paths: Mapping[int, Path], file_bytes: int, end: int) -> BaseLog:
    """Read and verify the files of a sealed log that ends at ``end``. Raises ``CorruptLogError``, ``OSError``."""
    digest = digest_log(PlainFiles(file_bytes, paths))
    problems = list(digest.problems)
    if digest.torn is not None:
        problems.append(digest.torn)
    elif digest.files and (digest.divided != end or digest.files[-1].ending is not FileEnding.FULL):
        last = digest.files[-1]
        problems.append(ProblemItem(paths[last.base], last.length, "the log ends here, and no blank fills the file"))
    for problem in problems:
        raise CorruptLogError(problem.path, problem.offset, problem.reason, _DAMAGE_ADVICE)
    crcs = tuple(one.crc32c for one in digest.files)[-DIGESTS_MAX:]
    begin = min(paths, default=end)
    return BaseLog(begin, end, file_bytes, crcs, begin)
