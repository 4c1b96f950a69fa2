"""The consumer: where it starts, what it commits, how it goes on when brokers and offsets change."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client import Consumer, ConsumerOptions, fetcher
from rocketstore.client.errors import (
    BadAnswerError,
    MessageRefusedError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from rocketstore.client.group_offsets import Beginnings
from rocketstore.message.message import Message
from rocketstore.message.record import HEAD_V4_BYTES, CorruptRecordError
from rocketstore.pb import broker_pb2 as pb
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until


def put(brokers: FakeBrokers, count: int, queue_id: int = 0, *, tags: str = "", start: int = 0, at_ms: int = 0) -> None:
    """Numbered messages; stored a second apart from ``at_ms`` on."""
    for number in range(start, start + count):
        properties = {"TAGS": tags} if tags else {}
        stored = at_ms + 1000 * number if at_ms else 0
        brokers.put(Message("orders", b"%d-%d" % (queue_id, number), queue_id, properties, store_timestamp=stored))


def consumer(brokers: FakeBrokers, **settings: object) -> Consumer:
    """Of group ``billing``, from the first message on, unless ``settings`` say otherwise."""
    options = ConsumerOptions(**{"start": "first", **settings})  # type: ignore[arg-type]  # as each test says
    return Consumer(brokers.addresses, group="billing", topic="orders", options=options)


def drain(source: Consumer, count: int) -> list[bytes]:
    """The bodies of the next messages, exactly as many."""
    bodies: list[bytes] = []

    def enough() -> bool:
        bodies.extend(message.body for message in source.poll(count - len(bodies), 0.05))
        return len(bodies) >= count

    wait_until(enough, f"{count} messages")
    return bodies


def committed(brokers: FakeBrokers) -> dict[int, int]:
    return {queue_id: offset for (_, _, queue_id), offset in brokers.offsets.items()}


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


# --- where it starts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"), [("first", 2), ("last", 10), (1_700_000_004_500, 5), (0, 0), (1_800_000_000_000, 10)]
)
def test_where_a_new_group_starts(brokers: FakeBrokers, start: object, expected: int) -> None:
    """At what is left of the queue, behind it, or at a time."""
    put(brokers, 10, at_ms=1_700_000_000_000)
    brokers.queues["orders", 0].base = 2

    with consumer(brokers, start=start) as source:
        assert source.positions() == {0: expected, 1: 0, 2: 0, 3: 0}


def test_a_group_goes_on_where_it_was(brokers: FakeBrokers) -> None:
    """A committed offset, also 0, wins over ``start``."""
    put(brokers, 10)
    put(brokers, 10, 1)
    brokers.offsets.update({("billing", "orders", 0): 7, ("billing", "orders", 1): 0})

    with consumer(brokers, start="last") as source:
        assert source.positions() == {0: 7, 1: 0, 2: 0, 3: 0}
        assert source.poll(1, 5)


def test_the_start_of_a_new_group_is_committed(brokers: FakeBrokers) -> None:
    """Else what comes between two starts at the end would be lost."""
    put(brokers, 10)
    with consumer(brokers, start="last") as source:
        assert source.poll(1, 0.01) == []
    put(brokers, 1, start=10)

    with consumer(brokers, start="last") as source:
        assert drain(source, 1) == [b"0-10"]


def test_where_a_new_group_begins_is_stored_before_anything_is_read(brokers: FakeBrokers) -> None:
    """In all queues, also those of its other members: what is sent while all of them are dead is not missed."""
    put(brokers, 10)
    killed = consumer(brokers, start="last", instance=(0, 2), auto_commit_s=None)
    assert killed.positions() == {0: 10, 2: 0}
    assert committed(brokers) == {0: 10, 1: 0, 2: 0, 3: 0}
    put(brokers, 1, start=10)
    put(brokers, 1, 1)

    with consumer(brokers, start="last") as source:
        assert sorted(drain(source, 2)) == [b"0-10", b"1-0"]
    killed.close()


def test_the_beginning_of_a_group_does_not_undo_what_a_faster_member_stored(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began between our look and our commit."""
    put(brokers, 10)
    survey = Beginnings.survey

    def late(self: Beginnings, *where: Any) -> Any:  # noqa: ANN401  # passed through
        found = survey(self, *where)
        brokers.offsets.update({("billing", "orders", queue_id): 4 if not queue_id else 0 for queue_id in range(4)})
        return found

    monkeypatch.setattr(Beginnings, "survey", late)
    with consumer(brokers, start="last") as source:
        assert source.positions()[0] == 4
        assert drain(source, 1) == [b"0-4"]


