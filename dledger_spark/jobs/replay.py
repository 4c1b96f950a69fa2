"""``dledger pipeline replay``: replays part of a log, or Parquet, into a topic, each row exactly once.

Rows go through a fixed number of named writers. The target log remembers how many rows of each writer it has (see
``docs/messages.md``), so a replay that was killed, or is run again, adds what is missing. This requires that a
writer always gets the same rows in the same order: rows are assigned to writers by their place in the log, in chunks,
and sorted by it. If the range has grown meanwhile, rows are only added at each writer's end.

The writers' names are derived from everything that determines the rows and the target. A different filter, start or
target makes it a different replay. With a rate, rows pass at most at that rate in each task,
whatever the sizes of batches.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from dledger.command_line import flag_values
from dledger.command_line.report_page import Bars, CountUnit, Series
from dledger.errors import AccessDeniedError, ConfigError, IdentityError, InvalidRequestError
from dledger_spark.errors import JobError
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.jobs.source import (
    FORMAT,
    LogSource,
    ParquetSource,
    assigned,
    is_of_users,
    security_of_environment,
    source_or_parquet_options,
    words,
)
from dledger_spark.session import tasks_at_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dledger_spark.jobs.source import Extent
    from dledger_spark.options import WriteOptions
if TYPE_CHECKING:
    from pyspark.sql import Column

_BURST_S: Final = 0.1
"""Rows that may pass at once, as time at the given rate. It is also the granularity of the rate."""


@dataclass(slots=True)
class RowPace:
    """Waits so that rows pass at ``rows_per_s``, counted from the first one; lost time is not made up for."""

    rows_per_s: float
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], object] = time.sleep
    _free_at_s: float = field(default=0.0, init=False)

    def take(self, rows: int) -> None:
        """Return when ``rows`` more may pass."""
        now = self.clock()
        self._free_at_s = max(self._free_at_s, now) + rows / self.rows_per_s
        if self._free_at_s > now:
            self.wait(self._free_at_s - now)


def rows_at_once(rows_per_s: float) -> int:
    """How many rows to give to a task at a time, for an even rate."""
    return max(1, min(10_000, round(rows_per_s * _BURST_S)))


def paced(body: Column, rows_per_s: float, unpaced: tuple[int, ...]) -> Column:
    """``body`` unchanged, at a limited rate per task; the first ``unpaced`` rows of each task are not delayed."""
    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf  # which is where the types are

    paces: dict[int, list[object]] = {}

    def flow(bodies: pa.Array) -> pa.Array:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        attempt = context.taskAttemptId()
        if attempt not in paces:
            paces.clear()  # tasks run one after the other
            paces[attempt] = [RowPace(rows_per_s), unpaced[context.partitionId()]]
        pace, free = paces[attempt]
        assert isinstance(pace, RowPace)
        assert isinstance(free, int)
        going_free = min(free, len(bodies))
        paces[attempt][1] = free - going_free
        if len(bodies) > going_free:
            pace.take(len(bodies) - going_free)
        return bodies

    flow.__annotations__.update({"bodies": pa.Array, "return": pa.Array})  # Spark inspects the objects, not names
    make: Callable[..., Any] = arrow_udf  # Any: its types expect a kind of function that it deprecates
    column: Column = make(flow, "binary")(body)
    return column


WRITERS: Final = 4
_CHUNK: Final = {"index": 1024, "position": 1 << 20, "place": 1024}
"""How many consecutive units of the log go to one writer, by unit."""
DROPPED_PROPERTIES: Final = ("KEYS", "TAGS", "UNIQ_KEY", "WAIT", "DELAY", "REAL_TOPIC", "REAL_QID")
"""Properties that have their own columns, or that only the original broker needed."""
_COLUMNS: Final = {
    "topic": "string",
    "queueId": "int",
    "keys": "string",
    "tags": "string",
    "body": "binary",
    "properties": "map<string,string>",
    "storeTimestamp": "timestamp",
}
_SETTINGS: Final = {"spark.sql.adaptive.enabled": "false"}
"""One task per writer: tasks must not be merged."""
_ASK_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The target: a topic, or without one a group of plain entries."""

    bootstrap: str
    group: str = "default"
    topic: str = ""
    others: dict[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, str]:
        """The sink's options, except the writer."""
        found = {"bootstrap.servers": self.bootstrap, "group": self.group} | self.others
        return found | ({"topic": self.topic} if self.topic else {})


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``rate``: rows per second; None: unlimited."""

    source: LogSource | ParquetSource
    target: ReplayTarget
    tags: tuple[str, ...] = ()
    where: str = ""
    rate: float | None = None
    writers: int = WRITERS
    writer_id: str = ""
    keep_queues: bool = False
    skip_lost: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to replay, with a column ``place`` by which they are ordered and assigned, and their identity."""

    frame: DataFrame
    identity: dict[str, Any]  # Any: a JSON document
    chunk: int
    first: int | None = None
    end: int | None = None


