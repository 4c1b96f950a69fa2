"""One run of one seed: a broker's lives, each ended by a stop or a crash; then a last one without faults."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import dledger.store.traces
from tests.sim_store.broker import PlainBroker
from tests.sim_store.checks import all_delivered, check_consumers, check_keys, check_queues, wait_until
from tests.sim_store.clients import Clients
from tests.sim_store.disk import Disk
from tests.sim_store.model import Model, ViolationError, require
from tests.sim_store.options import Options, at, choose
from tests.sim_store.substitutes import substitute
from tests.sim_store.threads import DeadlockError, Group, Scheduler, running
from tests.support.memory_disk import new_directory

TAIL: Final = 60
START_S: Final = 120.0
"""Of virtual time: a start has ended by then."""


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


class Simulation:
    """The world of one seed with a plain broker."""

    def __init__(self, options: Options, root: Path, *, trace: bool = False) -> None:
        seed = options.seed
        self.options = options
        self.root = root
        self.random = Random(f"driver/{seed}")
        self.scheduler = Scheduler(Random(f"schedule/{seed}"), preempt=options.preempt)
        self.disk = Disk(root / "disk", self.scheduler, Random(f"disk/{seed}"))
        self.disk.trace = self._trace_disk
        self.model = Model()
        self.clients = Clients(
            self.scheduler,
            self.model,
            Random(f"clients/{seed}"),
            retention=options.retention,
            may_fail=lambda: self.faulty,
        )
        self.faulty = False
        """A disk has failed in this life, so that the broker may have given up."""
        self.healed = False
        self.crashes = 0
        self.boot = 0
        self.hits: Counter[str] = Counter()
        self.trace_hash = seed
        self._trace: deque[str] = deque(maxlen=None if trace else TAIL)
        self._root_text = str(self.disk.root)
        self._groups: list[Group] = []

    # -- telling -------------------------------------------------------------------------------------------------

    def event(self, what: str, *details: object) -> None:
        """Note an event."""
        line = f"{self.scheduler.now_us / 1000:12.3f} ms  {self.scheduler.current.name:24} {what} {details or ''}"
        line = line.replace(self._root_text, "")
        self.trace_hash = zlib.crc32(line.encode(), self.trace_hash)
        self._trace.append(line)

    def _trace_disk(self, what: str, where: str) -> None:
        self.event(what, where)

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All lives. Raises ``ViolationError``, or whatever a broker raised."""
        durable = 0
        for _ in range(self.options.lives):
            durable = self._live(durable)
        self.healed = True
        self._heal_disk()
        broker = self._begin(durable)
        require(broker is not None, "a healed broker does not start")
        if broker is not None:
            self._finish(broker)

    def _heal_disk(self) -> None:
        disk = self.disk
        disk.full, disk.fail_sync, disk.fail_write, disk.hang_until_us, disk.slow_us = False, 0.0, 0.0, 0, 0

    def _live(self, durable: int) -> int:
        """One life; gives up to where the log is safe after it."""
        broker = self._begin(durable)
        if broker is None:
            return durable
        stop = [False]
        group = broker.group
        for number in range(self.options.clients):
            self.scheduler.spawn(
                f"client-{number}",
                lambda: self.clients.run(group, broker.store, broker.state, lambda: stop[0]),
                group,
            )
        self._harass(broker)
        self._look_at(broker)
        ending = self._ending()
        self.event(f"ending: {ending}")
        if ending == "stop":
            stop[0] = True
            return self._stop(broker)
        return self._crash(broker, ending)

    def _ending(self) -> str:
        kinds = ["stop"] + [kind for kind in ("kill", "power", "power") if self.options.has(kind)]
        return self.random.choice(kinds)

    def _begin(self, durable: int) -> PlainBroker | None:
        """Start a process and see what it has; None if it crashed or was refused for a fault of its disk meanwhile."""
        self.boot += 1
        self.faulty = False
        group = Group(f"life {self.boot}", boot_id=f"boot-{self.crashes}")
        self._groups = [group]
        config = at(self.options, self.disk.root / "store")
        made: list[PlainBroker] = []
        started: list[bool] = []

        def start() -> None:
            made.append(PlainBroker.make(group, config, self.options.state, self.disk, self.scheduler))
            made[0].start()
            started.append(True)

        self.event("start")
        if not self.healed and self.boot > 1 and self.random.random() < 0.15:
            self._break_disk()
        self.scheduler.spawn("main", start, group)
        if not self.healed and self.options.has("early_crash") and self.boot > 1 and self.random.random() < 0.3:
            self.scheduler.sleep_us(int(self.random.random() * self.random.choice((2_000, 20_000, 100_000))))
            if not started and group.failure is None:
                self.hits["crash of a start"] += 1
                self._end_process(group, self.random.choice(("kill", "power")))
                return None
        deadline_us = self.scheduler.now_us + int(START_S * 1_000_000)
        while not started and group.failure is None:
            require(self.scheduler.now_us < deadline_us, "a start does not end")
            self.scheduler.sleep_us(5_000)
        if group.failure is not None:
            error = group.failure
            self.event("start failed", repr(error))
            if not self.faulty:
                raise error
            self.hits["start refused"] += 1
            self._heal_disk()
            self._end_process(group, "power" if self._must_cut_power() else "kill")
            return None
        broker = made[0]
        self.model.lose_from(broker.recovered_end, durable)
        if not self.faulty:
            self._in_process(broker, "check", lambda: self._check(broker))
        return broker

    def _check(self, broker: PlainBroker) -> None:
        store = broker.store
        wait_until(self.scheduler, lambda: store.wait_dispatched(1.0), "the log is not dispatched")
        count = check_queues(store, self.model)
        check_keys(store, self.model, self.scheduler)
        check_consumers(broker.state, store, self.model)
        self.event("checked", count, store.log.min_offset, store.log.max_offset)

    def _in_process(self, broker: PlainBroker, name: str, action: object) -> None:
        """Do something as a thread of the broker's process, and wait for it."""
        ended: list[bool] = []

        def run() -> None:
            if callable(action):
                action()
            ended.append(True)

        self.scheduler.spawn(name, run, broker.group)
        deadline_us = self.scheduler.now_us + 600_000_000
        while not ended:
            self._look_at(broker)
            require(self.scheduler.now_us < deadline_us, f"{name} does not end")
            self.scheduler.sleep_us(2_000)

    # -- faults --------------------------------------------------------------------------------------------------

    def _break_disk(self) -> None:
        options, disk, random = self.options, self.disk, self.random
        kinds = [kind for kind in ("full", "eio", "hang", "slow") if options.has(kind)]
        if not kinds:
            return
        kind = random.choice(kinds)
        self.hits[kind] += 1
        self.event(f"disk: {kind}")
        if kind == "full":
            disk.full, disk.full_chance = True, random.choice((0.1, 0.7, 1.0))
            self.faulty = True
        elif kind == "eio":
            self.faulty = True
            disk.fail_sync, disk.fail_write = random.choice((0.02, 0.5)), random.choice((0.0, 0.05))
        elif kind == "hang":
            disk.hang_until_us = self.scheduler.now_us + int(random.random() * 8_000_000)
        else:
            disk.slow_us = random.choice((500, 20_000))

    def _harass(self, broker: PlainBroker) -> None:
        """Let the clients work for the length of a life; the disk may misbehave at times."""
        end_us = self.scheduler.now_us + int(self.random.random() * self.options.life_ms * 1000)
        while self.scheduler.now_us < end_us:
            self.scheduler.sleep_us(int(self.random.random() * min(400_000, self.options.life_ms * 500)))
            self._look_at(broker)
            if self.random.random() < 0.15:
                self._break_disk()
            elif self.random.random() < 0.3:
                self._heal_disk()

    def _look_at(self, broker: PlainBroker) -> None:
        if broker.group.failure is not None:
            raise broker.group.failure
        if (broker.failure or broker.poison) and not self.faulty:
            raise ViolationError(f"the broker gave up on a sound disk: {broker.failure!r} {broker.poison}")

    # -- ends ----------------------------------------------------------------------------------------------------

    def _must_cut_power(self) -> bool:
        return any(inode.forgotten for inode in self.disk.names.values())

    def _crash(self, broker: PlainBroker, how: str) -> int:
        if self._must_cut_power():
            how = "power"
        log = broker.store.log
        durable = log.flushed_offset if how == "power" else log.end_offset
        self._end_process(broker.group, how)
        return durable

    def _end_process(self, group: Group, how: str) -> None:
        self.event(f"crash: {how}")
        self._heal_disk()
        self.scheduler.kill(group)
        self.model.crashed()
        self.hits[how] += 1
        if how == "power":
            self.crashes += 1
            self.disk.cut_power()
        else:
            self.disk.kill()

    def _stop(self, broker: PlainBroker) -> int:
        self._heal_disk()
        gave_up = bool(broker.failure or broker.poison)
        log = broker.store.log
        ended: list[BaseException | None] = []

        def stop() -> None:
            try:
                broker.stop()
            except Exception as error:  # noqa: BLE001 - looked at below
                ended.append(error)
            else:
                ended.append(None)

        self.scheduler.spawn("stop", stop, broker.group)
        deadline_us = self.scheduler.now_us + 300_000_000
        while not ended and broker.group.failure is None:
            require(self.scheduler.now_us < deadline_us, "a stop does not end")
            self.scheduler.sleep_us(5_000)
        if broker.group.failure is not None:
            raise broker.group.failure
        if ended[0] is not None and not (gave_up or self.faulty):
            raise ended[0]
        durable = log.flushed_offset
        clean = ended[0] is None
        self.hits["stop"] += 1
        self._end_process(broker.group, "power" if self._must_cut_power() else "kill")
        return durable if clean else 0

    def _finish(self, broker: PlainBroker) -> None:
        """Everything that was promised is there, and goes on."""

        def finish() -> None:
            store = broker.store
            wait_until(self.scheduler, lambda: all_delivered(store, self.model), "delayed messages are not delivered")
            self._check(broker)
            stop_us = self.scheduler.now_us + 300_000
            self.clients.run(broker.group, store, broker.state, lambda: self.scheduler.now_us > stop_us)
            self._check(broker)

        self._in_process(broker, "finish", finish)
        end = self._stop(broker)
        last = self._begin(end)
        require(last is not None, "a healed broker does not start again")

    def end(self) -> None:
        """End whatever still runs."""
        for group in self._groups:
            self.scheduler.kill(group)

    def result(self, failure: str | None = None) -> Result:
        """What came of it."""
        return Result(
            seed=self.options.seed,
            decisions=self.scheduler.points,
            simulated_ms=self.scheduler.now_ms,
            changes=self.disk.changes,
            crashes=self.hits["power"] + self.hits["kill"],
            acked=self.model.acked,
            lost=self.model.lost,
            operations=self.clients.operations,
            hits=self.hits + self.disk.hits,
            trace_hash=self.trace_hash,
            failure=failure,
            tail=tuple(self._trace) if failure or self._trace.maxlen is None else (),
        )


def run_seed(seed: int, *, trace: bool = False) -> Result:
    """Run one seed; never raises for what goes wrong in it."""
    root = new_directory("sim-store")
    options = choose(seed)
    simulation = Simulation(options, root, trace=trace)
    boot_file = dledger.store.traces._BOOT_ID
    dledger.store.traces._BOOT_ID = BootId()  # type: ignore[misc,assignment]  # a file of the machine
    try:
        with substitute(simulation.scheduler):
            try:
                simulation.run()
            except (Exception, DeadlockError) as error:  # noqa: BLE001 - whatever goes wrong belongs to its seed
                return simulation.result(f"{type(error).__name__}: {error}".replace(str(simulation.disk.root), ""))
            finally:
                simulation.end()
        return simulation.result()
    finally:
        dledger.store.traces._BOOT_ID = boot_file  # type: ignore[misc]
        shutil.rmtree(root, ignore_errors=True)
