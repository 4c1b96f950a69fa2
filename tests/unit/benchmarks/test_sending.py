"""The rates of producers: which messages count, and what may be pending."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest

from benchmarks.sending import BLOCK, BLOCKS_PENDING, send_count, send_rate
from rocketstore.client.aio.errors import SendResult, SendStatus
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message

MESSAGE = Message("bench", b"body")


class _Producer:
    """Answers every message at once, with the same status."""

    def __init__(self, status: SendStatus = SendStatus.SEND_OK) -> None:
        self._result = SendResult("bench", "broker", 0, 0, "id", status=status)
        self.sent = 0

    def submit(self, _message: object) -> Future[SendResult]:
        self.sent += 1
        future: Future[SendResult] = Future()
        future.set_result(self._result)
        return future


def _as_producer(one: _Producer) -> Producer:
    return cast("Producer", one)  # as far as it is used


def test_messages_with_all_copies_are_counted() -> None:
    """Of a quorum, or of a master and the slaves that it waits for."""
    assert send_rate(_as_producer(_Producer()), MESSAGE, 0.01) > 0


@pytest.mark.parametrize("status", [SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.SLAVE_NOT_AVAILABLE])
def test_messages_that_may_have_one_copy_do_not_count(status: SendStatus) -> None:
    """Producers take them for sent; a figure of SYNC_MASTER must not."""
    with pytest.raises(RuntimeError, match=f"less safely than asked for: {status}"):
        send_rate(_as_producer(_Producer(status)), MESSAGE, 0.01)


def test_exactly_so_many_messages_are_sent_as_asked_for() -> None:
    """Also if that is no whole number of blocks, and more than may be pending."""
    producer = _Producer()
    count = BLOCK * (BLOCKS_PENDING + 1) + 7

    send_count(_as_producer(producer), MESSAGE, count)

    assert producer.sent == count


def test_a_rate_is_not_exceeded() -> None:
    """By more than what a clock's resolution is worth."""
    assert send_count(_as_producer(_Producer()), MESSAGE, 2 * BLOCK, rate=20 * BLOCK) <= 20 * BLOCK * 1.01
