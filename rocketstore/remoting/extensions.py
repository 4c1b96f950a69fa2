"""Extensions of RocketMQ's protocol: numbered sends, offsets of many queues at once, and lists of timed messages.

A broker that answers them has announced so (``dledger.remoting.codes``). All integers are big-endian; a text is its
length in one byte, and ASCII.

**Numbered sends**: messages that a producer numbers, so that a repetition is recognized. ``SEND_NUMBERED`` is stored
entirely or not at all. Its body::

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

**Offsets of a group in many queues at once**, with the *incarnation* of the master that keeps them: another number
whenever a process becomes master. As long as it stays, nothing that was read from that master has been replaced.
(RocketMQ's requests are about one queue each, and know nothing of it.)

``FETCH_OFFSETS``: the body is the group and the queues; the answer's has the offsets in their order::

    group text | count i32 | count x: topic text | queue i32
    incarnation i64 | count x: offset i64 (-1: the group has none there)

``COMMIT_OFFSETS``: all are stored, or none: none if the master is of another incarnation than the one given (0: any),
which the answer tells. Without ``rewind``, an offset that is lower than the stored one changes nothing::

    incarnation i64 | rewind 1 byte (0 or 1) | group text | count i32 | count x: topic text | queue i32 | offset i64
    incarnation i64

``COMMIT_POSITION``: a group that reads the log itself has consumed every message of these topics before a position in
it. The answer has the offsets that this means, of which none moved back::

    position i64 | group text | count i32 | count x: topic text
    count i32 | count x: topic text | queue i32 | offset i64

**Timed messages**: ``LIST_TIMED`` answers in JSON with the messages that wait for a time of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct, error
from typing import Final, NamedTuple, TypeAlias

from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import Int32, Int64
from rocketstore.types import PutResult


def encode_text(text: str) -> bytes:
    """Raises ``ValueError`` for more than 255 characters, or others than ASCII."""
    encoded = text.encode("ascii")
    return bytes((len(encoded),)) + encoded


def read_text(data: bytes, at: int) -> tuple[str, int]:
    """The text there, and where it ends. Raises ``IndexError`` and ``UnicodeDecodeError``."""
    found, end = cut(data, at + 1, data[at])
    return found.decode("ascii"), end


def cut(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """So many bytes, and where they end. Raises ``IndexError`` if there are fewer."""
    end = at + size
    if size < 0 or end > len(data):
        raise IndexError(f"{size} bytes at {at} of {len(data)}")
    return data[at:end], end


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


QUEUES_MAX: Final = 1024
"""In one request: a topic has no more at one broker."""
TOPICS_MAX: Final = 16_384
REACHED_MAX: Final = 1 << 20
"""Queues in an answer."""
_COUNT: Final = Struct(">i")
_QUEUE: Final = Struct(">i")
_OFFSET_PLACE: Final = Struct(">iq")
_I64: Final = Struct(">q")
_TERMS: Final = Struct(">q?")
_NOTHING: Final = Struct("")
_Places = list[tuple[str, tuple[int, ...]]]


class FetchOffsets(NamedTuple):
    """The body of a FETCH_OFFSETS request: topics and queues."""

    group: str
    queues: Sequence[tuple[str, int]]

    def encode(self) -> bytes:
        """Raises ``ValueError`` for what does not fit."""
        queues = (encode_text(topic) + _QUEUE.pack(queue_id) for topic, queue_id in self.queues)
        return b"".join((encode_text(self.group), _COUNT.pack(len(self.queues)), *queues))

    @staticmethod
    def decode(data: bytes) -> FetchOffsets:
        """Raises ``RequestError``."""
        group, places = _decode(data, 0, _QUEUE)
        return FetchOffsets(group, [(topic, queue_id) for topic, (queue_id,) in places])


class FetchedOffsets(NamedTuple):
    """The body of its answer: offsets in the order of the queues, -1 where there is none."""

    incarnation: int
    offsets: Sequence[int]

    def encode(self) -> bytes:
        """As it is sent."""
        return b"".join(map(_I64.pack, (self.incarnation, *self.offsets)))

    @staticmethod
    def decode(data: bytes, count: int) -> FetchedOffsets:
        """Of so many queues. Raises ``RequestError``."""
        if len(data) != _I64.size * (1 + count):
            raise RequestError(f"malformed answer: {len(data)} bytes for the offsets of {count} queues")
        incarnation, *offsets = (number for (number,) in _I64.iter_unpack(data))
        return FetchedOffsets(incarnation, offsets)


class CommitGroupOffsets(NamedTuple):
    """The body of a COMMIT_OFFSETS request: topics, queues, offsets."""

    group: str
    offsets: Sequence[tuple[str, int, int]]
    incarnation: int = 0
    rewind: bool = False

    def encode(self) -> bytes:
        """Raises ``ValueError`` for what does not fit."""
        places = (encode_text(topic) + _OFFSET_PLACE.pack(queue_id, offset) for topic, queue_id, offset in self.offsets)
        terms = _TERMS.pack(self.incarnation, self.rewind)
        return b"".join((terms, encode_text(self.group), _COUNT.pack(len(self.offsets)), *places))

    @staticmethod
    def decode(data: bytes) -> CommitGroupOffsets:
        """Raises ``RequestError``."""
        if len(data) < _TERMS.size:
            raise RequestError(f"malformed offsets: {len(data)} bytes")
        incarnation, rewind = _TERMS.unpack_from(data)
        group, places = _decode(data, _TERMS.size, _OFFSET_PLACE)
        offsets = [(topic, queue_id, offset) for topic, (queue_id, offset) in places]
        return CommitGroupOffsets(group, offsets, incarnation, rewind)


def encode_committed(incarnation: int) -> bytes:
    """The body of the answer to COMMIT_OFFSETS."""
    return _I64.pack(incarnation)


def decode_committed(data: bytes) -> int:
    """The incarnation of the master. Raises ``RequestError``."""
    if len(data) != _I64.size:
        raise RequestError(f"malformed answer: {len(data)} bytes instead of an incarnation")
    found: int = _I64.unpack(data)[0]
    return found


class CommitPosition(NamedTuple):
    """The body of a COMMIT_POSITION request: a position in the log, and topics, at least one."""

    group: str
    position: int
    topics: Sequence[str]

    def encode(self) -> bytes:
        """Raises ``ValueError`` for what does not fit."""
        head = (_I64.pack(self.position), encode_text(self.group), _COUNT.pack(len(self.topics)))
        return b"".join((*head, *map(encode_text, self.topics)))

    @staticmethod
    def decode(data: bytes) -> CommitPosition:
        """Raises ``RequestError``."""
        if len(data) < _I64.size:
            raise RequestError(f"malformed position: {len(data)} bytes")
        (position,) = _I64.unpack_from(data)
        group, topics = _decode(data, _I64.size, _NOTHING, TOPICS_MAX)
        if position < 0 or not topics:
            raise RequestError(f"malformed position: {position} in {len(topics)} topics")
        return CommitPosition(group, position, [topic for topic, _ in topics])


def encode_reached(offsets: Sequence[tuple[str, int, int]]) -> bytes:
    """The body of the answer to COMMIT_POSITION."""
    places = (encode_text(topic) + _OFFSET_PLACE.pack(queue_id, offset) for topic, queue_id, offset in offsets)
    return b"".join((_COUNT.pack(len(offsets)), *places))


def decode_reached(data: bytes) -> list[tuple[str, int, int]]:
    """Topics, queues and offsets. Raises ``RequestError``."""
    return [(topic, queue_id, offset) for topic, (queue_id, offset) in _places(data, 0, _OFFSET_PLACE, REACHED_MAX)]


def _decode(
    data: bytes, at: int, kind: Struct, most: int = QUEUES_MAX
) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
    """The group, and each topic with what follows it."""
    try:
        group, at = read_text(data, at)
    except (error, IndexError, UnicodeDecodeError) as problem:
        raise RequestError(f"malformed offsets: {problem}") from problem
    return group, _places(data, at, kind, most)


def _places(data: bytes, at: int, kind: Struct, most: int) -> _Places:
    """Each topic with what follows it."""
    try:
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        if not 0 <= count <= most:
            raise RequestError(
                f"{count} {'topics' if kind is _NOTHING else 'queues'}: at most {most} are taken at once"
            )
        places = []
        for _ in range(count):
            topic, at = read_text(data, at)
            places.append((topic, kind.unpack_from(data, at)))
            at += kind.size
    except (error, IndexError, UnicodeDecodeError) as problem:
        raise RequestError(f"malformed offsets: {problem}") from problem
    if at != len(data):
        raise RequestError(f"malformed offsets: {len(data) - at} bytes after the last queue")
    return places


@record(frozen=True, slots=True)
class TimedMessageBody(Body):
    """One message. Times are ms since 1970."""

    topic: str
    queue_id: Int32
    due_ms: Int64
    message_id: str
    keys: str
    tags: str
    size: Int32
    born_ms: Int64
    handle: str


@record(frozen=True, slots=True)
class TimedMessagesBody(Body):
    """Some messages by due time, and how many there are.

    There may be more, from ``next_ms`` and ``next_offset`` on; -1: there are none. ``next_due_ms``: when the next of
    all is due.
    """

    messages: tuple[TimedMessageBody, ...]
    next_ms: Int64
    next_offset: Int64
    open: Int64
    late: Int64
    next_due_ms: Int64
