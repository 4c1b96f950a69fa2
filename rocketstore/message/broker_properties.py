"""Properties that only brokers set, and how they are taken out of what clients send.

They say what the broker has done with a message. A broker that believed a client's would lose messages: one that is
named as the origin of a copy (``POP_ORIGIN``) counts as settled for the next leader. They are taken out instead of
refused, since clients send on what they got with all its properties, as RocketMQ's do with messages to be retried.
"""

from __future__ import annotations

import re
from typing import Final

from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    Message,
)

PROPERTY_ORIGIN: Final = "POP_ORIGIN"
PROPERTY_CHECK_POINT: Final = "POP_CK"
PROPERTY_ORIGIN_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_DEAD_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DEAD_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_DEAD_QUEUE: Final = "DLQ_ORIGIN_QUEUE_ID"
PROPERTY_DEAD_OFFSET: Final = "DLQ_ORIGIN_OFFSET"
PROPERTY_DEAD_REASON: Final = "DLQ_REASON"
PROPERTY_TIMER_ORIGIN: Final = "TIMER_ORIGIN"
PROPERTY_TIMER_RECALL: Final = "TIMER_RECALL"
OF_ONE_DELIVERY: Final = frozenset(
    {
        PROPERTY_ORIGIN,
        PROPERTY_CHECK_POINT,
        PROPERTY_DEAD_TOPIC,
        PROPERTY_DEAD_ID,
        PROPERTY_DEAD_QUEUE,
        PROPERTY_DEAD_OFFSET,
        PROPERTY_DEAD_REASON,
    }
)
"""Properties that say how a message came to its place; copies that go elsewhere do not have them."""
BROKER_ONLY: Final = OF_ONE_DELIVERY | {
    PROPERTY_REAL_TOPIC,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_TIMER_ORIGIN,
    PROPERTY_TIMER_RECALL,
    PROPERTY_CHECK_TIMES,
    "TRAN_PREPARED_QUEUE_OFFSET",
    "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES",
    "TIMER_DEL_UNIQKEY",
    "MSG_REGION",
    "TRACE_ON",
}
"""Nothing that a client sends has one of these. ``TIMER_OUT_MS`` is none of them, as in RocketMQ: copies keep it."""
_OF_RETRIES: Final = frozenset({PROPERTY_RETRY_TOPIC, PROPERTY_ORIGIN_ID})
"""A client that cannot send a message back sends it to the group's retry topic itself, and says where it was."""
_HEAD: Final = rb"(?:POP_|ORIGIN_|DLQ_|RETRY_|REAL_|TIMER_|TRA|MSG_)"
"""The begin of each of those names, and of a few others. One search is ten times as fast as one for each name."""
_BEGINS: Final = re.compile(_HEAD).match
_HAS: Final = re.compile(rb"\x02" + _HEAD).search


def is_broker_only(name: str, topic: str) -> bool:
    """Whether no client may give this property to a message for ``topic``."""
    return name in BROKER_ONLY or (name in _OF_RETRIES and not topic.startswith((RETRY_PREFIX, DEAD_PREFIX)))


def take_out(message: Message) -> None:
    """Take them out of a client's message, whichever form its properties have."""
    text = message.property_string
    if text:
        if _BEGINS(text) or _HAS(text):
            kept = [one for one in text.split(b"\x02") if not is_broker_only(_name(one), message.topic)]
            message.property_string = b"\x02".join(kept)
        return
    forbidden = [name for name in message.properties if is_broker_only(name, message.topic)]
    for name in forbidden:
        del message.properties[name]


def _name(segment: bytes) -> str:
    return segment.partition(b"\x01")[0].decode(errors="replace")
