"""The queues that a member of a group has, and what it does with their messages: handed out, in use, done.

Several threads take messages and settle them; another one adds and removes queues. Nothing here does I/O.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, cast

from dledger.client.shared import Deadline
from dledger.errors import DLedgerError
from dledger.forks import LostLock, mind_forks
from rocketstore.client.aio.received import ReceivedMessage, split_records
from rocketstore.client.fetcher import Chunk
from rocketstore.message.message import PROPERTY_RETRY_TOPIC


class QueueName(NamedTuple):
    """One queue of a topic."""

    topic: str
    queue_id: int
    broker_name: str = ""
    """The group of brokers that has it; empty if their addresses were given."""

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic}" + (f" at {self.broker_name}" if self.broker_name else "")


class Source(Protocol):
    """Fetches the messages of one queue: a ``QueueFetcher``."""

    max_offset: int
    skipped: int

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return or raise something."""

    def take(self) -> Chunk | None:
        """The next response."""

    def seek(self, offset: int, incarnation: int | None = None) -> None:
        """Continue at another offset."""

    @property
    def has_nothing_to_compare(self) -> bool:
        """Whether only the group's position can tell if the broker has what was taken so far."""

    def has_looked_at(self, incarnation: int) -> bool:
        """Whether ``is_at`` will not change by itself."""

    def is_at(self, incarnation: int) -> bool:
        """Whether the broker of this incarnation has what was taken so far. Raises ``DLedgerError``."""

    def confirm(self, incarnation: int) -> None:
        """The broker of this incarnation has the group's position."""

    def look_after(self, master: str | None) -> None:
        """Called periodically."""

    def stop(self) -> None:
        """End."""

    def join(self) -> None:
        """Wait for the end."""


class InUse:
    """Which messages of one queue are handed out and not done: the first of them is the offset to commit.

    All before that offset are done, so that whoever continues there misses nothing.
    """

    __slots__ = ("_in_use", "abandoned", "next", "size")

    def __init__(self, begin: int) -> None:
        self._in_use: dict[int, int] = {}  # offset to bytes, in the order of offsets
        self.next = begin
        """The first offset not handed out."""
        self.size = 0
        """Bytes of the messages in use."""
        self.abandoned = False
        """Whether the queue was taken away, or the member moved elsewhere in it: nothing counts any more."""

    def __len__(self) -> int:
        return len(self._in_use)

    @property
    def done(self) -> int:
        """The first offset that is not done."""
        return next(iter(self._in_use), self.next)

    def hand_out(self, offset: int, size: int) -> None:
        """A message is in use; offsets only grow."""
        self._in_use[offset] = size
        self.size += size
        self.next = offset + 1

    def skip_to(self, offset: int) -> None:
        """There are no messages for us before this offset."""
        self.next = max(self.next, offset)

    def settle(self, offset: int) -> bool:
        """A message is done; False if it was already."""
        size = self._in_use.pop(offset, None)
        self.size -= size or 0
        return size is not None


class Share:
    """One queue that this member has; guarded by the lock of its ``Shares``."""

    __slots__ = (
        "awaits_look",
        "committed",
        "in_doubt",
        "name",
        "offered",
        "out",
        "progress",
        "rest",
        "rest_next",
        "rewind",
        "source",
        "tags",
        "usable_until",
    )

    def __init__(self, name: QueueName, begin: int, committed: int | None, tags: frozenset[str] | None) -> None:
        self.name = name
        self.tags = tags
        self.progress = InUse(begin)
        self.committed = committed
        self.offered: int | None = None
        """By the last commit: it may be stored although no answer arrived."""
        self.in_doubt = False
        """Whether the broker may have lost, and replaced, what was read: then nothing is committed."""
        self.awaits_look = False
        """Whether that will be known soon."""
        self.rewind = False
        """Whether the next commit may go back."""
        self.rest: deque[ReceivedMessage] = deque()
        self.rest_next = begin
        """Where the queue continues after the rest."""
        self.out = 0
        """Messages handed out and not settled, abandoned ones included."""
        self.usable_until = float("inf")
        """When our lock ends: another member may have the queue then. By ``time.monotonic``."""
        self.source: Source

    @property
    def usable(self) -> bool:
        """Whether its messages may be handed out now."""
        return time.monotonic() < self.usable_until

    def unpack(self) -> bool:
        """Take the next response of the source into the rest, which is empty. False if there is none.

        Raises what the source raises, and ``BadAnswerError``.
        """
        chunk = self.source.take()
        if chunk is None:
            return False
        progress = self.progress
        try:
            messages = split_records(chunk.records)
            if self.tags is not None:  # the broker compares only hashes
                messages = [one for one in messages if one.tags in self.tags]
        except DLedgerError:
            self.source.seek(progress.next)  # what was damaged in transit may be intact the next time
            raise
        if chunk.rewinds:
            self.rewind = True
            progress.abandoned = True
            again = min(progress.done, chunk.next_offset)  # what is in use before that place comes again, too
            self.progress = progress = InUse(again)
            if again < chunk.next_offset:
                self.rest_next = again
                self.source.seek(again)
                return True
        self.rest.extend(messages)
        self.rest_next = chunk.next_offset
        if not messages:
            progress.skip_to(chunk.next_offset)
        return True


