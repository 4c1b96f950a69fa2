"""One sampler per console, however many pages are open, with a polling thread per node.

Each node has its own thread, so that a paused one, whose requests run into their deadline, does not delay the others.
While no page is open, nodes are polled rarely: the history continues at little cost.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from dledger.errors import DLedgerError, RequestTimeoutError
from dledger_cli.console.history import NODES_MAX, History
from dledger_cli.console.probe import GroupProbe, NodeState

JOIN_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SamplePace:
    """How often a node is polled, and how long it may take to respond."""

    watched_s: float = 1.0
    unwatched_s: float = 2.0
    unsettled_s: float = 0.15
    """While a page is open and there is no leader, or was none a moment ago."""
    unreachable_s: float = 1.0
    timeout_s: float = 0.8
    retry_timeout_s: float = 0.3
    """For a node that did not respond the last time."""


def wall_ms() -> int:
    """Milliseconds since 1970, as shown on pages."""
    return int(time.time() * 1000)


class Sampler:
    """Fills a ``History``; starts threads for nodes as they are discovered."""

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
        self._cover()

    def stop(self) -> None:
        """Stop all threads; their requests fail at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._probe.close()
        for thread in tuple(self._threads.values()):
            thread.join(JOIN_TIMEOUT_S)

    def watch(self, *, watched: bool) -> None:
        """Set whether a page is open."""
        with self._changed:
            if watched and not self._watched:
                self._nudges += 1
                self._changed.notify_all()
            self._watched = watched

    def nudge(self) -> None:
        """Poll all nodes now, because an action changed the group."""
        with self._changed:
            self._nudges += 1
            self._changed.notify_all()

    def _cover(self) -> None:
        """Start a thread for each address without one."""
        with self._changed:
            for address in self._history.addresses():
                if address in self._threads or self._stopping or len(self._threads) >= 2 * NODES_MAX:
                    continue
                thread = threading.Thread(target=self._follow, args=(address,), name=f"dledger-console-{address}")
                thread.daemon = True  # a request may not end at once, and must not keep a stopped console running
                self._threads[address] = thread
                thread.start()

    def _follow(self, address: str) -> None:
        answered = True
        while True:
            with self._changed:
                if self._stopping:
                    return
                if address not in self._history.addresses():  # the node was found at another address
                    del self._threads[address]
                    return
                seen = self._nudges
            started = time.monotonic()
            answered = self._ask(address, self._pace.timeout_s if answered else self._pace.retry_timeout_s)
            if answered:
                self._cover()
            interval_s = self._interval_s(answered=answered)
            due = (started // interval_s + 1) * interval_s  # the same moments for all nodes, to compare them
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
        return answer.summary.state is not NodeState.UNREACHABLE

    def _interval_s(self, *, answered: bool) -> float:
        if not self._watched:
            return self._pace.unwatched_s
        if answered and self._history.unsettled(wall_ms()):
            return self._pace.unsettled_s
        return self._pace.watched_s if answered else self._pace.unreachable_s
