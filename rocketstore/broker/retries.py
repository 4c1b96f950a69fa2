"""Messages that could not be consumed: sent back for retries, and dead-lettered after too many.

``%RETRY%group`` is a topic that every consumer of the group subscribes to; a message gets there after a delay that
grows each time. ``%DLQ%group`` holds messages that are no longer retried.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from random import randrange
from typing import Final

from dledger.access.quota import Quota
from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import RecordReader
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.sending import MessageSource, SendBatch, Sending
from rocketstore.broker.topics import Topics
from rocketstore.message.checks import properties_bytes
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    HostAddress,
    Message,
)
from rocketstore.message.properties import OF_ONE_DELIVERY, PROPERTIES_BYTES_MAX, PROPERTY_ORIGIN_ID
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import GroupConfig, TopicConfig, check_group
from rocketstore.store.stats import OTHERS
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, OP_TOPIC, SCHEDULE_TOPIC

FIRST_DELAY_LEVEL: Final = 3
"""For the first retry; each further one uses the next level."""
DEAD_QUEUES: Final = 1
SENT_BACK_MAX: Final = 4096
"""Pairs of group and topic that are counted by themselves."""
READ_WRITE: Final = 6
_KEPT: Final = frozenset(
    {PROPERTY_RETRY_TOPIC, PROPERTY_ORIGIN_ID, PROPERTY_WAIT, PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY}
)
"""Properties that a dead letter never lacks. They fit: RocketMQ's clients and ours limit keys and tags."""
_NEVER_CONSUMED: Final = HIDDEN_TOPICS | {HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC}
"""A message of these has not been delivered, and may never be."""

_log = logging.getLogger("rocketstore")


class Retries:
    """On the loop."""

    def __init__(  # one parameter per neighbour
        self,
        live: LiveConfig,
        state: BrokerState,
        mastership: Mastership,
        topics: Topics,
        sending: Sending,
        records: RecordReader,
        store_host: HostAddress,
    ) -> None:
        self._live = live
        self._state = state
        self._mastership = mastership
        self._topics = topics
        self._sending = sending
        self._records = records
        self._store_host = store_host
        self.sent_back: Final[Counter[tuple[str, str]]] = Counter()
        """How many messages came back, by group and their first topic."""

    async def put_back(
        self, group: str, offset: int, *, delay_level: int, retries_max: int | None, quota: Quota
    ) -> None:
        """Store a message again, to be retried or as a dead one. Raises ``Refusal``.

        It takes up room, as if it were sent: to name a large one costs its client nothing.
        """
        caller, owner = MessageSource(quota), quota.owner
        self._require_room(caller)
        config = self.group(group)
        if not config.retry_queues:
            return
        message = await self._message_at(offset)
        limit = config.retry_times_max if retries_max is None else retries_max
        is_dead = message.reconsume_times >= limit or delay_level < 0
        target = dead_topic(config) if is_dead else retry_topic(config)
        await self.ensure_topic(target, owner)
        there = self._topics.find(target.name) or target  # nobody reads queues that only the settings have
        again = _copy(message, there, self._store_host)
        if not is_dead:
            again.properties[PROPERTY_DELAY] = str(delay_level or FIRST_DELAY_LEVEL + message.reconsume_times)
            if properties_bytes(again) > PROPERTIES_BYTES_MAX:  # it would come back to the consumer for ever
                is_dead, target = True, dead_topic(config)
                await self.ensure_topic(target, owner)
                again = _copy(message, target, self._store_host)
                _log.warning(
                    "group %s: the message at %d has too many properties to be tried again: it is a dead letter now",
                    config.name, offset,
                )  # fmt: skip
        if is_dead and (dropped := trim(again)):
            _log.warning(
                "group %s: the dead letter of the message at %d is without its properties %s: only %d bytes fit",
                config.name, offset, ", ".join(dropped), PROPERTIES_BYTES_MAX,
            )  # fmt: skip
        batch = SendBatch([again], len(again.body), again=True)
        self._require_room(caller)  # which others have taken up while the message was read
        (result,) = await self._sending.send(caller, batch)
        if not result.ok:
            raise Refusal.of(result, self._mastership.leader_address)
        pair = (config.name, again.properties[PROPERTY_RETRY_TOPIC])
        if pair not in self.sent_back and len(self.sent_back) >= SENT_BACK_MAX:
            pair = (OTHERS, OTHERS)
        self.sent_back[pair] += 1

    def target_of(self, topic: str, reconsume_times: int, retries_max: int) -> TopicConfig:
        """The topic for a message that a client sends to ``%RETRY%group``: that one, or the dead-letter topic.

        ``retries_max``: negative for the group's own limit.
        """
        config = self.group(topic.removeprefix(RETRY_PREFIX))
        if reconsume_times >= (retries_max if retries_max >= 0 else config.retry_times_max):
            return dead_topic(config)
        return retry_topic(replace(config, retry_queues=max(config.retry_queues, 1)))

    def group(self, name: str) -> GroupConfig:
        """A group's settings. Raises ``Refusal`` if it does not exist, without creating it."""
        state = self._state
        check_group(name)
        if not self._live.now.auto_create_subscription_group and not state.has_group(name):
            reason = f"subscription group not exist, {name}: create it first (autoCreateSubscriptionGroup=false)"
            raise Refusal(RefusalKind.NO_GROUP, reason)
        return state.group(name)

    async def ensure_topic(self, topic: TopicConfig, owner: str) -> None:
        """Create a retry or dead-letter topic if it does not exist. Raises ``Refusal``."""
        if self._topics.find(topic.name) is None:
            result = await self._topics.create(topic, owner)
            if not result.ok:
                raise Refusal(
                    RefusalKind.NO_TOPIC, f"topic[{topic.name}] not exist: {result.reason}", outcome=result.outcome
                )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _require_room(self, caller: MessageSource) -> None:
        problem = self._sending.problem(caller)
        if problem is not None:
            raise Refusal.of(problem, self._mastership.leader_address)

    async def _message_at(self, offset: int) -> Message:
        record = await self._records.at(offset)
        try:
            message = None if record is None else decode_record(record)
        except CorruptRecordError:
            message = None
        if message is None or message.topic in _NEVER_CONSUMED:
            raise Refusal(RefusalKind.NO_MESSAGE, f"look message by offset failed, {offset}")
        return message


