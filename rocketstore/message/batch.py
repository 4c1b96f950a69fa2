"""The encoding of batches: several messages for one queue in the body of one.

One item is ``[size i32][magic 0 i32][CRC 0 i32][flag i32][body length i32] body [properties length i16] properties``.
The broker converts the items to ordinary records; a batch itself is never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from dledger.errors import InvalidRequestError
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQUE_KEY,
    Message,
)
from rocketstore.message.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties

_ITEM: Final = Struct(">iiiii")
_PROPERTIES_LENGTH: Final = Struct(">h")
_DELAY: Final = f"{PROPERTY_DELAY}\x01"
"""It takes more than appending to delay a message."""
_SEPARATOR: Final = 2
BATCH_MESSAGES_MAX: Final = 16_384
"""The most messages in a batch. The answer has an id of 57 bytes for each; and so many hold the loop for 0.1 s."""
_NOT_IN_BATCHES: Final = (PROPERTY_TRANSACTION, PROPERTY_DELAY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID)
"""A message of a batch is stored as it is: these would say something that is not done."""
_NOT_IN_BATCHES_BYTES: Final = tuple(f"{name}\x01".encode() for name in _NOT_IN_BATCHES)
_ITEM_OVERHEAD: Final = _ITEM.size + _PROPERTIES_LENGTH.size


class CorruptBatchError(InvalidRequestError):
    """Raised when the body of a batch does not consist of whole items."""


class BatchItem(NamedTuple):
    """The fields of one message in a batch; the others are the batch's."""

    flag: int
    body: bytes
    properties: dict[str, str]


def encode_batch(messages: Iterable[Message]) -> bytes:
    """The body of a batch: each message's flag, body and properties. Raises as ``encode_items``."""
    return encode_items((one.flag, one.body, encode_properties(one.properties)) for one in messages)


def encode_items(items: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """The same for messages given by flag, body and encoded properties.

    Raises ``InvalidRequestError`` for anything that does not fit into an item.
    """
    parts: list[bytes] = []
    for flag, body, properties in items:
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise InvalidRequestError(f"the properties of an item take {len(properties)} bytes")
        try:
            head = _ITEM.pack(_ITEM_OVERHEAD + len(body) + len(properties), 0, 0, flag, len(body))
        except error as problem:
            raise InvalidRequestError(f"a number of the message does not fit its field: {problem}") from problem
        parts += (head, body, _PROPERTIES_LENGTH.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(encoded: bytes) -> list[BatchItem]:
    """The items in the body of a batch. Raises ``CorruptBatchError``. Magic and CRC of an item are ignored.

    RocketMQ's producers set them to 0 and its brokers ignore them.
    """
    return [BatchItem(flag, body, decode_properties(properties)) for flag, body, properties in _items(encoded)]


class _Place(NamedTuple):
    """Where an item's parts are."""

    flag: int
    body_begin: int
    properties_begin: int
    end: int


def _items(encoded: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Flag, body and property string of each item. Raises ``CorruptBatchError`` before it makes anything."""
    for flag, body_at, properties_at, end in _places(encoded):
        yield flag, bytes(encoded[body_at : properties_at - _PROPERTIES_LENGTH.size]), bytes(encoded[properties_at:end])


def _places(encoded: bytes) -> list[_Place]:
    """By their lengths, which must add up, and not be too many. Raises ``CorruptBatchError``."""
    at, end = 0, len(encoded)
    places: list[_Place] = []
    while at < end:
        if len(places) == BATCH_MESSAGES_MAX:
            raise CorruptBatchError(f"the batch has more than {BATCH_MESSAGES_MAX} messages: send it in parts")
        if end - at < _ITEM_OVERHEAD:
            raise CorruptBatchError(f"{end - at} bytes at {at} are too few for a batch item")
        size, _, _, flag, body_bytes = _ITEM.unpack_from(encoded, at)
        body_at = at + _ITEM.size
        properties_at = body_at + body_bytes + _PROPERTIES_LENGTH.size
        if not _ITEM_OVERHEAD <= size <= end - at or body_bytes < 0 or properties_at > at + size:
            raise CorruptBatchError(f"the item at {at} claims {size} bytes and a body of {body_bytes}")
        (properties_bytes,) = _PROPERTIES_LENGTH.unpack_from(encoded, properties_at - _PROPERTIES_LENGTH.size)
        if properties_bytes != at + size - properties_at:
            raise CorruptBatchError(f"the item at {at} claims properties of {properties_bytes} bytes")
        at += size
        places.append(_Place(flag, body_at, properties_at, at))
    return places


def expand_batch(batch: Message) -> list[Message]:
    """The messages of a batch, given as a message with the batch as its body.

    Raises ``CorruptBatchError`` if it is malformed or has too many, or if one has a property of which only a broker, or
    a message by itself, may make use.

    Topic, queue, system flag, hosts, timestamps and reconsume times are the batch's. Its properties are appended to
    each message's, and so override them, but for ``UNIQ_KEY``, by which a message is found; a batch is not a
    transaction, so the prepared offset is 0. If the batch's properties are a property string, so are those of its
    messages, as far as that can be done by appending.
    """
    added = batch.property_string
    properties = batch.properties or decode_properties(added)
    if PROPERTY_DELAY in properties:
        added = b""
    names = (_DELAY, *(f"{name}\x01" for name in properties))
    messages: list[Message] = []
    for flag, body, own in _items(batch.body):
        if own:
            _check_properties(own)
        joined = _appended(own, added, names) if added else None
        messages.append(
            Message(
                batch.topic,
                body,
                batch.queue_id,
                _merged(decode_properties(own), properties) if joined is None else {},
                flag,
                batch.sys_flag,
                batch.born_timestamp,
                batch.born_host,
                batch.store_host,
                batch.reconsume_times,
                0,
                batch.store_timestamp,
                batch.queue_offset,
                batch.offset,
                batch.size,
                batch.body_crc,
                b"" if joined is None else joined,
            )
        )
    return messages


def _check_properties(own: bytes) -> None:
    for name in _NOT_IN_BATCHES_BYTES:
        if name in own:  # perhaps at the end of another one
            held = decode_properties(own)
            for one in _NOT_IN_BATCHES:
                if one in held:
                    raise CorruptBatchError(f"a message of a batch cannot have the property {one}: send it by itself")
            return


def _merged(own: Mapping[str, str], properties: Mapping[str, str]) -> dict[str, str]:
    merged = {**own, **properties}
    if PROPERTY_UNIQUE_KEY in own:
        merged[PROPERTY_UNIQUE_KEY] = own[PROPERTY_UNIQUE_KEY]
    return merged


def _appended(own: bytes, added: bytes, names: Sequence[str]) -> bytes | None:
    """One property string after the other; None if ``own`` is not UTF-8 or might have a property of ``names``."""
    if not own:
        return added
    try:
        text = own.decode()
    except UnicodeDecodeError:
        return None
    for name in names:
        if name in text:
            return None
    return b"%b%b" % (own, added) if own[-1] == _SEPARATOR else b"%b\x02%b" % (own, added)
