"""What every run of a seed has: time, a directory, a trace, and its result."""

from __future__ import annotations

import shutil
import zlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import dledger.store.durable_state
from tests.sim_store.clients import Clients
from tests.sim_store.model import Model
from tests.sim_store.substitutes import substitute
from tests.sim_store.threads import Group, Scheduler, running
from tests.support.memory_disk import new_directory

TAIL: Final = 60


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a seed."""

    seed: int
    decisions: int = 0
    simulated_ms: int = 0
    changes: int = 0
    crashes: int = 0
    acked: int = 0
    lost: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    trace_hash: int = 0
    failure: str | None = None
    tail: tuple[str, ...] = ()


class BootId:
    """What the kernel calls the boot of the machine that the running task is on."""

    def read_text(self) -> str:
        """As a file in ``/proc`` gives it."""
        group = running().current.group
        return "" if group is None else group.boot_id


class Counts(NamedTuple):
    """What a world counts for its result."""

    changes: int
    crashes: int
    hits: Counter[str]


class World(ABC):
    """Everything of one seed. Made, and run, while the product runs on ``scheduler``."""

    clients: Clients

    def __init__(self, seed: int, root: Path, *, preempt: float, trace: bool) -> None:
        self.seed = seed
        self.root = root
        self.random = Random(f"driver/{seed}")
        self.scheduler = Scheduler(Random(f"schedule/{seed}"), preempt=preempt)
        self.model = Model()
        self.hits: Counter[str] = Counter()
        self.trace_hash = seed
        self.groups: list[Group] = []
        self._trace: deque[str] = deque(maxlen=None if trace else TAIL)
        self._root_text = str(root)

    def event(self, what: str, *details: object) -> None:
        """Note an event."""
        line = f"{self.scheduler.now_us / 1000:12.3f} ms  {self.scheduler.current.name:24} {what} {details or ''}"
        line = line.replace(self._root_text, "")
        self.trace_hash = zlib.crc32(line.encode(), self.trace_hash)
        self._trace.append(line)

    @abstractmethod
    def run(self) -> None:
        """The whole life of this world. Raises ``ViolationError``, or whatever a broker raised."""

    @abstractmethod
    def counts(self) -> Counts:
        """For the result."""

    def end(self) -> None:
        """End whatever still runs."""
        for group in self.groups:
            self.scheduler.kill(group)

    def result(self, failure: str | None = None) -> Result:
        """What came of it."""
        changes, crashes, hits = self.counts()
        return Result(
            seed=self.seed,
            decisions=self.scheduler.points,
            simulated_ms=self.scheduler.now_ms,
            changes=changes,
            crashes=crashes,
            acked=self.model.acked,
            lost=self.model.lost,
            operations=self.clients.operations,
            hits=self.hits + hits,
            trace_hash=self.trace_hash,
            failure=None if failure is None else failure.replace(self._root_text, ""),
            tail=tuple(self._trace) if failure or self._trace.maxlen is None else (),
        )


def run_world(make: Callable[[Path], World]) -> Result:
    """Run a world in a directory of its own; never raises for what goes wrong in it."""
    root = new_directory("sim-store")
    world = make(root)
    boot_file = dledger.store.durable_state._BOOT_ID
    dledger.store.durable_state._BOOT_ID = BootId()  # type: ignore[misc,assignment]  # a file of the machine
    try:
        with substitute(world.scheduler):
            try:
                world.run()
            except Exception as error:  # noqa: BLE001 - whatever goes wrong belongs to its seed
                return world.result(f"{type(error).__name__}: {error}")
            finally:
                world.end()
        return world.result()
    finally:
        dledger.store.durable_state._BOOT_ID = boot_file  # type: ignore[misc]
        shutil.rmtree(root, ignore_errors=True)
