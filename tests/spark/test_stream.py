"""Streams over a running group: nothing lost, nothing twice, over restarts, trims and changed options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from rocketstore.client.blocking import Admin
from tests.support.spark_nodes import EntryNode, broker_node, entry_node
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = "index bigint, body binary"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EntryNode]:
    """A group of one."""
    with entry_node(tmp_path / "log") as node:
        yield node


class Stream:
    """A stream into batch directories of Parquet, run again and again with AvailableNow."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.directory = directory
        self.partitions: list[int] = []
        self.rows_of_batches: list[int] = []

    def run(self, options: Mapping[str, str]) -> StreamingQuery:
        """Read what there is now."""

        def save(batch: DataFrame, batch_id: int) -> None:
            self.partitions.append(batch.rdd.getNumPartitions())
            self.rows_of_batches.append(batch.count())
            batch.write.mode("overwrite").parquet(str(self.directory / "out" / f"batch={batch_id}"))

        frame = self.spark.readStream.format("dledger").schema(SCHEMA).options(**options).load()
        writer = frame.writeStream.foreachBatch(save).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.directory / "checkpoint")).start()
        query.awaitTermination()
        return query

    def bodies(self) -> list[int]:
        """What has been read, in the order of the log."""
        rows = self.spark.read.parquet(str(self.directory / "out")).orderBy("index").collect()
        return [int(bytes(row.body)) for row in rows]


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def fail(batch: DataFrame, batch_id: int) -> None:
    """A sink that is broken."""
    raise RuntimeError("the first batch fails")


def offset(text: str) -> dict[str, int]:
    """An offset as Spark reports it."""
    parsed: dict[str, int] = json.loads(text)
    return parsed


def test_available_now_reads_what_is_there_in_batches_within_the_limit(stream: Stream, node: EntryNode) -> None:
    """And goes on from the checkpoint: every entry once, in order."""
    node.append(0, 250)
    options = {**node.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}

    stream.run(options)
    node.append(250, 50)
    stream.run(options)

    assert stream.bodies() == list(range(300))
    assert max(stream.rows_of_batches) <= 100


def test_changed_partitions_between_restarts_change_no_row(stream: Stream, node: EntryNode) -> None:
    """How a batch is cut is no part of the checkpoint."""
    options = {**node.options, "startingOffsets": "earliest"}
    node.append(0, 40)
    stream.run({**options, "minPartitions": "2"})
    node.append(40, 40)
    stream.run({**options, "minPartitions": "5"})
    node.append(80, 40)
    stream.run({**options, "maxRecordsPerPartition": "10"})

    assert stream.bodies() == list(range(120))
    assert [one for one, rows in zip(stream.partitions, stream.rows_of_batches, strict=True) if rows] == [2, 5, 4]


@pytest.mark.parametrize("unfinished", [0, 1])
def test_changed_partitions_of_an_unfinished_batch_change_no_row(
    stream: Stream, node: EntryNode, unfinished: int
) -> None:
    """A batch that was planned, and read, but not noted as done, is read again as other pieces: the same rows."""
    options = {**node.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "60"}
    node.append(0, 60 * unfinished + 50)
    stream.run({**options, "minPartitions": "2"})
    checkpoint, runs = stream.directory / "checkpoint", len(stream.partitions)
    assert max(int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdecimal()) == unfinished
    for name in (f"{unfinished}", f".{unfinished}.crc"):
        (checkpoint / "commits" / name).unlink()
    node.append(60 * unfinished + 50, 30)

    stream.run({**options, "minPartitions": "5"})

    assert stream.bodies() == list(range(60 * unfinished + 80))
    assert stream.partitions[runs] == 5
    assert stream.rows_of_batches[runs] == stream.rows_of_batches[runs - 1]


