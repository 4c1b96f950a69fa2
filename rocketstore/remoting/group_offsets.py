"""Offsets of a group in many queues at once, requests of ours, with the *incarnation* of the master that keeps them.

That is another number whenever a process becomes master: as long as it stays, nothing that was read from that master
has been replaced. RocketMQ's requests are about one queue each, and know nothing of it. All integers are big-endian; a
text is its length in one byte, and ASCII. A broker that answers them has announced so (``dledger.remoting.codes``).

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
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from dledger.remoting.codes import RequestError
from rocketstore.remoting.texts import encode_text, read_text

QUEUES_MAX: Final = 1024
"""In one request: a topic has no more at one broker."""
TOPICS_MAX: Final = 16_384
REACHED_MAX: Final = 1 << 20
"""Queues in an answer."""
_COUNT: Final = Struct(">i")
_QUEUE: Final = Struct(">i")
_PLACE: Final = Struct(">iq")
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
        places = (encode_text(topic) + _PLACE.pack(queue_id, offset) for topic, queue_id, offset in self.offsets)
        terms = _TERMS.pack(self.incarnation, self.rewind)
        return b"".join((terms, encode_text(self.group), _COUNT.pack(len(self.offsets)), *places))

    @staticmethod
    def decode(data: bytes) -> CommitGroupOffsets:
        """Raises ``RequestError``."""
        if len(data) < _TERMS.size:
            raise RequestError(f"malformed offsets: {len(data)} bytes")
        incarnation, rewind = _TERMS.unpack_from(data)
        group, places = _decode(data, _TERMS.size, _PLACE)
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
    places = (encode_text(topic) + _PLACE.pack(queue_id, offset) for topic, queue_id, offset in offsets)
    return b"".join((_COUNT.pack(len(offsets)), *places))


def decode_reached(data: bytes) -> list[tuple[str, int, int]]:
    """Topics, queues and offsets. Raises ``RequestError``."""
    return [(topic, queue_id, offset) for topic, (queue_id, offset) in _places(data, 0, _PLACE, REACHED_MAX)]


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
