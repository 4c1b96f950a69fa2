"""``dledger dlq`` and ``dledger transaction`` at whole brokers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketstore.client.blocking import Admin
from rocketstore.message.message import (
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION,
    Message,
)
from rocketstore.remoting.topics import MessageQueue
from rocketstore.state.changes import TopicConfig
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, PutResult
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.commands.brokers_here import Here, one_broker

DEAD = "%DLQ%readers"
RETRY = "%RETRY%readers"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with one_broker(tmp_path) as found:
        yield found


def bury(here: Here, *keys: str) -> None:
    """Make messages with these keys dead letters of the group ``readers``."""
    ((name, server),) = here.brokers.items()
    here.run("topic", "create", "orders", "-q", "1")
    ids = here.put(name, "orders", *(Message("orders", f"body of {key}".encode(), keys=key) for key in keys))
    with Admin(server.address, timeout_s=30) as admin:
        for one in ids:
            admin.send_back("readers", "orders", int(one[-16:], 16), delay_level=-1, retries_max=0)
    wait_until(lambda: server.store.max_offset(DEAD, 0) == len(keys), "they are dead")


def test_dead_letters_are_listed_and_chosen(here: Here) -> None:
    """By group with their numbers; of one group by offset, key and time; and a group without any."""
    assert here.rows("dlq", "list") == []
    bury(here, "k1", "k2", "k3")
    assert here.rows("dlq", "list") == [["readers", "3"]]
    assert json.loads(here.run("dlq", "list", "--json").stdout) == [{"group": "readers", "dead_letters": 3}]
    assert [row[0] for row in here.rows("dlq", "list", "-g", "readers")] == ["0", "1", "2"]
    shown = here.run("dlq", "list", "-g", "readers", "--key", "k2", "--json").stdout
    assert json.loads(shown)["body"] == "body of k2"
    for words, offsets in (
        (("--offset", "2", "--offset", "0", "--offset", "9"), ["0", "2"]),
        (("--max", "1"), ["0"]),
        (("--until", "1h"), []),
        (("--from", "1h"), ["0", "1", "2"]),
    ):
        assert [row[0] for row in here.rows("dlq", "list", "-g", "readers", *words)] == offsets
    assert here.run("dlq", "list", "-g", "nobody").exit_code == 1


def test_dead_letters_are_sent_again_once_each_and_stay(here: Here) -> None:
    """Only those that are meant, after a question, each as a copy for its group."""
    ((name, server),) = here.brokers.items()
    bury(here, "k1", "k2", "k3")
    two = ("dlq", "resend", "-g", "readers", "--offset", "0", "--offset", "2")
    assert "2 dead letters" in here.run(*two, "--dry-run").stdout
    assert here.run("dlq", "resend", "-g", "readers", stdin=b"n\n").exit_code == 1
    assert server.store.max_offset("SCHEDULE_TOPIC_XXXX", 0) == 0
    sent = here.run(*two, "--yes")
    assert (sent.exit_code, "2 dead letters of readers" in sent.stdout) == (0, True), sent.output
    wait_until(lambda: server.store.max_offset(RETRY, 0) == 2, "both copies are delivered")
    with Admin(server.address, timeout_s=30) as admin:
        bodies = [one.body for one in admin.messages(MessageQueue(RETRY, name, 0), 0)[0]]
    assert sorted(bodies) == [b"body of k1", b"body of k3"]
    assert server.store.max_offset(DEAD, 0) == 3


def test_dead_letters_are_exported_and_no_file_is_overwritten(here: Here, tmp_path: Path) -> None:
    """One JSON object per line, with properties and body."""
    bury(here, "k1", "k2")
    file = tmp_path / "letters.jsonl"
    assert here.run("dlq", "export", "-g", "readers", "-o", str(file)).exit_code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["keys"], one["body"]) for one in lines] == [(["k1"], "body of k1"), (["k2"], "body of k2")]
    assert here.run("dlq", "export", "-g", "readers", "-o", str(file)).exit_code == 2
    assert here.run("dlq", "export", "-g", "readers", "--key", "k2").stdout.count("\n") == 1


def give_up(here: Here, count: int) -> None:
    """Store messages as those of transactions that were given up."""
    (server,) = here.brokers.values()
    here.run("topic", "create", "orders", "-q", "1")
    results: list[PutResult] = []
    server.state.put_topic(TopicConfig(CHECKED_TOO_OFTEN_TOPIC, 1, 1), results.append)
    wait_until(lambda: bool(results), "the topic is made")
    told = {PROPERTY_REAL_TOPIC: "orders", PROPERTY_REAL_QUEUE_ID: "0", PROPERTY_PRODUCER_GROUP: "payers"}
    told |= {PROPERTY_TRANSACTION: "true"}
    messages = [Message(CHECKED_TOO_OFTEN_TOPIC, b"half", properties=dict(told)) for _ in range(count)]
    server.store.submit(messages, results.extend)
    wait_until(lambda: server.store.max_offset(CHECKED_TOO_OFTEN_TOPIC, 0) == count, "they are there")


def test_given_up_transactions_are_listed_resumed_and_exported(here: Here) -> None:
    """All, or by id; each is resumed once: those that were before are told and left out."""
    (server,) = here.brokers.values()
    give_up(here, 3)
    rows = here.rows("transaction", "list")
    assert [(row[0], row[3], row[4]) for row in rows] == [(str(one), "orders", "payers") for one in range(3)]
    assert here.run("transaction", "resume", rows[1][5]).exit_code == 0
    assert here.run("transaction", "resume").exit_code == 2
    everything = here.run("transaction", "resume", "--all", "--yes")
    assert (everything.exit_code, "2 of 3" in everything.stdout) == (0, True), everything.output
    wait_until(lambda: server.store.max_offset("RMQ_SYS_TRANS_HALF_TOPIC", 0) == 3, "each is one again")
    exported = here.run("transaction", "export", "--offset", "1").stdout
    assert json.loads(exported)["properties"][PROPERTY_PRODUCER_GROUP] == "payers"