def run(spark: SparkSession, options: ReplayOptions) -> JobReport:
    """Replay."""
    began = time.monotonic()
    source = options.source
    rows = _of_log(spark, options, source) if isinstance(source, LogSource) else _of_parquet(spark, options, source)
    writer = options.writer_id or writer_of(options, rows.identity)
    with _settings(spark, options):
        before = stored(options.target, writer, options.writers)
        _write(spark, options, rows, writer, before)
        after = stored(options.target, writer, options.writers)
    return _report(options, rows, writer, before, after, time.monotonic() - began)


def writer_of(options: ReplayOptions, identity: dict[str, Any]) -> str:  # Any: a JSON document
    """The writers' name: equal for the same rows and the same target, and for nothing else."""
    facts = {
        "version": 1,
        "rows": identity,
        "topics": sorted(options.source.topics),
        "from_time_ms": options.source.from_time_ms,
        "tags": sorted(options.tags),
        "where": options.where,
        "writers": options.writers,
        "group": options.target.group,
        "topic": options.target.topic,
    }
    return f"replay-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}"


# -- which rows -------------------------------------------------------------------------------------------------------


def _of_log(spark: SparkSession, options: ReplayOptions, source: LogSource) -> Rows:
    from pyspark.sql import functions as f

    from dledger_spark.jobs.source import extent_of

    extent = extent_of(source)
    check_loop(source, options.target, extent)
    first = first_of(source, extent, skip_lost=options.skip_lost)
    end = extent.end if source.to_index is None else min(extent.end, source.to_index)
    columns = {extent.unit: "bigint", **(_COLUMNS if extent.holds_messages else {"body": "binary"})}
    rows = source.between(extent.unit, max(first, extent.begin), max(end, first, extent.begin))
    frame = rows.read(spark, ", ".join(f"{name} {kind}" for name, kind in columns.items()))
    frame = frame.withColumn("place", f.col(extent.unit)).where(f.col("place").between(first, end - 1))
    if extent.holds_messages and not source.topics:
        frame = frame.where(is_of_users())  # a broker's own topics only if they are named
    return Rows(_filtered(frame, options), rows_identity(source, extent, first), _CHUNK[extent.unit], first, end)


def rows_identity(source: LogSource, extent: Extent, first: int) -> dict[str, Any]:  # Any: a JSON document
    """Identifies the rows of the log, without the filters."""
    identity = {"log": extent.identity, "unit": extent.unit, "first": first}
    chosen = source.chosen()
    return identity | {"options": chosen} if chosen else identity


def first_of(source: LogSource, extent: Extent, *, skip_lost: bool) -> int:
    """The start of the replay: it must not move with retention, or a second run would assign rows differently.

    Raises ``JobError`` if the log no longer reaches back that far.
    """
    first = 0
    if source.from_index is not None:
        first = source.from_index
    elif source.from_time_ms is not None:
        first = extent.at_time(source.from_time_ms)
    gone = first < extent.begin or (source.from_time_ms is not None and first == extent.begin > 0)
    if gone and not skip_lost:
        raise JobError(
            "the log was trimmed and no longer contains the start of the replay: it now starts at "
            f"{extent.begin} ({extent.unit}). Start there or later: --from-index {extent.begin}; or, if the rest "
            "is all you want and no earlier run of this replay has to be completed, --skip-lost"
        )
    return max(first, extent.begin) if skip_lost else first


