"""Sends, by whichever protocol they come."""

from __future__ import annotations

import pytest

from rocketstore.broker.sending import Origin, SendBatch
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
