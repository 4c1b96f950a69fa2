"""The stream reader of the format ``dledger``: connects Spark with ``StreamProgress`` and ``RowReader``.

Spark keeps one such object per query, in a separate process, for planning; ``read`` runs in the tasks, on copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import Projection
from dledger_spark.source.client_log import ClientLog
from dledger_spark.source.filters import topic_filters
from dledger_spark.source.live import LogPartition, content_of, read_partition
from dledger_spark.source.offsets import LogOffset, parse_offset
from dledger_spark.source.progress import StreamProgress

_log = logging.getLogger(__name__)


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
