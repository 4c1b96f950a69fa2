"""``dledger pipeline export``: exports the log as Parquet by topic and date, batch by batch, for any reader.

Each run continues where the last batch ended, and every batch appears atomically (see ``batches``). A batch's end is in
its own manifest, so a killed run leaves nothing to repair, and a repeated one adds nothing twice.
The report of a run is made of the manifests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import unquote

import click

from dledger.command_line.flag_values import Size
from dledger.command_line.report_page import Bars, Chart, ColumnChart, CountUnit, Series
from dledger.errors import ConfigError
from dledger_spark.errors import JobError
from dledger_spark.jobs.batches import MANIFEST, BatchDirectory, open_batches
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.jobs.source import Extent, LogSource, extent_of, source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION: Final = 1
_NUMBERS: Final = ("batch", "first", "end", "lost")
_HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_BARS_MAX: Final = 20
_DATES_MAX: Final = 120


@dataclass(frozen=True, slots=True)
class FileFact:
    """One Parquet file of a batch; its path is relative to the batch."""

    path: str
    size_bytes: int
    rows: int

    def part(self, name: str) -> str | None:
        """The value of one of its partition columns."""
        for one in self.path.split("/"):
            if one.startswith(f"{name}="):
                value = unquote(one.partition("=")[2])
                return None if value == _HIVE_NULL else value
        return None


@dataclass(frozen=True, slots=True)
class ExportedBatch:
    """A batch's manifest: the log from ``first`` up to ``end`` (exclusive), by index or position; ``lost`` entries at
    its start were no longer kept.
    """

    number: int
    first: int
    end: int
    lost: int = 0
    files: tuple[FileFact, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> int:
        """The number of messages in it."""
        return sum(one.rows for one in self.files)

    @property
    def size_bytes(self) -> int:
        """The total size of its files."""
        return sum(one.size_bytes for one in self.files)

    def to_manifest(self) -> dict[str, Any]:  # Any: a JSON document
        """The manifest as JSON."""
        return {
            "version": VERSION,
            "batch": self.number,
            "first": self.first,
            "end": self.end,
            "lost": self.lost,
            "rows": self.rows,
            "bytes": self.size_bytes,
            "files": [{"path": one.path, "bytes": one.size_bytes, "rows": one.rows} for one in self.files],
            "written_ms": int(time.time() * 1000),
        }

    @classmethod
    def of_manifest(cls, document: dict[str, Any], path: Path) -> ExportedBatch:  # Any: a JSON document
        """Parse a manifest. Raises ``JobError`` if it is not an export's."""
        try:
            if document["version"] != VERSION:
                raise JobError(f"{path} was written by another version ({document['version']}, this one has {VERSION})")
            files = tuple(FileFact(one["path"], one["bytes"], one["rows"]) for one in document["files"])
            number, first, end, lost = (int(document[name]) for name in _NUMBERS)
            return cls(number, first, end, lost, files)
        except (KeyError, TypeError, ValueError) as error:
            raise JobError(f"{path} is not the manifest of an export ({error!r}): move its batch away") from error


def batches_of(out: BatchDirectory) -> list[ExportedBatch]:
    """The existing batches. Raises ``JobError`` unless each starts where the previous one ends."""
    found = [ExportedBatch.of_manifest(out.manifest(number), out.place(number) / MANIFEST) for number in out.numbers()]
    for at, one in enumerate(found):
        if one.number != found[0].number + at or (at and one.first != found[at - 1].end):
            raise JobError(
                f"{out.place(one.number)} starts at {one.first}, which is not where the previous batch ended: "
                "put back the batches that were moved away, or export to a new directory"
            )
    return found


# -- the report -------------------------------------------------------------------------------------------------------


