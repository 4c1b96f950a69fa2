"""The stream reader of the format ``dledger``: its offsets, the rules of what a batch holds, and the link with Spark.

Spark keeps one reader per query, in a separate process, for planning; ``read`` runs in the tasks, on copies.

*Offsets* are kept in Spark's checkpoint. A group has one total order, so one number is the whole position: ``index`` is
the next entry to read. ``initial`` is where the stream started, repeated in every offset: Spark calls ``initialOffset``
again until the first batch is committed, and an answer such as "latest" has moved by then. The first batch starts at
the ``initial`` of its own end.

*Batches*:

- Nothing beyond the commit index, whichever node reports it, or beyond the target of ``Trigger.AvailableNow``.
- A planned batch is read again in the same way after a restart: its end is in Spark's checkpoint, its start is the
  previous end, or ``initial``, and the log does not change.
- An offset never goes back because a node is behind. It does if the log itself is shorter than the checkpoint says,
  and the user chose to continue (``failOnDataLoss=false``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from dledger.errors import DLedgerError
from dledger_spark.errors import DataLossError, OptionError, PipelineError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions
from dledger_spark.schema import Projection
from dledger_spark.source.batch import topic_filters
from dledger_spark.source.client_log import (
    TRIMS_MAX,
    ClientLog,
    CommittedRange,
    IndexRange,
    TrimmedError,
    begin_within,
    cut_kept,
    data_lost,
    end_within,
    trimmed_too_fast,
)
from dledger_spark.source.live import LogPartition, content_of, read_partition

_log = logging.getLogger(__name__)
VERSION: Final = 1
_NUMBERS: Final = ("v", "index", "initial")
_TEXTS: Final = ("cluster", "group")
_FIELDS: Final = frozenset((*_NUMBERS, *_TEXTS))
_INDEX_MAX: Final = 2**63 - 1


class OffsetError(PipelineError):
    """Raised when a checkpoint's offset cannot be used: damaged, of a newer version, or of another log."""


@dataclass(frozen=True, slots=True)
class LogOffset:
    """A position in one group's log, exclusive if it ends a batch. Entries are counted from 0."""

    cluster: str
    group: str
    index: int
    initial: int

    def to_dict(self) -> dict[str, str | int]:
        """The form stored by Spark: only numbers and texts."""
        return {
            "v": VERSION,
            "cluster": self.cluster,
            "group": self.group,
            "index": self.index,
            "initial": self.initial,
        }

    def at(self, index: int) -> LogOffset:
        """Another position of the same stream."""
        return LogOffset(self.cluster, self.group, index, self.initial)


def parse_offset(raw: Mapping[str, object]) -> LogOffset:
    """Raises ``OffsetError`` for anything that ``to_dict`` does not produce."""
    version = raw.get("v")
    if _is_index(version) and version > VERSION:
        raise OffsetError(f"the checkpoint was written by a newer version ({version}, this one knows {VERSION}): {raw}")
    if raw.keys() != _FIELDS or not _is_index(version) or version != VERSION:
        raise OffsetError(f"the checkpoint does not contain an offset of a dledger stream: {raw}")
    cluster, group = (raw[name] for name in _TEXTS)
    index, initial = raw["index"], raw["initial"]
    if not (isinstance(cluster, str) and isinstance(group, str) and _is_index(index) and _is_index(initial)):
        raise OffsetError(f"the checkpoint's offset is damaged: {raw}")
    return LogOffset(cluster, group, index, initial)


def check_same_log(offset: LogOffset, cluster: str, group: str) -> None:
    """Raises ``OffsetError`` if the offset is of another log, where its numbers are meaningless."""
    if (offset.cluster, offset.group) != (cluster, group):
        raise OffsetError(
            f"the checkpoint belongs to group {offset.group!r} of cluster {offset.cluster!r}, but the servers "
            f"are group {group!r} of cluster {cluster!r}: use another checkpointLocation, or the right "
            "bootstrap.servers"
        )


def first_of_batch(start: LogOffset, end: LogOffset) -> int:
    """The first index of the batch from ``start`` to ``end``.

    A start equal to its stream's initial position has read nothing yet. It may then be a later answer of
    ``initialOffset`` than the one used for planning the batch, so the batch's own end takes precedence.
    """
    return end.initial if start.index == start.initial else start.index


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INDEX_MAX


