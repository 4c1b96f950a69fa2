"""Filters that readers apply to rows before the other columns are computed: topics, and Spark's pushed filters.

A pushed filter is either evaluated exactly as in Spark, or left to Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import datasource as spark

from dledger_spark.decode import RowFilter
from dledger_spark.directory import TimeBounds
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import COLUMNS, Projection

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
class TopicFilter:
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
        return (TopicFilter(options.topics, options.topic_pattern),)
    return ()


def check_topics(options: ReadOptions, content: str) -> None:
    """Raise ``OptionError`` if topics are selected in a log of entries without topics."""
    if content == "entry" and (options.topics or options.topic_pattern):
        raise OptionError("options subscribe and subscribePattern: these entries are not messages and have no topics")


@dataclass(frozen=True, slots=True)
class PushedFilter:
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


def pushed(found: spark.Filter, projection: Projection) -> PushedFilter | None:
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
    return PushedFilter(type(inner).__name__, name, value, negated)


def time_bounds(filters: Sequence[RowFilter]) -> TimeBounds:
    """When the rows that all these filters keep were stored."""
    bounds = TimeBounds()
    for one in filters:
        if isinstance(one, PushedFilter) and one.column == "storeTimestamp" and not one.negated:
            bounds = bounds.both(_bounds_of(getattr(spark, one.kind), one.value))
    return bounds


def _bounds_of(kind: type[spark.Filter], value: Any) -> TimeBounds:  # noqa: ANN401  # as in PushedFilter
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
