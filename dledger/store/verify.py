"""Verifies a stopped node's whole directory: log, index, checkpoint, term and vote, identity; and compares directories.

Reads only and takes no lock. ``inspect`` reads the records and index units; its findings are checked here against the
evidence beside the log. Remains of an unclean stop behind the durable mark are not damage: the next start cuts it.

Directories of one group are compared by their chains: an entry's ``chainCrc`` vouches for every entry before it, so two
intact logs are equal up to an entry if they agree there, and if they differ, they differ from the first differing
sample on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError
from dledger.records import INDEX_UNIT_BYTES
from dledger.store.durable_state import LogCheckpoint, Mark, check_hard_state, mark_of, read_checkpoint
from dledger.store.format import (
    HEADER,
    EntryHeader,
    Follow,
    IndexUnit,
    header_problem,
    parse_segment_name,
    segment_name,
)
from dledger.store.identity import StoreIdentity, read_identity
from dledger.store.inspect import (
    DataItem,
    ProblemItem,
    RecordItem,
    UnitItem,
    inspect_data,
    inspect_index,
    segment_paths,
)
from dledger.types import GENESIS

SAMPLE_ENTRIES: Final = 4096
"""One chain CRC per this many entries is kept for comparisons."""
PROBLEMS_MAX: Final = 1000
"""Further ones are counted, not listed."""
_IDENTITY_FILE: Final = "identity"
_CHECKPOINT_FILE: Final = "checkpoint"


@dataclass(slots=True)
class VerifiedNode:
    """The findings in one directory. Only valid entries count; ``last_index`` is -1 if there are none."""

    directory: Path
    data_dirs: tuple[Path, ...]
    segments: list[Path] = field(default_factory=list)
    """The log's segments that were read, oldest first."""
    identity: StoreIdentity | None = None
    checkpoint: LogCheckpoint | None = None
    entries: int = 0
    first_index: int = -1
    last_index: int = -1
    end: int = 0
    """The end of the last entry; ``committed_end``: of the last committed one."""
    committed_end: int = 0
    torn: ProblemItem | None = None
    """The bytes that an unclean stop left behind the durable mark."""
    problems: list[ProblemItem] = field(default_factory=list)
    problem_count: int = 0
    samples: dict[int, int] = field(default_factory=dict)
    """Chain CRCs by index: of every ``SAMPLE_ENTRIES``-th entry, and of the last committed one."""

    @property
    def committed(self) -> int:
        """The last entry that is known to be committed and present."""
        return min(self.checkpoint.committed if self.checkpoint else -1, self.last_index)

    @property
    def name(self) -> str:
        """For people."""
        return self.identity.node_id if self.identity else self.directory.name

    def add(self, path: Path, offset: int, reason: str) -> None:
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(ProblemItem(path, offset, reason))

    def blame(self, error: CorruptLogError) -> None:
        """Record an error as a problem."""
        self.add(error.path, error.offset, error.reason)


def is_node_directory(path: Path) -> bool:
    """Whether it looks like a node's own directory, damaged or not."""
    return any((path / name).exists() for name in ("data", "hard_state", _IDENTITY_FILE))


def verify_node(directory: Path, data_dirs: tuple[Path, ...] = ()) -> VerifiedNode:
    """Verify everything in a node's directory; ``data_dirs`` if its segments are elsewhere."""
    found = VerifiedNode(directory, data_dirs or (directory / "data",))
    _check_small_files(found)
    data = _segments(found, found.data_dirs)
    index = _segments(found, (directory / "index",))
    if found.identity is not None:
        _check_gaps(found, data, found.identity.segment_bytes)
        data = _of_size(found, data, found.identity.segment_bytes)
        index = _of_size(found, index, found.identity.index_segment_bytes)
    found.segments = data
    _check_records(found, data, index)
    return found


def _check_small_files(found: VerifiedNode) -> None:
    directory = found.directory
    try:
        found.identity = read_identity(directory)
        if found.identity is None:
            found.add(directory / _IDENTITY_FILE, 0, "the identity is missing")
        elif min(found.identity.segment_bytes, found.identity.index_segment_bytes) < INDEX_UNIT_BYTES:
            found.add(directory / _IDENTITY_FILE, 0, "the recorded segment sizes are too small")
            found.identity = None
    except CorruptLogError as error:
        found.blame(error)
    try:
        check_hard_state(directory)
    except CorruptLogError as error:
        found.blame(error)
    try:
        found.checkpoint = read_checkpoint(directory / _CHECKPOINT_FILE)
    except CorruptLogError as error:
        found.blame(error)


