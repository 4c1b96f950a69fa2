"""The keys of records, and their hashes, thousands at a time.

A record is indexed under ``topic#key`` for its unique key and for each of its business keys, in this order. The hash is
Java's ``String.hashCode`` made non-negative. It is linear, ``h(a + b) = h(a) * 31**len(b) + h(b)``, so the part before
the key is hashed once per topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rocketstore.config import KEYS_INDEXED_MAX
from rocketstore.message.columns import Hashes, Places, PropertyTexts, RecordColumns, Values
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_UNIQUE_KEY, SYS_FLAG_ROLLED_BACK, SYS_FLAG_TRANSACTION
from rocketstore.message.properties import find_property_bytes, java_hash
from rocketstore.types import RecordHead

_UNIQUE: Final = PROPERTY_UNIQUE_KEY.encode() + b"\x01"
_KEYS: Final = PROPERTY_KEYS.encode() + b"\x01"
_MASK: Final = 0xFFFF_FFFF
_MIN: Final = -(1 << 31)
_CACHED_TOPICS: Final = 100_000


class TopicHashes(dict[str, int]):
    """The unsigned hash of ``topic#`` per topic, computed once."""

    def __missing__(self, topic: str) -> int:
        if len(self) >= _CACHED_TOPICS:
            self.clear()
        value = self[topic] = java_hash(f"{topic}#") & _MASK
        return value


def key_hash(topic: str, key: str) -> int:
    """The stored hash of a topic's key: 0 to 2**31 - 1."""
    return _positive(java_hash(f"{topic}#{key}"))


def key_hashes(heads: Sequence[RecordHead], topics: TopicHashes) -> tuple[NDArray[np.int32], Places]:
    """The hashes of all keys of ``heads``, in order, and for each hash the number of its head.

    Rolled-back records have no keys.
    """
    if isinstance(heads, RecordColumns):
        texts = heads.properties
        names = set(heads.topics)
        if len(names) == 1:
            return hashes_in(texts, np.full(len(heads), topics[names.pop()], np.uint32))
        return hashes_in(texts, np.fromiter([topics[name] for name in heads.topics], np.uint32, len(heads)))
    # Fields by number, not by name: this runs for every message.
    strings = [head[9] if head[7] & SYS_FLAG_TRANSACTION != SYS_FLAG_ROLLED_BACK else b"" for head in heads]
    prefixes = np.fromiter([topics[head[0]] for head in heads], np.uint32, len(heads))
    return hashes_in(PropertyTexts.of(strings), prefixes)


def hashes_of(head: RecordHead, topics: TopicHashes) -> list[int]:
    """The same for one record, without arrays."""
    properties = head[9]
    if not properties or head[7] & SYS_FLAG_TRANSACTION == SYS_FLAG_ROLLED_BACK:
        return []
    unique = find_property_bytes(properties, _UNIQUE)
    keys = find_property_bytes(properties, _KEYS)
    found = [] if unique is None else [unique]
    if keys is not None:
        found += [word for word in keys.split(b" ") if word][:KEYS_INDEXED_MAX]
    prefix = topics[head[0]]
    return [_positive(java_hash(key.decode(errors="replace"), prefix)) for key in found]


def hashes_in(properties: PropertyTexts, prefixes: Hashes) -> tuple[NDArray[np.int32], Places]:
    """Like ``key_hashes``, for records that have keys; ``prefixes`` are the ``TopicHashes`` of their topics."""
    unique = properties.named(_UNIQUE)
    keys = properties.named(_KEYS)
    words = _first_of_each(properties.words(keys), len(keys.owners))
    values = properties.in_order(unique, words)  # a record's unique key is first
    signed = properties.hashes(values, prefixes).view(np.int32)
    return np.where(signed == _MIN, np.int32(0), np.abs(signed)), values.owners


def _first_of_each(words: Values, records: int) -> Values:
    """At most ``KEYS_INDEXED_MAX`` words of each record; ``records`` have some."""
    owners = words.owners
    if len(owners) - records < KEYS_INDEXED_MAX:  # none can have more
        return words
    rank = np.arange(len(owners)) - np.searchsorted(owners, owners, "left")
    kept = rank < KEYS_INDEXED_MAX
    return Values(words.begins[kept], words.ends[kept], owners[kept])


def _positive(value: int) -> int:
    """Java's ``Math.abs``, with 0 for the number without a positive counterpart."""
    return 0 if value == _MIN else abs(value)
