"""What a store lets others compare with their own."""

from __future__ import annotations

from pathlib import Path

from dledger.store.watched import WatchedStore
from dledger.types import Boundary, LogIndex, Position, Term
from tests.unit.dledger.store.support import fill, open_store, small_config


def test_only_what_is_committed_and_kept_is_compared(tmp_path: Path) -> None:
    """What is not committed yet may differ between members, and is no reason to fence anybody."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(9), Term(1), Position(0), 7))
    fill(store, 20)
    store.flush()
    store.set_committed(LogIndex(15))

    found = WatchedStore(store).chain_crcs([LogIndex(index) for index in range(40)])

    assert found == {LogIndex(index): store.chain_crc_at(LogIndex(index)) for index in range(9, 16)}
    store.close()
