"""Which queues have something to write, what is being written, and which operations wait for that.

One tick is under way at a time. Later changes go with the next one, so there are few, however many clients
there are, and the rows of one queue are applied in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from rocketstore.pop.operations import Pending, PopDelivery, PopView, Tick, Verdict
from rocketstore.pop.queue import Queue
from rocketstore.pop.rows import ROWS_MAX
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopRow

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


class Journal:
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
