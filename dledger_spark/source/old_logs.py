"""Format ``dledger-old-logs``: the digests of plain logs' files, for ``dledger upgrade check --spark``.

One row per file of a ``plan`` (JSON: lists of log number, base, path, segment size), each of which is read and verified
in a task of its own. A file that cannot be read is a row with an ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from dledger_spark.source.rows import settle_worker
from rocketstore.commit_log.base_log import digest_file

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NAME: Final = "dledger-old-logs"
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
class OldLogFile(InputPartition):
    """A file to digest."""

    log: int
    base: int
    path: str
    segment_bytes: int

    def __init__(self, log: int, base: int, path: str, segment_bytes: int) -> None:
        super().__init__(None)
        self.log, self.base, self.path, self.segment_bytes = log, base, path, segment_bytes


class OldLogsDataSource(DataSource):
    """The format; see the module."""

    @classmethod
    def name(cls) -> str:
        """``dledger-old-logs``."""
        return NAME

    def schema(self) -> str:
        """The only schema supported."""
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  # as Spark calls it
        """Of the plan in the options."""
        return OldLogsReader(self.options)


class OldLogsReader(DataSourceReader):
    """A partition per file."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._plan = options["plan"]

    def partitions(self) -> Sequence[InputPartition]:
        """One per file."""
        return [OldLogFile(*one) for one in json.loads(self._plan)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The row of one file."""
        if not isinstance(partition, OldLogFile):  # Spark passes something else if there are no partitions
            return
        settle_worker()
        row: dict[str, object] = {"log": partition.log, "base": partition.base}
        try:
            one = digest_file(Path(partition.path), partition.base, partition.segment_bytes)
            row |= {**one._asdict(), "ending": one.ending.value}
        except OSError as error:
            row["error"] = f"{partition.path}: {error.strerror}"
        yield pa.RecordBatch.from_pylist([row], schema=_ARROW)
