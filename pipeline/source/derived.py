"""Formats ``dledger-cq`` and ``dledger-index``: consume queues and key index, out of a log and into files.

Read, they give what a broker derives from its log: ``dledger-cq`` runs of units per queue, ``dledger-index`` blocks of
keys with their hashes; packed, a row for thousands of messages, since a row for each would cost more than the work.
Written, they make the files a broker has. So a rebuild is a read, a shuffle by queue (or by nothing: a chain of keys
has one order), and a write::

    runs = spark.read.format("dledger-cq").load("/data/broker")
    runs.repartition("topic", "queueId").sortWithinPartitions("topic", "queueId", "position").write.format(
        "dledger-cq").mode("append").save("/data/rebuilt/consumequeue")

Each attempt of a task writes into a directory of its own below ``.attempts-…`` beside the target; only the commit makes
the target, by renaming. The target must not exist: who replaces a broker's files locks the broker out first (the job
``rebuild`` does).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from pipeline.directory import Split, SplitSizes, open_directory, plan_splits
from pipeline.errors import OptionError, PipelineError
from pipeline.rebuild.derive import KEY, Run, as_units, keys_of, records_of, runs, unit_columns
from pipeline.rebuild.install import sync_directory
from pipeline.rebuild.key_index import IndexWriter
from pipeline.rebuild.queues import QueueWriter
from pipeline.source.rows import settle_worker
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.index.file import IndexShape
from rocketstore.index.keys import TopicHashes
from rocketstore.message.delay import DelayLevels

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

QUEUES: Final = "dledger-cq"
INDEX: Final = "dledger-index"
SPLIT_BYTES: Final = 256 * 1024 * 1024
KEYS_FILE: Final = "keys"
"""With ``layout=keys``: all keys in log order, as they come, instead of index files; for comparing."""
_SCHEMAS: Final = {
    QUEUES: "topic string, queueId int, position long, offsets binary, units binary",
    INDEX: "position long, keys binary",
}
_ARROW: Final = {
    QUEUES: pa.schema(
        [
            ("topic", pa.string()),
            ("queueId", pa.int32()),
            ("position", pa.int64()),
            ("offsets", pa.binary()),
            ("units", pa.binary()),
        ]
    ),
    INDEX: pa.schema([("position", pa.int64()), ("keys", pa.binary())]),
}
_NUMBERS: Final = {
    "splitBytes": SPLIT_BYTES,
    "fileBytes": 6_000_000,
    "slots": 5_000_000,
    "entries": 20_000_000,
}
_TEXTS: Final = {"path": "", "delayLevels": DEFAULT_DELAY_LEVELS, "layout": "files"}


@dataclass(frozen=True, slots=True)
class DerivedOptions:
    """Options of both formats; sizes in bytes, ``slots`` and ``entries`` of an index file."""

    path: Path
    split_bytes: int
    file_bytes: int
    shape: IndexShape
    levels: DelayLevels
    keys_only: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> DerivedOptions:
        """Raises ``OptionError`` with every problem, ``ConfigError`` for delay levels that are none."""
        given = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in (*_NUMBERS, *_TEXTS)}
        problems = [
            f"there is no option {name}; there are {', '.join(known.values())}" for name in given.keys() - known
        ]
        numbers = {name: _number(given.get(name.lower(), str(default))) for name, default in _NUMBERS.items()}
        problems += [f"{name} must be a number greater than 0" for name, value in numbers.items() if value < 1]
        texts = {name: given.get(name.lower(), default) for name, default in _TEXTS.items()}
        if not texts["path"]:
            problems.append("name the log's directory, or the one to write: load(path), save(path)")
        if texts["layout"] not in ("files", "keys"):
            problems.append("layout is files or keys")
        if numbers["fileBytes"] % 20:
            problems.append("fileBytes must be a multiple of 20")
        if problems:
            raise OptionError("; ".join(sorted(problems)))
        return cls(
            Path(texts["path"]),
            numbers["splitBytes"],
            numbers["fileBytes"],
            IndexShape(numbers["slots"], numbers["entries"]),
            DelayLevels.parse(texts["delayLevels"]),
            texts["layout"] == "keys",
        )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1


class QueuesDataSource(DataSource):
    """``dledger-cq``."""

    @classmethod
    def name(cls) -> str:
        """``dledger-cq``."""
        return QUEUES

    def schema(self) -> str:
        """One row per queue and split."""
        return _SCHEMAS[QUEUES]

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises ``OptionError``."""
        _check_columns(QUEUES, schema)
        return DerivedReader(QUEUES, DerivedOptions.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Raises ``OptionError``, ``PipelineError`` if the target exists."""
        _check_columns(QUEUES, schema)
        return DerivedWriter(QUEUES, DerivedOptions.parse(self.options), overwrite=overwrite)


class IndexDataSource(DataSource):
    """``dledger-index``."""

    @classmethod
    def name(cls) -> str:
        """``dledger-index``."""
        return INDEX

    def schema(self) -> str:
        """One row per block of keys."""
        return _SCHEMAS[INDEX]

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises ``OptionError``."""
        _check_columns(INDEX, schema)
        return DerivedReader(INDEX, DerivedOptions.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Raises ``OptionError``, ``PipelineError`` if the target exists."""
        _check_columns(INDEX, schema)
        return DerivedWriter(INDEX, DerivedOptions.parse(self.options), overwrite=overwrite)


def _check_columns(kind: str, schema: StructType) -> None:
    if schema.names != _ARROW[kind].names:
        raise OptionError(f"{kind} has the columns {_SCHEMAS[kind]}, in this order, and no others")


@dataclass
class SplitPartition(InputPartition):
    """A stretch of log."""

    split: Split

    def __init__(self, split: Split) -> None:
        super().__init__(None)
        self.split = split


class DerivedReader(DataSourceReader):
    """Reads the log and gives what is derived from it. Pickled; nothing is open in it."""

    def __init__(self, kind: str, options: DerivedOptions) -> None:
        self._kind = kind
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Splits of the log. Raises ``PipelineError`` if it holds no messages."""
        log = open_directory(self._options.path)
        if log.segments and log.content() != "message":
            raise PipelineError(f"{log.path} is no broker's log: its entries are no messages, so it has no queues")
        return [
            SplitPartition(one) for one in plan_splits(log, log.begin, log.end, SplitSizes(self._options.split_bytes))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split. Raises ``BrokenRecordError``."""
        if not isinstance(partition, SplitPartition):  # Spark's way to say that there are none
            return
        settle_worker()
        yield from self._runs(partition.split) if self._kind == QUEUES else self._keys(partition.split)

    def _runs(self, split: Split) -> Iterator[pa.RecordBatch]:
        for records in records_of(split):
            found = list(runs(unit_columns(records, self._options.levels)))
            if found:
                yield _batch(QUEUES, list(zip(*found, strict=True)))

    def _keys(self, split: Split) -> Iterator[pa.RecordBatch]:
        topics = TopicHashes()
        for records in records_of(split):
            keys = keys_of(records, topics)
            if len(keys):
                yield _batch(INDEX, [[int(keys["offset"][0])], [keys.tobytes()]])


def _batch(kind: str, columns: Sequence[Sequence[object]]) -> pa.RecordBatch:
    schema = _ARROW[kind]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


@dataclass
class Attempt(WriterCommitMessage):
    """What a successful attempt of a task has written, and where."""

    directory: str


class DerivedWriter(DataSourceArrowWriter):
    """Writes files; each attempt into a directory of its own, which the commit puts in its place."""

    def __init__(self, kind: str, options: DerivedOptions, *, overwrite: bool) -> None:
        target = options.path
        if overwrite:
            raise OptionError(f'{kind} replaces nothing: use mode("append") and a path that does not exist')
        if target.exists():
            raise PipelineError(f"{target} exists: remove it, or write elsewhere")
        self._kind = kind
        self._options = options
        self._staging = target.with_name(f".attempts-{target.name}-{uuid.uuid4().hex}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one partition's rows, which are sorted."""
        directory = self._staging / uuid.uuid4().hex
        directory.mkdir(parents=True)
        if self._kind == QUEUES:
            write_queues(directory, self._options.file_bytes, iterator)
        elif self._options.keys_only:
            _write_keys(directory, iterator)
        else:
            write_index(directory, self._options.shape, iterator)
        return Attempt(str(directory))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Put together what the tasks have written, under the target's name. Raises ``PipelineError``."""
        attempts = [Path(one.directory) for one in messages if isinstance(one, Attempt)]
        if len(attempts) != len(messages):
            raise PipelineError(f"a task has not said what it wrote: nothing was put at {self._options.path}")
        whole = self._staging / "whole"
        whole.mkdir(parents=True)
        for attempt in attempts:
            _merge(attempt, whole)
        for directory, _, _ in os.walk(whole):  # the files themselves are durable since they were closed
            sync_directory(Path(directory))
        os.rename(whole, self._options.path)
        sync_directory(self._options.path.parent)
        shutil.rmtree(self._staging, ignore_errors=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002  # all goes
        """Remove whatever was written."""
        shutil.rmtree(self._staging, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    """Move what is in ``source`` to ``target``; directories that both have are merged."""
    for one in sorted(source.iterdir()):
        there = target / one.name
        if one.is_dir() and there.is_dir():
            _merge(one, there)
        else:
            os.rename(one, there)


def write_queues(directory: Path, file_bytes: int, batches: Iterator[pa.RecordBatch]) -> None:
    """Queues from rows that come queue by queue, each in log order. Raises ``PipelineError`` if they do not."""
    writer: QueueWriter | None = None
    current: tuple[str, int, int] | None = None
    for batch in batches:
        for row in batch.to_pylist():
            run = Run(row["topic"], row["queueId"], row["position"], row["offsets"], row["units"])
            if writer is None or current is None or run[:2] != current[:2]:
                if writer is not None:
                    writer.close()
                writer = QueueWriter(directory / run.topic / str(run.queue_id), file_bytes)
            elif run.position <= current[2]:
                raise PipelineError(f"the rows of {QUEUES} must be sorted by topic, queueId and position")
            current = run[:3]
            writer.append(run.numbers, as_units(run.units))
    if writer is not None:
        writer.close()


def write_index(directory: Path, shape: IndexShape, batches: Iterator[pa.RecordBatch]) -> None:
    """Index files from blocks of keys in log order. Raises ``PipelineError`` if they are not."""
    writer = IndexWriter(directory, shape)
    for keys in _in_order(batches):
        writer.append(keys)
    writer.close()


def _write_keys(directory: Path, batches: Iterator[pa.RecordBatch]) -> None:
    with (directory / KEYS_FILE).open("wb") as file:
        for keys in _in_order(batches):
            file.write(keys.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _in_order(batches: Iterator[pa.RecordBatch]) -> Iterator[np.ndarray[tuple[int], np.dtype[np.void]]]:
    last = -1
    for batch in batches:
        for row in batch.to_pylist():
            if row["position"] <= last:
                raise PipelineError(f"the rows of {INDEX} must be in one partition, sorted by position")
            last = row["position"]
            yield np.frombuffer(row["keys"], KEY)
