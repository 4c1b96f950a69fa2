"""Shows the messages that wait for their delivery time, which no consumer may pull."""

from __future__ import annotations

from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.codec import parse
from rocketstore.message.delay import DelayLevels
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import SCHEDULE_TOPIC

MESSAGES_MAX: Final = 100
"""In one answer."""
NEXT: Final = -1


class DelayedMessages:
    """Any node answers: what was delivered is part of the broker state."""

    def __init__(self, config: BrokerConfig, store: MessageStore, state: BrokerState, readers: ReadThreads) -> None:
        self._delays = DelayLevels.parse(config.store.message_delay_level)
        self._store = store
        self._state = state
        self._readers = readers

    async def answer(self, data: bytes) -> bytes:
        """``Delayed``. Raises ``InvalidRequestError``."""
        wire = parse(pb.DelayedRequest, data)
        most = self._level_max()
        if not 0 <= wire.level <= most:
            raise InvalidRequestError(f"delay level {wire.level}: use 1 to {most}, or 0 for no messages")
        if wire.offset < NEXT or not 0 <= wire.max_messages <= MESSAGES_MAX:
            raise InvalidRequestError(f"offset must be {NEXT} or more, max_messages at most {MESSAGES_MAX}")
        return await self._readers.run(self._found, wire)

    def _found(self, wire: pb.DelayedRequest) -> bytes:
        levels = [self._level(number) for number in range(1, self._level_max() + 1)]
        records = []
        if wire.level and wire.max_messages:
            level = levels[wire.level - 1]
            first = max(level.next_offset, wire.offset)
            if first < level.end_offset:
                found = self._store.get(SCHEDULE_TOPIC, wire.level - 1, first, max_count=wire.max_messages)
                records = [bytes(one) for one in found.records]
        return pb.DelayedResponse(levels=levels, records=records).SerializeToString()

    def _level_max(self) -> int:
        """The highest level of which there are, or may be, messages."""
        stored = [queue_id + 1 for topic, queue_id in self._store.queues() if topic == SCHEDULE_TOPIC]
        return max([self._delays.level_max, *stored])

    def _level(self, number: int) -> pb.DelayLevel:
        store, queue_id = self._store, number - 1
        end = store.max_offset(SCHEDULE_TOPIC, queue_id)
        next_offset = min(max(self._state.delay_offset(number), store.min_offset(SCHEDULE_TOPIC, queue_id), 0), end)
        stored_ms = store.store_time(SCHEDULE_TOPIC, queue_id, next_offset) if next_offset < end else -1
        return pb.DelayLevel(
            level=number,
            delay_ms=self._delays.delay_ms(self._delays.cap(number)),
            next_offset=next_offset,
            end_offset=end,
            next_due_ms=self._delays.due_ms(number, stored_ms) if stored_ms >= 0 else -1,
        )
