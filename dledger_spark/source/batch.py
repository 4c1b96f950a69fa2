"""The batch reader of a log directory: plans splits on the driver, reads them in tasks, filters rows.

Filters (topics, and those that Spark pushes down) apply to rows before the other columns are computed. A pushed filter
is either evaluated exactly as in Spark, or left to Spark.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import datasource as spark
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from dledger_spark.decode import Content, DecodeContext, RowFilter
from dledger_spark.decode.typed_bodies import body_format
from dledger_spark.directory import (
    Split,
    SplitSizes,
    TimeBounds,
    open_directory,
    plan_splits,
    range_of,
    read_split,
    within_times,
)
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import COLUMNS, RAW_PROPERTIES, Projection

if TYPE_CHECKING:
    import pyarrow as pa

_frozen: Final[list[bool]] = []


def projected(found: Iterator[pa.RecordBatch], projection: Projection) -> Iterator[pa.RecordBatch]:
    """The batches under the names that Spark expects, with exactly the schema that it checks."""
    schema = projection.schema
    for batch in found:
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def settle_worker() -> None:
    """Exclude everything loaded from garbage collection, once per process.

    Spark forks its workers from a daemon; a collection in each task would copy the memory that they share, and scan the
    modules of pyspark, numpy and Arrow: together 40 ms per task.
    """
    if not _frozen:
        _frozen.append(True)
        gc.collect()
        gc.freeze()


_COMPARISONS: Final[dict[type[spark.Filter], Callable[[pa.Array, pa.Scalar], pa.Array]]] = {
    spark.EqualTo: pc.equal,
    spark.GreaterThan: pc.greater,
    spark.GreaterThanOrEqual: pc.greater_equal,
    spark.LessThan: pc.less,
    spark.LessThanOrEqual: pc.less_equal,
}
_TEXT_SEARCHES: Final[dict[type[spark.Filter], Callable[..., pa.Array]]] = {
    spark.StringStartsWith: pc.starts_with,
    spark.StringEndsWith: pc.ends_with,
    spark.StringContains: pc.match_substring,
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_TYPES: Final = {one.name: one.arrow for one in COLUMNS}


@dataclass(frozen=True, slots=True)
class _TopicFilter:
    """``subscribe`` and ``subscribePattern``. Records too damaged to have a topic are kept, to be reported."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    columns: Sequence[str] = ("topic",)
    keeps_broken: bool = True

    def keeps(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        encoded = pc.dictionary_encode(batch.column(0))
        wanted = pa.array([self._wants(topic) for topic in encoded.dictionary.to_pylist()], pa.bool_())
        return _as_mask(wanted.take(encoded.indices))

    def _wants(self, topic: str) -> bool:
        return topic in self.topics if self.topics else bool(re.fullmatch(self.pattern, topic))


def topic_filters(options: ReadOptions) -> tuple[RowFilter, ...]:
    """The filters for the options' topics."""
    if options.topics or options.topic_pattern:
        return (_TopicFilter(options.topics, options.topic_pattern),)
    return ()


def check_topics(options: ReadOptions, content: str) -> None:
    """Raise ``OptionError`` if topics are selected in a log of entries without topics."""
    if content == "entry" and (options.topics or options.topic_pattern):
        raise OptionError("options subscribe and subscribePattern: these entries are not messages and have no topics")


@dataclass(frozen=True, slots=True)
class _PushedFilter:
    """One of Spark's filters on one column, in SQL logic: a null result keeps no row, negated or not."""

    kind: str
    column: str
    value: Any  # a number, a text, a time, or a tuple of them
    negated: bool = False
    keeps_broken: bool = False

    @property
    def columns(self) -> Sequence[str]:
        """The filtered column."""
        return (self.column,)

    def keeps(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        verdict = self._verdict(batch.column(0))
        return _as_mask(pc.invert(verdict) if self.negated else verdict)

    def _verdict(self, array: pa.Array) -> pa.Array:
        kind = getattr(spark, self.kind)
        if kind in _COMPARISONS:
            return _COMPARISONS[kind](array, pa.scalar(self.value, array.type))
        if kind in _TEXT_SEARCHES:
            return _TEXT_SEARCHES[kind](array, self.value)
        if kind is spark.In:
            found = pc.is_in(array, value_set=pa.array(self.value, array.type))
            return pc.if_else(array.is_valid(), found, None)
        if kind is spark.EqualNullSafe:
            return array.is_null() if self.value is None else pc.equal(array, self.value).fill_null(False)
        return array.is_null() if kind is spark.IsNull else array.is_valid()


def pushed(found: spark.Filter, projection: Projection) -> _PushedFilter | None:
    """The equivalent of one of Spark's filters; None if it must be left to Spark."""
    negated = isinstance(found, spark.Not)
    inner = found.child if isinstance(found, spark.Not) else found
    attribute = getattr(inner, "attribute", None)
    if attribute is None or len(attribute) != 1:
        return None
    names = dict(zip(projection.schema.names, projection.columns, strict=True))
    column = names.get(attribute[0])
    name = (column.source or column.name) if column is not None and not column.of_body else ""
    arrow = _TYPES.get(name)
    if column is None or arrow is None or arrow != column.arrow or not _is_plain(arrow):
        return None
    value = getattr(inner, "value", None)
    if not _fits(inner, value, arrow):
        return None
    return _PushedFilter(type(inner).__name__, name, value, negated)


def time_bounds(filters: Sequence[RowFilter]) -> TimeBounds:
    """When the rows that all these filters keep were stored."""
    bounds = TimeBounds()
    for one in filters:
        if isinstance(one, _PushedFilter) and one.column == "storeTimestamp" and not one.negated:
            bounds = bounds.both(_bounds_of(getattr(spark, one.kind), one.value))
    return bounds


def _bounds_of(kind: type[spark.Filter], value: Any) -> TimeBounds:  # noqa: ANN401  # as in _PushedFilter
    times = [_ms_of(one) for one in (value if kind is spark.In else [value]) if isinstance(one, datetime)]
    if kind in (spark.GreaterThan, spark.GreaterThanOrEqual) and times:
        return TimeBounds(times[0])
    if kind in (spark.LessThan, spark.LessThanOrEqual) and times:
        return TimeBounds(until_ms=times[0] + 1)
    if kind in (spark.EqualTo, spark.EqualNullSafe, spark.In) and times:
        return TimeBounds(min(times), max(times) + 1)
    return TimeBounds()


def _ms_of(time: datetime) -> int:
    """Rounded down; a time without a zone is in UTC, as Arrow takes it."""
    return (time.replace(tzinfo=time.tzinfo or UTC) - _EPOCH) // _MS


def _is_plain(arrow: pa.DataType) -> bool:
    return any(test(arrow) for test in (pa.types.is_integer, pa.types.is_string, pa.types.is_timestamp))


def _fits(found: spark.Filter, value: object, arrow: pa.DataType) -> bool:
    """Whether this kind of filter can be evaluated here, with this value and type."""
    try:
        if type(found) in _TEXT_SEARCHES:
            return pa.types.is_string(arrow) and isinstance(value, str)
        if isinstance(found, spark.In):
            values: pa.Array = pa.array(value, arrow)
            return bool(values.null_count == 0)
        if type(found) in _COMPARISONS:
            return bool(pa.scalar(value, arrow).is_valid)
        if isinstance(found, spark.EqualNullSafe):
            pa.scalar(value, arrow)
            return True
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return isinstance(found, spark.IsNull | spark.IsNotNull)


def _as_mask(verdict: pa.Array) -> NDArray[np.bool_]:
    kept: NDArray[np.bool_] = np.asarray(verdict.fill_null(False))
    return kept


@dataclass
class _SplitPartition(InputPartition):
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

    def partitions(self) -> Sequence[_SplitPartition]:
        options = self._options
        log = open_directory(options.path, allow_uncommitted=options.allow_uncommitted)
        content = log.content() if options.record_format == "auto" else options.record_format
        check_topics(options, content)
        begin, end = range_of(log, options)
        if content == "message" and options.verify_crc == "false":  # otherwise all that is asked for is verified
            begin, end = within_times(log, begin, end, time_bounds(self._filters))
        sizes = SplitSizes(options.split_bytes, options.min_partitions, options.max_records_per_partition)
        return [_SplitPartition(split, content) for split in plan_splits(log, begin, end, sizes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _SplitPartition):  # Spark passes something else if there are no partitions
            return
        settle_worker()
        found = read_split(
            partition.split,
            self._projection.columns,
            decode_context(self._options, self._projection, partition.content, self._filters),
            self._options.split_bytes,
        )
        yield from projected(found, self._projection)


class _FilteringDirectoryReader(DirectoryReader):
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
    return (_FilteringDirectoryReader if options.push_filters else DirectoryReader)(options, projection)
