"""A topic's messages from the newest one backwards, across its queues."""

from __future__ import annotations

import heapq
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.broker.codec import parse
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.refusals import NotFoundRefusalError
from rocketstore.broker.surveys import Surveys
from rocketstore.broker.topics import TopicAccess
from rocketstore.pb import broker_pb2 as pb
from rocketstore.store.message_store import MessageStore

MESSAGES_MAX: Final = 100
"""In one answer."""
BYTES_MAX: Final = 1 << 20
"""In one answer, unless its first message alone is larger."""

GONE_MAX: Final = 1000
"""Messages passed over for one answer because they were removed in the meantime."""


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
        heads = [self._head(wire.topic, queue, ends[queue]) for queue in range(queues) if ends[queue] > lows[queue]]
        heapq.heapify(heads)
        records: list[bytes] = []
        room = BYTES_MAX
        gone = 0
        while heads and len(records) < wire.max_messages and gone <= GONE_MAX:
            queue = heads[0][1]
            found = self._store.get(wire.topic, queue, ends[queue] - 1, max_count=1)
            record = bytes(found.records[0]) if found.records else b""  # none: it was removed in the meantime
            if records and len(record) > room:
                break
            ends[queue] -= 1
            if record:
                records.append(record)
                room -= len(record)
            gone += not record
            if ends[queue] > lows[queue]:
                heapq.heapreplace(heads, self._head(wire.topic, queue, ends[queue]))
            else:
                heapq.heappop(heads)
        return pb.NewestResponse(records=records, ends=ends, more=bool(heads)).SerializeToString()

    def _head(self, topic: str, queue: int, end: int) -> tuple[int, int]:
        """A queue's newest message before ``end``, to be sorted: the newest comes first, of equals that of queue 0."""
        return -self._store.store_time(topic, queue, end - 1), queue