# --- queues that come and go -----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks often at the topic."""
    monkeypatch.setattr("rocketstore.client.topic_cache.REFRESH_S", 0.05)
    monkeypatch.setattr("rocketstore.client.topic_cache.UNKNOWN_REFRESH_S", 0.05)
    monkeypatch.setattr("rocketstore.client.consumer.LOOK_AFTER_S", 0.05)
    monkeypatch.setattr(fetcher, "REFUSED_PAUSE_S", 0.05)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("group", ["billing", ""])
def test_queues_that_are_added_are_read_from_their_first_message(brokers: FakeBrokers, group: str) -> None:
    """While it runs, although its group began at the end; they may have messages before it notices."""
    put(brokers, 5)
    source = Consumer(brokers.addresses, group=group, topic="orders", start="last", pull_wait_ms=200)
    with source:
        assert source.poll(1, 0.01) == []
        put(brokers, 2, 5)
        brokers.add_topic("orders", 6)
        put(brokers, 1, 5, start=2)
        assert drain(source, 3) == [b"5-0", b"5-1", b"5-2"]
        assert sorted(source.positions()) == [0, 1, 2, 3, 4, 5]
    assert committed(brokers) == ({0: 5, 1: 0, 2: 0, 3: 0, 4: 0, 5: 3} if group else {})


@pytest.mark.usefixtures("quick")
def test_queues_that_were_added_while_nobody_read_begin_with_their_first_message(brokers: FakeBrokers) -> None:
    """The group is not new in the topic; and where they begin is stored at once."""
    with consumer(brokers, start="last") as source:
        source.positions()
    brokers.add_topic("orders", 6)
    put(brokers, 3, 4)

    with consumer(brokers, start="last", auto_commit_s=None) as source:
        assert drain(source, 1) == [b"4-0"]
        assert committed(brokers) == dict.fromkeys(range(6), 0)


@pytest.mark.usefixtures("quick")
def test_queues_that_are_removed_are_left_out_with_one_warning(
    brokers: FakeBrokers, caplog: pytest.LogCaptureFixture
) -> None:
    """Polling goes on; what was done of them is committed, so that they go on there if they come back."""
    put(brokers, 4)
    put(brokers, 4, 3)
    with consumer(brokers, auto_commit_s=None, pull_wait_ms=100) as source:
        drain(source, 8)
        source.poll(1, 0.01)
        brokers.add_topic("orders", 2)
        wait_until(lambda: sorted(source.positions()) == [0, 1], "the others are dropped")
        assert committed(brokers)[3] == 4
        put(brokers, 1, start=4)
        assert drain(source, 1) == [b"0-4"]
        assert len([one for one in caplog.records if one.levelname == "WARNING"]) <= 2  # one for each of two queues

        brokers.add_topic("orders", 4)
        put(brokers, 1, 3, start=4)
        assert drain(source, 1) == [b"3-4"]


