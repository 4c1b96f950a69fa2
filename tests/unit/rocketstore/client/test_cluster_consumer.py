"""``ClusterConsumer`` against two groups of fake brokers behind a real name server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import ConfigError, UnavailableError
from rocketstore.client.cluster_consumer import ClusterConsumer
from rocketstore.client.errors import MessageRefusedError, NotFoundError
from rocketstore.message.message import Message
from tests.support.fake_broker import FakeBrokers, fake_brokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.cluster_known import TOPIC, TwoGroups, two_groups

PATIENCE_S = 60


@pytest.fixture
def known(tmp_path: Path) -> Iterator[TwoGroups]:
    with two_groups(tmp_path) as found:
        yield found


def put(brokers: FakeBrokers, *bodies: bytes, queue_id: int = 0) -> None:
    for body in bodies:
        brokers.put(Message(TOPIC, body, queue_id))


def read(consumer: ClusterConsumer, count: int) -> set[bytes]:
    """This many messages."""
    found: list[bytes] = []

    def is_done() -> bool:
        found.extend(one.body for one in consumer.poll(1024, 0.2))
        return len(found) >= count

    wait_until(is_done, f"{count} messages", PATIENCE_S, poll_s=0)
    assert len(found) == count
    return set(found)


def committed(brokers: FakeBrokers) -> dict[int, int]:
    with brokers.changed:
        return {queue_id: offset for (group, _, queue_id), offset in brokers.offsets.items() if group == "g"}


def test_messages_of_all_groups_are_read_once(known: TwoGroups) -> None:
    """And committed to the group that they came from."""
    put(known.a, b"a0", b"a1")
    put(known.a, b"a2", queue_id=1)
    put(known.b, b"b0")
    with ClusterConsumer(known.server, group="g", topic=TOPIC, start="first") as consumer:
        assert read(consumer, 4) == {b"a0", b"a1", b"a2", b"b0"}
        assert consumer.positions() == {("a", 0): 2, ("a", 1): 1, ("b", 0): 1}
        wait_until(lambda: set(consumer.lag().values()) == {0}, "nothing is left", PATIENCE_S)
        consumer.commit()
        assert (committed(known.a), committed(known.b)) == ({0: 2, 1: 1}, {0: 1})
        put(known.b, b"b1")
        assert read(consumer, 1) == {b"b1"}
        assert consumer.skipped == 0

    assert committed(known.b) == {0: 2}
    with ClusterConsumer(known.server, group="g", topic=TOPIC, start="first") as consumer:
        assert consumer.poll(timeout_s=0.3) == []


def test_offsets_are_committed_in_the_background(known: TwoGroups) -> None:
    """Only those of messages that a later poll has shown to be done."""
    put(known.a, b"a0")
    with ClusterConsumer(known.server, group="g", topic=TOPIC, start="first", auto_commit_s=0.1) as consumer:
        read(consumer, 1)
        consumer.poll(timeout_s=0)
        wait_until(lambda: committed(known.a).get(0) == 1, "committed", PATIENCE_S)


def test_what_is_not_done_is_not_committed(known: TwoGroups) -> None:
    """As by ``Consumer``: an error in the block leaves the last messages to the next consumer."""
    put(known.b, b"b0")
    consumer = ClusterConsumer(known.server, group="g", topic=TOPIC, start="first")
    read(consumer, 1)
    consumer.__exit__(KeyError, KeyError(), None)

    assert committed(known.b) == {0: 0}


def test_a_dead_group_delays_no_other(known: TwoGroups, caplog: pytest.LogCaptureFixture) -> None:
    """And is read as soon as it is there, however often that has failed."""
    put(known.a, b"a0")
    put(known.b, b"b0")
    known.a.nodes[0].stop()
    with ClusterConsumer(known.server, group="g", topic=TOPIC, start="first", timeout_s=1) as consumer:
        assert read(consumer, 1) == {b"b0"}
        assert -1 in consumer.lag().values()
        wait_until(lambda: "cannot read from a" in caplog.text, "the first attempt is over", PATIENCE_S)
        known.a.nodes[0].start()
        assert read(consumer, 1) == {b"a0"}


def test_a_commit_that_fails_in_one_group_is_made_in_the_others(known: TwoGroups) -> None:
    """And the failure is told."""
    put(known.a, b"a0")
    put(known.b, b"b0")
    consumer = ClusterConsumer(known.server, group="g", topic=TOPIC, start="first", timeout_s=1, auto_commit_s=None)
    try:
        assert read(consumer, 2) == {b"a0", b"b0"}
        known.a.nodes[0].stop()
        with pytest.raises(UnavailableError):
            consumer.commit()
        assert committed(known.b) == {0: 1}
    finally:
        with pytest.raises(UnavailableError):
            consumer.close()


def test_closing_does_not_wait_for_the_dead(known: TwoGroups) -> None:
    """What was never read needs no commit."""
    known.a.nodes[0].stop()
    put(known.b, b"b0")
    with ClusterConsumer(known.server, group="g", topic=TOPIC, start="first", timeout_s=20) as consumer:
        assert read(consumer, 1) == {b"b0"}

    assert committed(known.b) == {0: 1}


def test_further_groups_are_read_from_the_start(known: TwoGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the topic later, and messages before anybody looks."""
    monkeypatch.setattr("rocketstore.client.cluster_consumer.ROUTE_INTERVAL_S", 0.05)
    monkeypatch.setattr("rocketstore.client.routes.REFRESH_S", 0.05)
    with (
        fake_brokers(1) as new,
        ClusterConsumer(known.server, group="g", topic=TOPIC, start="last") as consumer,
    ):
        consumer.positions()
        new.add_topic(TOPIC, 1)
        put(new, b"n0")
        known.caller.register(0, new.addresses[0], name="new", topics=(TOPIC,), queues=1)

        assert read(consumer, 1) == {b"n0"}


