"""The number of a log's master: it rises when a slave becomes one, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem
from rocketstore.ha.promotion import EPOCH_FILE, EpochFile


def epoch(directory: Path) -> EpochFile:
    """As it is on disk."""
    return EpochFile(FileSystem(), directory)


def test_a_slave_that_becomes_master_has_a_higher_number_than_the_old_one_ever_gets(tmp_path: Path) -> None:
    """However often the old one is started: only a change of role counts."""
    old, new = tmp_path / "old", tmp_path / "new"
    epoch(old).begin(0)
    epoch(new).follow(epoch(old).now)
    epoch(new).begin(500)
    for _ in range(3):
        epoch(old).begin(700)
        epoch(new).begin(900)
    assert (epoch(old).now, epoch(old).begin_offset) == (1, 0)
    assert (epoch(new).now, epoch(new).begin_offset) == (2, 500)


def test_an_old_master_that_follows_its_successor_counts_on_from_there(tmp_path: Path) -> None:
    """It was 1, follows 2, and is 3 if it is made master again."""
    one = epoch(tmp_path)
    one.begin(0)
    one.follow(2)
    assert epoch(tmp_path).begin_offset == -1
    epoch(tmp_path).begin(10)
    assert epoch(tmp_path).now == 3


def test_a_lower_number_is_never_followed(tmp_path: Path) -> None:
    """The file keeps the highest."""
    epoch(tmp_path).follow(5)
    epoch(tmp_path).follow(4)
    assert epoch(tmp_path).now == 5


def test_a_number_without_a_role_counts_as_a_slaves(tmp_path: Path) -> None:
    """Rather one too many than two masters of one number."""
    (tmp_path / EPOCH_FILE).write_text('{"epoch": 4}')
    epoch(tmp_path).begin(10)
    assert epoch(tmp_path).now == 5


@pytest.mark.parametrize("content", ["", "[]", '{"epoch": -1}', '{"epoch": 1, "role": "king"}', '{"epoch": "1"}'])
def test_what_is_no_number_is_refused(tmp_path: Path, content: str) -> None:
    """It names the file, and what to do."""
    (tmp_path / EPOCH_FILE).write_text(content)
    with pytest.raises(CorruptLogError, match="haEpoch"):
        epoch(tmp_path)
