"""The time for a node with a long log to serve again, from starting the process to its first response."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.processes import PythonChild
from benchmarks.registry import Scenario, logs
from benchmarks.store_access import GROUP, NODE_ID
from benchmarks.targets import SMALL_LOG
from dledger_cli.local.group import LocalGroup

WRITER: Final = "benchmarks.children.store_writer"
TAIL_BYTES: Final = 32 << 20
"""Appended but never flushed before the SIGKILL, the same for a long and a short log."""
FILL_SECONDS_MAX: Final = 3600.0
MAPPED: Final = "open and map the same files"


class LoggedNode:
    """A group of one whose log was filled while it was stopped."""

    def __init__(self, directory: Path, log_bytes: int, stack: ExitStack) -> None:
        self.directory = directory
        self._group = stack.enter_context(LocalGroup(directory, size=1, name=GROUP))
        self._group.leader()
        self._group.stop(NODE_ID)
        self.fill(log_bytes)

    def fill(self, log_bytes: int) -> None:
        """Append so much while the node is stopped; then it runs until it has committed that, as a node would have."""
        with self._writer() as writer:
            writer.ask({"do": "fill", "bytes": log_bytes}, FILL_SECONDS_MAX)
            writer.ask({"do": "close"}, 60.0)
        self._group.start(NODE_ID)
        self._group.leader()
        with closing(self._group.client()) as client:
            client.append(b"")
        self._group.stop(NODE_ID)

    def restart_seconds(self) -> float:
        """Start the node, measure the time until it reports that it serves, and stop it cleanly again."""
        started = time.perf_counter()
        self._group.start(NODE_ID)
        took = time.perf_counter() - started
        self._group.stop(NODE_ID)
        return took

    def crash_with_tail(self) -> None:
        """Leave the log like a process killed with ``TAIL_BYTES`` not flushed."""
        with self._writer() as writer:
            writer.ask({"do": "leave_tail", "bytes": TAIL_BYTES}, 60.0)
            writer.kill()

    def map_files_seconds(self) -> float:
        """The minimum work of any restart: list, open and map every file, and unmap it again."""
        started = time.perf_counter()
        for path in self._group.store_dir(NODE_ID).rglob("*"):
            if path.is_file() and path.stat().st_size:
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
                    pass
        return time.perf_counter() - started

    def _writer(self) -> PythonChild:
        return PythonChild(WRITER, [str(self.directory)], self.directory / "writer.log")


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """A long log and one of a tenth of the size, restarted alternately."""
    log_bytes = int(context.settings.log_gib * (1 << 30))
    with ExitStack() as stack:
        long = LoggedNode(context.directory / "restart-long", log_bytes, stack)
        if "restart_clean" in names:
            clean: list[float] = []
            mapped: list[float] = []
            for _ in range(context.settings.rounds):
                clean.append(long.restart_seconds())
                mapped.append(long.map_files_seconds())
            yield Figure.median("restart_clean", clean, "s", MAPPED, mapped)
        if "restart_killed" in names:
            short = LoggedNode(context.directory / "restart-short", log_bytes // 10, stack)
            killed: dict[LoggedNode, list[float]] = {long: [], short: []}
            for _ in range(context.settings.rounds):
                for node, seconds in killed.items():
                    node.crash_with_tail()
                    seconds.append(node.restart_seconds())
            yield Figure.median("restart_killed", killed[long], "s", SMALL_LOG, killed[short])


SCENARIO: Final = Scenario("restart with a long log", ("restart_clean", "restart_killed"), measure, logs(1.2))
