"""Messages that wait for a time of their own, in the console: found, asked about, recalled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from dledger_cli.targets import CommandSecurity
from rocketstore.client import Message
from tests.unit.dledger_cli.console.group_pages import Broker, GroupPage, group_page_at, guarded_broker, plain_broker
from tests.unit.dledger_cli.console.support import request

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with plain_broker(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture
def group_page(broker: Broker) -> Iterator[GroupPage]:
    with group_page_at(broker) as made:
        yield made


def later(group_page: GroupPage, topic: str, number: int, due_ms: int) -> str:
    """Send one; returns its handle."""
    message = Message(topic, b"%d" % number, tags="t", keys=[f"{topic}-{number}"], deliver_at=due_ms)
    return group_page.broker.producer.send(message).recall_handle


def listed(group_page: GroupPage, query: str = "from_offset=0&from_ms=0") -> list[str]:
    return [one["keys"] for one in group_page.get(f"timed?{query}")["messages"]]


def test_waiting_messages_are_found_by_topic_key_id_and_time(group_page: GroupPage) -> None:
    """The next first, with all that the page shows; pages follow one another."""
    base_ms = int(time.time() * 1000) + HOUR_MS
    for topic in ("found", "others"):
        group_page.topic(topic, 1)
    handles = [later(group_page, "found", number, base_ms + number * HOUR_MS) for number in range(25)]
    later(group_page, "others", 0, base_ms + 1)

    first = group_page.get("timed?from_offset=0&from_ms=0")
    assert (first["open"], first["late"], len(first["messages"])) == (26, 0, 20)
    one = first["messages"][0]
    assert {name: one[name] for name in ("topic", "queue", "tags", "keys", "due_ms", "recall_handle")} == {
        "topic": "found", "queue": 0, "tags": "t", "keys": "found-0", "due_ms": base_ms, "recall_handle": handles[0],
    }  # fmt: skip
    assert first["next_due_ms"] == base_ms // 1000 * 1000
    assert listed(group_page, f"from_offset={first['next_offset']}&from_ms={first['next_ms']}") == [
        f"found-{number}" for number in range(19, 25)
    ]
    assert listed(group_page, "from_offset=0&from_ms=0&topic=others") == ["others-0"]
    assert listed(group_page, "from_offset=0&from_ms=0&key=found-7") == ["found-7"]
    assert listed(group_page, f"from_offset=0&from_ms=0&key={one['message_id']}&topic=found") == ["found-0"]
    assert listed(group_page, f"from_offset=0&from_ms={base_ms + 23 * HOUR_MS}") == ["found-23", "found-24"]
    assert listed(group_page, "from_offset=0&from_ms=0&key=absent") == []


@pytest.mark.parametrize(
    "query", ["", "from_offset=0&from_ms=-1", "from_offset=0&from_ms=x", f"from_offset=0&from_ms=0&key={'k' * 1025}"]
)
def test_a_wrong_question_is_refused(group_page: GroupPage, query: str) -> None:
    reply = request(f"{group_page.console.url}api/timed?{query}")

    assert reply.status == 400


def test_a_message_is_recalled_after_a_question(group_page: GroupPage) -> None:
    """Which names it; it is gone from the list, an event says so, and a second time there is nothing to recall."""
    group_page.topic("gone", 1)
    handle = later(group_page, "gone", 0, int(time.time() + 7200) * 1000)

    asked = group_page.do("recall", handle=handle)

    question: Any = asked.json()["confirm"]
    assert (question["title"], question["yes"]) == ("Recall this message?", "Recall the message")
    assert "for gone, due 20" in question["text"]
    assert listed(group_page, "from_offset=0&from_ms=0&topic=gone") == ["gone-0"]
    done = group_page.do("recall", handle=handle, confirmed=True)
    told = str(done.json()["message"])
    assert told.endswith("for gone: it will not be delivered")
    assert ("action", told) in group_page.events()
    assert listed(group_page, "from_offset=0&from_ms=0&topic=gone") == []
    again = group_page.do("recall", handle=handle, confirmed=True)
    assert again.status == 404
    assert "there is no such timed message any more" in str(again.json()["error"])


@pytest.mark.parametrize("handle", ["", "nonsense", "x" * 1025, 7])
def test_what_is_no_handle_recalls_nothing(group_page: GroupPage, handle: object) -> None:
    reply = group_page.do("recall", handle=handle, confirmed=True)

    assert (reply.status, reply.json()["field"]) == (400, "handle")


def test_the_consoles_account_counts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An administrator lists; who may not send to a topic recalls nothing of it."""
    with guarded_broker(tmp_path_factory.mktemp("guarded")) as broker:
        due_ms = int(time.time() + 7200) * 1000
        sent = broker.producer.send(Message("T", b"", deliver_at=due_ms))
        alice = CommandSecurity(access_key="alice", secret_key="alice-secret")
        with group_page_at(broker, alice) as group_page:
            refused = request(f"{group_page.console.url}api/timed?from_offset=0&from_ms=0")
            recalled = group_page.do("recall", handle=sent.recall_handle, confirmed=True)
        assert (refused.status, recalled.status) == (403, 403)
        assert broker.admin.timed().open == 1
