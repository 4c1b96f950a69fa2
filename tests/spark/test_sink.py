"""The sink: every row once, whatever fails and is run again; and what is refused before a row is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from dledger.core import producers
from rocketstore.client import Admin, Message, Producer, TopicInfo
from rocketstore.client.aio.outgoing import queue_number_of_key
from tests.support.spark_nodes import BrokerNode, EntryNode, broker_node, entry_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 120
PARTITIONS = 3
BODY_BYTES = 16_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerNode]:
    with broker_node(tmp_path_factory.mktemp("sink") / "broker") as broker:
        yield broker


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Rows reach the sink ten at a time."""
    names = ("spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.python.udf.maxRecordsPerBatch")
    before = {name: str(spark.conf.get(name)) for name in names}
    for name in names:
        spark.conf.set(name, "10")
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


def numbers(spark: SparkSession) -> DataFrame:
    """Bodies from 0 on, in three partitions. Of some size: Spark hands rows on when its buffers are full."""
    return spark.range(0, ROWS, 1, PARTITIONS).select(f.rpad(f.col("id").cast("string"), BODY_BYTES, " ").alias("body"))


def stumbling(spark: SparkSession, marker: Path) -> DataFrame:
    """The same rows; number 75 fails until the file is there. The first failure makes it if its directory exists."""
    path = str(marker)

    def pass_on(body: str) -> str:
        if body.strip() == "75" and not Path(path).exists():
            if Path(path).parent.exists():
                Path(path).touch()
            raise RuntimeError("row 75 stumbles")
        return body

    return numbers(spark).select(f.udf(pass_on, "string", useArrow=False)("body").alias("body"))


def write(frame: DataFrame, node: BrokerNode | EntryNode, **options: str) -> None:
    frame.write.format("dledger").mode("append").options(**{**node.options, **options}).save()


def stored(spark: SparkSession, node: BrokerNode | EntryNode, **options: str) -> list[int]:
    """The bodies that are stored, as numbers, in no particular order."""
    frame = spark.read.format("dledger").schema("body binary").options(**{**node.options, **options}).load()
    return sorted(int(bytes(row.body)) for row in frame.collect())


def test_columns_arrive_as_messages(spark: SparkSession, broker: BrokerNode) -> None:
    """What is written is read again; the column ``topic`` chooses."""
    frame = spark.sql(
        "SELECT 'b' AS body, 'cols' AS topic, 'k1 k2' AS keys, 'tag' AS tags, map('a', 'z') AS properties"
    )

    write(frame, broker)

    options = {**broker.options, "subscribe": "cols"}
    (row,) = spark.read.format("dledger").options(**options).load().collect()
    assert (bytes(row.body), row.topic, row.keys, row.tags) == (b"b", "cols", "k1 k2", "tag")
    assert row.properties["a"] == "z"


def test_rows_with_the_same_keys_go_to_one_queue_however_often_they_are_written(
    spark: SparkSession, broker: BrokerNode
) -> None:
    """The one that RocketMQ's producers choose by hash; a queue that is named wins, rows without keys take turns."""
    with Admin(broker.server.address) as admin:
        admin.put_topic(TopicInfo("keyed", 5, 5))
    frame = spark.range(0, ROWS, 1, PARTITIONS).selectExpr(
        "cast(id AS string) AS body",
        "CASE WHEN id % 10 < 8 THEN concat('key', id % 10) END AS keys",
        "CASE WHEN id % 10 = 7 THEN 4 END AS queueId",
    )

    for writer in ("one", "two", "two"):
        write(frame, broker, topic="keyed", partitioner="keys", writerId=f"keyed-{writer}")

    options = {**broker.options, "subscribe": "keyed"}
    rows = spark.read.format("dledger").schema("keys string, queueId int").options(**options).load().collect()
    queues = {row.keys: {one.queueId for one in rows if one.keys == row.keys} for row in rows}
    assert len(rows) == 2 * ROWS
    assert queues.pop(None) == {0, 1, 2, 3, 4}
    assert queues.pop("key7") == {4}
    assert queues == {f"key{number}": {queue_number_of_key(f"key{number}", 5)} for number in range(7)}
    assert len({queue for one in queues.values() for queue in one}) > 1