class StreamProgress:
    """One per stream and process; used by one thread."""

    def __init__(self, options: ReadOptions, log: ClientLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._log = log
        self._clock = clock
        self._target: int | None = None  # of AvailableNow
        self._triggered_at: float | None = None

    def initial(self) -> LogOffset:
        """Where a stream without a checkpoint starts. Raises ``DataLossError`` for an entry that does not exist yet."""
        options, state = self._options, self._log.committed()
        if options.starting_ms is not None:
            index = self._log.index_at(options.starting_ms)
        else:
            starting = LATEST if options.starting is None else options.starting
            index = {EARLIEST: state.begin_index, LATEST: state.end_index}.get(starting, starting)
        if index > state.end_index and (sure := self._log.confirmed_end()) is not None and index > sure:
            index = begin_within(options, state.group, index, sure)
        return LogOffset(state.cluster, state.group, index, index)

    def stop_at_present_end(self) -> None:
        """Read only what is committed now, for ``Trigger.AvailableNow``."""
        self._target = self._log.committed().end_index

    def present_end(self) -> LogOffset:
        """The committed end, for reporting a stream's lag."""
        state = self._log.committed()
        return LogOffset(state.cluster, state.group, state.end_index, state.end_index)

    def next_end(self, start: LogOffset, *, limited: bool) -> LogOffset:
        """The end of the batch that starts at ``start``; ``start`` itself if there is nothing to read yet.

        ``limited``: the options' limits apply. Raises ``DataLossError``, ``OffsetError``.
        """
        state = self._log.committed()
        check_same_log(start, state.cluster, state.group)
        if start.index > state.end_index and (sure := self._log.confirmed_end()) is not None and start.index > sure:
            return self._shorter_log(start, state.group, sure)
        end = state.end_index if self._target is None else min(state.end_index, self._target)
        if start.index >= end:
            return start
        for _ in range(TRIMS_MAX):
            if state.begin_index > start.index and self._options.fail_on_data_loss:
                raise data_lost(state.group, start.index, min(state.begin_index, end))
            kept = IndexRange(min(max(start.index, state.begin_index), end), end)
            if limited and self._waits_for_more(kept):
                return start
            try:
                reached = self._within_limits(kept) if limited else end
            except TrimmedError:
                state = self._log.committed()
                continue
            self._triggered_at = self._clock()
            return start.at(reached)
        raise trimmed_too_fast(state.group)

    def plan(self, start: LogOffset, end: LogOffset) -> tuple[CommittedRange, list[IndexRange]]:
        """The ranges of the batch between two offsets: at least one, possibly empty. Raises ``DataLossError``."""
        state = self._log.committed()
        check_same_log(end, state.cluster, state.group)
        first = first_of_batch(start, end)
        if first >= end.index:
            return state, [IndexRange(end.index, end.index)]
        return state, cut_kept(self._log, IndexRange(first, end.index), state, self._options)

    def _waits_for_more(self, kept: IndexRange) -> bool:
        """Whether there is so little that the batch is delayed, for a limited time."""
        options = self._options
        if self._target is not None or kept.count >= options.min_rows_per_trigger or self._triggered_at is None:
            return False
        return self._clock() - self._triggered_at < options.max_trigger_delay_ms / 1000

    def _within_limits(self, kept: IndexRange) -> int:
        options = self._options
        if options.max_rows_per_trigger:
            kept = IndexRange(kept.first, min(kept.end, kept.first + options.max_rows_per_trigger))
        if options.max_bytes_per_trigger:
            return end_within(kept, options.max_bytes_per_trigger, self._log)
        return kept.end

    def _shorter_log(self, start: LogOffset, group: str, end_index: int) -> LogOffset:
        if start.index == start.initial:  # the stream's start: it may have read nothing
            return start.at(begin_within(self._options, group, start.index, end_index))
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"the stream has read up to entry {start.index} of group {group}, but the committed log ends at "
                f"{end_index}: it was replaced by another or older log. To continue with new entries only, set "
                "failOnDataLoss=false; to read it again, use another checkpointLocation"
            )
        _log.warning("the log of %s ends before entry %d: continuing at %d", group, start.index, end_index)
        return start.at(end_index)


def stream_reader(options: ReadOptions, projection: Projection) -> DataSourceStreamReader:
    """The reader for these options. Raises ``OptionError`` for those that do not apply to a stream."""
    problems = []
    if not options.is_live:
        problems.append("a stream follows a running group (bootstrap.servers), not a directory")
    if options.ending_ms is not None or options.ending is not None:
        problems.append("a stream has no end: leave endingOffsets and endingTimestamp out, or read a batch")
    if problems:
        raise OptionError("; ".join(problems))
    return LogStreamReader(options, projection)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's reader. Offsets are dictionaries, as Spark stores them."""

    def __init__(self, options: ReadOptions, projection: Projection) -> None:
        self._options = options
        self._projection = projection
        self._log = ClientLog(options)
        self._progress = StreamProgress(options, self._log)
        self._published = -1
        self._warned = False

    # --- planning, in the query's own process ------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, str | int]:  # noqa: N802 - Spark's name, as those below
        """Where a new stream starts."""
        self._log.check_topics()
        return self._progress.initial().to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Tells Spark that there is a limit; ``StreamProgress`` applies the actual ones (Spark accepts only one)."""
        options = self._options
        if options.max_rows_per_trigger:
            return ReadMaxRows(options.max_rows_per_trigger)
        if options.max_bytes_per_trigger:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_rows_per_trigger:
            return ReadMinRows(options.min_rows_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, str | int]:  # noqa: N802
        """The end of the next batch."""
        before = parse_offset(start)
        self._publish(before)  # Spark commits a batch only with the next one, so the last one would never be published
        return self._progress.next_end(before, limited=not isinstance(limit, ReadAllAvailable)).to_dict()

    def reportLatestOffset(self) -> dict[str, str | int]:  # noqa: N802
        """The committed end, for the query's progress: the lag is its distance from the end offset."""
        return self._progress.present_end().to_dict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read only up to what is committed now."""
        self._progress.stop_at_present_end()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """The batch's ranges, which are the same whenever it is planned."""
        state, ranges = self._progress.plan(parse_offset(start), parse_offset(end))
        content = content_of(self._options, state)
        return [LogPartition(one, content) for one in ranges]

    def commit(self, end: Mapping[str, Any]) -> None:
        """A batch is done: publish the progress."""
        self._publish(parse_offset(end))

    def _publish(self, done: LogOffset) -> None:
        """Publish the progress as offsets of the consumer group, if one is set, so that tools can show its lag.

        Advisory: the progress is in Spark's checkpoint. So a failure is logged and does not stop the stream.
        """
        group = self._options.consumer_group
        if not group or done.index in (self._published, done.initial):
            return
        try:
            self._log.publish(group, done.index)
            self._published, self._warned = done.index, False
        except DLedgerError as error:
            if not self._warned:  # retried with every batch: warn once, until it has worked again
                _log.warning("the offsets of group %s cannot be published at the moment: %s", group, error)
            self._warned = True

    # --- in the tasks -------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a range."""
        return read_partition(self._options, self._projection, topic_filters(self._options), partition)
