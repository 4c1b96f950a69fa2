"""Properties of making files ahead of need.

Properties of the pool of buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import DiskError
from dledger.runtime.threads import Supervisor
from dledger.store.format import segment_name
from rocketstore.mapped.allocation import AllocationService, TransientStorePool
from rocketstore.mapped.file import StoreFile
from tests.crash.crash_fs import NO_SPACE, FailingFs
from tests.support.waiting import wait_until

SIZE = 4096


class Setup:
    """A service over a directory."""

    def __init__(self, directory: Path, pool: TransientStorePool | None = None, *, fail_fast: bool = False) -> None:
        self.directory = directory
        self.fs = FailingFs()
        self.fatal: list[BaseException] = []
        self.service = AllocationService(
            self.fs, supervisor=Supervisor(self.fatal.append), pool=pool, fail_fast=fail_fast, wait_s=0.3
        )

    def create(self, number: int) -> StoreFile:
        """Ask for file ``number``."""
        base = number * SIZE
        return self.service.create(
            self.directory / segment_name(base), self.directory / segment_name(base + SIZE), base, SIZE
        )

    def exists(self, number: int) -> bool:
        """Whether file ``number`` is there."""
        return (self.directory / segment_name(number * SIZE)).exists()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """A running service."""
    made = Setup(tmp_path)
    made.service.start()
    yield made
    made.service.stop()
    assert made.fatal == []


def test_the_next_file_is_made_before_it_is_asked_for(setup: Setup) -> None:
    """And only that one."""
    first = setup.create(0)
    wait_until(lambda: setup.exists(1), "the next file")

    assert (first.base, first.size, first.is_blank()) == (0, SIZE, True)
    assert not setup.exists(2)


def test_a_file_made_ahead_is_handed_out_without_another_creation(setup: Setup) -> None:
    """Creation calls happen on the service's thread only."""
    setup.create(0)
    wait_until(lambda: bool(setup.service._ready), "the next file")
    setup.fs.fails = lambda _call, path: NO_SPACE if path.endswith((segment_name(SIZE), ".tmp")) else None

    second = setup.create(1)

    assert second.base == SIZE


def test_who_waits_gets_the_reason_of_a_failure_and_the_next_one_tries_again(setup: Setup) -> None:
    """A full disk is told at once, not after the time limit."""
    setup.fs.fails = lambda call, _path: NO_SPACE if call == "allocate" else None

    with pytest.raises(OSError, match="No space"):
        setup.create(0)
    setup.fs.fails = lambda _call, _path: None

    assert setup.create(0).base == 0


def test_a_disk_that_hangs_is_not_waited_for_without_limit(setup: Setup) -> None:
    """The caller hears of it after the time limit."""
    goes_on = threading.Event()

    def hang(call: str, _path: str) -> None:
        if call == "allocate":
            goes_on.wait(60)

    setup.fs.fails = hang

    with pytest.raises(DiskError, match="timed out"):
        setup.create(0)
    goes_on.set()

    assert setup.create(0).base == 0


def test_stopping_removes_what_was_made_for_nothing(setup: Setup) -> None:
    """Files in use stay."""
    setup.create(0)
    wait_until(lambda: bool(setup.service._ready), "the next file")

    setup.service.stop()

    assert (setup.exists(0), setup.exists(1)) == (True, False)


def test_without_its_thread_it_creates_in_the_callers(tmp_path: Path) -> None:
    """For tools, and before the start."""
    setup = Setup(tmp_path)

    assert setup.create(3).base == 3 * SIZE
    assert not setup.exists(4)


def test_files_get_buffers_while_there_are_any(tmp_path: Path) -> None:
    """Then they do without."""
    setup = Setup(tmp_path, TransientStorePool(1, SIZE))

    assert [setup.create(number).buffered for number in range(2)] == [True, False]


def test_failing_fast_refuses_a_file_without_a_buffer(tmp_path: Path) -> None:
    """``fastFailIfNoBufferInStorePool``; a buffer borrowed for a file that fails is given back."""
    pool = TransientStorePool(1, SIZE)
    setup = Setup(tmp_path, pool, fail_fast=True)
    setup.fs.fails = lambda call, _path: NO_SPACE if call == "allocate" else None
    with pytest.raises(OSError, match="No space"):
        setup.create(0)
    assert pool.available == 1
    setup.fs.fails = lambda _call, _path: None

    assert setup.create(0).buffered
    with pytest.raises(DiskError, match="in use"):
        setup.create(1)


def test_no_more_buffers_are_given_than_there_are() -> None:
    """And one that comes back is given again."""
    pool = TransientStorePool(2, 4096)

    first, second = pool.borrow(), pool.borrow()

    assert first is not None
    assert second is not None
    assert pool.borrow() is None
    assert pool.available == 0
    pool.give_back(first)
    assert pool.available == 1
    assert pool.borrow() is first
    assert len(first) == 4096
