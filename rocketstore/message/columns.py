"""Many records of the log at once, as columns: the usual input of queues and index.

Reading record by record (``rocketstore.message.scan``) costs 2 µs each, on every node of a group; here only finding the
starts of records is a loop. Unusual cases are left to ``scan``, which reads the same bytes with the same result: few
records, IPv6 hosts, long topics, transactions, delayed messages, interspersed NOOPs and blanks, and anything
inconsistent, which ``scan`` describes.

Property strings are in one array, too: parsed, searched and hashed without an object per record. They are joined, each
preceded by a 0x02, with one after the last. Malformed properties (no name, no value) are skipped, and of duplicates in
a record the last one counts, as in ``rocketstore.message.properties``.

Java's ``String.hashCode`` is the sum of ``31**(n-1-i) * c[i]``. As 31 is odd, it has an inverse modulo 2**32, so with
``t[i] = c[i] / 31**i`` the text from byte a to b hashes to ``31**(b-1) * (t[a] + … + t[b-1])``. Only non-ASCII texts
are hashed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, overload
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.records import ENTRY, ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL
from rocketstore.message.message import SYS_FLAG_TRANSACTION, DelayLevels
from rocketstore.message.properties import java_hash
from rocketstore.message.record import (
    CRC_MASK,
    HEAD_V4,
    HEAD_V4_BYTES,
    HOST_V6_FLAGS,
    MESSAGE_MAGIC,
    OVERHEAD,
    tails_of,
)
from rocketstore.message.scan import (
    ENTRY_MAGIC,
    RecordScanOutcome,
    WalkEnd,
    known_topic,
    record_starts,
    scan_ended,
    scan_entries,
    scan_records,
    why_ended,
)
from rocketstore.types import SCHEDULE_TOPIC, RecordHead

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


POWERS: Final = _powers(31)
INVERSE_POWERS: Final = _powers(pow(31, -1, 1 << 32))
"""Of 31 and of its inverse, modulo 2**32, for Java's hashes of up to 65,536 code units."""


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
        terms = self.text[base:last] * INVERSE_POWERS[: last - base]
        bounds = np.empty(2 * len(begins), np.int64)
        np.subtract(begins, base, out=bounds[::2])
        np.subtract(ends, base, out=bounds[1::2])
        sums = np.add.reduceat(terms, bounds)[::2]  # the others are those of the gaps between values
        hashes *= POWERS[ends - begins]
        hashes += sums * POWERS[bounds[1::2] - 1]

    def _others(self, begins: Places, ends: Places) -> list[int]:
        """The numbers of non-ASCII values."""
        odd = np.zeros(len(self.text) + 1, np.int64)
        np.cumsum(self.text > _ASCII_MAX, out=odd[1:])
        numbers: list[int] = np.flatnonzero(odd[ends] > odd[begins]).tolist()
        return numbers


FEWEST: Final = 96
"""Fewer records than this are faster to read one by one."""
_UNUSUAL_FLAGS: Final = HOST_V6_FLAGS | SYS_FLAG_TRANSACTION
_CUT_OFF: Final = (WalkEnd.LIMIT, WalkEnd.CUT)
_ENTRY_ROW: Final = ENTRY.dtype()
_ROW: Final = HEAD_V4.dtype()

Ints = NDArray[np.int64]


class UnitColumns(NamedTuple):
    """The data of its records that a consume queue stores, in log order, and their queue offsets."""

    topic: str
    queue_id: int
    queue_offsets: Ints
    offsets: Ints
    sizes: Ints
    tags_codes: Ints

    def select(self, wanted: NDArray[np.bool_]) -> UnitColumns:
        """A selection of them."""
        return UnitColumns(self.topic, self.queue_id, *(column[wanted] for column in self[2:]))


