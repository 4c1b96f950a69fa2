"""Decides what a stream reads next, and in which ranges: the stream reader's rules, without Spark or a network.

- Nothing beyond the commit index, whichever node reports it, or beyond the target of ``Trigger.AvailableNow``.
- A planned batch is read again in the same way after a restart: its end is in Spark's checkpoint, its start is the
  previous end, or ``initial`` (see ``offsets``), and the log does not change.
- An offset never goes back because a node is behind. It does if the log itself is shorter than the checkpoint says,
  and the user chose to continue (``failOnDataLoss=false``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from dledger_spark.errors import DataLossError
from dledger_spark.options import EARLIEST, LATEST, ReadOptions
from dledger_spark.source.client_log import ClientLog
from dledger_spark.source.group_log import CommittedRange, TrimmedError
from dledger_spark.source.offsets import LogOffset, check_same_log, first_of_batch
from dledger_spark.source.ranges import Cutting, IndexRange, cut, end_within

_log = logging.getLogger(__name__)
_TRIMS_MAX: Final = 10
"""How often the log's beginning may be removed while one batch is planned."""


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
        for _ in range(_TRIMS_MAX):
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


def cut_kept(log: ClientLog, whole: IndexRange, state: CommittedRange, options: ReadOptions) -> list[IndexRange]:
    """The kept ranges of a stretch. Raises ``DataLossError`` if a part is missing, unless the options allow it."""
    cutting = Cutting(options.split_bytes, options.max_records_per_partition, options.min_partitions)
    for _ in range(_TRIMS_MAX):
        kept = whole
        if state.begin_index > whole.first:
            lost_end = min(state.begin_index, whole.end)
            if options.fail_on_data_loss:
                raise data_lost(state.group, whole.first, lost_end)
            _log.warning("entries %d to %d of %s are no longer kept", whole.first, lost_end - 1, state.group)
            kept = IndexRange(lost_end, whole.end)
        try:
            return cut(kept, cutting, log)
        except TrimmedError:
            state = log.committed()
    raise trimmed_too_fast(state.group)


def begin_within(options: ReadOptions, group: str, index: int, end_index: int) -> int:
    """The start if the requested one is beyond the end. Raises ``DataLossError``, unless the options allow it."""
    if options.fail_on_data_loss:
        raise DataLossError(
            f"the read starts at entry {index}, but the committed log of group {group} ends before entry "
            f"{end_index}: startingOffsets is too large or from another log, or the log was replaced by an older "
            "one. To start at its end, set failOnDataLoss=false"
        )
    _log.warning("the log of %s ends before entry %d: starting at %d", group, index, end_index)
    return end_index


def data_lost(group: str, first: int, end: int) -> DataLossError:
    """The error for requested entries that are no longer kept."""
    return DataLossError(
        f"entries {first} to {end - 1} ({end - first} entries) of group {group} are no longer kept: the log was "
        "trimmed before they were read. To continue without them, set failOnDataLoss=false; to keep more, raise "
        "fileReservedTime"
    )


def trimmed_too_fast(group: str) -> DataLossError:
    """The error if retention keeps overtaking the planning."""
    return DataLossError(
        f"the log of group {group} is being trimmed faster than a read can be planned: start later, or keep more of it"
    )