class GroupDelivery:
    """A message handed to a member of a group. Thread-safe; the first ``ack`` or ``send_back`` counts."""

    __slots__ = ("_attempt", "_claimed", "_progress", "message", "share", "since", "told")

    def __init__(self, message: ReceivedMessage, share: Share, attempt: int = 0) -> None:
        self.since = time.monotonic()
        """When it was handed out."""
        self.told = False
        """Whether it was said that it takes long."""
        self.message = message
        self.share = share
        self._attempt = attempt
        self._progress = share.progress
        self._claimed = False

    def __repr__(self) -> str:
        return f"<delivery of {self.message!r}>"

    @property
    def topic(self) -> str:
        """The topic that the message was sent to, also if it comes again."""
        return self.message.property(PROPERTY_RETRY_TOPIC) or self.message.topic

    @property
    def body(self) -> bytes:
        """The decompressed body."""
        return self.message.body

    @property
    def attempts(self) -> int:
        """How often the message was delivered before, and sent back or failed."""
        return self.message.decode().reconsume_times + self._attempt

    @property
    def tries_here(self) -> int:
        """How often this member has tried it before and kept it."""
        return self._attempt

    @property
    def progress(self) -> InUse:
        """Of the queue, when this was handed out."""
        return self._progress

    def claim(self) -> bool:
        """Whether this is the first time; needs the lock of ``Shares``."""
        first, self._claimed = not self._claimed, True
        return first

    def again(self, attempts: int) -> GroupDelivery:
        """The same message once more, after so many further attempts."""
        made = GroupDelivery(self.message, self.share, self._attempt + attempts)
        made._progress = self._progress
        return made


