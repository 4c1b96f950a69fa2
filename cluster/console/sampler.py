"""One sampler per console, however many pages are open: a thread per node asks it, as often as somebody cares.

Each node has a thread of its own, so that one that is paused (its requests run into their deadline) delays nobody
else's news. While no page is open nodes are asked seldom: the history goes on, at next to no cost.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from cluster.console.facts import NodeState
from cluster.console.history import NODES_MAX, History
from cluster.console.probe import GroupProbe
from dledger.errors import DLedgerError, RequestTimeoutError

JOIN_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SamplePace:
    """How often a node is asked, and how long it may take to answer."""

    watched_s: float = 0.5
    unwatched_s: float = 2.0
    unsettled_s: float = 0.15
    """While there is no leader, or was none a moment ago, and somebody looks."""
    unreachable_s: float = 1.0
    timeout_s: float = 0.8
    retry_timeout_s: float = 0.3
    """For a node that did not answer the last time."""


def wall_ms() -> int:
    """Milliseconds since 1970: what pages show."""
    return int(time.time() * 1000)


class Sampler:
    """Fills a ``History``; starts threads for nodes as they become known."""

    def __init__(self, probe: GroupProbe, history: History, pace: SamplePace | None = None) -> None:
        self._probe = probe
        self._history = history
        self._pace = pace or SamplePace()
        self._changed = threading.Condition()  # guards the fields below
        self._threads: dict[str, threading.Thread] = {}
        self._watched = False
        self._stopping = False
        self._nudges = 0

    def start(self) -> None:
        """Begin to ask."""
        self._cover()

    def stop(self) -> None:
        """End every thread; their requests fail at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._probe.close()
        for thread in tuple(self._threads.values()):
            thread.join(JOIN_TIMEOUT_S)

    def watch(self, *, watched: bool) -> None:
        """Whether anybody looks."""
        with self._changed:
            if watched and not self._watched:
                self._nudges += 1
                self._changed.notify_all()
            self._watched = watched

    def nudge(self) -> None:
        """Ask everybody now: something was done to the group."""
        with self._changed:
            self._nudges += 1
            self._changed.notify_all()

    def _cover(self) -> None:
        """A thread for each address that has none."""
        with self._changed:
            for address in self._history.addresses():
                if address in self._threads or self._stopping or len(self._threads) >= 2 * NODES_MAX:
                    continue
                thread = threading.Thread(target=self._follow, args=(address,), name=f"dledger-console-{address}")
                thread.daemon = True  # a request may not end at once, and must not keep a stopped console alive
                self._threads[address] = thread
                thread.start()

    def _follow(self, address: str) -> None:
        answered = True
        while True:
            with self._changed:
                if self._stopping:
                    return
                if address not in self._history.addresses():  # the node was found elsewhere
                    del self._threads[address]
                    return
                seen = self._nudges
            started = time.monotonic()
            answered = self._ask(address, self._pace.timeout_s if answered else self._pace.retry_timeout_s)
            if answered:
                self._cover()
            interval_s = self._interval_s(answered=answered)
            due = (started // interval_s + 1) * interval_s  # all at the same moments, so that answers can be compared
            with self._changed:
                self._changed.wait_for(
                    lambda seen=seen: self._stopping or self._nudges != seen,  # type: ignore[misc]  # bound on purpose
                    max(0.0, due - time.monotonic()),
                )

    def _ask(self, address: str, timeout_s: float) -> bool:
        try:
            answer = self._probe.ask(address, timeout_s)
        except DLedgerError as error:
            if not self._stopping:
                self._history.failed(address, error, wall_ms(), silent=isinstance(error, RequestTimeoutError))
            return False
        self._history.answered(address, answer, wall_ms())
        return answer.facts.state is not NodeState.UNREACHABLE

    def _interval_s(self, *, answered: bool) -> float:
        if not self._watched:
            return self._pace.unwatched_s
        if answered and self._history.unsettled(wall_ms()):
            return self._pace.unsettled_s
        return self._pace.watched_s if answered else self._pace.unreachable_s
