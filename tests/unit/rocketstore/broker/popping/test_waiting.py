"""Who of those that wait is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from dledger.rpc.loops import LoopBridge
from rocketstore.broker.mastership import QueueKey
from rocketstore.broker.popping.driver import Subscribed, WaitingReceives
from rocketstore.broker.popping.requests import ANY_QUEUE
from rocketstore.broker.pull import QueueWatch, WaitingPulls

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


def test_messages_that_come_again_wake_who_waits_for_any_one_queue() -> None:
    """They are in a queue of another topic, whatever its number; those of another queue do not."""

    class Pulls(WaitingPulls):
        def __init__(self) -> None:
            super().__init__(LoopBridge(), waiting_max=100)
            self.news: dict[QueueKey, Callable[[], None]] = {}

        def watch(self, key: QueueKey, news: Callable[[], None]) -> QueueWatch:
            self.news[key] = news
            return super().watch(key, news)

    async def test() -> None:
        pulls = Pulls()
        waiting = WaitingReceives(pulls, 100)
        keys = [("orders", 0), ("orders", 1), ("%RETRY%mailer_orders", 0)]
        with waiting.entered(ORDERS, keys, 1, "c") as waiter:
            woken = []
            for key in keys:
                waiting.arm(ORDERS, waiter)
                pulls.news[key]()
                woken.append(waiter.is_woken)
            assert woken == [False, True, True]

    asyncio.run(test())
