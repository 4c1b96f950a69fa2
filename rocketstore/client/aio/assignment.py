"""The queues that a consumer has, what of them is in use, and the order in which messages are handed out.

Everything here belongs to the consumer's event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from rocketstore.client.aio.errors import ForbiddenError
from rocketstore.client.aio.queue_reader import QueueReader
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.remoting.topics import MessageQueue

LOCKED_PAUSE_S: Final = 1.0
"""Before it is looked again whether a queue that another member has locked may be used."""


class InFlight:
    """Which messages of one queue are handed out and not done: the first of them is the offset to commit.

    Every message before that offset is done, so a member that continues there misses nothing.
    """

    __slots__ = ("_in_use", "is_abandoned", "next", "size")

    def __init__(self, begin: int) -> None:
        self._in_use: dict[int, int] = {}  # offset to bytes, in the order of offsets
        self.next = begin
        """The first offset not handed out."""
        self.size = 0
        """Bytes of the messages in use."""
        self.is_abandoned = False
        """Whether the queue was taken away, or the consumer moved elsewhere in it: nothing counts any more."""

    @property
    def done(self) -> int:
        """The first offset that is not done."""
        return next(iter(self._in_use), self.next)

    def hand_out(self, first: int, after: int, size: int) -> None:
        """The messages from offset ``first`` to before ``after`` are in use; offsets only grow."""
        self._in_use[first] = size
        self.size += size
        self.next = after

    def skip_to(self, offset: int) -> None:
        """There are no messages for this consumer before this offset."""
        self.next = max(self.next, offset)

    def settle(self, first: int) -> None:
        """The message that was handed out at this offset is done. Idempotent."""
        self.size -= self._in_use.pop(first, 0)


class Assignment:
    """One queue that this consumer has."""

    def __init__(self, queue: MessageQueue, reader: QueueReader, begin: int, committed: int | None) -> None:
        self.queue: Final = queue
        self.reader: Final = reader
        self.in_flight = InFlight(begin)
        self.committed = committed
        self.offered: int | None = None
        """By the last commit: it may be stored although no answer arrived."""
        self.is_in_doubt = False
        """Whether the broker may have lost, and replaced, what was read: then nothing is committed."""
        self.awaits_look = False
        """Whether that will be known soon."""
        self.may_rewind = False
        """Whether the next commit may go back."""
        self.is_paused = False
        self.rest: deque[ConsumedMessage] = deque()
        """Pulled, and not handed out."""
        self.rest_next = begin
        """Where the queue continues after the rest."""
        self.out = 0
        """Deliveries handed out and not settled, abandoned ones included."""
        self.usable_until = float("inf")
        """When our lock ends, by the loop's clock: another member may have the queue then."""

    @property
    def position(self) -> int:
        """The offset of the next message to hand out."""
        return self.rest[0].queue_offset if self.rest else self.in_flight.next

    @property
    def lag(self) -> int:
        """How many messages follow those that are done; -1: unknown."""
        end = self.reader.max_offset
        return max(end - self.in_flight.done, 0) if end >= 0 else -1

    @property
    def has_any_in_hand(self) -> bool:
        """Whether anything was read that is not done, or is to be forgotten because the broker has lost messages."""
        return bool(self.rest) or self.in_flight.done != self.in_flight.next or self.reader.goes_back

    def go_to(self, offset: int, incarnation: int) -> None:
        """Continue elsewhere; what is in use does not count any more. ``incarnation``: of the broker that knows it."""
        self.in_flight.is_abandoned = True
        self.in_flight = InFlight(offset)
        self.rest.clear()
        self.rest_next = offset
        self.reader.seek(offset, incarnation)

    def refill(self) -> None:
        """Take what has been pulled into the rest, if that is empty. Raises ``OffsetOutOfRangeError``."""
        while not self.rest and (batch := self.reader.take()) is not None:
            if batch.rewinds:
                again = min(self.in_flight.done, batch.next_offset)  # what is in use before that comes again, too
                self.may_rewind = True
                self.in_flight.is_abandoned = True
                self.in_flight = InFlight(again)
                if again < batch.next_offset:
                    self.rest_next = again
                    self.reader.seek(again)
                    return
            self.rest.extend(batch.messages)
            self.rest_next = batch.next_offset
            if not batch.messages:
                self.in_flight.skip_to(batch.next_offset)