def check_loop(source: LogSource, target: ReplayTarget, extent: Extent) -> None:
    """Refuse to feed a log into itself: a second run would replay the first one's output."""
    if extent.holds_messages and source.topics and target.topic not in source.topics:
        return
    if source.to_index is not None and source.to_index <= extent.end:  # the output is appended after it
        return
    if not _is_of_target(source, target, extent):
        return
    topics = f"which topics to replay (--topic), without {target.topic!r}, or " if extent.holds_messages else ""
    raise ConfigError(
        [
            f"the replay would read its own output: {source.name} and {target.bootstrap} are both "
            f"{extent.identity}. Say {topics}where to end: --to-index, {extent.end} at most"
        ]
    )


def _is_of_target(source: LogSource, target: ReplayTarget, extent: Extent) -> bool:
    """Whether a log is the target's, by the target's own name, because its nodes have many addresses.

    A plain broker's log has no name, and matches no target.
    """
    from dledger_spark.jobs.source import identity_of
    from dledger_spark.source.client_log import shared_client

    if not extent.group:
        return False
    options = write_options(target)
    client = shared_client(options.servers, extent.group, options.security)
    try:
        status = client.metadata(timeout_s=_ASK_TIMEOUT_S)
    except (IdentityError, InvalidRequestError):  # it is another group; it is a broker without a group
        return False
    except AccessDeniedError:  # this account may write, but not read the status
        return bool(set((source.bootstrap or "").split(",")) & set(target.bootstrap.split(",")))
    return identity_of(status.cluster_id, status.group) == extent.identity


def _of_parquet(spark: SparkSession, options: ReplayOptions, source: ParquetSource) -> Rows:
    from pyspark.sql import functions as f

    path = source.path
    about = export_of(path)
    frame = spark.read.parquet(f"file://{path.absolute()}")
    if "body" not in frame.columns:
        raise ConfigError([f"{path} has no column body (columns: {', '.join(frame.columns)})"])
    frame = frame.withColumn("body", f.col("body").cast("binary"))
    if about is not None:
        unit = about["unit"]
        frame, chunk = frame.withColumn("place", f.col(unit)), _CHUNK[unit]
        identity: dict[str, Any] = {"export": about}
    else:
        files = sorted((one.relative_to(path).as_posix(), one.stat().st_size) for one in path.rglob("*.parquet"))
        ranks = {str(one): at for at, (one, _) in enumerate(files)}
        identity = {"files": hashlib.sha256(json.dumps(files).encode()).hexdigest()}
        frame, chunk = _placed(spark, frame, path, ranks), _CHUNK["place"]
    if source.topics:
        frame = frame.where(f.col("topic").isin(*source.topics))
    return Rows(_filtered(frame, options), identity, chunk)


def export_of(path: Path) -> dict[str, Any] | None:  # Any: a JSON document
    """The manifest of the ``export`` job for a directory; None if it was not written by that job."""
    from dledger_spark.jobs.batches import STATE

    file = path / STATE / "about.json"
    if not file.is_file():
        return None
    about = json.loads(file.read_text(encoding="utf-8"))
    return about if isinstance(about, dict) and about.get("job") == "export" else None


def _placed(spark: SparkSession, frame: DataFrame, path: Path, ranks: dict[str, int]) -> DataFrame:
    """Files in order of their names, rows in file order: row 7 of file 2 is at 2 x 2**40 + 7."""
    from pyspark.sql import functions as f

    base = f"file:{path.absolute()}/"
    names = spark.createDataFrame(list(ranks.items()) or [("", 0)], "name string, rank bigint")
    name = f.expr(f"replace(replace(url_decode(_metadata.file_path), 'file:///', 'file:/'), {_quoted(base)}, '')")
    placed = frame.select("*", name.alias("name"), f.col("_metadata.row_index").alias("row")).join(
        f.broadcast(names), "name", "left"
    )
    return placed.withColumn("place", f.shiftleft("rank", 40) + f.col("row")).drop("name", "rank", "row")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _filtered(frame: DataFrame, options: ReplayOptions) -> DataFrame:
    from pyspark.sql import functions as f

    source, at = options.source, f.col("storeTimestamp")
    if source.from_time_ms is not None:
        frame = frame.where(at >= f.timestamp_millis(f.lit(source.from_time_ms)))
    if source.to_time_ms is not None:
        frame = frame.where(at < f.timestamp_millis(f.lit(source.to_time_ms)))
    if options.tags:
        frame = frame.where(f.col("tags").isin(*options.tags))
    return frame.where(options.where) if options.where else frame


