"""Kills in the middle of streams and writes: in the end every row is there, and none twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as f

from dledger.errors import DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin
from tests.support.spark_copy import CopyProcess
from tests.support.spark_nodes import broker_node, entry_node
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENTRIES = 3000
ROWS = 20_000
PATIENCE_S = 300
"""A JVM may take a minute to start on a busy machine."""


@pytest.mark.soak
def test_driver_killed_between_source_and_sink(spark: SparkSession, tmp_path: Path) -> None:
    """``kill -9`` of driver and JVM while a batch is being written; the next run repeats the batch, and no row."""
    with entry_node(tmp_path / "log") as node, broker_node(tmp_path / "broker") as broker:
        node.append(0, ENTRIES)
        read = {**node.options, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "700", "minPartitions": "2"}
        write = {**broker.options, "topic": "copied"}
        begun = broker.log_end()
        with CopyProcess(tmp_path / "copy", read, write) as copy:
            wait_until(lambda: broker.log_end() > begun + 900, "the second batch is written", PATIENCE_S)
            copy.kill()
        with CopyProcess(tmp_path / "copy", read, write) as copy:
            copy.finish(PATIENCE_S)

        frame = spark.read.format("dledger").schema("body binary").options(**broker.options, subscribe="copied").load()
        assert sorted(int(bytes(row.body)) for row in frame.collect()) == list(range(ENTRIES))


@pytest.mark.slow
def test_leader_killed_while_rows_are_written_and_while_they_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """Of three brokers: writing and reading go on with the next one."""
    with LocalBrokers(tmp_path / "brokers") as brokers:
        with Admin(brokers.addresses, timeout_s=60) as admin:
            brokers.master()
            admin.put_topic(TopicInfo("t", 4, 4))
        servers = ",".join(brokers.addresses)

        killed = brokers.master()
        with when(lambda: stored(brokers.addresses) > ROWS // 10, lambda: brokers.kill(killed)):
            numbers = spark.range(0, ROWS, 1, 2).select(f.col("id").cast("string").alias("body"))
            numbers.write.format("dledger").mode("append").options(
                **{"bootstrap.servers": servers, "group": brokers.name, "topic": "t"}
            ).save()
        brokers.start(killed)
        bodies = follow(spark, brokers, tmp_path)

    assert sorted(bodies) == list(range(ROWS))


def follow(spark: SparkSession, brokers: LocalBrokers, directory: Path) -> list[int]:
    """Read the topic as a stream in several batches; the leader dies after the first one, while they go on."""
    bodies: list[int] = []

    def take(batch: DataFrame, batch_id: int) -> None:
        bodies.extend(int(bytes(row.body)) for row in batch.collect())
        if batch_id == 0:
            brokers.kill(brokers.master())

    options = {
        "bootstrap.servers": ",".join(brokers.addresses),
        "group": brokers.name,
        "subscribe": "t",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(ROWS // 4),
    }
    frame = spark.readStream.format("dledger").schema("body binary").options(**options).load()
    query = frame.writeStream.foreachBatch(take).trigger(availableNow=True)
    query.option("checkpointLocation", str(directory / "checkpoint")).start().awaitTermination()
    return bodies


def stored(addresses: list[str]) -> int:
    """How many messages the topic has, as far as anybody says."""
    with Admin(addresses) as admin:
        try:
            return sum(one.max_offset for one in admin.queue_ranges("t"))
        except DLedgerError:
            return 0


class when:  # noqa: N801  # reads as a word
    """Do something on a thread as soon as a condition holds; fails if it never does within the block."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
        self._condition = condition
        self._action = action
        self._done = False
        self._thread = threading.Thread(target=self._run, name="test-when")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        assert self._done

    def _run(self) -> None:
        wait_until(self._condition, "it is time", PATIENCE_S)
        self._action()
        self._done = True
