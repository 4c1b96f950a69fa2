"""Compares a broker's derived files with those that its log yields: every unit, every entry, and the timed messages.

Expected differences are counted, but not reported: units and entries of records that retention has removed since
(*expired*), of records after the part of the log that was read (*newer*), of records that a broker has yet to dispatch
(*pending*, see ``dispatched_to``), and units of a deleted topic's messages (*deleted*). Everything else is a
``Difference``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.store.format import parse_segment_name
from dledger.store.fs import FileSystem, read_whole
from rocketstore.consume_queue.files import FILLER, UNIT, UNIT_BYTES
from rocketstore.index.file import HEADER_BYTES, IndexShape
from rocketstore.index.format import ENTRIES, HEADER, KEY, IndexHeader, chained, seconds_since
from rocketstore.store.directory import ABORT_FILE, CHECKPOINT_FILE, UNKNOWN, StoreCheckpointFile
from rocketstore.timer.hours import ENTRY, HOURS_FILE, Entries, TimedProgress, decode_entries, decode_hours, hour_path

Mask = NDArray[np.bool_]
_INDEX_NAME: Final = re.compile(r"[0-9]{17}")
_ENTRIES_AT_ONCE: Final = 1 << 20
_RAW_UNIT: Final = f"V{UNIT_BYTES}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a file differs from what the log yields. ``number`` is that of a unit or entry."""

    file: str
    number: int
    expected: str
    found: str

    def sentence(self) -> str:
        return f"{self.file}, number {self.number}: {self.found}; the log says {self.expected}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of the log that was read. Physical offsets, ``end`` exclusive.

    Records before ``dispatched`` must be in queues and index; ``deleted`` contains the ends of deleted topics' queues.
    """

    begin: int
    end: int
    dispatched: int
    deleted: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """Counts of units or entries, and the first difference of each file."""

    equal: int = 0
    expired: int = 0
    newer: int = 0
    pending: int = 0
    deleted: int = 0
    differences: list[Difference] = field(default_factory=list)


def dispatched_to(root: Path, *, is_member: bool) -> int:
    """Before which offset a broker has put everything into queues and index, according to its files.

    That is the whole log of a plain broker that was stopped cleanly. Of one that runs or was killed it is what the
    checkpoint says; of a group's member also after a clean stop, because its group may commit more while it stops.
    """
    replay_from = StoreCheckpointFile(FileSystem(), root / CHECKPOINT_FILE).read().replay_from
    if not is_member and not (root / ABORT_FILE).exists():
        return 1 << 62
    return 0 if replay_from == UNKNOWN else replay_from


def read_deleted(path: Path) -> dict[tuple[str, int], int]:
    """The ends of deleted topics' queues, from the broker's ``deletedQueues.json``; empty without it."""
    try:
        topics = json.loads(read_whole(path))
    except FileNotFoundError:
        return {}
    return {(topic, int(queue)): int(end) for topic, queues in topics.items() for queue, end in queues.items()}


# -- consume queues ------------------------------------------------------------------------------------------------


def compare_queues(built: Path, found: Path, file_bytes: int, bounds: Bounds) -> Tally:
    """Compare all queues in two ``consumequeue`` directories: those derived from the log, and the broker's."""
    tally = Tally()
    for topic, queue in sorted(_queues(built) | _queues(found)):
        before = len(tally.differences)
        _compare_queue(built / topic / queue, found / topic / queue, file_bytes, bounds, tally)
        del tally.differences[before + 1 :]  # one is enough to know that a queue must be rebuilt
    return tally


def _queues(directory: Path) -> set[tuple[str, str]]:
    return {
        (queue.parent.name, queue.name)
        for queue in directory.glob("*/*")
        if queue.is_dir() and queue.name.isascii() and queue.name.isdecimal()
    }


