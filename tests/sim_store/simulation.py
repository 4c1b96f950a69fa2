"""One run of one seed: a broker's lives, each ended by a stop or a crash; then a last one without faults."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

from rocketstore.types import FlushDiskType
from tests.sim_store.broker import PlainBroker
from tests.sim_store.checks import all_delivered, check_consumers, check_keys, check_queues, wait_until
from tests.sim_store.clients import Clients
from tests.sim_store.disk import Disk, SimFs
from tests.sim_store.model import ViolationError, require
from tests.sim_store.options import Options, at, choose, with_transactions
from tests.sim_store.threads import Group
from tests.sim_store.transactions import Producers
from tests.sim_store.world import Counts, Result, World, run_world

START_S: Final = 120.0
"""Of virtual time: a start has ended by then."""


class Simulation(World):
    """The world of one seed with a plain broker."""

    def __init__(self, options: Options, root: Path, *, trace: bool = False) -> None:
        seed = options.seed
        super().__init__(seed, root, preempt=options.preempt, trace=trace)
        self.options = options
        self.disk = Disk(root / "disk", self.scheduler, Random(f"disk/{seed}"))
        self.disk.trace = self._trace_disk
        dice = Random(f"transactions/{seed}")
        self.producers = Producers(self.scheduler, dice) if options.transactions else None
        self.clients = Clients(
            self.scheduler,
            self.model,
            Random(f"clients/{seed}"),
            queues=options.queues,
            retention=options.retention,
            may_fail=lambda: self.faulty,
            producers=self.producers,
        )
        self.model.synced = options.store.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self.faulty = False
        """A disk has failed in this life, so that the broker may have given up."""
        self.healed = False
        self.crashes = 0
        self.boot = 0
        self.ended_by = ""
        """What ended the last life."""

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
        self.model.on_acked = lambda: None
        ending = self._ending()
        self.disk.stop_after = None
        self.event(f"ending: {ending}")
        if ending == "stop":
            stop[0] = True
            return self._stop(broker)
        return self._crash(broker, ending)

    def _ending(self) -> str:
        if self.disk.stopped:
            self.hits["crash point"] += 1
            return "power" if self.options.has("power") else "kill"
        kinds = ["stop"] + [kind for kind in ("kill", "power", "power") if self.options.has(kind)]
        return self.random.choice(kinds)

    def _begin(self, durable: int) -> PlainBroker | None:
        """Start a process and see what it has; None if it crashed or was refused for a fault of its disk meanwhile."""
        self.boot += 1
        self.faulty = False
        group = Group(f"life {self.boot}", boot_id=f"boot-{self.crashes}")
        group.fs = SimFs(self.disk, lambda: group.dead)
        self.groups = [group]
        config = at(self.options, self.disk.root / "store")
        made: list[PlainBroker] = []
        started: list[bool] = []

        def start() -> None:
            made.append(PlainBroker.make(group, config, self.options.state, self.scheduler, self.producers))
            made[0].start()
            started.append(True)

        if self.options.has("derived") and self.boot > 1 and self.random.random() < 0.25:
            self._lose_derived()
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

    def _lose_derived(self) -> None:
        """Somebody removes what is derived from the log, or a part of it, while no broker runs."""
        names = ["index"]
        if self.ended_by != "power":  # what it took could not be told from damage: such a log is refused
            names.append("checkpoint")
        if not self.options.has("full"):  # then nothing waits for the queues' numbers to be written down
            names += ["consumequeue", "consumequeue/A", "consumequeue/B/0"]
        what = self.random.choice(names)
        gone = self.disk.root / "store" / what
        if not gone.exists():
            return
        self.hits["derived files gone"] += 1
        self.event("gone", what)
        kept = {path: content for path, content in self.disk.copy().items() if gone not in (path, *path.parents)}
        dirs = {one for one in self.disk.root.rglob("*") if one.is_dir() and gone not in (one, *one.parents)}
        self.disk.become(kept, dirs | {self.disk.root})

    def _check(self, broker: PlainBroker) -> None:
        store = broker.store
        wait_until(self.scheduler, lambda: store.wait_dispatched(1.0), "the log is not dispatched")
        count = check_queues(store, self.model)
        check_keys(store, self.model, self.scheduler)
        check_consumers(broker.state, store, self.model)
        if self.producers is not None:
            self.producers.check(store, all_kept=False)
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
        if self.options.has("crash_point"):
            self._aim()
        while self.scheduler.now_us < end_us and not self.disk.stopped:
            rest_us = int(self.random.random() * min(400_000, self.options.life_ms * 500))
            while rest_us > 0 and not self.disk.stopped:
                self.scheduler.sleep_us(min(rest_us, 2_000))
                rest_us -= 2_000
            self._look_at(broker)
            if self.random.random() < 0.15:
                self._break_disk()
            elif self.random.random() < 0.3:
                self._heal_disk()

    def _aim(self) -> None:
        """Have the life end between two changes of the disk: any two, or right behind an acknowledgement."""
        disk, random = self.disk, self.random
        left = int(random.random() * 60)
        if random.random() < 0.5:
            disk.stop_after = int(random.random() * 600)
            return

        def acked() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                disk.stop_after = random.choice((0, 0, 1, 2, 5))

        self.model.on_acked = acked

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
        self.ended_by = how
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
            self._settle(broker)
            stop_us = self.scheduler.now_us + 300_000
            self.clients.run(broker.group, store, broker.state, lambda: self.scheduler.now_us > stop_us)
            self._settle(broker)
            self._check(broker)

        self._in_process(broker, "finish", finish)
        end = self._stop(broker)
        last = self._begin(end)
        require(last is not None, "a healed broker does not start again")

    def _settle(self, broker: PlainBroker) -> None:
        """All transactions end, for their producers answer."""
        producers = self.producers
        if producers is not None:
            store = broker.store
            wait_until(
                self.scheduler, lambda: producers.have_ended(store, broker.transactions), "transactions stay open"
            )
            producers.check(store, all_kept=self.model.synced)

    def counts(self) -> Counts:
        """For the result."""
        hits = self.disk.hits if self.producers is None else self.disk.hits + self.producers.hits
        return Counts(self.disk.changes, self.hits["power"] + self.hits["kill"], hits)


def run_seed(seed: int, *, trace: bool = False, transactions: bool = False) -> Result:
    """Run one seed of a plain broker; never raises for what goes wrong in it."""
    options = with_transactions(choose(seed)) if transactions else choose(seed)
    return run_world(lambda root: Simulation(options, root, trace=trace))
