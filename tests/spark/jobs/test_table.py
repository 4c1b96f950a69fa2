"""A Delta table that follows running groups: it equals the topic row for row, whatever ends a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from dledger.errors import ConfigError, DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from dledger_spark.errors import DataLossError, JobBusyError, JobError
from dledger_spark.jobs import table
from dledger_spark.jobs.delta_table import LogTable
from dledger_spark.jobs.source import LogSource
from dledger_spark.jobs.table import TableFollower, TableOptions
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message
from tests.support.spark_nodes import BrokerNode, EntryNode, broker_node, entry_node
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dledger.types import Entry
    from dledger_spark.jobs.report import JobReport

PATIENCE_S = 120


def follow(spark: SparkSession, node: BrokerNode | EntryNode, out: Path, **more: object) -> JobReport:
    """One run up to the present end; the topic is orders, if the node is a broker."""
    of_source = {name: more.pop(name) for name in list(more) if name not in TableOptions.__slots__}
    if isinstance(node, BrokerNode):
        of_source.setdefault("topics", ("orders",))
    named = node.options
    source = LogSource(bootstrap=named["bootstrap.servers"], group=named.get("group", "default"), **of_source)  # type: ignore[arg-type]  # as the test says
    options = TableOptions(source, out, once=True, show=lambda _line: None)
    return table.run(spark, replace(options, **more))  # type: ignore[arg-type]  # as the test says


def numbers(out: Path) -> list[int]:
    """The bodies that a reader of Delta tables sees, in the order of the log."""
    rows = DeltaTable(out).to_pyarrow_table(columns=["index", "body"]).sort_by("index")
    return [int(body) for body in rows["body"].to_pylist()]


def test_the_table_equals_the_topic_over_runs(spark: SparkSession, tmp_path: Path) -> None:
    """Every column of every message; messages of other topics move the position and leave no rows."""
    out = tmp_path / "t"
    with broker_node(tmp_path / "store") as node:
        node.send("orders", 0, 300)
        node.send("other", 0, 50)
        first = follow(spark, node, out)
        node.send("other", 50, 10)
        quiet = follow(spark, node, out)
        node.send("orders", 300, 200)
        last = follow(spark, node, out)
        end = node.log_end() + 1
        log = spark.read.format("dledger").options(**node.options, subscribe="orders").load()
        wanted = [row.asDict() for row in log.orderBy("index").collect()]

    assert [one.fact("new rows") for one in (first, quiet, last)] == [300, 0, 200]
    assert (last.fact("next"), last.fact("behind")) == (end, 0)
    rows = DeltaTable(out).to_pyarrow_table().sort_by("index").to_pylist()
    for row in rows:
        row["properties"] = dict(row["properties"])
    for row in wanted:
        row["body"] = bytes(row["body"])
        for name in ("bornTimestamp", "storeTimestamp"):
            row[name] = row[name].astimezone(rows[0][name].tzinfo)
    assert rows == wanted


def test_a_run_that_dies_before_its_commit_leaves_nothing_to_see(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C at the worst moment: its files are there, and no part of the table; the next run adds the rows."""
    out = tmp_path / "t"
    with broker_node(tmp_path / "store") as node:
        node.send("orders", 0, 100)
        follow(spark, node, out)
        node.send("orders", 100, 50)

        append = LogTable.append

        def interrupted(*_: object) -> None:
            monkeypatch.setattr(LogTable, "append", append)  # what follows, on the way out, is as ever
            raise KeyboardInterrupt

        monkeypatch.setattr(LogTable, "append", interrupted)
        stopped = follow(spark, node, out)
        between = numbers(out)
        assert len(list(out.glob("*.parquet"))) == 2
        last = follow(spark, node, out)

    assert (between, numbers(out)) == (list(range(100)), list(range(150)))
    assert [one.fact("new rows") for one in (stopped, last)] == [0, 50]


