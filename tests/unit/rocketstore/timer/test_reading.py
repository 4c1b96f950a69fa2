"""What is read of hour files of timed messages."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

from dledger.errors import CorruptLogError
from rocketstore.timer import hours
from rocketstore.timer.hours import ENTRY, Entries, HourExtent, TimedEntry, first_due

PIECE = 16


def written(path: Path, dues_ms: list[int]) -> HourExtent:
    """A file of messages that are due then."""
    data = b"".join(TimedEntry(due_ms, at, at, at * 100, 0, 100).encode() for at, due_ms in enumerate(dues_ms))
    path.write_bytes(data)
    return HourExtent(path, len(data), crc32(data))


def even(entries: Entries) -> NDArray[np.bool_]:
    which: NDArray[np.bool_] = entries["queue_offset"] % 2 == 0
    return which


@pytest.mark.parametrize("kinds", [3, 40, 10_000])
def test_a_page_has_what_is_due_first_and_says_when_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: int
) -> None:
    """Of any order in the file, with many due at once or few; page by page, everything comes once."""
    monkeypatch.setattr(hours, "PIECE_BYTES", PIECE * ENTRY.size)
    chance = random.Random(kinds)
    for size in (0, 1, PIECE, 500):
        dues_ms = [chance.randrange(kinds) for _ in range(size)]
        extent, found, from_ms = written(tmp_path / "hour", dues_ms), list[tuple[int, int]](), 0
        while from_ms >= 0:
            page = first_due(extent, lambda rows, at=from_ms: even(rows) & (rows["due_ms"] >= at), 20)  # type: ignore[misc]
            rows = [(int(one["due_ms"]), int(one["queue_offset"])) for one in page.entries]
            assert len(rows) >= 20 or page.next_ms < 0
            assert rows == sorted(rows, key=lambda row: row[1])
            assert page.next_ms < 0 or max(rows)[0] < page.next_ms
            found, from_ms = found + sorted(rows), page.next_ms
        assert found == sorted((due_ms, at) for at, due_ms in enumerate(dues_ms) if not at % 2)


def test_a_page_takes_the_memory_of_a_page_and_not_of_an_hour(tmp_path: Path) -> None:
    chance = random.Random(1)
    extent = written(tmp_path / "hour", [chance.randrange(3_600_000) for _ in range(200_000)])
    tracemalloc.start()
    page = first_due(extent, lambda rows: rows["due_ms"] >= 0, 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(page.entries) >= 1000
    assert peak < extent.size / 2


def test_a_page_of_a_file_that_is_not_what_was_written_is_not_given(tmp_path: Path) -> None:
    extent = written(tmp_path / "hour", list(range(100)))
    extent.path.write_bytes(extent.path.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptLogError):
        first_due(extent, even, 10)
