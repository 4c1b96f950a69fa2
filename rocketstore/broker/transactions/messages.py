"""The records of a transaction, as RocketMQ writes them.

A *half* message has the producer's properties and ``REAL_TOPIC`` and ``REAL_QID``. A commit stores its body and its
property string again, unchanged, in the real queue, with the half's position as prepared offset. An *op* message says
that the half with this queue offset has ended, either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_COMMITTED,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION,
    HostAddress,
    Message,
)
from rocketstore.message.properties import encode_properties
from rocketstore.message.record import CorruptRecordError, body_at, decode_record, encode_record
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC, OP_TOPIC

PROPERTY_CHECK_IMMUNITY: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d"
_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_OURS: Final = tuple(f"{name}\x01".encode() for name in (PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID))
_DIGITS_MAX: Final = 19


def make_half(message: Message) -> None:
    """Turn a message whose topic and queue are checked into the half message that waits in its stead."""
    text = message.property_string or encode_properties(message.properties)
    real = (PROPERTY_REAL_TOPIC, message.topic), (PROPERTY_REAL_QUEUE_ID, str(message.queue_id))
    segments = [one for one in text.split(b"\x02") if one and not one.startswith(_OURS)]
    segments += [f"{name}\x01{value}".encode() for name, value in real]
    message.properties = {}
    message.property_string = b"\x02".join(segments)
    message.topic, message.queue_id = HALF_TOPIC, 0
    message.sys_flag &= ~SYS_FLAG_TRANSACTION


def committed(record: bytes) -> Message:
    """The message that a half message becomes. Raises ``CorruptRecordError``: it names no queue to become part of."""
    half = decode_record(record)
    topic, queue_id = _real_queue(half)
    return Message(
        topic,
        half.body,
        queue_id,
        {},
        half.flag,
        half.sys_flag & ~(SYS_FLAG_TRANSACTION | _HOST_FLAGS) | SYS_FLAG_COMMITTED,
        half.born_timestamp,
        half.born_host,
        half.store_host,
        half.reconsume_times,
        half.offset,
        property_string=_property_string(record, half),
    )


def real_topic(record: bytes) -> str | None:
    """A message's topic, also while it is not committed; None for damage."""
    try:
        message = decode_record(record, check_crc=False)
    except CorruptRecordError:
        return None
    return message.properties.get(PROPERTY_REAL_TOPIC, "") if message.topic == HALF_TOPIC else message.topic


def op_message(queue_offset: int, host: HostAddress, now_ms: int) -> Message:
    """Says that the half message with this queue offset has ended."""
    body = str(queue_offset).encode()
    return Message(
        OP_TOPIC, body, born_timestamp=now_ms, born_host=host, store_host=host, property_string=OP_PROPERTIES
    )


def op_target(op: Message) -> int:
    """The queue offset that an op message names; -1 if it names none."""
    return int(op.body) if op.body.isdigit() and len(op.body) <= _DIGITS_MAX else -1


def check_record(record: bytes, times: int) -> bytes:
    """The half message of a check, with its real queue, as RocketMQ's broker sends it.

    Raises ``CorruptRecordError``.
    """
    half = decode_record(record)
    topic, queue_id = _real_queue(half)
    shown = replace(
        half,
        topic=topic,
        queue_id=queue_id,
        sys_flag=half.sys_flag & ~_HOST_FLAGS,
        properties=half.properties | {PROPERTY_CHECK_TIMES: str(times)},
    )
    return encode_record(shown, queue_offset=half.queue_offset, physical_offset=half.offset)


def given_up(record: bytes, times: int, host: HostAddress) -> Message:
    """The message that keeps a half message about which no producer says anything. Raises ``CorruptRecordError``."""
    half = decode_record(record)
    return _again(half, CHECKED_TOO_OFTEN_TOPIC, times, host)


def resumed(record: bytes, host: HostAddress) -> Message:
    """A given up message as a half message again. Raises ``CorruptRecordError``: it is no such message."""
    message = decode_record(record)
    _real_queue(message)
    return _again(message, HALF_TOPIC, 0, host)


def _again(message: Message, topic: str, times: int, host: HostAddress) -> Message:
    return Message(
        topic,
        message.body,
        0,
        message.properties | {PROPERTY_CHECK_TIMES: str(times)},
        message.flag,
        message.sys_flag & ~(SYS_FLAG_TRANSACTION | _HOST_FLAGS),
        message.born_timestamp,
        message.born_host,
        host,
        message.reconsume_times,
    )


def _real_queue(half: Message) -> tuple[str, int]:
    topic = half.properties.get(PROPERTY_REAL_TOPIC, "")
    queue_id = half.properties.get(PROPERTY_REAL_QUEUE_ID, "")
    if not topic or topic in (HALF_TOPIC, OP_TOPIC) or not (queue_id.isascii() and queue_id.isdigit()):
        raise CorruptRecordError(f"the half message {half.queue_offset} names no topic and queue")
    return topic, int(queue_id)


def _property_string(record: bytes, message: Message) -> bytes:
    """Exactly as stored."""
    return bytes(record[body_at(message.sys_flag) + len(message.body) + 1 + len(message.topic) + 2 :])
