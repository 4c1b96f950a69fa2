"""Sends larger than a broker accepts: refused before they are sent, and no other message is affected."""

from __future__ import annotations

import pytest

from dledger.errors import DLedgerError
from dledger.values import MIB
from rocketstore.client.errors import MessageRefusedError
from rocketstore.client.producer import Producer
from rocketstore.message.message import Message
from tests.support.fake_broker import FakeBrokers

LIMIT = 64 * 1024


@pytest.fixture(autouse=True)
def _limited(brokers: FakeBrokers) -> None:
    for node in brokers.nodes:
        node.request_bytes_max = LIMIT


def message(size: int) -> Message:
    return Message("orders", bytes(size))


def assert_refused(error: object) -> None:
    assert isinstance(error, MessageRefusedError)
    assert error.outcome == "not_applied"
    assert str(LIMIT) in str(error)
    assert "maxMessageSize" in str(error), "it says what to do"


def sizes(brokers: FakeBrokers) -> list[int]:
    """Of the bodies that brokers were sent."""
    return [len(one.body) for node in brokers.nodes for request in node.requests for one in request.messages]


@pytest.mark.parametrize("numbered", [True, False])
def test_a_send_that_is_too_large_is_refused_before_it_is_sent(brokers: FakeBrokers, *, numbered: bool) -> None:
    """The next send uses the same stream."""
    outcomes: list[DLedgerError | None] = []
    with Producer(brokers.addresses, enable_idempotence=numbered) as producer:
        for size in (1, LIMIT, 2):
            try:
                producer.send(message(size))
                outcomes.append(None)
            except DLedgerError as error:
                outcomes.append(error)

    assert (outcomes[0], outcomes[2]) == (None, None)
    assert_refused(outcomes[1])
    assert sizes(brokers) == [1, 2]


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_in_one_batch_with_it_is_stored(brokers: FakeBrokers, *, ordered: bool) -> None:
    """The batch is parted."""
    with Producer(brokers.addresses) as producer:
        with producer.sender(linger_ms=10_000, batch_bytes=16 * MIB, ordered=ordered) as sender:
            futures = [sender.send(message(size)) for size in (1, 2, LIMIT, 3)]
        first, second, refused, last = [one.exception() for one in futures]

    assert (first, second, last) == (None, None, None)
    assert_refused(refused)
    assert sizes(brokers) == [1, 2, 3]
