"""Jobs over running groups: export goes on where it was, stats count every message once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from dledger.errors import ConfigError
from dledger.records import ENTRY_HEADER_BYTES
from dledger_spark.errors import JobError
from dledger_spark.jobs import export, stats
from dledger_spark.jobs.export import ExportOptions, planned
from dledger_spark.jobs.source import LogSource, extent_of
from dledger_spark.jobs.stats import StatsOptions
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from tests.support.spark_nodes import BrokerNode, EntryNode, broker_node, entry_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


def _source(node: BrokerNode | EntryNode, **what: object) -> LogSource:
    options = node.options
    return LogSource(bootstrap=options["bootstrap.servers"], group=options.get("group", "default"), **what)  # type: ignore[arg-type]  # as the test says


def test_export_of_a_running_broker_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """And the same directory is filled from the group or from one of its nodes' directories."""
    with broker_node(tmp_path / "store") as node:
        options = ExportOptions(_source(node, topics=("orders",)), tmp_path / "out")
        node.send("orders", 0, 300)
        node.send("other", 0, 50)
        first = export.run(spark, options)
        node.send("orders", 300, 200)
        second = export.run(spark, options)

    bodies = ds.dataset(tmp_path / "out", partitioning="hive").to_table(columns=["body"])["body"].to_pylist()
    assert [report.fact("new rows") for report in (first, second)] == [300, 200]
    assert sorted(map(int, bodies)) == list(range(500))


def test_no_batch_of_a_running_group_is_larger_than_wanted(tmp_path: Path) -> None:
    """However sizes differ: the nodes know where each entry begins."""
    with entry_node(tmp_path / "log") as node:
        node.append(0, 400)
        node.append(400, 30, padding=9000)
        source = _source(node)
        extent = extent_of(source)
        found = list(planned(ExportOptions(source, tmp_path / "out", batch_bytes=40_000), extent, []))
        log = extent.places.log  # type: ignore[attr-defined]  # of a running group
        begins = log.positions_of([one.first for one in found])
        lasts = log.positions_of([one.end - 1 for one in found])

    assert found[-1].end == extent.end
    assert [one.first for one in found[1:]] == [one.end for one in found[:-1]]
    large = ENTRY_HEADER_BYTES + 9000  # the last of each batch is
    assert 30_000 < max(last + large - begin for begin, last in zip(begins, lasts, strict=True)) <= 40_000


def test_a_brokers_entries_are_exported_as_entries_if_that_is_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    """From the running group as from the node's directory; into a directory of messages they do not go."""
    with broker_node(tmp_path / "store") as node:
        node.send("orders", 0, 30)
        as_messages = ExportOptions(_source(node), tmp_path / "messages")
        as_entries = ExportOptions(_source(node, others={"recordFormat": "entry"}), tmp_path / "entries")
        export.run(spark, as_messages)
        report = export.run(spark, as_entries)
        with pytest.raises(ConfigError, match="recordformat"):
            export.run(spark, replace(as_entries, out=tmp_path / "messages"))
        end = node.log_end() + 1

    table = ds.dataset(tmp_path / "entries", partitioning="hive").to_table()
    assert table.column_names == ["index", "term", "position", "body", "batch"]
    assert sum(b"orders" in body for body in table["body"].to_pylist()) >= 30
    assert (report.fact("new rows"), report.fact("next")) == (table.num_rows, end)


def test_a_trimmed_log_stops_an_export_that_is_not_done(spark: SparkSession, tmp_path: Path) -> None:
    """With ``skip_lost`` it goes on, and the report says how much is gone."""
    with entry_node(tmp_path / "log") as node:
        node.append(0, 100, padding=1000)
        options = ExportOptions(_source(node, to_index=50), tmp_path / "out")
        export.run(spark, options)
        node.append(100, 150, padding=1000)
        begin = node.expire()
        assert begin > 50

        whole = ExportOptions(_source(node), tmp_path / "out")
        with pytest.raises(JobError, match="it was trimmed before"):
            export.run(spark, whole)
        report = export.run(spark, ExportOptions(_source(node), tmp_path / "out", skip_lost=True))

    assert report.fact("lost") == begin - 50
    assert ds.dataset(tmp_path / "out", partitioning="hive").count_rows() == report.fact("all rows")


def test_stats_of_a_running_broker(spark: SparkSession, tmp_path: Path) -> None:
    """The same counts as of a directory."""
    with broker_node(tmp_path / "store") as node:
        node.send("orders", 0, 64)
        report = stats.run(spark, StatsOptions(_source(node, topics=("orders",))))

    assert [report.fact(name) for name in ("messages", "topics", "missing queue offsets")] == [64, 1, 0]


def test_stats_of_a_log_that_grows_count_the_same_messages_in_every_table(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags and keys take passes of their own, which end where the first one did."""
    with broker_node(tmp_path / "store") as node, Producer(node.server.address) as producer:
        total = stats._total

        def send(count: int) -> None:
            producer.send_many([Message("orders", b"x", tags="new", keys=["k"]) for _ in range(count)])

        def then_grow(cube: DataFrame) -> Row:
            found = total(cube)
            send(40)
            return found

        send(30)
        monkeypatch.setattr(stats, "_total", then_grow)
        report = stats.run(spark, StatsOptions(_source(node), ("topic", "tag", "key")))

    assert report.fact("messages") == 30
    assert [row[:3] for row in report.table("Most frequent tags").rows] == [("new", "orders", 30)]
    assert [row[:3] for row in report.table("Most frequent keys").rows] == [("k", "orders", 30)]
