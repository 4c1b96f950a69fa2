"""Properties of comparing the old logs of a group's future members."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketstore.upgrade.compare import Compared, LogStanding, RecordAt, compare, reference_of
from tests.unit.rocketstore.upgrade.support import (
    FILE_BYTES,
    bodies,
    copied,
    cut,
    old_log,
    overwrite,
    record_offsets,
    write_broker,
)

COUNT = 30


@pytest.fixture
def master(tmp_path: Path) -> Path:
    """A broker with three log files."""
    return write_broker(tmp_path / "a", bodies(COUNT))


def against(master: Path, other: Path) -> Compared:
    """How ``other`` stands to ``master``."""
    return compare([old_log(other)], old_log(master))[0]


def test_copies_are_equal(master: Path) -> None:
    """Nothing apart."""
    found = against(master, copied(master, "b"))

    assert (found.standing, found.bytes_apart, found.divergence) == (LogStanding.EQUAL, 0, None)


@pytest.mark.parametrize("left", [0, 1, 11, 12, 13, 14, 15, 20, COUNT - 1])
def test_a_log_that_is_the_begin_of_another_is_behind(master: Path, left: int) -> None:
    """Messages and bytes that it lacks are counted, wherever it ends: in a file, at its end, or before the first."""
    offsets = record_offsets(master)
    other = copied(master, "b")
    cut(other, offsets[left])

    found = against(master, other)

    assert found.standing is LogStanding.BEHIND
    assert found.messages_apart == COUNT - left
    whole = sum(one.length for one in old_log(master).digest.files)
    assert found.bytes_apart == whole - sum(one.length for one in old_log(other).digest.files)
    ahead = against(other, master)
    assert (ahead.standing, ahead.messages_apart) == (LogStanding.AHEAD, COUNT - left)


def test_a_member_to_be_is_behind_by_everything(master: Path, tmp_path: Path) -> None:
    """An empty directory has no log."""
    (tmp_path / "c").mkdir()

    found = against(master, tmp_path / "c")

    assert (found.standing, found.messages_apart) == (LogStanding.BEHIND, COUNT)


@pytest.mark.parametrize("number", [0, 7, 13, COUNT - 1])
def test_the_first_message_that_differs_is_named(tmp_path: Path, master: Path, number: int) -> None:
    """File, offset, queue, queue offset and key, of both, also if later ones differ, too."""
    other = write_broker(tmp_path / "b", [one if at < number else b"x" * 200 for at, one in enumerate(bodies(COUNT))])

    found = against(master, other)

    assert found.standing is LogStanding.DIFFERS
    assert found.divergence is not None
    assert found.divergence.offset == record_offsets(master)[number]
    assert found.divergence.file.parent.parent == other
    assert found.divergence.other_file.parent.parent == master
    expected = ("a message", "orders", number % 4, number // 4, f"key{number}")
    assert found.divergence.found[:5] == expected
    assert found.divergence.other_found[:5] == expected
    assert (
        found.divergence.found.sentence()
        == f"a message of queue orders-{number % 4}, offset {number // 4}, key key{number}"
    )


def test_damage_that_no_checksum_covers_is_told_from_another_message(master: Path) -> None:
    """Both hold the same message; the byte that differs is named."""
    other = copied(master, "b")
    offset = record_offsets(master)[7]
    overwrite(other, offset + 40, b"!")

    found = against(master, other).divergence

    assert found is not None
    assert (found.offset, found.byte, found.is_same_message) == (offset, offset + 40, True)


def test_a_shorter_log_with_another_message_differs(tmp_path: Path, master: Path) -> None:
    """It is not taken for one that is only behind; nor is a longer one."""
    other = write_broker(tmp_path / "b", [*bodies(17), b"x" * 200])

    short, long = against(master, other), against(other, master)

    assert short.standing is long.standing is LogStanding.DIFFERS
    assert short.divergence is not None
    assert long.divergence is not None
    assert short.divergence.offset == long.divergence.offset == record_offsets(master)[17]
    assert short.divergence.found == long.divergence.other_found


def test_logs_that_filled_a_file_differently_differ(tmp_path: Path, master: Path) -> None:
    """One of them begins the next file earlier, so that later messages have other offsets."""
    other = write_broker(tmp_path / "b", [*bodies(11), b"y" * 2000])
    offset = record_offsets(master)[11]

    found = against(master, other)

    assert found.standing is LogStanding.DIFFERS
    assert found.divergence is not None
    assert found.divergence.offset == offset
    assert RecordAt("the end of the file") in (found.divergence.found, found.divergence.other_found)


def test_a_damaged_log_is_neither_equal_nor_compared(master: Path) -> None:
    """Nor is anything compared with it."""
    other = copied(master, "b")
    overwrite(other, record_offsets(other)[3] + 150, b"!")

    assert against(master, other).standing is LogStanding.DAMAGED
    assert against(other, master).standing is LogStanding.UNKNOWN


def test_a_log_that_begins_later_is_not_ready(master: Path) -> None:
    """It would not serve what others still have; what both have is compared, and a missing end counted."""
    other = copied(master, "b")
    (other / "commitlog" / f"{0:020d}").unlink()

    for reference in (master, other):
        found = compare([old_log(master), old_log(other)], old_log(reference))
        assert [one.standing for one in found] == [LogStanding.EQUAL] * 2
        assert [one.lacks_from for one in found] == [None, 0]
        assert [one.is_ready for one in found] == [True, False]

    offsets = record_offsets(other)
    cut(other, offsets[4])
    assert against(master, other).messages_apart == len(offsets) - 4


def test_other_file_sizes_differ(tmp_path: Path, master: Path) -> None:
    """There is no place to name."""
    found = against(master, write_broker(tmp_path / "b", bodies(COUNT), 2 * FILE_BYTES))

    assert (found.standing, found.divergence) == (LogStanding.DIFFERS, None)


def test_the_longest_sound_log_is_compared_with_unless_one_is_named(master: Path) -> None:
    """A damaged one is not chosen, however long."""
    short, damaged = copied(master, "b"), copied(master, "c")
    cut(short, record_offsets(master)[20])
    overwrite(damaged, 150, b"!")
    logs = [old_log(one) for one in (damaged, short, master)]

    assert reference_of(logs).name == "a"
    assert reference_of(logs, "b").name == "b"
    assert reference_of(logs[:2]).name == "b"
