"""``dledger pipeline stats``: counts a log's messages by topic, queue, hour, tag and key, without reading bodies.

One pass builds a small table per topic, queue and hour, from which everything else is summed; only minutes, which a
short log is drawn by, take a second one. Totals by hour, or by minute, become rates per column of a
chart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn

import click

from dledger.command_line import flag_values
from dledger.command_line.report_page import Bars, Chart, ColumnChart, CountUnit, Series, Value, time_text
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.jobs.source import LogSource, is_own, source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

HOUR_MS: Final = 3_600_000
MINUTE_MS: Final = 60_000
COLUMNS_MAX: Final = 180
"""A week of hours, or three hours of minutes, fits side by side; beyond that, they are combined."""


@dataclass(frozen=True, slots=True)
class Span:
    """``width_ms`` of the log from ``begin_ms`` on, ``seconds`` of it between its first and last message."""

    begin_ms: int
    width_ms: int
    messages: int
    size_bytes: int
    seconds: float

    @property
    def messages_per_s(self) -> float:
        """The rate over the part covered by the log."""
        return self.messages / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """The rate over the part covered by the log."""
        return self.size_bytes / self.seconds

    @property
    def label(self) -> str:
        """Its start, in UTC."""
        form = "%m-%d %H:%M" if self.width_ms >= HOUR_MS else "%H:%M"
        return datetime.fromtimestamp(self.begin_ms / 1000, UTC).strftime(form)

    @property
    def width(self) -> str:
        """In words that follow "each"."""
        unit_ms, unit = (HOUR_MS, "hour") if self.width_ms >= HOUR_MS else (MINUTE_MS, "minute")
        count = self.width_ms // unit_ms
        return unit if count == 1 else f"{count} {unit}s"


def spans(
    totals: Mapping[int, tuple[int, int]],
    first_ms: int,
    last_ms: int,
    columns: int = COLUMNS_MAX,
    unit_ms: int = HOUR_MS,
) -> list[Span]:
    """``totals``: (messages, bytes) by start of the hour (``unit_ms``). Empty ones count; at most ``columns``."""
    if not totals:
        return []
    begin, end = min(totals), max(totals) + unit_ms
    width_ms = max(1, -(-(end - begin) // unit_ms // columns)) * unit_ms
    found = []
    for at in range(begin, end, width_ms):
        parts = [totals[one] for one in range(at, at + width_ms, unit_ms) if one in totals]
        covered_ms = min(at + width_ms, last_ms) - max(at, first_ms)
        messages, size = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0)
        found.append(Span(at, width_ms, messages, size, max(1.0, covered_ms / 1000)))
    return found


def silent_hours(by_hour: Mapping[int, tuple[int, int]]) -> int:
    """Hours without messages between the first and the last one."""
    return (max(by_hour) - min(by_hour)) // HOUR_MS + 1 - len(by_hour) if by_hour else 0


NO_MESSAGE: Final = "(entries that are not messages)"
_BY: Final = ("topic", "queue", "hour", "tag", "key")
_BARS_MAX: Final = 20
_BY_MINUTE_HOURS_MAX: Final = 3
_BY_MINUTE_MESSAGES_MAX: Final = 20_000_000
"""A longer log is not read a second time for the sake of a chart."""
_SCHEMA: Final = (
    "index bigint, position bigint, topic string, queueId int, queueOffset bigint, storeTimestamp timestamp, size int"
)


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """``by``: the tables to make. ``top``: how many tags, keys and queues to list, largest first.

    ``internal``: also count brokers' internal topics; topics named by ``source`` are always counted.
    """

    source: LogSource
    by: tuple[str, ...] = ("topic", "queue", "hour")
    top: int = 20
    internal: bool = False


def run(spark: SparkSession, options: StatsOptions) -> JobReport:
    """Count. Further passes stop where the first one did, although a running log grows."""
    from pyspark.sql import functions as f

    extra = {"tag": ", tags string", "key": ", keys string"}
    log = options.source.read(spark, _SCHEMA + "".join(words for by, words in extra.items() if by in options.by))
    everything = _cube(log).cache()
    cube, apart = everything, not (options.internal or options.source.topics)
    if apart:
        log, cube = log.where(~is_own()), everything.where(~is_own())
    try:
        total, hours = _total(cube), _hours(cube)
        own = _rows(_by_topic(everything.where(is_own()))) if apart else []
        topics = _rows(_by_topic(cube))
        queues = _rows(_by_queue(cube, options.top)) if "queue" in options.by else []
    finally:
        everything.unpersist()
    if total["last_position"] is not None:
        log = log.where(f.col("position") <= total["last_position"])
    words = [(by, _rows(_by_word(log, by, options.top))) for by in ("tag", "key") if by in options.by]
    tables = [_topic_table(topics, total)] if "topic" in options.by else []
    tables += [_own_table(own)] if own and "topic" in options.by else []
    tables += [_queue_table(queues)] if "queue" in options.by else []
    tables += [_word_table(by, rows, total) for by, rows in words]
    tables += [_hour_table(hours, total)] if "hour" in options.by else []
    return JobReport(
        "stats",
        f"What is in {options.source.name}",
        _summary(options.source, total, hours, topics, sum(row["bytes"] for row in own)),
        tuple(tables),
        _charts(_columns(log, hours, total), topics, queues, words),
    )


def _columns(log: DataFrame, hours: dict[int, tuple[int, int]], total: Row) -> list[Span]:
    """Of the charts over time: hours, or of a short log minutes, which are counted only then."""
    first_ms, last_ms = total["first_ms"] or 0, total["last_ms"] or 0
    if 0 < _count(hours) <= _BY_MINUTE_HOURS_MAX and total["messages"] <= _BY_MINUTE_MESSAGES_MAX:
        return spans(_minutes(log), first_ms, last_ms, unit_ms=MINUTE_MS)
    return spans(hours, first_ms, last_ms)


# -- what Spark adds up ----------------------------------------------------------------------------------------------


def _cube(log: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    ms = f.unix_millis("storeTimestamp")
    return log.groupBy("topic", "queueId", (f.floor(ms / HOUR_MS) * HOUR_MS).alias("hour")).agg(
        f.count(f.lit(1)).alias("messages"),
        f.sum(f.col("size").cast("bigint")).alias("bytes"),
        f.min("queueOffset").alias("first_offset"),
        f.max("queueOffset").alias("last_offset"),
        f.min(ms).alias("first_ms"),
        f.max(ms).alias("last_ms"),
        f.min("index").alias("first_index"),
        f.max("index").alias("last_index"),
        f.max("position").alias("last_position"),
    )


def _total(cube: DataFrame) -> Row:
    from pyspark.sql import functions as f

    rows = cube.agg(
        f.coalesce(f.sum("messages"), f.lit(0)).alias("messages"),
        f.coalesce(f.sum("bytes"), f.lit(0)).alias("bytes"),
        f.min("first_ms").alias("first_ms"),
        f.max("last_ms").alias("last_ms"),
        f.min("first_index").alias("first_index"),
        f.max("last_index").alias("last_index"),
        f.max("last_position").alias("last_position"),
    ).collect()
    return rows[0]


def _hours(cube: DataFrame) -> dict[int, tuple[int, int]]:
    from pyspark.sql import functions as f

    rows = cube.where("hour is not null").groupBy("hour").agg(f.sum("messages"), f.sum("bytes")).collect()
    return {int(row[0]): (int(row[1]), int(row[2])) for row in rows}


def _minutes(log: DataFrame) -> dict[int, tuple[int, int]]:
    from pyspark.sql import functions as f

    minute = (f.floor(f.unix_millis("storeTimestamp") / MINUTE_MS) * MINUTE_MS).alias("minute")
    counted = log.where("storeTimestamp is not null").groupBy(minute)
    rows = counted.agg(f.count(f.lit(1)), f.sum(f.col("size").cast("bigint"))).collect()
    return {int(row[0]): (int(row[1]), int(row[2])) for row in rows}


def _per_queue(cube: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    # Half messages of transactions have no offset, so the span may be smaller than the count.
    missing = f.max("last_offset") - f.min("first_offset") + 1 - f.sum("messages")
    return cube.groupBy("topic", "queueId").agg(
        f.sum("messages").alias("messages"),
        f.sum("bytes").alias("bytes"),
        f.greatest(missing, f.lit(0)).alias("missing"),
        f.min("first_offset").alias("first_offset"),
        f.max("last_offset").alias("last_offset"),
        f.min("first_ms").alias("first_ms"),
        f.max("last_ms").alias("last_ms"),
    )


def _by_topic(cube: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return (
        _per_queue(cube)
        .groupBy("topic")
        .agg(
            f.sum("messages").alias("messages"),
            f.sum("bytes").alias("bytes"),
            f.count("queueId").alias("queues"),
            (f.max("messages") / f.avg("messages")).alias("skew"),
            f.sum("missing").alias("missing"),
            f.min("first_ms").alias("first_ms"),
            f.max("last_ms").alias("last_ms"),
        )
        .orderBy(f.desc("bytes"), "topic")
    )


def _by_queue(cube: DataFrame, top: int) -> DataFrame:
    from pyspark.sql import functions as f

    return _per_queue(cube).where("topic is not null").orderBy(f.desc("bytes"), "topic", "queueId").limit(top)


def _by_word(log: DataFrame, by: str, top: int) -> DataFrame:
    """A message has one tag and any number of keys, separated by blanks."""
    from pyspark.sql import functions as f

    word = f.col("tags") if by == "tag" else f.explode(f.split(f.trim("keys"), " +"))
    return (
        log.select("topic", word.alias("word"), "size", "storeTimestamp")
        .where("word is not null and word != ''")
        .groupBy("topic", "word")
        .agg(
            f.count(f.lit(1)).alias("messages"),
            f.sum(f.col("size").cast("bigint")).alias("bytes"),
            f.unix_millis(f.min("storeTimestamp")).alias("first_ms"),
            f.unix_millis(f.max("storeTimestamp")).alias("last_ms"),
        )
        .orderBy(f.desc("messages"), "topic", "word")
        .limit(top)
    )


def _rows(frame: DataFrame) -> list[Row]:
    return frame.collect()


# -- what people read ------------------------------------------------------------------------------------------------


def _seconds(row: Row) -> float:
    """Between the first and the last message; at least 1, so that a single message has a rate."""
    return 1.0 if row["first_ms"] is None else max(1.0, (row["last_ms"] - row["first_ms"]) / 1000)


def _summary(
    source: LogSource, total: Row, hours: dict[int, tuple[int, int]], topics: Sequence[Row], internal_bytes: int
) -> tuple[Fact, ...]:
    timed = total["first_ms"] is not None
    return (
        Fact("log", source.name),
        Fact("messages", total["messages"], CountUnit.COUNT),
        Fact("bytes", total["bytes"], CountUnit.BYTES),
        Fact("bytes in the broker's own topics, not counted", internal_bytes, CountUnit.BYTES),
        Fact("average size", total["bytes"] / total["messages"] if total["messages"] else None, CountUnit.BYTES),
        Fact("first index", total["first_index"], CountUnit.COUNT),
        Fact("last index", total["last_index"], CountUnit.COUNT),
        Fact("first message", total["first_ms"], CountUnit.TIME_MS),
        Fact("last message", total["last_ms"], CountUnit.TIME_MS),
        Fact("messages per second", total["messages"] / _seconds(total) if timed else None, CountUnit.PER_SECOND),
        Fact("bytes per second", total["bytes"] / _seconds(total) if timed else None, CountUnit.BYTES_PER_SECOND),
        Fact("topics", sum(row["topic"] is not None for row in topics), CountUnit.COUNT),
        Fact("missing queue offsets", sum(row["missing"] or 0 for row in topics), CountUnit.COUNT),
        Fact("hours without a message", silent_hours(hours), CountUnit.COUNT),
    )


def _topic_table(topics: Sequence[Row], total: Row) -> Table:
    columns = (
        ReportColumn("topic"),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
        ReportColumn("share", CountUnit.SHARE),
        ReportColumn("rate", CountUnit.PER_SECOND),
        ReportColumn("queues", CountUnit.COUNT),
        ReportColumn("skew", CountUnit.RATIO),
        ReportColumn("missing", CountUnit.COUNT),
        ReportColumn("first", CountUnit.TIME_MS),
        ReportColumn("last", CountUnit.TIME_MS),
    )
    return Table("By topic", columns, tuple(_topic_row(row, total) for row in topics))


def _topic_row(row: Row, total: Row) -> tuple[Value, ...]:
    is_message = row["topic"] is not None
    return (
        _topic(row),
        row["messages"],
        row["bytes"],
        row["bytes"] / total["bytes"],
        row["messages"] / _seconds(row) if row["first_ms"] is not None else None,
        row["queues"] if is_message else None,
        row["skew"] if is_message else None,
        row["missing"],
        row["first_ms"],
        row["last_ms"],
    )


def _topic(row: Row) -> str:
    return str(row["topic"]) if row["topic"] is not None else NO_MESSAGE


def _own_table(topics: Sequence[Row]) -> Table:
    columns = (ReportColumn("topic"), ReportColumn("messages", CountUnit.COUNT), ReportColumn("bytes", CountUnit.BYTES))
    rows = tuple((_topic(row), row["messages"], row["bytes"]) for row in topics)
    return Table("The broker's own topics, not counted above", columns, rows)


def _queue_table(queues: Sequence[Row]) -> Table:
    columns = (
        ReportColumn("topic"),
        ReportColumn("queue"),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
        ReportColumn("rate", CountUnit.PER_SECOND),
        ReportColumn("first offset", CountUnit.COUNT),
        ReportColumn("last offset", CountUnit.COUNT),
        ReportColumn("missing", CountUnit.COUNT),
    )
    rows = tuple(
        (
            _topic(row),
            row["queueId"],
            row["messages"],
            row["bytes"],
            row["messages"] / _seconds(row),
            row["first_offset"],
            row["last_offset"],
            row["missing"],
        )
        for row in queues
    )
    return Table("Largest queues", columns, rows)


def _word_table(by: str, rows: Sequence[Row], total: Row) -> Table:
    columns = (
        ReportColumn(by),
        ReportColumn("topic"),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("share", CountUnit.SHARE),
        ReportColumn("bytes", CountUnit.BYTES),
        ReportColumn("first", CountUnit.TIME_MS),
        ReportColumn("last", CountUnit.TIME_MS),
    )
    cells = tuple(
        (
            row["word"],
            _topic(row),
            row["messages"],
            row["messages"] / total["messages"],
            row["bytes"],
            row["first_ms"],
            row["last_ms"],
        )
        for row in rows
    )
    return Table(f"Most frequent {by}s", columns, cells)


def _hour_table(hours: dict[int, tuple[int, int]], total: Row) -> Table:
    columns = (
        ReportColumn("hour", CountUnit.TIME_MS),
        ReportColumn("messages", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
        ReportColumn("rate", CountUnit.PER_SECOND),
        ReportColumn("throughput", CountUnit.BYTES_PER_SECOND),
    )
    every_hour = spans(hours, total["first_ms"] or 0, total["last_ms"] or 0, columns=max(1, _count(hours)))
    rows = tuple(
        (one.begin_ms, one.messages, one.size_bytes, one.messages_per_s, one.bytes_per_s)
        for one in every_hour
        if one.messages
    )
    return Table("By hour", columns, rows, shown_max=24)


def _count(hours: dict[int, tuple[int, int]]) -> int:
    return (max(hours) - min(hours)) // HOUR_MS + 1 if hours else 0


def _charts(
    columns: Sequence[Span], topics: Sequence[Row], queues: Sequence[Row], words: Sequence[tuple[str, Sequence[Row]]]
) -> tuple[Chart, ...]:
    charts: list[Chart] = []
    if columns:
        labels = tuple(one.label for one in columns)
        caption = f"One column for each {columns[0].width}, from {time_text(columns[0].begin_ms)} UTC on"
        charts += [
            ColumnChart(
                "Messages per second",
                CountUnit.PER_SECOND,
                labels,
                (Series("messages", tuple(one.messages_per_s for one in columns)),),
                caption,
            ),
            ColumnChart(
                "Bytes per second",
                CountUnit.BYTES_PER_SECOND,
                labels,
                (Series("bytes", tuple(one.bytes_per_s for one in columns)),),
                caption,
            ),
        ]
    charts.append(_bars("Bytes by topic", CountUnit.BYTES, "bytes", [(_topic(row), row["bytes"]) for row in topics]))
    if queues:
        named = [(f"{_topic(row)} / {row['queueId']}", row["bytes"]) for row in queues]
        charts.append(_bars("Bytes of the largest queues", CountUnit.BYTES, "bytes", named))
    for by, rows in words:
        named = [(f"{row['word']} ({_topic(row)})", row["messages"]) for row in rows]
        charts.append(_bars(f"Messages of the most frequent {by}s", CountUnit.COUNT, "messages", named))
    return tuple(charts)


def _bars(title: str, unit: CountUnit, name: str, values: Sequence[tuple[str, int]]) -> Bars:
    shown = values[:_BARS_MAX]
    more = f"The largest {len(shown)} of {len(values)}" if len(values) > len(shown) else ""
    series = Series(name, tuple(float(value) for _, value in shown))
    return Bars(title, unit, tuple(label for label, _ in shown), (series,), more)


# -- the command line ------------------------------------------------------------------------------------------------


@job_command(
    run,
    name="stats",
    short_help="Count the messages in a log.",
    epilog="""\b
