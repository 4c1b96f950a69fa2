"""What only the memory store has: a crash that loses chosen entries, and a hard state in memory."""

from __future__ import annotations

import pytest

from dledger.types import HardState, LogIndex, NodeId, Standing, Term
from tests.support.memory_store import MemoryHardState, MemoryStore
from tests.unit.dledger.store.support import bodies_of, fill


@pytest.mark.parametrize(("keep", "left"), [(0, 10), (3, 13), (5, 15), (9, 15)])
def test_a_crash_keeps_what_was_flushed_and_some_more(keep: int, left: int) -> None:
    """Unflushed entries may survive, but only from the front."""
    store = MemoryStore()
    bodies = fill(store, 10)
    store.flush()
    bodies += fill(store, 5)
    store.set_committed(LogIndex(12))

    store.crash(keep)

    assert bodies_of(store) == bodies[:left]
    assert store.committed_index == 9
    assert (store.flushed.index, store.flushed.sequence, store.write_sequence) == (left - 1, 0, 0)
    fill(store, 2)


def test_a_closed_store_can_crash_back_to_life() -> None:
    """The simulator restarts nodes from what is left."""
    store = MemoryStore()
    bodies = fill(store, 5)
    store.close()
    store.crash()
    assert bodies_of(store) == bodies


def test_the_front_can_be_dropped() -> None:
    """As retention does on disk: the begin describes the entry before."""
    store = MemoryStore(segment_bytes=512)
    bodies = fill(store, 20)
    chain = store.chain_crc_at(LogIndex(6))

    store.drop_before(LogIndex(7))

    assert (store.begin.index, store.begin.chain_crc, store.begin.term) == (6, chain, 1)
    assert store.begin.position == store.read(LogIndex(7)).position
    assert bodies_of(store) == bodies[7:]
    store.drop_before(LogIndex(7))
    assert store.begin.index == 6


def test_hard_state_remembers() -> None:
    """The last state saved is loaded."""
    saved = MemoryHardState()
    assert saved.load() == HardState()
    saved.save(HardState(Term(3), NodeId("n1"), standing=Standing.FULL))
    assert saved.load().term == 3
