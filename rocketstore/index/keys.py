"""The keys that records are found by, and their hashes, thousands at a time.

A record is indexed under ``topic#key`` for its unique key and for each of its business keys, in this order. The hash is
Java's ``String.hashCode`` made non-negative. It is linear, ``h(a + b) = h(a) * 31**len(b) + h(b)``, so that the part
before the key is hashed once per topic.

The keys of a batch are found and hashed in arrays, without making an object of any: all property strings are joined,
and with ``s[n]`` the sum of ``c[i] / 31**i`` over the first n bytes (31 is odd and so has an inverse modulo 2**32), the
key from byte a to b hashes to ``31**(b-1) * (s[b] - s[a])``. Properties that are not ASCII go a plainer and slower way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_UNIQUE_KEY, SYS_FLAG_ROLLED_BACK, SYS_FLAG_TRANSACTION
from rocketstore.message.tags import java_hash
from rocketstore.types import RecordHead

_UNIQUE: Final = PROPERTY_UNIQUE_KEY.encode() + b"\x01"
_KEYS: Final = PROPERTY_KEYS.encode() + b"\x01"
_SEPARATOR: Final = 2
_SPACE: Final = 32
_JOINED_BYTES_MAX: Final = 1 << 18
"""How much is hashed in one step; properties of one record are at most 32767 bytes."""
_MASK: Final = 0xFFFF_FFFF
_MIN: Final = -(1 << 31)
_CACHED_TOPICS: Final = 100_000
_Places = NDArray[np.int64]


def _powers(base: int) -> NDArray[np.uint32]:
    powers = np.full(_JOINED_BYTES_MAX + 1, base, np.uint32)
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint32)


_POWERS: Final = _powers(31)
_INVERSE_POWERS: Final = _powers(pow(31, -1, 1 << 32))


class TopicHashes(dict[str, int]):
    """The hash of ``topic#`` per topic, as an unsigned number; computed once."""

    def __missing__(self, topic: str) -> int:
        if len(self) >= _CACHED_TOPICS:
            self.clear()
        value = self[topic] = java_hash(f"{topic}#") & _MASK
        return value


def key_hash(topic: str, key: str) -> int:
    """What an index file stores for one key of a topic: 0 to 2**31 - 1."""
    return _positive(java_hash(f"{topic}#{key}"))


def key_hashes(heads: Sequence[RecordHead], topics: TopicHashes) -> tuple[NDArray[np.int32], _Places]:
    """The hashes of all keys of ``heads``, in order, and for each hash the number of the head it belongs to.

    Records that were rolled back have no keys.
    """
    hashes: list[NDArray[np.int32]] = []
    owners: list[_Places] = []
    for start, properties in _steps(heads):
        part = heads[start : start + len(properties)]
        step_hashes, step_owners = _hash_step(part, properties, topics)
        hashes.append(step_hashes)
        owners.append(step_owners + start)
    if len(hashes) == 1:
        return hashes[0], owners[0]
    return np.concatenate([np.empty(0, np.int32), *hashes]), np.concatenate([np.empty(0, np.int64), *owners])


