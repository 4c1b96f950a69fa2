"""The consumer: which messages of which queues it gives, and how it goes on when brokers fail."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import grpc
import pytest

from dledger.errors import ConfigError
from rocketstore.client.consumer import Consumer
from rocketstore.client.errors import MessageRefusedError, NotFoundError
from rocketstore.message.message import Message
from rocketstore.pb import broker_pb2 as pb
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.consuming import committed, consumer, drain, put


# --- messages --------------------------------------------------------------------------------------------------------
def test_every_message_of_every_queue_comes_in_order(brokers: FakeBrokers) -> None:
    """Nothing twice, nothing missing, also what is sent while it polls."""
    for queue_id in range(4):
        put(brokers, 50, queue_id)

    with consumer(brokers) as source:
        bodies = drain(source, 200)
        put(brokers, 1, 3, start=50)
        bodies += drain(source, 1)

    for queue_id in range(4):
        mine = [body for body in bodies if body.startswith(b"%d-" % queue_id)]
        assert mine == [b"%d-%d" % (queue_id, number) for number in range(50 + (queue_id == 3))]


def test_a_message_knows_its_place_and_properties(brokers: FakeBrokers) -> None:
    """All that was stored can be read from it."""
    brokers.put(Message("orders", b"body", 2, {"TAGS": "a", "KEYS": "k1 k2", "UNIQ_KEY": "U", "x": "y"}))

    with consumer(brokers) as source:
        (message,) = source.poll(timeout_s=5)

    assert (message.topic, message.queue_id, message.queue_offset, message.body) == ("orders", 2, 0, b"body")
    assert (message.tags, message.keys, message.unique_key) == ("a", ["k1", "k2"], "U")
    assert message.properties["x"] == "y"
    assert message.store_timestamp > 0
    assert message.message_id.startswith("7F000001")
    assert "orders" in repr(message)


def test_poll_gives_no_more_than_asked_for_and_nothing_after_its_time(brokers: FakeBrokers) -> None:
    """An empty list is no error."""
    put(brokers, 5)

    with consumer(brokers) as source:
        assert [len(source.poll(2, 5)) for _ in range(3)] == [2, 2, 1]
        assert source.poll(2, 0.05) == []


def test_iteration_waits_for_messages_until_closed(brokers: FakeBrokers) -> None:
    """Closed by another thread, it ends without an error."""
    put(brokers, 3)
    bodies: list[bytes] = []
    source = consumer(brokers)
    thread = threading.Thread(target=lambda: bodies.extend(message.body for message in source))
    thread.start()
    wait_until(lambda: len(bodies) == 3, "three messages")
    put(brokers, 1, start=3)
    wait_until(lambda: len(bodies) == 4, "the fourth")

    source.close()
    thread.join(5)

    assert bodies == [b"0-0", b"0-1", b"0-2", b"0-3"]


def test_only_the_tags_asked_for_come(brokers: FakeBrokers) -> None:
    """Also if the broker, which compares hashes, lets another one through; the position passes over the others."""
    for tags in ("a", "b", "c", "COLLIDES", "b", "c"):
        put(brokers, 1, tags=tags)

    with consumer(brokers, tags="a || b") as source:
        messages = [*source.poll(10, 5)]
        wait_until(lambda: not source.poll(10, 0) and source.positions()[0] == 6, "the end")

    assert [message.tags for message in messages] == ["a", "b", "b"]
    assert committed(brokers)[0] == 6


def test_tags_that_nobody_sends_move_the_offset_too(brokers: FakeBrokers) -> None:
    """NO_MATCHED_MESSAGE says how far the broker looked."""
    put(brokers, 20, tags="a")

    with consumer(brokers, tags="other") as source:
        wait_until(lambda: not source.poll(10, 0.01) and source.positions()[0] == 20, "the end")


def test_the_stock_is_bounded(brokers: FakeBrokers) -> None:
    """A consumer that does not poll does not pull the whole topic into memory."""
    put(brokers, 100)

    with consumer(brokers, queues=[0], pull_messages=10, stock_bytes_max=1) as source:
        source.poll(1, 5)
        pulled = sum(node.pulled[-1].offset for node in brokers.nodes if node.pulled)
        assert pulled <= 20
        assert len(drain(source, 99)) == 99


# --- assignment ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"queues": [3, 1, 3]}, [1, 3]),
        ({"instance": (0, 3)}, [0, 3]),
        ({"instance": (2, 3)}, [2]),
        ({"instance": (5, 6)}, []),
    ],
)
def test_which_queues_are_assigned(brokers: FakeBrokers, settings: dict[str, object], expected: list[int]) -> None:
    """All, a list, or a static share."""
    with consumer(brokers, **settings) as source:
        assert sorted(source.positions()) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"instance": (3, 3)},
        {"instance": (0, 1), "queues": [0]},
        {"start": "middle"},
        {"timeout_s": 0},
        {"pull_wait_ms": -1},
    ],
)
def test_impossible_settings_are_refused(brokers: FakeBrokers, settings: dict[str, object]) -> None:
    """Before anything is asked."""
    with pytest.raises(ConfigError):
        consumer(brokers, **settings)


def test_topics_and_queues_that_cannot_be_read(brokers: FakeBrokers) -> None:
    """Typed errors at the first poll."""
    brokers.add_topic("write-only", permission=2)

    with pytest.raises(NotFoundError, match="none"), Consumer(brokers.addresses, group="g", topic="none") as source:
        source.poll()
    with pytest.raises(MessageRefusedError), Consumer(brokers.addresses, group="g", topic="write-only") as source:
        source.poll()
    with pytest.raises(NotFoundError, match="9"), consumer(brokers, queues=[9]) as source:
        source.poll()


# --- failover --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kill", [True, False])
def test_reading_goes_on_at_the_new_master(brokers: FakeBrokers, *, kill: bool) -> None:
    """After the old one died, or is a slave that still answers; no message twice or missing."""
    put(brokers, 100)
    with consumer(brokers, queues=[0], pull_wait_ms=200, pull_messages=10) as source:
        bodies = drain(source, 50)
        if kill:
            brokers.nodes[0].stop()
        brokers.elect(1)
        put(brokers, 20, start=100)
        bodies += drain(source, 70)
        source.commit()
        wait_until(lambda: bool(brokers.nodes[1].pulled), "a pull at the new master")

    assert bodies == [b"0-%d" % number for number in range(120)]
    assert committed(brokers)[0] == 120


def test_any_living_broker_is_read_while_there_is_no_master(brokers: FakeBrokers) -> None:
    """What a slave has is committed."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], pull_messages=2, stock_bytes_max=1, auto_commit_s=None) as source:
        bodies = drain(source, 2)
        brokers.nodes[0].stop()
        brokers.elect(None)
        bodies += drain(source, 8)
        brokers.elect(2)

    assert bodies == [b"0-%d" % number for number in range(10)]
    assert committed(brokers)[0] == 10


