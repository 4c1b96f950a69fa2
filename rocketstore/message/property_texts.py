"""The property strings of many records in one array: parsed, searched and hashed without an object per record.

The strings are joined, each preceded by a 0x02, with one after the last. Malformed properties (no name, no value) are
skipped, and of duplicates in a record the last one counts, as in ``rocketstore.message.properties``.

Java's ``String.hashCode`` is the sum of ``31**(n-1-i) * c[i]``. As 31 is odd, it has an inverse modulo 2**32, so with
``t[i] = c[i] / 31**i`` the text from byte a to b hashes to ``31**(b-1) * (t[a] + … + t[b-1])``. Only non-ASCII texts
are hashed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketstore.message.tags import java_hash

Places = NDArray[np.int64]
Hashes = NDArray[np.uint32]
PADDING: Final = b"\x02" + b"\0" * 15
"""Required after the last string: names may be compared beyond it."""
_NAME_END: Final = 1
_SEPARATOR: Final = 2
_SPACE: Final = 32
_ASCII_MAX: Final = 127
_TAGS: Final = b"TAGS\x01"
_HEAD_BYTES: Final = 8
_MASK: Final = 0xFFFF_FFFF
_STEP_BYTES: Final = 1 << 16
"""How much is hashed per step, so that the numbers stay in the cache."""


def _powers(base: int) -> Hashes:
    powers = np.full(_STEP_BYTES + 1, base, np.uint32)
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint32)


_POWERS: Final = _powers(31)
_INVERSE_POWERS: Final = _powers(pow(31, -1, 1 << 32))


class Values(NamedTuple):
    """Non-empty parts of the joined strings: where each starts and ends, and its record."""

    begins: Places
    ends: Places
    owners: Places


class PropertyBounds(NamedTuple):
    """The bounds of names and values; a value begins one byte after its name ends."""

    names: Places
    name_ends: Places
    ends: Places
    owners: Places


class PropertyTexts:
    """The joined strings. ``ends`` are the positions of the separators after each of them."""

    def __init__(self, text: NDArray[np.uint8], ends: Places) -> None:
        """``text`` ends with ``PADDING``, whose first byte is the last separator."""
        self.text = text
        self._ends = ends

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> PropertyTexts:
        """Join them."""
        joined = b"\x02".join((b"", *strings)) + PADDING
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(np.frombuffer(joined, np.uint8), np.cumsum(lengths + 1))

    def __len__(self) -> int:
        return len(self._ends)

    def string(self, number: int) -> bytes:
        """One of the strings."""
        begin = int(self._ends[number - 1]) if number else 0
        return self.text[begin + 1 : int(self._ends[number])].tobytes()

    @cached_property
    def _separators(self) -> Places:
        found: Places = np.flatnonzero(self.text == _SEPARATOR)
        return found

    @cached_property
    def _heads(self) -> NDArray[np.uint64]:
        """The eight bytes after each separator but the last, as a number."""
        everywhere = np.ndarray((len(self.text) - 7,), "<u8", self.text.data, strides=(1,))
        heads: NDArray[np.uint64] = everywhere[self._separators[:-1] + 1]
        return heads

    @cached_property
    def _is_ascii(self) -> bool:
        return int(self.text.max()) <= _ASCII_MAX

    @cached_property
    def bounds(self) -> PropertyBounds:
        """All properties in order, including those that a later one of the same name and record overrides."""
        begins, ends = self._separators[:-1] + 1, self._separators[1:]
        owners = np.repeat(np.arange(len(self)), np.diff(np.searchsorted(self._separators, self._ends), prepend=0))
        name_ends = np.flatnonzero(self.text == _NAME_END)
        if len(name_ends) == len(begins) and (name_ends > begins).all() and (name_ends + 1 < ends).all():
            return PropertyBounds(begins, name_ends, ends, owners)
        name_ends = np.append(name_ends, len(self.text))[np.searchsorted(name_ends, begins)]
        whole = (name_ends > begins) & (name_ends + 1 < ends)
        return PropertyBounds(begins[whole], name_ends[whole], ends[whole], owners[whole])

    def tags_codes(self) -> Places:
        """The tags code of each record, as consume queues store it: the hash of its tags; 0 without."""
        codes = np.zeros(len(self), np.int64)
        tags = self.named(_TAGS)
        codes[tags.owners] = self.hashes(tags).view(np.int32)
        return codes

    def named(self, name: bytes) -> Values:
        """The values of the properties with this name, which ends with 0x01; at most one per record, in order."""
        head = name[:_HEAD_BYTES]
        heads = self._heads if len(head) == _HEAD_BYTES else self._heads & np.uint64((1 << 8 * len(head)) - 1)
        found = np.flatnonzero(heads == int.from_bytes(head, "little"))
        for number in range(_HEAD_BYTES, len(name)):
            found = found[self.text[self._separators[found] + number + 1] == name[number]]
        begins, ends = self._separators[found] + 1 + len(name), self._separators[found + 1]
        filled = begins < ends
        begins, ends = begins[filled], ends[filled]
        owners = np.searchsorted(self._ends, ends)
        last = np.append(owners[1:] != owners[:-1], True)[: len(owners)]
        return Values(begins[last], ends[last], owners[last])

    def words(self, values: Values) -> Values:
        """The non-empty words between single spaces."""
        begins, ends, owners = values
        spaces = np.flatnonzero(self.text == _SPACE)
        if not len(spaces) or not len(begins):
            return values
        of = np.searchsorted(begins, spaces, "right") - 1
        inside = (of >= 0) & (spaces < ends[of])
        spaces, of = spaces[inside], of[inside]
        # Values are disjoint and in order, so sorted begins and sorted ends pair up.
        begins = np.sort(np.concatenate((begins, spaces + 1)))
        ends = np.sort(np.concatenate((ends, spaces)))
        owners = np.sort(np.concatenate((owners, owners[of])))
        filled = begins < ends
        return Values(begins[filled], ends[filled], owners[filled])

    def in_order(self, first: Values, second: Values) -> Values:
        """Both merged record by record, those of ``first`` before those of ``second``."""
        begins, ends, owners = (np.concatenate(pair) for pair in zip(first, second, strict=True))
        order = np.argsort(owners, kind="stable")
        return Values(begins[order], ends[order], owners[order])

    def hashes(self, values: Values, prefixes: Hashes | None = None) -> Hashes:
        """Java's hash, unsigned, of texts that end with the values, which are in record order.

        ``prefixes`` has a number per record: the hash of the text before the value.
        """
        begins, ends, owners = values
        hashes = np.zeros(len(begins), np.uint32) if prefixes is None else prefixes[owners]  # copies
        records = self._ends[owners]
        first = 0
        others = self._others(begins, ends) if not self._is_ascii else []
        while first < len(begins):
            base = int(self._ends[owners[first] - 1]) if owners[first] else 0
            behind = int(np.searchsorted(records, base + _STEP_BYTES))
            if behind > first:
                self._hash_step(base, begins[first:behind], ends[first:behind], hashes[first:behind])
            else:
                others.append(first)
            first = max(behind, first + 1)
        for number in others:
            text = self.text[begins[number] : ends[number]].tobytes().decode(errors="replace")
            prefix = 0 if prefixes is None else int(prefixes[owners[number]])
            shift = pow(31, len(text.encode("utf-16-le")) // 2, 1 << 32)
            hashes[number] = (prefix * shift + java_hash(text)) & _MASK
        return hashes

    def _hash_step(self, base: int, begins: Places, ends: Places, hashes: Hashes) -> None:
        """Values within ``_STEP_BYTES`` from ``base`` on; ``hashes`` are the prefixes'."""
        last = int(ends.max()) + 1
        terms = self.text[base:last] * _INVERSE_POWERS[: last - base]
        bounds = np.empty(2 * len(begins), np.int64)
        np.subtract(begins, base, out=bounds[::2])
        np.subtract(ends, base, out=bounds[1::2])
        sums = np.add.reduceat(terms, bounds)[::2]  # the others are those of the gaps between values
        hashes *= _POWERS[ends - begins]
        hashes += sums * _POWERS[bounds[1::2] - 1]

    def _others(self, begins: Places, ends: Places) -> list[int]:
        """The numbers of non-ASCII values."""
        odd = np.zeros(len(self.text) + 1, np.int64)
        np.cumsum(self.text > _ASCII_MAX, out=odd[1:])
        numbers: list[int] = np.flatnonzero(odd[ends] > odd[begins]).tolist()
        return numbers
