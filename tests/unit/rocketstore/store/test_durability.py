"""A checkpoint says nothing that is not on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dledger.errors import DiskError, DiskFullError
from rocketstore.store.derived import Attempts, Durability
from rocketstore.store.directory import StoreCheckpointFile
from tests.crash.crash_fs import NO_SPACE, FailingFs


class Dispatch:
    """Has dispatched up to ``position``, and more whenever something is flushed."""

    position = 100
    last_store_ms = 5

    def standstill(self, look: Callable[[], object]) -> object:
        return look()

    def goes_on(self, *_: object) -> int:
        self.position += 100
        return 5


@pytest.fixture
def dispatch() -> Dispatch:
    return Dispatch()


@pytest.fixture
def parts(dispatch: Dispatch) -> dict[str, Mock]:
    index = Mock(indexed_to=100, last_entries=1)
    found = {"log": Mock(), "queues": Mock(**{"all.return_value": []}), "index": index, "timers": Mock()}
    for part in found.values():
        part.flush.side_effect = dispatch.goes_on
    return found


@pytest.fixture
def fs() -> FailingFs:
    return FailingFs()


@pytest.fixture
def checkpoint(tmp_path: Path, fs: FailingFs) -> StoreCheckpointFile:
    return StoreCheckpointFile(fs, tmp_path / "checkpoint")


@pytest.fixture
def derived(parts: dict[str, Mock], checkpoint: StoreCheckpointFile) -> SimpleNamespace:
    return SimpleNamespace(**parts, checkpoint=checkpoint, deleted=Mock(), durable=0)


@pytest.fixture
def durability(derived: SimpleNamespace, dispatch: Dispatch) -> Durability:
    return Durability(derived, dispatch)  # type: ignore[arg-type]


def test_what_was_dispatched_during_a_flush_is_left_to_the_next(
    durability: Durability, checkpoint: StoreCheckpointFile
) -> None:
    """Neither a start nor retention may take it for durable."""
    durability.flush()

    assert (checkpoint.read().replay_from, durability._derived.durable) == (100, 100)


@pytest.mark.parametrize("failing", ["log", "queues", "index"])
def test_a_flush_that_failed_leaves_the_checkpoint_as_it_was(
    durability: Durability, checkpoint: StoreCheckpointFile, parts: dict[str, Mock], failing: str
) -> None:
    """The others are flushed all the same, and the next flush of everything says so."""
    durability.flush()
    parts[failing].flush.side_effect = DiskError("a bad sector")

    with pytest.raises(DiskError, match="a bad sector"):
        durability.flush()

    assert (checkpoint.read().replay_from, durability._derived.durable) == (100, 100)
    assert all(part.flush.call_count == 2 for part in parts.values())


def test_a_stop_that_fails_twice_leaves_the_checkpoint_as_it_was(
    durability: Durability, checkpoint: StoreCheckpointFile, parts: dict[str, Mock]
) -> None:
    """A stop flushes the log twice. Else, with the power gone after it, the lost end of the log is taken for damage."""
    durability.flush()
    parts["log"].flush.side_effect = DiskError("a bad sector")
    attempts = Attempts()
    attempts.run(parts["log"].flush)

    durability.flush_all(attempts)

    assert (checkpoint.read().replay_from, durability._derived.durable) == (100, 100)


def test_a_checkpoint_that_finds_no_room_frees_nothing(
    durability: Durability, checkpoint: StoreCheckpointFile, fs: FailingFs
) -> None:
    """Retention may have what the checkpoint on the disk covers, and no more."""
    durability.flush()
    fs.fails = lambda call, _path: NO_SPACE if call == "write" else None

    with pytest.raises(DiskFullError):
        durability.flush()

    assert (checkpoint.read().replay_from, durability._derived.durable) == (100, 100)


@pytest.mark.parametrize(("error", "tells_where"), [(DiskFullError("no room"), False), (DiskError("it broke"), True)])
def test_a_full_disk_fills_no_log(
    caplog: pytest.LogCaptureFixture, error: DiskFullError | DiskError, tells_where: bool
) -> None:
    """Each attempt fails until there is room; where in the program says nothing new."""
    Attempts().run(Mock(side_effect=error))

    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info is not None) == (f"a part of the store failed: {error}", tells_where)


def test_a_deleted_topics_queues_end_behind_every_number_that_was_given_out(
    durability: Durability, derived: SimpleNamespace
) -> None:
    """Also of what is put and not dispatched yet: a topic of that name that comes again must not give it out twice."""
    living = {("T", 0): 3, ("T", 1): 3, ("other", 0): 3}
    derived.queues.next_offsets.return_value = living
    derived.log.queue_offsets = {("T", 0): 5, ("T", 1): 2}

    durability.delete_topic("T")

    derived.deleted.add.assert_called_once_with({("T", 0): 5, ("T", 1): 3}, living)