class RecordColumns(Sequence[RecordHead]):
    """Records in log order, each of which belongs to a queue. As a sequence, it creates record heads on demand."""

    def __init__(self, topics: list[str], fields: NDArray[np.void], strings: Callable[[], list[bytes]]) -> None:
        """``strings``: takes their property strings out of the data, for those who need them."""
        self.topics = topics
        """The topic of each."""
        self._fields = fields
        self._strings = strings

    def __len__(self) -> int:
        return len(self.topics)

    def column(self, name: str) -> Ints:
        """A field of each head, as stored in the log."""
        return self._fields[name].astype(np.int64)

    @cached_property
    def properties(self) -> PropertyTexts:
        """The properties of each."""
        return PropertyTexts.of(self._strings())

    @cached_property
    def offsets(self) -> Ints:
        """Physical offsets of the records, without the surrounding entries."""
        return self.column("physical_offset")

    @cached_property
    def sizes(self) -> Ints:
        """Lengths of the records."""
        return self.column("size")

    @cached_property
    def store_timestamps(self) -> Ints:
        """The store timestamps (ms)."""
        return self.column("store_timestamp")

    @cached_property
    def tags_codes(self) -> Ints:
        """The tags codes for consume queues."""
        return self.properties.tags_codes()

    @cached_property
    def by_queue(self) -> list[UnitColumns]:
        """The records grouped by queue."""
        names = list(dict.fromkeys(self.topics))
        queues = self.column("queue_id")
        if len(names) > 1:
            numbers = {name: number << 32 for number, name in enumerate(names)}
            queues += np.fromiter(map(numbers.__getitem__, self.topics), np.int64, len(self))
        order = np.argsort(queues, kind="stable")
        queues = queues[order]
        columns = [one[order] for one in (self.column("queue_offset"), self.offsets, self.sizes, self.tags_codes)]
        bounds = [0, *(np.flatnonzero(np.diff(queues)) + 1).tolist(), len(self)]
        found = []
        for first, end in pairwise(bounds):
            queue = int(queues[first])
            found.append(
                UnitColumns(names[queue >> 32], queue & 0xFFFF_FFFF, *(column[first:end] for column in columns))
            )
        return found

    @overload
    def __getitem__(self, at: int) -> RecordHead: ...

    @overload
    def __getitem__(self, at: slice) -> list[RecordHead]: ...

    def __getitem__(self, at: int | slice) -> RecordHead | list[RecordHead]:
        if isinstance(at, slice):
            return list(self)[at]
        number = range(len(self))[at]
        return next(self._heads(number, number + 1))

    def __iter__(self) -> Iterator[RecordHead]:
        return self._heads(0, len(self))

    def __eq__(self, other: object) -> bool:
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # it compares as a list does

    def _heads(self, first: int, end: int) -> Iterator[RecordHead]:
        part = slice(first, end)
        fields = self._fields[part]
        return map(
            RecordHead._make,
            zip(
                self.topics[part],
                fields["queue_id"].tolist(),
                fields["physical_offset"].tolist(),
                fields["size"].tolist(),
                self.tags_codes[part].tolist(),
                fields["store_timestamp"].tolist(),
                fields["queue_offset"].tolist(),
                fields["sys_flag"].tolist(),
                fields["prepared_offset"].tolist(),
                map(self.properties.string, range(first, end)),
                strict=True,
            ),
        )


def topics_of(heads: Sequence[RecordHead]) -> Collection[str]:
    """The topic of each record."""
    return heads.topics if isinstance(heads, RecordColumns) else [head[0] for head in heads]


def sizes_of(heads: Sequence[RecordHead]) -> Collection[int]:
    """The length of each record."""
    return heads.sizes.tolist() if isinstance(heads, RecordColumns) else [head[3] for head in heads]


def read_records(data: bytes, base_offset: int, *, delay_levels: DelayLevels | None = None) -> RecordScanOutcome:
    """Like ``scan_records`` without checking CRCs, and faster for many ordinary records."""
    if len(data) >= FEWEST * OVERHEAD:
        starts, end = record_starts(data, "plain", 0, len(data))
        why = why_ended(data, "plain", end, len(data))
        if len(starts) >= FEWEST and why[0] in _CUT_OFF:
            found = _columns(data, np.array(starts, np.int64), np.array([*starts[1:], end], np.int64), base_offset)
            if found is not None:
                return scan_ended(found, end, base_offset, why)
    return scan_records(data, base_offset, check_crc=False, delay_levels=delay_levels)


def read_sound_records(data: bytes, base_offset: int, *, delay_levels: DelayLevels | None = None) -> RecordScanOutcome:
    """Like ``scan_records`` with checking CRCs, and faster for many ordinary records."""
    found = read_records(data, base_offset, delay_levels=delay_levels)
    if not found.heads or (
        isinstance(found.heads, RecordColumns) and _bodies_are_sound(data, found.heads, base_offset)
    ):
        return found
    return scan_records(data, base_offset, check_crc=True, delay_levels=delay_levels)


