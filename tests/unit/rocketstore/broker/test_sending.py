"""Sends, by whichever protocol they come."""

from __future__ import annotations

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.broker.sending import SendBatch
from rocketstore.broker_config import BrokerConfig
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.state.changes import TopicConfig
from rocketstore.types import MessageType, PutMessageStatus, PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


@pytest.mark.parametrize("again", [False, True])
def test_a_request_without_messages_is_answered(again: bool) -> None:
    """With no results, and nothing is stored."""
    answers: list[list[PutResult]] = []
    with RemotingHarness() as broker:
        sending = broker.broker.sending
        sending._bridge.post(
            lambda: sending.submit(None, SendBatch([], 0, again=again), lambda results: answers.append([*results]))
        )
        wait_until(lambda: bool(answers), "an answer")
        assert broker.store.log.records == []
    assert answers == [[]]


BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason="far behind")


@pytest.mark.parametrize("again", [False, True])
def test_clients_wait_for_queues_and_index_before_what_was_taken_once_does(again: bool) -> None:
    """What a consumer sends back is lost to it if it is refused for long; new messages are not stored yet."""
    results: list[PutResult] = []
    with RemotingHarness() as broker:
        broker.store.crowded = BUSY
        batch = SendBatch([Message("T", b"x", queue_id=0)], 1, again=again)
        broker.on_loop(lambda: broker.broker.sending.submit(None, batch, results.extend))
        wait_until(lambda: bool(results), "an answer")
        assert len(broker.store.log.records) == again
        assert broker.broker.sending.messages_pending == broker.broker.sending.bytes_pending == 0
    assert (results == [BUSY]) is not again


@pytest.mark.parametrize("again", [False, True])
def test_bodies_of_clients_are_limited_and_those_taken_before_are_not(again: bool) -> None:
    """``max_message_size`` may have been lowered since. The other messages of a request are stored all the same."""
    results: list[PutResult] = []
    with RemotingHarness(BrokerConfig(store=MessageStoreConfig(max_message_size=1024))) as broker:
        batch = SendBatch([Message("T", bytes(size), queue_id=0) for size in (1025, 1024)], 2049, again=again)
        broker.on_loop(lambda: broker.broker.sending.submit(None, batch, results.extend))
        wait_until(lambda: len(results) == 2, "answers")
        assert [len(decode_record(one.record).body) for one in broker.store.log.records] == [1025, 1024][not again :]
    assert again or results[0].status is PutMessageStatus.MESSAGE_ILLEGAL


def test_messages_for_a_topic_that_was_just_made_follow_those_that_waited_for_it() -> None:
    """It is known a moment before they are taken: messages of one connection would change places."""
    with RemotingHarness() as broker, broker.dial() as client:
        broker.state.held = []
        first = client.begin_send("New", b"first")
        wait_until(lambda: len(broker.state.held or ()) == 1, "the topic is being made")
        second: list[PutResult] = []

        def make_and_send() -> None:
            for make in broker.state.held or ():
                make()
            message = Message("New", b"second", queue_id=0)
            broker.broker.sending.submit(None, SendBatch([message], 0), second.extend)

        broker.on_loop(make_and_send)
        assert client.answer_to(first).code == AnswerCode.SUCCESS
        wait_until(lambda: bool(second), "both are stored")
        assert [decode_record(one.record).body for one in broker.store.log.records] == [b"first", b"second"]


TYPED = {
    MessageType.NORMAL: "",
    MessageType.FIFO: "__SHARDINGKEY\x01customer-7",
    MessageType.DELAY: "DELAY\x013",
    MessageType.PRIORITY: "_SYS_MSG_PRIORITY_\x012",
}


@pytest.mark.parametrize("expected", [*TYPED, MessageType.UNSPECIFIED, MessageType.MIXED])
@pytest.mark.parametrize("alone", [True, False])
def test_a_topic_takes_messages_of_its_type_only(expected: MessageType, alone: bool) -> None:
    """Others are refused in RocketMQ's words, each by itself; a topic without type takes all."""
    results: list[PutResult] = []
    with RemotingHarness() as broker:
        broker.state.table["T"] = TopicConfig("T", message_type=expected)
        messages = [Message("T", b"x", queue_id=0, property_string=text.encode()) for text in TYPED.values()]
        for some in [[one] for one in messages] if alone else [messages]:
            batch = SendBatch(some, len(some))
            broker.on_loop(lambda batch=batch: broker.broker.sending.submit(None, batch, results.extend))  # type: ignore[misc]
        wait_until(lambda: len(results) == len(TYPED), "answers")
    takes_all = expected not in TYPED
    for found, result in zip(TYPED, results, strict=True):
        if takes_all or found is expected:
            assert result.status is PutMessageStatus.PUT_OK
        else:
            why = f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {found}"
            assert (result.status, result.outcome, result.reason) == ("WRONG_MESSAGE_TYPE", "not_applied", why)


@pytest.mark.parametrize("together", [False, True])
def test_the_priority_decides_the_queue(together: bool) -> None:
    """min(priority, write queues - 1), whatever queue the producer chose; a batch of RocketMQ's is for one queue."""
    results: list[PutResult] = []
    with RemotingHarness() as broker:
        broker.state.table["T"] = TopicConfig("T", 8, 4, message_type=MessageType.PRIORITY)
        given = ["0", "2", "9", "-1", "x"] if not together else ["2", "0"]
        messages = [
            Message("T", b"x", queue_id=1 - 2 * (number % 2), property_string=f"_SYS_MSG_PRIORITY_\x01{one}".encode())
            for number, one in enumerate(given)
        ]
        batch = SendBatch(messages, 5, together=together)
        broker.on_loop(lambda: broker.broker.sending.submit(None, batch, results.extend))
        wait_until(lambda: len(results) == len(given), "answers")
        assert [one.head.queue_id for one in broker.store.log.records] == ([2, 2] if together else [0, 2, 3])
    assert [one.status for one in results[3:]] == [PutMessageStatus.MESSAGE_ILLEGAL] * len(results[3:])
