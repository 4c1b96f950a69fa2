"""Batches over a running group: what is committed at planning time, in even ranges, read by tasks over the network.

``RowReader`` converts a range's bytes to rows, in tasks of batches and of streams.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from dledger.errors import invariant
from dledger.types import LogChunk
from dledger_spark.decode import Content, DecodeContext, RowFilter, walk
from dledger_spark.decode.decoder import chain_after, decode_stretch, looks_at_checksums
from dledger_spark.decode.records import CHAIN_BEGIN, Chain
from dledger_spark.directory import TimeBounds
from dledger_spark.errors import BrokenRecordError, OptionError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions
from dledger_spark.schema import Projection
from dledger_spark.source.batch import (
    check_topics,
    decode_context,
    projected,
    pushed,
    settle_worker,
    time_bounds,
    topic_filters,
)
from dledger_spark.source.client_log import (
    ClientLog,
    CommittedRange,
    IndexRange,
    TrimmedError,
    begin_within,
    cut_kept,
    data_lost,
)

_log = logging.getLogger(__name__)
_LEAD: Final = 2
"""How many entries before a range are requested: the last one, and the one that verifies its header."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Converts log bytes to rows. Pickles. ``context`` contains everything but the source of the bytes."""

    group: str
    projection: Projection
    context: DecodeContext
    fail_on_data_loss: bool = True

    def read(self, log: ClientLog, wanted: IndexRange) -> Iterator[pa.RecordBatch]:
        """Every row of the range, in order. Raises ``DataLossError``, ``BrokenRecordError``."""
        yield from projected(self._found(log, wanted), self.projection)

    def _found(self, log: ClientLog, wanted: IndexRange) -> Iterator[pa.RecordBatch]:
        first = wanted.first
        context = replace(self.context, chain_before=self._chain_before(log, first))
        while first < wanted.end:
            try:
                for chunk in log.chunks(first, wanted.end):
                    context = yield from self._rows(chunk, context)
                    first = chunk.first_index + chunk.count
            except TrimmedError as trimmed:
                lost_end = min(trimmed.begin_index, wanted.end)
                invariant(
                    lost_end > first, "trimmed entries are before the start of the log", first=first, end=lost_end
                )
                if self.fail_on_data_loss:
                    raise data_lost(self.group, first, lost_end) from None
                _log.warning("entries %d to %d of %s are no longer kept", first, lost_end - 1, self.group)
                first = lost_end
                context = replace(context, chain_before=None)

    def _rows(self, chunk: LogChunk, context: DecodeContext) -> Generator[pa.RecordBatch, None, DecodeContext]:
        context = replace(
            context,
            base=chunk.position,
            segment=f"{chunk.segment_base:020d}",
            segment_base=chunk.segment_base,
        )
        try:
            return (yield from decode_stretch(chunk.data, self.projection.columns, context, chunk.first_index))
        except BrokenRecordError as error:
            raise BrokenRecordError(
                f"{error}. A member of group {self.group} sent it; another may have an intact copy: try another "
                "readFrom, and run dledger pipeline audit to find the damaged log"
            ) from error

    def _chain_before(self, log: ClientLog, first: int) -> Chain | None:
        """The chain before the first entry, if checksums matter: computed from the two previous ones, if kept."""
        if not looks_at_checksums(self.projection.columns, self.context):
            return None
        for count in range(min(_LEAD, first), 0, -1):
            try:
                data = b"".join(chunk.data for chunk in log.chunks(first - count, first))
            except TrimmedError:
                continue
            starts = walk(data, "entry").starts
            return chain_after(np.frombuffer(data, np.uint8), starts) if len(starts) == count else None
        return CHAIN_BEGIN if first == 0 else None


class LogPartition(InputPartition):
    """A task's input: a range of entries, and their contents."""

    def __init__(self, wanted: IndexRange, content: Content) -> None:
        super().__init__((wanted.first, wanted.end))
        self.wanted = wanted
        self.content = content


