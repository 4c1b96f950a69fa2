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
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import click

from dledger.client import ReadMode
from dledger.command_line import flag_values
from dledger.command_line.report_page import CountUnit
from dledger.errors import ConfigError, IndexBeforeBeginError
from dledger_spark.errors import JobError, MissingPartError
from dledger_spark.jobs.batches import STATE, locked, refuse_uri
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport
from dledger_spark.jobs.source import LogSource, source_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import InputPartition

    from dledger.types import Entry
    from dledger_spark.jobs.delta_table import Compactor, EntrySpan, LogTable, TableOrigin
    from dledger_spark.options import ReadOptions
    from dledger_spark.schema import Projection, SchemaColumn
    from dledger_spark.source.stream import LogStreamReader

Part = TypeVar("Part")
"""The result of a task, sent to the driver."""
_DEFAULTS: Final = {"maxBytesPerTrigger": "256m", "splitBytes": "16m", "startingOffsets": "earliest"}
"""Options of the format, unless others are given: how much one batch, and one of its files, holds at most."""
_BATCH_BYTES_BY_KEY: Final = "64m"
"""The same of a table with a key, whose batches pass through the driver."""
_KEEP_HOURS: Final = 168
"""For how long files that the newest version does not need are kept, by default: Delta's own."""
OF_ENTRIES: Final = ("index", "term", "position", "body")
"""The columns of entries that are not messages."""
_EMPTY_COMMIT_S: Final = 60.0
"""How often at most the position alone is committed, while nothing of the log belongs into the table."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """``columns``: the table's columns; empty: all that are not virtual. ``key``: the column by which a message
    replaces an earlier one; empty: none does. ``compact_s``: how often small files are merged; None: never. ``once``:
    end with what is committed at the start. ``show`` receives a line for each batch; with ``as_json`` a JSON object.
    """

    source: LogSource
    out: Path
    columns: tuple[str, ...] = ()
    key: str = ""
    trigger_s: float = 2.0
    compact_s: float | None = None
    keep_hours: int = _KEEP_HOURS
    once: bool = False
    consumer_group: str = ""
    show: Callable[[str], None] = field(default=click.echo, repr=False)
    as_json: bool = False


@dataclass(slots=True)
class _TableProgress:
    """The progress of a run."""

    batches: int = 0
    rows: int = 0
    merged_files: int = 0
    removed_files: int = 0
    behind: int | None = None
    """Committed entries that the table does not hold yet."""


def run(spark: SparkSession, options: TableOptions) -> JobReport:
    """Follow until Ctrl-C, or with ``once`` until everything committed now is in the table."""
    check(options)
    from dledger_spark.jobs.delta_table import Compactor, open_table, refuse_foreign
    from dledger_spark.source.client_log import ClientLog
    from dledger_spark.source.stream import LogStreamReader

    began = time.monotonic()
    reading = read_options(options)
    kept = ClientLog(reading).committed()
    holds = kept.holds_messages if reading.record_format == "auto" else reading.record_format == "message"
    names = (*options.columns, options.key) if options.columns and options.key else options.columns
    projection = projection_of(chosen_columns(names, reading, holds_messages=holds))
    _check_key(options.key, projection)
    path = options.out.absolute()
    refuse_foreign(path)
    (path / STATE).mkdir(parents=True, exist_ok=True)
    with locked(path / STATE / "lock", path):
        table = open_table(path, projection.schema, origin_of(options, kept.cluster, kept.group))
        follower = TableFollower(spark, options, reading, LogStreamReader(reading, projection), table)
        try:
            if options.compact_s is None:
                follower.follow()
            else:
                with Compactor(path, options.compact_s, options.keep_hours) as compactor:
                    follower.follow(compactor)
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
        follower.commit_position()
        follower.progress.behind = follower.behind()
    return _report(options, table, follower.progress, time.monotonic() - began)


def check(options: TableOptions) -> None:
    """Raises ``ConfigError`` for options that make no sense, ``MissingPartError`` without the library for Delta."""
    if missing := flag_values.missing_extra("delta", "a Delta table", ("deltalake",)):
        raise MissingPartError(missing)
    source = options.source
    refuse_uri(options.out)
    if not source.is_live:
        raise ConfigError(["a directory does not grow while being read: name a running group, --bootstrap HOST:PORT,…"])
    if source.to_index is not None or source.to_time_ms is not None:
        raise ConfigError(["a table follows the log without an end: leave out --to-index and --to-time, or use --once"])


def _check_key(key: str, projection: Projection) -> None:
    """Raises ``ConfigError`` for a column that is not there, or whose values are not told apart safely.

    Of numbers with a point, NaN has no place in the order by which files are skipped: rows would be there twice.
    """
    import pyarrow as pa

    if key and key not in projection.names:
        raise ConfigError([f"--key: no column {key} among {', '.join(projection.names)}"])
    if key and ((kind := projection.schema.field(key).type).num_fields or pa.types.is_floating(kind)):
        raise ConfigError([f"--key: column {key} is {kind}: use one of whole numbers, decimals, texts, bytes or times"])


def read_options(options: TableOptions) -> ReadOptions:
    """How the log is read. Raises ``ConfigError``."""
    from dledger_spark.errors import OptionError
    from dledger_spark.options import ReadOptions

    given = options.source.options()
    taken = {name.lower() for name in given}
    defaults = _DEFAULTS | ({"maxBytesPerTrigger": _BATCH_BYTES_BY_KEY} if options.key else {})
    defaults = {name: text for name, text in defaults.items() if name.lower() not in taken}
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
    from dledger_spark.decode.typed_bodies import body_format
    from dledger_spark.schema import beside, body_columns, columns_of, default_columns

    style, properties = options.schema_style, options.properties_format
    parsed = body_format(options)
    bodies = () if parsed is None else body_columns(parsed.columns)
    if any(one.name.lower() == "index" for one in bodies):
        raise ConfigError(["bodySchema: bodies have a column index, which in a table is that of the entry: rename it"])
    known = {one.name: one for one in beside(bodies, columns_of(style, properties))}
    unknown = set(names) - known.keys()
    if unknown:
        raise ConfigError([f"--columns: no column {', '.join(sorted(unknown))} in the format dledger"])
    of_log = [one for one in default_columns(style, properties) if not bodies or (one.source or one.name) != "body"]
    every = [one.name for one in beside(bodies, of_log)]
    wanted = names or (every if holds_messages else [one.name for one in bodies] or OF_ENTRIES)
    return tuple(known[name] for name in dict.fromkeys(("index", *wanted)))


def projection_of(columns: tuple[SchemaColumn, ...]) -> Projection:
    """The columns as the stream reader takes them."""
    from dledger_spark.schema import Projection, arrow_schema

    return Projection(columns, arrow_schema(columns))


def origin_of(options: TableOptions, cluster: str, group: str) -> TableOrigin:
    """Settings that must be the same in every run into one table."""
    from dledger_spark.jobs.delta_table import TableOrigin

    chosen = options.source.chosen()
    rows: dict[str, object] = {"topics": sorted(options.source.topics), "key": options.key}
    return TableOrigin(cluster, group, rows | ({"options": chosen} if chosen else {}))


# -- following --------------------------------------------------------------------------------------------------------


class TableFollower:
    """One run. ``follow`` reads and commits batch after batch, on the caller's thread."""

    def __init__(
        self,
        spark: SparkSession,
        options: TableOptions,
        reading: ReadOptions,
        reader: LogStreamReader,
        table: LogTable,
    ) -> None:
        self.progress = _TableProgress()
        self._spark = spark
        self._options = options
        self._reading = reading
        self._reader = reader
        self._table = table
        self._read: Mapping[str, str | int] = self._start()
        self._committed_at = time.monotonic()

    def follow(self, compactor: Compactor | None = None) -> None:
        """Until everything is in the table, with ``once``; else until an exception, such as ``KeyboardInterrupt``."""
        limit = self._reader.getDefaultReadLimit()
        known = False
        if self._options.once:
            self._reader.prepareForTriggerAvailableNow()
        while True:
            began = time.monotonic()
            self._compact(compactor, beside=not self._options.key)
            end = self._reader.latestOffset(self._read, limit)
            if int(end["index"]) < int(self._read["index"]):
                raise JobError(
                    f"{self._table.path} holds the entries before {self._read['index']}, but the log ends at "
                    f"{end['index']}: it was replaced by another or older one; follow it into a new directory"
                )
            if not known:  # after the above: the entry is there
                self._check_history()
                known = True
            if end == self._read:
                if self._options.once:
                    self._compact(compactor, beside=False)
                    return
                time.sleep(max(0.0, self._options.trigger_s - (time.monotonic() - began)))
                continue
            self._take(end, began)
            if not self._options.once:
                time.sleep(max(0.0, self._options.trigger_s - (time.monotonic() - began)))

    def _compact(self, compactor: Compactor | None, *, beside: bool) -> None:
        if compactor is not None and (done := compactor.step(beside=beside)) is not None:
            self.progress.merged_files += done.merged
            self.progress.removed_files += done.removed

    def commit_position(self) -> None:
        """Commit how far the log was read, if the last batches had no rows."""
        if self._first() < int(self._read["index"]):
            self._table.append([], self._span(self._read))
            self._committed_at = time.monotonic()

    def behind(self) -> int:
        """How many committed entries have not been read yet."""
        return max(0, int(self._reader.reportLatestOffset()["index"]) - int(self._read["index"]))

    def _start(self) -> Mapping[str, str | int]:
        """Where the table ends, or where a new one starts."""
        position, origin = self._table.position, self._table.origin
        if position is None:
            return self._reader.initialOffset()
        from dledger_spark.source.stream import LogOffset

        return LogOffset(origin.cluster, origin.group, position, position).to_dict()

    def _first(self) -> int:
        position = self._table.position
        return int(self._read["initial"]) if position is None else position

    def _span(self, end: Mapping[str, str | int]) -> EntrySpan:
        """The entries that a commit up to ``end`` adds. Raises ``JobError`` if the log was replaced meanwhile."""
        from dledger_spark.jobs.delta_table import UNKNOWN, EntrySpan

        self._check_history()  # after the rows were read: a log that was replaced does not come back
        first, after = self._first(), int(end["index"])
        last = self._entry(after - 1)
        term, chain_crc = (UNKNOWN, UNKNOWN) if last is None else (last.term, last.chain_crc)
        return EntrySpan(first, after, term, chain_crc)

    def _check_history(self) -> None:
        """Raises ``JobError`` if the table is of another log: the last entry in it has another checksum here."""
        from dledger_spark.jobs.delta_table import UNKNOWN

        position, noted = self._table.position, self._table.chain_crc
        if position is None or noted == UNKNOWN:
            return
        last = self._entry(position - 1)
        if last is not None and last.chain_crc != noted:
            raise JobError(
                f"{self._table.path} holds the entries before {position} of another log with the same names: entry "
                f"{position - 1} of this one has the chainCrc {last.chain_crc}, not {noted}. The log was replaced, or "
                "restored from an older backup; follow it into a new directory"
            )

    def _entry(self, index: int) -> Entry | None:
        """A committed entry of the log; None if it is no longer kept."""
        from dledger_spark.source.client_log import shared_client

        reading = self._reading
        client = shared_client(reading.servers, reading.group, reading.security)
        timeout_s = reading.fetch_timeout_ms / 1000
        try:
            return client.read(index, count=1, mode=ReadMode.LINEARIZABLE, timeout_s=timeout_s)[0]
        except IndexBeforeBeginError:
            return None

    def _take(self, end: Mapping[str, str | int], began: float) -> None:
        """Read one batch, commit it, show it."""
        rows = self._replace(end) if self._options.key else self._add(end)
        if not rows and time.monotonic() - self._committed_at >= _EMPTY_COMMIT_S:
            self.commit_position()
        self.progress.batches += 1
        self.progress.rows += rows
        if rows:
            self._committed_at = time.monotonic()
            self._show(rows, time.monotonic() - began)

    def _add(self, end: Mapping[str, str | int]) -> int:
        """Append a batch: how many rows it has."""
        from dledger_spark.jobs.delta_files import FileWriter

        files = self._run(FileWriter(str(self._table.path), self._reader), end)
        for one in files:
            place = self._table.path / one.path
            if not place.is_file() or place.stat().st_size != one.size_bytes:
                raise JobError(
                    f"a task wrote {one.path} with {one.rows:,} rows, and it is not in {self._table.path}: Spark's "
                    "workers write to their own disks; name a directory that they share with this machine"
                )
        if files:
            self._table.append(files, self._span(end))
        self._read = end  # not before: what was read and not committed is not in the table
        return sum(one.rows for one in files)

    def _replace(self, end: Mapping[str, str | int]) -> int:
        """Upsert a batch: how many rows it has."""
        from dledger_spark.jobs.delta_files import RowCollector, rows_of

        key = self._options.key
        rows = rows_of(self._run(RowCollector(key, self._reader), end))
        if rows is not None:
            self._table.upsert(rows, key, self._span(end))
        self._read = end  # as above
        return 0 if rows is None else int(rows.num_rows)

    def _run(self, task: Callable[[InputPartition], list[Part]], end: Mapping[str, str | int]) -> list[Part]:
        """Run a task for each range of a batch; their results, in the order of the log."""
        partitions = self._reader.partitions(self._read, end)
        context = self._spark.sparkContext
        context.setJobDescription(
            f"table {self._table.path.name}: entries {self._read['index']} to {int(end['index']) - 1}"
        )
        return context.parallelize(partitions, len(partitions)).flatMap(task).collect()

    def _show(self, rows: int, seconds: float) -> None:
        behind, end = self.behind(), int(self._read["index"])
        if self._options.as_json:
            facts = {"version": self._table.version, "end": end, "rows": rows, "behind": behind}
            self._options.show(json.dumps(facts))
        else:
            self._options.show(
                f"version {self._table.version}: {rows:,} rows up to entry {end - 1:,}, "
                f"{rows / max(1e-3, seconds):,.0f}/s, {behind:,} behind"
            )


