"""From a stretch of log to what dispatch would take from it: units of consume queues, and keys with their hashes.

What dispatch would stop at is an error here too: a record that does not add up is not stepped over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dledger.config import MIB
from dledger_spark.decode.context import DecodeContext
from dledger_spark.decode.layout import Ints, Mask
from dledger_spark.decode.records import Records, rows_of
from dledger_spark.decode.slices import slices
from dledger_spark.directory import Split, reading
from dledger_spark.errors import BrokenRecordError
from rocketstore.consume_queue.units import UNIT
from rocketstore.index.chains import KEY
from rocketstore.index.keys import TopicHashes, hashes_in
from rocketstore.message.checks import check_topic
from rocketstore.message.delay import DelayLevels, parse_level
from rocketstore.message.message import SYS_FLAG_ROLLED_BACK, SYS_FLAG_TRANSACTION
from rocketstore.message.properties import find_property
from rocketstore.types import SCHEDULE_TOPIC

RECORDS_AT_ONCE: Final = 16_384
"""Enough that numpy's overhead is none, few enough that what is worked on stays in the cache."""
PROPERTY_BYTES_AT_ONCE: Final = 4 * MIB
"""The same for records with long properties: a byte of these may become a key, of which several arrays are made."""
_NO_PLACE_IN_QUEUE: Final = 0x4
"""Set in the system flag of prepared and of rolled-back messages, and of no others."""
_QUEUE_ID_BITS: Final = 32


class UnitRun(NamedTuple):
    """Units of one queue in log order: their numbers in the queue (little-endian int64) and the units themselves.

    ``position`` is the physical offset of the first one's record.
    """

    topic: str
    queue_id: int
    position: int
    offsets: bytes
    units: bytes

    @property
    def numbers(self) -> Ints:
        """``offsets`` as numbers."""
        return np.frombuffer(self.offsets, "<i8")


@dataclass(frozen=True, slots=True)
class QueueColumns:
    """What consume queues need of records, one number per record that has a place in a queue; in log order."""

    topics: tuple[bytes, ...]
    """The different ones; ``topic`` are numbers of them."""
    topic: Ints
    queue_id: Ints
    queue_offset: Ints
    units: NDArray[np.void]

    def select(self, wanted: Mask) -> QueueColumns:
        """Only the records that are wanted."""
        numbers = self.topic[wanted], self.queue_id[wanted], self.queue_offset[wanted]
        return QueueColumns(self.topics, *numbers, self.units[wanted])


def records_of(split: Split) -> Iterator[Records]:
    """The messages of a split, up to some thousand at a time, all of them whole. Raises ``BrokenRecordError``."""
    context = DecodeContext(split.framing, "message", segment=split.segment, segment_base=split.segment_base)
    for stretch in reading.runs(split):
        for at in range(0, len(stretch.starts), RECORDS_AT_ONCE):
            starts = stretch.starts[at : at + RECORDS_AT_ONCE]
            records = rows_of(stretch.window, starts, replace(context, base=stretch.base))
            _check_whole(records)
            yield from pieces(records, PROPERTY_BYTES_AT_ONCE)


def pieces(records: Records, property_bytes: int) -> Iterator[Records]:
    """Whole records in pieces with so many bytes of properties, or one record that has more; none of them is empty."""
    ends = np.cumsum(records.tails.property_lengths)
    first = 0
    while first < len(records):
        before = int(ends[first - 1]) if first else 0
        behind = max(int(np.searchsorted(ends, before + property_bytes, "right")), first + 1)
        numbers = np.arange(len(records))
        yield records.select((numbers >= first) & (numbers < behind))
        first = behind


def _check_whole(records: Records) -> None:
    """Raise ``BrokenRecordError`` for the first record that is not whole; names its segment and offset."""
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
    """What queues and index both look at in whole records besides their properties: topics. There is at least one."""

    def __init__(self, records: Records) -> None:
        self.records = records
        encoded = pc.dictionary_encode(slices(records.buffer, records.tails.topic_begins, records.tails.topic_ends))
        self.topics: tuple[bytes, ...] = tuple(encoded.dictionary.to_pylist())
        """The different ones."""
        self.topic: Ints = np.asarray(encoded.indices).astype(np.int64)
        """Per record the number of its topic."""


def unit_columns(details: Details, levels: DelayLevels) -> QueueColumns:
    """The units of the records. Those without a place in a queue are left out."""
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
    """Hashes of tags, 0 without; of delayed messages the time at which they are due."""
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
    """The units by queue. Queues that cannot exist (a topic that is no name, a negative number) are left out."""
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
    """The keys of the records, in the order of the index."""
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
    """Stored units."""
    return np.frombuffer(data, UNIT)
