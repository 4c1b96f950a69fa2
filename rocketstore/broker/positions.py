"""Converts a position in the raw log to queue offsets.

A reader of the raw log (a Spark stream) has one number for all queues. For tools that show a group's lag, it is
converted to offsets: in each queue, that of the first message whose record starts at or after the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rocketstore.broker.topics import Topics
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore

DISPATCH_WAIT_S: Final = 2.0
"""How long to wait for messages that are in the log, but not in their queues yet."""
COMMITTED_AT_ONCE: Final = 512
"""Offsets per change of the broker state."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Queue offsets, and the log position they correspond to: lower than requested if dispatch is behind."""

    offsets: tuple[QueueOffset, ...]
    position: int


class LogPositions:
    """Looks up queue offsets. May block, so for threads only."""

    def __init__(self, store: MessageStore, topics: Topics) -> None:
        self._store = store
        self._topics = topics

    def of_position(self, position: int, topics: Iterable[str]) -> Reached:
        """For these topics, or for all if none are given. Raises ``Refusal`` for an unknown topic."""
        wanted = frozenset(topics)
        for name in sorted(wanted):
            self._topics.require(name)
        if self._store.dispatch_position < position:
            self._store.wait_dispatched(DISPATCH_WAIT_S)
        position = min(position, self._store.dispatch_position)  # before reading the queues, which only grow
        offsets = (
            QueueOffset(topic, queue_id, self._offset(topic, queue_id, position))
            for topic, queue_id in sorted(self._store.queues())
            if (topic in wanted if wanted else topic not in NO_SEND_TOPICS and self._topics.find(topic) is not None)
        )
        return Reached(tuple(offsets), position)

    def _offset(self, topic: str, queue_id: int, position: int) -> int:
        found = self._store.offset_by_position(topic, queue_id, position)
        return max(found, self._topics.begin_offset(topic, queue_id))
