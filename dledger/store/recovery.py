"""Recovery at start: scans the log, and decides on its findings whether to keep, cut or refuse it.

``plan`` is pure: from the findings of a scan to what must be done. The evidence is the checkpoint's flushed mark:
everything up to it was durable once. It is written before anything is acknowledged, so after a kill nothing above it
was acknowledged; after a power cut it may be a little old. (It is lowered durably before a truncation touches what it
covers.) The cases, first match wins:

    | what was found                                                   | plan                              |
    |------------------------------------------------------------------|-----------------------------------|
    | a file of a wrong length, and a later segment                    | Refuse, naming the file           |
    | a missing or misshapen file that starts below the mark           | Refuse, naming the file           |
    | a segment below the scan whose first record is bad               | Refuse, at its offset 0           |
    | the scan stopped (bad record, zeros, no file) below the mark     | Refuse, where it stopped          |
    | the entry at the mark is not the one that was flushed            | Refuse, at the mark               |
    | the log ends below the recorded commit index                     | Refuse, where it stopped          |
    | clean stop, and records follow the mark                          | Cut at the mark                   |
    | a bad record above the mark                                      | Cut where it starts               |
    | zeros or no file above the mark, something behind                | Cut there                         |
    | zeros or the end of the files above or at the mark, nothing left | Keep                              |

The part cut may have been acknowledged all the same, if the mark was old, or entries were flushed late. Then the
member's memory is in doubt (``doubt``): it takes part, and counts for nothing until it has caught up. The cases, first
match wins:

    | what was found                                                   | in doubt                          |
    |------------------------------------------------------------------|-----------------------------------|
    | own files are not those of the last start                        | yes: a copy, or restored          |
    | clean stop, and entries behind its mark                          | yes: files of different times     |
    | clean stop                                                       | no                                |
    | acknowledged before flushing, and the machine rebooted           | yes: the loss is unknown          |
    | acknowledged before flushing, and something was cut              | yes                               |
    | something cut that a partly completed write does not explain     | yes: a flipped bit looks the same |
    | anything else                                                    | no                                |

``is_torn`` recognizes the remains of a partly completed write.

A gap above the mark is not damage: removals of a truncation may reach the disk in any order. A file of a wrong length
is, because files appear under their name only when complete; only the last one may be a remnant.

``scan_log`` collects the findings, and changes nothing. It starts ``recovery_verify_bytes`` below the flushed mark, at
an entry that the index names and the data confirm, and verifies every record from there to the end. Of earlier
segments, only the first record is checked. If the index cannot be trusted for that, the scan starts at the log's begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dledger.errors import CorruptLogError, IndexBeforeBeginError
from dledger.records import BLANK_MAGIC, ENTRY, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.store.durable_state import LastLife, LogCheckpoint, Mark
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
from dledger.store.mmap_file import FoundFile, MappedFile, UnreadableError
from dledger.types import Boundary

SECTOR_BYTES: Final = 512
"""The unit that a disk writes completely or not at all."""
_POLYNOMIAL: Final = 0x82F63B78
_AT_ONCE: Final = 1 << 18
_Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Damage:
    """A problem at one place of one file; ``position`` is its place in the log."""

    path: Path
    offset: int
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScanFindings:
    """Recovery's findings, before it changes anything."""

    checkpoint: LogCheckpoint
    end: Mark
    """The last verified entry (or the boundary), its end and its chain CRC."""
    stop: Damage
    """Where the scan stopped and why."""
    stopped_at_bad: bool
    """Whether the bytes at the stop are something other than zeros or the end of the files."""
    rest_in_use: bool
    """Whether any byte after the stop, in this segment or a later one, is not zero."""
    mark_agrees: bool
    """Whether the entry at the flushed mark has the recorded end and chain CRC."""
    torn: bool = True
    """Whether sectors that did not reach the disk explain the missing record at the stop (``is_torn``)."""
    bad_files: tuple[Damage, ...] = ()
    """Segments missing, of a wrong length, or whose first record is bad, oldest first."""
    misshapen_middle: Damage | None = None
    """The first file of a wrong length that is followed by another segment."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The log is whole; nothing follows its end."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Drop everything from ``end`` on: it was never flushed, so never acknowledged."""

    end: Mark
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not open: flushed bytes are damaged."""

    damage: Damage


Plan = Keep | Cut | Refuse


def plan(findings: ScanFindings) -> Plan:
    """Decide (see the table above)."""
    mark = findings.checkpoint.flushed
    for refusal in (_bad_file, _below_mark, _wrong_mark, _below_commit):
        damage = refusal(findings)
        if damage:
            return Refuse(damage)
    if findings.checkpoint.clean_stop and findings.end.index > mark.index:
        return Cut(mark, f"{findings.end.index - mark.index} entries after the end of a cleanly stopped log")
    if findings.stopped_at_bad:
        return Cut(findings.end, findings.stop.reason)
    if findings.rest_in_use or findings.bad_files:
        return Cut(findings.end, "unflushed remains after the last whole entry")
    return Keep()


def doubt(findings: ScanFindings, decision: Keep | Cut, life: LastLife) -> str:
    """Why the member may have forgotten statements; empty if it has not (see the second table above)."""
    if life.replaced:
        return life.replaced
    cut = decision.reason if isinstance(decision, Cut) else ""
    if findings.checkpoint.clean_stop:
        return f"its files are from different times: {cut}" if cut else ""
    if life.flushed_late and not life.same_boot:
        return "it acknowledged before flushing (flush_mode=async), and the machine has restarted since"
    if life.flushed_late and cut:
        return f"it acknowledged before flushing (flush_mode=async), and the end of its log was cut: {cut}"
    if cut and not findings.torn:
        return f"the end of its log was cut, and an interrupted write does not explain it: {cut}"
    return ""


Refusal = Callable[[ScanFindings], Damage | None]


def _bad_file(findings: ScanFindings) -> Damage | None:
    if findings.misshapen_middle:
        return findings.misshapen_middle
    flushed = findings.checkpoint.flushed
    return next((damage for damage in findings.bad_files if damage.position < flushed.position), None)


def _below_mark(findings: ScanFindings) -> Damage | None:
    mark = findings.checkpoint.flushed
    if findings.end.index >= mark.index:
        return None
    return _told(findings.stop, f"entries up to {mark.index} were flushed, but the log ends at {findings.end.index}")


def _wrong_mark(findings: ScanFindings) -> Damage | None:
    mark = findings.checkpoint.flushed
    if findings.mark_agrees:
        return None
    return _told(findings.stop, f"entry {mark.index} is not the one that was flushed (end or chainCrc differ)")


def _below_commit(findings: ScanFindings) -> Damage | None:
    committed = findings.checkpoint.committed
    if findings.end.index >= committed:
        return None
    return _told(findings.stop, f"entries up to {committed} were committed, but the log ends at {findings.end.index}")


def _told(stop: Damage, what: str) -> Damage:
    return Damage(stop.path, stop.offset, stop.position, f"{what}: {stop.reason}")


def is_torn(segment: memoryview, base: int, offset: int, follow: Follow) -> bool:
    """Distinguishes a log's bad end that a power cut left of an unflushed write from damage.

    Unflushed sectors reach the disk in any order, or not at all. A sector that did not is what it was before: what an
    earlier write left there, and zeros from then on, for there is never anything else behind the end: what a truncation
    drops is zeroed durably before anything is written in its place. So a record spoilt by a power cut lacks at least
    one sector, which is zero from the record's first byte in it to the sector's end; and what did reach the disk is
    correct:

    - The header continues the chain of the entry before it, or a sector of it is lost, and the rest of it is correct.
    - The body's checksum proves nothing while a sector is lost, unless one flipped bit explains it: then nothing is
      lost, and the zeros belong to the body.

    Data behind the record proves nothing, not even whole records: all of it may be unflushed. So a durable record of
    which a whole sector reads as zeros later is taken for torn, if the power fails before the next checkpoint is
    durable; the other members may remember it. If a hole with data behind it counted as damage, then of three members
    that lose power together under load, two or more would be in doubt in three cases of four (simulated, sectors lost
    in any order).

    Whether lost sectors explain that no record after ``follow`` is at ``offset`` of the segment at ``base``.
    """
    header_end = min(offset + HEADER.size, len(segment))
    lost = [piece for piece in _pieces(offset, header_end, len(segment)) if not any(segment[slice(*piece)])]
    if lost:
        return all(
            segment[at] == wanted
            for at, wanted in _known_bytes(offset, base + offset, follow.index + 1)
            if at < header_end and not any(start <= at < end for start, end in lost)
        )
    if header_end - offset < HEADER.size:
        return False
    header = EntryHeader(*HEADER.unpack_from(segment, offset))
    end = offset + header.size
    if header_problem(header, base + offset, follow) or end > len(segment):
        return False
    if header_chain_crc(header, follow.chain_crc) != header.chain_crc:
        return False
    sectors = (piece for piece in _pieces(offset, end, len(segment)) if piece[0] > offset)
    if all(any(segment[slice(*piece)]) for piece in sectors):
        return False
    body = segment[header_end:end]
    return not _is_one_bit(crc32c(body) ^ header.body_crc, len(body))


def _pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The part of each of a record's sectors written with it or later: from its first byte there to the end."""
    while start < end:
        stop = min(start - start % SECTOR_BYTES + SECTOR_BYTES, size)
        yield start, stop
        start = stop