def _report(options: TableOptions, table: LogTable, done: _TableProgress, seconds: float) -> JobReport:
    summary = (
        Fact("log", options.source.name),
        Fact("table", str(table.path)),
        Fact("version", table.version, CountUnit.COUNT),
        Fact("batches", done.batches, CountUnit.COUNT),
        Fact("new rows", done.rows, CountUnit.COUNT),
        Fact("merged files", done.merged_files, CountUnit.COUNT),
        Fact("removed files", done.removed_files, CountUnit.COUNT),
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
    "--key",
    default="",
    metavar="NAME",
    help="A column, such as keys: a message replaces the row of an earlier one with the same value.",
)
@click.option(
    "--trigger",
    "trigger_s",
    type=flag_values.Seconds(min=0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Commit at most this often.",
)
@click.option(
    "--compact",
    "compact_s",
    type=flag_values.Seconds(min=0),
    metavar="SECONDS",
    help="Merge small files, and remove unused ones, this often.",
)
@click.option(
    "--keep",
    "keep_hours",
    type=flag_values.Whole(min=1),
    default=_KEEP_HOURS,
    show_default=True,
    metavar="HOURS",
    help="With --compact: keep unused files, and so older versions of the table, this long.",
)
@click.option("--once", is_flag=True, help="Stop when everything committed so far is in the table.")
@click.option(
    "--publish",
    "consumer_group",
    default="",
    metavar="GROUP",
    help="Publish the progress as this consumer group's offsets.",
)
def command(  # noqa: PLR0913  # one per option
    source: LogSource,
    out: Path,
    columns: str,
    key: str,
    trigger_s: float,
    compact_s: float | None,
    keep_hours: int,
    once: bool,
    consumer_group: str,
) -> TableOptions:
    """Write the messages of a running group to a Delta table as they arrive, each exactly once.

    A new table starts with the first message kept, unless --from-index or --from-time is given.
    """
    names = tuple(one.strip() for one in columns.split(",") if one.strip())
    as_json = bool(click.get_current_context().params.get("as_json"))
    return TableOptions(
        source, out, names, key, trigger_s, compact_s, keep_hours, once, consumer_group, as_json=as_json
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import table  # functions sent to Spark's workers must be importable by module name

    table.main()