def live_reader(options: ReadOptions, projection: Projection) -> DataSourceReader:
    """The reader of a running group. Raises ``OptionError`` for options that do not apply to a batch."""
    if options.starting == LATEST:
        raise OptionError('startingOffsets=latest is for streams: in a batch use earliest or {"index": N}')
    if options.push_filters:
        return FilteringLiveReader(options, projection)
    return _LiveReader(options, projection)


def planned_range(options: ReadOptions, log: ClientLog, state: CommittedRange) -> IndexRange:
    """The range that a batch reads, never beyond the commit index. Raises ``OptionError``, ``DataLossError``."""
    first = state.begin_index if options.starting in (None, EARLIEST) else int(options.starting or 0)
    end = state.end_index if options.ending is None or options.ending == LATEST else options.ending
    if options.starting_ms is not None:  # excludes what has been committed since
        first = min(log.index_at(options.starting_ms), state.end_index)
    if options.ending_ms is not None:
        end = min(log.index_at(options.ending_ms), state.end_index)
    if end > state.end_index:
        raise OptionError(
            f"endingOffsets: entry {end - 1} is not committed yet, the last committed entry is "
            f"{state.end_index - 1}: read up to latest, or follow the group with readStream"
        )
    if first > state.end_index and (sure := log.confirmed_end()) is not None and first > sure:
        first = begin_within(options, state.group, first, sure)  # otherwise a member that is behind answered
    return IndexRange(first, max(first, end))


def within_times(log: ClientLog, wanted: IndexRange, times: TimeBounds) -> IndexRange:
    """The part of a range that holds all its messages of these times; all of it where times may go back."""
    if times == TimeBounds() or not wanted.count or not log.times_ascend():
        return wanted
    first = wanted.first if times.since_ms is None else max(wanted.first, log.index_at(times.since_ms))
    end = wanted.end if times.until_ms is None else min(wanted.end, log.index_at(times.until_ms))
    return IndexRange(min(first, wanted.end), max(min(first, wanted.end), end))


def content_of(options: ReadOptions, state: CommittedRange) -> Content:
    """The contents of the group's entries: a broker's messages, or arbitrary bytes. Raises ``OptionError``."""
    content: Content = "message" if state.holds_messages else "entry"
    if options.record_format != "auto":
        content = options.record_format
    check_topics(options, content)
    return content


def read_partition(
    options: ReadOptions, projection: Projection, filters: tuple[RowFilter, ...], partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a range, in a task."""
    if not isinstance(partition, LogPartition):  # Spark passes something else if there are no partitions
        return
    settle_worker()
    context = decode_context(options, projection, partition.content, filters)
    rows = RowReader(options.group, projection, context, options.fail_on_data_loss)
    yield from rows.read(ClientLog(options), partition.wanted)


class _LiveReader(DataSourceReader):
    """One query's reader, pickled by Spark for the tasks."""

    def __init__(self, options: ReadOptions, projection: Projection) -> None:
        self._options = options
        self._projection = projection
        self._filters: tuple[RowFilter, ...] = topic_filters(options)

    def partitions(self) -> Sequence[InputPartition]:
        """The ranges, at least one."""
        log = ClientLog(self._options)
        state = log.committed()
        content = content_of(self._options, state)
        log.check_topics()
        wanted = planned_range(self._options, log, state)
        if content == "message" and self._options.verify_crc == "false":  # as for a directory
            wanted = within_times(log, wanted, time_bounds(self._filters))
        return [LogPartition(one, content) for one in cut_kept(log, wanted, state, self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a range, in a task."""
        return read_partition(self._options, self._projection, self._filters, partition)


class FilteringLiveReader(_LiveReader):
    """The same, with filter pushdown. Spark refuses a reader that supports it unless the session enables it."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that can be evaluated here."""
        for one in filters:
            ours = pushed(one, self._projection)
            if ours is None:
                yield one
            else:
                self._filters = (*self._filters, ours)
