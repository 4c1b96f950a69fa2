"""Waiting for the answer to a put."""

from __future__ import annotations

import threading

from rocketstore.commit_log.put_waiter import PutWaiter
from rocketstore.types import PutMessageStatus, PutResult


def test_a_put_may_be_waited_for_longer_than_the_machine_can_count() -> None:
    """A ``syncFlushTimeout`` of thousands of years is one of never."""
    waiter = PutWaiter()
    results = (PutResult(PutMessageStatus.PUT_OK),)
    answer = threading.Timer(0.01, waiter.done, (results,))

    answer.start()

    assert waiter.wait(1e15) == results
