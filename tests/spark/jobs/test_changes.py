"""The changes of Delta tables in a topic: each once, whatever ends a run. Neither a session nor Java is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from dledger.errors import ConfigError
from dledger_spark.errors import JobBusyError, JobError
from dledger_spark.jobs import changes
from dledger_spark.jobs.changes import ChangeSender, ChangesOptions, messages_of
from dledger_spark.jobs.delta_table import EntrySpan, LogTable, TableOrigin, open_table
from dledger_spark.jobs.replay import ReplayTarget
from dledger_spark.source.sink import TopicTarget, row_format
from rocketstore.client.aio.admin_requests import QueueRange, TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from tests.support.spark_nodes import BrokerNode, broker_node
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("index", pa.int64()), ("keys", pa.string()), ("body", pa.binary())])
FEED = {"delta.enableChangeDataFeed": "true"}


def opened(path: Path) -> LogTable:
    """A table that follows a topic by key."""
    return open_table(path, SCHEMA, TableOrigin("c1", "G", {"key": "keys"}))


def upsert(path: Path, first: int, keys: list[str]) -> None:
    """A commit of entries with these keys, whose bodies are their numbers."""
    numbers = list(range(first, first + len(keys)))
    rows = pa.table([numbers, keys, [b"%d" % number for number in numbers]], schema=SCHEMA)
    opened(path).upsert(rows, "keys", EntrySpan(first, first + len(keys)))


def options_for(node: BrokerNode, path: Path, topic: str = "changed") -> ChangesOptions:
    """Up to the newest version."""
    target = ReplayTarget(node.options["bootstrap.servers"], node.options["group"], topic)
    return ChangesOptions(path, target, once=True, show=lambda _line: None)


def stored(node: BrokerNode) -> list[tuple[str, str | None, str, str]]:
    """Body, keys, kind of change and version of every message, sorted."""
    with Producer(node.server.address) as producer:
        last = producer.send(Message("changed", b"the last one so far"))
    found: list[tuple[str, str | None, str, str]] = []
    with (
        Admin(node.server.address) as admin,
        Consumer(node.server.address, topics="changed", assign="all", start="first") as consumer,
    ):

        def ranges() -> list[QueueRange]:
            return admin.queue_ranges("changed")

        def dispatched() -> bool:
            """Queues are filled in the order of the log: what was stored before the last message is there with it."""
            return any(one.queue.queue_id == last.queue and one.max_offset > last.offset for one in ranges())

        wait_until(dispatched, "the last message is in its queue")
        left = sum(one.max_offset for one in ranges())
        while left:
            for message in consumer.poll(timeout_s=10):
                left -= 1
                named = message.properties
                if "changeType" in named:
                    found.append((message.body.decode(), named.get("KEYS"), named["changeType"], named["tableVersion"]))
    return sorted(found)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[BrokerNode]:
    """A broker with a topic for changes."""
    with broker_node(tmp_path / "store") as made:
        with Admin(made.server.address) as admin:
            admin.put_topic(TopicInfo("changed", 2, 2))
        yield made


def test_every_change_is_sent_once_over_runs(node: BrokerNode, tmp_path: Path) -> None:
    """Inserts and updates of a table with a key; compaction changes no row, and neither does taking note."""
    path = tmp_path / "t"
    upsert(path, 0, ["a", "b"])
    reports = [changes.run(options_for(node, path))]
    upsert(path, 2, ["b", "c"])
    DeltaTable(path).optimize.compact()
    reports += [changes.run(options_for(node, path)) for _ in range(2)]

    assert [one.fact("messages") for one in reports] == [2, 2, 0]
    assert stored(node) == [
        ("0", "a", "insert", "1"),
        ("1", "b", "insert", "1"),
        ("2", "b", "update", "3"),
        ("3", "c", "insert", "3"),
    ]
    assert opened(path).position == 4  # the other run, which follows a topic, is not disturbed


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("moment", ["middle", "before the note"])
def test_a_killed_run_is_completed_by_the_next(
    node: BrokerNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Also if the table has grown meanwhile: messages that are stored are known by their writer's numbers."""
    path = tmp_path / "t"
    upsert(path, 0, ["a", "b", "c"])
    upsert(path, 3, ["d", "e"])

    def die(*_: object) -> None:
        raise KilledError

    def add_some(self: TopicTarget, batch: pa.RecordBatch, first_row: int) -> None:
        add(self, batch.slice(0, 2), first_row)
        self.finish()
        raise KilledError

    add = TopicTarget.add
    with monkeypatch.context() as patch:
        if moment == "middle":
            patch.setattr(TopicTarget, "add", add_some)
        else:
            patch.setattr(ChangeSender, "_note", die)
        with pytest.raises(KilledError):
            changes.run(options_for(node, path))
    before = len(stored(node))
    upsert(path, 5, ["f"])
    changes.run(options_for(node, path))

    assert before == (2 if moment == "middle" else 5)
    assert [one[:2] for one in stored(node)] == [(str(number), key) for number, key in enumerate("abcdef")]


