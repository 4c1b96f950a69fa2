"""``dledger pipeline retention``: size and age of each segment and topic, and what a setting would delete.

The rules are those of the logs' cleaners: logs are deleted by whole segments, oldest first, and the newest segment
always stays. A segment expires when its last write is older than the setting.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import click

from dledger.command_line import flag_values
from dledger.command_line.report_page import Bars, Chart, CountUnit, Series
from dledger.command_line.report_page import shown as figure
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.jobs.source import LogSource, source_options

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

_MS_PER_HOUR = 3_600_000


@dataclass(frozen=True, slots=True)
class RetentionSegment:
    """One file of the log. ``disk_bytes``: its size with reserved space; ``live_bytes``: the size of its records."""

    name: str
    messages: int
    live_bytes: int
    disk_bytes: int
    oldest_ms: int | None
    """None if nothing in it has a timestamp."""
    newest_ms: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """How much to keep; None: no limit. With both, whatever exceeds either is deleted."""

    hours: float | None = None
    disk_bytes: int | None = None

    @property
    def words(self) -> str:
        """The setting in words, for titles and tables."""
        parts = [] if self.hours is None else [f"{self.hours:g} h"]
        return " and ".join([*parts, *([] if self.disk_bytes is None else [f"{self.disk_bytes:,} bytes"])]) or "all"


@dataclass(frozen=True, slots=True)
class RetentionOutcome:
    """The effect of a setting: the first ``segments`` would be deleted."""

    segments: int
    messages: int
    live_bytes: int
    disk_bytes: int
    kept_disk_bytes: int
    kept_from_ms: int | None
    """The oldest time that would be kept."""


def outcome(segments: Sequence[RetentionSegment], setting: Setting, now_ms: int) -> RetentionOutcome:
    """The part of ``segments`` (the oldest first) that ``setting`` would delete at ``now_ms``."""
    count = _deleted(segments, setting, now_ms)
    gone, kept = segments[:count], segments[count:]
    return RetentionOutcome(
        count,
        sum(one.messages for one in gone),
        sum(one.live_bytes for one in gone),
        sum(one.disk_bytes for one in gone),
        sum(one.disk_bytes for one in kept),
        next((one.oldest_ms for one in kept if one.oldest_ms is not None), None),
    )


def _deleted(segments: Sequence[RetentionSegment], setting: Setting, now_ms: int) -> int:
    left = sum(one.disk_bytes for one in segments)
    for count, one in enumerate(segments[:-1]):
        old = (
            setting.hours is not None
            and one.newest_ms is not None
            and now_ms - one.newest_ms > setting.hours * _MS_PER_HOUR
        )
        if not old and (setting.disk_bytes is None or left <= setting.disk_bytes):
            return count
        left -= one.disk_bytes
    return max(0, len(segments) - 1)


DEFAULT: Final = Setting(hours=72)
HOURS: Final = (1.0, 6.0, 12.0, 24.0, 48.0, 72.0, 168.0, 336.0, 720.0)
"""Settings shown in addition to the requested one."""
NO_MESSAGE: Final = "(entries that are not messages)"
_SCHEMA: Final = "segment string, topic string, size int, storeTimestamp timestamp"
_BARS_MAX: Final = 40
_TOPICS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """``now_ms``: the reference time for ages; None: the current time."""

    source: LogSource
    setting: Setting = DEFAULT
    now_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """One topic's share of one segment."""

    segment: str
    topic: str
    messages: int
    size_bytes: int
    oldest_ms: int | None
    newest_ms: int | None


def run(spark: SparkSession, options: RetentionOptions) -> JobReport:
    """Read every header once."""
    from pyspark.sql import functions as f

    rows = (
        options.source.read(spark, _SCHEMA)
        .groupBy("segment", "topic")
        .agg(
            f.count(f.lit(1)).alias("messages"),
            f.sum(f.col("size").cast("bigint")).alias("bytes"),
            f.unix_millis(f.min("storeTimestamp")).alias("oldest_ms"),
            f.unix_millis(f.max("storeTimestamp")).alias("newest_ms"),
        )
        .collect()
    )
    now_ms = int(time.time() * 1000) if options.now_ms is None else options.now_ms
    return report(options, [_part(row) for row in rows], _files(options.source), now_ms)


def _part(row: Row) -> _Part:
    topic = NO_MESSAGE if row["topic"] is None else row["topic"]
    return _Part(row["segment"], topic, row["messages"], row["bytes"], row["oldest_ms"], row["newest_ms"])


