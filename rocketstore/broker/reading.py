"""Reads messages of one queue: those in memory at once, others on a read thread.

Waiting for messages, and room for the answers that carry them, are the callers' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rocketstore.broker.readers import ReadThreads
from rocketstore.filter.filters import MessageFilter
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetResult


class ReadLimits(NamedTuple):
    """How much one read returns at most; of at least one message, whatever its size."""

    messages: int
    size_bytes: int


class QueueReading:
    """On the loop. ``group`` counts for statistics; empty: nobody consumes what is read."""

    def __init__(self, store: MessageStore, readers: ReadThreads) -> None:
        self._store = store
        self._readers = readers

    async def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        wanted: MessageFilter | None,
        limits: ReadLimits,
        group: str = "",
    ) -> GetResult:
        """The messages from ``offset`` on that pass the filter ``wanted`` (None: all). Raises ``CorruptLogError``."""
        found = self.at_once(topic, queue_id, offset, limits, group) if wanted is None else None  # a filter reads much
        if found is not None:
            return found
        return await self._readers.run(
            self._store.get,
            topic,
            queue_id,
            offset,
            max_count=limits.messages,
            max_bytes=limits.size_bytes,
            matches_tags=_matches_code(wanted),
            matches_record=wanted.matches_record if wanted else None,
            group=group,
        )

    def at_once(self, topic: str, queue_id: int, offset: int, limits: ReadLimits, group: str = "") -> GetResult | None:
        """All messages from ``offset`` on, if that takes no read thread; None if ``read`` must decide."""
        count, size = limits
        return self._store.get_at_once(topic, queue_id, offset, max_count=count, max_bytes=size, group=group)

    async def end(self, topic: str, queue_id: int) -> int:
        """The offset after the queue's last message; 0 if there is no such queue."""
        return await self._readers.run(self._store.max_offset, topic, queue_id)

    async def stored_since(self, topic: str, queue_id: int, time_ms: int) -> int:
        """The offset of the first message stored at that time (ms since 1970) or later; the queue's end if there is
        none. Raises ``CorruptLogError``.
        """
        return await self._readers.run(self._store.offset_by_time, topic, queue_id, time_ms)

    def begin_at_once(self, topic: str, queue_id: int) -> int:
        """The offset of the queue's first message, without a change of thread."""
        return max(self._store.min_offset(topic, queue_id), 0)

    def end_at_once(self, topic: str, queue_id: int) -> int:
        """The same, without a change of thread."""
        return self._store.max_offset(topic, queue_id)


def _matches_code(wanted: MessageFilter | None) -> Callable[[int], bool] | None:
    return None if wanted is None or wanted.codes is None else wanted.codes.__contains__
