"""From a stretch of log to what dispatch would take from it: units of consume queues, and keys with their hashes.

What dispatch would stop at is an error here too: a record that does not add up is not stepped over.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.decode.context import DecodeContext
from pipeline.decode.layout import Ints
from pipeline.decode.properties import TAGS, parse_properties, tags_codes
from pipeline.decode.records import Records, rows_of
from pipeline.decode.slices import slices
from pipeline.directory import Split, reading
from pipeline.errors import BrokenRecordError
from rocketstore.index.keys import TopicHashes, key_hashes
from rocketstore.message.checks import check_topic
from rocketstore.message.delay import DelayLevels, parse_level
from rocketstore.message.properties import find_property
from rocketstore.types import SCHEDULE_TOPIC, RecordHead

UNIT: Final = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags", ">i8")])
"""A consume queue's unit as it is stored."""
KEY: Final = np.dtype([("hash", "<i4"), ("offset", "<i8"), ("store_ms", "<i8")])
"""A key on its way to the index."""
RECORDS_AT_ONCE: Final = 16_384
"""Enough that numpy's overhead is none, few enough that what is worked on stays in the cache."""
_NO_PLACE_IN_QUEUE: Final = 0x4
"""Set in the system flag of prepared and of rolled-back messages, and of no others."""
_QUEUE_ID_BITS: Final = 32
_make_head: Final = functools.partial(tuple.__new__, RecordHead)
"""Makes named tuples without their constructor's detour: one per message."""


class Run(NamedTuple):
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
class Columns:
    """What consume queues need of records, one number per record that has a place in a queue; in log order."""

    topics: tuple[bytes, ...]
    """The different ones; ``topic`` are numbers of them."""
    topic: Ints
    queue_id: Ints
    queue_offset: Ints
    units: NDArray[np.void]


def records_of(split: Split) -> Iterator[Records]:
    """The messages of a split, some thousand at a time, all of them whole. Raises ``BrokenRecordError``."""
    context = DecodeContext(split.framing, "message", segment=split.segment, segment_base=split.segment_base)
    for stretch in reading.runs(split):
        for at in range(0, len(stretch.starts), RECORDS_AT_ONCE):
            starts = stretch.starts[at : at + RECORDS_AT_ONCE]
            records = rows_of(stretch.window, starts, replace(context, base=stretch.base))
            _check_whole(records)
            yield records


def _check_whole(records: Records) -> None:
    """Raise ``BrokenRecordError`` for the first record that is not whole; names its segment and offset."""
    broken = records.broken | records.broken_tail
    if broken.any():
        row = int(np.argmax(broken))
        context = records.context
        offset = int(records.positions[row]) - context.segment_base
        raise BrokenRecordError(
            f"segment {context.segment}, offset {offset}: {records.problem(row)}; a broker would stop there too: "
            "repair the log first (dledger serve --repair), then rebuild"
        )


def unit_columns(records: Records, levels: DelayLevels) -> Columns:
    """The units of whole records. Those without a place in a queue are left out."""
    records = records.select(records.field("sysFlag") & _NO_PLACE_IN_QUEUE == 0)
    names = slices(records.buffer, records.topic_begins, records.topic_ends)
    encoded = pc.dictionary_encode(names)
    topics = tuple(encoded.dictionary.to_pylist())
    topic = np.asarray(encoded.indices).astype(np.int64)
    units = np.empty(len(records), UNIT)
    units["offset"] = records.field("physicalOffset")
    units["size"] = records.field("messageSize")
    units["tags"] = _codes(records, topics, topic, levels)
    return Columns(topics, topic, records.field("queueId"), records.field("queueOffset"), units)


def _codes(records: Records, topics: Sequence[bytes], topic: Ints, levels: DelayLevels) -> Ints:
    """Hashes of tags; of delayed messages the time at which they are due."""
    properties = slices(records.buffer, records.property_begins, records.ends)
    codes = np.asarray(tags_codes(parse_properties(properties).named(TAGS))).astype(np.int64)
    schedule = SCHEDULE_TOPIC.encode()
    if schedule in topics:
        stored = records.field("storeTimestamp")
        for row in np.flatnonzero(topic == topics.index(schedule)).tolist():
            level = parse_level(find_property(properties[row].as_py(), "DELAY") or "")
            if level > 0:
                codes[row] = levels.due_ms(level, int(stored[row]))
    return codes


def runs(columns: Columns) -> Iterator[Run]:
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
        yield Run(
            topic,
            queue_id,
            int(units["offset"][0]),
            columns.queue_offset[rows].astype("<i8").tobytes(),
            units.tobytes(),
        )


def keys_of(records: Records, topics: TopicHashes) -> NDArray[np.void]:
    """The keys of whole records, in the order of the index."""
    names = slices(records.buffer, records.topic_begins, records.topic_ends)
    properties = slices(records.buffer, records.property_begins, records.ends)
    heads = _heads(records, names, properties)
    hashes, owners = key_hashes(heads, topics)
    keys = np.empty(len(hashes), KEY)
    keys["hash"] = hashes
    keys["offset"] = records.field("physicalOffset")[owners]
    keys["store_ms"] = records.field("storeTimestamp")[owners]
    return keys


def _heads(records: Records, names: pa.Array, properties: pa.Array) -> list[RecordHead]:
    """As much of the records' heads as hashing looks at: topic, system flag, properties."""
    encoded = pc.dictionary_encode(names)
    known = [topic.decode(errors="replace") for topic in encoded.dictionary.to_pylist()]
    topics = [known[number] for number in encoded.indices.to_pylist()]
    flags = records.field("sysFlag").tolist()
    zeros = itertools.repeat(0)
    columns = (topics, zeros, zeros, zeros, zeros, zeros, zeros, flags, zeros, properties.to_pylist())
    return list(map(_make_head, zip(*columns, strict=False)))


def as_units(data: bytes) -> NDArray[np.void]:
    """Stored units."""
    return np.frombuffer(data, UNIT)
