"""Messages of the protocol as records of the store, and back: RocketMQ 4's clients read what is sent here.

Messages are refused here before the broker sees them, each with the code that clients know it by.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from rocketstore.broker.mastership import host_address, host_text
from rocketstore.broker.transactions.halves import PROPERTY_CHECK_IMMUNITY
from rocketstore.config import KIB
from rocketstore.grpc.calls import GatewayCall, RejectedError, name_of
from rocketstore.message.checks import check_client_topic
from rocketstore.message.message import (
    METHOD_FLAGS,
    PROPERTY_KEYS,
    PROPERTY_PRIORITY,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQUE_KEY,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_PREPARED,
    ZLIB,
    HostAddress,
    Message,
    UnknownCompressionError,
    WrongBodyError,
    decompress,
)
from rocketstore.message.properties import BROKER_ONLY, PROPERTY_DEAD_ID, PROPERTY_DEAD_TOPIC
from rocketstore.message.record import SYS_FLAG_AT, decode_record
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


PROPERTY_TRACE_CONTEXT: Final = "TRACE_CONTEXT"
PRIORITY_MAX: Final = 2**31 - 1
_GZIP: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_GZIP_HEAD: Final = _GZIP + b"\x08" + bytes(6) + b"\xff"
UNPACKED_BYTES_MAX: Final = 16 * KIB * KIB
"""Of a body that LZ4 or Zstandard compressed: RocketMQ's producers take no more than 4 MiB."""
REPACKED_BYTES_MAX: Final = 8 * KIB * KIB
"""Of the same by gzip, also of all in one answer, which must fit into a frame between members."""
_LOG: Final = logging.getLogger("rocketstore")
_PART_BYTES: Final = 64 * KIB
_TYPES: Final = frozenset({pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION, pb.PRIORITY})


def type_of(message: pb.Message) -> pb.MessageType:
    """The type of a message that is sent. Raises ``RejectedError`` if its properties contradict that."""
    system = message.system_properties
    given = system.message_type
    if given not in _TYPES:
        raise RejectedError(pb.NOT_IMPLEMENTED, f"message type {given}: lite topics and the like are not served")
    found = pb.NORMAL
    if system.message_group:
        found = pb.FIFO
    elif system.HasField("delivery_timestamp"):
        found = pb.DELAY
    elif system.HasField("priority"):
        found = pb.PRIORITY
    if given == pb.TRANSACTION and found == pb.NORMAL:
        found = pb.TRANSACTION
    if found != given:
        names = pb.MessageType.Name
        raise RejectedError(
            pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"a message of type {names(given)} has the properties of type {names(found)}",
        )
    return given


def to_store(
    call: GatewayCall,
    given: pb.Message,
    store_host: HostAddress,
    body_bytes_max: int,
    unpacked_bytes_max: int,
    *,
    may_be_empty: bool,
) -> Message:
    """A message as it is stored, of no queue yet; ``unpacked_bytes_max``: what a compressed body may have.

    Raises ``RejectedError``.
    """
    topic = check_topic_name(name_of(given.topic))
    system, body = given.system_properties, given.body
    kind = type_of(given)
    check_message_id(system.message_id)
    check_properties(given.user_properties, system.tag, system.keys, system.trace_context)
    check_body(body, body_bytes_max, may_be_empty=may_be_empty)
    if system.HasField("body_digest"):
        _check_digest(body, system.body_digest)
    if system.body_encoding == pb.GZIP:
        body = _unpacked(body, _GZIP_WINDOW, unpacked_bytes_max)
    properties = {name: value for name, value in given.user_properties.items() if value}
    if system.tag:
        properties[PROPERTY_TAGS] = system.tag
    if system.keys:
        properties[PROPERTY_KEYS] = " ".join(system.keys)
    if system.trace_context:
        properties[PROPERTY_TRACE_CONTEXT] = system.trace_context
    flag = 0
    if kind != pb.NORMAL:
        properties |= _of_type(kind, topic, system)
        flag = SYS_FLAG_PREPARED if kind == pb.TRANSACTION else 0
    properties[PROPERTY_UNIQUE_KEY] = system.message_id
    text = "\x02".join([f"{name}\x01{value}" for name, value in properties.items()])
    return Message(
        topic,
        body,
        -1,
        {},
        0,
        flag,
        max(0, to_ms(system.born_timestamp)),
        _born_host(call.host, call.port),
        store_host,
        property_string=text.encode(),
    )


