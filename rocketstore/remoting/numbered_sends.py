"""Numbered sends, requests of ours: messages that a producer numbers, so that a repetition is recognized.

RocketMQ's protocol has none. A broker that answers them has announced so (``dledger.remoting.codes``). All integers are
big-endian; a text is its length in one byte, and ASCII. ``SEND_NUMBERED`` is stored entirely or not at all. Its body::

    wait 1 byte (0: answer without waiting for the disk) | producer text | number of the first message i64 | count i32
    count x: topic text | queue i32 (-1: the broker chooses) | flag i32 | sys flag i32 | born i64, ms since 1970
             | properties length i16, as in a record | body length i32 | body

Its answer, with the code of any other send, has a body if the messages are stored::

    host length 1 byte (4 or 16) | host | port i32          where a message id says that they are
    count x: offset i64 | queue i32 | queue offset i64 | stored i64, ms since 1970

A message that an earlier request stored, and whose place is no longer remembered, has -1 everywhere. Another answer has
the fields ``status`` (``PutMessageStatus``), ``outcome``, ``leader`` and ``message``, the place of the one to blame.

``NEXT_NUMBER``: the body is the producer's name, a text; the answer's body is the number of its next message i64, and a
text. If that text has changed, nobody knows any more whether earlier messages of the producer are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct, error
from typing import Final, NamedTuple, TypeAlias

from dledger.remoting.codes import RequestError
from rocketstore.remoting.texts import cut, encode_text, read_text
from rocketstore.types import PutResult

MESSAGES_MAX: Final = 4096
"""In one request. Reading so many takes a broker fifteen milliseconds, in which it does nothing else."""
_FIRST: Final = Struct(">qi")
_MESSAGE: Final = Struct(">iiiqh")
_LENGTH: Final = Struct(">i")
_PLACE: Final = Struct(">qiqq")
_NEXT: Final = Struct(">q")
StoredRow: TypeAlias = tuple[int, int, int, int]
"""A message's offset in the log, its queue, its offset there, and when it was stored; -1 everywhere: not remembered."""
_NOWHERE: Final = _PLACE.pack(-1, -1, -1, -1)
_LEAST: Final = 1 + _MESSAGE.size + _LENGTH.size
"""The size of the smallest message."""


class NumberedMessage(NamedTuple):
    """One message of a request."""

    topic: str
    queue_id: int
    flag: int
    sys_flag: int
    born_ms: int
    properties: bytes
    body: bytes


class NumberedSend(NamedTuple):
    """The body of a SEND_NUMBERED request."""

    producer: str
    sequence: int
    messages: Sequence[NumberedMessage]
    wait: bool = True

    def encode(self) -> bytes:
        """Raises ``ValueError`` for what does not fit."""
        messages = [encode_message(*one) for one in self.messages]
        return encode_numbered(self.producer, self.sequence, messages, wait=self.wait)

    @staticmethod
    def decode(data: bytes) -> NumberedSend:
        """Raises ``RequestError``."""
        try:
            producer, at = read_text(data, 1)
            sequence, count = _FIRST.unpack_from(data, at)
            at += _FIRST.size
            if not 0 < count <= MESSAGES_MAX or count * _LEAST > len(data):
                raise RequestError(f"{count} numbered messages: 1 to {MESSAGES_MAX} can be sent at once")
            messages = []
            for _ in range(count):
                topic, at = read_text(data, at)
                queue_id, flag, sys_flag, born_ms, size = _MESSAGE.unpack_from(data, at)
                properties, at = cut(data, at + _MESSAGE.size, size)
                (size,) = _LENGTH.unpack_from(data, at)
                body, at = cut(data, at + _LENGTH.size, size)
                messages.append(NumberedMessage(topic, queue_id, flag, sys_flag, born_ms, properties, body))
        except (error, IndexError, UnicodeDecodeError) as problem:
            raise RequestError(f"malformed numbered messages: {problem}") from problem
        if at != len(data):
            raise RequestError(f"malformed numbered messages: {len(data) - at} bytes after the last one")
        return NumberedSend(producer, sequence, messages, bool(data[0]))


def encode_message(
    topic: str, queue_id: int, flag: int, sys_flag: int, born_ms: int, properties: bytes, body: bytes
) -> bytes:
    """One message, for ``encode_numbered``. Raises ``ValueError`` for what does not fit."""
    try:
        head = _MESSAGE.pack(queue_id, flag, sys_flag, born_ms, len(properties))
    except error as problem:
        raise ValueError(f"a number of the message does not fit its field: {problem}") from problem
    return b"".join((_topic_text(topic), head, properties, _LENGTH.pack(len(body)), body))


@lru_cache(maxsize=1024)
def _topic_text(topic: str) -> bytes:
    return encode_text(topic)


def encode_numbered(producer: str, sequence: int, messages: Sequence[bytes], *, wait: bool = True) -> bytes:
    """The body of a SEND_NUMBERED request with these encoded messages. Raises ``ValueError``."""
    return b"".join((bytes((wait,)), encode_text(producer), _FIRST.pack(sequence, len(messages)), *messages))


def encode_stored(ip: bytes, port: int, results: Sequence[PutResult]) -> bytes:
    """The body of an answer: where the messages are stored, and the host in their ids."""
    parts = [bytes((len(ip),)), ip, _LENGTH.pack(port)]
    for one in results:
        place = one.stored
        parts.append(
            _NOWHERE
            if place is None
            else _PLACE.pack(place.offset, place.queue_id, place.queue_offset, place.store_timestamp)
        )
    return b"".join(parts)


def decode_stored(data: bytes, count: int) -> tuple[tuple[bytes, int], Iterator[StoredRow]]:
    """The host's IP address and port, and the places of so many messages. Raises ``RequestError``."""
    try:
        ip, at = cut(data, 1, data[0])
        (port,) = _LENGTH.unpack_from(data, at)
        rows = memoryview(data)[at + _LENGTH.size :]
    except (error, IndexError) as problem:
        raise RequestError(f"malformed answer to numbered messages: {problem}") from problem
    if len(rows) != count * _PLACE.size:
        raise RequestError(f"malformed answer to {count} numbered messages: {len(rows)} bytes of places")
    return (ip, port), _PLACE.iter_unpack(rows)


def encode_name(producer: str) -> bytes:
    """The body of a NEXT_NUMBER request. Raises ``ValueError``."""
    return encode_text(producer)


def decode_name(data: bytes) -> str:
    """The producer. Raises ``RequestError``."""
    try:
        name, at = read_text(data, 0)
    except (IndexError, UnicodeDecodeError) as problem:
        raise RequestError(f"malformed name of a producer: {problem}") from problem
    if at != len(data):
        raise RequestError(f"malformed name of a producer: {len(data) - at} bytes after it")
    return name


def encode_next(number: int, memory: str) -> bytes:
    """The body of an answer to NEXT_NUMBER."""
    return _NEXT.pack(number) + encode_text(memory)


def decode_next(data: bytes) -> tuple[int, str]:
    """The next number, and the text that identifies what the broker remembers. Raises ``RequestError``."""
    try:
        (number,) = _NEXT.unpack_from(data)
        return number, read_text(data, _NEXT.size)[0]
    except (error, IndexError, UnicodeDecodeError) as problem:
        raise RequestError(f"malformed answer about a producer: {problem}") from problem
