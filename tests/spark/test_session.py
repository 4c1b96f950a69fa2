"""What ``spark_session`` and ``register`` do to a session that is there already."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from dledger_spark import register, spark_session
from dledger_spark.source.datasource import DLedgerDataSource
from tests.support.spark_nodes import entry_node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIME_ZONE = "spark.sql.session.timeZone"
CODEC = "spark.sql.parquet.compression.codec"


def test_what_was_set_while_a_session_runs_stays(spark: SparkSession, request: pytest.FixtureRequest) -> None:
    """A second call sets only what nobody holds."""
    for name in (TIME_ZONE, CODEC):
        request.addfinalizer(partial(spark.conf.set, name, str(spark.conf.get(name))))
    spark.conf.set(TIME_ZONE, "Asia/Tokyo")
    spark.conf.unset(CODEC)

    assert spark_session() is spark

    assert (spark.conf.get(TIME_ZONE), spark.conf.get(CODEC)) == ("Asia/Tokyo", "zstd")


@pytest.mark.parametrize(
    ("kind", "mistyped", "meant"),
    [
        ("dledger-blocks", "blockByte", "blockBytes"),
        ("dledger-derived", "delayLevel", "delayLevels"),
        ("dledger-cq", "fileByte", "fileBytes"),
        ("dledger-index", "slot", "slots"),
    ],
)
def test_register_makes_the_jobs_formats_known(spark: SparkSession, kind: str, mistyped: str, meant: str) -> None:
    """Spark finds only ``dledger`` by itself; all of them refuse an option with the nearest that there is."""
    register(spark)

    with pytest.raises(PySparkException, match=f"did you mean {meant}"):
        spark.read.format(kind).option(mistyped, "1").load("/nowhere").collect()


def test_processes_that_spark_starts_itself_read_and_write(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As everybody's: each finds and loads what it needs. Those of other tests have it loaded (``spark_forks``)."""
    starts, python = tmp_path / "starts", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {starts}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    session = spark.newSession()
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    session.dataSource.register(DLedgerDataSource)

    with entry_node(tmp_path / "from") as node, entry_node(tmp_path / "to", "c2") as other:
        rows = session.range(20).selectExpr("cast(id AS string) AS body")
        rows.write.format("dledger").mode("append").options(**node.options).save()
        stream = session.readStream.format("dledger").options(**node.options, startingOffsets="earliest").load()
        writer = stream.select("body").writeStream.format("dledger").options(**other.options)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()
        copied = session.read.format("dledger").options(**other.options, pushFilters="true").load()
        found = copied.filter("index > 0").collect()

    assert sorted(int(bytes(row["body"])) for row in found) == list(range(20))
    assert {line.split()[-1].rpartition(".")[2] for line in starts.read_text().splitlines()} == {
        "commit_data_source_write",
        "create_data_source",
        "data_source_pushdown_filters",
        "plan_data_source_read",
        "python_streaming_sink_runner",
        "python_streaming_source_runner",
        "worker",
        "write_into_data_source",
    }