# -- writing them -----------------------------------------------------------------------------------------------------


@contextmanager
def _settings(spark: SparkSession, options: ReplayOptions) -> Iterator[None]:
    wanted = dict(_SETTINGS)
    if options.rate is not None:
        wanted["spark.sql.execution.arrow.maxRecordsPerBatch"] = str(rows_at_once(options.rate / options.writers))
    before = {name: str(spark.conf.get(name)) for name in wanted}
    with ExitStack() as undo:
        for name, value in wanted.items():
            spark.conf.set(name, value)
            undo.callback(spark.conf.set, name, before[name])
        yield


def _write(spark: SparkSession, options: ReplayOptions, rows: Rows, writer: str, before: tuple[int, ...]) -> None:
    from pyspark.sql import functions as f

    dealt = rows.frame.withColumn("writer", f.pmod(f.floor(f.col("place") / rows.chunk), options.writers).cast("int"))
    ordered = dealt.repartitionById(options.writers, "writer").sortWithinPartitions("place")
    if options.rate is not None:
        at_once = min(options.writers, tasks_at_once(spark))
        ordered = ordered.withColumn("body", paced(f.col("body"), options.rate / at_once, before))
    names = ["body", "topic", "keys", "tags", *(["queueId"] if options.keep_queues else [])]
    columns = [f.col(name) for name in names if name in rows.frame.columns and (name == "body" or options.target.topic)]
    if options.target.topic and "properties" in rows.frame.columns:
        kept = f.map_filter("properties", lambda name, _value: ~name.isin(*DROPPED_PROPERTIES))
        columns.append(kept.alias("properties"))
    writing = ordered.select(*columns).write.format(FORMAT).mode("append")
    writing.options(**options.target.options(), writerId=writer).save()


def stored(target: ReplayTarget, writer: str, writers: int) -> tuple[int, ...]:
    """How many rows of each writer the target has."""
    from dledger_spark.source.sink import open_target, row_format

    options = write_options(target)
    form = row_format([("body", "binary")])
    found = []
    for number in range(writers):
        with open_target(options, form, f"{writer}/{number}") as one:
            found.append(one.begin())
    return tuple(found)


def write_options(target: ReplayTarget) -> WriteOptions:
    """The sink's options, validated before Spark is started. Raises ``ConfigError``."""
    from dledger_spark.errors import OptionError
    from dledger_spark.options import WriteOptions

    try:
        return WriteOptions.parse(target.options())
    except OptionError as error:
        raise ConfigError([str(error)]) from error


# -- the report -------------------------------------------------------------------------------------------------------


def _report(
    options: ReplayOptions, rows: Rows, writer: str, before: Sequence[int], after: Sequence[int], seconds: float
) -> JobReport:
    sent, known = sum(after) - sum(before), sum(before)
    target = options.target
    summary = (
        Fact("from", options.source.name),
        Fact("to", f"topic {target.topic}" if target.topic else f"entries of group {target.group}"),
        Fact("first", rows.first, CountUnit.COUNT),
        Fact("end", rows.end, CountUnit.COUNT),
        Fact("rows", sent + known, CountUnit.COUNT),
        Fact("stored now", sent, CountUnit.COUNT),
        Fact("stored before", known, CountUnit.COUNT),
        Fact("seconds", seconds, CountUnit.SECONDS),
        Fact("rows per second", sent / seconds, CountUnit.PER_SECOND),
        Fact("writer", writer),
    )
    columns = (
        ReportColumn("writer"),
        ReportColumn("stored now", CountUnit.COUNT),
        ReportColumn("stored before", CountUnit.COUNT),
    )
    each = [(f"{writer}/{at}", late - early, early) for at, (early, late) in enumerate(zip(before, after, strict=True))]
    chart = Bars(
        "Rows by writer",
        CountUnit.COUNT,
        tuple(name for name, _, _ in each),
        (
            Series("stored before", tuple(float(early) for *_, early in each)),
            Series("stored now", tuple(float(now) for _, now, _ in each)),
        ),
    )
    notes = ("running it again stores nothing twice, as long as the log remembers its writers (producer_expiry_ms)",)
    title = f"Replay of {options.source.name}"
    return JobReport("replay", title, summary, (Table("Writers", columns, tuple(each)),), (chart,), notes=notes)