def _compare_queue(built: Path, found: Path, file_bytes: int, bounds: Bounds, tally: Tally) -> None:
    ours, theirs = _files(built), _files(found)
    deleted = bounds.deleted.get((found.parent.name, int(found.name)), 0)
    for base in sorted(ours.keys() | theirs.keys()):
        path = found / f"{base:020d}"
        size = theirs[base].stat().st_size if base in theirs else file_bytes
        if size != file_bytes:
            tally.differences.append(Difference(str(path), 0, f"a file of {file_bytes} bytes", f"a file of {size}"))
            return
        made, there = _units(ours.get(base), file_bytes), _units(theirs.get(base), file_bytes)
        _compare_units(made, there, base // UNIT_BYTES, str(path), (bounds, deleted), tally)


def _files(directory: Path) -> dict[int, Path]:
    if not directory.is_dir():
        return {}
    return {base: one for one in directory.iterdir() if (base := parse_segment_name(one.name)) is not None}


def _units(path: Path | None, file_bytes: int) -> NDArray[np.void]:
    return np.zeros(file_bytes // UNIT_BYTES, UNIT) if path is None else np.fromfile(path, UNIT)


def _real(units: NDArray[np.void]) -> Mask:
    """Which places hold a message, not a filler or unwritten space."""
    real: Mask = (units["size"] > 0) & ((units["offset"] != FILLER.offset) | (units["size"] != FILLER.size))
    return real


def _compare_units(
    made: NDArray[np.void],
    there: NDArray[np.void],
    first: int,
    path: str,
    limits: tuple[Bounds, int],
    tally: Tally,
) -> None:
    """Compare one file; ``first`` is the number of its first unit in the queue."""
    bounds, deleted_end = limits
    made_real, there_real = _real(made), _real(there)
    differs = made.view(_RAW_UNIT) != there.view(_RAW_UNIT)
    tally.equal += int(np.count_nonzero(made_real & ~differs))
    if not differs.any():
        return
    numbers = np.arange(first, first + len(made))
    only_there, only_made = differs & ~made_real & there_real, differs & made_real & ~there_real
    expired = only_there & (there["offset"] < bounds.begin)
    newer = only_there & (there["offset"] >= bounds.end)
    deleted = only_made & (numbers < deleted_end)
    pending = only_made & ~deleted & (made["offset"] >= bounds.dispatched)
    nothing = differs & ~made_real & ~there_real & _beside(made_real, there_real)
    wrong = np.flatnonzero(differs & ~(expired | newer | deleted | pending | nothing))
    tally.expired += int(np.count_nonzero(expired))
    tally.newer += int(np.count_nonzero(newer))
    tally.deleted += int(np.count_nonzero(deleted))
    tally.pending += int(np.count_nonzero(pending))
    if len(wrong):
        at = int(wrong[0])
        tally.differences.append(Difference(path, first + at, _unit_text(made[at]), _unit_text(there[at])))


def _beside(made_real: Mask, there_real: Mask) -> Mask:
    """Places before the first message or after the last one: fillers and zeros are equivalent there."""
    either = np.flatnonzero(made_real & there_real)
    beside = np.ones(len(made_real), np.bool_)
    if len(either):
        beside[either[0] : either[-1]] = False
    return beside


def _unit_text(unit: np.void) -> str:
    offset, size, tags = (int(one) for one in unit.tolist())
    if size <= 0:
        return "nothing"
    if (offset, size, tags) == tuple(FILLER):
        return "a filler"
    return f"offset {offset}, size {size}, tags code {tags}"


# -- the index -----------------------------------------------------------------------------------------------------


def compare_index(keys: NDArray[np.void], found: Path, shape: IndexShape, bounds: Bounds) -> Tally:
    """Compare the index files in a directory with all keys of the log in order."""
    tally = Tally()
    files = sorted(one for one in found.glob("*") if _INDEX_NAME.fullmatch(one.name)) if found.is_dir() else []
    cursor = 0
    for number, path in enumerate(files):
        one = _IndexFile(path, shape, bounds, tally)
        cursor = one.compare(keys, cursor, is_last=number + 1 == len(files))
        if tally.differences:
            return tally
    missing = keys[cursor:]
    pending = int(np.count_nonzero(missing["offset"] >= bounds.dispatched))
    tally.pending += pending
    if pending < len(missing):
        where = str(files[-1] if files else found)
        tally.differences.append(Difference(where, tally.equal + 1, _key_text(missing[0]), "nothing"))
    return tally


class _IndexFile:
    def __init__(self, path: Path, shape: IndexShape, bounds: Bounds, tally: Tally) -> None:
        self._path = path
        self._shape = shape
        self._bounds = bounds
        self._tally = tally
        self._slots = np.zeros(shape.slots, np.int32)
        self._used = 0

    def compare(self, keys: NDArray[np.void], cursor: int, *, is_last: bool) -> int:
        """Compare the file with ``keys[cursor:]``; returns where the next file must continue."""
        size = self._path.stat().st_size
        if size != self._shape.file_bytes:
            self._differs(0, f"a file of {self._shape.file_bytes} bytes", f"a file of {size}")
            return cursor
        with self._path.open("rb") as file:
            header = IndexHeader(*HEADER.unpack(file.read(HEADER_BYTES)))
            count = max(header.next_entry, 1) - 1
            if count >= self._shape.entries:
                self._differs(0, f"at most {self._shape.entries} entries", f"{count} of them")
                return cursor
            last = -1
            for first in range(1, count + 1, _ENTRIES_AT_ONCE):
                file.seek(self._shape.entries_at + first * ENTRIES.itemsize)
                block = np.fromfile(file, ENTRIES, min(_ENTRIES_AT_ONCE, count + 1 - first))
                cursor, good = self._entries(block, first, keys, cursor, header)
                last = int(block["offset"][-1])
                if not good:
                    return cursor
            file.seek(HEADER_BYTES)
            slots = np.fromfile(file, ">i4", self._shape.slots)
        self._check_rest(header, slots, last)
        if not is_last and cursor < len(keys) and not self._tally.differences:
            following = int(np.searchsorted(keys["offset"], keys["offset"][cursor], "right")) - cursor
            if count and following <= self._shape.entries - header.next_entry:
                self._differs(count + 1, _key_text(keys[cursor]), "nothing: it is in the next file")
        return cursor

    def _entries(
        self, block: NDArray[np.void], first: int, keys: NDArray[np.void], cursor: int, header: IndexHeader
    ) -> tuple[int, bool]:
        """Compare entries from number ``first`` on; returns how many keys were used, and whether all is well."""
        offsets = block["offset"].astype(np.int64)
        descents = np.flatnonzero(np.diff(offsets) < 0)
        if len(descents):  # either neighbour may be wrong: the keys show which
            at = int(descents[0]) + 1
            cursor, good = self._entries(block[:at], first, keys, cursor, header)
            if good:
                self._differs(first + at, f"an offset of at least {offsets[at - 1]}", f"offset {offsets[at]}")
            return cursor, False
        low = int(np.searchsorted(offsets, self._bounds.begin))
        high = int(np.searchsorted(offsets, self._bounds.end))
        wanted = keys[cursor : cursor + high - low]
        there = block[low : low + len(wanted)]
        wrong = (there["hash"] != wanted["hash"]) | (there["offset"] != wanted["offset"])
        wrong |= there["seconds"] != seconds_since(wanted["store_ms"], header.begin_ms)
        places = np.maximum(block["hash"].astype(np.int32), 0) % np.int32(self._shape.slots)
        numbers = np.arange(first, first + len(block), dtype=np.int32)
        previous = chained(self._slots, places, numbers)
        self._used += int(np.count_nonzero(previous == 0))
        bad_link = previous != block["previous"]
        at = (
            low + int(np.argmax(wrong))
            if wrong.any()
            else low + len(wanted)
            if len(wanted) < high - low
            else len(block)
        )
        link = int(np.argmax(bad_link)) if bad_link.any() else len(block)
        if min(at, link) < len(block):
            entry = _entry_text(block[min(at, link)])
            if link < at:
                self._differs(first + link, f"an entry whose predecessor is {previous[link]}", entry)
            elif at - low < len(wanted):
                self._differs(first + at, _key_text(wanted[at - low]), entry)
            else:
                self._differs(first + at, "nothing", entry)
            return cursor, False
        self._tally.equal += len(wanted)
        self._tally.expired += low
        self._tally.newer += len(block) - high
        return cursor + len(wanted), True

    def _check_rest(self, header: IndexHeader, slots: NDArray[np.int32], last_offset: int) -> None:
        wrong = slots != self._slots
        if wrong.any():
            at = int(np.argmax(wrong))
            self._differs(0, f"a slot {at} with entry {self._slots[at]}", f"a slot {at} with entry {slots[at]}")
        elif header.next_entry > 1 and (header.used_slots, header.end_offset) != (self._used, last_offset):
            self._differs(
                0,
                f"a header with {self._used} used slots that ends at offset {last_offset}",
                f"one with {header.used_slots} that ends at {header.end_offset}",
            )

    def _differs(self, number: int, expected: str, found: str) -> None:
        self._tally.differences.append(Difference(str(self._path), number, expected, found))


def read_keys(path: Path) -> NDArray[np.void]:
    """Keys written in log order, mapped instead of read."""
    if not path.is_file() or not path.stat().st_size:
        return np.empty(0, KEY)
    return np.memmap(path, KEY, "r")


def _key_text(key: np.void) -> str:
    hash_, offset, store_ms = key.tolist()
    return f"hash {hash_} of the record at {offset} (stored at {store_ms})"


def _entry_text(entry: np.void) -> str:
    hash_, offset, seconds, previous = entry.tolist()
    return f"hash {hash_} of the record at {offset}, {seconds} s, after entry {previous}"


class TimerProblem(NamedTuple):
    """A fault of a file, and where it is (bytes)."""

    path: Path
    offset: int
    reason: str


def compare_timers(built: Path, found: Path, bounds: Bounds, progress: TimedProgress) -> list[TimerProblem]:
    """The faults of ``found``, a broker's directory, if ``built`` is made from its log.

    Files of hours that ``progress`` settles may be gone. Entries of records that have expired are not compared, nor
    those of records that the broker may not have come to. Raises ``OSError``.
    """
    listed = found / HOURS_FILE
    marks = decode_hours(read_whole(listed)) if listed.exists() else []
    if marks is None:
        return [TimerProblem(listed, 0, "the list of hours is damaged: the next start will build the files again")]
    problems: list[TimerProblem] = []
    known: dict[int, Entries] = {}
    for hour, count, crc in marks:
        path = hour_path(found, hour)
        data = read_whole(path)[: count * ENTRY.size] if path.exists() else b""
        if len(data) < count * ENTRY.size or crc32(data) != crc:
            problems.append(TimerProblem(path, 0, f"its {count} entries are not those that were written"))
        else:
            known[hour] = _compared(decode_entries(data), bounds)
    damaged = {one.path.name for one in problems}
    for path in sorted(built.iterdir()):
        hour = int(path.name)
        expected = _compared(decode_entries(read_whole(path)), bounds)
        if path.name in damaged or (hour not in known and progress.settled(expected).all()):
            continue
        problems += _differences(hour_path(found, hour), expected, known.pop(hour, expected[:0]))
    for hour, entries in known.items():
        if len(entries) and hour_path(built, hour).name not in damaged:
            problems += _differences(hour_path(found, hour), entries[:0], entries)
    return problems


def _compared(entries: Entries, bounds: Bounds) -> Entries:
    at = entries["position"]
    return entries[(at >= bounds.begin) & (at < min(bounds.end, bounds.dispatched))]


def _differences(path: Path, expected: Entries, found: Entries) -> list[TimerProblem]:
    for number in range(max(len(expected), len(found))):
        one, other = (str(rows[number]) if number < len(rows) else "nothing" for rows in (expected, found))
        if one != other:
            reason = f"among the records that the log still has, number {number} is {other}; the log says {one}"
            return [TimerProblem(path, number * ENTRY.size, reason)]
    return []