def _steps(heads: Sequence[RecordHead]) -> Iterator[tuple[int, list[bytes]]]:
    """Property strings to be hashed in one step, and the number of the head they begin with."""
    # Fields by number, not by name: this runs for every message.
    every = [head[9] if head[7] & SYS_FLAG_TRANSACTION != SYS_FLAG_ROLLED_BACK else b"" for head in heads]
    average = sum(map(len, every)) // max(len(every), 1) + 1
    start, count = 0, max(1, _JOINED_BYTES_MAX * 3 // 4 // average)
    while start < len(every):
        part = every[start : start + count]
        while len(part) > 1 and sum(map(len, part)) + len(part) > _JOINED_BYTES_MAX - 16:
            part = part[: len(part) // 2]
        yield start, part
        start += len(part)


def _hash_step(
    heads: Sequence[RecordHead], properties: list[bytes], topics: TopicHashes
) -> tuple[NDArray[np.int32], _Places]:
    joined = b"\x02".join([b"", *properties, b"\0" * len(_UNIQUE)])
    if not joined.isascii() or len(joined) > _JOINED_BYTES_MAX:
        return _hash_plainly(heads, properties)
    text = np.frombuffer(joined, np.uint8)
    starts, ends, owners = _find_keys(text, properties)
    sums = np.zeros(len(text) + 1, np.uint32)
    np.cumsum(text * _INVERSE_POWERS[: len(text)], dtype=np.uint32, out=sums[1:])
    prefixes = np.fromiter([topics[head[0]] for head in heads], np.uint32, len(heads))
    hashes = prefixes[owners] * _POWERS[ends - starts] + (sums[ends] - sums[starts]) * _POWERS[ends - 1]
    signed = hashes.view(np.int32)
    return np.where(signed == _MIN, np.int32(0), np.abs(signed)), owners


def _find_keys(text: NDArray[np.uint8], properties: list[bytes]) -> tuple[_Places, _Places, _Places]:
    """Where in the joined properties keys begin and end, and whose they are; in the order of the index."""
    separators = np.flatnonzero(text == _SEPARATOR)
    starts, ends = separators[:-1] + 1, separators[1:]
    lengths = np.fromiter(map(len, properties), np.int64, len(properties))
    owner_ends = np.cumsum(lengths + 1)  # each string ends with the separator at this place
    unique = _named(text, starts, ends, _UNIQUE, owner_ends)
    keys = _split(text, *_named(text, starts, ends, _KEYS, owner_ends))
    owners = np.concatenate((unique[2], keys[2]))
    order = np.argsort(owners, kind="stable")  # a record's unique key comes first
    return np.concatenate((unique[0], keys[0]))[order], np.concatenate((unique[1], keys[1]))[order], owners[order]


def _named(
    text: NDArray[np.uint8], starts: _Places, ends: _Places, name: bytes, owner_ends: _Places
) -> tuple[_Places, _Places, _Places]:
    """The values of the properties called ``name``; of several of one owner the last that is not empty."""
    found = np.flatnonzero(text[starts] == name[0])
    for number in range(1, len(name)):
        found = found[text[starts[found] + number] == name[number]]
    starts, ends = starts[found] + len(name), ends[found]
    filled = starts < ends
    starts, ends = starts[filled], ends[filled]
    owners = np.searchsorted(owner_ends, ends)
    last = np.append(owners[1:] != owners[:-1], True)[: len(owners)]
    return starts[last], ends[last], owners[last]


def _split(
    text: NDArray[np.uint8], starts: _Places, ends: _Places, owners: _Places
) -> tuple[_Places, _Places, _Places]:
    """The words between single spaces, but for the empty ones."""
    spaces = np.flatnonzero(text == _SPACE)
    if not len(spaces) or not len(starts):
        return starts, ends, owners
    of = np.searchsorted(starts, spaces, "right") - 1
    inside = (of >= 0) & (spaces < ends[of])
    spaces, of = spaces[inside], of[inside]
    # Values lie apart and in order, so that sorted starts and sorted ends pair up.
    word_starts = np.sort(np.concatenate((starts, spaces + 1)))
    word_ends = np.sort(np.concatenate((ends, spaces)))
    word_owners = np.sort(np.concatenate((owners, owners[of])))
    filled = word_starts < word_ends
    return word_starts[filled], word_ends[filled], word_owners[filled]


def _hash_plainly(heads: Sequence[RecordHead], properties: list[bytes]) -> tuple[NDArray[np.int32], _Places]:
    hashes: list[int] = []
    owners: list[int] = []
    for number, text in enumerate(properties):
        values = dict[bytes, bytes]()
        for part in text.split(b"\x02"):
            for name in (_UNIQUE, _KEYS):
                if part.startswith(name) and len(part) > len(name):
                    values[name] = part[len(name) :]
        for key in (values.get(_UNIQUE, b""), *values.get(_KEYS, b"").split(b" ")):
            if key:
                hashes.append(key_hash(heads[number].topic, key.decode("utf-8", "replace")))
                owners.append(number)
    return np.array(hashes, np.int32), np.array(owners, np.int64)


def _positive(value: int) -> int:
    """Java's ``Math.abs``, with 0 for the one number that has no positive counterpart."""
    return 0 if value == _MIN else abs(value)
