"""Looking into a stopped node's files: every record, blank and index unit, verified, and each file's first bad offset.

Reads only; takes no lock. In a segment whose predecessor is missing or damaged the chain is verified from the second
record on. After a problem the rest of that segment is unknown; the next one is looked at all the same.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from dledger.errors import CorruptLogError
from dledger.layout import ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.store.checkpoint import read_checkpoint
from dledger.store.format import (
    BLANK,
    BLANK_MAGIC,
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
from dledger.types import GENESIS, Boundary


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
    """An index unit that is in its place."""

    path: Path
    offset: int
    unit: IndexUnit


@dataclass(frozen=True, slots=True)
class EndItem:
    """Where a file's content ends: only zeros follow."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class ProblemItem:
    """The first bad offset of a file and what is wrong there."""

    path: Path
    offset: int
    reason: str


DataItem = RecordItem | BlankItem | EndItem | ProblemItem
IndexItem = UnitItem | EndItem | ProblemItem


def begin_of(directory: Path) -> Boundary:
    """Where the log in a node's directory begins, as far as its checkpoint can be read."""
    try:
        return read_checkpoint(directory / "checkpoint").begin
    except CorruptLogError:
        return GENESIS


def segment_paths(directory: Path) -> list[Path]:
    """The segment files of a data or index directory, oldest first."""
    return sorted(path for path in directory.iterdir() if parse_segment_name(path.name) is not None)


def inspect_data(paths: list[Path], begin: Boundary = GENESIS) -> Iterator[DataItem]:
    """Everything in data segments (oldest first), which belong to a log that starts after ``begin``."""
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
    """A whole file, readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base = parse_segment_name(path.name) or 0
        self.size = path.stat().st_size
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""


def _mapped(path: Path) -> _Mapped | ProblemItem:
    try:
        return _Mapped(path)
    except OSError as error:  # such as one of a terabyte, where a process may not have so much
        return ProblemItem(path, 0, f"the file cannot be read: {error.strerror}")


def _inspect_segment(file: _Mapped, offset: int, follow: Follow | None) -> Iterator[DataItem]:
    while offset + MIN_BLANK_BYTES <= file.size:
        item = _item_at(file, offset, follow)
        yield item
        if isinstance(item, RecordItem):
            offset += item.header.size
            follow = Follow(item.header.index, item.header.term, item.header.chain_crc)
        elif isinstance(item, BlankItem):
            offset += item.length
        else:
            return
    if offset != file.size:
        yield ProblemItem(file.path, offset, f"the file ends {file.size - offset} bytes after its last whole record")


def _item_at(file: _Mapped, offset: int, follow: Follow | None) -> DataItem:
    magic, length = BLANK.unpack_from(file.map, offset)
    if magic == BLANK_MAGIC:
        if MIN_BLANK_BYTES <= length <= file.size - offset:
            return BlankItem(file.path, offset, length)
        return ProblemItem(file.path, offset, f"a blank of {length} bytes where {file.size - offset} are left")
    head = file.map[offset : offset + ENTRY_HEADER_BYTES]
    if not any(head):
        return EndItem(file.path, offset)
    if len(head) < ENTRY_HEADER_BYTES:
        return ProblemItem(file.path, offset, "less than an entry header is left")
    header = EntryHeader(*HEADER.unpack(head))
    reason = _unchained_problem(file, offset, header) if follow is None else _chained_problem(file, offset, follow)
    if reason:
        return ProblemItem(file.path, offset, reason)
    return RecordItem(file.path, offset, header, file.map[offset + ENTRY_HEADER_BYTES : offset + header.size])


def _chained_problem(file: _Mapped, offset: int, follow: Follow) -> str:
    with memoryview(file.map) as view:
        # Records of the Java line (both CRC fields 0) are shown, not reported: nothing vouches for them.
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
    """Everything in index segments, each unit checked for being in its place and continuing the one before."""
    for path in paths:
        file = _mapped(path)
        if isinstance(file, ProblemItem):
            yield file
            continue
        previous: IndexUnit | None = None
        for offset in range(0, file.size - INDEX_UNIT_BYTES + 1, INDEX_UNIT_BYTES):
            unit = IndexUnit(*UNIT.unpack_from(file.map, offset))
            if unit == IndexUnit(0, 0, 0, 0, 0):
                if previous is not None:
                    yield EndItem(path, offset)
                    break
                continue  # a log that begins later leaves the units before its begin empty
            reason = _unit_problem(unit, (file.base + offset) // INDEX_UNIT_BYTES, previous)
            if reason:
                yield ProblemItem(path, offset, reason)
                break
            previous = unit
            yield UnitItem(path, offset, unit)


def _unit_problem(unit: IndexUnit, index: int, previous: IndexUnit | None) -> str:
    if unit.index != index:
        return f"index {unit.index} found in the place of {index}"
    if previous and (unit.position < previous.position + previous.size or unit.term < previous.term):
        return f"unit of entry {index} does not continue the one before"
    return ""


def problems(directory: Path, data_dirs: tuple[Path, ...] = ()) -> Iterator[ProblemItem]:
    """All problems in a node's directory, and every entry on which index and data differ."""
    data = sorted((p for one in data_dirs or (directory / "data",) for p in segment_paths(one)), key=lambda p: p.name)
    units = {item.unit.index: item for item in _units(directory / "index")}
    for item in inspect_data(data, begin_of(directory)):
        if isinstance(item, ProblemItem):
            yield item
        elif isinstance(item, RecordItem):
            found, header = units.get(item.header.index), item.header
            wanted = IndexUnit(header.magic, header.position, header.size, header.index, header.term)
            if found is None or found.unit != wanted:
                yield ProblemItem(item.path, item.offset, f"the index does not agree about entry {header.index}")
    yield from (item for item in inspect_index(segment_paths(directory / "index")) if isinstance(item, ProblemItem))


def _units(directory: Path) -> Iterator[UnitItem]:
    return (item for item in inspect_index(segment_paths(directory)) if isinstance(item, UnitItem))
