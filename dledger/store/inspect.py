"""Inspects a stopped node's files: every record, blank and index unit, verified, and each file's first bad offset.

Reads only; takes no lock. In a segment whose predecessor is missing or damaged the chain is verified from the second
record on. After a problem the rest of that segment is unknown; the next one is inspected all the same.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crc32c import crc32c

from dledger.errors import CorruptLogError
from dledger.records import BLANK_MAGIC, ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.store.durable_state import LogCheckpoint, read_checkpoint
from dledger.store.format import (
    BLANK,
    HEADER,
    UNIT,
    EntryHeader,
    Follow,
    IndexUnit,
    ScanWindow,
    StopKind,
    after,
    header_problem,
    parse_segment_name,
    scan_records,
)
from dledger.store.fs import extents
from dledger.types import GENESIS, Boundary

_CHUNK_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096
"""The unit of unreadable data around a bad sector."""


@dataclass(frozen=True, slots=True)
class RecordItem:
    """A verified entry record."""

    path: Path
    offset: int
    header: EntryHeader
    body: bytes


@dataclass(frozen=True, slots=True)
class BlankItem:
    """A blank of ``length`` bytes."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class UnitItem:
    """An index unit in its place."""

    path: Path
    offset: int
    unit: IndexUnit


@dataclass(frozen=True, slots=True)
class EndItem:
    """The end of a file's content: only zeros follow."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class ProblemItem:
    """The first bad offset of a file and its problem."""

    path: Path
    offset: int
    reason: str


DataItem = RecordItem | BlankItem | EndItem | ProblemItem
IndexItem = UnitItem | EndItem | ProblemItem


def begin_of(directory: Path) -> Boundary:
    """Where the log in a node's directory begins, if its checkpoint is readable."""
    checkpoint = _checkpoint_of(directory)
    return checkpoint.begin if checkpoint else GENESIS


def _checkpoint_of(directory: Path) -> LogCheckpoint | None:
    try:
        return read_checkpoint(directory / "checkpoint")
    except CorruptLogError:
        return None


def segment_paths(directory: Path) -> list[Path]:
    """The segment files of a data or index directory, oldest first."""
    return sorted(path for path in directory.iterdir() if parse_segment_name(path.name) is not None)


def inspect_data(paths: list[Path], begin: Boundary = GENESIS) -> Iterator[DataItem]:
    """All items in data segments (oldest first) of a log that starts after ``begin``."""
    follow: Follow | None = None
    end: EndItem | None = None
    for path in paths:
        file = _mapped(path)
        if isinstance(file, ProblemItem):
            yield file
            follow = None
            continue
        offset = 0
        if file.base <= begin.position < file.base + file.size:
            offset, follow = begin.position - file.base, after(begin)
        for item in _inspect_segment(file, offset, None if end else follow):
            if end and not isinstance(item, EndItem):
                yield ProblemItem(end.path, end.offset, f"zeros, although {path.name} holds more")
                end = None
            if isinstance(item, RecordItem):
                follow = Follow(item.header.index, item.header.term, item.header.chain_crc)
            elif isinstance(item, ProblemItem):
                follow = None
            elif isinstance(item, EndItem):
                end = end or item
                continue
            yield item
    if end:
        yield end


