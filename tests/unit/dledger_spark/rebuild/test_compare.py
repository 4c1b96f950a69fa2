"""What a verification takes for a difference, and what it must not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dledger_spark.rebuild.rows import IndexWriter, QueueWriter, exchange, keep_expired_queues, remove_left_overs
from rocketstore.consume_queue.files import UNIT
from rocketstore.index.file import IndexShape
from rocketstore.index.format import KEY
from rocketstore.verification.compare import Bounds, Tally, compare_index, compare_queues, read_deleted

FILE_BYTES = 200
SHAPE = IndexShape(7, 20)
RECORD_BYTES = 100
ALL = Bounds(0, 1 << 40, 1 << 40)


def write_queue(directory: Path, numbers: range) -> None:
    """Queue 0 of topic T; the record of unit n is at n * 100."""
    queue = QueueWriter(directory / "T" / "0", FILE_BYTES)
    units = np.array([(number * RECORD_BYTES, RECORD_BYTES, number) for number in numbers], UNIT)
    queue.append(np.array(numbers, np.int64), units)
    queue.close()


def keys(numbers: range) -> NDArray[np.void]:
    """Two keys of each record; record n is at n * 100 and stored in second n."""
    return np.array(
        [(hash_, number * RECORD_BYTES, 1_000_000 + number * 1000) for number in numbers for hash_ in (number, 3)], KEY
    )


def write_index(directory: Path, numbers: range) -> list[Path]:
    index = IndexWriter(directory, SHAPE)
    index.append(keys(numbers))
    index.close()
    return sorted(directory.iterdir())


@dataclass
class Sides:
    """Two directories: made of the log, and found at a broker's."""

    made: Path
    found: Path

    def compare(self, bounds: Bounds = ALL) -> Tally:
        return compare_queues(self.made, self.found, FILE_BYTES, bounds)


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path / "made", tmp_path / "found")


def test_expired_units_are_no_difference(sides: Sides) -> None:
    """The log begins at record 13 now; the broker's files still know older ones, of a file of their own, too."""
    write_queue(sides.made, range(13, 40))
    write_queue(sides.found, range(40))

    tally = sides.compare(Bounds(13 * RECORD_BYTES, 1 << 40, 1 << 40))

    assert (tally.differences, tally.equal, tally.expired) == ([], 27, 13)
    assert sides.compare().differences[0].number == 0


def test_newer_and_pending_units_are_no_difference(sides: Sides) -> None:
    """A running broker has gone on since the log was read; a killed one has yet to dispatch the end."""
    write_queue(sides.made, range(30))
    write_queue(sides.found, range(35))
    newer = sides.compare(Bounds(0, 30 * RECORD_BYTES, 0))
    write_queue(sides.made / "x", range(35))
    pending = compare_queues(sides.made / "x", sides.made, FILE_BYTES, Bounds(0, 1 << 40, 30 * RECORD_BYTES))
    late = compare_queues(sides.made / "x", sides.made, FILE_BYTES, Bounds(0, 1 << 40, 33 * RECORD_BYTES))

    assert (newer.differences, newer.equal, newer.newer) == ([], 30, 5)
    assert (pending.differences, pending.pending) == ([], 5)
    assert late.differences[0].number == 30


def test_units_of_a_deleted_topic_are_no_difference(sides: Sides, tmp_path: Path) -> None:
    (tmp_path / "deletedQueues.json").write_text(json.dumps({"T": {"0": 20}}))
    deleted = read_deleted(tmp_path / "deletedQueues.json")
    write_queue(sides.made, range(20))
    sides.found.mkdir()

    assert sides.compare(Bounds(0, 1 << 40, 1 << 40, deleted)).deleted == 20
    assert read_deleted(tmp_path / "nothing") == {}
    assert "nothing; the log says offset 0" in sides.compare().differences[0].sentence()