def test_a_run_that_is_killed_after_versions_without_changes_is_completed(
    node: BrokerNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own note is such a version: the writer is the same for the next run, which knows only of the note."""
    path = tmp_path / "t"
    upsert(path, 0, ["a"])
    sender = ChangeSender(options_for(node, path), row_format(changes._COLUMNS))
    while sender.send():
        pass
    upsert(path, 1, ["b", "c"])

    def die(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ChangeSender, "_note", die)
        with pytest.raises(KilledError):
            sender.send()
    changes.run(options_for(node, path))

    assert [one[0] for one in stored(node)] == ["0", "1", "2"]


def test_of_two_runs_in_turns_the_second_is_refused(node: BrokerNode, tmp_path: Path) -> None:
    """Before it sends anything: the first one's writers are others by then."""
    path = tmp_path / "t"
    upsert(path, 0, ["a"])
    first, second = (ChangeSender(options_for(node, path), row_format(changes._COLUMNS)) for _ in range(2))
    first.send()
    upsert(path, 1, ["b"])
    with pytest.raises(JobBusyError, match="let only one run"):
        second.send()
    while first.send():
        pass

    assert [one[0] for one in stored(node)] == ["0", "1"]


def test_a_second_run_is_refused_and_sends_nothing_twice(
    node: BrokerNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same writer; the table takes note of the first."""
    path = tmp_path / "t"
    upsert(path, 0, ["a", "b"])
    note = ChangeSender._note

    def overtaken(self: ChangeSender, version: int) -> None:
        monkeypatch.setattr(ChangeSender, "_note", note)
        with pytest.raises(JobBusyError, match="another run"):
            changes.run(options_for(node, path))
        ChangeSender(options_for(node, path), row_format(changes._COLUMNS)).send()  # as a run on another machine
        note(self, version)

    monkeypatch.setattr(ChangeSender, "_note", overtaken)
    with pytest.raises(JobBusyError, match="let only one run"):
        changes.run(options_for(node, path))

    assert len(stored(node)) == 2


def test_a_table_of_any_columns_is_sent_as_json(node: BrokerNode, tmp_path: Path) -> None:
    """With a column as the key; rows that are deleted are changes, too."""
    path = tmp_path / "t"
    write_deltalake(path, pa.table({"id": [1, 2], "price": [1.5, None]}), configuration=FEED)
    DeltaTable(path).delete("id = 2")
    options = replace(options_for(node, path), key="id")
    changes.run(options)
    with pytest.raises(ConfigError, match="--key: no column colour"):
        changes.run(replace(options, key="colour", target=replace(options.target, topic="other")))

    found = [(json.loads(body), *more) for body, *more in stored(node)]
    assert sorted(found, key=str) == [
        ({"id": 1, "price": 1.5}, "1", "insert", "0"),
        ({"id": 2, "price": None}, "2", "delete", "1"),
        ({"id": 2, "price": None}, "2", "insert", "0"),
    ]


def test_a_column_that_is_added_between_runs_does_not_change_the_order() -> None:
    """The next run counts what the first has sent, in the same order."""
    rows = pa.table({"a": [1, 10, 100], "_change_type": ["insert"] * 3})
    wider = rows.append_column("b", pa.nulls(3, pa.int64())).append_column("aa", pa.nulls(3, pa.string()))

    before, after = (
        [json.loads(one)["a"] for one in messages_of(table, "", 0)["body"].to_pylist()] for table in (rows, wider)
    )
    assert before == after


def test_every_number_becomes_json_that_any_reader_takes() -> None:
    """JSON has no infinite numbers: they are texts, wherever they are."""
    odd = pa.table({"n": [math.nan], "more": [[{"deep": [math.inf, -math.inf, 1.5]}]], "_change_type": ["insert"]})
    batch = messages_of(odd, "n", 0)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    body = json.loads(batch["body"][0].as_py(), parse_constant=refuse)
    assert body == {"n": "NaN", "more": [{"deep": ["Infinity", "-Infinity", 1.5]}]}
    assert batch["keys"].to_pylist() == ["NaN"]


def test_what_cannot_be_sent_is_said(node: BrokerNode, tmp_path: Path) -> None:
    """No table; one without a feed of its changes; versions before the first wanted one are left out."""
    write_deltalake(tmp_path / "plain", pa.table({"id": [1]}))
    with pytest.raises(JobError, match="enableChangeDataFeed"):
        changes.run(options_for(node, tmp_path / "plain"))
    with pytest.raises(ConfigError, match="Delta table"):
        changes.run(options_for(node, tmp_path))
    upsert(tmp_path / "t", 0, ["a"])
    upsert(tmp_path / "t", 1, ["b"])
    changes.run(replace(options_for(node, tmp_path / "t"), from_version=2))

    assert [one[0] for one in stored(node)] == ["1"]


def test_it_is_a_command(node: BrokerNode, tmp_path: Path) -> None:
    """With the report of all jobs."""
    upsert(tmp_path / "t", 0, ["a"])
    words = [str(tmp_path / "t"), "--to", node.server.address, "--to-group", "G", "--to-topic", "changed", "--once"]
    result = CliRunner().invoke(changes.command, [*words, "--json"])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["summary"]["messages"] == 1
