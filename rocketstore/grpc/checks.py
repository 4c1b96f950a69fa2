"""Refusals of messages before the broker sees them, each with the code that clients know it by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from rocketstore.config import KIB
from rocketstore.grpc.codes import RejectedError
from rocketstore.message.checks import check_client_topic
from rocketstore.message.properties import BROKER_ONLY
from rocketstore.pb import definition_pb2 as pb

PROPERTIES_MAX: Final = 128
PROPERTIES_BYTES_MAX: Final = 16 * KIB
"""Of an application, with the tag, the keys and the trace context."""
GROUP_CHARS_MAX: Final = 64
"""Of a message group."""
MESSAGE_ID_CHARS_MAX: Final = 255
RECOVERY_S_MAX: Final = 3600
"""The longest time for which nobody may be asked about a transaction."""
_RESERVED: Final = """
    KEYS TAGS WAIT DELAY RETRY_TOPIC TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID
    ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME UNIQ_KEY
    EXTEND_UNIQ_INFO MAX_RECONSUME_TIMES CONSUME_START_TIME INNER_NUM INNER_BASE DUP_INFO
    CHECK_IMMUNITY_TIME_IN_SECONDS __transactionId__ INSTANCE_ID
    CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE POP_CK_OFFSET
    1ST_POP_TIME __SHARDINGKEY REDIRECT INNER_MULTI_DISPATCH INNER_MULTI_QUEUE_OFFSET TRACE_CONTEXT
    TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_DELAY_MS TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP __CRC32#
    _SYS_MSG_PRIORITY_ TIMER_OUT_MS
"""
RESERVED: Final = BROKER_ONLY | frozenset(_RESERVED.split())
"""Names of properties that are not an application's."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def check_topic_name(name: str) -> str:
    """The name. Raises ``RejectedError`` unless a client may send to a topic of this name."""
    if problem := check_client_topic(name):
        raise RejectedError(pb.ILLEGAL_TOPIC, problem)
    return name


def check_properties(properties: Mapping[str, str], tag: str, keys: Iterable[str], trace_context: str) -> None:
    """Raises ``RejectedError``."""
    if len(properties) > PROPERTIES_MAX:
        raise RejectedError(
            pb.MESSAGE_PROPERTIES_TOO_LARGE,
            f"{len(properties)} properties: a message may have {PROPERTIES_MAX}",
        )
    if _CONTROL.search(trace_context):
        raise RejectedError(pb.ILLEGAL_MESSAGE_PROPERTY_KEY, "the trace context has control characters")
    size = len(tag.encode()) + len(trace_context.encode())
    for name, value in properties.items():
        if name in RESERVED:
            raise RejectedError(pb.ILLEGAL_MESSAGE_PROPERTY_KEY, f"the property {name} is not an application's")
        if not name or _CONTROL.search(name) or _CONTROL.search(value):
            raise RejectedError(
                pb.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"the property {name[:64]!r}: names must not be empty, and there may be no control characters",
            )
        size += len(name.encode()) + len(value.encode())
    if tag and ("|" in tag or not tag.strip() or _CONTROL.search(tag)):
        raise RejectedError(
            pb.ILLEGAL_MESSAGE_TAG, f"the tag {tag[:64]!r}: neither blank, nor with '|' or control characters"
        )
    for key in keys:
        if not key.strip() or _CONTROL.search(key):
            raise RejectedError(
                pb.ILLEGAL_MESSAGE_KEY, f"the key {key[:64]!r}: neither blank, nor with control characters"
            )
        size += len(key.encode())
    if size > PROPERTIES_BYTES_MAX:
        raise RejectedError(
            pb.MESSAGE_PROPERTIES_TOO_LARGE,
            f"properties, tag, keys and trace context take {size} bytes: at most {PROPERTIES_BYTES_MAX} are allowed",
        )


def check_message_id(message_id: str) -> None:
    """Raises ``RejectedError``."""
    if not message_id.strip() or len(message_id) > MESSAGE_ID_CHARS_MAX or _CONTROL.search(message_id):
        raise RejectedError(
            pb.ILLEGAL_MESSAGE_ID, f"a message id has 1 to {MESSAGE_ID_CHARS_MAX} characters, none of them for control"
        )


def check_message_group(group: str) -> None:
    """Raises ``RejectedError``."""
    if not group.strip() or len(group) > GROUP_CHARS_MAX or _CONTROL.search(group):
        raise RejectedError(
            pb.ILLEGAL_MESSAGE_GROUP,
            f"the message group {group[:64]!r}: 1 to {GROUP_CHARS_MAX} characters, none of them for control",
        )


def check_body(body: bytes, bytes_max: int, *, may_be_empty: bool) -> None:
    """Raises ``RejectedError``."""
    if len(body) > bytes_max:
        raise RejectedError(
            pb.MESSAGE_BODY_TOO_LARGE, f"the body has {len(body)} bytes; at most {bytes_max} are allowed"
        )
    if not body and not may_be_empty:
        raise RejectedError(
            pb.MESSAGE_BODY_EMPTY, "the body is empty, which this broker does not take (grpc_empty_bodies)"
        )
