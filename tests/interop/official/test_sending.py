"""All kinds of messages from each official client, and what a consumer of the same client gets of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.interop.official.clients import ClientError, OfficialClient, running
from tests.interop.official.world import TIMEOUT_S, Users, bodies
from tests.support import lacking
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

DELAY_MS = 4_000
PRECISION_MS = 1_500
"""Of a delivery: timed messages are due by the second, and clients round to one."""
FOR_EVER_MS = 3_600_000
HAS = "a newer release of it may have it: tests/interop/official/README.md"


def needs(client: OfficialClient, *what: str) -> None:
    """Skip the test for a client that cannot do it: README.md names these."""
    missing = [one for one in what if not client.language.has(one)]
    if missing:
        lacking.lacks(f"{' and no '.join(missing)} in the client for {client.language.name}", HAS)


def test_a_message_arrives_with_all_that_it_has(users: Users, client: OfficialClient) -> None:
    """Id, body, tag, keys and properties; it comes once, and once it is acknowledged nothing is left."""
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    producer = users.producer(topic)
    text = "naïve 信息 \N{ROCKET}"
    sent = users.send(producer, topic, text, tag="Red", keys=["k1", "k2"], properties={"size": "7", "von": "Köln"})

    consumer = users.simple(topic, group)
    (got,) = users.receive_all(consumer, 1)

    assert (got["id"], got["topic"], got["body"], got["tag"]) == (sent["message_id"], topic, text, "Red")
    assert got["keys"] == ["k1", "k2"]
    assert got["properties"] == {"size": "7", "von": "Köln"}
    assert got["attempt"] == 1
    assert not got["corrupted"]
    users.world.wait_until_consumed(group, topic)
    (found,) = users.world.admin.messages_by_key(topic, "k1")
    assert found.body.decode() == text


def test_large_messages_arrive_and_too_large_ones_are_refused(users: Users, client: OfficialClient) -> None:
    """Up to what the broker says that it takes: 64 KiB less than 4 MiB."""
    topic = users.world.topic(client)
    producer, consumer = users.producer(topic), users.simple(topic, users.world.group(client, topic))
    size = (4 << 20) - (64 << 10)
    if client.language.name == "go":
        size = (2 << 20) - (64 << 10)  # its own limit

    users.send(producer, topic, "a", pad=size - 1)
    refused = users.refusal("send", client=producer, topic=topic, body="b", pad=4 << 20)

    assert refused
    (got,) = users.receive_all(consumer, 1)
    assert got["size"] == size
    assert users.receive(consumer) == []


def test_messages_of_one_group_keep_their_order(users: Users, client: OfficialClient) -> None:
    """FIFO: a group's messages are in one queue, in the order of sending, whatever another group does."""
    topic = users.world.topic(client, "FIFO")
    group = users.world.group(client, topic, is_ordered=True)
    producer = users.producer(topic)
    for number in range(12):
        for name in "abc":
            users.send(producer, topic, f"{name}{number}", group=name)

    got = bodies(users.receive_all(users.simple(topic, group), 36))

    for name in "abc":
        assert [one for one in got if one[0] == name] == [f"{name}{number}" for number in range(12)]


def test_a_message_is_delivered_when_it_is_due(users: Users, client: OfficialClient) -> None:
    """Not before, and soon after."""
    topic = users.world.topic(client, "DELAY")
    producer, consumer = users.producer(topic), users.simple(topic, users.world.group(client, topic))
    began = time.monotonic()
    users.send(producer, topic, "later", delay_ms=DELAY_MS)

    (got,) = users.receive_all(consumer, 1)

    took_ms = 1000 * (time.monotonic() - began)
    assert got["body"] == "later"
    assert DELAY_MS - PRECISION_MS < took_ms < DELAY_MS + 4 * PRECISION_MS


