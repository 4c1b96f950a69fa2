"""Who of those that wait is woken."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from dledger.rpc.bridge import LoopBridge
from rocketstore.broker.long_polling import WaitingPulls
from rocketstore.broker.pop_types import ANY_QUEUE
from rocketstore.broker.popping.waiting import Subscribed, WaitingReceives

ORDERS = Subscribed("mailer", "orders")


def test_who_was_woken_in_vain_wakes_the_next() -> None:
    """It was cancelled before it looked: the message that woke it is for another one that waits."""

    async def test() -> None:
        waiting = WaitingReceives(WaitingPulls(LoopBridge(), waiting_max=100), 100)
        first, second = ExitStack(), ExitStack()
        with first, second:
            waiters = [
                one.enter_context(waiting.entered(ORDERS, [("orders", 0)], ANY_QUEUE, "c")) for one in (first, second)
            ]
            for one in waiters:
                waiting.arm(ORDERS, one)
            waiting.wake(ORDERS)
            assert [one.is_woken for one in waiters] == [True, False]
            first.close()
            assert waiters[1].is_woken
        assert (len(waiting), waiting.of(ORDERS)) == (0, 0)

    asyncio.run(test())
