"""Properties of the pool of buffers."""

from __future__ import annotations

from rocketstore.mapped.transient_pool import TransientStorePool


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
