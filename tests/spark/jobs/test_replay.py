"""Replay in Spark: rows come back into a topic once, however often and in how many pieces it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.errors import ConfigError
from dledger_spark.directory import open_directory
from dledger_spark.errors import JobError
from dledger_spark.jobs import export, replay
from dledger_spark.jobs.export import ExportOptions
from dledger_spark.jobs.replay import ReplayOptions, ReplayTarget
from dledger_spark.jobs.report import JobReport
from dledger_spark.jobs.source import LogSource, ParquetSource
from rocketstore.client import Admin, TopicInfo
from tests.spark.jobs.logs import bodies, write_log
from tests.support.log_bytes import DiskLog
from tests.support.spark_nodes import BrokerNode, broker_node, entry_node
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = "topic string, keys string, tags string, body binary, queueId int, properties map<string,string>"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerNode]:
    """Where rows go to."""
    with broker_node(tmp_path / "broker") as node:
        yield node


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """Where rows are from: enough for every writer."""
    return write_log(tmp_path_factory.mktemp("log"), 5000, segment_bytes=1 << 20)


def _options(log: DiskLog, broker: BrokerNode, topic: str = "again") -> ReplayOptions:
    target = ReplayTarget(broker.options["bootstrap.servers"], "G", topic)
    return ReplayOptions(LogSource(path=str(log.directory)), target, writers=3)


def _found(spark: SparkSession, broker: BrokerNode, topic: str = "again") -> list[dict[str, object]]:
    rows = spark.read.format("dledger").schema(SCHEMA).options(**broker.options, subscribe=topic).load().collect()
    return [row.asDict() for row in rows]


def _numbers(report: JobReport) -> tuple[object, object]:
    return report.fact("stored now"), report.fact("stored before")


def test_a_replay_in_pieces_stores_every_row_once(spark: SparkSession, log: DiskLog, broker: BrokerNode) -> None:
    """A part, then all, then all again: the range grows, the writers go on; keys, tags and properties are kept."""
    whole = _options(log, broker)
    source = whole.source
    assert isinstance(source, LogSource)
    part = replace(whole, source=replace(source, to_index=2500))

    reports = [replay.run(spark, options) for options in (part, whole, whole)]

    rows = _found(spark, broker)
    expected = bodies(log)
    first = sum(int(str(row["index"])) < 2500 for row in log.rows)
    assert Counter(row["body"] for row in rows) == expected
    assert [_numbers(one) for one in reports] == [(first, 0), (5000 - first, first), (0, 5000)]
    assert len({one.fact("writer") for one in reports}) == 1
    one = next(row for row in rows if row["body"] == log.rows[0]["body"])
    assert (one["keys"], one["tags"]) == (log.rows[0]["keys"], log.rows[0]["tags"])
    assert one["properties"]["colour"] == "red"  # type: ignore[index]  # a map


def test_filters_choose_rows_and_make_another_replay(spark: SparkSession, log: DiskLog, broker: BrokerNode) -> None:
    """Topics, tags and SQL; queues are kept if that is asked for; the rate is kept to."""
    options = _options(log, broker, "some")
    with Admin(broker.options["bootstrap.servers"]) as admin:
        admin.put_topic(TopicInfo("some", 4, 4))
    source = options.source
    assert isinstance(source, LogSource)
    chosen = replace(
        options,
        source=replace(source, topics=("payments",)),
        tags=("tag1",),
        where="queueId = 0",
        keep_queues=True,
        rate=2000.0,
    )

    report = replay.run(spark, chosen)

    expected = [
        row["body"] for row in log.rows if (row["topic"], row["tags"], row["queueId"]) == ("payments", "tag1", 0)
    ]
    found = _found(spark, broker, "some")
    assert Counter(row["body"] for row in found) == Counter(expected)
    assert {row["queueId"] for row in found} == {0}
    assert report.fact("writer") != replay.writer_of(options, {})


def test_times_choose_rows_of_a_log_and_of_its_export(
    spark: SparkSession, log: DiskLog, broker: BrokerNode, tmp_path: Path
) -> None:
    """The first time belongs to the range, the last one does not."""
    options = _options(log, broker, "timed")
    stored = [(int(str(row["storeTimestamp"])) // 1000, row["body"]) for row in log.rows if row["topic"] == "orders"]
    begin_ms, end_ms = stored[len(stored) // 4][0], stored[len(stored) // 2][0]
    times = LogSource(path=str(log.directory), topics=("orders",), from_time_ms=begin_ms, to_time_ms=end_ms)
    export.run(spark, ExportOptions(LogSource(path=str(log.directory), topics=("orders",)), tmp_path / "out"))

    replay.run(spark, replace(options, source=times))
    exported = ParquetSource(tmp_path / "out", from_time_ms=begin_ms, to_time_ms=end_ms)
    replay.run(spark, replace(options, source=exported, target=replace(options.target, topic="exported")))

    expected = Counter(body for at_ms, body in stored if begin_ms <= at_ms < end_ms)
    for topic in ("timed", "exported"):
        assert Counter(row["body"] for row in _found(spark, broker, topic)) == expected


def test_what_was_exported_is_replayed(
    spark: SparkSession, log: DiskLog, broker: BrokerNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the directory that export made, which may grow meanwhile, however it is named; the order is the log's."""
    source = LogSource(path=str(log.directory), to_index=2000)
    export.run(spark, ExportOptions(source, tmp_path / "lake"))
    options = replace(_options(log, broker), source=ParquetSource(tmp_path / "lake"))
    first = replay.run(spark, options)
    export.run(spark, ExportOptions(replace(source, to_index=None), tmp_path / "lake"))
    monkeypatch.chdir(tmp_path)
    second = replay.run(spark, replace(options, source=ParquetSource(Path("lake"))))

    assert Counter(row["body"] for row in _found(spark, broker)) == bodies(log)
    assert first.fact("stored now") == second.fact("stored before")
    assert second.fact("rows") == 5000


