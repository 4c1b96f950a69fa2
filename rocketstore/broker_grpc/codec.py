"""Encodes the broker's protocol, ``proto/rocketstore/v1/broker.proto``. No other part of the broker uses protobuf."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Wire

from dledger.access.quota import Quota
from dledger.errors import InvalidRequestError, told
from dledger.rpc.clients.counted import Counted, check_count, elements, may_exceed
from dledger.types import ProducerBatch
from rocketstore.broker.pull import Pull
from rocketstore.broker.sending import MessageSource, SendBatch
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import PROPERTY_DELAY, PROPERTY_TRANSACTION, SYS_FLAG_PREPARED, HostAddress, Message
from rocketstore.message.producer_names import SEQUENCE_MAX, check_producer_name
from rocketstore.message.properties import decode_properties
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import GetResult, PutMessageStatus, PutResult

SERVICE: Final = "rocketstore.v1.BrokerService"
_PUT_OK: Final = PutMessageStatus.PUT_OK
_OLDER: Final = {
    PutMessageStatus.TOPIC_NOT_FOUND: PutMessageStatus.MESSAGE_ILLEGAL,
    PutMessageStatus.NOT_WRITABLE: PutMessageStatus.MESSAGE_ILLEGAL,
    PutMessageStatus.QUEUE_NOT_FOUND: PutMessageStatus.MESSAGE_ILLEGAL,
    PutMessageStatus.TOPIC_NOT_CREATED: PutMessageStatus.OS_PAGECACHE_BUSY,
    PutMessageStatus.FLOW_CONTROL: PutMessageStatus.OS_PAGECACHE_BUSY,
}
"""What clients of this protocol know instead."""
_DELAY: Final = f"{PROPERTY_DELAY}\x01".encode()
_TRANSACTION: Final = f"{PROPERTY_TRANSACTION}\x01".encode()
_CLIENT_ID: Final = re.compile(r"[!-~]{1,255}")
_W = TypeVar("_W", bound=Wire)
_COUNTED: Final[dict[type[Wire], Counted]] = {
    pb.SendRequest: Counted(1, 16_384, "messages"),
    pb.CommitOffsetsRequest: Counted(2, 16_384, "offsets"),
    pb.CommitPositionRequest: Counted(4, 16_384, "topics"),
    pb.MembershipRequest: Counted(3, 1024, "subscriptions"),
    pb.LockQueuesRequest: Counted(3, 16_384, "queues"),
    pb.UnlockQueuesRequest: Counted(3, 16_384, "queues"),
}
_PROPERTIES: Final = Counted(3, 16_384, "properties of a message")


class SendCall(NamedTuple):
    """A send request. ``packed``: its response may be packed."""

    request_id: int
    caller: MessageSource
    batch: SendBatch
    packed: bool = False


def parse(kind: type[_W], data: bytes) -> _W:
    """Raises ``InvalidRequestError`` for garbage, and if a request has too many elements."""
    counted = _COUNTED.get(kind)
    if counted is not None:
        check_count(data, counted)
        if kind is pb.SendRequest:
            _check_properties(data)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"not a valid {kind.DESCRIPTOR.name}: {error}") from error


def check_client_id(client_id: str) -> None:
    """Raises ``InvalidRequestError`` unless a member of a group may be called that."""
    if not _CLIENT_ID.fullmatch(client_id):
        raise InvalidRequestError(f"client id {client_id[:64]!r}: 1 to 255 printable ASCII characters, without blanks")


def _check_properties(data: bytes) -> None:
    """Limit the properties of all messages together, if they are given one by one."""
    if not may_exceed(data, _PROPERTIES.field, _PROPERTIES.count_max):
        return
    for field, begin, end in elements(data):
        if field == _COUNTED[pb.SendRequest].field:
            check_count(data[begin:end], _PROPERTIES)


def decode_send(data: bytes, born_host: HostAddress, store_host: HostAddress, now_ms: int, quota: Quota) -> SendCall:
    """Decode a send request. Hot path: about a microsecond per message. Raises ``InvalidRequestError``."""
    wire = parse(pb.SendRequest, data)
    messages: list[Message] = []
    add = messages.append
    for one in wire.messages:
        text = one.property_string
        sys_flag = one.sys_flag
        if not text or _DELAY in text or _TRANSACTION in text:  # these need the properties one by one
            properties, text = (decode_properties(text) if text else dict(one.properties.items())), b""
            if properties.get(PROPERTY_TRANSACTION, "").lower() == "true":  # as in RocketMQ's broker
                sys_flag |= SYS_FLAG_PREPARED
        else:
            properties = {}
        message = Message(
            one.topic,
            one.body,
            one.queue_id,
            properties,
            one.flag,
            sys_flag,
            one.born_timestamp_ms or now_ms,
            born_host,
            store_host,
            one.reconsume_times,
        )
        message.property_string = text
        add(message)
    batch = SendBatch(messages, len(data), not wire.no_wait, _producer(wire))
    return SendCall(wire.request_id, MessageSource(quota), batch, wire.packed_answer)


def _producer(wire: pb.SendRequest) -> ProducerBatch | None:
    name, sequence = wire.producer, wire.sequence
    if not name:
        return None
    check_producer_name(name)
    if not 0 <= sequence <= SEQUENCE_MAX:
        raise InvalidRequestError(f"a message's sequence number must be 0 to {SEQUENCE_MAX}, not {sequence}")
    return ProducerBatch(name, sequence, len(wire.messages))


class ResultEncoder:
    """Encodes send responses; message ids start with ``store_host``."""

    def __init__(self, store_host: HostAddress) -> None:
        self._id_prefix = offset_message_id(store_host, 0)[:-16]

    def encode(self, request_id: int, results: Sequence[PutResult], *, packed: bool = False) -> bytes:
        """The response to one request; ``packed`` if allowed and all messages were stored."""
        wire = pb.SendResponse(request_id=request_id)
        if packed and results:
            places = [one.stored for one in results if one.status is _PUT_OK and one.stored is not None]
            if len(places) == len(results):
                offsets, _, queue_ids, queue_offsets, timestamps = zip(*places, strict=True)
                batch = wire.stored
                batch.id_prefix = self._id_prefix
                batch.offsets.extend(offsets)
                batch.queue_ids.extend(queue_ids)
                batch.queue_offsets.extend(queue_offsets)
                batch.store_timestamps_ms.extend(timestamps)
                return wire.SerializeToString()
        add = wire.results.add
        prefix = self._id_prefix
        for one in results:
            stored = one.stored
            if stored is None:
                wire_result = add(
                    status=_OLDER.get(one.status, one.status),
                    outcome=one.outcome,
                    reason=told(one.reason),
                    leader=one.leader,
                )
                if one.status is _PUT_OK:  # the position is not remembered
                    wire_result.offset = wire_result.queue_id = wire_result.queue_offset = -1
                    wire_result.store_timestamp_ms = -1
                continue
            offset, _, queue_id, queue_offset, store_timestamp = stored
            add(
                status=one.status,
                outcome=one.outcome,
                reason=one.reason,
                leader=one.leader,
                message_id=f"{prefix}{offset:016X}",
                offset=offset,
                queue_id=queue_id,
                queue_offset=queue_offset,
                store_timestamp_ms=store_timestamp,
            )
        return wire.SerializeToString()


def decode_pull(data: bytes) -> Pull:
    """Decode a pull request. Raises ``InvalidRequestError``."""
    wire = parse(pb.PullRequest, data)
    if min(wire.queue_id, wire.offset, wire.max_messages, wire.max_bytes, wire.wait_ms) < 0:
        raise InvalidRequestError("queue_id, offset, max_messages, max_bytes and wait_ms must not be negative")
    return Pull(
        wire.group,
        wire.topic,
        wire.queue_id,
        wire.offset,
        wire.max_messages,
        wire.max_bytes,
        wire.tag_expression,
        wire.wait_ms,
    )


def encode_pulled(result: GetResult, incarnation: int) -> bytes:
    """Encode a pull response."""
    return pb.PullResponse(
        status=result.status,
        next_offset=result.next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        records=b"".join(result.records),
        count=len(result.records),
        incarnation=incarnation,
    ).SerializeToString()
