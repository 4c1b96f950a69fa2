"""``dledger pipeline table``: a Delta table that follows a running group's log, each message once.

Batch by batch, Spark's tasks read ranges of the log and write data files (``delta_files``), and the driver commits them
together with the position they reach (``delta_table``). The table is the only memory: there is no checkpoint to lose.
A run that is killed leaves a table that ends with a whole batch, and the next one continues there.

The stream reader of the format ``dledger`` decides the range of a batch: committed entries only, whichever
member leads, within ``maxOffsetsPerTrigger`` and ``maxBytesPerTrigger``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from dledger import extras, flag_values
from dledger.errors import ConfigError
from dledger_spark.jobs.batches import STATE, locked, refuse_uri
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.errors import JobError, MissingPartError
from dledger_spark.jobs.report import Fact, JobReport
from dledger_spark.jobs.source import LogSource, source_options
from dledger_spark.jobs.units import CountUnit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dledger_spark.jobs.delta_files import DataFile
    from dledger_spark.jobs.delta_table import LogTable, TableOrigin
    from dledger_spark.options import ReadOptions
    from dledger_spark.schema import Projection, SchemaColumn
    from dledger_spark.source.stream import LogStreamReader

DEFAULTS: Final = {"maxBytesPerTrigger": "256m", "splitBytes": "16m", "startingOffsets": "earliest"}
"""Options of the format, unless others are given: how much one batch, and one of its files, holds at most."""
OF_ENTRIES: Final = ("index", "term", "position", "body")
"""The columns of entries that are not messages."""
EMPTY_COMMIT_S: Final = 60.0
"""How often at most the position alone is committed, while nothing of the log belongs into the table."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """``columns``: the table's columns; empty: all that are not virtual. ``once``: end with what is committed at the
    start. ``show`` receives a line for each batch; with ``as_json`` a JSON object.
    """

    source: LogSource
    out: Path
    columns: tuple[str, ...] = ()
    trigger_s: float = 2.0
    once: bool = False
    consumer_group: str = ""
    show: Callable[[str], None] = field(default=click.echo, repr=False)
    as_json: bool = False


@dataclass(slots=True)
class TableProgress:
    """The progress of a run."""

    batches: int = 0
    rows: int = 0
    size_bytes: int = 0
    behind: int | None = None
    """Committed entries that the table does not hold yet."""


def run(spark: SparkSession, options: TableOptions) -> JobReport:
    """Follow until Ctrl-C, or with ``once`` until everything committed now is in the table."""
    check(options)
    from dledger_spark.jobs.delta_table import open_table
    from dledger_spark.source.client_log import ClientLog
    from dledger_spark.source.stream import LogStreamReader

    began = time.monotonic()
    reading = read_options(options)
    kept = ClientLog(reading).committed()
    holds = kept.holds_messages if reading.record_format == "auto" else reading.record_format == "message"
    projection = projection_of(chosen_columns(options.columns, reading, holds_messages=holds))
    path = options.out.absolute()
    (path / STATE).mkdir(parents=True, exist_ok=True)
    with locked(path / STATE / "lock", path):
        table = open_table(path, projection.schema, origin_of(options, kept.cluster, kept.group))
        follower = TableFollower(spark, options, LogStreamReader(reading, projection), table)
        try:
            follower.follow()
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
        follower.commit_position()
        follower.progress.behind = follower.behind()
    return _report(options, table, follower.progress, time.monotonic() - began)


def check(options: TableOptions) -> None:
    """Raises ``ConfigError`` for options that make no sense, ``MissingPartError`` without the library for Delta."""
    if missing := extras.problem("delta", "a Delta table", ("deltalake",)):
        raise MissingPartError(missing)
    source = options.source
    refuse_uri(options.out)
    if not source.is_live:
        raise ConfigError(["a directory does not grow while being read: name a running group, --bootstrap HOST:PORT,…"])
    if source.to_index is not None or source.to_time_ms is not None:
        raise ConfigError(["a table follows the log without an end: leave out --to-index and --to-time, or use --once"])


def read_options(options: TableOptions) -> ReadOptions:
    """How the log is read. Raises ``ConfigError``."""
    from dledger_spark.errors import OptionError
    from dledger_spark.options import ReadOptions

    given = options.source.options()
    taken = {name.lower() for name in given}
    defaults = {name: text for name, text in DEFAULTS.items() if name.lower() not in taken}
    if "startingtimestamp" in taken:
        defaults.pop("startingOffsets", None)
    if options.consumer_group:
        given["consumerGroup"] = options.consumer_group
    try:
        return ReadOptions.parse(defaults | given)
    except OptionError as error:
        raise ConfigError([str(error)]) from error


def chosen_columns(names: Sequence[str], options: ReadOptions, *, holds_messages: bool) -> tuple[SchemaColumn, ...]:
    """The table's columns, the index of the entry first. Raises ``ConfigError`` for unknown ones."""
    from dledger_spark.schema import columns_of, default_columns

    known = {one.name: one for one in columns_of(options.schema_style, options.properties_format)}
    unknown = set(names) - known.keys()
    if unknown:
        raise ConfigError([f"--columns: no column {', '.join(sorted(unknown))} in the format dledger"])
    every = [one.name for one in default_columns(options.schema_style, options.properties_format)]
    wanted = names or (every if holds_messages else OF_ENTRIES)
    return tuple(known[name] for name in dict.fromkeys(("index", *wanted)))