def test_first_batch_begins_where_latest_was_when_it_was_planned(
    spark: SparkSession, stream: Stream, node: EntryNode
) -> None:
    """A first batch that fails is repeated from there, whatever was appended meanwhile."""
    node.append(0, 10)
    frame = spark.readStream.format("dledger").schema(SCHEMA).options(**node.options).load()
    failing = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(stream.directory / "checkpoint"))
    query = failing.trigger(processingTime="0 seconds").start()
    wait_until(lambda: query.lastProgress is not None or not query.isActive, "it knows where it begins")
    node.append(10, 10)
    with pytest.raises(StreamingQueryException, match="the first batch fails"):
        query.awaitTermination(30)
    node.append(20, 10)

    stream.run(node.options)

    assert stream.bodies() == list(range(10, 30))


def test_trimmed_log_below_the_checkpoint(stream: Stream, node: EntryNode) -> None:
    """Stops the stream with the lost range; or, if told to, goes on with what is kept."""
    options = {**node.options, "startingOffsets": "earliest"}
    node.append(0, 5)
    stream.run(options)
    node.append(5, 300, padding=1000)
    begin = node.expire()

    with pytest.raises(StreamingQueryException) as caught:
        stream.run(options)
    assert f"entries 6 to {begin - 1} ({begin - 6} entries) of group default are no longer kept" in str(caught.value)
    stream.run({**options, "failOnDataLoss": "false"})

    assert stream.bodies() == [*range(5), *range(begin - 1, 305)]


def test_progress_tells_how_far_the_stream_is_behind(stream: Stream, node: EntryNode) -> None:
    """``latestOffset`` beside ``endOffset``: what is committed, whatever the limit of a batch."""
    node.append(0, 50)
    options = {**node.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}

    progress = [one for one in stream.run(options).recentProgress if one.numInputRows]

    ends = [offset(one.sources[0].endOffset)["index"] for one in progress]
    assert ends == [20, 40, 51]
    assert {offset(one.sources[0].latestOffset)["index"] for one in progress} == {51}


def test_checkpoint_of_another_group_is_refused(stream: Stream, node: EntryNode, tmp_path: Path) -> None:
    """The same query pointed at other servers would read rows that do not follow."""
    node.append(0, 5)
    stream.run({**node.options, "startingOffsets": "earliest"})

    with entry_node(tmp_path / "other", "c2") as other:
        other.append(0, 50)
        with pytest.raises(StreamingQueryException, match="belongs to group 'default' of cluster 'c1'"):
            stream.run(other.options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"endingOffsets": "latest"}, "a stream has no end: leave endingOffsets"),
        ({"endingOffsets": '{"index": 9}'}, "a stream has no end: leave endingOffsets"),
        ({"subscribe": "t,nowhere"}, "there is no topic nowhere"),
    ],
)
def test_options_that_would_be_ignored_in_a_stream_are_errors(
    stream: Stream, tmp_path: Path, option: dict[str, str], words: str
) -> None:
    """As in Kafka's source."""
    with broker_node(tmp_path / "broker") as broker:
        broker.send("t", 0, 5)
        with pytest.raises(PySparkException, match=words):
            stream.run({**broker.options, **option})


def test_progress_is_published_as_a_consumer_groups(stream: Stream, tmp_path: Path) -> None:
    """``dledger consumer progress`` shows what the stream has still to read; being told makes it no work."""
    with broker_node(tmp_path / "broker") as broker:
        broker.send("t", 0, 30)
        options = {**broker.options, "startingOffsets": "earliest", "subscribe": "t", "consumerGroup": "spark"}

        stream.run(options)
        with Admin(broker.server.address) as admin:
            assert sum(one.lag for one in admin.progress("spark", "t")) == 0
            broker.send("t", 30, 12)
            wait_until(lambda: sum(one.lag for one in admin.progress("spark", "t")) == 12, "its queues have them all")
        stream.run(options)
        stream.run(options)
        ended = broker.log_end()

        with Admin(broker.server.address) as admin:
            assert sum(one.lag for one in admin.progress("spark", "t")) == 0
        assert broker.log_end() == ended
    assert stream.bodies() == list(range(42))