def _segments(found: VerifiedNode, directories: tuple[Path, ...]) -> list[Path]:
    paths: list[Path] = []
    for directory in directories:
        if not directory.is_dir():
            found.add(directory, 0, "the directory is missing")
            continue
        try:
            listed = {path: path.is_file() for path in segment_paths(directory)}
        except OSError as error:
            found.add(directory, 0, f"the directory cannot be read: {error.strerror}")
            continue
        for path, is_file in listed.items():
            if is_file:
                paths.append(path)
            else:
                found.add(path, 0, "not a regular file")
    return sorted(paths, key=lambda path: path.name)


def _of_size(found: VerifiedNode, paths: list[Path], size: int) -> list[Path]:
    """The segments to read; a larger one is only reported, since reading it may take hours."""
    sizes = {path: path.stat().st_size for path in paths}
    for path, actual in sizes.items():
        if actual != size:
            found.add(path, min(actual, size), f"the segment has {actual} bytes instead of {size}")
    return [path for path, actual in sizes.items() if actual <= size]


def _check_gaps(found: VerifiedNode, paths: list[Path], size: int) -> None:
    """Every segment from the log's begin to its durable end must be there."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return
    begin, end = checkpoint.begin.position, checkpoint.flushed.position
    wanted = range(begin - begin % size, end, size) if begin < end else range(0)
    bases = {parse_segment_name(path.name) for path in paths}
    present = sum(base in wanted for base in bases)
    missing = (base for base in wanted if base not in bases)
    for base in itertools.islice(missing, PROBLEMS_MAX):
        found.add(found.data_dirs[0] / segment_name(base), 0, "the segment is missing")
    found.problem_count += max(0, len(wanted) - present - PROBLEMS_MAX)


def _check_records(found: VerifiedNode, data: list[Path], index: list[Path]) -> None:
    begin = found.checkpoint.begin if found.checkpoint else GENESIS
    mark = found.checkpoint.flushed if found.checkpoint else mark_of(GENESIS)
    at_mark: Mark | None = mark_of(begin) if mark.index == begin.index else None
    units = _Units(index)
    committed = found.checkpoint.committed if found.checkpoint else -1
    for item in inspect_data([path for path in data if path.stat().st_size], begin):
        if isinstance(item, ProblemItem):
            _place_problem(found, item, mark.position)
        elif isinstance(item, RecordItem):
            header = item.header
            _count(found, header, committed)
            units.compare(found, item)
            if header.index == mark.index:
                at_mark = Mark(header.index, header.position + header.size, header.chain_crc)
    units.finish(found)
    if found.checkpoint is None:
        return
    path = found.directory / _CHECKPOINT_FILE
    if at_mark is None:
        found.add(path, 0, f"entries up to {mark.index} were flushed, but entry {mark.index} is not there")
    elif at_mark != mark:
        found.add(path, 0, f"entry {mark.index} is not the one that was flushed (end or chainCrc differ)")
    if committed > max(found.last_index, begin.index):
        found.add(path, 0, f"entries up to {committed} were committed, but the last one is {found.last_index}")


def _count(found: VerifiedNode, header: EntryHeader, committed: int) -> None:
    found.entries += 1
    if found.first_index < 0:
        found.first_index = header.index
    found.last_index, found.end = header.index, header.position + header.size
    if header.index <= committed:
        found.committed_end = found.end
    if header.index % SAMPLE_ENTRIES == 0 or header.index == committed:
        found.samples[header.index] = header.chain_crc


def _place_problem(found: VerifiedNode, item: ProblemItem, durable_end: int) -> None:
    position = (parse_segment_name(item.path.name) or 0) + item.offset
    unclean = found.checkpoint is not None and not found.checkpoint.clean_stop
    if unclean and position >= durable_end:
        found.torn = found.torn or item
    else:
        found.add(item.path, item.offset, item.reason)


class _Units:
    """The index's units in order, compared with the records as these arrive."""

    def __init__(self, paths: list[Path]) -> None:
        self._items = inspect_index(paths)
        self._next: UnitItem | None = None
        self._problems: list[ProblemItem] = []
        self._wrong = 0
        self._advance()

    def compare(self, found: VerifiedNode, record: RecordItem) -> None:
        """Record the first of consecutive records that the index lacks or contradicts."""
        header = record.header
        while self._next is not None and self._next.unit.index < header.index:
            self._advance()
        unit = self._next.unit if self._next is not None else None
        if unit == IndexUnit(header.magic, header.position, header.size, header.index, header.term):
            self._wrong = 0
            return
        self._wrong += 1
        if self._wrong == 1 and not self._may_be_missing(found, header):
            found.add(record.path, record.offset, f"index and data disagree about entry {header.index}")

    @staticmethod
    def _may_be_missing(found: VerifiedNode, header: EntryHeader) -> bool:
        """Whether the unit may be missing, as those behind the last durable one may after an unclean stop."""
        checkpoint = found.checkpoint
        return checkpoint is not None and not checkpoint.clean_stop and header.index > checkpoint.indexed

    def finish(self, found: VerifiedNode) -> None:
        """Go to the end, for the index's own problems."""
        while self._next is not None:
            self._advance()
        indexed = found.checkpoint.indexed if found.checkpoint else -1
        unclean = found.checkpoint is not None and not found.checkpoint.clean_stop
        for item in self._problems:
            index = ((parse_segment_name(item.path.name) or 0) + item.offset) // INDEX_UNIT_BYTES
            if not (unclean and index > indexed):
                found.add(item.path, item.offset, item.reason)

    def _advance(self) -> None:
        self._next = None
        for item in self._items:
            if isinstance(item, UnitItem):
                self._next = item
                return
            if isinstance(item, ProblemItem):
                self._problems.append(item)