@pytest.mark.usefixtures("quick")
def test_a_permission_that_is_taken_and_given_back_loses_nothing(
    brokers: FakeBrokers, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once for each queue why nothing comes."""
    put(brokers, 2)
    with consumer(brokers, pull_wait_ms=100) as source:
        drain(source, 2)
        for round_ in (1, 2):
            brokers.add_topic("orders", permission=2)
            wait_until(lambda: all(one.fetcher.refused for one in source._queues.values()), "it is refused")
            put(brokers, 3, start=2 + 3 * (round_ - 1))
            assert source.poll(5, 0.2) == []
            brokers.add_topic("orders")
            assert len(drain(source, 3)) == 3
            wait_until(lambda: not any(one.fetcher.refused for one in source._queues.values()), "all are answered")
            assert len([one for one in caplog.records if "does not allow reads" in one.message]) == 4 * round_


@pytest.mark.usefixtures("quick")
def test_a_topic_that_is_made_anew_is_read_on(brokers: FakeBrokers) -> None:
    """Nobody has to do anything; where the group is stays, or is stored again."""
    put(brokers, 1)
    with consumer(brokers, pull_wait_ms=50, auto_commit_s=0) as source:
        drain(source, 1)
        topic = brokers.topics.pop("orders")
        brokers.offsets.clear()
        wait_until(lambda: any(one.fetcher.refused for one in source._queues.values()), "it is told")
        assert source.poll(1, 0) == []
        brokers.topics["orders"] = topic
        wait_until(lambda: not source.poll(1, 0.01) and committed(brokers).get(0) == 1, "the offset is back")
        put(brokers, 1, start=1)
        assert drain(source, 1) == [b"0-1"]


# --- commits ---------------------------------------------------------------------------------------------------------


def test_commit_says_what_was_handed_out(brokers: FakeBrokers) -> None:
    """Not what is in stock; nothing new, nothing sent."""
    put(brokers, 10)

    with consumer(brokers, auto_commit_s=None) as source:
        drain(source, 4)
        source.commit()
        assert committed(brokers) == {0: 4, 1: 0, 2: 0, 3: 0}
        sent = len(brokers.commits)
        source.commit()
        assert len(brokers.commits) == sent
        drain(source, 3)

    assert committed(brokers)[0] == 7
    assert not any(commit.reset for commit in brokers.commits)


def test_auto_commit_spares_what_may_still_be_worked_on(brokers: FakeBrokers) -> None:
    """A poll commits what earlier polls gave, never what it gives itself."""
    put(brokers, 10)

    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 2)
        assert committed(brokers).get(0, 0) < 2
        drain(source, 1)
        assert committed(brokers)[0] == 2


def test_an_exception_does_not_commit_what_was_in_hand(brokers: FakeBrokers) -> None:
    """The message on which it failed comes again."""
    put(brokers, 10)

    def fail_at_the_fourth() -> None:
        with consumer(brokers) as source:
            for message in source:
                if message.queue_offset == 3:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_the_fourth()

    assert committed(brokers)[0] == 3


def test_a_failed_auto_commit_is_tried_again(brokers: FakeBrokers) -> None:
    """Polling goes on."""
    put(brokers, 3)
    refusals = deque([(grpc.StatusCode.INVALID_ARGUMENT, "scripted", dict[str, str]())])

    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 1)
        brokers.nodes[0].fail_calls["CommitOffsets"] = refusals
        drain(source, 1)
        drain(source, 1)
        assert committed(brokers)[0] == 2


def test_close_tells_that_it_could_not_commit(brokers: FakeBrokers) -> None:
    """And ends all the same; closing again is no error."""
    put(brokers, 3)
    source = consumer(brokers, timeout_s=0.3)
    drain(source, 3)
    for node in brokers.nodes:
        node.stop()

    with pytest.raises(UnavailableError):
        source.close()
    source.close()
    with pytest.raises(UnavailableError, match="closed"):
        source.poll()


# --- seek ------------------------------------------------------------------------------------------------------------


def test_seek_goes_back_and_so_does_the_next_commit(brokers: FakeBrokers) -> None:
    """A commit that goes back says so; later ones do not, nor the one of the beginning."""
    put(brokers, 10)

    with consumer(brokers, queues=[0]) as source:
        drain(source, 8)
        source.commit()
        source.seek(0, 2)
        assert drain(source, 1) == [b"0-2"]
        source.commit()
        assert committed(brokers)[0] == 3
        drain(source, 1)
        source.commit()

    assert [commit.reset for commit in brokers.commits] == [False, False, True, False]


def test_seek_ends_a_long_poll(brokers: FakeBrokers) -> None:
    """It does not wait for the answer that nobody wants any more."""
    put(brokers, 3)

    with consumer(brokers, queues=[0], pull_wait_ms=60_000) as source:
        drain(source, 3)
        wait_until(lambda: brokers.nodes[0].pulled[-1].offset == 3, "a long poll")
        source.seek(0, 0)
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]


@pytest.mark.parametrize(("start", "expected"), [("first", 0), ("last", 10), (1_700_000_004_000, 4)])
def test_seek_to_a_time_or_an_end(brokers: FakeBrokers, start: object, expected: int) -> None:
    """All assigned queues at once."""
    put(brokers, 10, at_ms=1_700_000_000_000)

    with consumer(brokers) as source:
        drain(source, 6)
        source.seek_to(start)  # type: ignore[arg-type]  # parametrised
        assert source.positions()[0] == expected


def test_seek_refuses_what_is_not_there(brokers: FakeBrokers) -> None:
    """A queue that is not assigned, an offset that cannot be."""
    with consumer(brokers, queues=[0]) as source:
        with pytest.raises(NotFoundError):
            source.seek(1, 0)
        with pytest.raises(ConfigError):
            source.seek(0, -1)


# --- offsets that do not exist ---------------------------------------------------------------------------------------


def test_messages_that_are_gone_are_skipped_and_counted(brokers: FakeBrokers) -> None:
    """OFFSET_TOO_SMALL: retention was faster than the consumer."""
    put(brokers, 10)
    brokers.queues["orders", 0].base = 6
    brokers.offsets["billing", "orders", 0] = 2

    with consumer(brokers, queues=[0]) as source:
        assert drain(source, 4) == [b"0-6", b"0-7", b"0-8", b"0-9"]
        assert source.skipped == 4


def test_a_queue_that_ends_earlier_is_read_from_its_end(brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """OFFSET_OVERFLOW_BADLY from the master: the log lost its end; what comes now must not be missed."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.2)
    put(brokers, 3)
    brokers.offsets["billing", "orders", 0] = 8

    with consumer(brokers, queues=[0]) as source:
        wait_until(lambda: not source.poll(1, 0.01) and source.positions()[0] == 3, "the end of the queue")
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]

    assert committed(brokers)[0] == 4