def test_a_second_run_is_refused_and_adds_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once by the lock; on another machine, where locks may not reach, by the table itself."""
    out = tmp_path / "t"
    append = LogTable.append
    others: list[JobReport | None] = []
    with broker_node(tmp_path / "store") as node:
        node.send("orders", 0, 60)

        def overtaken(self: LogTable, *what: object) -> None:
            if not others:
                others.append(None)
                others[0] = follow(spark, node, out)
            append(self, *what)  # type: ignore[arg-type]  # as it was called

        monkeypatch.setattr(LogTable, "append", overtaken)
        with pytest.raises(JobBusyError, match="is writing to"):
            follow(spark, node, out)
        others.clear()
        monkeypatch.setattr(table, "locked", no_lock)
        with pytest.raises(JobBusyError, match="changed by another run"):
            follow(spark, node, out)

    assert others[0] is not None
    assert others[0].fact("new rows") == 60
    assert numbers(out) == list(range(60))


@contextmanager
def no_lock(_file: Path, _path: Path) -> Iterator[None]:
    """A file system without locks."""
    yield


def test_batches_are_within_their_limits(spark: SparkSession, tmp_path: Path) -> None:
    """``maxOffsetsPerTrigger`` holds, and the position is exact at each commit."""
    out = tmp_path / "t"
    with entry_node(tmp_path / "log") as node:
        node.append(0, 500)
        report = follow(spark, node, out, others={"maxOffsetsPerTrigger": "120", "minPartitions": "2"})

    assert numbers(out) == list(range(500))
    assert report.fact("batches") == 5  # the log begins with entries that have no rows
    ends = [int(one["dledger.end"]) for one in DeltaTable(out).history() if "dledger.end" in one]
    assert all(later - earlier <= 120 for later, earlier in pairwise(ends))
    assert set(DeltaTable(out).to_pyarrow_table().column_names) == {"index", "term", "position", "body"}


def test_columns_may_be_added_and_left_out_between_runs(spark: SparkSession, tmp_path: Path) -> None:
    """Rows have null where their run had no such column."""
    out = tmp_path / "t"
    with broker_node(tmp_path / "store") as node:
        for number, columns in enumerate((("body",), ("body", "topic"), ("body",))):
            node.send("orders", number, 1)
            follow(spark, node, out, columns=columns)
        with pytest.raises(ConfigError, match="no column colour"):
            follow(spark, node, out, columns=("colour",))
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "precious").touch()
        with pytest.raises(ConfigError, match="not a Delta table"):
            follow(spark, node, tmp_path / "files")
    assert [one.name for one in (tmp_path / "files").iterdir()] == ["precious"]

    rows = DeltaTable(out).to_pyarrow_table().sort_by("index")
    assert rows["topic"].to_pylist() == [None, "orders", None]


def test_bodies_may_be_columns_and_their_schema_may_grow(spark: SparkSession, tmp_path: Path) -> None:
    """Bad bodies are rows with the reason; older rows have null in a new column."""
    out = tmp_path / "t"
    as_json = {"bodyFormat": "json", "bodySchema": "id bigint, name string"}
    with broker_node(tmp_path / "store") as node:
        with Producer(node.server.address) as producer:
            producer.send(Message("orders", b'{"id": 1, "name": "one"}'))
            producer.send(Message("orders", b"no json"))
            follow(spark, node, out, others=as_json)
            producer.send(Message("orders", b'{"id": 2, "name": "two", "price": 2.5}'))
            follow(spark, node, out, others=as_json | {"bodySchema": "id bigint, name string, price double"})
        with pytest.raises(ConfigError, match="a type cannot change"):
            follow(spark, node, out, others=as_json | {"bodySchema": "id string"})
        with pytest.raises(ConfigError, match="rename it"):
            follow(spark, node, tmp_path / "u", others=as_json | {"bodySchema": "index bigint"})

    rows = DeltaTable(out).to_pyarrow_table(columns=["index", "id", "name", "price", "badBody", "topic"])
    found = [tuple(row.values())[1:4] for row in rows.sort_by("index").to_pylist()]
    assert found == [(1, "one", None), (None, None, None), (2, "two", 2.5)]
    assert [one is None for one in rows.sort_by("index")["badBody"].to_pylist()] == [True, False, True]
    assert set(rows["topic"].to_pylist()) == {"orders"}


def test_with_a_key_the_last_message_is_the_row(spark: SparkSession, tmp_path: Path) -> None:
    """In whatever batch and range it comes; the table says what its key is."""
    out = tmp_path / "t"
    small = {"maxOffsetsPerTrigger": "150", "minPartitions": "3"}
    with broker_node(tmp_path / "store") as node, Producer(node.server.address) as producer:
        for first in (0, 200):
            numbers = range(first, first + 200)
            messages = [
                Message("orders", b"%d" % one, keys=[] if one % 50 == 0 else [f"k{one % 7}"]) for one in numbers
            ]
            producer.send_many(messages)
            follow(spark, node, out, key="keys", columns=("body",), others=small)
        with pytest.raises(ConfigError, match="key was 'keys', is ''"):
            follow(spark, node, out, columns=("body",))
        with pytest.raises(ConfigError, match="--key: no column colour"):
            follow(spark, node, tmp_path / "u", key="colour")
        with pytest.raises(ConfigError, match="--key: column properties is map"):
            follow(spark, node, tmp_path / "u", key="properties")
        priced = {"bodyFormat": "json", "bodySchema": "price double"}
        with pytest.raises(ConfigError, match="--key: column price is double"):
            follow(spark, node, tmp_path / "u", key="price", others=priced)

    keyed: dict[str | None, list[int]] = {}
    for row in DeltaTable(out).to_pyarrow_table().sort_by("index").to_pylist():
        keyed.setdefault(row["keys"], []).append(int(row["body"]))
    last = {f"k{one % 7}": [one] for one in range(400) if one % 50}
    assert keyed == last | {None: list(range(0, 400, 50))}


def test_small_files_are_merged_while_it_follows(spark: SparkSession, tmp_path: Path) -> None:
    """The rows stay the same, and the next run continues."""
    out = tmp_path / "t"
    with entry_node(tmp_path / "log") as node:
        node.append(0, 500)
        report = follow(spark, node, out, others={"maxOffsetsPerTrigger": "60"}, compact_s=0.0)
        node.append(500, 10)
        follow(spark, node, out)

    assert report.fact("merged files") > 1  # type: ignore[operator]  # it is a number
    assert len(DeltaTable(out).file_uris()) < report.fact("batches")  # type: ignore[operator]  # likewise
    assert numbers(out) == list(range(510))


def test_a_trimmed_or_shorter_log_stops_the_run(spark: SparkSession, tmp_path: Path) -> None:
    """What is lost is named; only ``failOnDataLoss=false`` goes on, and only forward."""
    out = tmp_path / "t"
    with entry_node(tmp_path / "log") as node:
        node.append(0, 50, padding=1000)
        follow(spark, node, out)
        held = numbers(out)
        node.append(50, 200, padding=1000)
        begin = node.expire()
        with pytest.raises(DataLossError, match="are no longer kept"):
            follow(spark, node, out)
        assert numbers(out) == held
        follow(spark, node, out, others={"failOnDataLoss": "false"})
        indexes = DeltaTable(out).to_pyarrow_table(columns=["index"])["index"].to_pylist()
        assert sorted(indexes)[:51] == [*range(min(indexes), min(indexes) + 50), begin]
    with entry_node(tmp_path / "another") as node:  # of the same names, with a log of its own
        node.append(0, 5)
        for lenient in ("true", "false"):
            with pytest.raises(DLedgerError, match="older one"):
                follow(spark, node, out, others={"failOnDataLoss": lenient})
        node.append(5, 300)
        with pytest.raises(JobError, match="of another log with the same names"):
            follow(spark, node, out)

    assert DeltaTable(out).to_pyarrow_table().num_rows == len(indexes)


def test_rows_of_a_log_that_replaces_the_followed_one_are_not_added(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that happens while a batch is read: both have the same names, and the other one is longer."""
    read, entry, batches = TableFollower._run, TableFollower._entry, []

    def read_two(self: TableFollower, *of_batch: object) -> list[object]:
        found: list[object] = read(self, *of_batch)  # type: ignore[arg-type]  # as given
        batches.append(len(found))
        return found

    def entry_then(self: TableFollower, index: int) -> Entry | None:
        found = entry(self, index)
        return replace(found, chain_crc=found.chain_crc ^ 1) if found is not None and len(batches) > 1 else found

    monkeypatch.setattr(TableFollower, "_run", read_two)
    monkeypatch.setattr(TableFollower, "_entry", entry_then)
    with entry_node(tmp_path / "log") as node:
        node.append(0, 20)
        with pytest.raises(JobError, match="of another log with the same names"):
            follow(spark, node, tmp_path / "t", others={"maxOffsetsPerTrigger": "10"})

    assert len(batches) == 2
    assert numbers(tmp_path / "t") == list(range(len(numbers(tmp_path / "t"))))
    assert 0 < len(numbers(tmp_path / "t")) <= 10


