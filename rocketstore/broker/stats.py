"""The extent of the queues of topics, the progress of groups, and the age of the next message for each.

On read threads: it may wait for a disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.errors import CorruptLogError
from rocketstore.broker.offsets import NONE, Offsets
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import SeenTopic, Topics
from rocketstore.pop.tables import PopPlace
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import QueueUnit

QUEUES_MAX: Final = 20_000
"""Maximum queues in one answer: each costs up to two reads, and about 150 bytes of a frame's 16 MiB."""
NEVER: Final = (1 << 63) - 1
"""RocketMQ's offset for a queue that needs no correction."""
LATEST: Final = -1
"""In the place of a time: the end of every queue."""


class QueueEnds(NamedTuple):
    """A queue's bounds, and when its last message was stored (0: there is none)."""

    queue_id: int
    begin: int
    end: int
    last_ms: int


class StoredUnits(NamedTuple):
    """A queue's bounds, and units of it as they are stored."""

    begin: int
    end: int
    units: list[QueueUnit]


class GroupPosition(NamedTuple):
    """A group's offset in a queue (0 without one), the queue's end, and when the last consumed message was stored.

    Of a group that pops, what lies before ``given_out`` was given out.
    """

    topic: str
    queue_id: int
    consumed: int
    end: int
    consumed_ms: int
    given_out: int


class QueueAges(NamedTuple):
    """When a queue's first and last messages were stored, and the last consumed one, and how old the next one is."""

    queue_id: int
    first_ms: int
    last_ms: int
    consumed_ms: int
    delay_ms: int


class Stats:
    """Each method raises ``Refusal`` if the answer would be about too many queues."""

    def __init__(self, store: MessageStore, state: BrokerState, topics: Topics, offsets: Offsets, clock: Clock) -> None:
        self._store = store
        self._state = state
        self._topics = topics
        self._offsets = offsets
        self._clock = clock

    def of_topic(self, topic: SeenTopic) -> list[QueueEnds]:
        """Of all queues that can be written."""
        found = []
        for queue_id in _queues(topic.write_queues):
            begin, end = self._offsets.bounds_of(topic.name, queue_id)
            found.append(
                QueueEnds(queue_id, begin, end, self._time(topic.name, queue_id, end - 1) if end > begin else 0)
            )
        return found

    def units(self, topic: str, queue_id: int, first: int, count: int) -> StoredUnits | None:
        """``count`` units from ``first`` on, as far as there are any; None if there is no such queue."""
        store = self._store
        begin, end = self._offsets.bounds_of(topic, queue_id)
        if not end and (topic, queue_id) not in store.queues():
            return None
        first = max(first, begin)
        found = (store.unit(topic, queue_id, offset) for offset in range(first, min(first + count, end)))
        return StoredUnits(begin, end, [unit for unit in found if unit is not None])

    def topics_of(self, group: str) -> list[SeenTopic]:
        """The topics in which a group has offsets."""
        names = sorted({one.topic for one in self._state.offsets(group)})
        return [topic for one in names if (topic := self._topics.seen(one)) is not None]

    def of_group(self, group: str, topics: Collection[SeenTopic]) -> list[GroupPosition]:
        """Its progress in all queues of these topics."""
        check_queues(sum(one.read_queues for one in topics))
        return [self._progress(group, one.name, queue_id) for one in topics for queue_id in range(one.read_queues)]

    def ages(self, group: str, topic: SeenTopic) -> list[QueueAges]:
        """Of a topic's messages, and of those that a group comes to next."""
        now_ms, name = self._clock.wall_ms(), topic.name
        found = []
        for queue_id in _queues(topic.write_queues):
            begin, end = self._offsets.bounds_of(name, queue_id)
            first_ms = self._time(name, queue_id, begin)
            consumed = self._state.offset(group, name, queue_id)
            consumed_ms = self._time(name, queue_id, consumed - 1) if consumed > 0 else first_ms
            next_ms = self._time(name, queue_id, max(consumed, begin)) if consumed < end else 0
            delay_ms = max(0, now_ms - next_ms) if next_ms > 0 else 0
            found.append(QueueAges(queue_id, first_ms, self._time(name, queue_id, end - 1), consumed_ms, delay_ms))
        return found

    def lowest_offsets(self, topic: str, left_out: Collection[str], compared: str) -> dict[int, int]:
        """By queue, the lowest offset of all groups but some; ``NEVER`` where that of ``compared`` is lower still."""
        lowest: dict[int, int] = {}
        begins: dict[int, int] = {}
        for group in self._state.groups():
            for one in () if group in left_out else self._state.offsets(group, topic):
                if one.queue_id not in begins:
                    begins[one.queue_id] = self._offsets.bounds_of(topic, one.queue_id)[0]
                if one.offset >= begins[one.queue_id]:
                    lowest[one.queue_id] = min(lowest.get(one.queue_id, NEVER), one.offset)
        for one in self._state.offsets(compared, topic):
            if lowest.get(one.queue_id, -1) > one.offset:
                lowest[one.queue_id] = NEVER
        return lowest

    def reset_targets(self, group: str, topic: SeenTopic, time_ms: int, *, is_forced: bool) -> dict[int, int]:
        """By queue, where a group goes on from a time (or ``LATEST``): not forward, unless that is forced.

        Raises ``Refusal`` if it has no offset in one of them.
        """
        targets: dict[int, int] = {}
        for queue_id in _queues(topic.write_queues):
            consumed = self._state.offset(group, topic.name, queue_id)
            if consumed == NONE:
                why = f"THe consumer group <{group}> not exist: no offset in queue {queue_id}"
                raise Refusal(RefusalKind.INVALID, why)
            begin, end = self._offsets.bounds_of(topic.name, queue_id)
            target = end
            if time_ms != LATEST:
                target = min(max(self._store.offset_by_time(topic.name, queue_id, time_ms), begin), end)
            targets[queue_id] = target if is_forced else min(target, consumed)
        return targets

    def _progress(self, group: str, topic: str, queue_id: int) -> GroupPosition:
        end = self._offsets.bounds_of(topic, queue_id)[1]
        consumed = max(self._state.offset(group, topic, queue_id), 0)
        consumed_ms = self._time(topic, queue_id, consumed - 1) if consumed else 0
        window = self._state.pop.pop_window(PopPlace(group, topic, queue_id))
        given_out = consumed if window is None else max(consumed, window.reserved)
        return GroupPosition(topic, queue_id, consumed, end, consumed_ms, given_out)

    def _time(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message was stored; 0 if it does not exist, or is damaged: reading it reports that."""
        if offset < 0:
            return 0
        try:
            return max(self._store.store_time(topic, queue_id, offset), 0)
        except CorruptLogError:
            return 0


def check_queues(count: int) -> None:
    """Raises ``Refusal`` if an answer would be about too many queues."""
    if count > QUEUES_MAX:
        why = f"{count} queues: an answer may be about {QUEUES_MAX} at most, ask for one topic"
        raise Refusal(RefusalKind.INVALID, why)


def _queues(count: int) -> Iterable[int]:
    check_queues(count)
    return range(count)
