"""The windows that a leader has taken up: their topics, the ends of their leases, and the copies that follow.

``_Journal`` knows which queues have something to write, what is being written, and which operations wait for that. One
tick is under way at a time. Later changes go with the next one, so there are few, however many clients there are, and
the rows of one queue are applied in the order in which they were made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from dledger.errors import DLedgerError
from rocketstore.pop.operations import (
    CopyResult,
    Loading,
    Origin,
    Pending,
    PopCopy,
    PopDelivery,
    PopView,
    Settling,
    Tick,
    Verdict,
)
from rocketstore.pop.queue import Lease, LeaseBook, Queue, attempts_so_far, covers, is_locked, relock
from rocketstore.pop.tables import LEASE_MS_MAX, ROWS_MAX, LeaseWindow, Parked, PopPlace, PopRow

TICK_MS: Final = 5
"""From the begin of one tick to that of the next, at least."""
BUSY_TICK_MS: Final = 10
"""The same, if several operations waited for the first of them. A tick costs every member as much as a message, so with
few of them brokers have more time for consumers; one that is alone waits no longer.
"""
BYTES_MAX: Final = 48 * 1024
"""Of a tick, about: its rows are one change of the state, which is written with others in one message."""
_ROW_BYTES: Final = 120
_PARKED_BYTES: Final = 48


class _Journal:
    """For the engine. ``applied`` is called for a queue whose row is applied, ``void`` for one whose window is gone."""

    def __init__(
        self, view: PopView, applied: Callable[[Queue, LeaseWindow], None], void: Callable[[Queue], None]
    ) -> None:
        self._view = view
        self._applied = applied
        self._void = void
        self._dirty: dict[PopPlace, Queue] = {}
        self._confirming: list[Pending] = []
        """Operations that wait for the next tick, whatever is in it."""
        self._tick: Tick | None = None
        self._written: list[Queue] = []
        self._not_before_ms = 0
        self.done: list[Pending] = []
        """Operations that are done and were not yet told."""

    def due_ms(self) -> int | None:
        """When ``take`` has something, if it has and nothing is under way."""
        return self._not_before_ms if (self._dirty or self._confirming) and self._tick is None else None

    def add(self, queue: Queue) -> None:
        """Something of a queue's plan has changed."""
        self._dirty[queue.place] = queue

    def commit(self, operation: Pending, queues: Iterable[Queue]) -> None:
        """The operation is done once the plans of these queues, as they are now, are applied."""
        for queue in queues:
            if queue.row() is not None:
                queue.waiters.append(operation)
                operation.waits += 1
                self._dirty[queue.place] = queue
        if not operation.waits:
            self.confirm(operation, Verdict.OK)

    def confirm(self, operation: Pending, then: Verdict) -> None:
        """The operation is done so once a tick has shown that this is still the leader."""
        operation.then = then
        operation.waits += 1
        self._confirming.append(operation)

    def end(self, operation: Pending, verdict: Verdict, failure: object = None) -> None:
        """Done, unless it is already."""
        if operation.verdict is None:
            operation.verdict, operation.failure = verdict, failure
            self.done.append(operation)

    def take(self, now_ms: int) -> Tick | None:
        """The next rows to write; None if there are none yet."""
        if self._tick is not None or now_ms < self._not_before_ms or not (self._dirty or self._confirming):
            return None
        rows: list[PopRow] = []
        tick, size = Tick(()), 0
        for place, queue in list(self._dirty.items()):
            row = queue.row()
            if row is not None and queue.runs_ahead_ms is not None:
                queue.run_ahead(now_ms)
                row = queue.row()
            if row is not None:
                size += _ROW_BYTES + row.settled.bit_length() // 6 + _PARKED_BYTES * len(row.parked)
                if rows and (size > BYTES_MAX or len(rows) == ROWS_MAX):
                    break
                rows.append(row)
                self._written.append(queue)
            del self._dirty[place]
            tick.waiting.append((place, queue.waiters))
            queue.waiters = []
            if row is None:
                self._count_down(tick.waiting.pop()[1])
        if not rows and not self._confirming:
            return None
        tick.rows = tuple(rows)
        tick.confirmed, self._confirming = self._confirming, []
        are_several = len(tick.confirmed) + sum(len(one) for _, one in tick.waiting) > 1
        self._tick, self._not_before_ms = tick, now_ms + (BUSY_TICK_MS if are_several else TICK_MS)
        return tick

    def ticked(self, tick: Tick, failure: object) -> None:
        """The outcome of a tick; ``failure`` None: it is applied."""
        self._tick = None
        written, self._written = self._written, []
        for queue, (place, waiting) in zip(written, tick.waiting, strict=True):
            window = self._view.pop_window(place)
            if failure is not None:
                if not queue.is_void:
                    self._dirty[place] = queue
                for one in waiting:
                    self.end(one, Verdict.FAILED, failure)
            elif window is None or window.generation != queue.generation:
                self._void(queue)
                self._drop(place, waiting)
            else:
                self._applied(queue, window)
                self._count_down(waiting)
        if failure is None:
            self._count_down(tick.confirmed)
        for one in tick.confirmed if failure is not None else ():
            self.end(one, Verdict.FAILED, failure)

    def forget(self, queue: Queue) -> None:
        """It is no more; what waits for it waits no longer."""
        if self._dirty.get(queue.place) is queue:
            del self._dirty[queue.place]
        waiters, queue.waiters = queue.waiters, []
        self._drop(queue.place, waiters)

    def close(self, failure: object) -> None:
        """End everything that waits."""
        waiting = [one for queue in self._dirty.values() for one in queue.waiters] + self._confirming
        if self._tick is not None:
            waiting += [one for _, some in self._tick.waiting for one in some] + self._tick.confirmed
        self._dirty, self._confirming, self._tick = {}, [], None
        for one in waiting:
            self.end(one, Verdict.FAILED, failure)

    def _drop(self, place: PopPlace, operations: Iterable[Pending]) -> None:
        """Take a queue that is not to be had out of these operations."""
        for one in operations:
            if isinstance(one, PopDelivery):
                one.messages = [message for message in one.messages if message.place != place]
            else:
                self.end(one, Verdict.INVALID_HANDLE)
        self._count_down(operations)

    def _count_down(self, operations: Iterable[Pending]) -> None:
        for one in operations:
            one.waits -= 1
            if not one.waits:
                self.end(one, one.then)


