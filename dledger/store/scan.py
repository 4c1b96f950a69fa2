"""Scans a log at start: collects the findings on which ``recovery.plan`` decides. Changes nothing.

It starts ``recovery_verify_bytes`` below the flushed mark, at an entry that the index names and the data confirm, and
verifies every record from there to the end. Of earlier segments, only the first record is checked. If the index cannot
be trusted for that, the scan starts at the log's begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dledger.errors import CorruptLogError, IndexBeforeBeginError
from dledger.layout import BLANK_MAGIC, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.store.checkpoint import LogCheckpoint, Mark
from dledger.store.format import (
    BLANK,
    HEADER,
    EntryHeader,
    Follow,
    Scan,
    ScanWindow,
    StopKind,
    after,
    header_chain_crc,
    header_problem,
    scan_records,
    segment_name,
    unit_of,
)
from dledger.store.log_files import LogFiles
from dledger.store.mmap_file import MappedFile, UnreadableError
from dledger.store.mmap_file_list import FoundFile
from dledger.store.recovery import Damage, ScanFindings, is_torn
from dledger.types import Boundary

_CHUNK_ENTRIES = 16 * 1024


@dataclass(slots=True)
class ScanWalk:
    """The state of one pass over the records: the last one verified and its end."""

    follow: Follow
    end: int
    stop_position: int
    kind: StopKind = StopKind.ZERO
    reason: str = "the segment is missing"

    @property
    def mark(self) -> Mark:
        """The last verified entry, its end and chain."""
        return Mark(self.follow.index, self.end, self.follow.chain_crc)


def walk(files: LogFiles, state: ScanWalk, pause_at: int, *, unchecked: bool) -> Iterator[tuple[int, Scan]]:
    """Verify records from ``state`` on over all segments; yields (first index, scan); a chunk ends at ``pause_at``."""
    probed: MappedFile | None = None
    while (file := files.data.find(state.stop_position)) is not None:
        offset = state.stop_position - file.base
        if file is not probed:
            file.probe(offset)
            probed = file
        room = pause_at - state.follow.index
        entries_max = min(_CHUNK_ENTRIES, room) if room > 0 else _CHUNK_ENTRIES
        with memoryview(file.map) as view:
            window = ScanWindow(view, file.base, offset, file.size - MIN_BLANK_BYTES, unchecked)
            scan = scan_records(window, state.follow, entries_max)
        first = state.follow.index + 1
        state.follow, state.kind, state.reason = scan.follow, scan.stop, scan.reason
        state.stop_position = file.base + scan.end_offset
        if scan.count:
            state.end = state.stop_position
            yield first, scan
        if scan.count == entries_max:
            continue
        if not scan.end_offset or not _blank_to_the_end(file, scan.end_offset):
            return
        state.stop_position = file.base + file.size
        state.kind, state.reason = StopKind.ZERO, "the segment is missing"


def _blank_to_the_end(file: MappedFile, offset: int) -> bool:
    magic, length = BLANK.unpack_from(file.map, offset)
    return bool(magic == BLANK_MAGIC and length == file.size - offset)


@dataclass(slots=True)
class LogScanOutcome:
    """Facts for the plan, and what carrying it out needs."""

    findings: ScanFindings
    start: ScanWalk
    last: Follow
    entries: int
    index_wrong_from: int | None
    """The first entry whose index unit is missing or wrong."""


@dataclass(frozen=True, slots=True)
class ScanSettings:
    """How to scan."""

    verify_bytes: int
    unchecked: bool
    directory: Path
    """Named when a segment is missing."""


def scan_log(
    files: LogFiles, misshapen: tuple[FoundFile, ...], checkpoint: LogCheckpoint, settings: ScanSettings
) -> LogScanOutcome:
    bad_files = _misshapen_or_missing(files, misshapen, checkpoint, settings)
    heads_bad, index_agrees = _check_heads(files, checkpoint)
    from_index = _start_from_index(files, checkpoint, settings) if index_agrees else None
    state = from_index or _start_at_begin(checkpoint)
    start = ScanWalk(state.follow, state.end, state.stop_position)
    mark, wrong_from, count = checkpoint.flushed, None, 0
    mark_agrees = state.follow.index != mark.index or state.mark == mark
    for first, scan in walk(files, state, mark.index, unchecked=settings.unchecked):
        count += scan.count
        if wrong_from is None and files.first_wrong_unit(first, scan.units) is not None:
            wrong_from = first
        if state.follow.index == mark.index:
            mark_agrees = state.mark == mark
    findings = ScanFindings(
        checkpoint=checkpoint,
        end=state.mark,
        stop=_stop(files, state, settings),
        stopped_at_bad=state.kind in (StopKind.BAD, StopKind.BLANK),
        rest_in_use=not checkpoint.clean_stop and _in_use_from(files, state.end),
        mark_agrees=mark_agrees,
        torn=_is_torn(files, state),
        bad_files=tuple(sorted((*bad_files, *heads_bad), key=lambda one: one.position)),
        misshapen_middle=_middle(files, misshapen),
    )
    return LogScanOutcome(findings, start, state.follow, count, wrong_from)


def _start_at_begin(checkpoint: LogCheckpoint) -> ScanWalk:
    begin = checkpoint.begin
    return ScanWalk(after(begin), begin.position, begin.position)


def _start_from_index(files: LogFiles, checkpoint: LogCheckpoint, settings: ScanSettings) -> ScanWalk | None:
    """The state before the first entry to verify, or ``None`` to start at the begin."""
    begin, last = checkpoint.begin, min(checkpoint.flushed.index, checkpoint.indexed)
    target = checkpoint.flushed.position - settings.verify_bytes
    if target <= begin.position or last <= begin.index + 1 or not _units_present(files, begin.index + 1, last):
        return None
    try:
        previous = files.first_index_at(target, begin.index + 1, last) - 1
        header = _proven_header(files, previous, begin, unchecked=settings.unchecked)
    except (CorruptLogError, IndexBeforeBeginError):  # the index alone is wrong, and rebuilt; or the scan finds it
        return None
    if header is None:
        return None
    end = header.position + header.size
    return ScanWalk(Follow(previous, header.term, header.chain_crc), end, end)


def _units_present(files: LogFiles, first: int, last: int) -> bool:
    step = files.index.segment_bytes
    bases = range(files.index.base_of(first * INDEX_UNIT_BYTES), last * INDEX_UNIT_BYTES + 1, step)
    return all(files.index.find(base) for base in bases)


def _proven_header(files: LogFiles, index: int, begin: Boundary, *, unchecked: bool) -> EntryHeader | None:
    """The header of an entry after ``begin`` that index and chain confirm."""
    if index <= begin.index:
        return None
    header = files.located(index)
    seed = begin.chain_crc if index == begin.index + 1 else files.located(index - 1).chain_crc
    if header_chain_crc(header, seed) == header.chain_crc or (unchecked and header.chain_crc == header.body_crc == 0):
        return header
    return None


def _check_heads(files: LogFiles, checkpoint: LogCheckpoint) -> tuple[list[Damage], bool]:
    """Check the first record of every segment below the mark: (damage, whether the index agrees with all of them)."""
    damage: list[Damage] = []
    agrees = True
    for file in files.data.files():
        if not checkpoint.begin.position <= file.base < checkpoint.flushed.position:
            continue
        try:
            header = EntryHeader(*HEADER.unpack(file.read_cold(0, HEADER.size)))
        except UnreadableError as error:
            damage.append(Damage(file.path, 0, file.base, error.as_damage().reason))
            continue
        problem = header_problem(header, file.base, Follow(header.index - 1, 0, 0))
        if problem or header.index > checkpoint.flushed.index:
            reason = f"the segment does not start with a valid record: {problem or f'index {header.index}'}"
            damage.append(Damage(file.path, 0, file.base, reason))
        elif not _unit_agrees(files, header):
            agrees = False
    return damage, agrees


def _unit_agrees(files: LogFiles, header: EntryHeader) -> bool:
    try:
        return _units_present(files, header.index, header.index) and files.unit(header.index) == unit_of(header)
    except CorruptLogError:
        return False


def _misshapen_or_missing(
    files: LogFiles, misshapen: tuple[FoundFile, ...], checkpoint: LogCheckpoint, settings: ScanSettings
) -> list[Damage]:
    size = files.segment_bytes
    damage = [_misshapen(files, one) for one in misshapen]
    present = {one.base for one in misshapen}
    first, last = files.data.base_of(checkpoint.begin.position), checkpoint.flushed.position - 1
    for base in range(first, last + 1, size):
        if base not in present and files.data.find(base) is None and checkpoint.begin.position <= last:
            path = settings.directory / segment_name(base)
            damage.append(Damage(path, 0, base, "the segment is missing"))
    return damage


def _misshapen(files: LogFiles, found: FoundFile) -> Damage:
    reason = f"the segment has {found.size} bytes instead of {files.segment_bytes}"
    if found.size == files.segment_bytes:
        reason = "the segment is another name of an earlier one's file"
    return Damage(found.path, min(found.size, files.segment_bytes), found.base, reason)


def _middle(files: LogFiles, misshapen: tuple[FoundFile, ...]) -> Damage | None:
    bases = [file.base for file in files.data.files()] + [one.base for one in misshapen]
    return next((_misshapen(files, one) for one in misshapen if one.base < max(bases)), None)


def _in_use_from(files: LogFiles, position: int) -> bool:
    for file in files.data.files():
        offset = max(0, position - file.base)
        if offset < file.size and file.non_zero_end(offset) > offset:
            return True
    return False


def _is_torn(files: LogFiles, state: ScanWalk) -> bool:
    file = files.data.find(state.stop_position)
    if file is None:
        return True
    with memoryview(file.map) as segment:
        return is_torn(segment, file.base, state.stop_position - file.base, state.follow)


def _stop(files: LogFiles, state: ScanWalk, settings: ScanSettings) -> Damage:
    file = files.data.find(state.stop_position)
    base = files.data.base_of(state.stop_position)
    path = file.path if file else settings.directory / segment_name(base)
    return Damage(path, state.stop_position - base, state.stop_position, state.reason)