@lru_cache(maxsize=4096)
def _born_host(host: str, port: int) -> HostAddress:
    return host_address(host, port)


def _of_type(kind: pb.MessageType, topic: str, system: pb.SystemProperties) -> dict[str, str]:
    """The properties that make it one of its type; a producer's group is the topic that it sends to."""
    match kind:
        case pb.FIFO:
            check_message_group(system.message_group)
            return {PROPERTY_SHARDING_KEY: system.message_group}
        case pb.DELAY:
            due_ms = to_ms(system.delivery_timestamp)
            if due_ms <= 0:
                raise RejectedError(pb.ILLEGAL_DELIVERY_TIME, "invalid delivery timestamp: use a time since 1970")
            return {PROPERTY_TIMER_DELIVER_MS: str(due_ms)}
        case pb.PRIORITY:
            if not 0 <= system.priority <= PRIORITY_MAX:
                raise RejectedError(pb.BAD_REQUEST, f"priority {system.priority}: at least 0")
            return {PROPERTY_PRIORITY: str(system.priority)}
    found = {PROPERTY_TRANSACTION: "true", PROPERTY_PRODUCER_GROUP: topic}
    if system.HasField("orphaned_transaction_recovery_duration"):
        seconds = system.orphaned_transaction_recovery_duration.seconds
        if not 0 <= seconds <= RECOVERY_S_MAX:
            raise RejectedError(
                pb.BAD_REQUEST, f"a producer is asked about a transaction after 0 to {RECOVERY_S_MAX} s, not {seconds}"
            )
        found[PROPERTY_CHECK_IMMUNITY] = str(seconds)
    return found


# -- to clients --------------------------------------------------------------------------------------------------------


def to_client(record: bytes, body_bytes_max: int, *, topic: str = "") -> pb.Message:
    """A stored record as a client gets it, without what a delivery adds; ``topic``: in the place of its own.

    Raises ``CorruptRecordError``.
    """
    message = decode_record(record)
    properties = message.properties
    body, encoding = _readable(message, body_bytes_max)
    found = pb.Message(topic=pb.Resource(name=topic or message.topic), body=body)
    for name, value in properties.items():
        if name not in RESERVED:
            found.user_properties[name] = value
    system = found.system_properties
    system.message_id = message.unique_key
    system.message_type = _type_of_stored(message)
    system.body_encoding = encoding
    system.body_digest.type = pb.MD5
    system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    set_ms(system.born_timestamp, message.born_timestamp)
    set_ms(system.store_timestamp, message.store_timestamp)
    system.born_host, system.store_host = host_text(message.born_host), host_text(message.store_host)
    system.queue_id, system.queue_offset = message.queue_id, message.queue_offset
    if message.tags:
        system.tag = message.tags
    system.keys.extend(message.keys)
    _set_optional(system, properties)
    return found


def is_compressed(record: bytes) -> bool:
    """Whether making ``to_client`` of it takes long."""
    return bool(record[SYS_FLAG_AT + 3] & SYS_FLAG_COMPRESSED)


def _set_optional(system: pb.SystemProperties, properties: Mapping[str, str]) -> None:
    if group := properties.get(PROPERTY_SHARDING_KEY):
        system.message_group = group
    if context := properties.get(PROPERTY_TRACE_CONTEXT):
        system.trace_context = context
    if (priority := _number(properties.get(PROPERTY_PRIORITY))) >= 0:
        system.priority = min(priority, PRIORITY_MAX)
    due_ms = _number(properties.get(PROPERTY_TIMER_DELIVER_MS) or properties.get(PROPERTY_TIMER_OUT_MS))
    if due_ms >= 0:
        set_ms(system.delivery_timestamp, due_ms)
    if dead := properties.get(PROPERTY_DEAD_TOPIC):
        system.dead_letter_queue.topic = dead
        system.dead_letter_queue.message_id = properties.get(PROPERTY_DEAD_ID, "")


