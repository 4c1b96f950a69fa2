"""The keys that records are found by, and their hashes, thousands at a time.

A record is indexed under ``topic#key`` for its unique key and for each of its business keys, in this order. The hash is
Java's ``String.hashCode`` made non-negative. It is linear, ``h(a + b) = h(a) * 31**len(b) + h(b)``, so that the part
before the key is hashed once per topic, and all keys of a batch at once in one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_UNIQUE_KEY, SYS_FLAG_ROLLED_BACK, SYS_FLAG_TRANSACTION
from rocketstore.types import RecordHead

_UNIQUE: Final = PROPERTY_UNIQUE_KEY.encode() + b"\x01"
_KEYS: Final = PROPERTY_KEYS.encode() + b"\x01"
_SEPARATOR: Final = 2
_POWERS_COUNT: Final = 1 << 16
"""More than the longest key there can be: properties are at most 32767 bytes."""
_POWERS: Final[NDArray[np.uint32]] = np.multiply.accumulate(
    np.array([1] + [31] * (_POWERS_COUNT - 1), dtype=np.uint32), dtype=np.uint32
)
_MIN: Final = -(1 << 31)
_CACHED_TOPICS: Final = 100_000


class TopicHashes(dict[str, int]):
    """The hash of ``topic#`` per topic, as an unsigned number; computed once."""

    def __missing__(self, topic: str) -> int:
        if len(self) >= _CACHED_TOPICS:
            self.clear()
        value = int(_hash_units(*_units([f"{topic}#".encode()]))[0])
        self[topic] = value
        return value


def key_hash(topic: str, key: str) -> int:
    """What an index file stores for one key of a topic: 0 to 2**31 - 1."""
    return int(_positive(_hash_units(*_units([f"{topic}#{key}".encode("utf-8", "replace")])))[0])


def key_hashes(heads: Sequence[RecordHead], topics: TopicHashes) -> tuple[NDArray[np.int32], list[int]]:
    """The hashes of all keys of ``heads`` in order, and how many of them belong to each head."""
    keys, counts = _keys_of(heads)
    if not keys:
        return np.empty(0, np.int32), counts
    prefixes = np.repeat(np.array([topics[head[0]] for head in heads], dtype=np.uint32), counts)
    units, lengths = _units(keys)
    return _positive(prefixes * _POWERS[lengths] + _hash_units(units, lengths)), counts


def _keys_of(heads: Sequence[RecordHead]) -> tuple[list[bytes], list[int]]:
    keys: list[bytes] = []
    counts: list[int] = []
    for head in heads:
        properties, before = head[9], len(keys)
        if head[7] & SYS_FLAG_TRANSACTION != SYS_FLAG_ROLLED_BACK:
            # rfind: of several properties of one name the last counts. What is unusual goes the slow way.
            at = properties.rfind(_UNIQUE)
            if at >= 0:
                end = properties.find(b"\x02", at)
                found = properties[at + 9 : end] if end >= 0 else properties[at + 9 :]
                if not found or (at and properties[at - 1] != _SEPARATOR):
                    found = _property(properties, _UNIQUE)
                if found:
                    keys.append(found)
            at = properties.rfind(_KEYS)
            if at >= 0:
                end = properties.find(b"\x02", at)
                found = properties[at + 5 : end] if end >= 0 else properties[at + 5 :]
                if not found or (at and properties[at - 1] != _SEPARATOR):
                    found = _property(properties, _KEYS)
                if b" " in found:
                    keys += [key for key in found.split(b" ") if key]
                elif found:
                    keys.append(found)
        counts.append(len(keys) - before)
    return keys, counts


def _property(properties: bytes, name: bytes) -> bytes:
    """The value of the last property of this name that has one; empty if there is none."""
    values = [part[len(name) :] for part in properties.split(b"\x02") if part.startswith(name)]
    return next((value for value in reversed(values) if value), b"")


def _units(keys: list[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The UTF-16 code units of all keys in a row, as Java hashes them, and the length of each."""
    joined = b"".join(keys)
    if joined.isascii():
        return np.frombuffer(joined, np.uint8).astype(np.uint32), np.fromiter(map(len, keys), np.int64, len(keys))
    wide = [key.decode("utf-8", "replace").encode("utf-16-be") for key in keys]
    units = np.frombuffer(b"".join(wide), ">u2").astype(np.uint32)
    return units, np.fromiter(map(len, wide), np.int64, len(wide)) // 2


def _hash_units(units: NDArray[np.uint32], lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    ends = np.cumsum(lengths)
    exponents = np.repeat(ends, lengths)
    exponents -= np.arange(1, len(units) + 1)
    return np.add.reduceat(units * _POWERS[exponents], ends - lengths, dtype=np.uint32)


def _positive(hashes: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Java's ``Math.abs``, with 0 for the one number that has no positive counterpart."""
    signed = hashes.view(np.int32)
    return np.where(signed == _MIN, np.int32(0), np.abs(signed))