class _Mapped:
    """A file up to its first unreadable sector: mapping beyond it would end the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base = parse_segment_name(path.name) or 0
        if not path.is_file():  # opening a pipe would wait for its writer
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            whole = os.fstat(file.fileno()).st_size
            self.written = extents(file.fileno(), 0, whole)
            """The ranges ever written: the rest, which may be terabytes, is zeros."""
            self.size, self.unreadable = _readable(file.fileno(), self.written, whole)
            self.map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else b""

    def first_used(self) -> int:
        """The offset of the first byte other than 0; ``size`` if there is none."""
        for start, end in self.written:
            for at in range(start, min(end, self.size), _CHUNK_BYTES):
                chunk = self.map[at : min(at + _CHUNK_BYTES, end)]
                if used := chunk.lstrip(b"\0"):
                    return at + len(chunk) - len(used)
        return self.size


def _readable(fd: int, written: list[tuple[int, int]], size: int) -> tuple[int, str]:
    """How far a file can be read, and why no further."""
    at = 0
    try:
        for start, end in written:
            for at in range(start, end, _CHUNK_BYTES):
                os.pread(fd, min(_CHUNK_BYTES, end - at), at)
    except OSError as error:
        why = f"it cannot be read: {error.strerror}"
    else:
        return size, ""
    at -= at % _PAGE_BYTES
    while at < size:
        try:
            os.pread(fd, min(_PAGE_BYTES, size - at), at)
        except OSError:
            break
        at += _PAGE_BYTES
    return min(at, size), why


def _mapped(path: Path) -> _Mapped | ProblemItem:
    try:
        return _Mapped(path)
    except OSError as error:  # such as a terabyte in a process with limited memory
        return ProblemItem(path, 0, f"cannot read the file: {error.strerror}")


def _inspect_segment(file: _Mapped, offset: int, follow: Follow | None) -> Iterator[DataItem]:
    while offset + MIN_BLANK_BYTES <= file.size:
        item = _item_at(file, offset, follow)
        if file.unreadable and not isinstance(item, RecordItem | BlankItem):
            break
        yield item
        if isinstance(item, RecordItem):
            offset += item.header.size
            follow = Follow(item.header.index, item.header.term, item.header.chain_crc)
        elif isinstance(item, BlankItem):
            offset += item.length
        else:
            return
    if file.unreadable:
        yield ProblemItem(file.path, file.size, file.unreadable)
    elif offset != file.size:
        yield ProblemItem(file.path, offset, f"the file ends {file.size - offset} bytes after its last whole record")


def _item_at(file: _Mapped, offset: int, follow: Follow | None) -> DataItem:
    magic, length = BLANK.unpack_from(file.map, offset)
    if magic == BLANK_MAGIC:
        if MIN_BLANK_BYTES <= length <= file.size - offset:
            return BlankItem(file.path, offset, length)
        return ProblemItem(file.path, offset, f"a blank of {length} bytes, but {file.size - offset} bytes are left")
    head = file.map[offset : offset + ENTRY_HEADER_BYTES]
    if not any(head):
        return EndItem(file.path, offset)
    if len(head) < ENTRY_HEADER_BYTES:
        return ProblemItem(file.path, offset, "too little room for an entry header")
    header = EntryHeader(*HEADER.unpack(head))
    reason = _unchained_problem(file, offset, header) if follow is None else _chained_problem(file, offset, follow)
    if reason:
        return ProblemItem(file.path, offset, reason)
    return RecordItem(file.path, offset, header, file.map[offset + ENTRY_HEADER_BYTES : offset + header.size])


def _chained_problem(file: _Mapped, offset: int, follow: Follow) -> str:
    with memoryview(file.map) as view:
        # Records of the Java line (both CRC fields 0) are shown, not reported: they carry no checksums to verify.
        scan = scan_records(ScanWindow(view, file.base, offset, file.size, unchecked=True), follow, 1)
    return "" if scan.count else scan.reason if scan.stop is StopKind.BAD else "no record starts here"


def _unchained_problem(file: _Mapped, offset: int, header: EntryHeader) -> str:
    problem = header_problem(header, file.base + offset, Follow(header.index - 1, 0, 0))
    if problem:
        return problem
    body = file.map[offset + ENTRY_HEADER_BYTES : offset + header.size]
    unchecked = header.chain_crc == 0 and header.body_crc == 0
    if len(body) != header.body_length or (crc32c(body) != header.body_crc and not unchecked):
        return f"bodyCrc of entry {header.index} does not match its body"
    return ""


def inspect_index(paths: list[Path]) -> Iterator[IndexItem]:
    """All items in index segments; each unit must be in its place and continue the one before."""
    for path in paths:
        file = _mapped(path)
        if isinstance(file, ProblemItem):
            yield file
            continue
        previous: IndexUnit | None = None
        begin = file.first_used()  # a log that begins later has no units before its begin
        begin -= begin % INDEX_UNIT_BYTES
        for offset in range(begin, file.size - INDEX_UNIT_BYTES + 1, INDEX_UNIT_BYTES):
            unit = IndexUnit(*UNIT.unpack_from(file.map, offset))
            if unit == IndexUnit(0, 0, 0, 0, 0):
                yield EndItem(path, offset)
                break
            reason = _unit_problem(unit, (file.base + offset) // INDEX_UNIT_BYTES, previous)
            if reason:
                yield ProblemItem(path, offset, reason)
                break
            previous = unit
            yield UnitItem(path, offset, unit)
        if file.unreadable:
            yield ProblemItem(path, file.size, file.unreadable)


def _unit_problem(unit: IndexUnit, index: int, previous: IndexUnit | None) -> str:
    if unit.index != index:
        return f"found index {unit.index} where {index} was expected"
    if previous and (unit.position < previous.position + previous.size or unit.term < previous.term):
        return f"unit of entry {index} does not continue the one before"
    return ""


def problems(directory: Path, data_dirs: tuple[Path, ...] = ()) -> Iterator[ProblemItem]:
    """All problems in a node's directory, and every entry on which index and data differ.

    Of consecutive entries that only the index has, only the first is reported. Index units that an unclean stop left
    behind the log's end are no problem.
    """
    data = sorted((p for one in data_dirs or (directory / "data",) for p in segment_paths(one)), key=lambda p: p.name)
    checkpoint = _checkpoint_of(directory)
    begin = checkpoint.begin if checkpoint else GENESIS
    units = _UnitsInOrder(segment_paths(directory / "index"), begin.index)
    is_known = checkpoint is not None  # whether a missing record before the next one would be noticed
    for item in inspect_data(data, begin):
        if isinstance(item, ProblemItem):
            is_known = False
            yield item
        elif isinstance(item, RecordItem):
            header = item.header
            alone = units.go_to(header.index)
            if alone is not None and is_known:
                yield alone
            is_known = True
            wanted = IndexUnit(header.magic, header.position, header.size, header.index, header.term)
            if units.next is None or units.next.unit != wanted:
                yield ProblemItem(item.path, item.offset, f"index and data disagree about entry {header.index}")
            units.pass_by(header.index)
    alone = units.go_to(checkpoint.flushed.index + 1) if checkpoint else None
    if alone is not None and is_known:
        yield alone
    units.go_to(None)
    yield from units.problems


class _UnitsInOrder:
    """Index units in order, none of them kept: there may be billions."""

    def __init__(self, paths: list[Path], begin_index: int) -> None:
        self._items = inspect_index(paths)
        self.problems: list[ProblemItem] = []
        """At most two per file."""
        self.next: UnitItem | None = self._following()
        self.go_to(begin_index + 1)

    def go_to(self, index: int | None) -> ProblemItem | None:
        """Skip the units before that of ``index`` (None: all); the first one skipped is a problem."""
        first = self.next
        while self.next is not None and (index is None or self.next.unit.index < index):
            self.next = self._following()
        if first is None or first is self.next:
            return None
        return ProblemItem(first.path, first.offset, f"the index names entry {first.unit.index}, which has no record")

    def pass_by(self, index: int) -> None:
        """Skip the unit of ``index``."""
        if self.next is not None and self.next.unit.index == index:
            self.next = self._following()

    def _following(self) -> UnitItem | None:
        for item in self._items:
            if isinstance(item, UnitItem):
                return item
            if isinstance(item, ProblemItem):
                self.problems.append(item)
        return None
