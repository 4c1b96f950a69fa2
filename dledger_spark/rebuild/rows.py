"""The rows that carry derived data from the tasks that read the log to those that write the files.

One row holds thousands of messages, because a row per message would cost more than the work: a row of ``queues`` holds
a run of units, a row of ``index`` a block of keys, regardless of topic.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from dledger_spark.decode.records import Records
from dledger_spark.errors import PipelineError
from dledger_spark.rebuild import INDEX, INDEX_DIR, QUEUES, QUEUES_DIR
from dledger_spark.rebuild.derive import Details, as_units, keys_of, runs, unit_columns
from dledger_spark.rebuild.key_index import IndexWriter
from dledger_spark.rebuild.queues import QueueWriter
from rocketstore.index.file import IndexShape
from rocketstore.index.format import KEY, TopicHashes
from rocketstore.message.message import DelayLevels

SCHEMA: Final = "part string, topic string, queueId int, position long, offsets binary, data binary"
ORDER: Final = ("part", "topic", "queueId", "position")
"""The sort order of rows; rows equal but for the position belong to one task."""
KEYS_FILE: Final = "keys"
"""A file with all keys in log order, written instead of index files for comparison."""
_ARROW: Final = pa.schema(
    [
        ("part", pa.string()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("position", pa.int64()),
        ("offsets", pa.binary()),
        ("data", pa.binary()),
    ]
)
COLUMNS: Final = tuple(_ARROW.names)


class RebuildRow(NamedTuple):
    """One row; ``position`` is the physical offset of its first record."""

    part: str
    topic: str
    queue_id: int
    position: int
    offsets: bytes
    """For queues: the queue offsets of the units, little-endian int64."""
    data: bytes
    """Units or keys."""


@dataclass(frozen=True, slots=True)
class FileShapes:
    """How to write files. ``keys_only``: write ``KEYS_FILE`` instead of index files."""

    queue_file_bytes: int
    index: IndexShape
    keys_only: bool


@dataclass(frozen=True, slots=True)
class Written:
    """The number of units and keys in the files."""

    units: int = 0
    keys: int = 0


def rows_of(found: Iterable[Records], parts: Collection[str], levels: DelayLevels) -> Iterator[pa.RecordBatch]:
    """The data derived from intact records in log order."""
    topics = TopicHashes()
    for records in found:
        details = Details(records)
        rows: list[RebuildRow] = []
        if INDEX in parts and len(keys := keys_of(details, topics)):
            rows.append(RebuildRow(INDEX, "", 0, int(keys["offset"][0]), b"", keys.tobytes()))
        if QUEUES in parts:
            rows += (RebuildRow(QUEUES, *run) for run in runs(unit_columns(details, levels)))
        if rows:
            columns = zip(zip(*rows, strict=True), _ARROW, strict=True)
            yield pa.RecordBatch.from_arrays([pa.array(one, field.type) for one, field in columns], schema=_ARROW)


def write_rows(directory: Path, shapes: FileShapes, batches: Iterable[pa.RecordBatch]) -> Written:
    """Write the files of these rows to ``directory``, durably. Raises ``PipelineError`` unless the rows are sorted."""
    sink: _Sink | None = None
    last: RebuildRow | None = None
    units = keys = 0
    for batch in batches:
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row = RebuildRow(*values)
            if last is not None and row[:4] <= last[:4]:
                raise PipelineError(f"rows must be sorted by {', '.join(ORDER)}")
            if sink is None or last is None or row[:3] != last[:3]:
                if sink is not None:
                    sink.close()
                sink = _open(directory, shapes, row)
            written = sink.append(row)
            units, keys = (units + written, keys) if row.part == QUEUES else (units, keys + written)
            last = row
    if sink is not None:
        sink.close()
    return Written(units, keys)


class _Sink(Protocol):
    """Writes the rows that are equal but for their position."""

    def append(self, row: RebuildRow) -> int: ...

    def close(self) -> None: ...


def _open(directory: Path, shapes: FileShapes, row: RebuildRow) -> _Sink:
    if row.part == QUEUES:
        return _QueueSink(QueueWriter(directory / QUEUES_DIR / row.topic / str(row.queue_id), shapes.queue_file_bytes))
    if row.part != INDEX:
        raise PipelineError(f"there is no part {row.part!r}")
    if shapes.keys_only:
        return _KeySink(directory / INDEX_DIR)
    return _IndexSink(IndexWriter(directory / INDEX_DIR, shapes.index))


class _QueueSink:
    def __init__(self, writer: QueueWriter) -> None:
        self._writer = writer

    def append(self, row: RebuildRow) -> int:
        before = self._writer.units
        self._writer.append(np.frombuffer(row.offsets, "<i8"), as_units(row.data))
        return self._writer.units - before

    def close(self) -> None:
        self._writer.close()


class _IndexSink:
    def __init__(self, writer: IndexWriter) -> None:
        self._writer = writer

    def append(self, row: RebuildRow) -> int:
        keys = np.frombuffer(row.data, KEY)
        self._writer.append(keys)
        return len(keys)

    def close(self) -> None:
        self._writer.close()


class _KeySink:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._file: BinaryIO = (directory / KEYS_FILE).open("wb")

    def append(self, row: RebuildRow) -> int:
        self._file.write(row.data)
        return len(row.data) // KEY.itemsize

    def close(self) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