def report(
    log: str, out: Path, before: Sequence[ExportedBatch], made: Sequence[ExportedBatch], seconds: float
) -> JobReport:
    """The additions of a run to the batches that existed ``before``."""
    every = [*before, *made]
    rows = sum(one.rows for one in made)
    lost = sum(one.lost for one in made)
    summary = (
        Fact("log", log),
        Fact("directory", str(out)),
        Fact("new batches", len(made), CountUnit.COUNT),
        Fact("new rows", rows, CountUnit.COUNT),
        Fact("new bytes", sum(one.size_bytes for one in made), CountUnit.BYTES),
        Fact("read", sum(one.end - one.first - one.lost for one in made), CountUnit.COUNT),
        Fact("lost", lost, CountUnit.COUNT),
        Fact("seconds", seconds, CountUnit.SECONDS),
        Fact("rows per second", rows / seconds if made else None, CountUnit.PER_SECOND),
        Fact("all batches", len(every), CountUnit.COUNT),
        Fact("all rows", sum(one.rows for one in every), CountUnit.COUNT),
        Fact("next", every[-1].end if every else None, CountUnit.COUNT),
    )
    notes = () if made else ("nothing new is committed: every entry that was requested is exported",)
    title = f"Export of {log} to {out}"
    return JobReport("export", title, summary, (_batch_table(made), _topic_table(made)), _charts(made), notes=notes)