class Shares:
    """Hands out the messages of all queues in turn. Thread-safe.

    ``ordered``: of each queue, only one message is in use. Otherwise up to ``pending_max`` messages and
    ``pending_bytes_max`` bytes (at least one message), and none further than ``span_max`` offsets behind the first that
    is not done. ``failed`` is called, with the lock, with a queue that cannot be
    read and why.
    """

    def __init__(
        self,
        *,
        ordered: bool,
        pending_max: int,
        pending_bytes_max: int,
        span_max: int = 1 << 62,
        failed: Callable[[Share, DLedgerError], None],
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        """The lock of everything here; notified of new messages, settled ones, and the end."""
        self.queues: dict[QueueName, Share] = {}
        self._pending_max = 1 if ordered else pending_max
        self._pending_bytes_max = pending_bytes_max
        self._span_max = span_max
        self._failed = failed
        self._out: dict[tuple[Share, int], GroupDelivery] = {}  # handed out, and nobody has said what becomes of it
        self._turn: deque[Share] = deque()
        self._again: list[tuple[float, int, GroupDelivery]] = []  # a heap by time
        self._count = itertools.count()
        self.closed = False
        self.is_left_behind = False
        mind_forks(self)

    def leave_behind(self) -> None:
        """In a forked child, where the member's threads are not: every call fails at once."""
        self.is_left_behind = True
        self.changed = cast(threading.Condition, LostLock())

    def arrived(self) -> None:
        """Called by sources."""
        with self.changed:
            self.changed.notify_all()

    def add(self, share: Share) -> None:
        """From now on its messages are handed out."""
        with self.changed:
            self.queues[share.name] = share
            self._turn.append(share)
            self.changed.notify_all()

    def remove(self, share: Share) -> None:
        """Nothing more of it is handed out; messages in use may still be settled."""
        with self.changed:
            if self.queues.get(share.name) is share:
                del self.queues[share.name]
                self._turn.remove(share)
                share.rest.clear()
                self._forget_again(share)
                self.changed.notify_all()

    def go_to(self, share: Share, offset: int, incarnation: int) -> None:
        """Continue elsewhere in a queue; what is in use does not count any more.

        ``incarnation``: of the broker that knows the offset.
        """
        with self.changed:
            share.progress.abandoned = True
            share.progress = InUse(offset)
            share.rest.clear()
            share.source.seek(offset, incarnation)
            self._forget_again(share)

    def close(self) -> None:
        """Hand out nothing more."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def receive(self, timeout_s: float) -> GroupDelivery | None:
        """The next message, or None after ``timeout_s``, and once closed."""
        deadline = Deadline(timeout_s)
        with self.changed:
            while not self.closed:
                found = self._next()
                if found is not None:
                    found.since = time.monotonic()
                    self._out[found.share, found.message.queue_offset] = found
                    return found
                wait_s = deadline.remaining_s
                if wait_s <= 0:
                    return None
                if self._again:
                    wait_s = min(wait_s, max(self._again[0][0] - time.monotonic(), 0.001))
                self.changed.wait(wait_s)
        return None

    def claim(self, delivery: GroupDelivery) -> bool:
        """Whether nobody has said yet what becomes of the message; who says so must ``finish`` it."""
        with self.changed:
            if self._out.get(key := (delivery.share, delivery.message.queue_offset)) is delivery:
                del self._out[key]
            return delivery.claim()

    def overdue(self, before: float) -> list[GroupDelivery]:
        """What was handed out before this time, and nobody has said what becomes of it."""
        with self.changed:
            for key in [key for key, one in self._out.items() if one.progress.abandoned]:
                del self._out[key]  # of a queue that was left: nobody need ever say anything
            return [one for one in self._out.values() if one.since < before]

    def finish(self, delivery: GroupDelivery) -> None:
        """The claimed message is done."""
        with self.changed:
            delivery.progress.settle(delivery.message.queue_offset)
            delivery.share.out -= 1
            self.changed.notify_all()

    def deliver_again(self, delivery: GroupDelivery, after_s: float, *, counts: bool = True) -> None:
        """Hand out the claimed message once more, after a while; it stays in use meanwhile.

        ``counts``: it was tried.
        """
        with self.changed:
            share = delivery.share
            if self.queues.get(share.name) is share and not delivery.progress.abandoned:
                heapq.heappush(
                    self._again, (time.monotonic() + after_s, next(self._count), delivery.again(int(counts)))
                )
            else:
                share.out -= 1
            self.changed.notify_all()

    def wait_idle(self, shares: Iterable[Share], timeout_s: float) -> None:
        """Wait until none of their messages is out, but not longer."""
        with self.changed:
            self.changed.wait_for(lambda: not any(one.out for one in shares), timeout_s)

    def _next(self) -> GroupDelivery | None:
        while self._again and self._again[0][0] <= time.monotonic():
            delivery = heapq.heappop(self._again)[2]
            share = delivery.share
            if delivery.progress.abandoned:
                share.out -= 1
                continue
            if not share.usable:  # locked by another member for now: nothing of the queue is handed out
                heapq.heappush(self._again, (time.monotonic() + 1.0, next(self._count), delivery))
                continue
            return delivery
        for _ in range(len(self._turn)):
            share = self._turn[0]
            self._turn.rotate(-1)
            if self._may_hand_out(share):
                message = share.rest.popleft()
                share.out += 1
                share.progress.hand_out(message.queue_offset, len(message.record))
                if not share.rest:
                    share.progress.skip_to(share.rest_next)
                return GroupDelivery(message, share)
        return None

    def _may_hand_out(self, share: Share) -> bool:
        progress = share.progress
        if not share.usable or share.out >= self._pending_max or progress.size >= self._pending_bytes_max:
            return False
        if progress.next - progress.done >= self._span_max:
            return False
        try:
            while not share.rest and share.source.ready:
                if not share.unpack():
                    break
        except DLedgerError as error:
            self._failed(share, error)
            return False
        return bool(share.rest)

    def _forget_again(self, share: Share) -> None:
        kept = [one for one in self._again if one[2].share is not share]
        share.out -= len(self._again) - len(kept)
        heapq.heapify(kept)
        self._again = kept