Examples:
  dledger pipeline stats /var/lib/broker/commitlog
  dledger pipeline stats -b 127.0.0.1:10911 -g broker-a --from-time 2026-11-20 --html stats.html
  dledger pipeline stats /backup/dledger-n0 -t orders --by topic,tag,key --top 50 --json""",
)
@source_options
@click.option(
    "--by",
    default="topic,queue,hour",
    show_default=True,
    metavar="WHAT,…",
    help=f"Tables to show: {', '.join(_BY)}. Tags and keys take longer.",
)
@click.option(
    "--top",
    type=flag_values.Whole(1, 10_000),
    default=20,
    show_default=True,
    help="Number of queues, tags and keys to list.",
)
@click.option("--internal", is_flag=True, help="Include the broker's own topics.")
def command(source: LogSource, by: str, top: int, internal: bool) -> StatsOptions:
    """Messages, bytes, rates, gaps and skew of a log, by topic, queue, hour, tag and key. No body is read."""
    chosen = tuple(one.strip() for one in by.split(",") if one.strip())
    unknown = [one for one in chosen if one not in _BY]
    if unknown or not chosen:
        raise click.BadParameter(f"{', '.join(unknown) or 'nothing'}: choose from {', '.join(_BY)}", param_hint="--by")
    return StatsOptions(source, chosen, top, internal)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import stats  # functions sent to Spark's workers must be importable by module name

    stats.main()
