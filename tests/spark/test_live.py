"""Batches over a running group: its committed entries, as entries or as messages, cut, filtered and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.datasource import GreaterThanOrEqual
from pyspark.sql.types import StructField, StructType, TimestampType

from dledger_spark.options import ReadOptions
from dledger_spark.schema import projection_of
from dledger_spark.source.live import FilteringLiveReader, LogPartition
from tests.support.spark_nodes import BrokerNode, EntryNode, broker_node, entry_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryNode]:
    """Entry 0 is the leader's NOOP; entries 1 to 200 hold the numbers from 0."""
    with entry_node(tmp_path_factory.mktemp("live") / "log") as node:
        node.append(0, 200, padding=900)
        yield node


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerNode]:
    """Fifty messages of topic ``a``, then fifty of ``b``."""
    with broker_node(tmp_path_factory.mktemp("live") / "broker") as broker:
        broker.send("a", 0, 50)
        broker.send("b", 50, 50)
        yield broker


def read(spark: SparkSession, node: EntryNode | BrokerNode, **options: str) -> DataFrame:
    """A batch with these options."""
    return spark.read.format("dledger").options(**{**node.options, **options}).load()


def in_sql(node: EntryNode | BrokerNode) -> str:
    """Its options in SQL's way of writing."""
    return ", ".join(f"'{name}' '{text}'" for name, text in node.options.items())


def bodies(frame: DataFrame) -> list[int]:
    return [int(bytes(row.body)) for row in frame.select("body").collect()]


def test_entries_are_read_in_even_ranges_in_order(spark: SparkSession, node: EntryNode) -> None:
    """The NOOP is no row; every other entry is one."""
    frame = read(spark, node, minPartitions="4")

    assert frame.rdd.getNumPartitions() == 4
    assert bodies(frame) == list(range(200))
    sizes = [row["count"] for row in frame.groupBy(f.spark_partition_id()).count().collect()]
    assert min(sizes) >= 49


def test_offsets_bound_a_batch(spark: SparkSession, node: EntryNode) -> None:
    """First included, end not."""
    frame = read(spark, node, startingOffsets='{"index": 11}', endingOffsets='{"index": 14}')

    assert bodies(frame) == [10, 11, 12]


def test_uncommitted_end_is_refused(spark: SparkSession, node: EntryNode) -> None:
    """There is nothing that could be promised of it."""
    with pytest.raises(PySparkException, match="entry 8999 is not committed yet, the last committed entry is 200"):
        read(spark, node, endingOffsets='{"index": 9000}').count()


def test_topics_are_asked_of_messages_only(spark: SparkSession, node: EntryNode) -> None:
    """Plain entries have none."""
    with pytest.raises(PySparkException, match="are not messages"):
        read(spark, node, subscribe="a").count()


def test_messages_are_recognised_and_chosen_by_topic(spark: SparkSession, broker: BrokerNode) -> None:
    """Without being told that the group belongs to brokers."""
    frame = read(spark, broker, subscribe="b")

    assert bodies(frame) == list(range(50, 100))
    assert {row.topic for row in frame.select("topic").collect()} == {"b"}


def test_a_topic_that_does_not_exist_is_an_error(spark: SparkSession, broker: BrokerNode) -> None:
    """As in Kafka's source, and named; without failOnDataLoss it has no rows."""
    with pytest.raises(PySparkException, match="option subscribe: there is no topic c: create it first"):
        read(spark, broker, subscribe="a,c").count()

    assert read(spark, broker, subscribe="c", failOnDataLoss="false").count() == 0


def test_times_bound_a_batch_of_messages(spark: SparkSession, broker: BrokerNode) -> None:
    """By the time of storing, found in the log."""
    times = [
        row.ms for row in read(spark, broker, subscribe="b").selectExpr("unix_millis(storeTimestamp) ms").collect()
    ]

    assert bodies(read(spark, broker, subscribe="a,b", startingTimestamp=str(times[0])))[-50:] == list(range(50, 100))
    assert read(spark, broker, startingTimestamp=str(times[-1] + 3_600_000)).count() == 0


def test_filters_are_pushed_if_wanted(spark: SparkSession, broker: BrokerNode) -> None:
    """The rows are the same."""
    frame = read(spark, broker, pushFilters="true").filter("topic = 'a' and queueOffset >= 0")

    assert sorted(bodies(frame)) == list(range(50))


