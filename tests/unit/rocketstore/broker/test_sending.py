"""Sends, by whichever protocol they come."""

from __future__ import annotations

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.broker.sending import Origin, SendBatch
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.types import PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


@pytest.mark.parametrize("origin", Origin)
def test_a_request_without_messages_is_answered(origin: Origin) -> None:
    """With no results, and nothing is stored."""
    answers: list[list[PutResult]] = []
    with RemotingHarness() as broker:
        sending = broker.broker.sending
        sending._bridge.post(
            lambda: sending.submit(None, SendBatch([], 0, origin=origin), lambda results: answers.append([*results]))
        )
        wait_until(lambda: bool(answers), "an answer")
        assert broker.store.log.records == []
    assert answers == [[]]


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
