"""Formats ``dledger-derived``, ``dledger-cq`` and ``dledger-index``: data that a broker derives from its log.

Reading returns runs of units per queue and blocks of keys with their hashes, in packed rows
(``dledger_spark.rebuild.rows``): ``dledger-cq`` those of queues, ``dledger-index`` those of the index,
``dledger-derived`` both, in one pass over the log. Writing creates the broker's files below ``consumequeue`` and
``index`` of the target. So a rebuild is a read, a shuffle by queue (the keys count as one more, because their chain has
one order), and a write::

    rows = spark.read.format("dledger-derived").load("/data/broker").repartition("part", "topic", "queueId")
    sorted = rows.sortWithinPartitions("part", "topic", "queueId", "position")
    sorted.write.format("dledger-derived").mode("append").save("/data/rebuilt")

Each attempt of a task writes to its own directory below ``.attempts-…`` next to the target; only the commit creates the
target, by renaming. The target must not exist: callers that replace a broker's files lock the broker out first (as the
job ``rebuild`` does). ``derived.json``, next to the files, contains the number of units and keys in them.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from dledger_spark.directory import Split, SplitSizes, open_directory, plan_splits
from dledger_spark.errors import OptionError, PipelineError
from dledger_spark.options import unknown_option
from dledger_spark.rebuild import DIRECTORIES, INDEX, PARTS, QUEUES
from dledger_spark.rebuild.derive import records_of
from dledger_spark.rebuild.rows import COLUMNS, SCHEMA, FileShapes, Written, rows_of, sync_directory, write_rows
from dledger_spark.source.batch import settle_worker
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.consume_queue.files import UNIT_BYTES
from rocketstore.index.file import IndexShape
from rocketstore.message.message import DelayLevels

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_BOTH_FORMAT: Final = "dledger-derived"
_QUEUES_FORMAT: Final = "dledger-cq"
_INDEX_FORMAT: Final = "dledger-index"
FORMATS: Final = {PARTS: _BOTH_FORMAT, (QUEUES,): _QUEUES_FORMAT, (INDEX,): _INDEX_FORMAT}
"""The format for each selection of parts."""
SPLIT_BYTES: Final = 256 * 1024 * 1024
_COUNTS_FILE: Final = "derived.json"
_NUMBERS: Final = {
    "splitBytes": SPLIT_BYTES,
    "fileBytes": 6_000_000,
    "slots": 5_000_000,
    "entries": 20_000_000,
}
_TEXTS: Final = {"path": "", "delayLevels": DEFAULT_DELAY_LEVELS, "layout": "files"}


@dataclass(frozen=True, slots=True)
class DerivedOptions:
    """Options of the formats; sizes in bytes, ``slots`` and ``entries`` of an index file.

    ``layout=keys`` writes all keys into one file instead of index files.
    """

    path: Path
    split_bytes: int
    shapes: FileShapes
    levels: DelayLevels

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> DerivedOptions:
        """Raises ``OptionError`` with every problem, ``ConfigError`` for invalid delay levels."""
        given = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in (*_NUMBERS, *_TEXTS)}
        problems = [unknown_option(name, known) for name in given.keys() - known]
        numbers = {name: _number(given.get(name.lower(), str(default))) for name, default in _NUMBERS.items()}
        problems += [f"{name} must be a number greater than 0" for name, value in numbers.items() if value < 1]
        texts = {name: given.get(name.lower(), default) for name, default in _TEXTS.items()}
        if not texts["path"]:
            problems.append("name the log's directory, or the one to write to: load(path), save(path)")
        if texts["layout"] not in ("files", "keys"):
            problems.append("layout must be files or keys")
        if numbers["fileBytes"] % UNIT_BYTES:
            problems.append(f"fileBytes must be a multiple of {UNIT_BYTES}")
        if problems:
            raise OptionError("; ".join(sorted(problems)))
        return cls(
            Path(texts["path"]),
            numbers["splitBytes"],
            FileShapes(
                numbers["fileBytes"],
                IndexShape(numbers["slots"], numbers["entries"]),
                keys_only=texts["layout"] == "keys",
            ),
            DelayLevels.parse(texts["delayLevels"]),
        )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1


class DerivedDataSource(DataSource):
    """``dledger-derived``."""

    parts: ClassVar[tuple[str, ...]] = PARTS

    @classmethod
    def name(cls) -> str:
        """``dledger-derived``."""
        return _BOTH_FORMAT

    def schema(self) -> str:
        """One row per queue and some thousand records, and one for their keys."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises ``OptionError``."""
        self._check_columns(schema)
        return _DerivedReader(self.parts, DerivedOptions.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Raises ``OptionError``, ``PipelineError`` if the target exists."""
        self._check_columns(schema)
        return DerivedWriter(self.parts, DerivedOptions.parse(self.options), overwrite=overwrite)

    def _check_columns(self, schema: StructType) -> None:
        if tuple(schema.names) != COLUMNS:
            raise OptionError(f"{self.name()} has exactly the columns {SCHEMA}, in this order")


class QueuesDataSource(DerivedDataSource):
    """``dledger-cq``."""

    parts = (QUEUES,)

    @classmethod
    def name(cls) -> str:
        """``dledger-cq``."""
        return _QUEUES_FORMAT


class IndexDataSource(DerivedDataSource):
    """``dledger-index``."""

    parts = (INDEX,)

    @classmethod
    def name(cls) -> str:
        """``dledger-index``."""
        return _INDEX_FORMAT


@dataclass
class _StretchPartition(InputPartition):
    """A stretch of log."""

    split: Split

    def __init__(self, split: Split) -> None:
        super().__init__(None)
        self.split = split


class _DerivedReader(DataSourceReader):
    """Reads the log and returns the derived data. Pickled, so it holds nothing open."""

    def __init__(self, parts: tuple[str, ...], options: DerivedOptions) -> None:
        self._parts = parts
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Splits of the log. Raises ``PipelineError`` if it holds no messages."""
        log = open_directory(self._options.path)
        if log.segments and log.content() != "message":
            raise PipelineError(f"{log.path} is not a broker's log: its entries are not messages, so it has no queues")
        return [
            _StretchPartition(one)
            for one in plan_splits(log, log.begin, log.end, SplitSizes(self._options.split_bytes))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split. Raises ``BrokenRecordError``."""
        if not isinstance(partition, _StretchPartition):  # Spark passes something else if there are no partitions
            return
        settle_worker()
        yield from rows_of(records_of(partition.split), self._parts, self._options.levels)


@dataclass
class Attempt(WriterCommitMessage):
    """The output of a successful task attempt, and its directory."""

    directory: str
    written: Written


class DerivedWriter(DataSourceArrowWriter):
    """Writes files; each attempt to its own directory, and the commit moves them to the target."""

    def __init__(self, parts: tuple[str, ...], options: DerivedOptions, *, overwrite: bool) -> None:
        target = options.path
        if overwrite:
            raise OptionError(f'{FORMATS[parts]} never overwrites: use mode("append") and a path that does not exist')
        if target.exists():
            raise PipelineError(f"{target} already exists: remove it, or write elsewhere")
        self._parts = parts
        self._options = options
        self._staging = target.with_name(f".attempts-{target.name}-{uuid.uuid4().hex}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one partition's rows, which must be sorted."""
        directory = self._staging / uuid.uuid4().hex
        directory.mkdir(parents=True)
        return Attempt(str(directory), write_rows(directory, self._options.shapes, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Merge the tasks' files under the target's name. Raises ``PipelineError``."""
        attempts = [one for one in messages if isinstance(one, Attempt)]
        if len(attempts) != len(messages):
            raise PipelineError(f"a task did not report what it wrote: nothing was stored at {self._options.path}")
        missing = sum(not Path(one.directory).is_dir() for one in attempts)
        if missing:
            raise PipelineError(
                f"the output of {missing} of {len(attempts)} tasks is not in {self._staging}: Spark's workers "
                f"write to their own disks. {self._options.path.parent} must be on a file system shared by them "
                "and this machine"
            )
        whole = self._staging / "whole"
        for part in self._parts:
            (whole / DIRECTORIES[part]).mkdir(parents=True)
        for attempt in attempts:
            _merge(Path(attempt.directory), whole)
        counts = {name: sum(getattr(one.written, name) for one in attempts) for name in ("units", "keys")}
        (whole / _COUNTS_FILE).write_text(json.dumps(counts))
        for directory, _, _ in os.walk(whole):  # the files themselves became durable when they were closed
            sync_directory(Path(directory))
        os.rename(whole, self._options.path)
        sync_directory(self._options.path.parent)
        shutil.rmtree(self._staging, ignore_errors=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002  # all goes
        """Remove everything written."""
        shutil.rmtree(self._staging, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    """Move the contents of ``source`` to ``target``; directories that exist in both are merged. Raises
    ``PipelineError``.
    """
    for one in sorted(source.iterdir()):
        there = target / one.name
        if one.is_dir() and there.is_dir():
            _merge(one, there)
        elif there.exists():
            raise PipelineError(f"two tasks wrote {there}: rows of one part, topic and queueId belong in one task")
        else:
            os.rename(one, there)


def read_counts(path: Path) -> Written:
    """The number of units and keys in a target's files."""
    return Written(**json.loads((path / _COUNTS_FILE).read_text()))