class Delivery:
    """Messages of one queue handed out together: nearly always one."""

    __slots__ = (
        "assignment",
        "in_flight",
        "is_claimed",
        "is_reported",
        "may_expire",
        "messages",
        "since",
        "span",
        "traced",
        "tries_here",
    )

    def __init__(self, messages: Sequence[ConsumedMessage], assignment: Assignment, tries_here: int = 0) -> None:
        self.messages = messages
        self.assignment = assignment
        self.in_flight = assignment.in_flight
        self.tries_here = tries_here
        """How often this consumer has tried it before and kept it."""
        self.since = 0.0
        """When it was handed out, by the loop's clock."""
        self.is_claimed = False
        """Whether it is settled already what becomes of it."""
        self.may_expire = False
        """Whether it is sent back if its handler takes too long."""
        self.is_reported = False
        """Whether it was logged that it takes long."""
        self.traced: tuple[str, int] | None = None
        """The id of its trace and when that began (ms since 1970), until its end is written."""
        self.span: Any = None  # of OpenTelemetry, which need not be installed
        for one in messages:
            one.tries_here = tries_here

    def __repr__(self) -> str:
        others = f" and {len(self.messages) - 1} more" if len(self.messages) > 1 else ""
        return f"<delivery of {self.messages[0]!r}{others}>"

    @property
    def first(self) -> int:
        """The offset of the first message."""
        return self.messages[0].queue_offset


class DeliveryObserver(Protocol):
    """Hears of deliveries: it must neither block nor raise."""

    def handed_out(self, delivery: Delivery) -> None:
        """The application has it from now on."""

    def ended(self, delivery: Delivery, *, ok: bool) -> None:
        """The application is done with it, or it failed; may be told again, which does not count."""


