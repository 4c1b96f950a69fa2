"""Looks up what the engine must know before a group can be given messages of a topic."""

from __future__ import annotations

from typing import Final, NamedTuple

from rocketstore.broker.popping.copies import ONE_BYTES, dead_topic_of, origin_of
from rocketstore.broker.reading import QueueReading, ReadLimits
from rocketstore.broker.topics import Topics
from rocketstore.pop.operations import Loading, Origin, QueueBounds
from rocketstore.pop.tables import retry_topic_of
from rocketstore.pop.windows import COPIES_MAX
from rocketstore.store.message_store import MessageStore

READ_AT_ONCE: Final = 256
"""Copies that are read together."""


class Start(NamedTuple):
    """Where a group begins that is new to a topic (P9): with the first messages, with what was stored at ``since_ms``
    or later, or, if that is 0, at the end.
    """

    from_first: bool = False
    since_ms: int = 0


END: Final = Start()


class TopicLoader:
    """On the loop."""

    def __init__(self, store: MessageStore, topics: Topics, reading: QueueReading) -> None:
        self._store = store
        self._topics = topics
        self._reading = reading

    async def load(self, group: str, topic: str, start: Start) -> Loading:
        """Of a topic that exists. ``start``: where a group begins that is new to it (P9).

        Raises ``Refusal`` and ``CorruptLogError``.
        """
        config = self._topics.require(topic)
        retry, dead = retry_topic_of(group, topic), dead_topic_of(group)
        bounds: dict[int, QueueBounds] = {}
        for queue_id in range(config.queues):
            begin = self._begin(topic, queue_id)
            end = max(await self._reading.end(topic, queue_id), begin)
            bounds[queue_id] = QueueBounds(begin, await self._start(topic, queue_id, begin, end, start), end)
        copied = [one for name in (retry, dead) for one in await self._copied(name, group)]
        retry_begin = None if self._topics.find(retry) is None else self._begin(retry, 0)
        return Loading(group, topic, retry, bounds, retry_begin, copied)

    async def _copied(self, name: str, group: str) -> list[Origin]:
        """The origins of the newest copies in a topic."""
        if self._topics.find(name) is None:
            return []
        end = await self._reading.end(name, 0)
        at = max(self._begin(name, 0), end - COPIES_MAX)
        found: list[Origin] = []
        while at < end:
            result = await self._reading.read(name, 0, at, None, ReadLimits(READ_AT_ONCE, ONE_BYTES))
            origins = map(origin_of, result.records)
            found += [one for one in origins if one is not None and one.place.group == group]
            if result.next_offset <= at:
                break
            at = result.next_offset
        return found

    async def _start(self, topic: str, queue_id: int, begin: int, end: int, start: Start) -> int:
        """``end`` was read before the search: messages that came since are found, too."""
        if start.from_first:
            return begin
        if not start.since_ms or begin == end:
            return end
        found = await self._reading.stored_since(topic, queue_id, start.since_ms)
        return min(max(found, begin), end)

    def _begin(self, topic: str, queue_id: int) -> int:
        return max(self._store.min_offset(topic, queue_id), self._topics.begin_offset(topic, queue_id), 0)
