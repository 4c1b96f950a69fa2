"""The files of timed messages against the log: every damage is named, and nothing sound is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketstore.timer.files import TimerFiles
from rocketstore.timer.hours import ENTRY, HOUR_MS, HOURS_FILE, NOTHING_DELIVERED, TimedProgress, hour_path
from rocketstore.verification.compare import Bounds, TimerProblem, compare_timers
from tests.unit.rocketstore.heads import STORE_MS
from tests.unit.rocketstore.timer.test_files import HOUR, heads, timed

ALL = Bounds(0, 1 << 40, 1 << 40)


class Directories:
    """What the log says, and what a broker has."""

    def __init__(self, root: Path) -> None:
        self.built, self.found = root / "built", root / "found"
        for directory in (self.built, self.found):
            files = TimerFiles(directory)
            files.load(0, has_messages=False)
            files.append(heads(9))
            if directory == self.found:
                files.flush()

    def problems(self, bounds: Bounds = ALL, progress: TimedProgress = NOTHING_DELIVERED) -> list[TimerProblem]:
        return compare_timers(self.built, self.found, bounds, progress)

    def path(self, hour: int) -> Path:
        return hour_path(self.found, HOUR + hour)


@pytest.fixture
def made(tmp_path: Path) -> Directories:
    return Directories(tmp_path)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[ENTRY.size + 11] ^= 4
    path.write_bytes(data)


def test_a_sound_directory_has_no_problems(made: Directories) -> None:
    """Nor one with files of others, or with entries behind those that are durable."""
    assert made.problems() == []
    (made.found / "notes.txt").write_bytes(b"?")
    (made.found / "lost+found").mkdir()
    (made.found / f"{HOUR:010d}.tmp").write_bytes(b"half")
    made.path(0).write_bytes(made.path(0).read_bytes() + b"\x01" * 50)
    assert made.problems() == []


@pytest.mark.parametrize("harm", [torn, flipped, Path.unlink])
def test_a_damaged_file_is_named_once(made: Directories, harm: Callable[[Path], None]) -> None:
    """The others are still compared."""
    harm(made.path(1))
    (found,) = made.problems()
    assert (found.path, found.offset, found.reason) == (
        made.path(1),
        0,
        "its 3 entries are not those that were written",
    )


def test_a_list_of_hours_that_is_damaged_or_missing_is_named(made: Directories) -> None:
    torn(made.found / HOURS_FILE)
    (found,) = made.problems()
    assert (found.path, "build the files again" in found.reason) == (made.found / HOURS_FILE, True)
    (made.found / HOURS_FILE).unlink()
    assert [one.path for one in made.problems()] == [made.path(hour) for hour in range(3)]


def test_an_hour_that_is_not_listed_is_missing_unless_it_is_settled(made: Directories) -> None:
    """T4: settled ones are removed."""
    shutil.rmtree(made.found)
    files = TimerFiles(made.found)
    files.load(0, has_messages=False)
    files.append([one for one in heads(9) if one.queue_offset % 3])
    files.flush()
    (found,) = made.problems()
    assert (found.path, "number 0 is nothing; the log says" in found.reason) == (made.path(0), True)
    assert made.problems(progress=TimedProgress((HOUR + 1) * HOUR_MS, 7)) == []
    assert len(made.problems(progress=TimedProgress((HOUR + 1) * HOUR_MS, 6))) == 1


def test_entries_that_differ_from_the_log_are_named_with_their_place(made: Directories) -> None:
    """Sound sums do not help a file that says something else: a time, a place, one too many or too few."""
    shutil.rmtree(made.found)
    files = TimerFiles(made.found)
    files.load(0, has_messages=False)
    other = [one if one.queue_offset != 4 else timed(4, STORE_MS + HOUR_MS + 4001) for one in heads(9)]
    files.append([*other, timed(9, STORE_MS + 5 * HOUR_MS)])
    files.flush()
    found = made.problems()
    assert [(one.path, one.offset) for one in found] == [(made.path(1), ENTRY.size), (made.path(5), 0)]
    assert "the log says nothing" in found[1].reason


def test_expired_and_later_records_are_not_compared(made: Directories) -> None:
    """The log does not say anything of the ones, and the broker may not have come to the others."""
    flawed = [one for one in heads(9) if 200 <= one.offset < 700]
    shutil.rmtree(made.found)
    files = TimerFiles(made.found)
    files.load(0, has_messages=False)
    files.append(flawed)
    files.flush()
    assert len(made.problems()) == 3
    assert made.problems(Bounds(200, 1 << 40, 700)) == []
    assert made.problems(Bounds(200, 700, 1 << 40)) == []
    assert len(made.problems(Bounds(100, 1 << 40, 700))) == 1
