"""Figures of many topics and of many groups in one answer, for tools that show them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from dledger.errors import CorruptLogError, InvalidRequestError
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.topics import Topics
from rocketstore.broker_grpc.codec import parse
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HIDDEN_TOPICS

NAMES_MAX: Final = 1024
"""Topics or groups named in one request."""
QUEUES_MAX: Final = 1024
"""Queues looked at for one answer, or offsets in it; more only if the first name alone has more."""


class Surveys:
    """On the event loop. An answer covers as many names, from the first one, as its limits allow, and at least one."""

    def __init__(self, store: MessageStore, state: BrokerState, topics: Topics, readers: ReadThreads) -> None:
        self._store = store
        self._state = state
        self._topics = topics
        self._readers = readers

    async def topic_ranges(self, data: bytes) -> bytes:
        """The answer to ``TopicRanges``. Raises ``InvalidRequestError``."""
        names = _few(parse(pb.TopicRangesRequest, data).topics)
        wanted: list[tuple[str, int]] = []
        covered = looked = 0
        for name in names:
            topic = None if name in HIDDEN_TOPICS else self._topics.find(name)
            queues = 0 if topic is None else max(topic.read_queues, topic.write_queues)
            if covered > 0 and looked + queues > QUEUES_MAX:
                break
            covered, looked = covered + 1, looked + queues
            if topic is not None:
                wanted.append((name, queues))
        return await self._readers.run(self._ranges_of, wanted, covered)

    def _ranges_of(self, wanted: list[tuple[str, int]], covered: int) -> bytes:
        found = [
            pb.TopicRange(topic=name, queues=[self.range_of(name, queue) for queue in range(queues)])
            for name, queues in wanted
        ]
        return pb.TopicRangesResponse(topics=found, covered=covered).SerializeToString()

    def range_of(self, topic: str, queue_id: int) -> pb.QueueRangeResponse:
        """One queue's first offset, its end, and the store time of its newest message. Reads files."""
        low = max(self._store.min_offset(topic, queue_id), self._topics.begin_offset(topic, queue_id), 0)
        high = max(self._store.max_offset(topic, queue_id), low)
        last_update_ms = -1
        if high > low:
            with suppress(CorruptLogError):  # told to those who read the message; the offsets are known all the same
                last_update_ms = self._store.store_time(topic, queue_id, high - 1)
        return pb.QueueRangeResponse(min_offset=low, max_offset=high, last_update_ms=last_update_ms)

    async def group_offsets(self, data: bytes) -> bytes:
        """The answer to ``GroupOffsets``. Raises ``InvalidRequestError``."""
        names = _few(parse(pb.GroupOffsetsRequest, data).groups)
        found: list[pb.GroupOffsets] = []
        covered = looked = 0
        for name in names:
            offsets = self._state.offsets(name)
            if covered > 0 and looked + len(offsets) > QUEUES_MAX:
                break
            covered, looked = covered + 1, looked + len(offsets)
            if offsets or self._state.has_group(name):
                noted = [pb.ConsumerOffset(topic=topic, queue_id=queue, offset=at) for topic, queue, at in offsets]
                found.append(pb.GroupOffsets(group=name, offsets=noted))
        return pb.GroupOffsetsResponse(groups=found, covered=covered).SerializeToString()


def _few(names: Sequence[str]) -> Sequence[str]:
    if len(names) > NAMES_MAX:
        raise InvalidRequestError(f"{len(names):,} names, and at most {NAMES_MAX:,} are allowed in one request")
    return names
