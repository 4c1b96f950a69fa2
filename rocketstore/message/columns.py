"""Many records of the log at once, as columns: the usual input of queues and index.

Reading record by record (``rocketstore.message.scan``) costs 2 µs each, on every node of a group; here only finding the
starts of records is a loop. Unusual cases are left to ``scan``, which reads the same bytes with the same result: few
records, IPv6 hosts, long topics, transactions, delayed messages, interspersed NOOPs and blanks, and anything
inconsistent, which ``scan`` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, overload
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.layout import ENTRY, ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL
from rocketstore.message.delay import DelayLevels
from rocketstore.message.message import SYS_FLAG_TRANSACTION
from rocketstore.message.property_texts import PropertyTexts
from rocketstore.message.record import (
    CRC_MASK,
    HEAD_V4,
    HEAD_V4_BYTES,
    HOST_V6_FLAGS,
    MESSAGE_MAGIC,
    OVERHEAD,
    tails_of,
)
from rocketstore.message.scan import ENTRY_MAGIC, RecordScanOutcome, known_topic, scan_ended, scan_entries, scan_records
from rocketstore.message.walk import WalkEnd, record_starts, why_ended
from rocketstore.types import SCHEDULE_TOPIC, RecordHead

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
