"""Digests the files of plain logs on Spark, one in a task, for ``dledger upgrade check --spark``.

The format ``dledger-old-logs`` has one row per file of a ``plan`` (JSON: lists of log number, base, path, segment
size). A file that cannot be read is a row with an ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from dledger.errors import DiskError
from dledger_spark.jobs.command import JobFrame, job_session, spark_errors_in_a_sentence
from dledger_spark.source.batch import settle_worker
from rocketstore.commit_log.base_log import FileDigest, FileEnding, PlainFiles, digest_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_NAME: Final = "dledger-old-logs"
_ARROW: Final = pa.schema(
    [
        ("log", pa.int32()),
        ("base", pa.int64()),
        ("length", pa.int64()),
        ("crc32c", pa.int64()),
        ("records", pa.int64()),
        ("ending", pa.string()),
        ("reason", pa.string()),
        ("error", pa.string()),
    ]
)
_SCHEMA: Final = (
    "log int, base long, length long, crc32c long, records long, ending string, reason string, error string"
)


@dataclass
class _OldLogFile(InputPartition):
    """A file to digest."""

    log: int
    base: int
    path: str
    segment_bytes: int

    def __init__(self, log: int, base: int, path: str, segment_bytes: int) -> None:
        super().__init__(None)
        self.log, self.base, self.path, self.segment_bytes = log, base, path, segment_bytes


class _OldLogsDataSource(DataSource):
    """The format; see the module."""

    @classmethod
    def name(cls) -> str:
        """``dledger-old-logs``."""
        return _NAME

    def schema(self) -> str:
        """The only schema supported."""
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  # as Spark calls it
        """Of the plan in the options."""
        return _OldLogsReader(self.options)


class _OldLogsReader(DataSourceReader):
    """A partition per file."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._plan = options["plan"]

    def partitions(self) -> Sequence[InputPartition]:
        """One per file."""
        return [_OldLogFile(*one) for one in json.loads(self._plan)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The row of one file."""
        if not isinstance(partition, _OldLogFile):  # Spark passes something else if there are no partitions
            return
        settle_worker()
        row: dict[str, object] = {"log": partition.log, "base": partition.base}
        try:
            one = digest_file(Path(partition.path), partition.base, partition.segment_bytes)
            row |= {**one._asdict(), "ending": one.ending.value}
        except OSError as error:
            row["error"] = f"{partition.path}: {error.strerror}"
        yield pa.RecordBatch.from_pylist([row], schema=_ARROW)


def digest_on_spark(
    logs: Sequence[PlainFiles], master: str | None, conf: Mapping[str, str] | None = None
) -> list[list[FileDigest]]:
    """The digests of each log's files, oldest first; workers must see the files under the same paths.

    ``master``: where Spark runs; None: on this machine. Raises ``DiskError`` for a file that a task cannot read, and
    what ``job_session`` raises.
    """
    with job_session(JobFrame(master, conf or {}, as_json=True, html=None)) as spark, spark_errors_in_a_sentence():
        return digest_in(spark, logs)


def digest_in(spark: SparkSession, logs: Sequence[PlainFiles]) -> list[list[FileDigest]]:
    """The same in a session."""

    wanted = [
        (number, base, str(path.absolute()), files.segment_bytes)
        for number, files in enumerate(logs)
        for base, path in files.paths.items()
    ]
    found: list[list[FileDigest]] = [[] for _ in logs]
    if not wanted:
        return found
    spark.dataSource.register(_OldLogsDataSource)
    for row in spark.read.format(_NAME).option("plan", json.dumps(wanted)).load().collect():
        if row["error"] is not None:
            raise DiskError(f"a Spark task cannot read a log file: {row['error']}")
        ending = FileEnding(row["ending"])
        one = FileDigest(row["base"], row["length"], row["crc32c"], row["records"], ending, row["reason"])
        found[row["log"]].append(one)
    return [sorted(digests, key=lambda one: one.base) for digests in found]
