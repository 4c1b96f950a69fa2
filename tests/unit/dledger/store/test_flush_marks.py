"""What a flush and a checkpoint vouch for: no more than was durable when they were made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dledger.store.durable_state import read_checkpoint
from dledger.types import LogIndex
from tests.unit.dledger.store.support import UnsyncedFs, abandon, fill, open_store, small_config


class BusyFs(UnsyncedFs):
    """Something else happens while a sync is under way."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = lambda: None

    def sync(self, fd: int) -> None:
        act, self.meanwhile = self.meanwhile, lambda: None
        act()


def test_a_flush_covers_nothing_that_was_appended_while_it_ran(tmp_path: Path) -> None:
    """It may have come after the pages were written: only the next flush vouches for it."""
    fs = BusyFs()
    store = open_store(small_config(tmp_path), fs)
    fill(store, 5)
    fs.meanwhile = lambda: fill(store, 5)

    first = store.flush()

    assert store.last.index == 9
    assert (first.index, store.flushed.index) == (4, 4)
    assert store.flush().index == 9
    store.close()


def test_a_checkpoint_commits_nothing_that_is_not_flushed(tmp_path: Path) -> None:
    """Committed by a majority of others: this disk may lose it, and must open all the same."""
    fs = BusyFs()
    store = open_store(small_config(tmp_path), fs)
    fill(store, 5)

    def commit_more() -> None:
        fill(store, 5)
        store.set_committed(LogIndex(9))

    fs.meanwhile = commit_more
    store.flush()

    found = read_checkpoint(tmp_path / "dledger-n0" / "checkpoint")
    assert store.committed_index == 9
    assert (found.flushed.index, found.committed) == (4, 4)
    abandon(store)