# -- the command line -------------------------------------------------------------------------------------------------


@job_command(
    run,
    name="replay",
    short_help="Write part of a log, or Parquet, to a topic.",
    epilog="""\b
Examples:
  dledger pipeline replay /backup/dledger-n0 -t orders --to 127.0.0.1:10911 --to-group broker-a --to-topic orders-again
  dledger pipeline replay -b 127.0.0.1:10911 -g broker-a -t orders --from-time 2026-11-20T08:00 \\
                          --to-time 2026-11-20T09:00 --to-topic orders-retry --tag created,paid --rate 500
  dledger pipeline replay --parquet /lake/orders --where "keys like 'A%'" --to 127.0.0.1:10911 --to-topic orders

\b
Run it again after a failure: stored rows are not stored twice.""",
)
@source_or_parquet_options
@click.option("--to", "to", metavar="HOST:PORT,…", help="Nodes of the group to write to; default: the ones read from.")
@click.option("--to-group", metavar="NAME", help="Name of that group; default: the one read from.")
@click.option(
    "--to-topic",
    default="",
    metavar="TOPIC",
    help="Topic to write to; leave out to write entries to a group without brokers.",
)
@click.option("--tag", "tags", multiple=True, help="Only these tags; may be repeated or hold commas.")
@click.option("--where", default="", metavar="SQL", help="Only rows that match this SQL condition over the columns.")
@click.option("--rate", type=flag_values.Number(min=0, min_open=True), metavar="ROWS", help="Maximum rows per second.")
@click.option(
    "--writers", type=flag_values.Whole(1, 64), default=WRITERS, show_default=True, help="Number of parallel writers."
)
@click.option(
    "--writer-id", default="", metavar="NAME", help="Name of the writers; default: derived from all these options."
)
@click.option(
    "--keep-queues", is_flag=True, help="Write each message to the queue number it came from; the topic must exist."
)
@click.option("--skip-lost", is_flag=True, help="Replay the rest of a trimmed log.")
@click.option("--to-option", multiple=True, metavar="NAME=VALUE", help="Other option of the sink; may be repeated.")
def command(  # noqa: PLR0913  # one per option
    source: LogSource | ParquetSource,
    to: str | None,
    to_group: str | None,
    to_topic: str,
    tags: tuple[str, ...],
    where: str,
    rate: float | None,
    writers: int,
    writer_id: str,
    keep_queues: bool,
    skip_lost: bool,
    to_option: tuple[str, ...],
) -> ReplayOptions:
    """Write messages of a log, or rows of Parquet, to a topic: filtered, rate-limited, each exactly once."""
    live = source if isinstance(source, LogSource) and source.is_live else None
    bootstrap = to or (live.bootstrap if live is not None else None)
    if not bootstrap:
        raise click.UsageError("name the target: --to HOST:PORT,…")
    group = to_group or (live.group if live is not None else "default")
    security = security_of_environment() | assigned(to_option, "--to-option")
    return ReplayOptions(
        source,
        ReplayTarget(bootstrap, group, to_topic, security),
        words(tags),
        where,
        rate,
        writers,
        writer_id,
        keep_queues,
        skip_lost,
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import replay  # functions sent to Spark's workers must be importable by module name

    replay.main()