def test_positions_can_be_changed(known: TwoGroups) -> None:
    """Of one queue, or of all."""
    put(known.a, b"a0", b"a1")
    put(known.b, b"b0")
    with ClusterConsumer(known.server, group="g", topic=TOPIC, start="first") as consumer:
        assert len(read(consumer, 3)) == 3
        consumer.seek("a", 0, 1)
        assert read(consumer, 1) == {b"a1"}
        consumer.seek_to("first")
        assert read(consumer, 3) == {b"a0", b"a1", b"b0"}
        with pytest.raises(NotFoundError):
            consumer.seek("c", 0, 0)


def test_instances_share_the_queues_of_each_group(known: TwoGroups) -> None:
    """Every n-th queue of each; a queue number alone would name several."""
    put(known.a, b"a0")
    put(known.a, b"a1", queue_id=1)
    put(known.b, b"b0")
    found = []
    for number, count in ((0, 2), (1, 1)):
        settings = {"start": "first", "instance": (number, 2)}
        with ClusterConsumer(known.server, group="g", topic=TOPIC, **settings) as consumer:  # type: ignore[arg-type]
            found.append(read(consumer, count))

    assert found == [{b"a0", b"b0"}, {b"a1"}]
    with pytest.raises(ConfigError):
        ClusterConsumer(known.server, group="g", topic=TOPIC, queues=[0])


def test_iteration_ends_with_the_consumer(known: TwoGroups) -> None:
    """Another thread may close it."""
    put(known.a, b"a0")
    consumer = ClusterConsumer(known.server, group="g", topic=TOPIC, start="first")
    bodies = []
    for one in consumer:
        bodies.append(one.body)
        closer = threading.Thread(target=consumer.close)
        closer.start()
        closer.join()
    consumer.close()

    assert bodies == [b"a0"]
    for call in (consumer.poll, consumer.positions, consumer.lag):
        with pytest.raises(UnavailableError):
            call()


def test_what_cannot_be_read_is_an_error(known: TwoGroups) -> None:
    """An unknown topic, one that no group has, dead groups."""
    known.caller.register(0, known.a.addresses[0], name="a", topics=(TOPIC, "none"), queues=0, version=2)
    with ClusterConsumer(known.server, group="g", topic="nope") as consumer, pytest.raises(NotFoundError):
        consumer.poll()
    with ClusterConsumer(known.server, group="g", topic="none") as consumer, pytest.raises(MessageRefusedError):
        consumer.poll()
    known.a.nodes[0].stop()
    known.b.nodes[0].stop()
    with ClusterConsumer(known.server, group="g", topic=TOPIC, timeout_s=0.5) as consumer:
        for _ in range(2):
            with pytest.raises(UnavailableError):
                consumer.poll()
