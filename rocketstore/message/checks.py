"""Validates messages: what a store refuses to store, and what a broker refuses to accept from a client.

The store's checks (``check_message``, ``check_batch``) are complete: a message that passes can be encoded, and its
record fits into a log file. They allow reserved topics and large bodies, because the broker's own messages also pass
through them; messages from clients must first pass ``check_client_topic``, ``check_body`` and ``check_keys``.
"""

from __future__ import annotations

import re
from struct import error
from typing import Final

from dledger.errors import InvalidRequestError
from dledger.records import ENTRY_HEADER_BYTES
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    Message,
)
from rocketstore.message.properties import PROPERTIES_BYTES_MAX, find_property_bytes, join_properties
from rocketstore.message.record import BLANK, HEAD_V4, IPV4_BYTES, IPV6_BYTES, OVERHEAD, TOPIC_BYTES_MAX
from rocketstore.types import (
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_TOPIC,
    HIDDEN_TOPICS,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    PutMessageStatus,
    PutResult,
)

NO_SEND_TOPICS: Final = HIDDEN_TOPICS | {
    SCHEDULE_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    CHECKED_TOO_OFTEN_TOPIC,
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
}
"""Topics that only the broker itself may write. All but the hidden ones are from RocketMQ's list."""
_NOBODY_SENDS: Final = NO_SEND_TOPICS | {"TBW102", "BenchmarkTest"}
_NOBODY_SENDS_PREFIXES: Final = ("%RETRY%", "rmq_sys_", "RMQ_SYS_", "SCHEDULE_TOPIC_")
_IP_BYTES: Final = (IPV4_BYTES, IPV6_BYTES)
_TOPIC: Final = re.compile(rf"[%|a-zA-Z0-9_-]{{1,{TOPIC_BYTES_MAX}}}")
_NUMBERS: Final = HEAD_V4.struct(
    "queue_id",
    "flag",
    "sys_flag",
    "born_timestamp",
    "born_port",
    "store_timestamp",
    "store_port",
    "reconsume_times",
    "prepared_offset",
)
_CACHED_TOPICS_MAX: Final = 4096
GROUP_CHARS_MAX: Final = 120
"""RocketMQ's limit for groups: with ``%RETRY%`` before it, the name is one of a topic."""

_KEYS_BYTES_MAX: Final = 8 * KIB
"""Limit for the property ``KEYS``."""
_KEYS: Final = PROPERTY_KEYS.encode() + b"\x01"

_good_topics: set[str] = set()
PRODUCER_CHARS_MAX: Final = 128
SEQUENCE_MAX: Final = (1 << 63) - 1 - (1 << 32)
"""Leaves room for the number of messages without overflow."""
_NAME: Final = re.compile(rf"[A-Za-z0-9._/:-]{{1,{PRODUCER_CHARS_MAX}}}")


def check_topic(topic: str) -> str:
    """Why this is not a valid topic name; empty if it is.

    RocketMQ's rule: 1 to 127 of ``%|a-zA-Z0-9_-``. So a topic is always ASCII, and as a directory name it cannot escape
    its parent directory.
    """
    if topic in _good_topics:
        return ""
    if not topic:
        return "the topic is empty"
    if len(topic) > TOPIC_BYTES_MAX:
        return f"the topic has {len(topic)} characters; at most {TOPIC_BYTES_MAX} are allowed"
    if _TOPIC.fullmatch(topic) is None:
        return f"the topic {topic!r} has characters other than %|a-zA-Z0-9_-"
    if len(_good_topics) >= _CACHED_TOPICS_MAX:
        _good_topics.clear()
    _good_topics.add(topic)
    return ""


def check_client_topic(topic: str) -> str:
    """Like ``check_topic``, for a topic that a client wants to send to or create: also refuses the broker's own."""
    if topic in NO_SEND_TOPICS:
        return f"the topic {topic} is reserved for the broker"
    return check_topic(topic)


def check_group_name(name: object) -> str:
    """Why no new group may have this name; empty if one may: its retry topic has a name, too."""
    if isinstance(name, str) and len(name) <= GROUP_CHARS_MAX and not check_topic(name):
        return ""
    return (
        f"group {name!r}: 1 to {GROUP_CHARS_MAX} of the characters a-z A-Z 0-9 % | _ - (the limit for groups, "
        "whose names are part of their retry topics')"
    )


def is_internal(topic: str) -> bool:
    """Whether no application sends to this topic: it is the broker's own, a group's retries, or answers to requests."""
    return topic in _NOBODY_SENDS or topic.startswith(_NOBODY_SENDS_PREFIXES) or topic.endswith("_REPLY_TOPIC")


def check_body(message: Message, config: MessageStoreConfig) -> str:
    """Why a client's message is too large; empty if it is not. One that is stored again (as due, committed, to be
    retried, dead) may be larger: it was accepted once, perhaps under a higher ``max_message_size``.
    """
    size, most = len(message.body), config.max_message_size
    return "" if size <= most else f"the body has {size} bytes; at most {most} are allowed"