COPIES_MAX: Final = 256
"""Copies of one topic of a group that are stored and whose originals are not settled: so many messages of the retry
topic a new leader looks at (``Loading.copied``).
"""
GIVEN_BACK_MS: Final = 1000
"""After a client is gone, or an answer did not reach it, its messages are visible again."""
_COPY_AGAIN_MS: Final = 1000
EXPIRES_MAX: Final = 1024
"""Leases that are ended at once; after a failover hundreds of thousands may end together, at 2 µs each."""


class NotLoadedError(DLedgerError):
    """Raised when ``load`` must be called first, for a group and a topic."""

    def __init__(self, group: str, topic: str) -> None:
        super().__init__(f"topic {topic} is not loaded for group {group}")
        self.group = group
        self.topic = topic


class Topic:
    """A topic of a group."""

    def __init__(self, group: str, topic: str, retry_topic: str) -> None:
        self.group: Final = group
        self.topic: Final = topic
        self.retry_topic: Final = retry_topic
        self.due: deque[tuple[Queue, int, Lease]] = deque()
        """Leases that have ended, whose messages are to be copied."""
        self.copying: set[Origin] = set()
        """Originals of copies that may be stored, until they are settled."""

    @property
    def retries(self) -> PopPlace:
        return PopPlace(self.group, self.retry_topic, 0)