# --- several directories ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogDivergence:
    """Two directories that hold different committed histories; ``index`` is the first entry that differs."""

    one: str
    other: str
    index: int
    place: ProblemItem
    """Where that entry is in the first directory."""

    def sentence(self) -> str:
        """For people."""
        return f"{self.one} and {self.other} hold different committed entries from {self.index} on"


def compare_nodes(nodes: Sequence[VerifiedNode]) -> Iterator[LogDivergence | str]:
    """The differences between any two of them; a text where two cannot be compared."""
    for one, other in itertools.combinations(nodes, 2):
        if _group_of(one) != _group_of(other):
            yield f"{one.directory} and {other.directory} belong to different groups: not compared"
            continue
        until = min(one.committed, other.committed)
        if until < max(one.first_index, other.first_index):
            yield f"{one.directory} and {other.directory} have no committed entry in common: nothing was compared"
            continue
        common = sorted(index for index in one.samples.keys() & other.samples.keys() if index <= until)
        equal = list(itertools.takewhile(lambda index: one.samples[index] == other.samples[index], common))  # noqa: B023
        low = equal[-1] if equal else -1
        high = common[len(equal)] if len(equal) < len(common) else until
        low = max(low, one.first_index - 1, other.first_index - 1)  # a log may begin billions of entries later
        found = _first_difference(one, other, low, high)
        if found is not None:
            yield found


def _group_of(node: VerifiedNode) -> tuple[str, str] | None:
    return (node.identity.cluster_id, node.identity.group) if node.identity else None


def _first_difference(one: VerifiedNode, other: VerifiedNode, low: int, high: int) -> LogDivergence | None:
    """The first entry in ``(low, high]`` whose chain CRCs differ."""
    theirs = {item.header.index: item.header.chain_crc for item in _records(other, low, high)}
    for item in _records(one, low, high):
        if theirs.get(item.header.index, item.header.chain_crc) != item.header.chain_crc:
            place = ProblemItem(item.path, item.offset, "the entries differ from here on")
            return LogDivergence(str(one.directory), str(other.directory), item.header.index, place)
    return None


def _records(node: VerifiedNode, low: int, high: int) -> Iterator[RecordItem]:
    begin = node.checkpoint.begin if node.checkpoint else GENESIS
    data = _from_segment_of(node.segments, low)
    items: Iterator[DataItem] = inspect_data(data, begin)
    for item in items:
        if isinstance(item, RecordItem):
            if item.header.index > high:
                return
            if item.header.index > low:
                yield item


def _from_segment_of(data: list[Path], index: int) -> list[Path]:
    """The segments that may hold ``index`` or later entries, by the first record of each."""
    start = 0
    for number, path in enumerate(data):
        first = _first_index(path)
        if first is not None and first <= index:
            start = number
    return data[start:]


def _first_index(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
    except OSError:
        return None
    if len(head) < HEADER.size:
        return None
    header = EntryHeader(*HEADER.unpack(head))
    problem = header_problem(header, parse_segment_name(path.name) or 0, Follow(header.index - 1, 0, 0))
    return None if problem else header.index