def _type_of_stored(message: Message) -> pb.MessageType:
    properties = message.properties
    if PROPERTY_TRANSACTION in properties:
        return pb.TRANSACTION
    if PROPERTY_TIMER_DELIVER_MS in properties or PROPERTY_TIMER_OUT_MS in properties or message.delay_level:
        return pb.DELAY
    if PROPERTY_SHARDING_KEY in properties:
        return pb.FIFO
    return pb.PRIORITY if PROPERTY_PRIORITY in properties else pb.NORMAL


def _readable(message: Message, bytes_max: int) -> tuple[bytes, pb.Encoding]:
    """A body in an encoding that clients know: RocketMQ 4's producers compress in another one."""
    body = message.body
    if not message.sys_flag & SYS_FLAG_COMPRESSED:
        return body, pb.IDENTITY
    if body.startswith(_GZIP):
        return body, pb.GZIP
    made = _as_gzip(body, bytes_max) if message.sys_flag & METHOD_FLAGS in ZLIB else _packed_anew(message, bytes_max)
    return (body, pb.IDENTITY) if made is None else (made, pb.GZIP)


def _packed_anew(message: Message, bytes_max: int) -> bytes | None:
    """The body of a message that LZ4 or Zstandard compressed, by gzip; None: it cannot be read, or would have more than
    ``REPACKED_BYTES_MAX``.
    """
    try:
        plain = decompress(message.body, message.sys_flag, min(bytes_max, UNPACKED_BYTES_MAX))
    except UnknownCompressionError as error:
        _warn_once(str(error))
        return None
    except WrongBodyError:
        return None
    made = gzip.compress(plain, 1, mtime=0)
    return made if len(made) <= REPACKED_BYTES_MAX else None


@lru_cache(maxsize=16)
def _warn_once(sentence: str) -> None:
    _LOG.warning("clients of gRPC get a message as it is stored, which they cannot read: %s", sentence)


def _as_gzip(body: bytes, bytes_max: int) -> bytes | None:
    """A body that zlib compressed, with gzip's head and end around the same data, so that nothing grows here; None: it
    is none, or one of more than ``bytes_max``.
    """
    unpacker = zlib.decompressobj()
    crc = size = 0
    try:
        part = unpacker.decompress(body, _PART_BYTES)
        while part:
            crc, size = zlib.crc32(part, crc), size + len(part)
            if size > bytes_max:
                return None
            part = unpacker.decompress(unpacker.unconsumed_tail, _PART_BYTES)
    except zlib.error:
        return None
    if not unpacker.eof or unpacker.unused_data:
        return None
    return _GZIP_HEAD + body[2:-4] + crc.to_bytes(4, "little") + size.to_bytes(4, "little")


def _unpacked(body: bytes, window: int, bytes_max: int) -> bytes:
    """Raises ``RejectedError``."""
    unpacker = zlib.decompressobj(window)
    try:
        found = unpacker.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise RejectedError(pb.MESSAGE_CORRUPTED, f"the body cannot be decompressed: {error}") from None
    if len(found) > bytes_max:
        raise RejectedError(
            pb.MESSAGE_BODY_TOO_LARGE, f"the body has more than {bytes_max} bytes when it is decompressed"
        )
    if not unpacker.eof:
        raise RejectedError(pb.MESSAGE_CORRUPTED, "the compressed body ends too early")
    return found


def _check_digest(body: bytes, digest: pb.Digest) -> None:
    """Clients write CRC32 in three ways: in hexadecimal digits with and without zeros before them, and decimally."""
    given = digest.checksum.upper()
    match digest.type:
        case pb.CRC32:
            crc = zlib.crc32(body)
            right = given.lstrip("0") in (f"{crc:X}".lstrip("0"), str(crc).lstrip("0"))
        case pb.MD5:
            right = given == hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
        case pb.SHA1:
            right = given == hashlib.sha1(body, usedforsecurity=False).hexdigest().upper()
        case _:
            return
    if not right:
        raise RejectedError(pb.MESSAGE_CORRUPTED, "the body is not what its digest says: send the message again")


def to_ms(moment: Timestamp) -> int:
    """Milliseconds since 1970."""
    return moment.seconds * 1000 + moment.nanos // 1_000_000


def set_ms(moment: Timestamp, time_ms: int) -> None:
    """Set a field to so many milliseconds since 1970."""
    moment.seconds, rest = divmod(time_ms, 1000)
    moment.nanos = rest * 1_000_000


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 18 else -1
