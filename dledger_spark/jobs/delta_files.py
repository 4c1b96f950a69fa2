"""Data files of a Delta table, written by Spark's tasks straight from the log.

A task reads a range of the log with the stream reader of the format ``dledger`` and writes its rows as one Parquet
file: they reach neither the JVM nor the driver. The file is synced before the task ends, and belongs to the table only
from the commit that names it. Those of tasks and runs that failed are removed by a later ``vacuum``.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

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
"""Longer texts have no statistics: readers expect theirs to be cut in a way of its own."""


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
    try:
        for group in _groups(rows):
            if writer is None:
                writer = pq.ParquetWriter(path, group.schema, compression="zstd")
            writer.write_table(group)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        return None
    _sync(path)
    _sync(directory)
    about = path.stat()
    facts = pq.read_metadata(path)
    return DataFile(name, about.st_size, facts.num_rows, stats_of(facts), int(about.st_mtime * 1000))


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


def stats_of(facts: pq.FileMetaData) -> str:
    """A file's statistics: readers skip files by them."""
    least: dict[str, object] = {}
    greatest: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for column in range(facts.num_columns):
        name = facts.schema.column(column).path
        chunks = [facts.row_group(group).column(column).statistics for group in range(facts.num_row_groups)]
        if "." in name or any(one is None or not one.has_null_count for one in chunks):  # nested, or not counted
            continue
        nulls[name] = sum(one.null_count for one in chunks)
        known = [one for one in chunks if one.has_min_max]
        if known and len(known) == sum(one.null_count < one.num_values + one.null_count for one in chunks):
            ends = min(one.min for one in known), max(one.max for one in known)
            if all(isinstance(one, int | datetime) or (isinstance(one, str) and len(one) <= _TEXT_MAX) for one in ends):
                least[name], greatest[name] = map(_as_json, ends)
    return json.dumps({"numRecords": facts.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls})


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


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
