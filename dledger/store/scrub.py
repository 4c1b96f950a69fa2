"""Verifies the log in the background: entry chain, body CRCs and index units, a bounded step at a time.

Reads with ``pread`` and holds no lock. It verifies what cannot change any more: committed and flushed entries. Damage
ends the check of its segment; the next one is entered at its first record, whose chain CRC is accepted as it is: an
error in it shows at the second record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from dledger.errors import CorruptLogError
from dledger.layout import BLANK_MAGIC
from dledger.store.checkpoint import REPAIR_ADVICE, Mark
from dledger.store.format import (
    BLANK,
    HEADER,
    EntryHeader,
    Follow,
    Scan,
    ScanWindow,
    after,
    header_problem,
    scan_records,
    segment_name,
)
from dledger.store.log_files import LogFiles
from dledger.store.log_state import LogState
from dledger.store.mmap_file import MappedFile, UnreadableError
from dledger.values import MIB

STEP_BYTES: Final = MIB

OnScan = Callable[[int, Scan], None]
"""Called with the index of a scan's first record, and the scan."""


class DamagedError(Exception):
    """Raised internally for a bad record: at ``offset`` of its file, entry ``index`` if known."""

    def __init__(self, offset: int, reason: str, index: int | None) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason
        self.index = index


@dataclass(slots=True)
class ScrubPlace:
    """The place of a walk: the next record's position, and what it must continue (None: accepted as it is)."""

    position: int
    follow: Follow | None


def verify_step(
    file: MappedFile, place: ScrubPlace, stop: int, max_bytes: int, *, unchecked: bool, on_scan: OnScan | None = None
) -> int:
    """Verify some records at ``place``, or the blank at the end, and advance it. Returns the bytes read.

    ``stop`` is an absolute position at which a record ends, or anything beyond the segment. After the segment's last
    record ``place`` is the start of the next segment. Raises ``DamagedError`` at a bad record, ``UnreadableError``.
    """
    offset = place.position - file.base
    room = min(file.size, stop - file.base) - offset
    data = file.read_cold(offset, min(room, max_bytes))
    header = EntryHeader(*HEADER.unpack_from(data)) if len(data) >= HEADER.size else None
    if header is not None and len(data) < header.size <= room:
        data = file.read_cold(offset, header.size)
    if len(data) < min(room, max_bytes):
        raise DamagedError(offset + len(data), f"the file ends {room - len(data)} bytes early", None)
    if len(data) >= BLANK.size and BLANK.unpack_from(data) == (BLANK_MAGIC, file.size - offset):
        place.position = file.base + file.size
        return len(data)
    start, follow = 0, place.follow
    if follow is None:
        follow = _as_it_is(header, data, place.position)
        start = header.size if header is not None else 0
    with memoryview(data) as view:
        scan = scan_records(ScanWindow(view, place.position, start, len(data), unchecked), follow)
    if not start and not scan.count:
        raise DamagedError(offset, scan.reason or "no record starts here", follow.index + 1)
    if scan.count and on_scan is not None:
        on_scan(follow.index + 1, scan)
    place.position += scan.end_offset
    place.follow = scan.follow
    return len(data)


def _as_it_is(header: EntryHeader | None, data: bytes, position: int) -> Follow:
    """The entry that the record after a first one must continue. Raises ``DamagedError`` if the first one is bad."""
    if header is None:
        raise DamagedError(0, "too little room for an entry header", None)
    problem = header_problem(header, position, Follow(header.index - 1, 0, 0))
    if not problem and len(data) < header.size:
        problem = f"a record of {header.size} bytes does not fit"
    if not problem and header.body_crc and crc32c(data[HEADER.size : header.size]) != header.body_crc:
        problem = f"bodyCrc of entry {header.index} does not match its body"
    if problem:
        raise DamagedError(0, f"the segment does not start with a valid record: {problem}", None)
    return Follow(header.index, header.term, header.chain_crc)


def verify_file(
    file: MappedFile,
    place: ScrubPlace,
    stop: int,
    *,
    unchecked: bool,
    on_scan: OnScan | None = None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Verify all of ``file`` from ``place`` up to ``stop``; ``pause`` is called between steps. Raises as above."""
    end = min(stop, file.base + file.size)
    while place.position < end:
        verify_step(file, place, stop, STEP_BYTES, unchecked=unchecked, on_scan=on_scan)
        pause()


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """The bytes that a step read, the damage it found, and whether it ended a pass over the whole log."""

    read_bytes: int
    damage: CorruptLogError | None = None
    finished: bool = False


class Scrub:
    """An endless walk through an open log. For one thread."""

    def __init__(self, files: LogFiles, state: LogState, mend: Callable[[int], None], *, unchecked: bool) -> None:
        """``mend`` rewrites wrong index units at an entry (``Headers.mend``)."""
        self._files = files
        self._state = state
        self._mend = mend
        self._unchecked = unchecked
        self._place = ScrubPlace(-1, None)
        self.position = 0
        """How far the current pass has come."""

    def step(self, max_bytes: int) -> ScrubStep:
        """Verify the next bytes."""
        state, files, place = self._state, self._files, self._place
        generation, begin, stop = state.generation, state.begin, stable_end(state, files).position
        if place.position < begin.position:
            self._place = place = ScrubPlace(begin.position, after(begin))
        self.position = place.position
        if place.position >= stop:
            self._place = ScrubPlace(-1, None)
            return ScrubStep(0, finished=True)
        file = files.data.find(place.position)
        if file is None:
            if generation != state.generation or state.closed:
                return ScrubStep(0)
            base = files.data.base_of(place.position)
            self._place = ScrubPlace(base + files.segment_bytes, None)
            path = files.data.placement.writable[0] / segment_name(base)
            return ScrubStep(0, CorruptLogError(path, 0, "the segment is missing", REPAIR_ADVICE))
        wrong: list[int] = []

        def compare(first: int, scan: Scan) -> None:
            differing = files.first_wrong_unit(first, scan.units)
            if differing is not None:
                wrong.append(differing)

        try:
            read = verify_step(file, place, stop, max_bytes, unchecked=self._unchecked, on_scan=compare)
        except DamagedError as damage:
            self._place = ScrubPlace(file.base + file.size, None)
            if generation != state.generation or files.data.find(file.base) is not file:
                return ScrubStep(max_bytes)  # it was replaced or removed meanwhile
            error = CorruptLogError(file.path, damage.offset, damage.reason, REPAIR_ADVICE, damage.index)
            return ScrubStep(max_bytes, error)
        except UnreadableError as error:
            self._place = ScrubPlace(file.base + file.size, None)
            return ScrubStep(max_bytes, error.as_damage())
        if wrong and generation == state.generation:
            self._mend(wrong[0])
        return ScrubStep(read)


def stable_end(state: LogState, files: LogFiles) -> Mark:
    """The last committed and flushed entry, with its end and chain CRC as far as known."""
    flushed = state.flushed
    if flushed.index <= state.committed or flushed.index <= state.begin.index:
        return flushed
    begin = state.begin
    if state.committed <= begin.index:
        return Mark(begin.index, begin.position, begin.chain_crc)
    header = files.located(state.committed)
    return Mark(header.index, header.position + header.size, header.chain_crc)