def test_a_master_that_is_none_any_more_is_no_reason_to_go_back(brokers: FakeBrokers) -> None:
    """Paused or cut off, it says for a moment that the queue ends before what its successor has given out already."""
    put(brokers, 3)
    with consumer(brokers, queues=[0], pull_wait_ms=10) as source:
        drain(source, 3)
        old = pb.PullResponse(status="OFFSET_OVERFLOW_BADLY", next_offset=1, max_offset=1)
        for node in brokers.nodes:
            node.pulls.extend([old] * 5)
        wait_until(lambda: any(not node.pulls for node in brokers.nodes), "all of its answers")

        assert source.positions() == {0: 3}
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]


def test_each_shorter_queue_must_be_confirmed_anew(brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one was, says nothing of the next one: the queue may have been cut only once."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.3)
    put(brokers, 3)
    brokers.offsets["billing", "orders", 0] = 8
    again = pb.PullResponse(status="OFFSET_OVERFLOW_BADLY", next_offset=1, max_offset=1)

    with consumer(brokers, queues=[0], pull_wait_ms=10) as source:
        wait_until(lambda: not source.poll(1, 0.01) and source.positions()[0] == 3, "the end of the queue")
        for node in brokers.nodes:
            node.pulls.append(again)
        wait_until(lambda: any(not node.pulls for node in brokers.nodes), "another such answer")
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]
        assert source.positions() == {0: 4}


def test_a_slave_that_lags_is_no_reason_to_go_back(brokers: FakeBrokers) -> None:
    """It does not know yet what the consumer has read already."""
    put(brokers, 3)
    with consumer(brokers, queues=[0], pull_wait_ms=10) as source:
        drain(source, 3)
        for node in brokers.nodes:
            node.pulls.extend([pb.PullResponse(status="OFFSET_OVERFLOW_BADLY", next_offset=1, max_offset=1)] * 2)
        brokers.nodes[0].pulls.clear()
        brokers.nodes[0].stop()
        brokers.elect(None)
        wait_until(lambda: not all(len(node.pulls) == 2 for node in brokers.nodes[1:]), "a slave's answer")
        assert source.positions() == {0: 3}
        for node in brokers.nodes[1:]:
            node.pulls.clear()
        brokers.elect(2)
        put(brokers, 1, start=3)
        assert drain(source, 1) == [b"0-3"]


