"""The consumer: queues that are added, removed and closed while it reads."""

from __future__ import annotations

import pytest

from rocketstore.client import fetcher
from rocketstore.client.consumer import Consumer
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.consuming import committed, consumer, drain, put


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