@pytest.mark.parametrize("byte", [0, 11, 19])
def test_any_flipped_bit_of_a_unit_is_named(sides: Sides, byte: int) -> None:
    write_queue(sides.made, range(30))
    write_queue(sides.found, range(30))
    path = sides.found / "T" / "0" / f"{FILE_BYTES:020d}"
    content = bytearray(path.read_bytes())
    content[3 * 20 + byte] ^= 1
    path.write_bytes(content)

    (difference,) = sides.compare().differences

    assert (difference.file, difference.number) == (str(path), 13)


def test_a_file_of_another_size_is_named(sides: Sides) -> None:
    write_queue(sides.made, range(30))
    write_queue(sides.found, range(30))
    os.truncate(sides.found / "T" / "0" / f"{0:020d}", 180)

    assert "a file of 180" in sides.compare().differences[0].sentence()


def test_an_index_that_lost_its_expired_files_is_no_difference(tmp_path: Path) -> None:
    """Whatever files it began with: from the log's begin on every entry, link, slot and header counts."""
    files = write_index(tmp_path / "index", range(40))
    files[0].unlink()
    first = 9  # 9 records' keys fit a file of 19 entries

    tally = compare_index(keys(range(15, 40)), tmp_path / "index", SHAPE, Bounds(1500, 1 << 40, 1 << 40))

    assert (tally.differences, tally.equal, tally.expired) == ([], 50, 2 * (15 - first))


@pytest.mark.parametrize("place", ["header", "slot", "hash", "offset", "seconds", "previous"])
def test_any_flipped_bit_of_an_index_file_is_named(tmp_path: Path, place: str) -> None:
    path = write_index(tmp_path / "index", range(40))[1]
    entry = SHAPE.entries_at + 5 * 20
    at = {"header": 35, "slot": 40 + 3 * 4 + 3, "hash": entry + 3, "offset": entry + 11, "seconds": entry + 15}
    content = bytearray(path.read_bytes())
    content[at.get(place, entry + 19)] ^= 1
    path.write_bytes(content)

    (difference,) = compare_index(keys(range(40)), tmp_path / "index", SHAPE, ALL).differences

    assert difference.file == str(path)
    assert difference.number == (0 if place in ("header", "slot") else 5)


def test_missing_keys_are_a_difference_unless_they_wait_for_dispatch(tmp_path: Path) -> None:
    write_index(tmp_path / "index", range(40))

    waiting = compare_index(keys(range(45)), tmp_path / "index", SHAPE, Bounds(0, 1 << 40, 4000))
    missing = compare_index(keys(range(45)), tmp_path / "index", SHAPE, Bounds(0, 1 << 40, 4200))
    nothing = compare_index(keys(range(3)), tmp_path / "no index", SHAPE, ALL)

    assert (waiting.differences, waiting.pending) == ([], 10)
    assert missing.differences[0].found == "nothing"
    assert len(nothing.differences) == 1


def test_queues_whose_messages_have_all_expired_keep_their_numbering(tmp_path: Path) -> None:
    """Else the next message of such a queue would get offset 0, and its consumers would wait for ever."""
    old, built = tmp_path / "consumequeue", tmp_path / ".rebuild-1" / "consumequeue"
    write_queue(old, range(30))
    built.mkdir(parents=True)

    assert keep_expired_queues(built, old, 29 * RECORD_BYTES) == []
    assert keep_expired_queues(built, old, 30 * RECORD_BYTES) == ["T/0"]
    assert (built / "T" / "0" / f"{FILE_BYTES:020d}").read_bytes() == (
        old / "T" / "0" / f"{FILE_BYTES:020d}"
    ).read_bytes()


def test_files_are_exchanged_as_a_whole_and_left_overs_removed(tmp_path: Path) -> None:
    staging = tmp_path / ".rebuild-1"
    write_queue(tmp_path / "consumequeue", range(3))
    write_queue(staging / "consumequeue", range(5))
    expected = {path.name: path.read_bytes() for path in (staging / "consumequeue" / "T" / "0").iterdir()}

    exchange(tmp_path, staging, "consumequeue")
    remove_left_overs(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["consumequeue"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "consumequeue" / "T" / "0").iterdir()} == expected
    shutil.rmtree(tmp_path / "consumequeue")
