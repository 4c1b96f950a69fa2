"""The examples of Spark's, in the session of the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from examples import follow, spark_stream
from rocketstore.client import Consumer, Message, Producer
from tests.support.memory_factory import tmp_path_factory as tmp_path_factory
from tests.support.spark import spark as spark
from tests.support.spark import spark_sockets as spark_sockets
from tests.support.spark_nodes import BrokerNode, broker_node
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.lane("spark"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerNode]:
    with broker_node(tmp_path / "broker") as running:
        yield running


def send(broker: BrokerNode, tags: str, sizes: list[int]) -> None:
    """Messages with bodies of these sizes."""
    with Producer(broker.server.address) as producer:
        producer.send_many([Message("orders", b"x" * size, tags=tags) for size in sizes])


@pytest.mark.usefixtures("spark")
def test_every_message_is_counted_once_over_restarts(broker: BrokerNode, tmp_path: Path) -> None:
    """Also when a batch is there that Spark did not take note of, as after a kill."""
    out = tmp_path / "counts"
    words = [broker.server.address, "--group", "G", "--topic", "orders", "--out", str(out), "--once"]
    send(broker, "new", [10] * 40)
    follow.main(words)
    newest = max((out / "_checkpoint" / "commits").glob("[0-9]*"))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    send(broker, "paid", [10] * 5)
    follow.main(words)

    sums: Counter[str] = Counter()
    for directory in out.glob("batch=*"):
        for row in ds.dataset(directory).to_table(columns=["tags", "messages"]).to_pylist():
            sums[row["tags"]] += row["messages"]
    assert sums == {"new": 40, "paid": 5}


def test_large_messages_are_copied_once_over_restarts(spark: SparkSession, broker: BrokerNode, tmp_path: Path) -> None:
    """Those of before and those of after, with their tags."""
    words = [broker.server.address, "--group", "G", "--from-topic", "orders", "--to-topic", "large"]
    words += ["--state", str(tmp_path / "state"), "--least-bytes", "50", "--once"]
    for tags in ("new", "paid"):
        send(broker, tags, [10, 50, 90])
        spark_stream.main(words)

    assert spark.getActiveSession() is not None, "it is not the example's to end"
    with Consumer(broker.server.address, topics="large", assign="all", start="first") as consumer:
        copied: list[tuple[str, int]] = []

        def all_came() -> bool:
            copied.extend((one.tags, len(one.body)) for one in consumer.poll(timeout_s=1.0))
            return len(copied) >= 4

        wait_until(all_came, "the copies are consumed")
        copied.extend((one.tags, len(one.body)) for one in consumer.poll(timeout_s=1.0))
    assert sorted(copied) == [("new", 50), ("new", 90), ("paid", 50), ("paid", 90)]
