"""The numbering of deleted queues goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError, DiskFullError
from dledger.store.fs import FileSystem
from rocketstore.store.directory import DeletedQueues
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs


def opened(path: Path) -> DeletedQueues:
    deleted = DeletedQueues(FileSystem(), path)
    deleted.load()
    return deleted


def test_ends_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "config" / "deletedQueues.json"
    opened(path).add({("T", 0): 5, ("T", 1): 7, ("U", 0): 0}, {})

    assert opened(path).over({("T", 0): 3, ("T", 1): 9}) == {("T", 0): 5, ("T", 1): 9}


def test_a_second_deletion_keeps_the_higher_end_and_drops_what_was_overtaken(tmp_path: Path) -> None:
    path = tmp_path / "deleted"
    opened(path).add({("T", 0): 5, ("U", 0): 5}, {})
    opened(path).add({("T", 0): 3}, {("U", 0): 6})

    assert opened(path).over({}) == {("T", 0): 5}


def test_without_a_file_nothing_was_deleted(tmp_path: Path) -> None:
    assert opened(tmp_path / "deleted").over({("T", 0): 1}) == {("T", 0): 1}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"T": 5}', '{"T": {"x": 5}}', '{"T": {"0": "x"}}', '{"T": {"0": Infinity}}', "[" * 10**5]
)
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "deleted").write_text(text)

    with pytest.raises(CorruptLogError):
        opened(tmp_path / "deleted")


@pytest.mark.parametrize(("number", "error"), [(NO_SPACE, DiskFullError), (IO_ERROR, DiskError)])
def test_a_failing_disk_is_an_error(tmp_path: Path, number: int, error: type[Exception]) -> None:
    deleted = DeletedQueues(FailingFs(lambda call, _path: number if call == "write" else None), tmp_path / "deleted")

    with pytest.raises(error):
        deleted.add({("T", 0): 5}, {})

    assert deleted.over({}) == {}


def test_a_directory_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError):
        opened(tmp_path)
