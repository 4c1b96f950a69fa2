"""A topic's messages by time, across its queues: from the newest one backwards, or from the oldest one on.

Brokers have no such request. So the next message of each queue is pulled, and the queues are merged by the times at
which these were stored; from a queue whose turn it was, further ones are pulled, each time more than before.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from rocketstore.client.aio.cluster import at_once
from rocketstore.client.aio.errors import MessageRefusedError
from rocketstore.message.message import Message
from rocketstore.remoting.bodies.queues import MessageQueue

PAGE_MAX: Final = 100
"""Messages of one page."""
PAGE_BYTES_MAX: Final = 1 << 20
"""Of one page, unless its first message alone is larger."""
PULLED_BYTES_MAX: Final = 32 << 20
"""Of all messages that are pulled for one page: a topic may have a thousand queues with a large message in each."""
EMPTY_PULLS_MAX: Final = 100
"""Pulls for one page that find no message, where some were removed."""
_GROWTH: Final = 4
_PULLED_MAX: Final = 1024
"""Messages, or places that may have some, looked at with one request."""

Pull = Callable[[MessageQueue, int, int], Awaitable[tuple[list[Message], int]]]
"""Messages of a queue from an offset on, at most so many, and the offset for the next pull: see ``Admin.messages``."""


class Page(NamedTuple):
    """Some of a topic's messages in the wanted order, and where each queue goes on; empty if nothing is left."""

    messages: list[Message]
    ends: dict[MessageQueue, int]


class Budget:
    """The bytes and the empty pulls that a page may still take."""

    def __init__(self) -> None:
        self.bytes_left = PULLED_BYTES_MAX
        self.empty_pulls_left = EMPTY_PULLS_MAX

    @property
    def is_spent(self) -> bool:
        """Whether the page ends here."""
        return self.bytes_left <= 0 or self.empty_pulls_left <= 0


class QueueSpan:
    """The messages of a queue from offset ``low`` to before ``high``, taken from one of the ends."""

    def __init__(self, queue: MessageQueue, low: int, high: int, *, oldest_first: bool) -> None:
        self.queue = queue
        self.low = low
        self.high = max(high, low)
        self._oldest_first = oldest_first
        self._ahead: list[Message] = []
        """Pulled and not taken, the next one last."""
        self._wanted = 1

    @property
    def end(self) -> int:
        """Where the next page goes on."""
        return self.low if self._oldest_first else self.high

    @property
    def next(self) -> Message | None:
        """The next message, once ``fill`` has pulled it."""
        return self._ahead[-1] if self._ahead else None

    @property
    def rank(self) -> int:
        """By the time of ``next``: the lowest of all queues comes first."""
        time_ms = self._ahead[-1].store_timestamp
        return time_ms if self._oldest_first else -time_ms

    def take(self) -> Message:
        """``next``, which is behind the end then."""
        found = self._ahead.pop()
        if self._oldest_first:
            self.low = found.queue_offset + 1
        else:
            self.high = found.queue_offset
        return found

    async def fill(self, pull: Pull, budget: Budget) -> None:
        """Have ``next``. Without it after this, nothing is left, or the budget is spent."""
        while not self._ahead and self.low < self.high and not budget.is_spent:
            begin = self.low if self._oldest_first else max(self.high - self._wanted, self.low)
            found, at = await self._pull(pull, budget, begin)
            if self._oldest_first:
                self._ahead = found[::-1]
                self.low = self.low if found else min(at, self.high)
            elif at >= self.high:  # else the newest of them have yet to be pulled
                self._ahead = found
                self.high = self.high if found else begin
            budget.empty_pulls_left -= not found
            largest = max((one.size for one in found), default=1)
            self._wanted = max(1, min(_GROWTH * self._wanted, _PULLED_MAX, PAGE_BYTES_MAX // max(largest, 1)))

    async def _pull(self, pull: Pull, budget: Budget, begin: int) -> tuple[list[Message], int]:
        """Messages from ``begin`` on, and up to where it was looked: to the end, unless they come oldest first."""
        found: list[Message] = []
        at = begin
        while at < self.high and not budget.is_spent and not (found and self._oldest_first):
            count = self._wanted if self._oldest_first else self.high - at
            some, following = await pull(self.queue, at, count)
            inside = [one for one in some if at <= one.queue_offset < self.high]
            budget.bytes_left -= sum(one.size for one in inside)
            found += inside
            if following <= at:  # nothing there
                return found, self.high
            at = following
        return found, at


async def read_page(spans: Sequence[QueueSpan], pull: Pull, count: int) -> Page:
    """The next ``count`` messages of all spans.

    Of equally old messages, that of the first queue comes first; those of one queue by offset, whatever their times.
    Raises ``MessageRefusedError`` if the next ones of all queues are too large to be compared.
    """
    budget, room = Budget(), PAGE_BYTES_MAX
    await at_once(one.fill(pull, budget) for one in spans)
    waiting = [(one.rank, place) for place, one in enumerate(spans) if one.next is not None]
    heapq.heapify(waiting)
    messages: list[Message] = []
    is_whole = all(one.next is not None or one.low >= one.high for one in spans)
    if not is_whole and budget.bytes_left <= 0:
        raise MessageRefusedError(
            f"the next messages of {len(spans)} queues have more than {PULLED_BYTES_MAX >> 20} MiB: choose one queue"
        )
    while waiting and is_whole and len(messages) < count:
        _, place = waiting[0]
        span = spans[place]
        message = span.take()
        messages.append(message)
        room -= message.size
        await span.fill(pull, budget)
        if span.next is not None:
            heapq.heapreplace(waiting, (span.rank, place))
        else:
            heapq.heappop(waiting)
            is_whole = span.low >= span.high
        following = spans[waiting[0][1]].next if waiting else None
        if following is not None and following.size > room:
            break
    left = any(one.low < one.high for one in spans)
    return Page(messages, {one.queue: one.end for one in spans} if left else {})


def span_of(
    queue: MessageQueue, low: int, high: int, ends: Mapping[MessageQueue, int], *, oldest_first: bool
) -> QueueSpan:
    """The rest of a queue after a page with these ``ends``; all of it without any.

    A queue that was made after that page has nothing that is older.
    """
    if ends and oldest_first:
        low = max(low, min(ends.get(queue, low), high))
    elif ends:
        high = max(low, min(ends.get(queue, low), high))
    return QueueSpan(queue, low, high, oldest_first=oldest_first)
