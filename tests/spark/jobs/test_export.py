"""Export in Spark: what any reader finds, run after run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from dledger.errors import ConfigError
from dledger_spark.jobs import export
from dledger_spark.jobs.export import ExportOptions
from dledger_spark.jobs.report import write_page
from dledger_spark.jobs.source import LogSource
from dledger_spark.jobs.stats import HOUR_MS
from tests.spark.jobs.logs import START_MS, TOPICS, bodies, write_log
from tests.support.log_bytes import write_disk_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _arrow_bodies(out: Path) -> Counter[bytes]:
    """What a reader that knows nothing of Spark finds."""
    return Counter(ds.dataset(out, partitioning="hive").to_table(columns=["body"])["body"].to_pylist())


def test_an_export_has_every_message_once_for_any_reader(spark: SparkSession, tmp_path: Path) -> None:
    """By topic and date, in batches; topics with odd characters; NOOPs are no rows; files in the log's order."""
    log = write_log(tmp_path / "log", 2000)
    options = ExportOptions(LogSource(path=str(log.directory)), tmp_path / "out", batch_bytes=100_000)

    report = export.run(spark, options)

    assert report.problems == ()
    assert report.fact("new rows") == report.fact("all rows") == 2000
    assert int(str(report.fact("new batches"))) > 2
    assert _arrow_bodies(tmp_path / "out") == bodies(log)
    read = spark.read.parquet(str(tmp_path / "out"))
    assert read.count() == 2000
    assert {row[0] for row in read.select("topic").distinct().collect()} == set(TOPICS)
    dates = {str(row[0]) for row in read.select("date").distinct().collect()}
    assert dates == {"2025-11-20", "2025-11-21"}
    file = next((tmp_path / "out").rglob("*.parquet"))
    indexes = ds.dataset(file).to_table(columns=["index"])["index"].to_pylist()
    assert indexes == sorted(indexes)


def test_log_and_directory_may_be_named_from_here(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are typed, and the page as well: where Spark's own processes are does not matter."""
    log = write_log(tmp_path / "log", 50)
    monkeypatch.chdir(tmp_path)

    report = export.run(spark, ExportOptions(LogSource(path=str(log.directory.relative_to(tmp_path))), Path("out")))
    write_page(report, Path("page.html"))

    assert _arrow_bodies(tmp_path / "out") == bodies(log)
    assert (tmp_path / "page.html").is_file()


def test_columns_hold_what_the_messages_hold(spark: SparkSession, tmp_path: Path) -> None:
    """Types as pyarrow reads them: times are microseconds in UTC, properties a map."""
    log = write_log(tmp_path / "log", 50)
    export.run(spark, ExportOptions(LogSource(path=str(log.directory)), tmp_path / "out"))

    table = ds.dataset(tmp_path / "out", partitioning="hive").to_table().sort_by("index")

    first = table.slice(0, 1).to_pylist()[0]
    expected = log.rows[0]
    assert str(table.schema.field("storeTimestamp").type) == "timestamp[us, tz=UTC]"
    assert first["storeTimestamp"].timestamp() * 1000 == START_MS
    assert dict(first["properties"]) == expected["properties"]
    assert {name: first[name] for name in ("index", "topic", "keys", "tags", "body", "queueId")} == {
        name: expected[name] for name in ("index", "topic", "keys", "tags", "body", "queueId")
    }


def test_a_second_run_adds_what_is_new_and_a_third_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """The log is exported while it grows: what is committed counts, and each entry once."""
    log = write_log(tmp_path / "log", 1000)
    source = LogSource(path=str(log.directory))
    part = ExportOptions(replace(source, to_index=500), tmp_path / "out")
    whole = replace(part, source=source)

    reports = [export.run(spark, options) for options in (part, whole, whole)]

    assert reports[0].fact("next") == 500
    assert sum(int(str(report.fact("new rows"))) for report in reports) == 1000
    assert reports[2].fact("new batches") == 0
    assert reports[2].notes
    assert _arrow_bodies(tmp_path / "out") == bodies(log)


def test_topics_and_times_choose_rows_and_belong_to_the_directory(spark: SparkSession, tmp_path: Path) -> None:
    """Another choice into the same directory is refused."""
    log = write_log(tmp_path / "log", 1000)
    source = LogSource(
        path=str(log.directory),
        topics=("orders",),
        from_time_ms=START_MS + HOUR_MS,
        to_time_ms=START_MS + 6 * HOUR_MS,
    )
    options = ExportOptions(source, tmp_path / "out", columns=("body",))

    report = export.run(spark, options)

    expected = [
        row
        for row in log.rows
        if row["topic"] == "orders" and HOUR_MS <= int(str(row["storeTimestamp"])) // 1000 - START_MS < 6 * HOUR_MS
    ]
    assert report.fact("new rows") == len(expected) > 0
    assert _arrow_bodies(tmp_path / "out") == Counter(row["body"] for row in expected)
    with pytest.raises(ConfigError, match="topics was"):
        export.run(spark, replace(options, source=replace(source, topics=("payments",))))


def test_entries_that_are_no_messages_are_exported_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """Without topic and date there are no partitions but batches."""
    log = write_disk_log(tmp_path / "log", [b"\x00\xff raw %d" % number for number in range(300)])

    report = export.run(spark, ExportOptions(LogSource(path=str(log.directory)), tmp_path / "out"))

    table = ds.dataset(tmp_path / "out", partitioning="hive").to_table()
    assert report.fact("new rows") == 300
    assert table.column_names == ["index", "term", "position", "body", "batch"]
    assert Counter(table["body"].to_pylist()) == bodies(log)
