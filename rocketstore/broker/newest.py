"""A topic's messages from the newest one backwards, across its queues."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.broker.codec import parse
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.refusals import NotFoundRefusalError
from rocketstore.broker.surveys import Surveys
from rocketstore.broker.topics import TopicAccess
from rocketstore.message.record import QUEUE_OFFSET, QUEUE_OFFSET_AT
from rocketstore.pb import broker_pb2 as pb
from rocketstore.store.message_store import MessageStore

MESSAGES_MAX: Final = 100
"""In one answer."""
BYTES_MAX: Final = 1 << 20
"""In one answer, unless its first message alone is larger."""

GONE_MAX: Final = 1000
"""Places passed over for one answer because they have no message, or none any more."""


class NewestMessages:
    """Merges the queues by the store times of their messages, and reads only those that it returns."""

    def __init__(self, store: MessageStore, topics: TopicAccess, readers: ReadThreads, surveys: Surveys) -> None:
        self._store = store
        self._topics = topics
        self._readers = readers
        self._surveys = surveys

    async def answer(self, data: bytes) -> bytes:
        """``Newest``. Raises ``InvalidRequestError``, and what ``TopicAccess.check_readable`` does."""
        wire = parse(pb.NewestRequest, data)
        if not 0 < wire.max_messages <= MESSAGES_MAX:
            raise InvalidRequestError(f"max_messages must be 1 to {MESSAGES_MAX}")
        if min(wire.ends, default=0) < 0:
            raise InvalidRequestError("ends must not be negative")
        topic = self._topics.find(wire.topic)
        if topic is None:
            raise NotFoundRefusalError(f"topic {wire.topic!r} does not exist")
        self._topics.check_readable(wire.topic, wire.queue_id)
        return await self._readers.run(self._found, wire, max(topic.read_queues, topic.write_queues))

    def _found(self, wire: pb.NewestRequest, queues: int) -> bytes:
        ranges = [self._surveys.range_of(wire.topic, queue) for queue in range(queues)]
        lows = [one.min_offset for one in ranges]
        # A queue that did not exist at the last answer has only messages that are newer than that.
        ends = [
            max(one.min_offset, min(one.max_offset, wire.ends[queue] if queue < len(wire.ends) else 0))
            if wire.ends
            else one.max_offset
            for queue, one in enumerate(ranges)
        ]
        if wire.HasField("queue_id"):
            ends = [end if queue == wire.queue_id else lows[queue] for queue, end in enumerate(ends)]
        passed = 0

        def settle(queue: int) -> Iterator[tuple[int, int]]:
            """The queue's next head, if it has one. Places without a message, which have no time, are passed over."""
            nonlocal passed
            while ends[queue] > lows[queue] and passed <= GONE_MAX:
                head = self._head(wire.topic, queue, ends[queue])
                if head[0] <= 0:
                    yield head
                    return
                ends[queue] -= 1
                passed += 1

        heads = [head for queue in range(queues) for head in settle(queue)]
        heapq.heapify(heads)
        records: list[bytes] = []
        room = BYTES_MAX
        while heads and len(records) < wire.max_messages and passed <= GONE_MAX:
            _, queue = heapq.heappop(heads)
            record = self._record(wire.topic, queue, ends[queue] - 1)
            if records and len(record) > room:
                break
            ends[queue] -= 1
            if record:
                records.append(record)
                room -= len(record)
            passed += not record
            for head in settle(queue):
                heapq.heappush(heads, head)
        more = any(end > low for end, low in zip(ends, lows, strict=True))
        return pb.NewestResponse(records=records, ends=ends, more=more).SerializeToString()

    def _record(self, topic: str, queue: int, offset: int) -> bytes:
        """The message there; empty if it was removed in the meantime: a get then gives a later one, or none."""
        found = self._store.get(topic, queue, offset, max_count=1).records
        record = bytes(found[0]) if found else b""
        return record if record and QUEUE_OFFSET.unpack_from(record, QUEUE_OFFSET_AT)[0] == offset else b""

    def _head(self, topic: str, queue: int, end: int) -> tuple[int, int]:
        """A queue's newest message before ``end``, to be sorted: the newest comes first, of equals that of queue 0."""
        return -self._store.store_time(topic, queue, end - 1), queue
