"""A topic's messages by time, across its queues: from the newest one backwards, or from the oldest one on."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import Topics
from rocketstore.broker_grpc.codec import parse
from rocketstore.broker_grpc.surveys import Surveys
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

    def __init__(self, store: MessageStore, topics: Topics, readers: ReadThreads, surveys: Surveys) -> None:
        self._store = store
        self._topics = topics
        self._readers = readers
        self._surveys = surveys

    async def answer(self, data: bytes) -> bytes:
        """``Newest``. Raises ``InvalidRequestError``, and what ``Topics.check_readable`` does."""
        wire = parse(pb.NewestRequest, data)
        if not 0 < wire.max_messages <= MESSAGES_MAX:
            raise InvalidRequestError(f"max_messages must be 1 to {MESSAGES_MAX}")
        if min([*wire.ends, wire.since_ms, wire.before_ms]) < 0:
            raise InvalidRequestError("ends, since_ms and before_ms must not be negative")
        topic = self._topics.find(wire.topic)
        if topic is None:
            raise Refusal(RefusalKind.NO_TOPIC, f"topic {wire.topic!r} does not exist")
        self._topics.check_readable(wire.topic, wire.queue_id)
        return await self._readers.run(self._found, wire, max(topic.read_queues, topic.write_queues))

    def _found(self, wire: pb.NewestRequest, queues: int) -> bytes:
        lows, highs = self._bounds(wire, queues)
        passed = 0

        def place(queue: int) -> int:
            return lows[queue] if wire.oldest_first else highs[queue] - 1

        def step(queue: int) -> None:
            if wire.oldest_first:
                lows[queue] += 1
            else:
                highs[queue] -= 1

        def settle(queue: int) -> Iterator[tuple[int, int]]:
            """The queue's next head, to be sorted, if it has one. Places without a message have no time: passed over.

            Of equally old messages, that of queue 0 comes first.
            """
            nonlocal passed
            while highs[queue] > lows[queue] and passed <= GONE_MAX:
                time_ms = self._store.store_time(wire.topic, queue, place(queue))
                if time_ms >= 0:
                    yield (time_ms if wire.oldest_first else -time_ms), queue
                    return
                step(queue)
                passed += 1

        heads = [head for queue in range(queues) for head in settle(queue)]
        heapq.heapify(heads)
        records: list[bytes] = []
        room = BYTES_MAX
        while heads and len(records) < wire.max_messages and passed <= GONE_MAX:
            _, queue = heapq.heappop(heads)
            record = self._record(wire.topic, queue, place(queue))
            if records and len(record) > room:
                break
            step(queue)
            if record:
                records.append(record)
                room -= len(record)
            passed += not record
            for head in settle(queue):
                heapq.heappush(heads, head)
        more = any(high > low for high, low in zip(highs, lows, strict=True))
        ends = lows if wire.oldest_first else highs
        return pb.NewestResponse(records=records, ends=ends, more=more).SerializeToString()

    def _bounds(self, wire: pb.NewestRequest, queues: int) -> tuple[list[int], list[int]]:
        """Of every queue, from which offset up to which (exclusive) messages are wanted."""
        lows, highs = [], []
        for queue in range(queues):
            found = self._surveys.range_of(wire.topic, queue)
            low, high = found.min_offset, found.max_offset
            if wire.since_ms:
                low = max(low, min(self._first_since(wire.topic, queue, wire.since_ms), high))
            if wire.before_ms:
                high = max(low, min(self._first_since(wire.topic, queue, wire.before_ms), high))
            if queue < len(wire.ends):
                end = max(low, min(high, wire.ends[queue]))
                low, high = (end, high) if wire.oldest_first else (low, end)
            elif wire.ends and not wire.oldest_first:  # it did not exist at the last answer: all of it is newer
                high = low
            if wire.HasField("queue_id") and queue != wire.queue_id:
                high = low
            lows.append(low)
            highs.append(high)
        return lows, highs

    def _first_since(self, topic: str, queue: int, time_ms: int) -> int:
        """The offset of a queue's first message stored at this time or later, or one after its last message."""
        return self._store.offset_by_time(topic, queue, time_ms)

    def _record(self, topic: str, queue: int, offset: int) -> bytes:
        """The message there; empty if it was removed in the meantime: a get then gives a later one, or none."""
        found = self._store.get(topic, queue, offset, max_count=1).records
        record = bytes(found[0]) if found else b""
        return record if record and QUEUE_OFFSET.unpack_from(record, QUEUE_OFFSET_AT)[0] == offset else b""