def projection_of(columns: tuple[SchemaColumn, ...]) -> Projection:
    """The same as the reader takes it."""
    from dledger_spark.schema import Projection, arrow_schema

    return Projection(columns, arrow_schema(columns))


def origin_of(options: TableOptions, cluster: str, group: str) -> TableOrigin:
    """Settings that must be the same in every run into one table."""
    from dledger_spark.jobs.delta_table import TableOrigin

    chosen = options.source.chosen()
    rows: dict[str, object] = {"topics": sorted(options.source.topics)}
    return TableOrigin(cluster, group, rows | ({"options": chosen} if chosen else {}))


# -- following --------------------------------------------------------------------------------------------------------


class TableFollower:
    """One run. ``follow`` reads and commits batch after batch, on the caller's thread."""

    def __init__(self, spark: SparkSession, options: TableOptions, reader: LogStreamReader, table: LogTable) -> None:
        self.progress = TableProgress()
        self._spark = spark
        self._options = options
        self._reader = reader
        self._table = table
        self._read: Mapping[str, str | int] = self._start()
        self._committed_at = time.monotonic()

    def follow(self) -> None:
        """Until everything is in the table, with ``once``; else until an exception, such as ``KeyboardInterrupt``."""
        limit = self._reader.getDefaultReadLimit()
        if self._options.once:
            self._reader.prepareForTriggerAvailableNow()
        while True:
            began = time.monotonic()
            end = self._reader.latestOffset(self._read, limit)
            if int(end["index"]) < int(self._read["index"]):
                raise JobError(
                    f"{self._table.path} holds the entries before {self._read['index']}, but the log ends at "
                    f"{end['index']}: it was replaced by another or older one; follow it into a new directory"
                )
            if end == self._read:
                if self._options.once:
                    return
                time.sleep(max(0.0, self._options.trigger_s - (time.monotonic() - began)))
                continue
            self._take(end, began)
            if not self._options.once:
                time.sleep(max(0.0, self._options.trigger_s - (time.monotonic() - began)))

    def commit_position(self) -> None:
        """Commit how far the log was read, if the last batches had no rows."""
        first, end = self._first(), int(self._read["index"])
        if first < end:
            self._commit([], end)

    def behind(self) -> int:
        """How many committed entries have not been read yet."""
        return max(0, int(self._reader.reportLatestOffset()["index"]) - int(self._read["index"]))

    def _start(self) -> Mapping[str, str | int]:
        """Where the table ends, or where a new one starts."""
        position, origin = self._table.position, self._table.origin
        if position is None:
            return self._reader.initialOffset()
        from dledger_spark.source.offsets import LogOffset

        return LogOffset(origin.cluster, origin.group, position, position).to_dict()

    def _first(self) -> int:
        position = self._table.position
        return int(self._read["initial"]) if position is None else position

    def _take(self, end: Mapping[str, str | int], began: float) -> None:
        """Write one batch, commit it, show it."""
        files = self._write(end)
        self._read = end
        if files or time.monotonic() - self._committed_at >= EMPTY_COMMIT_S:
            self._commit(files, int(end["index"]))
        done = self.progress
        done.batches += 1
        done.rows += sum(one.rows for one in files)
        done.size_bytes += sum(one.size_bytes for one in files)
        if files:
            self._show(files, time.monotonic() - began)

    def _write(self, end: Mapping[str, str | int]) -> list[DataFile]:
        from dledger_spark.jobs.delta_files import FileWriter

        partitions = self._reader.partitions(self._read, end)
        context = self._spark.sparkContext
        context.setJobDescription(
            f"table {self._table.path.name}: entries {self._read['index']} to {int(end['index']) - 1}"
        )
        writer = FileWriter(str(self._table.path), self._reader)
        found = context.parallelize(partitions, len(partitions)).flatMap(writer).collect()
        for one in found:
            place = self._table.path / one.path
            if not place.is_file() or place.stat().st_size != one.size_bytes:
                raise JobError(
                    f"a task wrote {one.path} with {one.rows:,} rows, and it is not in {self._table.path}: Spark's "
                    "workers write to their own disks; name a directory that they share with this machine"
                )
        return found

    def _commit(self, files: Sequence[DataFile], end: int) -> None:
        self._table.append(files, self._first(), end)
        self._committed_at = time.monotonic()

    def _show(self, files: Sequence[DataFile], seconds: float) -> None:
        rows, behind, end = sum(one.rows for one in files), self.behind(), int(self._read["index"])
        if self._options.as_json:
            facts = {"version": self._table.version, "end": end, "rows": rows, "behind": behind}
            self._options.show(json.dumps(facts))
        else:
            self._options.show(
                f"version {self._table.version}: {rows:,} rows up to entry {end - 1:,}, "
                f"{rows / max(1e-3, seconds):,.0f}/s, {behind:,} behind"
            )