@pytest.mark.parametrize("lost", [4, 2, 0])
def test_what_is_stored_behind_a_lost_end_is_not_skipped(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The queue was longer than what is left of it and what was sent since; the last message that came tells from when.

    With nothing left, it is a broker that lost its disk.
    """
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.1)
    put(brokers, 8, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 8)
        with brokers.changed:
            queue = brokers.queues["orders", 0]
            del queue.records[lost:], queue.messages[lost:]
        put(brokers, 2, start=100)
        assert drain(source, 2) == [b"0-100", b"0-101"]
    assert committed(brokers)[0] == lost + 2


def test_a_lost_end_without_messages_of_ones_own_brings_none_of_them_twice(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what tags leave out was lost: the last message that came is still there, and done."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.1)
    put(brokers, 3, tags="a", at_ms=1_700_000_000_000)
    put(brokers, 5, tags="b", start=3, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], tags="a", pull_wait_ms=50) as source:
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]
        wait_until(lambda: not source.poll(1, 0.01) and source.positions() == {0: 8}, "the others are passed over")
        with brokers.changed:
            queue = brokers.queues["orders", 0]
            del queue.records[5:], queue.messages[5:]
        put(brokers, 1, tags="a", start=100)
        assert drain(source, 1) == [b"0-100"]
    assert committed(brokers)[0] == 6


@pytest.mark.parametrize("new", [2, 3, 6])
def test_a_broker_that_has_filled_what_it_lost_is_noticed(brokers: FakeBrokers, new: int) -> None:
    """Its queue is as long as before or longer when the connection is back: the last message is another one."""
    put(brokers, 6, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        for node in brokers.nodes:
            node.stop()
        queue = brokers.queues["orders", 0]
        del queue.records[3:], queue.messages[3:]
        put(brokers, new, start=100)
        brokers.nodes[0].start()
        assert drain(source, new) == [b"0-%d" % number for number in range(100, 100 + new)]
    assert committed(brokers)[0] == 3 + new


def test_a_last_message_that_cannot_be_read_again_holds_nobody_up(brokers: FakeBrokers) -> None:
    """It is damaged at the broker since it was read, and the connection has broken: what follows comes all the same."""
    put(brokers, 6)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        brokers.nodes[0].stop()
        damaged = (grpc.StatusCode.DATA_LOSS, "the message does not match its CRC", dict[str, str]())
        brokers.nodes[0].fail_calls["Pull"] = deque([damaged] * 10_000)
        put(brokers, 2, start=6)
        brokers.nodes[0].start()
        assert drain(source, 2) == [b"0-6", b"0-7"]
    assert committed(brokers)[0] == 8


def test_a_later_message_in_place_of_an_expired_one_is_no_other_history(brokers: FakeBrokers) -> None:
    """Retention has just removed the last one that was read: brokers then answer with the next, of the same moment."""
    for number in range(6):
        brokers.put(Message("orders", b"%d" % number, store_timestamp=1_700_000_000_000))
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        brokers.nodes[0].stop()
        for number in range(6, 9):
            brokers.put(Message("orders", b"%d" % number, store_timestamp=1_700_000_000_000))
        queue = brokers.queues["orders", 0]
        queue.records[5] = queue.records[6]
        brokers.nodes[0].start()
        assert drain(source, 3) == [b"6", b"7", b"8"]


def test_a_lost_end_moves_nobody_forward(brokers: FakeBrokers) -> None:
    """Who has gone back meanwhile reads everything from there on, although what it read last is another message now."""
    put(brokers, 6, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50) as source:
        drain(source, 6)
        for node in brokers.nodes:
            node.stop()
        source.seek(0, 1)
        queue = brokers.queues["orders", 0]
        del queue.records[3:], queue.messages[3:]
        put(brokers, 6, start=100)
        brokers.nodes[0].start()
        assert drain(source, 8) == [b"0-1", b"0-2", *(b"0-%d" % number for number in range(100, 106))]


def test_what_was_pulled_ahead_is_not_skipped_with_a_lost_end(brokers: FakeBrokers) -> None:
    """The group's offsets were in the lost end, too: what the queue still has, and nobody has got yet, comes first."""
    put(brokers, 20, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], auto_commit_s=None) as source:
        assert len(source.poll(5, 5)) == 5
        wait_until(lambda: source._queues[0].fetcher._offset == 20, "all are pulled")
        source.commit()
        with brokers.changed:
            brokers.offsets.clear()
            queue = brokers.queues["orders", 0]
            del queue.records[15:], queue.messages[15:]
        put(brokers, 10, start=100)
        assert len(source.poll(1, 5)) == 1
        source.commit()
        wanted = [*range(6, 15), *range(100, 110)]
        assert drain(source, 19) == [b"0-%d" % number for number in wanted]


