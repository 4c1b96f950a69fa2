"""Derives what a broker's dispatch derives from records: units of consume queues, and keys with their hashes.

Anything that would stop dispatch is an error here, too: an inconsistent record is not skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dledger.values import MIB
from dledger_spark.decode.layout import Ints, Mask, slices
from dledger_spark.decode.records import DecodeContext, Records, rows_of
from dledger_spark.directory import Split, splits
from dledger_spark.errors import BrokenRecordError
from rocketstore.consume_queue.files import UNIT
from rocketstore.index.format import KEY, TopicHashes, hashes_in
from rocketstore.message.checks import check_topic
from rocketstore.message.message import SYS_FLAG_ROLLED_BACK, SYS_FLAG_TRANSACTION, DelayLevels, parse_level
from rocketstore.message.properties import find_property
from rocketstore.types import SCHEDULE_TOPIC

RECORDS_AT_ONCE: Final = 16_384
"""Enough to make numpy's overhead negligible, few enough for the processor's cache."""
PROPERTY_BYTES_AT_ONCE: Final = 4 * MIB
"""The same for records with long properties: each byte may become a key, for which several arrays are made."""
_NO_PLACE_IN_QUEUE: Final = 0x4
"""Set in the system flag of prepared and rolled-back messages only, which are not in queues."""
_QUEUE_ID_BITS: Final = 32


class UnitRun(NamedTuple):
    """Units of one queue in log order: their queue offsets (little-endian int64) and the units themselves.

    ``position`` is the physical offset of the first unit's record.
    """

    topic: str
    queue_id: int
    position: int
    offsets: bytes
    units: bytes

    @property
    def numbers(self) -> Ints:
        """``offsets`` as integers."""
        return np.frombuffer(self.offsets, "<i8")


@dataclass(frozen=True, slots=True)
class QueueColumns:
    """Columns for consume queues, with one number per record that belongs to a queue, in log order."""

    topics: tuple[bytes, ...]
    """The distinct topics, to which ``topic`` refers by number."""
    topic: Ints
    queue_id: Ints
    queue_offset: Ints
    units: NDArray[np.void]

    def select(self, wanted: Mask) -> QueueColumns:
        """Only the wanted records."""
        numbers = self.topic[wanted], self.queue_id[wanted], self.queue_offset[wanted]
        return QueueColumns(self.topics, *numbers, self.units[wanted])


def records_of(split: Split) -> Iterator[Records]:
    """The messages of a split, up to some thousand at a time, all intact. Raises ``BrokenRecordError``."""
    context = DecodeContext(split.framing, "message", segment=split.segment, segment_base=split.segment_base)
    for stretch in splits.runs(split):
        for at in range(0, len(stretch.starts), RECORDS_AT_ONCE):
            starts = stretch.starts[at : at + RECORDS_AT_ONCE]
            records = rows_of(stretch.window, starts, replace(context, base=stretch.base))
            _check_whole(records)
            yield from pieces(records, PROPERTY_BYTES_AT_ONCE)


def pieces(records: Records, property_bytes: int) -> Iterator[Records]:
    """Non-empty pieces of whole records with at most so many bytes of properties, or one record that has more."""
    ends = np.cumsum(records.tails.property_lengths)
    first = 0
    while first < len(records):
        before = int(ends[first - 1]) if first else 0
        behind = max(int(np.searchsorted(ends, before + property_bytes, "right")), first + 1)
        numbers = np.arange(len(records))
        yield records.select((numbers >= first) & (numbers < behind))
        first = behind


def _check_whole(records: Records) -> None:
    """Raise ``BrokenRecordError`` for the first broken record, with its segment and offset."""
    broken = records.broken | records.broken_tail
    if broken.any():
        row = int(np.argmax(broken))
        context = records.context
        offset = int(records.positions[row]) - context.segment_base
        raise BrokenRecordError(
            f"segment {context.segment}, offset {offset}: {records.problem(row)}; a broker would stop there, "
            "too: repair the log first (dledger serve --repair), then rebuild"
        )


class Details:
    """Topics of intact records, numbered once for queues and index. There is at least one record."""

    def __init__(self, records: Records) -> None:
        self.records = records
        encoded = pc.dictionary_encode(slices(records.buffer, records.tails.topic_begins, records.tails.topic_ends))
        self.topics: tuple[bytes, ...] = tuple(encoded.dictionary.to_pylist())
        """The distinct topics."""
        self.topic: Ints = np.asarray(encoded.indices).astype(np.int64)
        """The number of each record's topic."""


def unit_columns(details: Details, levels: DelayLevels) -> QueueColumns:
    """The units of the records. Records that belong to no queue are left out."""
    records = details.records
    units = np.empty(len(records), UNIT)
    units["offset"] = records.field("physical_offset")
    units["size"] = records.field("size")
    units["tags_code"] = _codes(details, levels)
    columns = QueueColumns(
        details.topics, details.topic, records.field("queue_id"), records.field("queue_offset"), units
    )
    placed = records.field("sys_flag") & _NO_PLACE_IN_QUEUE == 0
    return columns if placed.all() else columns.select(placed)


def _codes(details: Details, levels: DelayLevels) -> Ints:
    """Hash codes of tags, 0 without; for delayed messages, their delivery time."""
    properties = details.records.properties
    codes = properties.tags_codes()
    schedule = SCHEDULE_TOPIC.encode()
    if schedule in details.topics:
        stored = details.records.field("store_timestamp")
        for row in np.flatnonzero(details.topic == details.topics.index(schedule)).tolist():
            level = parse_level(find_property(properties.string(row), "DELAY") or "")
            if level > 0:
                codes[row] = levels.due_ms(level, int(stored[row]))
    return codes


def runs(columns: QueueColumns) -> Iterator[UnitRun]:
    """The units by queue. Impossible queues (an invalid topic name, a negative queue id) are left out."""
    queue = (columns.topic << _QUEUE_ID_BITS) | columns.queue_id
    order = np.argsort(queue, kind="stable")
    ordered = queue[order]
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    for rows in np.split(order, cuts) if len(order) else ():
        first = int(rows[0])
        topic = columns.topics[int(columns.topic[first])].decode(errors="replace")
        queue_id = int(columns.queue_id[first])
        if queue_id < 0 or check_topic(topic):
            continue
        units = columns.units[rows]
        yield UnitRun(
            topic,
            queue_id,
            int(units["offset"][0]),
            columns.queue_offset[rows].astype("<i8").tobytes(),
            units.tobytes(),
        )


def keys_of(details: Details, hashes_of: TopicHashes) -> NDArray[np.void]:
    """The keys of the records, in index order."""
    records = details.records
    known = [hashes_of[topic.decode(errors="replace")] for topic in details.topics]
    hashes, owners = hashes_in(records.properties, np.array(known, np.uint32)[details.topic])
    rolled_back = records.field("sys_flag") & SYS_FLAG_TRANSACTION == SYS_FLAG_ROLLED_BACK
    if rolled_back.any():
        kept = ~rolled_back[owners]
        hashes, owners = hashes[kept], owners[kept]
    keys = np.empty(len(hashes), KEY)
    keys["hash"] = hashes
    keys["offset"] = records.field("physical_offset")[owners]
    keys["store_ms"] = records.field("store_timestamp")[owners]
    return keys


def as_units(data: bytes) -> NDArray[np.void]:
    """Parse stored units."""
    return np.frombuffer(data, UNIT)
