"""The batch reader of a log directory: plans splits on the driver, reads them in tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from dledger_spark.decode import Content, DecodeContext, RowFilter
from dledger_spark.decode.typed_bodies import body_format
from dledger_spark.directory import Split, SplitSizes, open_directory, plan_splits, range_of, read_split, within_times
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import RAW_PROPERTIES, Projection
from dledger_spark.source.filters import check_topics, pushed, time_bounds, topic_filters
from dledger_spark.source.rows import projected, settle_worker

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class SplitPartition(InputPartition):
    """A task's input: its split, and the contents of the log."""

    split: Split
    content: Content

    def __post_init__(self) -> None:
        super().__init__(self.split.begin)


class DirectoryReader(DataSourceReader):
    """Reads the committed part of a log directory. Pickled between processes, so it holds nothing open."""

    def __init__(self, options: ReadOptions, projection: Projection) -> None:
        self._options = options
        self._projection = projection
        self._filters: tuple[RowFilter, ...] = topic_filters(options)

    def partitions(self) -> Sequence[SplitPartition]:
        options = self._options
        log = open_directory(options.path, allow_uncommitted=options.allow_uncommitted)
        content = log.content() if options.record_format == "auto" else options.record_format
        check_topics(options, content)
        begin, end = range_of(log, options)
        if content == "message" and options.verify_crc == "false":  # otherwise all that is asked for is verified
            begin, end = within_times(log, begin, end, time_bounds(self._filters))
        sizes = SplitSizes(options.split_bytes, options.min_partitions, options.max_records_per_partition)
        return [SplitPartition(split, content) for split in plan_splits(log, begin, end, sizes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, SplitPartition):  # Spark passes something else if there are no partitions
            return
        settle_worker()
        found = read_split(
            partition.split,
            self._projection.columns,
            decode_context(self._options, self._projection, partition.content, self._filters),
            self._options.split_bytes,
        )
        yield from projected(found, self._projection)


class FilteringDirectoryReader(DirectoryReader):
    """The same, with filter pushdown. Spark refuses a reader that supports it unless the session enables it."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        for one in filters:
            ours = pushed(one, self._projection)
            if ours is None:
                yield one
            else:
                self._filters = (*self._filters, ours)


def decode_context(
    options: ReadOptions, projection: Projection, content: Content, filters: tuple[RowFilter, ...] = ()
) -> DecodeContext:
    """How to decode what the options select; the source of the bytes is added later."""
    is_raw = RAW_PROPERTIES in projection.columns
    return DecodeContext(
        content=content,
        verify_crc=options.verify_crc,
        schema_style=options.schema_style,
        properties_format="raw" if is_raw else "map",
        filters=filters,
        decompressed=options.decompressed,
        bodies=body_format(options) if any(one.of_body for one in projection.columns) else None,
    )


def directory_reader(options: ReadOptions, projection: Projection) -> DirectoryReader:
    """The reader for these options. Raises ``OptionError`` for options that only apply to running groups."""
    if options.consumer_group:
        raise OptionError("option consumerGroup: only for streams of a running group; a directory has no consumers")
    return (FilteringDirectoryReader if options.push_filters else DirectoryReader)(options, projection)
