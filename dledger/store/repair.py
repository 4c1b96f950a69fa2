"""Scrub and repair: finds damage in an open log, and replaces damaged or missing segments with a peer's bytes.

``SegmentRepair`` changes nothing unverified. A peer's bytes are accepted because this member's own chain confirms them
at both ends: they must continue the last intact entry before the damage, and the first intact one after it must
continue them. So neither a peer's damage nor another history gets in, and the damaged part cannot have been anything
else.

1. Adjacent damaged segments are one piece of work (``_before``): only its ends can be verified.
2. Their bytes are fetched into temporary files beside them, flushed, and verified as a whole.
3. A segment behind which the log continues (all of it is committed and flushed) is exchanged beneath the readers: the
   damaged file moves to ``damaged-<n>/``, the new one takes its name; a crash in between leaves a missing segment,
   which is repaired at the next start. Of the segment still being written only the committed part is fetched, a copy of
   the file set aside, and the part rewritten in place: every byte of it is what was there before.
4. Wrong index units are rewritten.

A crash at any moment leaves temporary files, which the next start removes, and the damage as it was, or less of it.

``Scrub`` verifies the log in the background: entry chain, body CRCs and index units, a bounded step at a time. It reads
with ``pread`` and holds no lock. It verifies what cannot change any more: committed and flushed entries. Damage ends
the check of its segment; the next one is entered at its first record, whose chain CRC is accepted as it is: an error in
it shows at the second record.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crc32c import crc32c

from dledger.errors import CorruptLogError, DiskError, DiskFullError, LackingError, ShutdownError, WrongBytesError
from dledger.records import BLANK_MAGIC, MIN_BLANK_BYTES
from dledger.store.durable_state import REPAIR_ADVICE, Mark
from dledger.store.format import (
    BLANK,
    HEADER,
    EntryHeader,
    Follow,
    Scan,
    ScanWindow,
    after,
    blank_head,
    header_chain_crc,
    header_problem,
    scan_records,
    segment_name,
)
from dledger.store.fs import TMP_SUFFIX, FileSystem
from dledger.store.log_files import LogFiles, LogState
from dledger.store.mmap_file import MappedFile, UnreadableError
from dledger.store.quarantine import Quarantine
from dledger.types import LogIndex
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
class _ScrubPlace:
    """The place of a walk: the next record's position, and what it must continue (None: accepted as it is)."""

    position: int
    follow: Follow | None


