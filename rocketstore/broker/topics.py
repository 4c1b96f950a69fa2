"""Checks which queues a client may use, by the topics in the broker state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from rocketstore.broker.refusals import NotFoundRefusalError, NotPermittedError, OutOfRangeError
from rocketstore.broker_config import PERMISSION_READ, PERMISSION_WRITE, BrokerConfig
from rocketstore.state.changes import TopicConfig

CURSORS_MAX: Final = 65_536
"""Topics for which the round-robin position is remembered."""


class TopicNews:
    """Tells listeners of topics that were created, changed or deleted here. On the loop."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[], None], ...] = ()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it after every change."""
        self._listeners = (*self._listeners, listener)

    def tell(self) -> None:
        """A topic has changed."""
        for listener in self._listeners:
            listener()


class TopicAccess:
    """Lives on the event loop. ``find`` returns a topic of the broker state, or None.

    ``begin_offset`` returns a queue's first offset that does not belong to a deleted topic of the same name.
    """

    def __init__(
        self,
        find: Callable[[str], TopicConfig | None],
        begin_offset: Callable[[str, int], int],
        *,
        broker_permission: int,
    ) -> None:
        self._find = find
        self.begin_offset: Final = begin_offset
        self._broker_permission = broker_permission
        self.news: Final = TopicNews()
        self._cursors: dict[str, itertools.count[int]] = {}

    def adopt(self, config: BrokerConfig) -> None:
        """Continue with changed settings."""
        self._broker_permission = config.broker_permission

    def find(self, name: str) -> TopicConfig | None:
        """The topic, or None."""
        return self._find(name)

    def write_problem(self, topic: TopicConfig, queue_id: int) -> str:
        """Why nothing may be sent to this queue (-1: to any); empty if allowed."""
        if not self._broker_permission & PERMISSION_WRITE:
            return "this broker does not allow writes (brokerPermission)"
        if not topic.permission & PERMISSION_WRITE:
            return f"topic {topic.name} does not allow writes (permission {topic.permission})"
        if not -1 <= queue_id < topic.write_queues:
            return (
                f"topic {topic.name} has {topic.write_queues} write queues, numbered from 0: there is no queue "
                f"{queue_id}"
            )
        return ""

    def next_queue(self, topic: TopicConfig) -> int:
        """The next queue in turn."""
        cursor = self._cursors.get(topic.name)
        if cursor is None:
            if len(self._cursors) >= CURSORS_MAX:
                self._cursors.clear()
            cursor = self._cursors[topic.name] = itertools.count()
        return next(cursor) % topic.write_queues

    def check_readable(self, name: str, queue_id: int) -> None:
        """Raises ``NotFoundRefusalError``, ``NotPermittedError`` or ``OutOfRangeError`` unless it is readable."""
        topic = self._find(name)
        if topic is None:
            raise NotFoundRefusalError(f"topic {name!r} does not exist")
        if not self._broker_permission & topic.permission & PERMISSION_READ:
            raise NotPermittedError(f"topic {name} or this broker does not allow reads")
        # Queues removed from writing stay readable until `read_queues` is lowered.
        if not 0 <= queue_id < topic.read_queues:
            raise OutOfRangeError(
                f"topic {name} has {topic.read_queues} read queues, numbered from 0: there is no queue {queue_id}"
            )
