"""Data files of a Delta table, written by Spark's tasks straight from the log.

A task reads a range of the log with the stream reader of the format ``dledger`` and writes its rows as one Parquet
file: they reach neither the JVM nor the driver. The file is synced before the task ends, and belongs to the table only
from the commit that names it. Those of tasks and runs that failed are removed by a later ``vacuum``.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition

    from dledger_spark.source.stream import LogStreamReader

LOG: Final = "_delta_log"
_FILE_ACTIONS: Final = frozenset({"add", "cdc"})
"""The actions of a commit that name a file it has made."""
_GROUP_BYTES: Final = 32 << 20
"""How many bytes of rows, before compression, a row group holds: a task keeps as many in memory."""
_TEXT_MAX: Final = 32
"""How many characters of a text are in statistics."""
_LAST_CHARACTER: Final = "\U0010ffff"
_DIGITS_MAX: Final = 15
"""Of a decimal in statistics: the library, which writes them for merged files, makes a double of each."""
_ANY_TIME: Final = "bornTimestamp"
"""The column of a producer's clock, which may be wrong by any number of years."""
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A written file. ``stats``: each column's least and greatest value, in the Delta protocol's JSON."""

    path: str
    size_bytes: int
    rows: int
    stats: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class FileWriter:
    """The work of every task of a batch. Pickled by Spark."""

    directory: str
    reader: LogStreamReader

    def __call__(self, partition: InputPartition) -> list[DataFile]:
        """Write the rows of a range: one file, or none if it has no rows."""
        written = write_file(Path(self.directory), self.reader.read(partition))
        return [] if written is None else [written]


@dataclass(frozen=True, slots=True)
class RowCollector:
    """The same for a table whose rows are replaced by key: sends the last row of each key to the driver, as Arrow."""

    key: str
    reader: LogStreamReader

    def __call__(self, partition: InputPartition) -> list[bytes]:
        """The rows of a range: one stream of Arrow's, or none if it has no rows."""
        batches = [batch for batch in self.reader.read(partition) if batch.num_rows]
        if not batches:
            return []
        rows = newest(pa.Table.from_batches(batches), self.key)
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, rows.schema) as writer:
            writer.write_table(rows)
        return [stream.getvalue().to_pybytes()]


def rows_of(streams: Sequence[bytes]) -> pa.Table | None:
    """The rows that collectors have sent, in the order of their ranges; None if there are none."""
    tables = [pa.ipc.open_stream(one).read_all() for one in streams]
    return pa.concat_tables(tables) if tables else None


def newest(rows: pa.Table, key: str) -> pa.Table:
    """The last row of each key, and all rows without one (null), in their order."""
    numbered = pa.table({"key": rows[key], "row": pa.array(range(rows.num_rows), pa.int64())})
    last = numbered.filter(pc.is_valid(numbered["key"])).group_by("key").aggregate([("row", "max")])["row_max"]
    without = numbered.filter(pc.is_null(numbered["key"]))["row"]
    kept = pa.chunked_array([*last.chunks, *without.chunks], pa.int64())
    return rows.take(kept.take(pc.sort_indices(kept)))


def write_file(directory: Path, rows: Iterator[pa.RecordBatch]) -> DataFile | None:
    """Write rows to a new file below ``directory``, durably; None, and no file, if there are none."""
    name = f"part-{uuid.uuid4().hex}.parquet"
    path = directory / name
    writer: Any = None  # Any: pyarrow has no types
    stats = _Stats()
    try:
        for group in _groups(rows):
            if writer is None:
                writer = pq.ParquetWriter(path, group.schema, compression="zstd")
            writer.write_table(group)
            stats.add(group)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        return None
    _sync(path)
    _sync(directory)
    about = path.stat()
    return DataFile(name, about.st_size, stats.rows, stats.text(), int(about.st_mtime * 1000))


def _groups(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in rows:
        if batch.num_rows:
            waiting.append(batch)
            size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def stats_columns(schema: pa.Schema) -> list[str]:
    """The columns that have statistics, by which readers skip files, in every file: the table says which.

    Of these types and names all values have ends that JSON can hold, whoever writes the file: this module, or the
    library when it merges files. A column with statistics in some files only would lose rows: ``filters`` of deltalake
    1.6 finds none in a file without them.
    """
    return [one.name for one in schema if _PLAIN_NAME.fullmatch(one.name) and one.name != _ANY_TIME and _has_ends(one)]


def _has_ends(field: pa.Field) -> bool:
    kind, types = field.type, pa.types
    if types.is_decimal(kind):
        return bool(kind.precision <= _DIGITS_MAX)
    tests = (types.is_boolean, types.is_integer, types.is_string, types.is_date, types.is_timestamp)
    return any(test(kind) for test in tests)


class _Stats:
    """The statistics of a file while it is written."""

    def __init__(self) -> None:
        self.rows = 0
        self._ends: dict[str, tuple[Any, Any]] = {}  # Any: each column has its own type
        self._nulls: dict[str, int] = {}

    def add(self, rows: pa.Table) -> None:
        """Take rows into account."""
        self.rows += rows.num_rows
        for name in stats_columns(rows.schema):
            column = rows[name]
            self._nulls[name] = self._nulls.get(name, 0) + column.null_count
            if column.null_count < len(column):
                lowest, highest = _ends_of(column)
                low, high = self._ends.get(name, (lowest, highest))
                self._ends[name] = min(low, lowest), max(high, highest)

    def text(self) -> str:
        """In the Delta protocol's JSON."""
        least = {name: _at_most(low) for name, (low, _) in self._ends.items()}
        greatest = {name: _at_least(high) for name, (_, high) in self._ends.items()}
        facts: Mapping[str, object] = {"numRecords": self.rows, "minValues": least, "maxValues": greatest}
        return msgspec.json.encode({**facts, "nullCount": self._nulls}).decode()


def _ends_of(column: pa.ChunkedArray) -> tuple[Any, Any]:  # Any: of the column's type
    found = pc.min_max(column)
    try:
        return found["min"].as_py(), found["max"].as_py()
    except (OverflowError, ValueError):  # a time outside of the years 1 to 9999, which the protocol has no text for
        zone = UTC if column.type.tz else None
        return datetime.min.replace(tzinfo=zone), datetime.max.replace(tzinfo=zone)


def _at_most(value: object) -> object:
    """The value in JSON, or a lesser one."""
    if isinstance(value, str):
        return value[:_TEXT_MAX]
    if isinstance(value, datetime):  # in milliseconds: readers know that they are rounded down
        at = value if value.tzinfo is None else value.astimezone(UTC)  # without a zone, as the column has it
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, Decimal):
        return msgspec.Raw(format(value, "f").encode())
    return value.isoformat() if isinstance(value, date) else value


def _at_least(value: object) -> object:
    """The value in JSON, or a greater one."""
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        end = _TEXT_MAX
        while value.startswith(_LAST_CHARACTER, end):
            end += 1
        return value[:end] + _LAST_CHARACTER
    return _at_most(value)


def sync_versions(directory: Path, first: int, last: int) -> None:
    """Make these versions durable with their files: the library leaves that to the operating system."""
    log = directory / LOG
    for number in range(first, last + 1):
        commit = log / f"{number:020d}.json"
        for line in commit.read_text("utf-8").splitlines():
            action = json.loads(line)
            for kind in _FILE_ACTIONS & action.keys():
                _sync(directory / unquote(action[kind]["path"]))
        _sync(commit)
    _sync(log)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
