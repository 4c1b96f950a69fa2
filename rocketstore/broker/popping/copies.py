"""Copies of messages that come again, or are dead (P4): read, stored, and known for certain before anything goes on.

A copy names its origin in a property, so that a later leader finds it among the newest messages of the retry topic, and
does not give out the original as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from dledger.errors import CorruptLogError, DLedgerError
from rocketstore.broker.groups import DEAD_QUEUES, READ_WRITE, Retries, trim
from rocketstore.broker.reading import QueueReading, ReadLimits
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.sending import SendBatch, Sending
from rocketstore.config import MIB
from rocketstore.message.checks import properties_bytes
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    HostAddress,
    Message,
)
from rocketstore.message.properties import (
    OF_ONE_DELIVERY,
    PROPERTIES_BYTES_MAX,
    PROPERTY_DEAD_ID,
    PROPERTY_DEAD_OFFSET,
    PROPERTY_DEAD_QUEUE,
    PROPERTY_DEAD_REASON,
    PROPERTY_DEAD_TOPIC,
    PROPERTY_ORIGIN,
    PROPERTY_ORIGIN_ID,
    find_property,
)
from rocketstore.message.record import CorruptRecordError, decode_record, properties_of
from rocketstore.pop.operations import CopyResult, Origin, PopCopy
from rocketstore.pop.tables import PopPlace, retry_topic_of
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import PutResult

_log = logging.getLogger("rocketstore")
AT_ONCE: Final = 128
"""Copies under way; the others wait, without their records."""
TOGETHER_BYTES: Final = MIB
"""Of bodies: copies are stored together up to about so many."""
LOOK_S: Final = 0.5
"""How often it is looked whether a copy of unknown outcome has been stored."""
REASON_CHARS_MAX: Final = 200
ONE_BYTES: Final = 8 * MIB
"""Room for reading one message."""
_DROPPED: Final = OF_ONE_DELIVERY | {
    PROPERTY_DELAY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_WAIT,
}
"""Properties that would have a meaning for the copy."""


class Copies:
    """On the loop. ``copied`` is called once for each copy, when it is certain what became of it, unless it is dropped
    before.
    """

    def __init__(
        self,
        store: MessageStore,
        reading: QueueReading,
        sending: Sending,
        retries: Retries,
        store_host: HostAddress,
        owner_of: Callable[[str], str],
        copied: Callable[[PopCopy, CopyResult], None],
    ) -> None:
        """``owner_of`` a group: whose share of topics its retry topics count for."""
        self._store = store
        self._reading = reading
        self._sending = sending
        self._retries = retries
        self._store_host = store_host
        self._owner_of = owner_of
        self._copied = copied
        self._waiting: deque[tuple[PopCopy, str]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gathered: list[tuple[Message, asyncio.Future[PutResult]]] = []
        self._gathered_bytes = 0
        self.stored = 0
        """Copies to be tried again, since the start."""
        self.dead = 0
        """Dead letters, likewise."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._tasks)

    def make(self, copy: PopCopy, reason: str = "") -> None:
        """Store a copy, soon; ``reason``: why it is dead."""
        self._waiting.append((copy, reason))
        self._go_on()

    def drop(self) -> None:
        """The role has changed: nothing of this matters any more."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Give up what is under way."""
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        while self._waiting and len(self._tasks) < AT_ONCE:
            task = asyncio.get_running_loop().create_task(self._copy(*self._waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._go_on()

    async def _copy(self, copy: PopCopy, reason: str) -> None:
        try:
            result = await self._stored(copy, reason)
        except (DLedgerError, Refusal) as error:  # the topic cannot be made, the log is damaged, the broker stops
            _log.warning("group %s: a message to be given out again is not stored, retrying: %s",
                         copy.origin.place.group, error)  # fmt: skip
            result = CopyResult.NOT_STORED
        self._copied(copy, result)

    async def _stored(self, copy: PopCopy, reason: str) -> CopyResult:
        original = await self._original(copy.origin)
        if original is None:
            return CopyResult.GONE
        group = copy.origin.place.group
        is_dead = copy.is_dead(original.reconsume_times + 1)
        again = self._again(copy, original)
        if not is_dead and properties_bytes(again) > PROPERTIES_BYTES_MAX:
            is_dead, reason = True, "its properties leave no room for those of a message to be tried again"
        if is_dead:
            _mark_dead(again, copy, original, reason)
            if dropped := trim(again):
                _log.warning("group %s: a dead letter is without its properties %s: only %d bytes fit",
                             group, ", ".join(dropped), PROPERTIES_BYTES_MAX)  # fmt: skip
        target = TopicConfig(again.topic, DEAD_QUEUES, DEAD_QUEUES, READ_WRITE)
        await self._retries.ensure_topic(target, self._owner_of(group))
        ends = self._reading.end_at_once(again.topic, 0)
        result = await self._put(again)
        if await self._is_stored(result, again, ends):
            self.dead += is_dead
            self.stored += not is_dead
            return CopyResult.STORED
        _log.warning("group %s: a message to be given out again is not stored, retrying: %s", group, result.reason)
        return CopyResult.NOT_STORED

    def _put(self, message: Message) -> asyncio.Future[PutResult]:
        """Store it together with others of this turn of the loop: when a consumer is killed, thousands come at once.

        A large one goes by itself: what the log refuses because of one message, it refuses as a whole.
        """
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[PutResult] = loop.create_future()
        if len(message.body) >= TOGETHER_BYTES:
            self._send([(message, stored)], len(message.body))
            return stored
        if not self._gathered:
            loop.call_soon(self._send_gathered)
        self._gathered.append((message, stored))
        self._gathered_bytes += len(message.body)
        if self._gathered_bytes >= TOGETHER_BYTES:
            self._send_gathered()
        return stored

    def _send_gathered(self) -> None:
        gathered = [one for one in self._gathered if not one[1].done()]  # the others were dropped
        size, self._gathered, self._gathered_bytes = self._gathered_bytes, [], 0
        if gathered:
            self._send(gathered, size)

    def _send(self, copies: Sequence[tuple[Message, asyncio.Future[PutResult]]], size: int) -> None:
        def done(results: Sequence[PutResult]) -> None:
            for (_, stored), result in zip(copies, results, strict=True):
                if not stored.done():
                    stored.set_result(result)

        try:
            self._sending.submit(None, SendBatch([message for message, _ in copies], size, again=True), done)
        except (DLedgerError, Refusal) as error:
            for _, stored in copies:
                stored.set_exception(error)

    async def _original(self, origin: Origin) -> Message | None:
        """None: it has expired, or it was one of a topic that is deleted."""
        (_, topic, queue_id), offset = origin.place, origin.offset
        try:
            found = await self._reading.read(topic, queue_id, offset, None, ReadLimits(1, ONE_BYTES))
        except CorruptLogError:
            if self._store.log.is_repaired:
                raise
            _log.error("message %d of queue %d of %s is damaged: it is not given out again", offset, queue_id, topic)
            return None
        if not found.records:
            return None
        message = decode_record(found.records[0], check_crc=False)
        return message if message.queue_offset == offset else None

    def _again(self, copy: PopCopy, original: Message) -> Message:
        """The message to be tried again; it names its origin."""
        properties = {name: value for name, value in original.properties.items() if name not in _DROPPED}
        properties.setdefault(PROPERTY_RETRY_TOPIC, copy.topic)
        properties.setdefault(PROPERTY_ORIGIN_ID, offset_message_id(original.store_host, original.offset))
        properties[PROPERTY_ORIGIN] = origin_text(copy.origin)
        return Message(
            retry_topic_of(copy.origin.place.group, copy.topic),
            original.body,
            0,
            properties,
            original.flag,
            original.sys_flag & ~(SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6),
            original.born_timestamp,
            original.born_host,
            self._store_host,
            copy.next_attempt(original.reconsume_times + 1) - 1,
        )

    async def _is_stored(self, result: PutResult, again: Message, after: int) -> bool:
        """Whether the copy is in the log; waits until that is certain, or somebody else leads."""
        if result.outcome != "unknown":
            return result.ok
        end = self._store.log.end_offset
        while self._store.dispatch_position < end:
            await asyncio.sleep(LOOK_S)
        origin = again.properties[PROPERTY_ORIGIN]
        while True:
            found = await self._reading.read(again.topic, 0, after, None, ReadLimits(32, ONE_BYTES))
            if any(
                decode_record(one, check_crc=False).properties.get(PROPERTY_ORIGIN) == origin for one in found.records
            ):
                return True
            if not found.records or found.next_offset <= after:
                return False
            after = found.next_offset


def _mark_dead(again: Message, copy: PopCopy, original: Message, reason: str) -> None:
    place = copy.origin.place
    properties = again.properties
    again.topic = dead_topic_of(place.group)
    properties[PROPERTY_DEAD_TOPIC] = copy.topic
    properties[PROPERTY_DEAD_ID] = original.unique_key or properties[PROPERTY_ORIGIN_ID]
    properties[PROPERTY_DEAD_QUEUE] = str(place.queue_id)
    properties[PROPERTY_DEAD_OFFSET] = str(copy.origin.offset)
    if reason:
        properties[PROPERTY_DEAD_REASON] = "".join(one for one in reason if one.isprintable())[:REASON_CHARS_MAX]


def origin_text(origin: Origin) -> str:
    """As a property of a copy."""
    (group, topic, queue_id), offset, generation = origin
    return f"{group} {topic} {queue_id} {offset} {generation}"


def origin_of(record: bytes) -> Origin | None:
    """The origin that a stored copy names; None if it is none."""
    try:
        text = find_property(properties_of(record), PROPERTY_ORIGIN)
        group, topic, *numbers = (text or "").split(" ")
        queue_id, offset, generation = map(int, numbers)
    except (CorruptRecordError, ValueError):
        return None
    return Origin(PopPlace(group, topic, queue_id), offset, generation)


def origin_of_retry(group: str, topic: str) -> str:
    """The topic that a group receives from, also if a client names the retry topic in which a message was."""
    return topic.removeprefix(f"{RETRY_PREFIX}{group}_")


def dead_topic_of(group: str) -> str:
    """The topic for messages that come no more."""
    return f"{DEAD_PREFIX}{group}"