def retry_topic(group: GroupConfig) -> TopicConfig:
    """The topic for a group's messages to be retried."""
    return TopicConfig(f"{RETRY_PREFIX}{group.name}", group.retry_queues, group.retry_queues, READ_WRITE)


def dead_topic(group: GroupConfig) -> TopicConfig:
    """The topic for a group's messages that are no longer retried."""
    return TopicConfig(f"{DEAD_PREFIX}{group.name}", DEAD_QUEUES, DEAD_QUEUES, READ_WRITE)


def _copy(message: Message, target: TopicConfig, store_host: HostAddress) -> Message:
    """The copy of the message to be stored; it records its origin."""
    properties = {name: value for name, value in message.properties.items() if name not in OF_ONE_DELIVERY}
    properties.pop(PROPERTY_DELAY, None)
    properties.setdefault(PROPERTY_RETRY_TOPIC, message.topic)
    properties.setdefault(PROPERTY_ORIGIN_ID, offset_message_id(message.store_host, message.offset))
    properties[PROPERTY_WAIT] = "false"
    return Message(
        target.name,
        message.body,
        randrange(target.write_queues),
        properties,
        message.flag,
        message.sys_flag & ~(SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6),
        message.born_timestamp,
        message.born_host,
        store_host,
        message.reconsume_times + 1,
    )


def trim(dead: Message) -> list[str]:
    """Drop a dead letter's longest properties until the others can be stored; returns their names."""
    dropped = []
    while properties_bytes(dead) > PROPERTIES_BYTES_MAX:
        name = max(
            (one for one in dead.properties if one not in _KEPT),
            key=lambda one: len(one.encode()) + len(dead.properties[one].encode()),
            default="",
        )
        if not name:
            break
        del dead.properties[name]
        dropped.append(name)
    return dropped