def check_keys(message: Message, keys_max: int) -> str:
    """Why a client's message has too many keys; empty if it has not. Stored messages may have more."""
    text = message.property_string
    if text:
        if len(text) < 2 * keys_max:  # the hot path
            return ""
        keys = find_property_bytes(text, _KEYS) or b""
    else:
        keys = message.properties.get(PROPERTY_KEYS, "").encode(errors="replace")
    if len(keys) > _KEYS_BYTES_MAX:
        return f"the keys (KEYS) take {len(keys)} bytes; at most {_KEYS_BYTES_MAX} are allowed"
    if keys.count(b" ") >= keys_max and len(keys.split()) > keys_max:
        return f"the message has {len(keys.split())} keys (KEYS); at most {keys_max} are allowed (message_keys_max)"
    return ""


def check_message(message: Message, config: MessageStoreConfig) -> PutResult | None:
    """Why the message cannot be stored, or None if it can. A refused message is unchanged."""
    problem = check_topic(message.topic) or _check_fields(message)
    if problem:
        return _illegal(problem)
    if not message.properties:
        size = len(message.property_string)
        refusal = _check_string(message.property_string) if size else None
        return refusal or _check_size(message, size, config)
    try:
        text = join_properties(message.properties)
        encoded = text.encode()
    except (InvalidRequestError, UnicodeEncodeError) as error:
        return _illegal(f"the properties cannot be stored: {error}")
    size = len(encoded)
    if PROPERTY_DELAY in message.properties:
        size += _delay_extra(message)
    else:
        message.checked_properties = encoded
    if size > PROPERTIES_BYTES_MAX:
        return _properties_too_long(text, size)
    return _check_size(message, size, config)


def _check_string(encoded: bytes) -> PutResult | None:
    """Why a property string joined by a producer cannot be stored. Readers skip malformed properties in it."""
    try:
        text = encoded.decode()
    except UnicodeDecodeError as error:
        return _illegal(f"the properties cannot be stored: {error}")
    return _properties_too_long(text, len(encoded)) if len(encoded) > PROPERTIES_BYTES_MAX else None


def _check_fields(message: Message) -> str:
    """Whether hosts and numbers fit into their fields, so that encoding cannot fail later, under the lock."""
    (born_ip, born_port), (store_ip, store_port) = message.born_host, message.store_host
    if len(born_ip) not in _IP_BYTES or len(store_ip) not in _IP_BYTES:
        return "the born host or the store host is not an IP address of 4 or 16 bytes"
    try:
        _NUMBERS.pack(
            message.queue_id,
            message.flag,
            message.sys_flag,
            message.born_timestamp,
            born_port,
            message.store_timestamp,
            store_port,
            message.reconsume_times,
            message.prepared_offset,
        )
    except error as problem:
        return f"a number of the message does not fit its field: {problem}"
    return "" if message.queue_id >= 0 else f"there is no queue {message.queue_id}"


def _check_size(message: Message, properties_bytes: int, config: MessageStoreConfig) -> PutResult | None:
    size = OVERHEAD + len(message.body) + len(message.topic) + properties_bytes
    size += len(message.born_host[0]) + len(message.store_host[0]) - 2 * IPV4_BYTES
    room = config.mapped_file_size_commit_log - BLANK.size
    if config.enable_dledger_commit_log:
        room -= ENTRY_HEADER_BYTES
    return None if size <= room else _illegal(f"the record would have {size} bytes; at most {room} are allowed")


def properties_bytes(message: Message) -> int:
    """How long a message's properties are as they are stored, with what the schedule adds to a delayed one.

    Raises ``InvalidRequestError``.
    """
    size = len(join_properties(message.properties).encode())
    return size + _delay_extra(message) if PROPERTY_DELAY in message.properties else size


def _delay_extra(message: Message) -> int:
    """How much the properties of a delayed message grow when it is redirected to the schedule topic.

    The topic name there is longer or shorter than its own, and the size limit must hold for both.
    """
    added = {PROPERTY_REAL_TOPIC: message.topic, PROPERTY_REAL_QUEUE_ID: str(message.queue_id)}
    return 2 + len(join_properties(added)) + max(0, len(SCHEDULE_TOPIC) - len(message.topic))


def _properties_too_long(text: str, properties_bytes: int) -> PutResult:
    """RocketMQ's two refusals: by characters on arrival, by bytes when encoding."""
    reason = f"the properties take {properties_bytes} bytes; at most {PROPERTIES_BYTES_MAX} fit"
    if len(text) > PROPERTIES_BYTES_MAX:
        return _illegal(reason)
    return PutResult(PutMessageStatus.PROPERTIES_SIZE_EXCEEDED, outcome="not_applied", reason=reason)


def _illegal(reason: str) -> PutResult:
    return PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason=reason)


def check_producer_name(name: str) -> None:
    """Raises ``InvalidRequestError`` for an invalid producer name."""
    if _NAME.fullmatch(name) is None:
        shown = name if len(name) <= PRODUCER_CHARS_MAX else f"{name[:PRODUCER_CHARS_MAX]}..."
        raise InvalidRequestError(
            f"a producer's name must be 1 to {PRODUCER_CHARS_MAX} characters from A-Z, a-z, 0-9 and ._/:-, not "
            f"{shown!r}"
        )
