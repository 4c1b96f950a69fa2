"""One PySyncObj node as a separate process; arguments: its address, the others' addresses, its journal.

Commands are JSON lines on stdin, responses go to stdout; it exits when stdin is closed. The leader's process is also
the pipelining client, because PySyncObj has no remote client: it is used as a library on the node.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, replicated


class AppendLog(SyncObj):  # type: ignore[misc]  # PySyncObj has no types
    """The cheapest possible state machine: it only counts, so that only replication is measured."""

    def __init__(self, address: str, others: list[str], journal: str) -> None:
        self.applied = 0
        super().__init__(address, others, SyncObjConf(journalFile=journal))

    @replicated  # type: ignore[untyped-decorator]  # PySyncObj has no types
    def append_value(self, _value: bytes) -> int:
        """Take one value."""
        self.applied += 1
        return self.applied


class ClosedLoop:
    """Keeps ``window`` appends outstanding: every callback that reports a commit submits the next append."""

    def __init__(self, node: AppendLog, window: int, body: bytes) -> None:
        self._node = node
        self._window = window
        self._body = body
        self._running = True
        self._outstanding = window
        self._drained = threading.Event()
        self.acknowledged = 0
        self.failed = 0

    def start(self) -> None:
        """Fill the window."""
        for _ in range(self._window):
            self._submit()

    def finish(self, timeout_seconds: float) -> bool:
        """Submit nothing more; returns whether everything outstanding completed in time."""
        self._running = False
        return self._drained.wait(timeout_seconds)

    def _submit(self) -> None:
        self._node.append_value(self._body, callback=self._done)

    def _done(self, _result: object, reason: int) -> None:
        # Only PySyncObj's one tick thread calls this, so the counters need no lock.
        if reason == FAIL_REASON.SUCCESS:
            self.acknowledged += 1
        else:
            self.failed += 1
        if self._running:
            self._submit()
        else:
            self._outstanding -= 1
            if not self._outstanding:
                self._drained.set()


def measure(node: AppendLog, command: Mapping[str, Any]) -> dict[str, object]:  # Any: the values of a JSON object
    """Run one closed loop; the entries acknowledged per second after the warm-up."""
    loop = ClosedLoop(node, command["window"], os.urandom(command["body_bytes"]))
    loop.start()
    time.sleep(command["warmup_seconds"])
    first, started = loop.acknowledged, time.perf_counter()
    time.sleep(command["seconds"])
    acknowledged, took = loop.acknowledged - first, time.perf_counter() - started
    drained = loop.finish(30.0)
    return {"per_second": acknowledged / took, "failed": loop.failed, "drained": drained}


def answer(node: AppendLog, command: Mapping[str, Any]) -> dict[str, object]:  # Any: the values of a JSON object
    """The response to a command."""
    actions: dict[str, Callable[[], dict[str, object]]] = {
        "status": lambda: {"leader": node._isLeader(), "ready": node.isReady()},
        "measure": lambda: measure(node, command),
    }
    return actions[command["do"]]()


def main() -> None:
    """Serve until stdin closes."""
    address, *others, journal = sys.argv[1:]
    node = AppendLog(address, others, journal)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(node, json.loads(line))) + "\n")
        sys.stdout.flush()
    node.destroy()


if __name__ == "__main__":
    main()
