"""Stats and retention in Spark, against counts made here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger_spark.jobs import retention, stats
from dledger_spark.jobs.report import page
from dledger_spark.jobs.retention import RetentionOptions, Setting
from dledger_spark.jobs.source import LogSource
from dledger_spark.jobs.stats import HOUR_MS, MINUTE_MS, StatsOptions
from rocketstore.message.message import Message
from tests.spark.jobs.logs import START_MS, messages, write_log
from tests.support.log_bytes import DiskLog, write_disk_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 1000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """One log for all tests here."""
    return write_log(tmp_path_factory.mktemp("log"), COUNT)


def _sizes(log: DiskLog, *names: str) -> Counter[tuple[object, ...]]:
    sums: Counter[tuple[object, ...]] = Counter()
    for row in log.rows:
        sums[tuple(row[name] for name in names)] += int(str(row["size"]))
    return sums


def test_stats_count_by_topic_queue_hour_tag_and_key(spark: SparkSession, log: DiskLog) -> None:
    """Every table adds up to the log; skew and silence are found."""
    report = stats.run(spark, StatsOptions(LogSource(path=str(log.directory)), stats._BY, top=50))

    by_topic = Counter(str(row["topic"]) for row in log.rows)
    sizes = _sizes(log, "topic")
    topics = report.table("By topic").rows
    assert [report.fact(name) for name in ("messages", "topics", "hours without a message")] == [COUNT, 3, 1]
    assert report.fact("bytes") == sum(sizes.values())
    assert {row[0]: (row[1], row[2]) for row in topics} == {
        name: (count, sizes[(name,)]) for name, count in by_topic.items()
    }
    orders = next(row for row in topics if row[0] == "orders")
    queues = Counter(row["queueId"] for row in log.rows if row["topic"] == "orders")
    assert orders[6] == pytest.approx(max(queues.values()) / (sum(queues.values()) / len(queues)))
    assert {(row[0], row[1]): row[2] for row in report.table("Largest queues").rows} == Counter(
        (row["topic"], row["queueId"]) for row in log.rows
    )
    assert sum(int(str(row[1])) for row in report.table("By hour").rows) == COUNT
    assert {(row[0], row[1]): row[2] for row in report.table("Most frequent tags").rows} == Counter(
        (row["tags"], row["topic"]) for row in log.rows
    )
    keys = Counter((key, row["topic"]) for row in log.rows for key in str(row["keys"]).split())
    assert {(row[0], row[1]): row[2] for row in report.table("Most frequent keys").rows} == keys
    assert page(report).count('<svg class="chart"') == 6


def test_what_a_broker_writes_for_itself_is_no_message(spark: SparkSession, tmp_path: Path) -> None:
    """It may be most of the log, and is listed apart; whoever asks for it gets it. A short log is drawn by minutes."""
    own = [Message("RMQ_SYS_BROKER_STATE", b"{}", store_timestamp=START_MS) for _ in range(30)]
    own.append(Message("SCHEDULE_TOPIC_XXXX", b"waits", store_timestamp=START_MS + 50 * MINUTE_MS))
    users = [replace(one, store_timestamp=START_MS + at * MINUTE_MS) for at, one in enumerate(messages(10))]
    directory = str(write_disk_log(tmp_path, [*users, *own]).directory)

    usual = stats.run(spark, StatsOptions(LogSource(path=directory), ("topic",)))
    all_ = stats.run(spark, StatsOptions(LogSource(path=directory), ("topic",), internal=True))

    assert (usual.fact("messages"), all_.fact("messages")) == (10, 41)
    assert (usual.fact("topics"), all_.fact("topics")) == (3, 5)
    apart = {row[0]: row[1] for row in usual.table("The broker's own topics, not counted above").rows}
    assert apart == {"RMQ_SYS_BROKER_STATE": 30, "SCHEDULE_TOPIC_XXXX": 1}
    assert [table.title for table in all_.tables] == ["By topic"]
    assert (usual.charts[0].labels[:2], len(usual.charts[0].labels)) == (("20:00", "20:01"), 10)
    assert len(all_.charts[0].labels) == 51
    left_out = "bytes in the broker's own topics, not counted"
    assert usual.fact(left_out) == int(str(all_.fact("bytes"))) - int(str(usual.fact("bytes"))) > 0
    assert all_.fact(left_out) == 0


def test_stats_find_missing_queue_offsets(spark: SparkSession, log: DiskLog) -> None:
    """What is between the first and the last offset of a queue and not there; the fixture's offsets are sizes."""
    report = stats.run(spark, StatsOptions(LogSource(path=str(log.directory)), ("topic",)))

    missing = 0
    for queue in {(row["topic"], row["queueId"]) for row in log.rows}:
        offsets = [int(str(row["queueOffset"])) for row in log.rows if (row["topic"], row["queueId"]) == queue]
        missing += max(0, max(offsets) - min(offsets) + 1 - len(offsets))
    assert report.fact("missing queue offsets") == missing


def test_stats_of_entries_that_are_no_messages(spark: SparkSession, tmp_path: Path) -> None:
    """They are counted; what they do not have is not there."""
    log = write_disk_log(tmp_path, [b"x" * 100] * 50)

    report = stats.run(spark, StatsOptions(LogSource(path=str(log.directory))))

    assert [report.fact(name) for name in ("messages", "topics", "first message")] == [50, 0, None]
    assert report.table("By topic").rows[0][:2] == (stats.NO_MESSAGE, 50)
    assert page(report)


def test_retention_counts_segments_and_topics(spark: SparkSession, log: DiskLog) -> None:
    """Segments are the files, with their sizes; a setting deletes those whose newest message is too old."""
    now_ms = START_MS + 12 * HOUR_MS
    options = RetentionOptions(LogSource(path=str(log.directory)), Setting(hours=6), now_ms)

    report = retention.run(spark, options)

    newest: dict[str, int] = {}
    for row in log.rows:
        newest[str(row["segment"])] = int(str(row["storeTimestamp"])) // 1000
    old = [name for name, at in newest.items() if now_ms - at > 6 * HOUR_MS]
    rows = report.table("By segment").rows
    assert [row[0] for row in rows] == sorted(newest)
    assert [row[0] for row in rows if row[-1]] == sorted(old) != []
    assert {row[3] for row in rows} == {log.segment_bytes}
    assert {(row[0],): row[2] for row in report.table("By topic").rows} == _sizes(log, "topic")
    assert report.fact("messages") == COUNT
    assert "would be deleted" in page(report)
