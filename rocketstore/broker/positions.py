"""How far in its queues a reader of the raw log is: the offsets that a place of the log stands for.

Whoever reads the log itself (a Spark stream) has one number for all queues. For tools that show a group's lag, that
number is turned into offsets: of each queue, the first message whose record begins at or after that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.broker.refusals import NotFoundRefusalError
from rocketstore.broker.topics import TopicAccess
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore

DISPATCH_WAIT_S: Final = 2.0
"""How long to wait for messages that are in the log, and not in their queues yet."""
COMMITTED_AT_ONCE: Final = 512
"""Offsets in one change of the broker state."""


def no_indexes(_index: int) -> int:
    """In place of a log that has indexes."""
    raise InvalidRequestError("a plain broker's log has no indexes: give a position instead")


@dataclass(frozen=True, slots=True)
class Reached:
    """Queue offsets, and the place of the log that they stand for: less than asked for if dispatch is behind."""

    offsets: tuple[QueueOffset, ...]
    position: int


class LogPositions:
    """Looks queue offsets up. ``position_of``: where the entry of an index begins. May wait: for threads."""

    def __init__(
        self, store: MessageStore, topics: TopicAccess, position_of: Callable[[int], int] = no_indexes
    ) -> None:
        self._store = store
        self._topics = topics
        self._position_of = position_of

    def of_index(self, index: int, topics: Iterable[str]) -> Reached:
        """What has been consumed by who has read every entry before ``index``."""
        return self.of_position(self._position_of(index), topics)

    def of_position(self, position: int, topics: Iterable[str]) -> Reached:
        """Of these topics, of all if none is given. Raises ``NotFoundRefusalError`` for one that does not exist."""
        wanted = frozenset(topics)
        for name in sorted(wanted):
            if self._topics.find(name) is None:
                raise NotFoundRefusalError(f"topic {name!r} does not exist")
        if self._store.dispatch_position < position:
            self._store.wait_dispatched(DISPATCH_WAIT_S)
        position = min(position, self._store.dispatch_position)  # before the queues are looked at: they only grow
        offsets = (
            QueueOffset(topic, queue_id, self._offset(topic, queue_id, position))
            for topic, queue_id in sorted(self._store.queues())
            if (topic in wanted if wanted else topic not in NO_SEND_TOPICS and self._topics.find(topic) is not None)
        )
        return Reached(tuple(offsets), position)

    def _offset(self, topic: str, queue_id: int, position: int) -> int:
        found = self._store.offset_by_position(topic, queue_id, position)
        return max(found, self._topics.begin_offset(topic, queue_id))