def test_a_message_that_is_recalled_is_never_delivered(users: Users, client: OfficialClient) -> None:
    """Recalled once; of a second recall the client is told that there is nothing."""
    needs(client, "recall")
    topic = users.world.topic(client, "DELAY")
    producer, consumer = users.producer(topic), users.simple(topic, users.world.group(client, topic))
    first = users.send(producer, topic, "recalled", delay_ms=DELAY_MS)
    users.send(producer, topic, "kept", delay_ms=DELAY_MS)

    recalled = client.ask("recall", client=producer, topic=topic, handle=first["recall_handle"])

    assert recalled["message_id"] == first["message_id"]
    assert bodies(users.receive_all(consumer, 1)) == ["kept"]
    again = {"client": producer, "topic": topic, "handle": first["recall_handle"]}
    if client.language.name == "python":  # it tells no failure, but gives no id
        assert not client.ask("recall", **again)["message_id"]
    else:
        assert users.refusal("recall", **again)


def test_transactions_end_as_the_producer_says(users: Users, client: OfficialClient) -> None:
    """Committed ones are delivered, rolled back ones are not, and who left one open is asked."""
    topic = users.world.topic(client, "TRANSACTION")
    group = users.world.group(client, topic)
    producer = users.producer(topic, check="commit")
    committed = users.send(producer, topic, "committed", transaction="commit")
    users.send(producer, topic, "rolled back", transaction="rollback")
    users.send(producer, topic, "asked for", transaction="open")

    got = users.receive_all(users.simple(topic, group), 2)

    assert sorted(bodies(got)) == ["asked for", "committed"]
    assert committed["message_id"] in [one["id"] for one in got]
    (asked,) = client.wait_for("check", producer, lambda found: len(found) >= 1)
    assert asked["message"]["body"] == "asked for"


def test_another_producer_is_asked_about_a_transaction_of_one_that_died(
    users: Users, client: OfficialClient, tmp_path: Path
) -> None:
    """Killed between the two phases; what its successor says counts."""
    topic = users.world.topic(client, "TRANSACTION")
    group = users.world.group(client, topic)
    with running(client.language, tmp_path / "dies") as dies:
        before = Users(users.world, dies)
        left = before.producer(topic, check="unknown")
        before.send(left, topic, "left behind", transaction="open")
        dies.kill()

    successor = users.producer(topic, check="commit")

    client.wait_for("check", successor, lambda found: bool(found))
    assert bodies(users.receive_all(users.simple(topic, group), 1)) == ["left behind"]


def test_what_has_priority_is_delivered_first(users: Users, client: OfficialClient) -> None:
    """Of what waits."""
    needs(client, "priority")
    topic = users.world.topic(client, "PRIORITY")
    group = users.world.group(client, topic)
    producer = users.producer(topic)
    for number, priority in enumerate((1, 2, 1, 2)):  # 0 is none for the client in Node.js
        users.send(producer, topic, f"{priority}-{number}", priority=priority)

    got = bodies(users.receive_all(users.simple(topic, group), 4, max=1))

    assert [one[0] for one in got] == list("2211")


def test_a_topic_takes_its_own_type_of_messages(users: Users, client: OfficialClient) -> None:
    """The client learns which it takes, and which it does not; nothing is stored."""
    topic = users.world.topic(client, "NORMAL")
    producer = users.producer(topic)

    refused = users.refusal("send", client=producer, topic=topic, body="b", group="g")

    assert "type" in refused.lower()
    users.send(producer, topic, "c")
    wait_until(lambda: stored(users, topic) == 1, "only the normal one is there", TIMEOUT_S)


def stored(users: Users, topic: str) -> int:
    """How many messages there are."""
    return sum(one.max_offset for one in users.world.admin.queue_ranges(topic))


def test_a_topic_that_does_not_exist_is_told(users: Users, client: OfficialClient) -> None:
    """At the start or at the first send, as the client has it."""
    topic = f"none-{client.language.name}"

    with pytest.raises(ClientError, match=r"(?i)topic|route|service"):
        users.send(users.producer(topic), topic, "b")