def _report(options: TableOptions, table: LogTable, done: TableProgress, seconds: float) -> JobReport:
    summary = (
        Fact("log", options.source.name),
        Fact("table", str(table.path)),
        Fact("version", table.version, CountUnit.COUNT),
        Fact("batches", done.batches, CountUnit.COUNT),
        Fact("new rows", done.rows, CountUnit.COUNT),
        Fact("bytes", done.size_bytes, CountUnit.BYTES),
        Fact("next", table.position, CountUnit.COUNT),
        Fact("behind", done.behind, CountUnit.COUNT),
        Fact("seconds", seconds, CountUnit.SECONDS),
        Fact("rows per second", done.rows / seconds, CountUnit.PER_SECOND),
    )
    return JobReport("table", f"{table.path} follows {options.source.name}", summary)


# -- the command line -------------------------------------------------------------------------------------------------


@job_command(
    run,
    name="table",
    short_help="Keep a Delta table that follows the log.",
    epilog="""\b
Examples:
  dledger pipeline table -b 127.0.0.1:10911 -g broker-a -t orders -o /lake/orders
  dledger pipeline table -b 127.0.0.1:10911 -g broker-a -t orders -o /lake/orders --once

\b
Stop it with Ctrl-C; started again, it continues where the table ends. Read the table with
  deltalake.DeltaTable("/lake/orders").to_pyarrow_table()     or any other reader of Delta Lake.""",
)
@source_options
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory of the table; must be shared by all of Spark's workers.",
)
@click.option("--columns", default="", metavar="NAME,…", help="Only these columns; index is always there.")
@click.option(
    "--trigger",
    "trigger_s",
    type=flag_values.Seconds(min=0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Commit at most this often.",
)
@click.option("--once", is_flag=True, help="Stop when everything committed so far is in the table.")
@click.option(
    "--publish",
    "consumer_group",
    default="",
    metavar="GROUP",
    help="Publish the progress as this consumer group's offsets.",
)
def command(
    source: LogSource, out: Path, columns: str, trigger_s: float, once: bool, consumer_group: str
) -> TableOptions:
    """Write the messages of a running group to a Delta table as they arrive, each exactly once.

    A new table starts with the first message kept, unless --from-index or --from-time is given.
    """
    names = tuple(one.strip() for one in columns.split(",") if one.strip())
    as_json = bool(click.get_current_context().params.get("as_json"))
    return TableOptions(source, out, names, trigger_s, once, consumer_group, as_json=as_json)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import table  # functions sent to Spark's workers must be importable by module name

    table.main()