def test_progress_is_shown_to_those_who_watch_consumers(spark: SparkSession, tmp_path: Path) -> None:
    """As the offsets of a consumer group: the lag of a table is one of a group."""
    with broker_node(tmp_path / "store") as node, Admin(node.server.address) as admin:
        node.send("orders", 0, 40)
        follow(spark, node, tmp_path / "t", consumer_group="table-orders")
        assert admin.lag("table-orders", "orders") == 0
        node.send("orders", 40, 7)
        wait_until(lambda: admin.lag("table-orders", "orders") == 7, "its queues have them all")


def test_it_follows_until_it_is_stopped_past_a_new_leader(spark: SparkSession, tmp_path: Path) -> None:
    """Of three brokers the leader is killed while messages come: each is in the table once."""
    out = tmp_path / "t"
    with LocalBrokers(tmp_path / "brokers") as brokers:
        killed = brokers.master()
        with Admin(brokers.addresses, timeout_s=60) as admin:
            admin.put_topic(TopicInfo("orders", 4, 4))
        source = LogSource(bootstrap=",".join(brokers.addresses), group=brokers.name, topics=("orders",))
        stopped = threading.Event()

        def show(_line: str) -> None:
            if stopped.is_set():
                raise KeyboardInterrupt

        def produce() -> None:
            with Producer(brokers.addresses, timeout_s=60) as producer:
                producer.send_many([Message("orders", b"%d" % number) for number in range(2000)])
                wait_until(lambda: (out / "_delta_log" / f"{1:020d}.json").exists(), "the first commit", PATIENCE_S)
                brokers.kill(killed)
                producer.send_many([Message("orders", b"%d" % number) for number in range(2000, 4000)])
                stopped.set()
                producer.send(Message("orders", b"4000"))

        sending = threading.Thread(target=produce)
        sending.start()
        options = TableOptions(source, out, trigger_s=0.2, show=show)
        table.run(spark, options)
        sending.join()
        table.run(spark, replace(options, once=True, show=lambda _line: None))

    assert sorted(numbers(out)) == list(range(4001))


def test_what_makes_no_table_is_refused_before_spark_starts(tmp_path: Path) -> None:
    """A directory as the source, an end, an object store."""
    live = LogSource(bootstrap="h:1")
    for source, out, named in (
        (LogSource(path=str(tmp_path)), tmp_path / "t", "does not grow"),
        (replace(live, to_index=3), tmp_path / "t", "without an end"),
        (live, Path("s3://bucket/t"), "not a mounted file system"),
    ):
        with pytest.raises(ConfigError, match=named):
            table.check(TableOptions(source, out))
    result = CliRunner().invoke(table.command, ["-b", "127.0.0.1:1"])
    assert (result.exit_code, "--out" in result.output) == (2, True)
