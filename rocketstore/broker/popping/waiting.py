"""Receives that wait for messages, by group and topic.

An arrival wakes the receive that has waited longest, and that one, if it got messages, the next: a hundred that wait
for the same queue do not all look at it. One that waits for a certain queue is woken by that queue's messages only.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

from rocketstore.broker.long_polling import QueueWatch, WaitingPulls
from rocketstore.broker.pop_types import ANY_QUEUE
from rocketstore.broker.ports import QueueKey
from rocketstore.broker.refusal import Refusal, RefusalKind

CLIENT_WAITS_MAX: Final = 1024
"""Receives of one client that may wait (P10)."""


class Subscribed(NamedTuple):
    """A topic as a group receives it."""

    group: str
    topic: str


class WaitingReceive:
    """One receive that may wait. News counts from ``arm`` on, so arm, look, and only then wait."""

    __slots__ = ("_event", "queue_id", "seen")

    def __init__(self, queue_id: int) -> None:
        self.queue_id = queue_id
        self.seen = 0
        """The count of news when it was armed."""
        self._event = asyncio.Event()

    def wake(self) -> None:
        """There may be something for it."""
        self._event.set()

    @property
    def is_woken(self) -> bool:
        """Whether it was woken since it was armed."""
        return self._event.is_set()

    def reset(self) -> None:
        """Forget that it was woken."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for news or the timeout."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()


class _Line:
    """Those that wait for one topic of one group."""

    def __init__(self) -> None:
        self.news = 0
        self.entered = 0
        self.watches: dict[QueueKey, QueueWatch] = {}
        self.waiting: dict[int, deque[WaitingReceive]] = {}

    def wake_one(self, queue_id: int) -> None:
        line = self.waiting.get(queue_id)
        if line:
            line.popleft().wake()


class WaitingReceives:
    """On the loop."""

    def __init__(self, pulls: WaitingPulls, waiting_max: int) -> None:
        self._pulls = pulls
        self._waiting_max = waiting_max
        self._lines: dict[Subscribed, _Line] = {}
        self._clients: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, subscribed: Subscribed) -> int:
        """How many wait for a topic."""
        line = self._lines.get(subscribed)
        return 0 if line is None else line.entered

    @contextmanager
    def entered(
        self, subscribed: Subscribed, queues: Iterable[QueueKey], queue_id: int, client_id: str
    ) -> Iterator[WaitingReceive]:
        """A receive that may wait for these queues. Raises ``Refusal``: there are too many."""
        if self._count >= self._waiting_max:
            raise Refusal(RefusalKind.TOO_MANY, f"{self._count} receives are waiting, the limit (pulls_waiting_max)")
        if self._clients[client_id] >= CLIENT_WAITS_MAX:
            why = f"client {client_id} has {CLIENT_WAITS_MAX} waiting receives, and may have no more"
            raise Refusal(RefusalKind.TOO_MANY, why)
        line = self._lines.get(subscribed)
        if line is None:
            line = self._lines[subscribed] = _Line()
        for key in queues:
            if key not in line.watches:  # those who came before wait for one queue, or the topic has got more
                line.watches[key] = self._pulls.watch(key, partial(self._arrived, subscribed, key))
        line.entered += 1
        self._clients[client_id] += 1
        self._count += 1
        waiter = WaitingReceive(queue_id)
        try:
            yield waiter
        finally:
            self._withdraw(line, waiter)
            line.entered -= 1
            self._clients[client_id] -= 1
            self._count -= 1
            if not self._clients[client_id]:
                del self._clients[client_id]
            if not line.entered:
                for watch in line.watches.values():
                    self._pulls.unwatch(watch)
                self._lines.pop(subscribed, None)
            elif waiter.is_woken:  # in vain
                line.wake_one(queue_id)

    def arm(self, subscribed: Subscribed, waiter: WaitingReceive) -> None:
        """It looks now, and waits behind the others if there is nothing."""
        line = self._lines[subscribed]
        self._withdraw(line, waiter)
        waiter.seen = line.news
        waiter.reset()
        line.waiting.setdefault(waiter.queue_id, deque()).append(waiter)

    def looked(self, subscribed: Subscribed, waiter: WaitingReceive, *, found: bool) -> None:
        """It has looked: if there was something, or there is by now, the next one shall look, too."""
        line = self._lines[subscribed]
        if found or line.news != waiter.seen:
            if found:
                self._withdraw(line, waiter)
            line.wake_one(waiter.queue_id)

    def wake(self, subscribed: Subscribed, queue_id: int = ANY_QUEUE) -> None:
        """There may be messages of a queue, or of any: to be tried again, or because a queue is free again."""
        line = self._lines.get(subscribed)
        if line is None:
            return
        line.news += 1
        line.wake_one(ANY_QUEUE)
        for one in tuple(line.waiting) if queue_id == ANY_QUEUE else (queue_id,):
            if one != ANY_QUEUE:
                line.wake_one(one)

    def wake_all(self) -> None:
        """Have all look: the role has changed, or the broker stops."""
        for line in self._lines.values():
            line.news += 1
            for waiting in line.waiting.values():
                while waiting:
                    waiting.popleft().wake()

    def _arrived(self, subscribed: Subscribed, key: QueueKey) -> None:
        """Something arrived in a queue of the topic, or in the retry topic."""
        self.wake(subscribed, key[1] if key[0] == subscribed.topic else ANY_QUEUE)

    @staticmethod
    def _withdraw(line: _Line, waiter: WaitingReceive) -> None:
        waiting = line.waiting.get(waiter.queue_id)
        if waiting is None:
            return
        with suppress(ValueError):  # it was woken
            waiting.remove(waiter)
        if not waiting:
            del line.waiting[waiter.queue_id]