class Windows:
    """The part of the engine (``rocketstore.pop.engine``) that is about windows, not about who asks."""

    def __init__(self, view: PopView, choose: Callable[[int], int], *, runs_ahead: bool = True) -> None:
        """``choose(n)``: any number from 0 to below n. ``runs_ahead``: one that waits may get a message before the row
        that says so; not if the log can lose its end.
        """
        self._runs_ahead = runs_ahead
        self._view = view
        self._choose = choose
        self._topics: dict[tuple[str, str], Topic] = {}
        self._topic_of: dict[PopPlace, Topic] = {}
        self._queues: dict[PopPlace, Queue] = {}
        self._book = LeaseBook()
        self._journal = _Journal(view, self._applied, self._void)
        self._dead: dict[Origin, Settling] = {}
        self._copies: list[PopCopy] = []
        self._woken: set[tuple[str, str]] = set()
        self._generation = 0
        self._now_ms = 0

    # -- topics --------------------------------------------------------------------------------------------------------

    def is_loaded(self, group: str, topic: str) -> bool:
        """Whether ``load`` was called since there was the group, and the topic."""
        return (group, topic) in self._topics

    def knows(self, place: PopPlace) -> bool:
        """Whether a queue was loaded."""
        return place in self._queues

    def load(self, loading: Loading, now_ms: int) -> Pending:
        """Take a topic up; done when its windows are there (P9), before which no receive may be answered, not even that
        there is nothing. To be repeated when the topic has got more queues.
        """
        self._now_ms = now_ms
        key = loading.group, loading.topic
        topic = self._topics[key] = self._known_topic(loading)
        is_known = any(self._view.offset(*key, queue_id) >= 0 for queue_id in loading.queues)
        starts = {} if loading.retry_begin is None else {topic.retries: (loading.retry_begin, 0)}
        for queue_id, (begin, start, end) in loading.queues.items():
            starts[PopPlace(*key, queue_id)] = (begin if is_known else start), end
        for place, (start, end) in starts.items():
            self._take_up(topic, loading, place, start, end)
        pending = Pending()
        self._journal.commit(pending, [self._queues[place] for place in starts if self._queues[place].window is None])
        return pending

    def take_up(self, loading: Loading, queue_id: int, now_ms: int) -> None:
        """Take up the window of one queue, if there is one, before ``load``, which then has less to do at once."""
        self._now_ms = now_ms
        place = PopPlace(loading.group, loading.topic, queue_id)
        if self._view.pop_window(place) is not None:
            self._take_up(self._known_topic(loading), loading, place, 0, loading.queues[queue_id].end)

    def _known_topic(self, loading: Loading) -> Topic:
        """The topic, also if it is not loaded, but some of its windows are here."""
        key = loading.group, loading.topic
        places = PopPlace(loading.group, loading.retry_topic, 0), *(PopPlace(*key, one) for one in loading.queues)
        here = (self._topic_of[one] for one in places if one in self._topic_of)
        kept = next((one for one in here if one.topic == loading.topic), None)
        return self._topics.get(key) or kept or Topic(*key, loading.retry_topic)

    def _take_up(self, topic: Topic, loading: Loading, place: PopPlace, start: int, end: int) -> None:
        queue = self._queues.get(place) or self._open(topic, place, start, end)
        for origin in loading.copied:
            if origin.place == place and origin.generation == queue.generation:
                self._found_copy(topic, queue, origin)

    def _found_copy(self, topic: Topic, queue: Queue, origin: Origin) -> None:
        """A copy that an earlier leader has stored: if its original is not settled yet, it is now."""
        lease = queue.leases.get(origin.offset)
        # An ordered group begins anew with messages that were given out ahead of their row, but not with this one.
        queue.cursor = max(queue.cursor, min(origin.offset + 1, queue.applied.reach))
        is_open = origin.offset < queue.cursor and not queue.is_settled(origin.offset)
        is_copying = lease is not None and lease.copying
        if (is_open or (lease is not None and lease.parked)) and not is_copying:
            topic.copying.add(origin)
            self._settle_copied(queue, origin.offset)

    def _open(self, topic: Topic, place: PopPlace, start: int, end: int) -> Queue:
        """Take up one window, which begins at the group's offset or at ``start`` if there is none yet.

        ``end``: nothing was given out from there on that the window does not say.
        """
        window = self._view.pop_window(place)
        if window is not None:
            ordered = self._is_ordered(place.group)
            queue = Queue.inherited(place, window, self._now_ms, ordered=ordered, end=end)
            for offset, lease in list(queue.leases.items()):
                del queue.leases[offset]
                self._book.add(queue, offset, lease)
        else:
            self._generation = max(self._generation, self._view.pop_epoch()) + 1
            offset = self._view.offset(*place)
            queue = Queue(place, self._generation, offset if offset >= 0 else start)
        self._queues[place] = queue
        self._topic_of[place] = topic
        self._journal.add(queue)
        return queue

    def _queue(self, place: PopPlace) -> Queue | None:
        """The queue with the window as it is now; None if the group or the topic is gone."""
        queue = self._queues.get(place)
        if queue is None:
            return None
        window = self._view.pop_window(place)
        if window is queue.window:
            return queue
        if window is None or window.generation != queue.generation:
            self._void(queue)
            return self._queues.get(place)
        self._applied(queue, window)
        return queue

    def _applied(self, queue: Queue, window: LeaseWindow) -> None:
        settled = queue.refresh(window)
        if settled:
            topic = self._topic_of[queue.place]
            topic.copying.difference_update(Origin(queue.place, one, queue.generation) for one in settled)
            self._start_copies(topic)

    def _void(self, queue: Queue) -> None:
        """Somebody else has moved or removed the window: begin anew with what there is; if there is nothing, the topic
        has to be loaded again. Windows that are as they were, of the retry topic, stay: their rows may be on their way.
        """
        place = queue.place
        if self._queues.get(place) is not queue:
            return
        topic = self._forget(queue)
        if self._view.pop_window(place) is not None or self._view.offset(*place) >= 0:
            self._open(topic, place, 0, queue.cursor)
        elif self._topics.pop((topic.group, topic.topic), None) is not None:
            for other in [one for one in self._queues.values() if self._topic_of[one.place] is topic]:
                window = self._view.pop_window(other.place)
                if window is None or window.generation != other.generation:
                    self._forget(other)
        self._wake(topic)

    def _forget(self, queue: Queue) -> Topic:
        self._book.drop_all(queue)
        self._journal.forget(queue)
        queue.is_void = True
        del self._queues[queue.place]
        topic = self._topic_of.pop(queue.place)
        topic.copying = {one for one in topic.copying if one.place != queue.place}
        for origin in [one for one in self._dead if one.place == queue.place]:
            self._journal.confirm(self._dead.pop(origin), Verdict.INVALID_HANDLE)
        return topic

    # -- leases that end -----------------------------------------------------------------------------------------------

    def due_ms(self) -> int | None:
        """When to call ``expire``, or ``take_tick``; None: not before something else happens."""
        dues = [one for one in (self._book.due_ms(), self._journal.due_ms()) if one is not None]
        return min(dues, default=None)

    def expire(self, now_ms: int) -> None:
        """End or prolong leases that are due, some at a time: ``due_ms`` says when there are more."""
        self._now_ms = now_ms
        self._end_left()
        for queue, offset, lease in islice(self._book.due(now_ms), EXPIRES_MAX):
            if lease.visible_at_ms < lease.renew_until_ms:
                end_ms = min(max(now_ms + LEASE_MS_MAX, lease.visible_at_ms), lease.renew_until_ms)
                self._end_lease(queue, offset, lease, end_ms)
            elif offset >= queue.applied.reach:
                # Nobody was told of it. A copy now, and a leader that knows nothing of that would give out both.
                self._book.look_again(queue, offset, lease, now_ms + GIVEN_BACK_MS)
            elif self._is_ordered(queue.place.group) and not lease.parked:
                queue.is_ordered = True
                self._end_batch(queue)
            else:
                topic = self._topic_of[queue.place]
                topic.due.append((queue, offset, lease))
                self._start_copies(topic)

    def _end_left(self) -> None:
        """Have some leases of clients that are gone end soon: one may have a hundred thousand, at 3 µs each."""
        for queue, offset, lease in islice(self._book.left(), EXPIRES_MAX):
            if lease.renew_until_ms and not lease.copying:
                lease.renew_until_ms = 0
                self._end_lease(queue, offset, lease, min(lease.visible_at_ms, self._now_ms + GIVEN_BACK_MS))

    def copied(self, copy: PopCopy, result: CopyResult, now_ms: int) -> None:
        """Record the outcome of a copy; see ``PopCopy``."""
        self._now_ms = now_ms
        origin = copy.origin
        queue = self._queue(origin.place)
        dead = self._dead.pop(origin, None)
        lease = queue.leases.get(origin.offset) if queue and queue.generation == origin.generation else None
        if queue is None or lease is None or not lease.copying:
            if dead is not None:
                self._journal.confirm(dead, Verdict.INVALID_HANDLE)
            topic = self._topic_of.get(origin.place)
            if topic is not None:  # the original has expired meanwhile, or the offsets were reset
                topic.copying.discard(origin)
                self._start_copies(topic)
            return
        if result is not CopyResult.NOT_STORED:
            if dead is None and queue.lock is not None:
                queue.lock = queue.lock._replace(attempt=0)
            self._settle_copied(queue, origin.offset)
            if dead is not None:
                self._journal.commit(dead, [queue])
            return
        lease.copying = False
        topic = self._topic_of[queue.place]
        topic.copying.discard(origin)
        self._end_lease(queue, origin.offset, lease, max(lease.visible_at_ms, now_ms + _COPY_AGAIN_MS))
        if dead is not None:
            self._journal.end(dead, Verdict.FAILED)
        self._start_copies(topic)

    def _end_batch(self, queue: Queue) -> None:
        """A lease of an ordered group has ended: when all of its batch have, it may be given out again.

        If that was often enough, its first message is dead; those behind it begin anew, because it kept them back.
        """
        if is_locked(queue, self._now_ms):
            return
        first = next(queue.open_offsets(), None)
        lease = queue.leases.get(first) if first is not None else None
        if first is not None and lease is not None and self._is_worn_out(queue, first):
            self._copy(queue, first, lease, forced=True)
        else:
            self._wake(self._topic_of[queue.place])

    def _is_worn_out(self, queue: Queue, offset: int) -> bool:
        """Whether a message of an ordered group was tried often enough."""
        most = self._view.pop_rules(queue.place.group).attempts_max
        return 0 < most <= attempts_so_far(queue, offset)

    def _start_copies(self, topic: Topic) -> None:
        while topic.due and len(topic.copying) < COPIES_MAX:
            queue, offset, lease = topic.due.popleft()
            if queue.leases.get(offset) is lease and not lease.copying and lease.visible_at_ms <= self._now_ms:
                self._copy(queue, offset, lease)

    def _copy(self, queue: Queue, offset: int, lease: Lease, *, forced: bool = False) -> Origin:
        topic = self._topic_of[queue.place]
        origin = Origin(queue.place, offset, queue.generation)
        most = self._view.pop_rules(queue.place.group).attempts_max
        lease.copying = True
        topic.copying.add(origin)
        self._copies.append(PopCopy(origin, topic.topic, lease.attempt, most, forced))
        return origin

    def _end_lease(self, queue: Queue, offset: int, lease: Lease, end_ms: int, *, suspended: bool = False) -> None:
        """Have a lease end at another time, and note what a later leader has to know of it."""
        lease.visible_at_ms, lease.guard_ms = end_ms, 0
        self._book.moved(queue, offset, lease)
        if lease.parked:
            queue.park(offset, Parked(end_ms, max(lease.attempt, 0), lease.number))
        elif covers(queue.lock, offset):
            relock(queue, suspended=suspended)
        else:
            queue.leased_until_ms = max(queue.leased_until_ms, end_ms)
        self._journal.add(queue)

    def _settle(self, queue: Queue, offset: int, lease: Lease | None) -> None:
        was_locked = queue.lock is not None
        if lease is not None and lease.parked:
            queue.parks[offset] = None
        else:
            queue.settle(offset)
        self._book.drop(queue, offset)
        self._journal.add(queue)
        self._wake_passed_over(queue)
        if was_locked and not is_locked(queue, self._now_ms):
            self._wake(self._topic_of[queue.place])

    def _settle_copied(self, queue: Queue, offset: int) -> None:
        queue.copied.add(offset)
        self._settle(queue, offset, queue.leases.get(offset))

    def _topic(self, group: str, topic: str) -> Topic:
        found = self._topics.get((group, topic))
        if found is None:
            raise NotLoadedError(group, topic)
        return found

    def _is_ordered(self, group: str) -> bool:
        return self._view.pop_rules(group).ordered

    def _wake(self, topic: Topic) -> None:
        self._woken.add((topic.group, topic.topic))

    def _wake_passed_over(self, queue: Queue) -> None:
        if queue.passed_over:
            queue.passed_over = False
            self._wake(self._topic_of[queue.place])