def test_garbage_is_no_last_message(brokers: FakeBrokers) -> None:
    """It can be compared with nothing once the connection has broken: after ``seek`` everything comes."""
    put(brokers, 3)
    brokers.nodes[0].pulls.append(pb.PullResponse(status="FOUND", next_offset=1, records=b"garbage", count=1))
    with consumer(brokers, queues=[0], pull_messages=1, pull_wait_ms=50, stock_bytes_max=1) as source:
        with pytest.raises(BadAnswerError):
            source.poll(1, 5)
        brokers.nodes[0].stop()
        wait_until(lambda: source._queues[0].fetcher._is_doubtful, "the connection has broken")
        brokers.nodes[0].start()
        source.seek(0, 0)
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]


@pytest.mark.parametrize("again", [1, 4])
def test_a_broker_that_lost_its_disk_is_read_from_the_beginning(brokers: FakeBrokers, again: int) -> None:
    """Also if it has more messages than before by the time it is asked: the offsets are gone, the last message, too."""
    put(brokers, 3, at_ms=1_700_000_000_000)
    with consumer(brokers, queues=[0], pull_wait_ms=50, auto_commit_s=0, pull_messages=1) as source:
        drain(source, 3)
        source.poll(1, 0)
        with brokers.changed:
            brokers.queues.clear()
            brokers.offsets.clear()
            put(brokers, again, start=50)
        bodies: list[bytes] = []

        def all_came() -> bool:
            bodies.extend(one.body for one in source.poll(1, 0.05))
            return {b"0-%d" % number for number in range(50, 50 + again)} <= set(bodies)

        wait_until(all_came, "all new messages")
    assert committed(brokers)[0] == again


def test_offsets_that_are_gone_are_stored_again(brokers: FakeBrokers, caplog: pytest.LogCaptureFixture) -> None:
    """The group was deleted under a consumer that has nothing to do: whoever follows it must not begin anew."""
    put(brokers, 5)
    with consumer(brokers, queues=[0], auto_commit_s=0, pull_wait_ms=50) as source:
        drain(source, 5)
        source.poll(1, 0)
        brokers.offsets.clear()
        source.poll(1, 0)
        assert committed(brokers) == {0: 5}
        assert sum("are gone" in one.message for one in caplog.records) == 1


@pytest.mark.parametrize("offset", [2, 12])
def test_out_of_range_is_an_error_if_asked_for(
    brokers: FakeBrokers, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every poll tells it, until ``seek``."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.2)
    put(brokers, 10)
    brokers.queues["orders", 0].base = 6
    brokers.offsets["billing", "orders", 0] = offset

    with consumer(brokers, queues=[0], when_out_of_range="error") as source:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRangeError):
                source.poll(1, 5)
        source.seek(0, 7)
        assert drain(source, 1) == [b"0-7"]


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff",
        pb.PullResponse(status="NO_SUCH_STATUS"),
        pb.PullResponse(status="FOUND", next_offset=1, records=b"garbage", count=1),
        pb.PullResponse(status="FOUND", next_offset=0, records=bytes(200), count=1),
        pb.PullResponse(status="FOUND", next_offset=1, records=bytes(200), count=1),
        pb.PullResponse(status="OFFSET_TOO_SMALL", min_offset=0),
        pb.PullResponse(status="NO_MATCHED_MESSAGE", next_offset=-1),
    ],
)
def test_garbage_is_a_typed_error_and_no_end(brokers: FakeBrokers, answer: bytes | pb.PullResponse) -> None:
    """The position stays; after ``seek`` the messages come."""
    put(brokers, 3)
    brokers.nodes[0].pulls.append(answer)

    with consumer(brokers, queues=[0]) as source:
        with pytest.raises(BadAnswerError):
            source.poll(3, 5)
        assert source.positions() == {0: 0}
        source.seek(0, 0)
        assert len(drain(source, 3)) == 3


