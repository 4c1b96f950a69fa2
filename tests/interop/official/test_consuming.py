"""Simple and push consumers of each official client: acknowledgements, retries, dead letters, order, filters."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from rocketstore.client import NotFoundError
from tests.interop.official.clients import ClientError, OfficialClient, running
from tests.interop.official.test_sending import needs
from tests.interop.official.world import TIMEOUT_S, Users, bodies, delivered
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

INVISIBLE_MS = 10_000
"""The least that the broker grants."""


def test_a_message_comes_again_when_its_time_is_up(users: Users, client: OfficialClient) -> None:
    """Not within it; then as the second attempt. The first one's acknowledgement is refused, the second one's taken."""
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    consumer = users.simple(topic, group, await_s=5)
    users.send(users.producer(topic), topic, "once more")
    began = time.monotonic()

    (first,) = users.receive_all(consumer, 1, ack=False, invisible_ms=INVISIBLE_MS)
    (second,) = users.receive_all(consumer, 1, ack=False, invisible_ms=60_000)

    assert time.monotonic() - began > 0.95 * INVISIBLE_MS / 1000
    assert (first["id"], first["attempt"]) == (second["id"], 1)
    assert second["attempt"] == 2
    with nullcontext() if client.language.name == "go" else pytest.raises(ClientError):  # Go's tells no refusal
        client.ask("ack", client=consumer, message=first["n"])
    client.ask("ack", client=consumer, message=second["n"])
    users.world.wait_until_consumed(group, topic)


def test_a_consumer_may_ask_for_more_or_less_time(users: Users, client: OfficialClient) -> None:
    """A message given back comes soon, one whose time is lengthened later; its newest handle counts."""
    needs(client, "change")
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    consumer = users.simple(topic, group, await_s=5)
    producer = users.producer(topic)
    users.send(producer, topic, "back")
    (back,) = users.receive_all(consumer, 1, ack=False, invisible_ms=60_000)
    began = time.monotonic()
    client.ask("change", client=consumer, message=back["n"], ms=1_000)
    (again,) = users.receive_all(consumer, 1)
    assert time.monotonic() - began < 30
    assert (again["body"], again["attempt"]) == ("back", 2)

    users.send(producer, topic, "longer")
    (longer,) = users.receive_all(consumer, 1, ack=False, invisible_ms=INVISIBLE_MS)
    client.ask("change", client=consumer, message=longer["n"], ms=60_000)
    began = time.monotonic()
    while time.monotonic() - began < 1.2 * INVISIBLE_MS / 1000:
        assert users.receive(consumer) == []
    client.ask("ack", client=consumer, message=longer["n"])
    users.world.wait_until_consumed(group, topic)


@pytest.mark.parametrize("sql", [False, True])
def test_a_consumer_gets_what_its_expression_selects(users: Users, client: OfficialClient, sql: bool) -> None:
    """By tags or by SQL92; the others count as consumed."""
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    producer = users.producer(topic)
    for number in range(20):
        users.send(producer, topic, str(number), tag="odd" if number % 2 else "even", properties={"n": str(number)})

    expression = "n >= 15 AND (TAGS IS NOT NULL) AND n <> 16" if sql else "odd||third"
    expected = [15, 17, 18, 19] if sql else list(range(1, 20, 2))
    got = users.receive_all(users.simple(topic, group, expression, sql=sql), len(expected))

    assert sorted(map(int, bodies(got))) == expected
    users.world.wait_until_consumed(group, topic)


def test_an_expression_that_is_wrong_is_told(users: Users, client: OfficialClient) -> None:
    """Instead of messages."""
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    users.send(users.producer(topic), topic, "a")
    try:
        consumer = users.simple(topic, group, "n >", sql=True)
        told = users.refusal("receive", client=consumer)
    except ClientError as error:
        told = str(error)

    assert "xpression" in told or "filter" in told.lower() or "40010" in told


def test_push_consumers_share_what_there_is(users: Users, client: OfficialClient) -> None:
    """Two of one group get everything once, each of them something, though there is one queue; nothing is left."""
    needs(client, "push")
    topic = users.world.topic(client, queues=1)
    group = users.world.group(client, topic)
    consumers = [users.push(topic, group, hold_ms=20) for _ in range(2)]
    producer = users.producer(topic)
    sent = [str(number) for number in range(300)]
    for body in sent:
        users.send(producer, topic, body)

    def of_both() -> list[str]:
        return [one for name in consumers for one in bodies(client.events("message", name))]

    wait_until(lambda: len(of_both()) >= len(sent), "all are delivered", TIMEOUT_S)
    users.world.wait_until_consumed(group, topic)
    assert sorted(of_both()) == sorted(sent)
    assert all(client.events("message", name) for name in consumers)
    for name in consumers:
        client.ask("close", name=name)


def test_a_message_that_fails_comes_again_and_then_is_a_dead_letter(users: Users, client: OfficialClient) -> None:
    """A failure is tried again, as often as the group says; the others are not held up."""
    needs(client, "push")
    topic = users.world.topic(client)
    group = users.world.group(client, topic, retries_max=2)
    name = users.push(topic, group, fail={"twice": 1, "never": -1})
    producer = users.producer(topic)
    for body in ("twice", "never", "at once"):
        users.send(producer, topic, body, keys=[body.replace(" ", "-")])

    dead = f"%DLQ%{group}"
    wait_until(lambda: _is_there(users, dead, "never"), "the dead letter", TIMEOUT_S)
    told = client.events("message", name)

    attempts = {
        body: [one["message"]["attempt"] for one in told if one["message"]["body"] == body] for body in bodies(told)
    }
    assert attempts == {"twice": [1, 2], "never": [1, 2, 3], "at once": [1]}
    users.world.wait_until_consumed(group, topic)
    client.ask("close", name=name)


def _is_there(users: Users, topic: str, body: str) -> bool:
    try:
        queues = [one.queue for one in users.world.admin.queue_ranges(topic)]
    except NotFoundError:
        return False
    return any(body.encode() == one.body for queue in queues for one in users.world.admin.messages(queue, 0)[0])


def test_push_consumers_keep_the_order_of_a_group(users: Users, client: OfficialClient) -> None:
    """FIFO, with two consumers: a message that fails holds up its group until it succeeds or is given up."""
    needs(client, "push")
    topic = users.world.topic(client, "FIFO")
    group = users.world.group(client, topic, is_ordered=True, retries_max=2)
    names = [users.push(topic, group, fail={"a3": 1, "b2": -1}) for _ in range(2)]
    producer = users.producer(topic)
    for number in range(8):
        for message_group in "ab":
            users.send(producer, topic, f"{message_group}{number}", group=message_group)

    def succeeded() -> list[str]:
        told = delivered([(client, name) for name in names])
        return [one["message"]["body"] for one in told if not one["failed"]]

    wait_until(lambda: len(succeeded()) >= 15, "all but one are done", TIMEOUT_S)
    for message_group, left_out in (("a", None), ("b", 2)):
        got = [one for one in succeeded() if one[0] == message_group]
        assert got == [f"{message_group}{number}" for number in range(8) if number != left_out]
    wait_until(lambda: _is_there(users, f"%DLQ%{group}", "b2"), "the dead letter", TIMEOUT_S)
    for name in names:
        client.ask("close", name=name)


def test_a_message_that_takes_long_is_not_given_to_another(users: Users, client: OfficialClient) -> None:
    """The broker renews the time of what a living push consumer works on."""
    needs(client, "push")
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    names = [users.push(topic, group, hold_ms=70_000) for _ in range(2)]
    users.send(users.producer(topic), topic, "slow")

    users.world.wait_until_consumed(group, topic)

    assert [one for name in names for one in bodies(client.events("message", name))] == ["slow"]
    for name in names:
        client.ask("close", name=name)


def test_what_a_dead_consumer_held_is_given_to_another(users: Users, client: OfficialClient, tmp_path: Path) -> None:
    """Killed with messages in hand, before it acknowledged them."""
    needs(client, "push")
    topic = users.world.topic(client)
    group = users.world.group(client, topic)
    producer = users.producer(topic)
    with running(client.language, tmp_path / "dies") as dies:
        before = Users(users.world, dies)
        name = before.push(topic, group, hold_ms=600_000)
        for number in range(20):
            users.send(producer, topic, str(number))
        dies.wait_for("message", name, lambda found: len(found) >= 4)
        dies.kill()

    successor = users.push(topic, group)

    client.wait_for("message", successor, lambda found: len(set(bodies(found))) == 20, 2 * TIMEOUT_S)
    users.world.wait_until_consumed(group, topic)
    client.ask("close", name=successor)
