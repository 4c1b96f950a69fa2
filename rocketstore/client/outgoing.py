"""Prepares a producer's messages for sending."""

from __future__ import annotations

import time
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.client.errors import MessageRefusedError
from rocketstore.client.sends import EncodedMessage, Sent
from rocketstore.client.wire import encode_message
from rocketstore.message.ids import unique_id
from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    Message,
)
from rocketstore.message.properties import encode_properties
from rocketstore.message.tags import java_hash

TOPIC_CHARS_MAX: Final = 127
_make: Final = tuple.__new__
"""Creates named tuples without the overhead of their constructors: two per message."""
_UNIQUE_KEY_IS: Final = f"{PROPERTY_UNIQUE_KEY}\x01".encode()
_IN_TRANSACTIONS: Final = "use TransactionalProducer.send_in_transaction"
_BY_BROKERS: Final = "brokers set it"
INSTEAD: Final = {
    PROPERTY_TAGS: "pass tags=... to Message",
    PROPERTY_KEYS: "pass keys=... to Message",
    PROPERTY_DELAY: "pass delay_level=... to Message",
    PROPERTY_UNIQUE_KEY: "the producer sets it (the receipt's unique_key); pass keys=... for a key of your own",
    PROPERTY_WAIT: "the broker's conf file says what a send waits for; look at the receipt's status",
    PROPERTY_TRANSACTION: _IN_TRANSACTIONS,
    PROPERTY_PRODUCER_GROUP: _IN_TRANSACTIONS,
    PROPERTY_CHECK_TIMES: _BY_BROKERS,
    PROPERTY_REAL_TOPIC: _BY_BROKERS,
    PROPERTY_REAL_QUEUE_ID: _BY_BROKERS,
    PROPERTY_RETRY_TOPIC: _BY_BROKERS,
}
"""Properties that mean something to the store: what an application does instead of setting them itself."""


def check_message(message: Message, queue_id: int | None, body_bytes_max: int) -> None:
    """Raises ``MessageRefusedError`` for a message that no broker would accept."""
    topic = message.topic
    if not 0 < len(topic) <= TOPIC_CHARS_MAX:
        raise MessageRefusedError(f"a topic must have 1 to {TOPIC_CHARS_MAX} characters, not {len(topic)}: {topic!r}")
    if len(message.body) > body_bytes_max:
        raise MessageRefusedError(f"the body has {len(message.body)} bytes, more than {body_bytes_max}")
    if queue_id is None and message.queue_id:
        raise MessageRefusedError(
            f"the message sets queue {message.queue_id}: pass the queue to the call instead, send(message, "
            f"queue_id={message.queue_id}), or leave it out"
        )
    if message.properties:
        check_properties(message)


def check_properties(message: Message) -> None:
    """Raises ``MessageRefusedError`` for a property that means something to the store and that no argument has set."""
    for name in message.properties:
        instead = INSTEAD.get(name)
        if instead is not None and name not in message.meant:
            raise MessageRefusedError(f"the property {name} means something to the store: {instead}")


def encode(message: Message, queue_id: int) -> EncodedMessage:
    """Encode a message for a broker, with the data for its receipt. Raises ``MessageRefusedError``."""
    topic, properties = message.topic, message.properties
    try:
        if properties:
            unique_key = properties.get(PROPERTY_UNIQUE_KEY) or unique_id()  # a transaction's half has one
            text = encode_properties({**properties, PROPERTY_UNIQUE_KEY: unique_key})
        else:
            unique_key = unique_id()
            text = _UNIQUE_KEY_IS + unique_key.encode()
        data = encode_message(
            topic,
            message.body,
            text,
            queue_id,
            message.born_timestamp or time.time_ns() // 1_000_000,
            flag=message.flag,
            sys_flag=message.sys_flag,
            reconsume_times=message.reconsume_times,
        )
    except (InvalidRequestError, UnicodeEncodeError) as error:
        raise MessageRefusedError(f"cannot send the message: {error}") from error
    return _make(EncodedMessage, (data, _make(Sent, (topic, queue_id, unique_key))))


def queue_of_key(key: str, queues: int) -> int:
    """The queue of a sharding key: always the same, and the same as RocketMQ's ``SelectMessageQueueByHash``."""
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {type(key).__name__}: {key!r}")
    return abs(java_hash(key)) % queues