def _files(source: LogSource) -> Mapping[str, tuple[int, int]]:
    """Size and modification time (ms) of the segment files; empty for a running group, whose files are remote."""
    if source.is_live:
        return {}
    from dledger_spark.directory import open_directory
    from dledger_spark.jobs.source import read_options

    options = read_options(source)
    log = open_directory(options.path, allow_uncommitted=options.allow_uncommitted)
    return {one.name: (one.size, one.path.stat().st_mtime_ns // 1_000_000) for one in log.segments}


def segments_of(parts: Sequence[_Part], files: Mapping[str, tuple[int, int]]) -> list[RetentionSegment]:
    """The segments, oldest first, named by their positions."""
    by_segment: dict[str, list[_Part]] = defaultdict(list)
    for one in parts:
        by_segment[one.segment].append(one)
    found = []
    for name in sorted({*by_segment, *files}):
        inside = by_segment[name]
        live = sum(one.size_bytes for one in inside)
        size, changed_ms = files.get(name, (live, None))
        oldest = [one.oldest_ms for one in inside if one.oldest_ms is not None]
        newest = [one.newest_ms for one in inside if one.newest_ms is not None]
        messages = sum(one.messages for one in inside)
        found.append(
            RetentionSegment(name, messages, live, size, min(oldest, default=None), max(newest, default=changed_ms))
        )
    return found


# -- what people read -------------------------------------------------------------------------------------------------


def report(
    options: RetentionOptions, parts: Sequence[_Part], files: Mapping[str, tuple[int, int]], now_ms: int
) -> JobReport:
    """The report of the counts."""
    segments = segments_of(parts, files)
    found = outcome(segments, options.setting, now_ms)
    live = sum(one.live_bytes for one in segments)
    disk = sum(one.disk_bytes for one in segments)
    oldest = min((one.oldest_ms for one in segments if one.oldest_ms is not None), default=None)
    gone = {one.name for one in segments[: found.segments]}
    summary = (
        Fact("log", options.source.name),
        Fact("segments", len(segments), CountUnit.COUNT),
        Fact("messages", sum(one.messages for one in segments), CountUnit.COUNT),
        Fact("live bytes", live, CountUnit.BYTES),
        Fact("bytes on disk", disk, CountUnit.BYTES),
        Fact("oldest message", oldest, CountUnit.TIME_MS),
        Fact("age of the oldest", _age(oldest, now_ms), CountUnit.SECONDS),
        Fact("setting", options.setting.words),
        Fact("deleted segments", found.segments, CountUnit.COUNT),
        Fact("deleted messages", found.messages, CountUnit.COUNT),
        Fact("deleted bytes on disk", found.disk_bytes, CountUnit.BYTES),
        Fact("kept bytes on disk", found.kept_disk_bytes, CountUnit.BYTES),
        Fact("kept from", found.kept_from_ms, CountUnit.TIME_MS),
    )
    notes: tuple[str, ...] = (
        "whole segments are deleted, oldest first, at delete_hours or when the disk is full; the newest one stays",
    )
    if options.source.is_live:
        notes += ("for a running group, only messages are counted; its files may hold reserved space too",)
    tables = (
        _settings_table(segments, options.setting, now_ms),
        _topic_table(parts, gone, now_ms),
        _segment_table(segments, gone, now_ms),
    )
    title = f"Retention of {options.source.name}"
    return JobReport("retention", title, summary, tables, _charts(segments, parts, gone, now_ms), notes=notes)


def _age(at_ms: int | None, now_ms: int) -> float | None:
    return None if at_ms is None else max(0.0, (now_ms - at_ms) / 1000)


def _settings_table(segments: Sequence[RetentionSegment], asked: Setting, now_ms: int) -> Table:
    settings = [asked, *(Setting(hours=hours) for hours in HOURS if asked != Setting(hours=hours))]
    columns = (
        ReportColumn("setting"),
        ReportColumn("segments deleted", CountUnit.COUNT),
        ReportColumn("messages deleted", CountUnit.COUNT),
        ReportColumn("disk freed", CountUnit.BYTES),
        ReportColumn("disk kept", CountUnit.BYTES),
        ReportColumn("kept from", CountUnit.TIME_MS),
    )
    rows = tuple(_settings_row(one, outcome(segments, one, now_ms)) for one in settings)
    return Table("What a setting would delete", columns, rows)


def _settings_row(setting: Setting, found: RetentionOutcome) -> tuple[str | int | None, ...]:
    return (
        setting.words,
        found.segments,
        found.messages,
        found.disk_bytes,
        found.kept_disk_bytes,
        found.kept_from_ms,
    )


def _by_topic(parts: Sequence[_Part], gone: set[str]) -> list[tuple[str, int, int, int, int | None, int | None]]:
    """Topic, messages, live bytes, bytes that would be deleted, oldest, newest; largest first."""
    by_topic: dict[str, list[_Part]] = defaultdict(list)
    for one in parts:
        by_topic[one.topic].append(one)
    rows = [
        (
            topic,
            sum(one.messages for one in inside),
            sum(one.size_bytes for one in inside),
            sum(one.size_bytes for one in inside if one.segment in gone),
            min((one.oldest_ms for one in inside if one.oldest_ms is not None), default=None),
            max((one.newest_ms for one in inside if one.newest_ms is not None), default=None),
        )
        for topic, inside in by_topic.items()
    ]
    return sorted(rows, key=lambda row: (-row[2], row[0]))


def _topic_table(parts: Sequence[_Part], gone: set[str], now_ms: int) -> Table:
    columns = (
        ReportColumn("topic"),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("live bytes", CountUnit.BYTES),
        ReportColumn("would go", CountUnit.BYTES),
        ReportColumn("oldest", CountUnit.TIME_MS),
        ReportColumn("age", CountUnit.SECONDS),
        ReportColumn("newest", CountUnit.TIME_MS),
    )
    rows = tuple(
        (topic, messages, live, going, oldest, _age(oldest, now_ms), newest)
        for topic, messages, live, going, oldest, newest in _by_topic(parts, gone)
    )
    return Table("By topic", columns, rows)


def _segment_table(segments: Sequence[RetentionSegment], gone: set[str], now_ms: int) -> Table:
    columns = (
        ReportColumn("segment"),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("live bytes", CountUnit.BYTES),
        ReportColumn("on disk", CountUnit.BYTES),
        ReportColumn("oldest", CountUnit.TIME_MS),
        ReportColumn("newest", CountUnit.TIME_MS),
        ReportColumn("age", CountUnit.SECONDS),
        ReportColumn("would go"),
    )
    rows = tuple(
        (
            one.name,
            one.messages,
            one.live_bytes,
            one.disk_bytes,
            one.oldest_ms,
            one.newest_ms,
            _age(one.newest_ms, now_ms),
            one.name in gone,
        )
        for one in segments
    )
    return Table("By segment", columns, rows)


def _charts(
    segments: Sequence[RetentionSegment], parts: Sequence[_Part], gone: set[str], now_ms: int
) -> tuple[Chart, ...]:
    shown = segments[-_BARS_MAX:]
    labels = tuple(f"{one.name.lstrip('0') or '0'}, {_age_words(one, now_ms)}" for one in shown)
    kept, going = (
        tuple(float(one.live_bytes) if (one.name in gone) is would else 0.0 for one in shown) for would in (False, True)
    )
    topics = _by_topic(parts, gone)[:_TOPICS_MAX]
    return (
        Bars(
            "Live bytes by segment",
            CountUnit.BYTES,
            labels,
            (Series("kept", kept), Series("would be deleted", going)),
            f"The newest {len(shown)} of {len(segments)}, by position and age" if len(shown) < len(segments) else "",
        ),
        Bars(
            "Live bytes by topic",
            CountUnit.BYTES,
            tuple(row[0] for row in topics),
            (
                Series("kept", tuple(float(row[2] - row[3]) for row in topics)),
                Series("would be deleted", tuple(float(row[3]) for row in topics)),
            ),
        ),
    )


def _age_words(segment: RetentionSegment, now_ms: int) -> str:
    age = _age(segment.newest_ms, now_ms)
    return "no time" if age is None else f"{figure(age, CountUnit.SECONDS)} old"


# -- the command line -------------------------------------------------------------------------------------------------


@job_command(
    run,
    name="retention",
    short_help="Show what a retention setting would delete.",
    epilog="""\b
Examples:
  dledger pipeline retention /var/lib/broker/dledger-n0
  dledger pipeline retention /var/lib/broker/commitlog --hours 48 --html retention.html
  dledger pipeline retention -b 127.0.0.1:10911 -g broker-a --keep-bytes 500g --json""",
)
@source_options
@click.option(
    "--hours",
    type=flag_values.Number(min=0),
    metavar="HOURS",
    help="Keep this many hours; default: 72, unless --keep-bytes is given.",
)
@click.option("--keep-bytes", type=flag_values.Size(min=1), metavar="SIZE", help="Keep this many bytes of files.")
def command(source: LogSource, hours: float | None, keep_bytes: int | None) -> RetentionOptions:
    """Live bytes and age per segment and topic, and what a retention setting would delete. Nothing is deleted."""
    setting = DEFAULT if hours is None and keep_bytes is None else Setting(hours, keep_bytes)
    return RetentionOptions(source, setting)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import retention  # functions sent to Spark's workers must be importable by module name

    retention.main()
