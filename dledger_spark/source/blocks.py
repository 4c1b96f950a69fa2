"""Format ``dledger-blocks``: the digest of every block of the replicas of a log, to compare them.

One row per replica and block. ``load("/a/dledger-n0,/b/dledger-n1")`` reads directories; with ``plan`` (JSON: lists of
replica, path, base, start, stop), it reads exactly those stretches, which is how the audit gives every task the same
bounds. With ``bootstrap.servers`` and the other options of the format ``dledger`` for a running group, the paths of a
plan are addresses of nodes, and each node digests its own disk.

Rows are transferred as Arrow batches; a block that cannot be read is a row with an ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from dledger_spark.audit.live import connected, live_digest
from dledger_spark.audit.replica import (
    BLOCK_BYTES,
    SPLIT_BYTES,
    ReplicaDigest,
    Stretch,
    common_end,
    coverage,
    digest,
    open_replicas,
    plan,
)
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions, unknown_option
from dledger_spark.source.batch import settle_worker

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NAME: Final = "dledger-blocks"
SCHEMA: Final = "replica string, position long, bytes long, crc32c long, error string"
_ARROW: Final = pa.schema(
    [
        ("replica", pa.string()),
        ("position", pa.int64()),
        ("bytes", pa.int64()),
        ("crc32c", pa.int64()),
        ("error", pa.string()),
    ]
)
_OPTIONS: Final = {name.lower(): name for name in ("path", "plan", "blockBytes", "splitBytes")}
_ROWS_MAX: Final = 4096


@dataclass
class _BlocksPartition(InputPartition):
    """A stretch to digest."""

    stretch: Stretch

    def __init__(self, stretch: Stretch) -> None:
        super().__init__(None)
        self.stretch = stretch


class BlocksDataSource(DataSource):
    """The format; see the module."""

    @classmethod
    def name(cls) -> str:
        """``dledger-blocks``."""
        return NAME

    def schema(self) -> str:
        """The only schema supported."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises ``OptionError``."""
        return _BlocksReader(self.options, [one.name for one in schema.fields])


class _BlocksReader(DataSourceReader):
    """Plans on the driver, digests in tasks."""

    def __init__(self, options: Mapping[str, str], columns: Sequence[str]) -> None:
        options = {name.lower(): value for name, value in options.items()}
        others = {name: value for name, value in options.items() if name not in _OPTIONS}
        self._connection = ReadOptions.parse(others) if "bootstrap.servers" in others else None
        if others and self._connection is None:
            problems = [unknown_option(name, _OPTIONS) for name in sorted(others)]
            raise OptionError(
                f"format {NAME}: {'; '.join(problems)} (for running nodes it also takes the options of the "
                "format dledger and requires bootstrap.servers)"
            )
        if columns != _ARROW.names:
            raise OptionError(f"{NAME} has exactly the columns {SCHEMA}")
        self._path = options.get("path", "")
        self._plan = options.get("plan", "")
        if self._connection is not None and not self._plan:
            raise OptionError(f"{NAME} requires a plan for running nodes: `dledger pipeline audit` creates one")
        self._block_bytes = _positive(options, "blockbytes", BLOCK_BYTES)
        self._split_bytes = _positive(options, "splitbytes", SPLIT_BYTES)

    def partitions(self) -> Sequence[InputPartition]:
        """One per stretch."""
        if self._plan:
            return [_BlocksPartition(Stretch(*one)) for one in json.loads(self._plan)]
        replicas = open_replicas([Path(one.strip()) for one in self._path.split(",") if one.strip()])
        end = common_end(replicas)
        if end is None:
            return []
        covered = coverage(
            [(one.name, int(one.begin.position)) for one in replicas], end.position, replicas[0].segment_bytes
        )
        return [_BlocksPartition(one) for one in plan(covered, replicas, self._block_bytes, self._split_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one stretch."""
        if not isinstance(partition, _BlocksPartition):  # Spark passes something else if there are no partitions
            return
        settle_worker()
        if self._connection is None:
            yield from _batches(digest(partition.stretch, self._block_bytes))
            return
        with connected(self._connection) as client:
            yield from _batches(live_digest(client, partition.stretch, self._block_bytes))


def _batches(digests: Iterable[ReplicaDigest]) -> Iterator[pa.RecordBatch]:
    rows: list[ReplicaDigest] = []
    for one in digests:
        rows.append(one)
        if len(rows) == _ROWS_MAX:
            yield _to_batch(rows)
            rows = []
    if rows:
        yield _to_batch(rows)


def _to_batch(rows: Sequence[ReplicaDigest]) -> pa.RecordBatch:
    """Digests as an Arrow batch for Spark."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[4] = [error or None for error in columns[4]]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _ARROW, strict=True)], schema=_ARROW
    )


def _positive(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, "")
    value = int(text) if text.isascii() and text.isdigit() else -1
    if text and value < 1:
        raise OptionError(f"{name}={text!r} must be a number of bytes greater than 0")
    return value if text else default
