"""Transactions over a real store: what is committed is there once, what is rolled back never, whoever dies when."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketstore.broker.transactions.halves import committed, op_message
from rocketstore.broker.transactions.run import EndRefusedError
from rocketstore.broker_config import BrokerConfig
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import LOOPBACK, Message
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HALF_TOPIC, StoredPlace
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import WAIT_S, small_config
from tests.unit.rocketstore.broker.transactions.bench import GROUP, Broker, broker_on, half


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    return small_config(tmp_path / "store")


def record_of(broker: Broker, place: StoredPlace) -> bytes:
    record = broker.store.read_record(place.offset)
    assert record is not None
    return record


def test_a_commit_is_the_half_message_in_its_queue(config: MessageStoreConfig) -> None:
    """As in RocketMQ's log: the property string unchanged, flag 8, and where the half message is."""
    with broker_on(config) as broker:
        place = broker.prepare(b"one", queue_id=2)
        assert broker.bodies(queue_id=2) == []
        assert broker.end(place, commit=True) == ""
        (message,) = broker.messages(queue_id=2)
        (prepared,) = broker.messages(HALF_TOPIC)
    assert (message.body, message.sys_flag, message.prepared_offset) == (b"one", 8, place.offset)
    assert message.properties == prepared.properties
    assert prepared.sys_flag == 0
    assert (prepared.properties["REAL_TOPIC"], prepared.properties["REAL_QID"]) == ("T", "2")


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_commit_after_its_topic_was_deleted_ends_the_transaction_and_delivers_nothing(
    config: MessageStoreConfig, is_made_anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic begins anew: what was prepared for a deleted one of its name is not for it."""
    with broker_on(config) as broker:
        place = broker.prepare(b"old")
        assert broker.state.wait(lambda done: broker.state.delete_topic("T", done)).ok
        if is_made_anew:
            assert broker.state.wait(lambda done: broker.state.put_topic(TopicConfig("T", 4, 4), done)).ok
        assert "topic T was deleted since" in broker.end(place, commit=True)
        broker.wait_open(0)
        assert (broker.bodies(), broker.ops) == ([], [b"0"])
        assert broker.transactions.dropped_count == 1
        assert "its message is dropped (producer group" in caplog.text
        if is_made_anew:
            assert broker.end(broker.prepare(b"new"), commit=True) == ""
            assert broker.bodies() == [b"new"]


def test_a_commit_goes_into_a_queue_that_the_topic_still_has(config: MessageStoreConfig) -> None:
    """Nobody would read it in one that was removed while it was prepared."""
    with broker_on(config) as broker:
        place = broker.prepare(b"one", queue_id=3)
        assert broker.state.wait(lambda done: broker.state.put_topic(TopicConfig("T", 2, 2), done)).ok
        assert broker.end(place, commit=True) == ""
        assert broker.bodies(queue_id=1) == [b"one"]


def test_an_op_says_which_half_has_ended(config: MessageStoreConfig) -> None:
    with broker_on(config) as broker:
        places = [broker.prepare(body) for body in (b"a", b"b")]
        assert broker.end(places[1], commit=False) == ""
        assert broker.end(places[0], commit=True) == ""
        (first, second) = broker.messages("RMQ_SYS_TRANS_OP_HALF_TOPIC")
    assert (first.body, second.body) == (b"1", b"0")
    assert (first.properties, first.sys_flag) == ({"WAIT": "true", "TAGS": "d"}, 0)


def test_what_is_rolled_back_is_never_delivered(config: MessageStoreConfig) -> None:
    with broker_on(config) as broker:
        place = broker.prepare(b"one")
        assert broker.end(place, commit=False) == ""
        broker.wait_open(0)
        assert "ended already" in broker.end(place, commit=True)
        assert (broker.bodies(), broker.ops) == ([], [b"0"])


@pytest.mark.parametrize("again", [True, False])
def test_whatever_is_said_after_a_commit_changes_nothing(config: MessageStoreConfig, again: bool) -> None:
    with broker_on(config) as broker:
        place = broker.prepare(b"one")
        taken: list[bool] = []
        for _ in range(3):  # not waiting for the first
            try:
                broker.transactions.end(place.queue_offset, place.offset, GROUP, commit=True, done=lambda _result: None)
            except EndRefusedError:
                taken.append(False)
            else:
                taken.append(True)
        assert taken == [True, False, False]
        broker.wait_open(0)
        assert broker.end(place, commit=again)
        assert (broker.bodies(), broker.ops) == ([b"one"], [b"0"])


def test_only_who_began_a_transaction_ends_it(config: MessageStoreConfig) -> None:
    """The same group, and both offsets."""
    with broker_on(config) as broker:
        place, other = broker.prepare(b"one"), broker.prepare(b"two")
        ordinary = broker.store.put(Message("T", b"ordinary")).stored
        assert ordinary is not None
        wrong = [
            place._replace(offset=other.offset),
            place._replace(queue_offset=other.queue_offset),
            place._replace(queue_offset=99),
            place._replace(queue_offset=-1),
            ordinary,
            ordinary._replace(queue_offset=2),
            place._replace(offset=1 << 60, queue_offset=2),
        ]
        assert all(broker.end(one, commit=True) for one in wrong)
        assert "producer group wrong" in broker.end(place, commit=True, group="others")
        assert (broker.bodies(), broker.ops) == ([b"ordinary"], [])
        assert broker.end(place, commit=True) == ""


def test_bytes_that_look_like_a_half_message_are_none(config: MessageStoreConfig) -> None:
    """A client may send them as a body, wherever it will be."""
    with broker_on(config) as broker:
        place = broker.prepare(b"one")
        record = bytearray(record_of(broker, place))
        lure = broker.store.put(Message("T", bytes(200))).stored
        assert lure is not None
        inside = lure.offset + lure.size + 84  # where the next body begins
        record[20:36] = (1).to_bytes(8) + inside.to_bytes(8)
        broker.store.put(Message("T", bytes(record)))
        assert broker.end(StoredPlace(inside, len(record), 0, 1, 0), commit=True)
        assert broker.ops == []


def test_open_transactions_survive_a_restart(config: MessageStoreConfig) -> None:
    with broker_on(config) as broker:
        places = [broker.prepare(b"%d" % number) for number in range(6)]
        assert broker.end(places[1], commit=True) == broker.end(places[2], commit=False) == ""
    with broker_on(config) as broker:
        broker.wait_open(4)
        assert [bool(broker.end(one, commit=True)) for one in places] == [False, True, True, False, False, False]
        broker.wait_open(0)
        assert sorted(broker.bodies()) == [b"0", b"1", b"3", b"4", b"5"]
        assert len(broker.ops) == 6


def test_a_commit_without_its_op_is_not_repeated(config: MessageStoreConfig) -> None:
    """The master died in between: its successor writes what is missing."""
    with broker_on(config) as broker:
        place = broker.prepare(b"one")
        broker.transactions.stop()
        assert broker.store.put(committed(record_of(broker, place))).ok
    with broker_on(config) as broker:
        wait_until(lambda: broker.ops == [b"0"], "the op is written", WAIT_S)
        broker.wait_open(0)
        assert broker.end(place, commit=True)
        assert broker.bodies() == [b"one"]


def test_an_op_may_come_twice(config: MessageStoreConfig) -> None:
    with broker_on(config) as broker:
        places = [broker.prepare(b"one"), broker.prepare(b"two")]
        for _ in range(2):
            assert broker.store.put(op_message(0, LOOPBACK, 0)).ok
        broker.wait_open(1)
        assert broker.end(places[1], commit=True) == ""


def test_a_refused_end_may_be_repeated(config: MessageStoreConfig) -> None:
    with broker_on(config) as broker:
        place = broker.prepare(b"one")
        broker.store.allow_writing(allowed=False)
        assert broker.end(place, commit=True)
        broker.store.allow_writing(allowed=True)
        wait_until(lambda: broker.end(place, commit=True) == "", "it may be ended again", WAIT_S)
        assert broker.bodies() == [b"one"]


def test_progress_lets_a_restart_begin_later(config: MessageStoreConfig) -> None:
    with broker_on(config) as broker:
        places = [broker.prepare(b"x") for _ in range(5)]
        for place in places[:3]:
            assert broker.end(place, commit=False) == ""

        def noted() -> list[int]:
            return [broker.state.offset("CID_RMQ_SYS_TRANS", one, 0) for one in (HALF_TOPIC,)]

        wait_until(lambda: noted() == [3], "the halves' offset is noted", WAIT_S)
        assert broker.end(places[3], commit=False) == broker.end(places[4], commit=True) == ""
        wait_until(
            lambda: broker.state.offset("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_OP_HALF_TOPIC", 0) == 5, "the ops'", WAIT_S
        )


def test_so_many_may_be_open(config: MessageStoreConfig) -> None:
    limits = BrokerConfig(transactions_open_max=4)
    with broker_on(config, limits) as broker:
        for _ in range(3):
            assert broker.transactions.refusal(GROUP) == ""
            broker.prepare(b"x")
        broker.wait_open(3)
        assert "3 open transactions" in broker.transactions.refusal(GROUP)
        assert broker.transactions.refusal("others") == ""
        broker.store.put(half(b"y", group="others"))
        broker.wait_open(4)
        assert "transactions_open_max" in broker.transactions.refusal("others")


def test_whoever_waits_hears_when_open_transactions_are_known(config: MessageStoreConfig) -> None:
    """Requests that came too early go on at once, also at the next start."""
    told: list[bool] = []
    with broker_on(config) as broker:
        transactions = broker.transactions
        transactions.add_ready_listener(lambda: told.append(transactions.is_ready))
        for times in (1, 2):
            transactions.stop()
            transactions.start()
            wait_until(lambda times=times: len(told) == times, "it is told", WAIT_S)  # type: ignore[misc]
    assert told == [True, True]