def test_other_parquet_goes_into_a_group_of_plain_entries(spark: SparkSession, tmp_path: Path) -> None:
    """Any files with a column ``body``, in the order of their names, odd ones too; run again, nothing is added."""
    for part in range(3):
        frame = spark.range(part * 100, part * 100 + 100).selectExpr("cast(id as string) as body")
        frame.coalesce(1).write.parquet(str(tmp_path / "files" / f"part=no. {part}"))
    with entry_node(tmp_path / "node") as node:
        target = ReplayTarget(node.options["bootstrap.servers"])
        options = ReplayOptions(ParquetSource(tmp_path / "files"), target, writers=2)

        reports = [replay.run(spark, options) for _ in range(2)]

        rows = spark.read.format("dledger").schema("body binary").options(**node.options).load().collect()
    assert sorted(int(bytes(row["body"])) for row in rows) == list(range(300))
    assert [_numbers(one) for one in reports] == [(300, 0), (0, 300)]


def test_a_log_is_not_fed_with_itself(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """Whatever names its nodes go by, and from a node's directory as well; what has an end is replayed once."""
    address = broker.options["bootstrap.servers"]
    other_name = address.replace("127.0.0.1", "localhost")
    directory = tmp_path / "broker"
    broker.send("orders", 0, 40)
    wait_until(lambda: open_directory(directory).committed >= broker.log_end(), "the directory knows of all messages")
    live, disk = LogSource(bootstrap=address, group="G"), LogSource(path=str(directory))
    for source, to in ((live, address), (live, other_name), (disk, address)):
        for topics, topic in (((), "again"), (("orders",), "orders")):
            options = ReplayOptions(replace(source, topics=topics), ReplayTarget(to, "G", topic))
            with pytest.raises(ConfigError, match="would read its own output"):
                replay.run(spark, options)

    ended = replace(disk, topics=("orders",), to_index=broker.log_end() + 1)
    reports = [replay.run(spark, ReplayOptions(ended, ReplayTarget(address, "G", "orders"))) for _ in range(2)]

    assert [_numbers(one) for one in reports] == [(40, 0), (0, 40)]


def test_a_group_may_be_fed_from_another_of_its_name(spark: SparkSession, tmp_path: Path) -> None:
    """The cluster tells them apart, as it tells nodes apart."""
    with entry_node(tmp_path / "from") as node, entry_node(tmp_path / "to", "c2") as other:
        node.append(0, 30)
        source = LogSource(bootstrap=node.options["bootstrap.servers"])
        with pytest.raises(ConfigError, match="would read its own output"):
            replay.run(spark, ReplayOptions(source, ReplayTarget(node.options["bootstrap.servers"])))

        report = replay.run(spark, ReplayOptions(source, ReplayTarget(other.options["bootstrap.servers"])))

    assert _numbers(report) == (30, 0)


def test_a_begin_that_may_have_moved_stops_the_replay(spark: SparkSession, tmp_path: Path) -> None:
    """A trimmed log deals out other rows; whoever wants just the rest says so."""
    with entry_node(tmp_path / "from") as node, entry_node(tmp_path / "to", "c2") as other:
        node.append(0, 200, padding=1000)
        begin = node.expire()
        source = LogSource(bootstrap=node.options["bootstrap.servers"])
        options = ReplayOptions(source, ReplayTarget(other.options["bootstrap.servers"]))
        with pytest.raises(JobError, match=f"--from-index {begin}"):
            replay.run(spark, options)

        report = replay.run(spark, replace(options, skip_lost=True))

    assert report.fact("first") == begin
    assert int(str(report.fact("stored now"))) > 0