@pytest.mark.usefixtures("small_batches")
def test_retried_task_adds_nothing_twice(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """A task that fails half-way is run again by Spark, and goes on after what it had stored."""
    write(stumbling(spark, tmp_path / "marker"), broker, topic="retried")

    assert stored(spark, broker, subscribe="retried") == list(range(ROWS))


@pytest.mark.usefixtures("small_batches")
def test_rerun_of_a_failed_job_adds_exactly_what_is_missing(
    spark: SparkSession, broker: BrokerNode, tmp_path: Path
) -> None:
    """With the same ``writerId``; one more run adds nothing; other rows under that name are refused."""
    marker = tmp_path / "later" / "marker"
    with pytest.raises(PySparkException, match="row 75 stumbles"):
        write(stumbling(spark, marker), broker, topic="rerun", writerId="job-1")
    partly = stored(spark, broker, subscribe="rerun")
    marker.parent.mkdir()
    marker.touch()

    write(stumbling(spark, marker), broker, topic="rerun", writerId="job-1")
    write(stumbling(spark, marker), broker, topic="rerun", writerId="job-1")

    assert 0 < len(set(partly) & set(range(40, 75))) == len([one for one in partly if 40 <= one < 75])
    assert not set(partly) & set(range(75, 80))
    assert stored(spark, broker, subscribe="rerun") == list(range(ROWS))
    with pytest.raises(PySparkException, match=r"writer job-1 has stored 40 rows of partition \d, and now there are"):
        write(numbers(spark).limit(20).repartition(PARTITIONS), broker, topic="rerun", writerId="job-1")


def test_repeated_batch_of_a_stream_adds_nothing_twice(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """As after a kill between the last row and Spark's own note that the batch is done."""
    checkpoint = tmp_path / "checkpoint"
    with entry_node(tmp_path / "log") as node:
        node.append(0, 100)

        def run() -> None:
            options = {
                **node.options,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": "40",
                "minPartitions": "2",
            }
            frame = spark.readStream.format("dledger").schema("body binary").options(**options).load()
            writer = frame.writeStream.format("dledger").options(**broker.options, topic="copied")
            query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
            query.awaitTermination()

        run()
        for name in ("2", ".2.crc"):
            (checkpoint / "commits" / name).unlink()
        node.append(100, 20)
        run()

    assert stored(spark, broker, subscribe="copied") == list(range(120))


def test_a_stream_writes_more_batches_than_producers_are_remembered(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task of each batch is a producer: those of ended batches make room, and nobody else does."""
    monkeypatch.setattr(producers, "ENDED_BATCH_IDLE_MS", 0)
    with (
        broker_node(tmp_path / "broker", max_producers="8") as broker,
        Producer(broker.server.address) as producer,
        entry_node(tmp_path / "log") as node,
    ):
        given = producer.numbered("given")
        given.submit(Message("given", b"0"), 0).result()
        node.append(0, 300)
        options = {**node.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "25", "minPartitions": "2"}
        frame = spark.readStream.format("dledger").schema("body binary").options(**options).load()
        writer = frame.writeStream.format("dledger").options(**broker.options, topic="long")
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

        assert stored(spark, broker, subscribe="long") == list(range(300))
        assert given.next_number() == 1


def test_rows_go_into_a_log_of_plain_entries(spark: SparkSession, tmp_path: Path) -> None:
    """Without a topic: each body is an entry, once."""
    with entry_node(tmp_path / "log") as node:
        write(numbers(spark), node, writerId="w")
        write(numbers(spark), node, writerId="w")

        assert stored(spark, node) == list(range(ROWS))


def test_table_of_sql_takes_rows(spark: SparkSession, broker: BrokerNode) -> None:
    """``INSERT INTO``, with the columns that matter."""
    options = ", ".join(f"'{name}' '{text}'" for name, text in broker.options.items())
    spark.sql(f"CREATE TABLE sink_t USING dledger OPTIONS ({options}, topic 'inserted')")
    try:
        spark.sql("INSERT INTO sink_t (body, keys) VALUES (cast('1' AS binary), 'k'), (cast('2' AS binary), null)")
        assert spark.sql("SELECT string(body) AS b, keys FROM sink_t ORDER BY b").collect() == [("1", "k"), ("2", None)]
    finally:
        spark.sql("DROP TABLE sink_t")


def test_mistakes_are_told_before_a_row_is_written(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """On the driver, with what to do."""
    with pytest.raises(PySparkException, match="name the topic"):
        write(numbers(spark), broker)
    with pytest.raises(PySparkException, match="did you mean keys"):
        write(numbers(spark).selectExpr("body", "body AS keyz"), broker, topic="t")
    with pytest.raises(PySparkException, match="option group: this node serves group 'G', not 'other'"):
        write(numbers(spark), broker, topic="t", group="other")
    unnamed = {name: text for name, text in broker.options.items() if name != "group"}
    with pytest.raises(PySparkException, match="option group: this node serves group 'G', not 'default'"):
        numbers(spark).write.format("dledger").mode("append").options(**unnamed, topic="t").save()
    with pytest.raises(PySparkException, match="create topic nowhere first"):
        write(numbers(spark), broker, topic="nowhere", partitioner="keys")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        numbers(spark).write.format("dledger").mode("overwrite").options(**broker.options, topic="t").save()
    with entry_node(tmp_path / "log") as node, pytest.raises(PySparkException, match="is not a broker"):
        write(numbers(spark), node, topic="t")