def test_a_damaged_body_is_noticed(brokers: FakeBrokers) -> None:
    """The CRC is checked at this end of the wire; the next try gets it whole."""
    put(brokers, 3)
    record = bytearray(brokers.queues["orders", 0].records[0])
    record[HEAD_V4_BYTES] ^= 1
    brokers.nodes[0].pulls.append(pb.PullResponse(status="FOUND", next_offset=1, records=bytes(record), count=1))

    with consumer(brokers, queues=[0]) as source:
        with pytest.raises(BadAnswerError, match="CRC"):
            source.poll(3, 5)
        assert len(drain(source, 3)) == 3


def test_damage_behind_the_body_loses_nothing_where_tags_are_looked_at(brokers: FakeBrokers) -> None:
    """No checksum covers it; the next try gets it whole."""
    put(brokers, 3, tags="a")
    record = bytearray(brokers.queues["orders", 0].records[0])
    record[-len("TAGS a") - 1] ^= 1  # the length of the properties
    brokers.nodes[0].pulls.append(pb.PullResponse(status="FOUND", next_offset=1, records=bytes(record), count=1))

    with consumer(brokers, queues=[0], tags="a") as source:
        with pytest.raises(CorruptRecordError, match="properties"):
            source.poll(3, 5)
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]


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


# --- somebody else moves the offsets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "expected"), [(0, b"0-0"), (3, b"0-3"), (8, b"0-8")])
def test_a_running_consumer_goes_on_where_its_group_was_reset_to(
    brokers: FakeBrokers, caplog: pytest.LogCaptureFixture, place: int, expected: bytes
) -> None:
    """Back or forth, with the next commit, which does not undo it; what it had in stock is dropped."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 5)
        source.commit()
        brokers.offsets["billing", "orders", 0] = place

        assert drain(source, 1) == [expected]
        assert committed(brokers)[0] == place

    assert committed(brokers)[0] == place + 1
    assert f"queue 0 from 5 to {place}" in caplog.text


def test_a_reset_reaches_a_consumer_that_is_at_the_end(brokers: FakeBrokers) -> None:
    """It has nothing to commit, and looks all the same."""
    put(brokers, 3)
    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 3)
        source.commit()
        brokers.offsets["billing", "orders", 0] = 1

        assert drain(source, 2) == [b"0-1", b"0-2"]


def test_closing_does_not_undo_a_reset(brokers: FakeBrokers) -> None:
    """Also with messages in hand."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=None) as source:
        drain(source, 5)
        source.commit()
        drain(source, 2)
        brokers.offsets["billing", "orders", 0] = 1

    assert committed(brokers)[0] == 1


def test_a_second_consumer_of_the_group_is_noticed(brokers: FakeBrokers, caplog: pytest.LogCaptureFixture) -> None:
    """Both read every queue: whoever is behind goes on where the other one has committed, and says so."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=0) as behind, consumer(brokers, queues=[0]) as ahead:
        drain(behind, 1)
        drain(ahead, 6)
        ahead.commit()

        assert drain(behind, 1) == [b"0-6"]

    assert "another consumer of the group reads the same queues" in caplog.text


def test_an_own_commit_without_an_answer_is_nobody_elses(
    brokers: FakeBrokers, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stored although it failed: nothing is skipped, and nobody is warned."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=None, timeout_s=0.5) as source:
        drain(source, 4)
        brokers.answers_to_commits = False
        with pytest.raises(DLedgerError):
            source.commit()
        brokers.answers_to_commits = True
        assert committed(brokers)[0] == 4

        drain(source, 1)
        source.commit()

    assert committed(brokers)[0] == 5
    assert "changed elsewhere" not in caplog.text
