"""The threads of a process that do what its groups' members do by time, one for each kind of work."""

from __future__ import annotations

from typing import Final

from dledger.clock import Clock
from dledger.runtime.supervisor import Supervisor
from dledger.runtime.tasks import TaskThread
from dledger.runtime.worker import JOIN_TIMEOUT_S


class Housekeeping:
    """From ``start`` to ``stop``. ``name``: of the process, for the threads' names."""

    def __init__(self, name: str, clock: Clock, supervisor: Supervisor) -> None:
        def thread(work: str, slack_ms: int = 0) -> TaskThread:
            return TaskThread(f"{work}-{name}", clock, supervisor, slack_ms)

        self.timers: Final = thread("dledger-timers", slack_ms=20)
        """Elections, heartbeats, time-outs of appends: may wait for a node's lock and its hard state's sync."""
        self.checkpoint: Final = thread("dledger-checkpoint", slack_ms=20)
        """May wait for the sync of data and small files."""
        self.warm: Final = thread("dledger-warm", slack_ms=10)
        """May wait for space to be reserved and zeros to be written."""
        self.clean: Final = thread("dledger-clean", slack_ms=100)
        """May wait for a node's lock and the removal of files."""
        self.scrub: Final = thread("dledger-scrub", slack_ms=100)
        """May wait for reads, and for peers."""
        self._threads = (self.timers, self.checkpoint, self.warm, self.clean, self.scrub)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, each after its step in progress. Idempotent."""
        for thread in self._threads:
            thread.stop(JOIN_TIMEOUT_S)
