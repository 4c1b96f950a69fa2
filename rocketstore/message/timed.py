"""Messages that are delivered at a time of their own: what producers ask for, and what waits in ``TIMED_TOPIC``.

Producers use RocketMQ 5's properties: ``TIMER_DELIVER_MS`` (Unix time), ``TIMER_DELAY_SEC`` or ``TIMER_DELAY_MS``. A
waiting message has ``REAL_TOPIC`` and ``REAL_QID``, and ``TIMER_OUT_MS``: when it is due (ms, Unix time), which it
keeps afterwards, so that its copies for retries are not delayed again.

A message that waits for longer than half the log's retention is stored again; ``TIMER_ORIGIN`` of such a copy is the
queue offset of the first record, by which all copies are known to be one message. A *recall* is a record in the same
topic with ``TIMER_RECALL``: the origin of the message that is not to be delivered.

A *recall handle* names a timed message until it is due, in RocketMQ 5's form, because its clients read them: base64
(for URLs) of ``v1 topic broker due id origin``. ``due`` is the time of delivery (ms, Unix time), ``id`` the message's
unique key, and ``origin`` its first record's queue offset, which RocketMQ's handles lack.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Final, NamedTuple

from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQUE_KEY,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    HostAddress,
    Message,
)
from rocketstore.message.properties import (
    PROPERTY_TIMER_ORIGIN,
    PROPERTY_TIMER_RECALL,
    decode_properties,
    encode_properties,
    find_property_bytes,
)
from rocketstore.types import TIMED_TOPIC

TIMED_MARK: Final = b"TIMER_DEL"
"""Properties without this text ask for no time of delivery."""
_DUE_MS_MAX: Final = 1 << 50
"""The latest time that may be asked for, far beyond any limit on delays."""
_COPIES: Final = ("%RETRY%", "%DLQ%")
_ASKED: Final = (PROPERTY_TIMER_DELIVER_MS, PROPERTY_TIMER_DELAY_S, PROPERTY_TIMER_DELAY_MS)
_UNITS_MS: Final = ((PROPERTY_TIMER_DELAY_S, 1000), (PROPERTY_TIMER_DELAY_MS, 1))
_OURS: Final = frozenset(
    {
        PROPERTY_DELAY,
        PROPERTY_REAL_TOPIC,
        PROPERTY_REAL_QUEUE_ID,
        PROPERTY_TIMER_OUT_MS,
        PROPERTY_TIMER_ORIGIN,
        PROPERTY_TIMER_RECALL,
    }
)
_WAITED: Final = frozenset({PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID, PROPERTY_TIMER_ORIGIN, PROPERTY_TIMER_RECALL})
_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_DUE: Final = f"{PROPERTY_TIMER_OUT_MS}\x01".encode()
_ORIGIN: Final = f"{PROPERTY_TIMER_ORIGIN}\x01".encode()
_RECALL: Final = f"{PROPERTY_TIMER_RECALL}\x01".encode()
_DIGITS_MAX: Final = 18
_QUEUE_DIGITS_MAX: Final = 5


class WrongTimeError(ValueError):
    """Raised when a producer asks for a time that is none."""


def due_of(message: Message, now_ms: int) -> int | None:
    """When (ms, Unix time) a client's message is to be delivered; None if it asks for no time, or for one in the past.

    The copies of a message that has had its delay ask for nothing. If there is a time, a delay level does not count.
    Raises ``WrongTimeError``.
    """
    text = message.property_string
    if text and TIMED_MARK not in text:
        return None
    properties = decode_properties(text) if text else message.properties
    if PROPERTY_TIMER_OUT_MS in properties or message.topic.startswith(_COPIES):
        return None
    due_ms = -1
    for name, unit_ms in _UNITS_MS:
        if name in properties:
            due_ms = now_ms + _number(name, properties[name]) * unit_ms
            break
    else:
        if PROPERTY_TIMER_DELIVER_MS in properties:
            due_ms = _number(PROPERTY_TIMER_DELIVER_MS, properties[PROPERTY_TIMER_DELIVER_MS])
    if due_ms > _DUE_MS_MAX:
        raise WrongTimeError(f"the message is to be delivered at {due_ms} ms since 1970, which no clock reaches")
    return due_ms if due_ms > now_ms else None


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise WrongTimeError(f"invalid {name}={text[:40]!r}: use a whole number of at least 0")
    return int(text)


def make_timed(message: Message, due_ms: int) -> None:
    """Turn a message whose topic and queue are checked into the one that waits in its stead."""
    text = message.property_string or encode_properties(message.properties)
    kept = [
        one for one in text.split(b"\x02") if one and one.partition(b"\x01")[0].decode(errors="replace") not in _OURS
    ]
    kept += [
        f"{PROPERTY_REAL_TOPIC}\x01{message.topic}".encode(),
        f"{PROPERTY_REAL_QUEUE_ID}\x01{message.queue_id}".encode(),
        f"{PROPERTY_TIMER_OUT_MS}\x01{due_ms}".encode(),
    ]
    message.properties = {}
    message.property_string = b"\x02".join(kept)
    message.topic, message.queue_id = TIMED_TOPIC, 0


def real_message(waiting: Message, store_host: HostAddress | None = None) -> Message | None:
    """The message to be delivered; None if the waiting one does not say where."""
    topic = waiting.properties.get(PROPERTY_REAL_TOPIC, "")
    queue_id = waiting.properties.get(PROPERTY_REAL_QUEUE_ID, "")
    known = queue_id.isascii() and queue_id.isdigit() and len(queue_id) <= _QUEUE_DIGITS_MAX
    if not topic or topic == TIMED_TOPIC or not known:
        return None
    return _copy(waiting, topic, int(queue_id), store_host, _WAITED)


def rolled_message(waiting: Message, origin: int, store_host: HostAddress | None = None) -> Message:
    """A copy that goes on waiting when the record itself expires."""
    copy = _copy(waiting, TIMED_TOPIC, 0, store_host, frozenset({PROPERTY_TIMER_ORIGIN}))
    copy.properties[PROPERTY_TIMER_ORIGIN] = str(origin)
    return copy


def _copy(
    waiting: Message, topic: str, queue_id: int, store_host: HostAddress | None, without: frozenset[str]
) -> Message:
    return Message(
        topic,
        waiting.body,
        queue_id,
        {name: value for name, value in waiting.properties.items() if name not in without},
        waiting.flag,
        waiting.sys_flag & ~_HOST_FLAGS,
        waiting.born_timestamp,
        waiting.born_host,
        store_host or waiting.store_host,
        waiting.reconsume_times,
    )


def recall_message(origin: int, due_ms: int, message_id: str, host: HostAddress, now_ms: int) -> Message:
    """The record that recalls the message with this origin."""
    properties = {
        PROPERTY_UNIQUE_KEY: message_id,
        PROPERTY_TIMER_OUT_MS: str(due_ms),
        PROPERTY_TIMER_RECALL: str(origin),
    }
    return Message(TIMED_TOPIC, b"", 0, properties, born_timestamp=now_ms, born_host=host, store_host=host)


def asks_for_delay(properties: Mapping[str, str]) -> bool:
    """Whether a message is not to be delivered at once, by a level or by a time."""
    timed = PROPERTY_TIMER_OUT_MS not in properties and any(name in properties for name in _ASKED)
    return timed or PROPERTY_DELAY in properties


def waiting_of(properties: bytes) -> tuple[int, int, int] | None:
    """The contents of a record of ``TIMED_TOPIC``: when it is due, its origin and what it recalls, or -1 for either.

    None: it is no record of a timed message.
    """
    due_ms, origin, recalled = (_found(properties, name) for name in (_DUE, _ORIGIN, _RECALL))
    return (due_ms, origin, recalled) if 0 <= due_ms <= _DUE_MS_MAX else None


def _found(properties: bytes, name: bytes) -> int:
    value = find_property_bytes(properties, name)
    return int(value) if value is not None and value.isdigit() and len(value) <= _DIGITS_MAX else -1


VERSION: Final = "v1"
HANDLE_CHARS_MAX: Final = 1024
NO_ID: Final = "-"
"""The id of a message without one."""
_PARTS: Final = 6


class WrongHandleError(ValueError):
    """Raised for a text that is no recall handle of ours."""


class RecallHandle(NamedTuple):
    """A timed message. ``due_ms``: as its producer asked for it."""

    topic: str
    broker: str
    due_ms: int
    message_id: str
    origin: int

    def encode(self) -> str:
        fields = (VERSION, self.topic, self.broker, str(self.due_ms), self.message_id or NO_ID, str(self.origin))
        return urlsafe_b64encode(" ".join(fields).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises ``WrongHandleError``."""
    try:
        if not text.isascii() or len(text) > HANDLE_CHARS_MAX:
            raise WrongHandleError("the recall handle is not one that this broker gave")
        parts = urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().split(" ")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise WrongHandleError("the recall handle is not one that this broker gave") from error
    if len(parts) != _PARTS or parts[0] != VERSION or not (_is_number(parts[3]) and _is_number(parts[5])):
        raise WrongHandleError("the recall handle is not one that this broker gave")
    return RecallHandle(parts[1], parts[2], int(parts[3]), parts[4], int(parts[5]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
