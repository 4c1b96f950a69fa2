"""Jobs over running groups: export goes on where it was, follow counts everything once, whatever ends it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException

from dledger.errors import ConfigError
from dledger.layout import ENTRY_HEADER_BYTES
from dledger_spark.jobs import command, export, follow, stats
from dledger_spark.jobs.batches import open_batches
from dledger_spark.jobs.errors import JobError
from dledger_spark.jobs.export import ExportOptions, planned
from dledger_spark.jobs.extent import extent_of
from dledger_spark.jobs.follow import FollowOptions
from dledger_spark.jobs.source import LogSource
from dledger_spark.jobs.stats import StatsOptions
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from tests.support.spark_nodes import BrokerNode, EntryNode, broker_node, entry_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


def _source(node: BrokerNode | EntryNode, **what: object) -> LogSource:
    options = node.options
    return LogSource(bootstrap=options["bootstrap.servers"], group=options.get("group", "default"), **what)  # type: ignore[arg-type]  # as the test says


def _counted(out: Path) -> Counter[str]:
    """Messages by topic, as a reader adds them up who knows nothing of Spark."""
    rows = ds.dataset(out, partitioning="hive").to_table(columns=["topic", "messages"]).to_pylist()
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row["topic"]] += row["messages"]
    return sums


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


def test_follow_counts_every_message_once_over_restarts(spark: SparkSession, tmp_path: Path) -> None:
    """Run again, it goes on; a batch that was written before Spark took note of it is not counted twice."""
    lines: list[str] = []
    with broker_node(tmp_path / "store") as node:
        source = _source(node, from_index=0, topics=("orders", "payments"))
        options = FollowOptions(source, tmp_path / "out", window_s=60, once=True, show=lines.append)
        node.send("orders", 0, 120)
        node.send("payments", 0, 30)
        first = follow.run(spark, options)
        assert _counted(tmp_path / "out") == {"orders": 120, "payments": 30}

        # As after a kill between the two: the directory is there, Spark's note is not.
        newest = max((tmp_path / "out" / "_state" / "checkpoint" / "commits").glob("[0-9]*"))
        newest.unlink()
        (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
        node.send("orders", 120, 5)
        second = follow.run(spark, options)

    assert _counted(tmp_path / "out") == {"orders": 125, "payments": 30}
    assert first.fact("messages") == 150
    assert any("orders" in line for line in lines)
    assert {row[0]: row[2] for row in second.table("All counts so far, by tag").rows} == {"orders": 125, "payments": 30}
    with open_batches(tmp_path / "out", follow.about(options)) as out:
        assert out.numbers() == list(range(len(out.numbers())))


def test_follow_never_takes_batches_of_another_stream_for_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """Without its checkpoint, with an older copy or with another one, nothing that comes is dropped in silence."""
    out = tmp_path / "out"
    checkpoint = out / "_state" / "checkpoint"
    with broker_node(tmp_path / "store") as node:
        options = FollowOptions(
            _source(node, from_index=0, topics=("orders",)), out, once=True, show=lambda _line: None
        )
        node.send("orders", 0, 20)
        follow.run(spark, options)
        shutil.copytree(checkpoint, tmp_path / "older")
        node.send("orders", 20, 5)
        follow.run(spark, options)
        end = node.log_end() + 1

        shutil.move(checkpoint, tmp_path / "newest")
        with pytest.raises(JobError, match=f"Restore it, .*--from-index {end}"):
            follow.run(spark, options)
        shutil.copytree(tmp_path / "older", checkpoint)
        node.send("orders", 25, 5)
        with pytest.raises(StreamingQueryException, match="Restore it"):
            follow.run(spark, options)
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "newest", checkpoint)
        follow.run(spark, options)
        another = replace(options, out=tmp_path / "another")
        follow.run(spark, another)
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "another" / "_state" / "checkpoint", checkpoint)
        with pytest.raises(JobError, match="Restore it"):
            follow.run(spark, options)

    assert _counted(out) == {"orders": 30}


def test_follow_takes_the_name_of_a_directory_here(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is typed: where Spark's own processes are does not matter."""
    monkeypatch.chdir(tmp_path)
    with broker_node(tmp_path / "store") as node:
        node.send("orders", 0, 20)
        source = _source(node, from_index=0, topics=("orders",))
        report = follow.run(spark, FollowOptions(source, Path("out"), once=True, show=lambda _line: None))

    assert _counted(tmp_path / "out") == {"orders": 20}
    assert report.table("All counts so far, by tag").rows[0][2] == 20


def test_follow_prints_every_count_as_json_and_then_the_report(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object per line, also of more topics than people are shown; the last line is the report."""
    monkeypatch.setattr(command, "job_session", lambda _frame: nullcontext(spark))
    topics = [f"topic{number:02}" for number in range(12)]
    with broker_node(tmp_path / "store") as node:
        for number, topic in enumerate(topics):
            node.send(topic, 0, number + 1)
        words = ["-b", node.options["bootstrap.servers"], "-g", "G", "-t", ",".join(topics), "--from-index", "0"]

        result = CliRunner().invoke(follow.command, [*words, "--window", "86400", "--once", "--json"])

    *counts, report = map(json.loads, result.stdout.splitlines())
    sums: Counter[str] = Counter()
    for one in counts:
        sums[one["topic"]] += one["messages"]
    assert sums == {topic: number + 1 for number, topic in enumerate(topics)}
    assert (report["job"], report["summary"]["messages"]) == ("follow", sum(sums.values()))


def test_follow_counts_entries_that_are_no_messages(spark: SparkSession, tmp_path: Path) -> None:
    """They have no topic, no tag and no time but that of the count."""
    with entry_node(tmp_path / "log") as node:
        node.append(0, 77)
        report = follow.run(spark, FollowOptions(_source(node, from_index=0), once=True, show=lambda _line: None))

    assert report.fact("messages") == 77


def test_follow_refuses_what_has_no_end(tmp_path: Path) -> None:
    """Before Spark starts."""
    with pytest.raises(ConfigError, match="does not grow"):
        follow.check(FollowOptions(LogSource(path=str(tmp_path))))
    with pytest.raises(ConfigError, match="a stream has no end"):
        follow.check(FollowOptions(LogSource(bootstrap="h:1", to_index=3)))


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