class DeliveryQueue:
    """Hands out the messages of all assignments in turn.

    Of each queue, up to ``deliveries_max`` deliveries and ``bytes_max`` bytes are in use (at least one message), and
    none further than ``span_max`` offsets behind the first that is not done.
    """

    def __init__(self, *, deliveries_max: int, bytes_max: int, span_max: int) -> None:
        self.assignments: dict[MessageQueue, Assignment] = {}
        self.is_closed = False
        self._deliveries_max = deliveries_max
        self._bytes_max = bytes_max
        self._span_max = span_max
        self._turn: deque[Assignment] = deque()
        self._out: dict[tuple[Assignment, int], Delivery] = {}  # handed out, and not claimed
        self._again: list[tuple[float, int, Delivery]] = []  # a heap by time
        self._count = itertools.count()
        self._changes: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.observers: tuple[DeliveryObserver, ...] = ()

    def add(self, assignment: Assignment) -> None:
        """From now on its messages are handed out."""
        self.assignments[assignment.queue] = assignment
        self._turn.append(assignment)
        self.changed()

    def check_permitted(self) -> None:
        """Raises ``ForbiddenError`` if a queue may not be read, because a reader would wait in vain."""
        for one in self.assignments.values():
            refusal = one.reader.refusal
            if isinstance(refusal, ForbiddenError):
                raise refusal.with_traceback(None)

    def remove(self, assignment: Assignment) -> None:
        """Nothing more of it is handed out; messages in use may still be settled."""
        if self.assignments.get(assignment.queue) is assignment:
            del self.assignments[assignment.queue]
            self._turn.remove(assignment)
            assignment.rest.clear()
            self._forget_again(assignment)
            self.changed()

    def go_to(self, assignment: Assignment, offset: int, incarnation: int = 0) -> None:
        """Continue elsewhere in a queue; what is in use does not count any more.

        ``incarnation``: of the broker that knows the offset; 0: of whichever answers first.
        """
        assignment.go_to(offset, incarnation)
        self._forget_again(assignment)

    def close(self) -> None:
        """Hand out nothing more."""
        self.is_closed = True
        self.changed()

    def changed(self) -> None:
        """Wake everybody who waits: there may be messages, or what was in use is done."""
        for one in self._changes:
            if not one.done():
                one.set_result(None)
        self._changes.clear()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until something changes, but not longer."""
        if self._again:
            timeout_s = min(timeout_s, max(self._again[0][0] - self._loop.time(), 0.001))
        change: asyncio.Future[None] = self._loop.create_future()
        self._changes.add(change)
        try:
            async with asyncio.timeout(timeout_s):
                await change
        except TimeoutError:
            pass
        finally:
            self._changes.discard(change)

    async def receive(self, max_messages: int, timeout_s: float) -> Delivery | None:
        """The next messages of one queue; None after ``timeout_s``, and once closed.

        Raises ``OffsetOutOfRangeError``.
        """
        deadline = self._loop.time() + timeout_s
        while not self.is_closed:
            found = self.at_once(max_messages)
            if found is not None:
                return found
            remaining_s = deadline - self._loop.time()
            if remaining_s <= 0:
                return None
            await self.wait_for_change(remaining_s)
        return None

    def at_once(self, max_messages: int) -> Delivery | None:
        """As ``receive``, without waiting."""
        found = self._next_again() or self._next_new(max_messages)
        if found is not None:
            found.since = self._loop.time()
            self._out[found.assignment, found.first] = found
            for one in self.observers:
                one.handed_out(found)
        return found

    def claim(self, delivery: Delivery) -> bool:
        """Whether nobody has decided yet what becomes of it; the one that claims it must settle it."""
        key = (delivery.assignment, delivery.first)
        if self._out.get(key) is delivery:
            del self._out[key]
        was_claimed, delivery.is_claimed = delivery.is_claimed, True
        return not was_claimed

    def finish(self, delivery: Delivery) -> None:
        """The claimed messages are done."""
        self.ended(delivery, ok=True)
        delivery.in_flight.settle(delivery.first)
        delivery.assignment.out -= 1
        self.changed()

    def ended(self, delivery: Delivery, *, ok: bool) -> None:
        """Tell observers how it ended: only the first time counts."""
        for one in self.observers:
            one.ended(delivery, ok=ok)

    def deliver_again(self, delivery: Delivery, after_s: float, *, counts: bool = True) -> None:
        """Hand out claimed messages once more, after a while; they stay in use meanwhile. ``counts``: as a try."""
        if counts:
            self.ended(delivery, ok=False)
        assignment = delivery.assignment
        if self.assignments.get(assignment.queue) is assignment and not delivery.in_flight.is_abandoned:
            again = Delivery(delivery.messages, assignment, delivery.tries_here + counts)
            heapq.heappush(self._again, (self._loop.time() + after_s, next(self._count), again))
        else:
            assignment.out -= 1
        self.changed()

    def overdue(self, before: float) -> list[Delivery]:
        """Deliveries handed out before this time, about which nothing is decided."""
        for key in [key for key, one in self._out.items() if one.in_flight.is_abandoned]:
            del self._out[key]  # of a queue that was left: nobody need ever decide
        return [one for one in self._out.values() if one.since < before]

    async def wait_idle(self, assignments: Iterable[Assignment], timeout_s: float) -> None:
        """Until none of their messages is out, but not longer."""
        deadline = self._loop.time() + timeout_s
        while any(one.out for one in assignments) and (remaining_s := deadline - self._loop.time()) > 0:
            await self.wait_for_change(remaining_s)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _next_again(self) -> Delivery | None:
        now = self._loop.time()
        while self._again and self._again[0][0] <= now:
            delivery = heapq.heappop(self._again)[2]
            assignment = delivery.assignment
            if delivery.in_flight.is_abandoned:
                assignment.out -= 1
            elif now >= assignment.usable_until or assignment.is_paused:
                heapq.heappush(self._again, (now + LOCKED_PAUSE_S, next(self._count), delivery))
            else:
                return delivery
        return None

    def _next_new(self, max_messages: int) -> Delivery | None:
        for _ in range(len(self._turn)):
            assignment = self._turn[0]
            self._turn.rotate(-1)
            if self._may_hand_out(assignment):
                return self._hand_out(assignment, max_messages)
        return None

    def _may_hand_out(self, one: Assignment) -> bool:
        if one.is_paused or self._loop.time() >= one.usable_until or one.out >= self._deliveries_max:
            return False
        one.refill()
        in_flight = one.in_flight  # after ``refill``, which may replace it
        if in_flight.size >= self._bytes_max or in_flight.next - in_flight.done >= self._span_max:
            return False
        return bool(one.rest)

    def _hand_out(self, assignment: Assignment, max_messages: int) -> Delivery:
        rest, in_flight = assignment.rest, assignment.in_flight
        count = min(max_messages, len(rest), max(self._span_max - (in_flight.next - in_flight.done), 1))
        if count == len(rest):
            messages = list(rest)
            rest.clear()
            after = assignment.rest_next
        else:
            messages = [rest.popleft() for _ in range(count)]
            after = rest[0].queue_offset
        assignment.out += 1
        in_flight.hand_out(messages[0].queue_offset, after, sum([len(one.record) for one in messages]))
        return Delivery(messages, assignment)

    def _forget_again(self, assignment: Assignment) -> None:
        kept = [one for one in self._again if one[2].assignment is not assignment]
        assignment.out -= len(self._again) - len(kept)
        heapq.heapify(kept)
        self._again = kept
