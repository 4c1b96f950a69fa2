"""A task's rows on their way to a broker: whichever of them cannot be stored, the task fails and Spark repeats it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from dledger.errors import DLedgerError
from dledger_spark.options import WriteOptions
from dledger_spark.source.sink import RowFormat, TopicTarget, row_format
from rocketstore.client import Admin, TopicInfo
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.aio.test_real_broker import stored
from tests.unit.rocketstore.test_server import alone, running

FORM: RowFormat = row_format([("body", "binary"), ("queueId", "int")])
NO_QUEUE = 99


def rows(first: int, count: int, bad: int | None) -> pa.RecordBatch:
    """Numbers from ``first`` on; row ``bad`` is for a queue that the topic lacks."""
    numbers = range(first, first + count)
    queues = [NO_QUEUE if number == bad else 0 for number in numbers]
    return pa.RecordBatch.from_pydict({"body": [b"%d" % n for n in numbers], "queueId": pa.array(queues, pa.int32())})


def write(options: WriteOptions, sizes: list[int], bad: int | None) -> None:
    """As a task does: one batch of rows after the other."""
    with TopicTarget(options, FORM, "writer/0") as target:
        first = target.begin()
        for size in sizes:
            target.add(rows(first, size, bad), first)
            first += size
        target.finish()


@contextmanager
def with_topic(directory: Path) -> Iterator[BrokerServer]:
    """A broker with the topic ``T``."""
    with running(alone(directory)) as broker:
        with Admin(broker.address, timeout_s=30) as admin:
            admin.put_topic(TopicInfo("T", 4, 4))
        yield broker


@pytest.mark.parametrize("bad", [0, 1, 7, 9, 10, 19, 1024, 1029])
def test_a_row_that_cannot_be_stored_fails_its_task(bad: int, tmp_path: Path) -> None:
    """Wherever it is: the first, the last of a batch of rows, the last of all. Those before it are stored."""
    sizes = [10, 10] if bad < 20 else [1024, 6]
    with with_topic(tmp_path) as broker:
        options = WriteOptions(servers=(broker.address,), topic="T", send_timeout_ms=30_000)
        with pytest.raises(DLedgerError):
            write(options, sizes, bad)

        rows_before = [b"%d" % number for number in range(bad)]
        wait_until(lambda: stored(broker, "T").get(0, []) == rows_before, "those before it are stored")


def test_rows_that_are_stored_fail_no_task(tmp_path: Path) -> None:
    """And a second attempt finds how many there are."""
    with with_topic(tmp_path) as broker:
        options = WriteOptions(servers=(broker.address,), topic="T")
        write(options, [10], None)
        with TopicTarget(options, FORM, "writer/0") as target:
            assert target.begin() == 10