def _known_bytes(offset: int, position: int, index: int) -> Iterator[tuple[int, int]]:
    """The known bytes of the next entry's header: where which byte must be."""
    for field, value in (("index", index), ("position", position)):
        yield from enumerate(ENTRY.part(field).pack(value), offset + ENTRY.at(field))


def _is_one_bit(difference: int, length: int) -> bool:
    """Whether the difference of two CRC32C, of ``length`` bytes each, is that of one flipped bit.

    It is if undoing the bytes behind the bit turns it into the difference of a bit in the last byte.
    """
    taken_back, step = np.array([difference], np.uint32), _BACK
    while len(taken_back) < min(length, _AT_ONCE):
        taken_back = np.concatenate((taken_back, _apply(step, taken_back)))
        step = _apply(step, step)
    for done in range(0, length, len(taken_back)):
        if np.isin(taken_back[: length - done], _ONE_BIT).any():
            return True
        taken_back = _apply(step, taken_back)
    return False


def _apply(linear: _Words, words: _Words) -> _Words:
    """Apply a linear map, given by its result for each value of each byte, to ``words``."""
    low: _Words = linear[0][words & 255] ^ linear[1][words >> 8 & 255]
    high: _Words = linear[2][words >> 16 & 255] ^ linear[3][words >> 24]
    return np.bitwise_xor(low, high)


def _table_entry(low: int) -> int:
    """The effect of eight zero bits on a CRC with this lowest byte."""
    for _ in range(8):
        low = low >> 1 ^ (_POLYNOMIAL if low & 1 else 0)
    return low


def _back(word: int) -> int:
    """The CRC before a zero byte; no two of the table's entries have the same highest byte."""
    low = _LOW[word >> 24]
    return (word ^ _TABLE[low]) << 8 & 0xFFFFFFFF | low


_TABLE: Final = tuple(_table_entry(low) for low in range(256))
_LOW: Final = {entry >> 24: low for low, entry in enumerate(_TABLE)}
_BACK: Final = np.array([[_back(byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24)], np.uint32)
_ONE_BIT: Final = np.array([_TABLE[1 << bit] for bit in range(8)], np.uint32)
"""The difference that a flipped bit in the last byte makes."""


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
        torn=_ends_torn(files, state),
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


def _ends_torn(files: LogFiles, state: ScanWalk) -> bool:
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
