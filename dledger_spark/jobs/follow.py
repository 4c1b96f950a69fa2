"""``dledger pipeline follow``: counts messages per window, topic and tag as they arrive, on the console and as Parquet.

``examples/follow.py`` is a small version of it, to copy and adapt. The counts are exact because:

- Each batch of the stream is counted separately, and its counts are one directory that appears atomically. When a
  killed run is restarted, Spark repeats the unfinished batch with the same messages; a batch whose directory exists
  is not written again. So the counts of all batches, added up, are exactly the messages of the log.
- Spark's checkpoint identifies a batch, not its number: each batch's manifest names its stream and its end, and a
  checkpoint that disagrees is refused.
- A window's messages may arrive in several batches; readers add them up: ``sum(messages)`` by window, topic, tag.
  There is no watermark and no state, so no message is too late.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from dledger import flag_values
from dledger.errors import ConfigError
from dledger_spark.jobs.batches import STATE, BatchDirectory, open_batches
from dledger_spark.jobs.chart import Bars, ColumnChart, Series
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.errors import JobError
from dledger_spark.jobs.printing import printable
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.jobs.source import FORMAT, LogSource, source_options
from dledger_spark.jobs.units import CountUnit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

BATCH_BYTES: Final = "1g"
"""How much one batch reads at most, so that a stream that starts far behind does not read everything at once."""
_SCHEMA: Final = "topic string, tags string, storeTimestamp timestamp, size int"
_SHOWN_MAX: Final = 10
_WINDOWS_MAX: Final = 120
_POLL_S: Final = 1


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """``once``: end after counting everything committed at the start. ``show`` receives the lines of each batch.

    ``as_json``: one JSON object per count, and the report as the last line, as for other jobs.
    """

    source: LogSource
    out: Path | None = None
    window_s: int = 10
    trigger_s: float = 1.0
    once: bool = False
    consumer_group: str = ""
    show: Callable[[str], None] = field(default=click.echo, repr=False)
    as_json: bool = False


def run(spark: SparkSession, options: FollowOptions) -> JobReport:
    """Count until Ctrl-C, or with ``once`` until everything committed now is counted."""
    check(options)
    began = time.monotonic()
    with ExitStack() as open_things:
        out = None if options.out is None else open_things.enter_context(open_batches(options.out, about(options)))
        if out is not None:
            check_stream(out)
        counter = _Counter(options, out)
        query = _start(spark, options, counter)
        try:
            _await(query)
        finally:
            query.stop()
        behind = _behind(query)
    return _report(spark, options, counter, behind, time.monotonic() - began)


def check(options: FollowOptions) -> None:
    """Raises ``ConfigError`` for options that a stream does not support."""
    source = options.source
    if not source.is_live:
        raise ConfigError(["a directory does not grow while being read: name a running group, --bootstrap HOST:PORT,…"])
    if source.to_index is not None or source.to_time_ms is not None:
        raise ConfigError(["a stream has no end: leave out --to-index and --to-time, or use --once"])


def about(options: FollowOptions) -> dict[str, object]:
    """The settings that must be the same in every run into one directory."""
    source = options.source
    return {
        "version": 1,
        "job": "follow",
        "group": source.group,
        "topics": sorted(source.topics),
        "window_s": options.window_s,
    }


def counts(rows: DataFrame, window_s: int) -> DataFrame:
    """Messages and bytes per window, topic and tag.

    Entries that are not messages have no timestamp; they count at the time they are read.
    """
    from pyspark.sql import functions as f

    at = f.coalesce("storeTimestamp", f.current_timestamp())
    window = f.window(at, f"{window_s} seconds")
    return rows.groupBy(
        window["start"].alias("window_start"), window["end"].alias("window_end"), "topic", f.col("tags").alias("tag")
    ).agg(f.count(f.lit(1)).alias("messages"), f.sum(f.col("size").cast("bigint")).alias("bytes"))


# -- which stream the batches are of -----------------------------------------------------------------------------------


def check_stream(out: BatchDirectory) -> None:
    """Raises ``JobError`` if there are batches, but Spark's checkpoint is not the one they were counted with.

    A new stream numbers its batches from 0: it would mistake the existing ones for its own, and drop its own counts.
    """
    numbers = out.numbers()
    if numbers:
        query = _query_id(_checkpoint(out))
        newest = out.manifest(numbers[-1])
        if query is None or newest.get("query", query) != query:
            raise _another_stream(out, newest)


def mark(out: BatchDirectory, number: int) -> dict[str, Any]:  # Any: a JSON document
    """Identifies a batch: its stream, and its end."""
    planned = _checkpoint(out) / "offsets" / str(number)  # Spark writes it before it delivers the batch
    return {"query": _query_id(_checkpoint(out)), "end": json.loads(planned.read_text("utf-8").splitlines()[-1])}


def _checkpoint(out: BatchDirectory) -> Path:
    return out.path / STATE / "checkpoint"


def _query_id(checkpoint: Path) -> str | None:
    try:
        return str(json.loads((checkpoint / "metadata").read_text("utf-8"))["id"])
    except FileNotFoundError:
        return None


def _another_stream(out: BatchDirectory, newest: Mapping[str, Any]) -> JobError:
    end = newest.get("end", {}).get("index")
    return JobError(
        f"{_checkpoint(out)} is not the checkpoint of the batches in {out.path}: it was removed or replaced, so "
        "some batches would be skipped. Restore it, or continue into a new directory"
        + ("" if end is None else f": the batches here end with entry {end}, --from-index {end}")
    )


# -- counting ---------------------------------------------------------------------------------------------------------


class _Counter:
    """Receives the stream's batches, one after the other, on one of Spark's threads."""

    def __init__(self, options: FollowOptions, out: BatchDirectory | None) -> None:
        self._options = options
        self.out = out
        self._last_at = time.monotonic()
        self.batches = 0
        self.messages = 0
        self.size_bytes = 0

    def take(self, rows: DataFrame, number: int) -> None:
        """Count one batch, write it, show it."""
        from pyspark.sql import functions as f

        counted = counts(rows, self._options.window_s).persist()
        try:
            if self.out is not None:
                self._write(self.out, counted, number)
            total = counted.agg(f.sum("messages"), f.sum("bytes"), f.count_distinct("window_start")).collect()[0]
            if total[0] is not None:
                ordered = counted.orderBy(f.desc("window_start"), f.desc("messages"), "topic", "tag")
                if self._options.as_json:  # programs want all counts
                    self._show(number, total, ordered.toLocalIterator())
                else:
                    self._show(number, total, ordered.limit(_SHOWN_MAX).collect())
        finally:
            counted.unpersist()

    def _write(self, out: BatchDirectory, counted: DataFrame, number: int) -> None:
        this = mark(out, number)
        if out.place(number).exists():
            there = out.manifest(number)
            if any(there.get(name, value) != value for name, value in this.items()):
                raise _another_stream(out, out.manifest(out.numbers()[-1]))
            return  # written by a previous run, which was killed before Spark recorded it
        staging = out.staging()
        writer = counted.coalesce(1).write.option("compression", "zstd")
        writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(f"file://{staging}")
        if not any(staging.glob("*.parquet")):
            raise JobError(f"Spark's workers do not share this machine's {staging}: --out must be a shared directory")
        out.publish(number, staging, {"version": 1, "job": "follow", "batch": number, **this})

    def _show(self, number: int, total: Row, rows: Iterable[Row]) -> None:
        now = time.monotonic()
        rate, self._last_at = total[0] / max(1e-3, now - self._last_at), now
        self.batches += 1
        self.messages += total[0]
        self.size_bytes += total[1]
        for line in _json_lines(number, rows) if self._options.as_json else _lines(number, total, rate, rows):
            self._options.show(line)


def _lines(number: int, total: Row, rate: float, rows: Iterable[Row]) -> Iterator[str]:
    yield f"batch {number}: {total[0]:,} messages in {total[2]:,} windows, {rate:,.0f}/s"
    for row in rows:
        topic, tag = (printable(row[name] or "-") for name in ("topic", "tag"))
        yield f"  {row['window_start']:%Y-%m-%d %H:%M:%S}  {topic:<24}  {tag:<16}  {row['messages']:>10,}"


def _json_lines(number: int, rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        document = {"batch": number, "window_start_ms": int(row["window_start"].timestamp() * 1000)}
        yield json.dumps(document | {name: row[name] for name in ("topic", "tag", "messages", "bytes")})


def _start(spark: SparkSession, options: FollowOptions, counter: _Counter) -> StreamingQuery:
    reading = {"maxBytesPerTrigger": BATCH_BYTES} | options.source.options()
    if options.consumer_group:
        reading["consumerGroup"] = options.consumer_group
    rows = spark.readStream.format(FORMAT).schema(_SCHEMA).options(**reading).load()
    writer = rows.writeStream.foreachBatch(counter.take).queryName("dledger-follow")
    if counter.out is not None:
        writer = writer.option("checkpointLocation", f"file://{_checkpoint(counter.out)}")
    if options.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(options.trigger_s * 1000)} milliseconds").start()


def _await(query: StreamingQuery) -> None:
    """Wait until it ends by itself, or Ctrl-C."""
    try:
        while not query.awaitTermination(_POLL_S):
            pass
    except KeyboardInterrupt:
        click.echo("stopping", err=True)


def _behind(query: StreamingQuery) -> int | None:
    """How many committed entries were unread at the last batch."""
    progress = query.lastProgress
    if progress is None or not progress.sources:
        return None
    source = progress.sources[0]
    try:
        latest, end = (int(json.loads(text)["index"]) for text in (source.latestOffset, source.endOffset))
    except (KeyError, TypeError, ValueError):
        return None
    return max(0, latest - end)


# -- the report -------------------------------------------------------------------------------------------------------


def _report(
    spark: SparkSession, options: FollowOptions, counter: _Counter, behind: int | None, seconds: float
) -> JobReport:
    summary = (
        Fact("log", options.source.name),
        Fact("directory", None if options.out is None else str(options.out)),
        Fact("batches", counter.batches, CountUnit.COUNT),
        Fact("messages", counter.messages, CountUnit.COUNT),
        Fact("bytes", counter.size_bytes, CountUnit.BYTES),
        Fact("seconds", seconds, CountUnit.SECONDS),
        Fact("messages per second", counter.messages / seconds, CountUnit.PER_SECOND),
        Fact("behind", behind, CountUnit.COUNT),
    )
    title = f"Followed {options.source.name}"
    if options.out is None or not any(options.out.glob("batch=*/*.parquet")):
        return JobReport("follow", title, summary)
    written = spark.read.parquet(f"file://{options.out.absolute()}")
    tags, windows = _by_tag(written), _by_window(written)
    columns = (
        ReportColumn("topic"),
        ReportColumn("tag"),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
    )
    labels = tuple(f"{row[0]:%m-%d %H:%M:%S}" for row in windows)
    names = tuple(f"{row['topic'] or '-'} / {row['tag'] or '-'}" for row in tags)
    return JobReport(
        "follow",
        title,
        summary,
        (Table("All counts so far, by tag", columns, tuple(tuple(row) for row in tags)),),
        (
            ColumnChart(
                f"Messages per window of {options.window_s} s",
                CountUnit.COUNT,
                labels,
                (Series("messages", tuple(float(row[1]) for row in windows)),),
                f"The last {len(windows)} windows",
            ),
            Bars(
                "Messages by tag", CountUnit.COUNT, names, (Series("messages", tuple(float(row[2]) for row in tags)),)
            ),
        ),
    )


def _by_tag(written: DataFrame) -> list[Row]:
    from pyspark.sql import functions as f

    sums = written.groupBy("topic", "tag").agg(f.sum("messages").alias("messages"), f.sum("bytes").alias("bytes"))
    return sums.orderBy(f.desc("messages"), "topic", "tag").limit(_SHOWN_MAX * 2).collect()


def _by_window(written: DataFrame) -> list[Row]:
    from pyspark.sql import functions as f

    sums = written.groupBy("window_start").agg(f.sum("messages").alias("messages"))
    return sums.orderBy(f.desc("window_start")).limit(_WINDOWS_MAX).collect()[::-1]


# -- the command line -------------------------------------------------------------------------------------------------


def _whole(_context: click.Context, _parameter: click.Parameter, seconds: float) -> int:
    """Spark's windows are of whole seconds."""
    if seconds != int(seconds):
        raise click.BadParameter(f"{seconds:g} s is not a whole number of seconds")
    return int(seconds)


