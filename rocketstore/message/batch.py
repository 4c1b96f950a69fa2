"""The encoding of batches: several messages for one queue in the body of one.

One item is ``[size i32][magic 0 i32][CRC 0 i32][flag i32][body length i32] body [properties length i16] properties``.
The broker converts the items to ordinary records; a batch itself is never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from dledger.errors import InvalidRequestError
from rocketstore.message.message import PROPERTY_DELAY, Message
from rocketstore.message.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties

_ITEM: Final = Struct(">iiiii")
_PROPERTIES_LENGTH: Final = Struct(">h")
_DELAY: Final = f"{PROPERTY_DELAY}\x01"
"""It takes more than appending to delay a message."""
_SEPARATOR: Final = 2
_ITEM_OVERHEAD: Final = _ITEM.size + _PROPERTIES_LENGTH.size


class CorruptBatchError(InvalidRequestError):
    """Raised when the body of a batch does not consist of whole items."""


class BatchItem(NamedTuple):
    """The fields of one message in a batch; the others are the batch's."""

    flag: int
    body: bytes
    properties: dict[str, str]


def encode_batch(messages: Iterable[Message]) -> bytes:
    """The body of a batch: each message's flag, body and properties.

    Raises ``InvalidRequestError`` for anything that does not fit into an item.
    """
    parts: list[bytes] = []
    for message in messages:
        properties = encode_properties(message.properties)
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise InvalidRequestError(f"the properties of an item take {len(properties)} bytes")
        body = message.body
        try:
            head = _ITEM.pack(_ITEM_OVERHEAD + len(body) + len(properties), 0, 0, message.flag, len(body))
        except error as problem:
            raise InvalidRequestError(f"a number of the message does not fit its field: {problem}") from problem
        parts += (head, body, _PROPERTIES_LENGTH.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(encoded: bytes) -> list[BatchItem]:
    """The items in the body of a batch. Raises ``CorruptBatchError``. Magic and CRC of an item are ignored.

    RocketMQ's producers set them to 0 and its brokers ignore them.
    """
    return [BatchItem(flag, body, decode_properties(properties)) for flag, body, properties in _items(encoded)]


def _items(encoded: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Flag, body and property string of each item. Raises ``CorruptBatchError``."""
    at, end = 0, len(encoded)
    while at < end:
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
        yield flag, bytes(encoded[body_at : body_at + body_bytes]), bytes(encoded[properties_at : at + size])
        at += size


def expand_batch(batch: Message) -> list[Message]:
    """The messages of a batch, given as a message with the batch as its body. Raises ``CorruptBatchError``.

    Topic, queue, system flag, hosts, timestamps and reconsume times are the batch's. Its properties are appended to
    each message's, and so override them; a batch is not a transaction, so the prepared offset is 0. If the batch's
    properties are a property string, so are those of its messages, as far as that can be done by appending.
    """
    added = batch.property_string
    properties = batch.properties or decode_properties(added)
    if PROPERTY_DELAY in properties:
        added = b""
    names = (_DELAY, *(f"{name}\x01" for name in properties))
    messages: list[Message] = []
    for flag, body, own in _items(batch.body):
        joined = _appended(own, added, names) if added else None
        messages.append(
            Message(
                batch.topic,
                body,
                batch.queue_id,
                {**decode_properties(own), **properties} if joined is None else {},
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
