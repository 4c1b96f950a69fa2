"""Of which type a message is, by its properties, as RocketMQ 5 decides it: a topic may be for one type only."""

from __future__ import annotations

from typing import Final

from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_PRIORITY,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION,
    SYS_FLAG_TRANSACTION,
    Message,
)
from rocketstore.message.properties import find_property, find_property_bytes
from rocketstore.types import MessageType

_DELAYS: Final = (PROPERTY_DELAY, PROPERTY_TIMER_DELIVER_MS, PROPERTY_TIMER_DELAY_S, PROPERTY_TIMER_DELAY_MS)
_KINDS: Final = (
    *((name, MessageType.DELAY) for name in _DELAYS),
    (PROPERTY_SHARDING_KEY, MessageType.FIFO),
    (PROPERTY_PRIORITY, MessageType.PRIORITY),
)
"""The first that a message has counts."""
_ENCODED: Final = tuple((name.encode() + b"\x01", kind) for name, kind in _KINDS)
_PRIORITY_DIGITS_MAX: Final = 9
ANY_TYPE: Final = frozenset({MessageType.UNSPECIFIED, MessageType.MIXED})


def type_of(message: Message) -> MessageType:
    """Normal, FIFO, delay, transaction or priority."""
    if message.sys_flag & SYS_FLAG_TRANSACTION:
        return MessageType.TRANSACTION
    text = message.property_string
    if text:
        if find_property_bytes(text, _TRANSACTION) in _TRUE:
            return MessageType.TRANSACTION
        return next((kind for name, kind in _ENCODED if find_property_bytes(text, name)), MessageType.NORMAL)
    properties = message.properties
    if properties.get(PROPERTY_TRANSACTION, "").lower() == "true":
        return MessageType.TRANSACTION
    return next((kind for name, kind in _KINDS if properties.get(name)), MessageType.NORMAL)


def priority_of(message: Message) -> int:
    """A message's priority, the higher the sooner; -1 if it has none that is a whole number, 0 or more."""
    text = message.property_string
    found = find_property(text, PROPERTY_PRIORITY) if text else message.properties.get(PROPERTY_PRIORITY)
    is_number = found is not None and found.isascii() and found.isdigit() and len(found) <= _PRIORITY_DIGITS_MAX
    return int(found) if found is not None and is_number else -1


def type_problem(expected: MessageType, message: Message) -> str:
    """Why a topic for messages of type ``expected`` does not take this one, in RocketMQ's words; empty if it does."""
    if expected in ANY_TYPE or (found := type_of(message)) is expected:
        return ""
    return f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {found}"


_TRANSACTION: Final = PROPERTY_TRANSACTION.encode() + b"\x01"
_TRUE: Final = frozenset({b"true", b"TRUE", b"True"})