def _verify_step(
    file: MappedFile, place: _ScrubPlace, stop: int, max_bytes: int, *, unchecked: bool, on_scan: OnScan | None = None
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


def _verify_file(
    file: MappedFile,
    place: _ScrubPlace,
    stop: int,
    *,
    unchecked: bool,
    on_scan: OnScan | None = None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Verify all of ``file`` from ``place`` up to ``stop``; ``pause`` is called between steps. Raises as above."""
    end = min(stop, file.base + file.size)
    while place.position < end:
        _verify_step(file, place, stop, STEP_BYTES, unchecked=unchecked, on_scan=on_scan)
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
        self._place = _ScrubPlace(-1, None)
        self.position = 0
        """How far the current pass has come."""

    def step(self, max_bytes: int) -> ScrubStep:
        """Verify the next bytes."""
        state, files, place = self._state, self._files, self._place
        generation, begin, stop = state.generation, state.begin, _stable_end(state, files).position
        if place.position < begin.position:
            self._place = place = _ScrubPlace(begin.position, after(begin))
        self.position = place.position
        if place.position >= stop:
            self._place = _ScrubPlace(-1, None)
            return ScrubStep(0, finished=True)
        file = files.data.find(place.position)
        if file is None:
            if generation != state.generation or state.closed:
                return ScrubStep(0)
            base = files.data.base_of(place.position)
            self._place = _ScrubPlace(base + files.segment_bytes, None)
            path = files.data.placement.writable[0] / segment_name(base)
            return ScrubStep(0, CorruptLogError(path, 0, "the segment is missing", REPAIR_ADVICE))
        wrong: list[int] = []

        def compare(first: int, scan: Scan) -> None:
            differing = files.first_wrong_unit(first, scan.units)
            if differing is not None:
                wrong.append(differing)

        try:
            read = _verify_step(file, place, stop, max_bytes, unchecked=self._unchecked, on_scan=compare)
        except DamagedError as damage:
            self._place = _ScrubPlace(file.base + file.size, None)
            if generation != state.generation or files.data.find(file.base) is not file:
                return ScrubStep(max_bytes)  # it was replaced or removed meanwhile
            error = CorruptLogError(file.path, damage.offset, damage.reason, REPAIR_ADVICE, damage.index)
            return ScrubStep(max_bytes, error)
        except UnreadableError as error:
            self._place = _ScrubPlace(file.base + file.size, None)
            return ScrubStep(max_bytes, error.as_damage())
        if wrong and generation == state.generation:
            self._mend(wrong[0])
        return ScrubStep(read)


def _stable_end(state: LogState, files: LogFiles) -> Mark:
    """The last committed and flushed entry, with its end and chain CRC as far as known."""
    flushed = state.flushed
    if flushed.index <= state.committed or flushed.index <= state.begin.index:
        return flushed
    begin = state.begin
    if state.committed <= begin.index:
        return Mark(begin.index, begin.position, begin.chain_crc)
    header = files.located(state.committed)
    return Mark(header.index, header.position + header.size, header.chain_crc)


ReadSegment = Callable[[int, int], bytes | None]
"""From a position and a length to exactly these committed bytes of one segment, from a peer.

None if the peer does not hold all of them; raises ``DLedgerError``.
"""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair: the replaced segments, and where the damaged ones are (None: there were none).

    With damaged segments on several disks, ``quarantine`` is where the first of them is.
    """

    bases: tuple[int, ...]
    quarantine: Path | None


class SegmentRepair:
    """Repairs an open log; one repair at a time."""

    def __init__(
        self,
        files: LogFiles,
        state: LogState,
        fs: FileSystem,
        directory: Path,
        mark_at: Callable[[LogIndex], Mark],
        *,
        unchecked: bool,
    ) -> None:
        """``directory`` is the node's; ``mark_at`` returns an entry's verified end."""
        self._files = files
        self._state = state
        self._fs = fs
        self._directory = directory
        self._mark_at = mark_at
        self._unchecked = unchecked

    def find(self, base: int, pause: Callable[[], None] = lambda: None) -> CorruptLogError | None:
        """The damage in a segment's committed and flushed part; None if it is intact, or no longer kept."""
        return self._verify(base, self._end(), pause)[1]

    def repair(self, base: int, read: ReadSegment, pause: Callable[[], None] = lambda: None) -> Repaired:
        """Replace the damaged segment at ``base``, and damaged ones next to it. Does nothing if it is intact.

        ``pause`` is called between steps, and may raise to abort. Raises ``LackingError``, ``WrongBytesError``, the
        errors of ``read``, ``CorruptLogError`` if its ends cannot be verified yet, ``DiskFullError``, ``DiskError``.
        """
        end = self._end()
        if self._verify(base, end, pause)[1] is None:
            return Repaired((), None)
        fetched: list[MappedFile] = []
        try:
            first, place = self._before(base, end, pause)
            step = self._files.segment_bytes
            for current in range(first, end.position, step):
                file = self._fetch(current, end, read, pause)
                fetched.append(file)
                self._prove(file, place, end)
                pause()
                if current + step >= end.position:
                    self._prove_end(place, end)
                    break
                if current >= base and self._goes_on(current + step, place.follow):
                    break
                if current >= base and self._verify(current + step, end, pause)[1] is None:
                    raise WrongBytesError("the fetched part does not connect to what follows here")
            return self._install(fetched, end)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(f"no room for another copy of {segment_name(base)}") from error
            raise DiskError(f"repairing {segment_name(base)} failed: {error}") from error
        finally:
            for file in fetched:
                if file.path.name.endswith(TMP_SUFFIX):
                    file.path.unlink(missing_ok=True)

    # -- what is here ----------------------------------------------------------------------------------------------

    def _end(self) -> Mark:
        """The verified end of what is committed and flushed."""
        state = self._state
        if state.closed:
            raise ShutdownError("the store is closed")
        flushed, committed = state.flushed, state.committed
        return flushed if flushed.index <= committed else self._mark_at(LogIndex(max(committed, state.begin.index)))

    def _verify(self, base: int, end: Mark, pause: Callable[[], None]) -> tuple[_ScrubPlace, CorruptLogError | None]:
        """Verify a segment up to ``end``, and that it continues the one before: how far it is intact, and the damage.

        If two intact segments do not fit together, either may be wrong, so both count as damaged.
        """
        place, damage = self._verify_alone(base, end, pause)
        begin, following = self._state.begin, base + self._files.segment_bytes
        if damage is not None or place.follow is None or base >= end.position or begin.position >= following:
            return place, damage
        reason = ""
        if base > begin.position:
            before, its_damage = self._verify_alone(base - self._files.segment_bytes, end, pause)
            if its_damage is None and before.follow is not None and not self._goes_on(base, before.follow):
                reason = "it does not follow the segment before it"
        leads_on = following > end.position or self._goes_on(place.position, place.follow)
        if not leads_on and self._verify_head(following, end):
            reason = "the next segment does not follow it"
        if not reason or self._state.begin.position >= following:  # retention has just removed it
            return place, None
        return place, CorruptLogError(self._path(base), 0, reason, REPAIR_ADVICE)

    def _verify_alone(
        self, base: int, end: Mark, pause: Callable[[], None]
    ) -> tuple[_ScrubPlace, CorruptLogError | None]:
        """Verify a segment's own records only; the first one's header is accepted as it is."""
        begin, files = self._state.begin, self._files
        place = _ScrubPlace(base, None) if base > begin.position else _ScrubPlace(begin.position, after(begin))
        if place.position >= min(base + files.segment_bytes, end.position):
            return place, None
        file = files.data.find(base)
        if file is None:
            self._end()  # whether the store is open
            if self._state.begin.position >= base + files.segment_bytes:  # retention has just removed it
                return place, None
            return place, CorruptLogError(self._path(base), 0, "the segment is missing", REPAIR_ADVICE)
        try:
            _verify_file(file, place, end.position, unchecked=self._unchecked, pause=pause)
        except DamagedError as damage:
            return place, CorruptLogError(file.path, damage.offset, damage.reason, REPAIR_ADVICE, damage.index)
        except UnreadableError as error:
            return place, error.as_damage()
        return place, None

    def _path(self, base: int) -> Path:
        """The path of a segment, existing or not."""
        data = self._files.data
        file = data.find(base)
        return file.path if file else data.placement.directory_for(base // data.segment_bytes) / segment_name(base)

    def _verify_head(self, base: int, end: Mark) -> bool:
        """Whether the first records of a segment are consistent with each other."""
        file = self._files.data.find(base)
        place = _ScrubPlace(base, None)
        try:
            for _ in range(2):
                if file is None:
                    return False
                if place.position < min(base + file.size, end.position):
                    _verify_step(file, place, end.position, STEP_BYTES, unchecked=self._unchecked)
        except (DamagedError, UnreadableError):
            return False
        return True

    def _goes_on(self, position: int, follow: Follow | None) -> bool:
        """Whether the record at ``position`` here continues ``follow``; true at the end of the log."""
        try:
            header = self._files.header_at(position, 1 << 62)
        except UnreadableError:
            return False
        if header is None or follow is None or header.index != follow.index + 1 or header.position != position:
            return False
        if self._unchecked and header.chain_crc == header.body_crc == 0:
            return True
        return header_chain_crc(header, follow.chain_crc) == header.chain_crc

    def _before(self, base: int, end: Mark, pause: Callable[[], None]) -> tuple[int, _ScrubPlace]:
        """The first of the adjacent damaged segments, and what its first record must continue."""
        begin, step = self._state.begin, self._files.segment_bytes
        while base > begin.position:
            place, damage = self._verify(base - step, end, pause)
            if damage is None:
                return base, _ScrubPlace(base, place.follow)
            base -= step
        return base, _ScrubPlace(begin.position, after(begin))

    # -- what is fetched -------------------------------------------------------------------------------------------

    def _fetch(self, base: int, end: Mark, read: ReadSegment, pause: Callable[[], None]) -> MappedFile:
        """Fetch a segment's committed part into a temporary file, durably."""
        files, fs, size = self._files, self._fs, self._files.segment_bytes
        old = files.data.find(base)
        directory = old.path.parent if old is not None else files.data.placement.directory_for(base // size)
        if old is not None and not old.writable:
            raise DiskError(f"{old.path} is in a read-only data directory and cannot be replaced")
        path = directory / (segment_name(base) + TMP_SUFFIX)
        position, stop = max(base, self._state.begin.position), min(base + size, end.position)
        fd = fs.create(path)
        try:
            fs.allocate(fd, size)
            if position - base >= MIN_BLANK_BYTES:
                fs.write(fd, blank_head(position - base), 0)
            for at in range(position, stop, STEP_BYTES):
                fs.write(fd, _received(read, at, min(STEP_BYTES, stop - at)), at - base)
                pause()
            fs.sync(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            fs.close(fd)
        return MappedFile(fs, path, base, size, writable=True)

    def _prove(self, file: MappedFile, place: _ScrubPlace, end: Mark) -> None:
        """Verify fetched bytes. The rest of a segment behind its last record cannot be verified: it is zeroed."""
        ends = [place.position]
        try:
            _verify_file(
                file,
                place,
                end.position,
                unchecked=self._unchecked,
                on_scan=lambda _first, scan: ends.append(place.position + scan.end_offset),
            )
        except DamagedError as damage:
            raise WrongBytesError(f"the fetched part is wrong at offset {damage.offset}: {damage.reason}") from damage
        filler = ends[-1] + MIN_BLANK_BYTES - file.base
        if place.position == file.base + file.size and (stray := file.non_zero_end(filler)) > filler:
            file.zero(filler, stray)
            file.sync()

    def _prove_end(self, place: _ScrubPlace, end: Mark) -> None:
        """The last segment's part must end with the entry known to be the last committed one."""
        follow = place.follow
        found = None if follow is None else Mark(follow.index, place.position, follow.chain_crc)
        if found != end:
            raise WrongBytesError(f"the fetched part does not end with entry {end.index}")

    # -- exchanging ------------------------------------------------------------------------------------------------

    def _install(self, fetched: list[MappedFile], end: Mark) -> Repaired:
        """Install fetched segments. Holders of the node's lock may wait for ``shape_lock``, so it is held briefly."""
        quarantine = Quarantine(self._fs, self._directory)
        state = self._state
        changed = [file for file in fetched if not self._is_here(file, end)]
        for file in changed:
            kept = quarantine.target(file.path.with_name(segment_name(file.base)))
            if file.base + file.size <= end.position:
                self._exchange(file, kept)
            else:
                self._write_again(file, kept, end)
            with state.lock:
                state.generation += 1  # concurrent readers read again
        self._write_units(fetched, end)
        return Repaired(tuple(file.base for file in changed), next(iter(quarantine.directories), None))

    def _is_here(self, file: MappedFile, end: Mark) -> bool:
        """Whether the fetched bytes equal the local ones: only the neighbour was damaged."""
        old = self._files.data.find(file.base)
        if old is None:
            return False
        stop = min(file.size, end.position - file.base)
        pieces = [(at, min(STEP_BYTES, stop - at)) for at in range(0, stop, STEP_BYTES)]
        try:
            return all(old.read_cold(*piece) == file.read_cold(*piece) for piece in pieces)
        except UnreadableError:
            return False

    def _exchange(self, file: MappedFile, kept: Path) -> None:
        fs, data, path = self._fs, self._files.data, file.path.with_name(segment_name(file.base))
        with self._state.shape_lock:
            if not self._is_wanted(file):
                return
            old = data.find(file.base)
            if old is not None and not old.is_empty():  # otherwise it stands for a missing one
                fs.rename(old.path, kept)
            try:
                fs.rename(file.path, path)
            except OSError:
                if old is not None and not old.path.exists():
                    fs.rename(kept, old.path)
                raise
            file.path = path
            data.replace(file)
        fs.sync_dir(kept.parent)
        fs.sync_dir(path.parent)

    def _write_again(self, file: MappedFile, kept: Path, end: Mark) -> None:
        """Only bytes of committed entries change, and to what they were: readers and the one writer may continue."""
        fs, old = self._fs, self._files.data.find(file.base)
        if old is None:
            raise DiskError(f"{segment_name(file.base)}, the segment being written, is missing")
        stop = end.position - old.base
        pieces = [(at, min(STEP_BYTES, stop - at)) for at in range(0, stop, STEP_BYTES)]
        fd = fs.create(kept)
        try:
            old.salvage(fd, stop)
            fs.sync(fd)
        finally:
            fs.close(fd)
        fs.sync_dir(kept.parent)
        for offset, length in pieces:
            data = file.read_cold(offset, length)
            with self._state.shape_lock:
                if self._is_wanted(file) and self._files.data.find(file.base) is old:
                    old.write(offset, data)
        old.sync()
        fs.unlink(file.path)

    def _is_wanted(self, file: MappedFile) -> bool:
        """Whether its place is still part of the log: retention and INSTALL may go on. Under ``shape_lock``."""
        self._state.check_usable()
        return self._state.begin.position < file.base + file.size

    def _write_units(self, fetched: list[MappedFile], end: Mark) -> None:
        """Make the index agree with the new bytes."""
        begin = self._state.begin
        touched: set[MappedFile] = set()

        def write(first: int, scan: Scan) -> None:
            with self._state.shape_lock:
                if first > self._state.begin.index and self._files.first_wrong_unit(first, scan.units) is not None:
                    touched.update(self._files.write_units(first, scan.units))

        for file in fetched:
            if begin.position >= file.base + file.size:
                continue
            place = (
                _ScrubPlace(file.base, None)
                if file.base > begin.position
                else _ScrubPlace(begin.position, after(begin))
            )
            current = self._files.data.find(file.base)
            if current is not None:
                _verify_file(current, place, end.position, unchecked=self._unchecked, on_scan=write)
        for one in sorted(touched, key=lambda one: one.base):
            one.sync()


def _received(read: ReadSegment, position: int, length: int) -> bytes:
    data = read(position, length)
    if data is None:
        raise LackingError(f"it does not hold the log from position {position} on")
    if len(data) != length:
        raise WrongBytesError(f"{len(data)} bytes received instead of {length}")
    return data
