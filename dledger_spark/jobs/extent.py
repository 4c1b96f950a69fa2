"""The extent of a log, for jobs that continue where they ended.

A replicated log is counted in entries, by index, in a directory as in a running group. The log of a plain broker, or
one that was plain once, has no indexes throughout, and is counted in bytes, by position.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from dledger.errors import ConfigError
from dledger_spark.jobs.errors import JobError
from dledger_spark.jobs.source import LogSource

if TYPE_CHECKING:
    from dledger_spark.directory import LogDirectory, LogSegment
    from dledger_spark.options import ReadOptions
    from dledger_spark.source.client_log import ClientLog

Unit = Literal["index", "position"]
"""The unit of counting, which is also the name of its column."""


class _Places(Protocol):
    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        """The highest end up to ``end`` with at most ``size_bytes`` between ``first`` and it; at least one record."""

    def at_time(self, time_ms: int) -> int:
        """The first place stored at this time or later, or the end."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The committed range now: from ``begin`` up to ``end`` (exclusive), in ``unit``."""

    identity: str
    """Equal for all copies of a replicated log, and different for all other logs."""
    unit: Unit
    begin: int
    end: int
    holds_messages: bool
    places: _Places
    group: str = ""
    """The group's name, for a replicated log, if known."""

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        """The highest end up to ``end`` with at most ``size_bytes`` between ``first`` and it; at least one record.

        For a plain log always ``end``.
        """
        return self.places.end_within(first, end, size_bytes)

    def at_time(self, time_ms: int) -> int:
        """The first place stored at this time or later, or the end."""
        return self.places.at_time(time_ms)


def read_options(source: LogSource) -> ReadOptions:
    """The format's options, validated before Spark is started. Raises ``ConfigError``."""
    from dledger_spark.errors import OptionError
    from dledger_spark.options import ReadOptions

    try:
        return ReadOptions.parse(source.options())
    except OptionError as error:
        raise ConfigError([str(error)]) from error


def extent_of(source: LogSource) -> Extent:
    """The extent of the selected log. Raises ``ConfigError``, and errors from reading the log."""
    whole = replace(source, from_index=None, to_index=None, from_time_ms=None, to_time_ms=None)
    options = read_options(whole)
    return _of_group(options) if source.is_live else _of_directory(source, options)


def _of_group(options: ReadOptions) -> Extent:
    from dledger_spark.source.client_log import ClientLog

    log = ClientLog(options)
    kept = log.committed()
    holds = kept.holds_messages if options.record_format == "auto" else options.record_format == "message"
    name = identity_of(kept.cluster, kept.group)
    return Extent(name, "index", kept.begin_index, kept.end_index, holds, _GroupPlaces(log), kept.group)


def _of_directory(source: LogSource, options: ReadOptions) -> Extent:
    from dledger.store.identity import read_identity
    from dledger_spark.directory import open_directory
    from dledger_spark.directory.log import first_index_of

    log = open_directory(options.path, allow_uncommitted=options.allow_uncommitted)
    content = log.content() if options.record_format == "auto" else options.record_format
    places = _DirectoryPlaces(log, options)
    if not log.segments or any(one.framing == "plain" for one in log.segments):
        if source.from_index is not None or source.to_index is not None:
            raise ConfigError(
                [f"{source.name} is or was a plain log, which has no indexes: use --from-time and --to-time"]
            )
        identity = f"plain log in {log.path.resolve()}"
        return Extent(identity, "position", log.begin, log.end, content == "message", _PositionPlaces(places))
    node = log.index.directory.parent if log.index is not None else log.path
    known = read_identity(node)
    identity = f"log in {log.path.resolve()}" if known is None else identity_of(known.cluster_id, known.group)
    begin = first_index_of(log, log.segments[0])
    group = "" if known is None else known.group
    return Extent(identity, "index", begin, log.committed + 1, content == "message", places, group)


def identity_of(cluster: str, group: str) -> str:
    """The identity of a replicated log."""
    return f"group {group} of cluster {cluster}"


@dataclass(frozen=True, slots=True)
class _GroupPlaces:
    log: ClientLog

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        from dledger_spark.source.group_log import TrimmedError
        from dledger_spark.source.ranges import IndexRange, end_within

        try:
            return end_within(IndexRange(first, end), size_bytes, self.log)
        except TrimmedError as error:
            raise JobError(
                f"the log was trimmed meanwhile and now starts at {error.begin_index}: run the job again"
            ) from error

    def at_time(self, time_ms: int) -> int:
        return self.log.index_at(time_ms)


@dataclass(frozen=True, slots=True)
class _DirectoryPlaces:
    log: LogDirectory
    options: ReadOptions

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        from dledger_spark.directory.log import first_index_of

        begin, last = self._place(first), self._place(end - 1)
        limit = begin[0] + size_bytes
        if last[1] <= limit:
            return end
        number = bisect_right(self.log.segments, limit, key=lambda one: one.base) - 1
        segment, after = self.log.segments[number], self.log.segments[number + 1 : number + 2]
        low = max(first, first_index_of(self.log, segment))  # all earlier entries end before the limit
        high = min(end, first_index_of(self.log, after[0])) if after else end  # all entries from there on end after it
        return max(first + 1, low + self._ending_before(limit, segment, low, high))

    def _ending_before(self, limit: int, segment: LogSegment, low: int, high: int) -> int:
        """How many entries of a segment, from ``low`` up to ``high`` (exclusive), end at or before a position."""
        from dledger_spark.decode import walk

        index = self.log.index
        if index is not None and all(index.place(one) is not None for one in (low, high - 1)):
            return bisect_right(range(low, high), limit, key=lambda one: self._place(one)[1])
        start = self._place(low)[0] - segment.base
        with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
            found = walk(mapped, segment.framing, start, min(segment.size, self.log.end - segment.base))
        ends = [*(int(one) for one in found.starts[1:]), found.end]
        return bisect_right(ends, limit - segment.base)

    def _place(self, index: int) -> tuple[int, int]:
        from dledger_spark.directory import locate

        place = locate(self.log, index)
        if place is None:
            raise JobError(f"entry {index} is no longer in {self.log.path}: run the job again")
        return place

    def at_time(self, time_ms: int) -> int:
        position = self.position_at(time_ms)
        segment = self.log.segment_at(position) if position < self.log.end else None
        header = None if segment is None else segment.header(position)
        return self.log.committed + 1 if header is None else header.index

    def position_at(self, time_ms: int) -> int:
        from dledger_spark.directory import range_of

        return range_of(self.log, replace(self.options, starting_ms=time_ms))[0]


@dataclass(frozen=True, slots=True)
class _PositionPlaces:
    directory: _DirectoryPlaces

    def end_within(self, first: int, end: int, size_bytes: int) -> int:  # noqa: ARG002  # a port
        # Readers reach a position only by passing everything before it: one batch, of any size, reads the log once.
        return end

    def at_time(self, time_ms: int) -> int:
        return self.directory.position_at(time_ms)