def test_kafka_columns_and_option_names_work(spark: SparkSession, broker: BrokerNode) -> None:
    """A Kafka job changes its format and its servers."""
    options = {"kafka.bootstrap.servers": broker.options["bootstrap.servers"], "group": "G", "schemaStyle": "kafka"}
    frame = spark.read.format("dledger").options(**options).option("subscribe", "a").load()

    assert [int(bytes(row.value)) for row in frame.select("value").collect()] == list(range(50))


def test_table_of_sql_reads_the_group(spark: SparkSession, broker: BrokerNode) -> None:
    """``CREATE TABLE … USING dledger`` needs no registration; a query may say more."""
    spark.sql(f"CREATE TABLE live_a USING dledger OPTIONS ({in_sql(broker)}, topic 'a', writerId 'w')")
    try:
        assert bodies(spark.table("live_a")) == list(range(50))
        assert bodies(spark.sql("SELECT body FROM live_a WITH (subscribe = 'b')")) == list(range(50, 100))
    finally:
        spark.sql("DROP TABLE live_a")


def test_secret_of_a_table_is_refused(spark: SparkSession, broker: BrokerNode) -> None:
    """Whoever may describe the table would see it."""
    with pytest.raises(PySparkException, match="temporary view"):
        spark.sql(f"CREATE TABLE live_s USING dledger OPTIONS ({in_sql(broker)}, accessKey 'me', secretKey 'hush')")


def test_secret_of_a_view_is_not_shown(spark: SparkSession, broker: BrokerNode) -> None:
    """Not in a plan, not in an error."""
    secret = "accessKey 'me', secretKey 'hush-hush'"
    spark.sql(f"CREATE TEMPORARY VIEW live_v USING dledger OPTIONS ({in_sql(broker)}, subscribe 'a', {secret})")

    assert "hush-hush" not in str(spark.sql("EXPLAIN EXTENDED SELECT * FROM live_v").collect())
    with pytest.raises(PySparkException) as caught:
        read(spark, broker, accessKey="me", secretKey="hush-hush", endingOffsets='{"index": 9000}').count()
    assert "hush-hush" not in str(caught.value)


def test_wrong_group_is_told(spark: SparkSession, broker: BrokerNode) -> None:
    """By the servers' own word."""
    with pytest.raises(PySparkException, match="option group: this node serves group 'G', not 'other'"):
        read(spark, broker, group="other").count()


def test_lost_entries_are_told_in_batches_too(spark: SparkSession, tmp_path: Path) -> None:
    """Asked for by their numbers: an error with the range, or what is left."""
    with entry_node(tmp_path / "log") as node:
        node.append(0, 200, padding=1000)
        begin = node.expire()
        options = {"startingOffsets": '{"index": 3}', "endingOffsets": '{"index": 190}'}

        with pytest.raises(PySparkException, match=f"entries 3 to {begin - 1} "):
            read(spark, node, **options).count()
        assert read(spark, node, **options, failOnDataLoss="false").count() == 190 - begin


def test_a_time_in_a_filter_bounds_the_ranges_and_no_row_is_lost(spark: SparkSession, broker: BrokerNode) -> None:
    """As planned for the same filter, and as Spark finds it in all rows."""
    rows = read(spark, broker).select("storeTimestamp", "index").collect()
    newest = max(row.storeTimestamp for row in rows)
    expected = {row["index"] for row in rows if row.storeTimestamp >= newest}

    frame = read(spark, broker, pushFilters="true").where(f.col("storeTimestamp") >= f.lit(newest))
    assert {row["index"] for row in frame.select("index").collect()} == expected

    options = ReadOptions.parse({**broker.options, "pushFilters": "true"})
    projection = projection_of(StructType([StructField("storeTimestamp", TimestampType())]), "default")
    for time, kept in ((newest, True), (newest + timedelta(days=1), False)):
        reader = FilteringLiveReader(options, projection)
        assert list(reader.pushFilters([GreaterThanOrEqual(("storeTimestamp",), time.astimezone(UTC))])) == []
        ranges = [one.wanted for one in reader.partitions() if isinstance(one, LogPartition)]
        assert all(one.first > min(row["index"] for row in rows) for one in ranges)
        assert any(one.count for one in ranges) == kept
