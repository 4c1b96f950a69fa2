"""The bodies of ``QUEUE_NUMBERS_TOPIC``: what queue offset the next message of every queue gets.

A *set* describes all queues, in one message or in several parts, one after the other in the log. All integers are
big-endian; the CRC32C covers all before it:

    0        4         6      8       10       12       20       28
    +--------+---------+------+-------+--------+--------+--------+---------------------------+-------+
    | "RSQN" | version | part | parts | zero 2 | covers | set id | topics …                  | crc 4 |
    +--------+---------+------+-------+--------+--------+--------+---------------------------+-------+
    a topic: | name bytes 1 | name | queues 4 | per queue: queue id 4, next queue offset 8 |

``covers``: every record of the log before this offset is counted. So the next offsets at the end of a log are those of
a set, or what the records from ``covers`` on say, whichever is higher. A set may count more than ``covers`` says, never
more than the log holds before its own first message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final

from crc32c import crc32c

from dledger.errors import InvalidRequestError
from rocketstore.types import QueueKey

VERSION: Final = 1
NEXT_OFFSET_MAX: Final = 1 << 56
"""At 20 bytes per message, the position in the queue still fits a file offset."""
_MAGIC: Final = b"RSQN"
_HEAD: Final = Struct(">4sHHHHqq")
_COUNT: Final = Struct(">I")
_QUEUE: Final = Struct(">Iq")
_CRC: Final = Struct(">I")


@dataclass(frozen=True, slots=True)
class NumberingPart:
    """One message of a set."""

    covers: int
    set_id: int
    part: int
    parts: int
    next_offsets: Mapping[QueueKey, int]


def encode_numbering(next_offsets: Mapping[QueueKey, int], *, covers: int, set_id: int, bytes_max: int) -> list[bytes]:
    """The bodies of a set, of at most about ``bytes_max`` bytes each; at least one."""
    chunks: list[list[bytes]] = [[]]
    used = _HEAD.size + _CRC.size
    for packed in _topics(next_offsets, bytes_max - used):
        if chunks[-1] and used + len(packed) > bytes_max:
            chunks.append([])
            used = _HEAD.size + _CRC.size
        chunks[-1].append(packed)
        used += len(packed)
    bodies = []
    for part, chunk in enumerate(chunks):
        body = b"".join((_HEAD.pack(_MAGIC, VERSION, part, len(chunks), 0, covers, set_id), *chunk))
        bodies.append(body + _CRC.pack(crc32c(body)))
    return bodies


def _topics(next_offsets: Mapping[QueueKey, int], bytes_max: int) -> Iterator[bytes]:
    """Each topic with its queues; one with very many queues in several pieces."""
    topics: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for (topic, queue_id), offset in next_offsets.items():
        if offset > 0:
            topics[topic].append((queue_id, offset))
    for topic, queues in sorted(topics.items()):
        name = topic.encode()
        at_once = max(1, (bytes_max - 1 - len(name) - _COUNT.size) // _QUEUE.size)
        queues.sort()
        for first in range(0, len(queues), at_once):
            piece = queues[first : first + at_once]
            head = bytes([len(name)]) + name + _COUNT.pack(len(piece))
            yield head + b"".join(_QUEUE.pack(*queue) for queue in piece)


def decode_numbering(body: bytes) -> NumberingPart:
    """Parse a body. Raises ``InvalidRequestError`` if it is not part of a set readable by this version."""
    end = len(body) - _CRC.size
    if end < _HEAD.size or crc32c(body[:end]) != _CRC.unpack_from(body, end)[0]:
        raise InvalidRequestError("queue numbers: too short, or the checksum is wrong")
    magic, version, part, parts, _, covers, set_id = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != VERSION:
        raise InvalidRequestError(f"queue numbers: {magic!r} version {version}; this version supports {VERSION}")
    if not part < parts or covers < 0:
        raise InvalidRequestError(f"queue numbers: part {part} of {parts}, covering {covers}")
    try:
        found = dict(_queues(body, end))
    except (StructError, IndexError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"queue numbers: {error}") from error
    if any(not 0 < offset <= NEXT_OFFSET_MAX for offset in found.values()):
        raise InvalidRequestError("queue numbers: a queue offset is out of range")
    return NumberingPart(covers, set_id, part, parts, found)


def _queues(body: bytes, end: int) -> Iterator[tuple[QueueKey, int]]:
    at = _HEAD.size
    while at < end:
        length = body[at]
        topic = body[at + 1 : at + 1 + length].decode()
        at += 1 + length
        (count,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        if count * _QUEUE.size > end - at:
            raise IndexError("a topic's queues extend beyond the end")
        for queue_id, offset in _QUEUE.iter_unpack(body[at : at + count * _QUEUE.size]):
            yield (topic, queue_id), offset
        at += count * _QUEUE.size
