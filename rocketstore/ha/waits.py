"""SYNC_MASTER: puts that wait until slaves have their messages.

A slave counts while it is connected, and only with what it has acknowledged on that connection: RocketMQ keeps the
highest number that anybody ever sent, so that after a forged one every put looks replicated.

Connections are not copies: a slave that reconnects has two until the old one is given up. So a broker id counts once,
with its oldest connection that is alive: anyone else who says to be that slave takes nothing from it. Connections that
give none, as RocketMQ's slaves, count as one copy all together, because nothing tells two slaves from one that came
twice.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Final

from dledger.clock import Clock
from rocketstore.types import PutMessageStatus

ReplicaDone = Callable[[PutMessageStatus, str], None]
"""Called once: ``PUT_OK``, ``FLUSH_SLAVE_TIMEOUT`` or ``SLAVE_NOT_AVAILABLE``, and a reason for people."""
_OK: Final = PutMessageStatus.PUT_OK


UNNAMED: Final = -1
"""The broker id of slaves that do not say theirs: RocketMQ's."""


class _Wait:
    __slots__ = ("deadline_ms", "done", "end")

    def __init__(self, end: int, deadline_ms: int, done: ReplicaDone) -> None:
        self.end = end
        self.deadline_ms = deadline_ms
        self.done = done


class ReplicaWaits:
    """Thread-safe. Callbacks are called without the lock, on the thread that settles them."""

    def __init__(
        self,
        clock: Clock,
        *,
        slaves_needed: int,
        timeout_ms: int,
        behind_bytes_max: int,
        end: Callable[[], int],
        living_ms: int = 10_000,
    ) -> None:
        """``slaves_needed`` must have a message; one counts as there as long as it lacks less than
        ``behind_bytes_max`` of what lies before ``end``. A connection on which nothing was heard for ``living_ms``
        counts only if its slave has no other.
        """
        self._living_ms = living_ms
        self.slaves_needed: Final = slaves_needed
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._behind_bytes_max = behind_bytes_max
        self._end = end
        self._lock = threading.Lock()  # guards the fields below
        self._acknowledged: dict[object, int] = {}
        self._ids: dict[object, int] = {}  # broker ids, of the same slaves
        self._heard_ms: dict[object, int] = {}  # the same slaves
        self._is_closed = False
        self._replicated = -1  # everything before it is with enough slaves
        self._waiting: list[tuple[int, int, _Wait]] = []  # a heap by end
        self._by_deadline: list[tuple[int, int, _Wait]] = []  # a heap
        self._numbers = itertools.count()

    @property
    def in_sync(self) -> int:
        """How many slaves are there now."""
        end = self._end()
        with self._lock:
            return self._in_sync(end)

    @property
    def waiting(self) -> int:
        """How many puts wait."""
        return len(self._waiting)

    def wait_for(self, end: int, done: ReplicaDone) -> None:
        """Call ``done`` once everything before ``end`` is with enough slaves, or cannot be in time."""
        log_end = self._end()
        with self._lock:
            status = _OK if end <= self._replicated else None
            if status is None and self._in_sync(log_end) < self.slaves_needed:
                status = PutMessageStatus.SLAVE_NOT_AVAILABLE
            if status is None:
                wait = _Wait(end, self._clock.monotonic_ms() + self._timeout_ms, done)
                number = next(self._numbers)
                heapq.heappush(self._waiting, (end, number, wait))
                heapq.heappush(self._by_deadline, (wait.deadline_ms, number, wait))
                return
        done(status, "" if status is _OK else f"fewer than {self.slaves_needed} slaves follow this master")

    def joined(self, slave: object, broker_id: int, acknowledged: int) -> None:
        """A slave has come, and has everything before ``acknowledged``. ``broker_id``: ``UNNAMED`` if not known."""
        with self._lock:
            if self._is_closed:
                return
            self._ids[slave] = broker_id
            self._acknowledged[slave] = acknowledged
            self._heard_ms[slave] = self._clock.monotonic_ms()
            settled = self._settle()
        for wait in settled:
            wait.done(_OK, "")

    def acknowledged(self, slave: object, end: int) -> None:
        """A slave has everything before ``end``."""
        with self._lock:
            if slave not in self._acknowledged:
                return
            self._acknowledged[slave] = end
            self._heard_ms[slave] = self._clock.monotonic_ms()
            settled = self._settle()
        for wait in settled:
            wait.done(_OK, "")

    def left(self, slave: object) -> None:
        """A slave has gone; its acknowledgements count no more for what is not settled yet."""
        with self._lock:
            self._remove(slave)
            settled = self._settle()
        for wait in settled:  # another connection of it has more
            wait.done(_OK, "")

    def expire(self) -> float | None:
        """Answer those that have waited too long; returns the seconds until the next deadline, None if none waits."""
        now_ms = self._clock.monotonic_ms()
        late: list[_Wait] = []
        left_s = None
        with self._lock:
            while self._by_deadline:
                deadline_ms, _, wait = self._by_deadline[0]
                if wait.deadline_ms and deadline_ms > now_ms:
                    left_s = (deadline_ms - now_ms) / 1000
                    break
                heapq.heappop(self._by_deadline)
                if wait.deadline_ms:
                    wait.deadline_ms = 0  # answered; it leaves the other heap with those before it
                    late.append(wait)
            while self._waiting and not self._waiting[0][2].deadline_ms:
                heapq.heappop(self._waiting)
        for wait in late:
            wait.done(PutMessageStatus.FLUSH_SLAVE_TIMEOUT, f"no slave has it after {self._timeout_ms} ms")
        return left_s

    def close(self) -> None:
        """Answer everybody: nothing will be acknowledged any more, and no slave counts that comes later."""
        with self._lock:
            waiting = [wait for _, _, wait in self._waiting if wait.deadline_ms]
            self._waiting, self._by_deadline = [], []
            self._acknowledged.clear()
            self._ids.clear()
            self._heard_ms.clear()
            self._is_closed = True
        for wait in waiting:
            wait.done(PutMessageStatus.FLUSH_SLAVE_TIMEOUT, "this broker stops")

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _remove(self, slave: object) -> None:
        self._acknowledged.pop(slave, None)
        self._ids.pop(slave, None)
        self._heard_ms.pop(slave, None)
        self._replicated = -1

    def _copies(self) -> Iterable[int]:
        """How far each copy reaches."""
        copies: dict[int, int] = {}
        since_ms, living = self._clock.monotonic_ms() - self._living_ms, set[int]()
        for slave, end in self._acknowledged.items():  # in the order in which they have come
            broker_id = self._ids[slave]
            if broker_id == UNNAMED:
                copies[broker_id] = max(end, copies.get(broker_id, end))
            elif broker_id not in living:
                copies[broker_id] = end
                if self._heard_ms[slave] > since_ms:
                    living.add(broker_id)
        return copies.values()

    def _in_sync(self, end: int) -> int:
        return sum(end - one < self._behind_bytes_max for one in self._copies())

    def _settle(self) -> list[_Wait]:
        """Take out those whose messages are with enough slaves."""
        have = sorted(self._copies(), reverse=True)
        if len(have) < self.slaves_needed:
            return []
        self._replicated = have[self.slaves_needed - 1]
        settled: list[_Wait] = []
        while self._waiting and self._waiting[0][0] <= self._replicated:
            wait = heapq.heappop(self._waiting)[2]
            if wait.deadline_ms:
                wait.deadline_ms = 0
                settled.append(wait)
        return settled