def _bodies_are_sound(data: bytes, heads: RecordColumns, base_offset: int) -> bool:
    """Whether all bodies match their CRCs."""
    view = memoryview(data)
    starts = (heads.offsets - base_offset).tolist()
    for at, length, crc in zip(starts, heads.column("body_length").tolist(), heads.column("crc").tolist(), strict=True):
        body = at + HEAD_V4_BYTES
        if crc32(view[body : body + length]) & CRC_MASK != crc:
            return False
    return True


def read_entries(data: bytes, base_offset: int, *, delay_levels: DelayLevels | None = None) -> RecordScanOutcome:
    """Like ``scan_entries`` without checking CRCs, and faster for many ordinary records."""
    if len(data) >= FEWEST * (ENTRY_HEADER_BYTES + OVERHEAD):
        starts, end = record_starts(data, "entry", 0, len(data))
        why = why_ended(data, "entry", end, len(data))
        if len(starts) >= FEWEST and why[0] in _CUT_OFF:
            found = _columns_of_entries(data, np.array([*starts, end], np.int64), base_offset)
            if found is not None:
                return scan_ended(found, end, base_offset, why)
    return scan_entries(data, base_offset, check_crc=False, delay_levels=delay_levels)


def _gathered(data: bytes, starts: Ints, layout: np.dtype[np.void]) -> NDArray[np.void]:
    """The structures at ``starts``: gathered as opaque bytes, because numpy gathers structures field by field."""
    width = layout.itemsize
    everywhere = np.ndarray((len(data) - width + 1,), f"V{width}", data, strides=(1,))
    return everywhere[starts].view(layout)


def _columns_of_entries(data: bytes, bounds: Ints, base_offset: int) -> RecordColumns | None:
    """The records in the entries between these bounds; None unless all are ordinary."""
    starts, ends = bounds[:-1], bounds[1:]
    entries = _gathered(data, starts, _ENTRY_ROW)
    first = int(entries["index"][0])
    if not (
        (entries["magic"] == ENTRY_MAGIC).all()
        and (entries["body_length"] == ends - starts - ENTRY_HEADER_BYTES).all()
        and int(entries["body_length"].min()) >= OVERHEAD
        and (entries["position"] == starts + base_offset).all()
        and (entries["index"] == np.arange(first, first + len(starts))).all()
        and (entries["channel"] != NOOP_CHANNEL).all()
    ):
        return None
    return _columns(data, starts + ENTRY_HEADER_BYTES, ends, base_offset)


def _columns(data: bytes, starts: Ints, ends: Ints, base_offset: int) -> RecordColumns | None:
    """The records between these places; None unless all are ordinary."""
    window = np.frombuffer(data, np.uint8)
    fields = _gathered(data, starts, _ROW)
    if not (
        (fields["size"] == ends - starts).all()
        and (fields["physical_offset"] == starts + base_offset).all()
        and (fields["magic"] == MESSAGE_MAGIC).all()
        and not (fields["sys_flag"] & _UNUSUAL_FLAGS).any()
        and int(fields["queue_offset"].min()) >= 0
        and int(fields["queue_id"].min()) >= 0
        and int(fields["body_length"].min()) >= 0
    ):
        return None
    tails = tails_of(window, fields["magic"], starts + HEAD_V4_BYTES + fields["body_length"])
    if not tails.fill(fields["magic"], ends).all():
        return None
    names = _topics(data, window, tails.topic_begins, tails.topic_ends)
    if names is None:
        return None
    begins = tails.property_begins

    def strings() -> list[bytes]:
        return [data[at:behind] for at, behind in zip(begins.tolist(), ends.tolist(), strict=True)]

    return RecordColumns(names, fields, strings)


def _topics(data: bytes, window: NDArray[np.uint8], begins: Ints, ends: Ints) -> list[str] | None:
    """The topics between these places; None unless all are valid and ordinary."""
    first, length = int(begins[0]), int(ends[0] - begins[0])
    if (ends - begins == length).all():
        names = window[begins[:, np.newaxis] + np.arange(length)]
        if (names == names[0]).all():
            topic = known_topic(data[first : first + length])
            return None if topic is None or topic == SCHEDULE_TOPIC else [topic] * len(begins)
    encoded = [data[at:behind] for at, behind in zip(begins.tolist(), ends.tolist(), strict=True)]
    known: dict[bytes, str] = {}
    for name in set(encoded):
        topic = known_topic(name)
        if topic is None or topic == SCHEDULE_TOPIC:
            return None
        known[name] = topic
    return [known[name] for name in encoded]