def _batch_table(made: Sequence[ExportedBatch]) -> Table:
    columns = (
        ReportColumn("batch"),
        ReportColumn("first", CountUnit.COUNT),
        ReportColumn("end", CountUnit.COUNT),
        ReportColumn("rows", CountUnit.COUNT),
        ReportColumn("files", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
    )
    rows = tuple((one.number, one.first, one.end, one.rows, len(one.files), one.size_bytes) for one in made)
    return Table("New batches", columns, rows)


def _sums(made: Sequence[ExportedBatch], name: str) -> list[tuple[str, int, int, int]]:
    """Rows, files and bytes per value of a partition column, in order."""
    sums: dict[str, list[FileFact]] = defaultdict(list)
    for one in (file for batch in made for file in batch.files):
        sums[one.part(name) or "-"].append(one)
    return [
        (value, sum(one.rows for one in files), len(files), sum(one.size_bytes for one in files))
        for value, files in sorted(sums.items())
    ]


def _by_topic(made: Sequence[ExportedBatch]) -> list[tuple[str, int, int, int]]:
    return sorted(_sums(made, "topic"), key=lambda sums: -sums[1])


def _topic_table(made: Sequence[ExportedBatch]) -> Table:
    columns = (
        ReportColumn("topic"),
        ReportColumn("rows", CountUnit.COUNT),
        ReportColumn("files", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
    )
    return Table("New rows by topic", columns, tuple(_by_topic(made)))


def _charts(made: Sequence[ExportedBatch]) -> tuple[Chart, ...]:
    topics = _by_topic(made)[:_BARS_MAX]
    dates = _sums(made, "date")[-_DATES_MAX:]
    charts: list[Chart] = []
    if len(dates) > 1:
        rows = Series("rows", tuple(float(row[1]) for row in dates))
        charts.append(ColumnChart("New rows by date", CountUnit.COUNT, tuple(row[0] for row in dates), (rows,)))
    if topics:
        rows = Series("rows", tuple(float(row[1]) for row in topics))
        charts.append(Bars("New rows by topic", CountUnit.COUNT, tuple(row[0] for row in topics), (rows,)))
    return tuple(charts)


BATCH_BYTES: Final = 4 << 30
_COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "none")
PARTITIONS: Final = ("topic", "date")
_NOT_FROM_MESSAGES: Final = ("index", "term", "position", "body")
"""The columns of entries that are not messages."""
_TIMESTAMPS: Final = "spark.sql.parquet.outputTimestampType"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """``columns``: the exported columns; empty: all that are not virtual. ``batch_bytes``: log bytes per batch."""

    source: LogSource
    out: Path
    columns: tuple[str, ...] = ()
    batch_bytes: int = BATCH_BYTES
    compression: str = "zstd"
    skip_lost: bool = False


def run(spark: SparkSession, options: ExportOptions) -> JobReport:
    """Export everything committed that was not exported yet."""
    began = time.monotonic()
    extent = extent_of(options.source)
    options = replace(options, columns=chosen_columns(options, extent))
    with open_batches(options.out, about(options, extent)) as out:
        before = batches_of(out)
        made = [_export(spark, options, extent, out, batch) for batch in planned(options, extent, before)]
    return report(options.source.name, options.out, before, made, time.monotonic() - began)


# -- what to export ---------------------------------------------------------------------------------------------------


def chosen_columns(options: ExportOptions, extent: Extent) -> tuple[str, ...]:
    """The columns of the files, including partition columns. Raises ``ConfigError`` for unknown ones."""
    from dledger_spark.schema import COLUMNS

    unknown = set(options.columns) - {one.name for one in COLUMNS}
    if unknown:
        raise ConfigError([f"--columns: no column {', '.join(sorted(unknown))} in the format dledger"])
    if not extent.holds_messages:
        return tuple(dict.fromkeys((extent.unit, *(options.columns or _NOT_FROM_MESSAGES))))
    every = tuple(one.name for one in COLUMNS if not one.virtual)
    return tuple(dict.fromkeys((extent.unit, "topic", "storeTimestamp", *(options.columns or every))))


def about(options: ExportOptions, extent: Extent) -> dict[str, Any]:  # Any: a JSON document
    """The settings that must be the same in every run into one directory."""
    source, chosen = options.source, options.source.chosen()
    return {
        "version": VERSION,
        "job": "export",
        "log": extent.identity,
        "unit": extent.unit,
        "topics": sorted(source.topics),
        "from_index": source.from_index,
        "from_time_ms": source.from_time_ms,
        "to_time_ms": source.to_time_ms,
        "columns": list(options.columns),
    } | ({"options": chosen} if chosen else {})


def planned(options: ExportOptions, extent: Extent, before: Sequence[ExportedBatch]) -> Iterator[ExportedBatch]:
    """The batches to write; none if there is nothing new.

    Raises ``JobError`` if entries to be exported are no longer kept, unless the options say to skip them.
    """
    source = options.source
    number = before[-1].number + 1 if before else 0
    first = before[-1].end if before else _first(source, extent)
    end = extent.end if source.to_index is None else min(extent.end, source.to_index)
    lost = max(0, min(extent.begin, end) - first)
    if lost and not options.skip_lost:
        raise JobError(
            f"{first} to {first + lost - 1} ({extent.unit}) is no longer in the log: it was trimmed before it "
            "was exported. Pass --skip-lost to continue without it; to lose none, export more often or raise "
            "retention_hours"
        )
    while first + lost < end:
        stop = extent.end_within(first + lost, end, options.batch_bytes)
        yield ExportedBatch(number, first, stop, lost)
        number, first, lost = number + 1, stop, 0


def _first(source: LogSource, extent: Extent) -> int:
    if source.from_index is not None:
        return source.from_index
    return extent.begin if source.from_time_ms is None else extent.at_time(source.from_time_ms)


# -- how it is written ------------------------------------------------------------------------------------------------


def _export(
    spark: SparkSession, options: ExportOptions, extent: Extent, out: BatchDirectory, batch: ExportedBatch
) -> ExportedBatch:
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    counted = Observation()
    rows = _rows(spark, options, extent, batch).observe(counted, f.count(f.lit(1)).alias("rows"))
    staging = out.staging()
    with _timestamps_that_all_readers_know(spark):
        writer = rows.write.mode("error").option("compression", options.compression)
        writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        if extent.holds_messages:
            writer = writer.partitionBy(*PARTITIONS)
        writer.parquet(f"file://{staging}")
    written = replace(batch, files=tuple(_files(staging)))
    expected = counted.get["rows"]
    if written.rows != expected:
        raise JobError(
            f"Spark wrote {expected:,} rows, and {written.rows:,} of them are in {staging}: its workers write to "
            f"their own disks. {options.out} must be on a file system shared by them and this machine"
        )
    out.publish(batch.number, staging, written.to_manifest())
    return written


def _rows(spark: SparkSession, options: ExportOptions, extent: Extent, batch: ExportedBatch) -> DataFrame:
    from pyspark.sql import functions as f

    from dledger_spark.schema import COLUMNS

    ddl = ", ".join(f"{one.name} {one.ddl}" for one in COLUMNS if one.name in options.columns)
    source = options.source
    rows = source.between(extent.unit, batch.first + batch.lost, batch.end).read(spark, ddl)
    if extent.unit == "position":
        rows = rows.where(f.col("position").between(batch.first, batch.end - 1))
    at = f.col("storeTimestamp")
    if source.from_time_ms is not None:
        rows = rows.where(at >= f.timestamp_millis(f.lit(source.from_time_ms)))
    if source.to_time_ms is not None:
        rows = rows.where(at < f.timestamp_millis(f.lit(source.to_time_ms)))
    if "topic" not in options.columns:
        return rows
    # Sorted, so that a task has one file open at a time, and each file is in log order.
    return rows.withColumn("date", f.to_date(at)).sortWithinPartitions(*PARTITIONS, extent.unit)


@contextmanager
def _timestamps_that_all_readers_know(spark: SparkSession) -> Iterator[None]:
    """Write timestamps as microseconds: Spark's default is a type that Parquet has deprecated."""
    before = spark.conf.get(_TIMESTAMPS)
    spark.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(_TIMESTAMPS, str(before))


def _files(staging: Path) -> Iterator[FileFact]:
    import pyarrow.parquet as pq

    for path in sorted(staging.rglob("*.parquet")):
        rows = pq.read_metadata(path).num_rows
        yield FileFact(path.relative_to(staging).as_posix(), path.stat().st_size, rows)


# -- the command line -------------------------------------------------------------------------------------------------


@job_command(
    run,
    name="export",
    short_help="Export a log as Parquet.",
    epilog="""\b
Examples:
  dledger pipeline export /var/lib/broker/dledger-n0 -o /lake/orders
  dledger pipeline export -b 127.0.0.1:10911 -g broker-a -o /lake/orders -t orders,payments
  dledger pipeline export /backup/dledger-n0 -o /lake/2026 --from-time 2026-01-01 --columns topic,keys,tags,body

\b
Run it repeatedly, for example from cron: it continues at the last batch's end. Read the result with
  spark.read.parquet("/lake/orders")           or     pyarrow.dataset.dataset("/lake/orders", partitioning="hive")""",
)
@source_options
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Output directory; must be shared by all of Spark's workers.",
)
@click.option(
    "--columns",
    default="",
    metavar="NAME,…",
    help="Only these columns; index, topic and storeTimestamp are always there.",
)
@click.option(
    "--batch-bytes",
    type=Size(min=1),
    default="4g",
    show_default=True,
    metavar="SIZE",
    help="Size of one batch, the most that a killed run must redo.",
)
@click.option(
    "--compression",
    type=click.Choice(_COMPRESSIONS),
    default="zstd",
    show_default=True,
    help="Compression of the Parquet files.",
)
@click.option("--skip-lost", is_flag=True, help="Continue if the log was trimmed before everything was exported.")
def command(
    source: LogSource, out: Path, columns: str, batch_bytes: int, compression: str, skip_lost: bool
) -> ExportOptions:
    """Write the committed log as Parquet, by batch, topic and date (UTC).

    Each run adds the entries since the last one; a batch appears atomically and only once, even after kills.
    """
    names = tuple(one.strip() for one in columns.split(",") if one.strip())
    return ExportOptions(source, out, names, batch_bytes, compression, skip_lost)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    from dledger_spark.jobs import export  # functions sent to Spark's workers must be importable by module name

    export.main()
