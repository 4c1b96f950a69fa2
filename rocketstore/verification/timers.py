"""Compares the files of timed messages with the log."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from dledger.store.fs import read_whole
from rocketstore.timer.hours import ENTRY, HOURS_FILE, Entries, TimedProgress, decode_entries, decode_hours, hour_path
from rocketstore.verification.compare import Bounds


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
