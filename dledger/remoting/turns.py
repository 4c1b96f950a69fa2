"""Starts requests a few at a time, so that a turn of the event loop stays short however many arrive at once.

Hosts take turns, and so do the connections of a host; the requests of a connection start in their order. How many start
in a turn follows from what the last ones took until they ended or had to wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

TURN_S: Final = 0.002
"""About the time that requests may take of one turn of the loop."""
STARTS_MAX: Final = 64
"""Maximum starts in a turn, for those that turn out to take longer than the ones before."""
_COST_S_MIN: Final = TURN_S / STARTS_MAX
_FORGET: Final = 0.9
"""The part of an earlier estimate that is kept after a turn whose requests took less."""
_BY_CONNECTION = dict[object, deque[Callable[[], None]]]


class Turns:
    """On the loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _BY_CONNECTION] = {}  # by host; the first has the next turn
        self._count = 0
        self._is_running = False
        self._cost_s = _COST_S_MIN  # about what one start takes
        self._began_s = self._at_once_s = self._spent_s = 0.0
        self._started = 0

    def __len__(self) -> int:
        """How many have not started."""
        return self._count

    def add(self, host: str, connection: object, start: Callable[[], None]) -> None:
        """Call ``start`` in its turn; it may create a task."""
        self._waiting.setdefault(host, {}).setdefault(connection, deque()).append(start)
        self._count += 1
        if not self._is_running:
            self._is_running = True
            self._run()

    @property
    def has_time(self) -> bool:
        """Whether more may be done in this turn of the loop at once: nobody waits, and it has not taken long yet."""
        return not self._count and self._spent_s < TURN_S

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Counts what is done at once in this turn."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            if not self._spent_s:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._spent_s += max(time.thread_time() - began_s, _COST_S_MIN)

    def _next_turn(self) -> None:
        self._spent_s = 0.0

    def drop(self) -> None:
        """Start nothing that has not started yet."""
        self._waiting.clear()
        self._count = 0

    def _run(self) -> None:
        """The first steps of the tasks come one after the other, between the two measurements."""
        loop = asyncio.get_running_loop()
        run_s = time.thread_time()
        loop.call_soon(self._begin)
        self._started = min(self._count, max(1, round(TURN_S / self._cost_s)))
        for _ in range(self._started):
            self._next()()
        loop.call_soon(self._end)
        self._at_once_s = time.thread_time() - run_s

    def _begin(self) -> None:
        self._began_s = time.thread_time()

    def _end(self) -> None:
        took_s = (self._at_once_s + time.thread_time() - self._began_s) / self._started
        self._cost_s = max(took_s, self._cost_s * _FORGET, _COST_S_MIN)
        if self._count:
            self._run()
        else:
            self._is_running = False

    def _next(self) -> Callable[[], None]:
        host, connections = next(iter(self._waiting.items()))
        del self._waiting[host]
        connection, starts = next(iter(connections.items()))
        del connections[connection]
        start = starts.popleft()
        if starts:
            connections[connection] = starts
        if connections:
            self._waiting[host] = connections
        self._count -= 1
        return start
