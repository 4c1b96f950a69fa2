"""Topics as tables of the catalog: named, typed, filtered, refreshed, and never in another table's place."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger_spark import register_topics
from dledger_spark.errors import OptionError, PipelineError
from dledger_spark.session import TABLES_MAX, table_names
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from tests.support.log_bytes import write_disk_log
from tests.support.spark_nodes import BrokerNode, broker_node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE = "logs"
BODIES = {"orders": {"bodyFormat": "json", "bodySchema": "id long, what string COMMENT 'it\\'s \"quoted\"'"}}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerNode]:
    """Topics ``orders``, with thirty orders, and ``click-stream``."""
    with broker_node(tmp_path_factory.mktemp("catalog") / "broker") as node:
        with Producer(node.server.address) as producer:
            producer.send_many([Message("orders", b'{"id": %d, "what": "x"}' % number) for number in range(30)])
            producer.send_many([Message("click-stream", b"c")] * 5)
        yield node


@pytest.fixture(autouse=True)
def no_database(spark: SparkSession) -> Iterator[None]:
    yield
    spark.sql(f"DROP DATABASE IF EXISTS {DATABASE} CASCADE")


def test_every_topic_of_a_group_is_a_table(spark: SparkSession, broker: BrokerNode) -> None:
    """Those of users, with the columns of bodies whose schema is given; anew when they are registered again."""
    for _ in range(2):
        tables = register_topics(spark, broker.options, BODIES, database=DATABASE)

        assert tables == {"click-stream": "logs.click_stream", "orders": "logs.orders"}
        found = spark.sql("SELECT count(*) AS n, sum(id) AS total FROM logs.orders WHERE what = 'x'").collect()
        assert tuple(found[0]) == (30, sum(range(30)))
        assert spark.table("logs.click_stream").where("body = 'c'").count() == 5
    with Producer(broker.server.address) as producer:
        producer.send(Message("orders", b"bad"))
    bad = spark.sql("SELECT queueOffset, badBody FROM logs.orders WHERE badBody IS NOT NULL").collect()
    assert [row.badBody for row in bad] == ["JSON is malformed: invalid character (byte 0)"]


def test_a_stream_follows_a_table(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """With the table's options, and those of the stream besides."""
    register_topics(spark, broker.options, BODIES, topics=["orders"], database=DATABASE)
    query = (
        spark.readStream.option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "20")
        .table("logs.orders")
        .where("badBody IS NULL")
        .writeStream.format("memory")
        .queryName("followed_orders")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    found = [row.id for row in spark.table("followed_orders").collect()]
    spark.catalog.dropTempView("followed_orders")
    assert sorted(found) == list(range(30))


def test_a_time_in_sql_bounds_the_part_that_is_read(spark: SparkSession, tmp_path: Path) -> None:
    """One of many splits for one of many hours, also for a date; the rows are those without such bounds."""
    first = int(datetime(2026, 11, 29, tzinfo=UTC).timestamp() * 1000)
    messages = [
        Message("orders", b'{"id": %d}' % number, number % 4, store_timestamp=first + number * 600_000)
        for number in range(288)
    ]
    log = write_disk_log(tmp_path / "node", messages, segment_bytes=8192)
    options = {"path": str(log.directory), "splitBytes": "2k"}
    for _ in range(2):  # that a table is dropped does not touch the log
        register_topics(spark, options, BODIES, topics=["orders"], database=DATABASE)

    for where, ids in (
        ("storeTimestamp >= '2026-11-29 06:00' AND storeTimestamp < '2026-11-29 07:00'", range(36, 42)),
        ("date(storeTimestamp) = '2026-11-30'", range(144, 288)),
        ("storeTimestamp = '2026-11-29 06:10' AND queueId = 1", range(37, 38)),
        ("storeTimestamp > '2027-01-01'", range(0)),
    ):
        frame = spark.sql(f"SELECT id FROM logs.orders WHERE {where}")
        assert sorted(row.id for row in frame.collect()) == list(ids)
        whole = spark.table("logs.orders").rdd.getNumPartitions()
        assert frame.rdd.getNumPartitions() <= max(1, whole * (len(ids) + 20) // len(messages))


def test_a_table_of_another_format_is_left_alone(spark: SparkSession, broker: BrokerNode) -> None:
    """And no other table is made then."""
    spark.sql(f"CREATE DATABASE {DATABASE}")
    spark.sql(f"CREATE TABLE {DATABASE}.orders (a int) USING parquet")

    with pytest.raises(OptionError, match="`orders` exists and is not one of a topic"):
        register_topics(spark, broker.options, database=DATABASE)

    made = [one.name for one in spark.catalog.listTables(DATABASE) if not one.isTemporary]
    assert made == ["orders"]
    assert spark.table(f"{DATABASE}.orders").columns == ["a"]


def test_mistakes_are_told_before_anything_is_made(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """Names that Spark could not tell apart, schemas of no topic, and options that nobody knows."""
    wrong = {"orders": {"bodyFormat": "json", "bodySchema": "id"}}
    for options, bodies, database, problem in (
        (broker.options, {"order": {"decompressed": "true"}}, DATABASE, "there is no topic order whose bodies"),
        (broker.options | {"bodyFormt": "json"}, {}, DATABASE, "did you mean bodyFormat"),
        (broker.options, wrong, DATABASE, "needs a type at its end"),
        (broker.options, {}, "a.b", "invalid name of a database 'a.b'"),
        ({"path": str(tmp_path)}, {}, DATABASE, "name the topics"),
    ):
        with pytest.raises(PipelineError, match=problem):
            register_topics(spark, options, bodies, database=database)
    with pytest.raises(OptionError, match="secretKeyFile"):
        register_topics(spark, broker.options | {"secretKey": "s"}, topics=["orders"], database=DATABASE)
    assert not spark.catalog.databaseExists(DATABASE)
    for topics, problem in (
        (["a-b", "A_b"], "topics a-b and A_b would be one table"),
        ([], "0 topics: name 1 to"),
        ([f"t{number}" for number in range(TABLES_MAX + 1)], f"{TABLES_MAX + 1} topics"),
    ):
        with pytest.raises(OptionError, match=problem):
            table_names(topics)