def test_a_silent_broker_does_not_stop_a_consumer(brokers: FakeBrokers) -> None:
    """An answer that is overdue ends the session; another broker gives the messages."""
    put(brokers, 3)
    silent = threading.Event()
    node = brokers.nodes[0]
    pull: Callable[..., pb.PullResponse] = node._pull

    def hang(*request: object) -> pb.PullResponse:
        silent.wait(20)
        return pull(*request)

    node._pull = hang  # type: ignore[method-assign,assignment]  # the fault
    with consumer(brokers, queues=[0], pull_wait_ms=0, timeout_s=0.5) as source:
        source.positions()
        brokers.elect(1)
        assert len(drain(source, 3)) == 3
        silent.set()


def test_a_topic_that_is_deleted_meanwhile_is_told(brokers: FakeBrokers, caplog: pytest.LogCaptureFixture) -> None:
    """By the master's word; a slave's is not enough. It may be made anew: then it is read on."""
    put(brokers, 3)
    not_found = (grpc.StatusCode.NOT_FOUND, "no topic", dict[str, str]())
    with consumer(brokers, queues=[0], pull_messages=1, stock_bytes_max=1) as source:
        drain(source, 1)
        brokers.nodes[0].fail_calls["PullStream"] = deque([not_found])
        assert drain(source, 2) == [b"0-1", b"0-2"]
    assert [one.message for one in caplog.records if "no topic" in one.message] == [
        "queue 0 of orders: no topic; waiting"
    ]


def test_a_failing_store_is_logged_once_and_asked_again(brokers: FakeBrokers, caplog: pytest.LogCaptureFixture) -> None:
    """It may recover; the log says why nothing comes."""
    put(brokers, 3)
    brokers.nodes[0].fail_calls["PullStream"] = deque([(grpc.StatusCode.INTERNAL, "disk", dict[str, str]())] * 3)

    with consumer(brokers, queues=[0]) as source:
        assert len(drain(source, 3)) == 3

    assert sum("disk" in record.message for record in caplog.records) == 1


def test_the_lag_is_what_is_still_to_come(brokers: FakeBrokers) -> None:
    """As of the last answer; unknown before."""
    put(brokers, 10)

    with consumer(brokers, queues=[0]) as source:
        drain(source, 4)
        assert source.lag() == {0: 6}