@job_command(
    run,
    name="follow",
    short_help="Count messages as they arrive.",
    epilog="""\b
Examples:
  dledger pipeline follow -b 127.0.0.1:10911 -g broker-a
  dledger pipeline follow -b 127.0.0.1:10911 -g broker-a -t orders --window 60 --out /lake/counts
  dledger pipeline follow -b 127.0.0.1:10911 -g broker-a --from-index 0 --once --out /lake/counts --html counts.html

\b
Stop it with Ctrl-C. With --out, a restarted job continues where it was.
With --json it prints one JSON object per line: each count as it comes, and the report at the end.""",
)
@source_options
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write the counts as Parquet, one directory per batch, and remember the position.",
)
@click.option(
    "--window",
    "window_s",
    type=flag_values.Seconds(min=1),
    callback=_whole,
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="Length of a counting window.",
)
@click.option(
    "--trigger",
    "trigger_s",
    type=flag_values.Seconds(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to check for new messages.",
)
@click.option("--once", is_flag=True, help="Stop after counting everything committed so far.")
@click.option(
    "--publish",
    "consumer_group",
    default="",
    metavar="GROUP",
    help="Publish the progress as this consumer group's offsets.",
)
def command(
    source: LogSource, out: Path | None, window_s: int, trigger_s: float, once: bool, consumer_group: str
) -> FollowOptions:
    """Count messages of a running group per time window, topic and tag as they arrive: on the console and as Parquet.

    Starts with the next message, unless --from-index or --from-time is given, or --out already holds counts.
    """
    as_json = bool(click.get_current_context().params.get("as_json"))
    return FollowOptions(source, out, window_s, trigger_s, once, consumer_group, as_json=as_json)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import follow  # functions sent to Spark's workers must be importable by module name

    follow.main()
