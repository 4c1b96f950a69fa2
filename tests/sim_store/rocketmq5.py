"""One run of one seed with a group whose clients pop, and send and recall timed messages, besides the usual ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from dledger.types import NodeId
from rocketstore.timer.hours import HOUR_MS
from tests.sim_store.broker import MemberBroker
from tests.sim_store.clients import FurtherClients
from tests.sim_store.disk import Disk
from tests.sim_store.group import GroupSimulation, Member
from tests.sim_store.model import require
from tests.sim_store.options import GroupOptions, choose_group, group_with_rocketmq5
from tests.sim_store.popping import PopWorkload
from tests.sim_store.serving import ServingBroker, wall_ms
from tests.sim_store.threads import EPOCH_MS, Waiter
from tests.sim_store.timed import HEALTHY_MS, TimedWorkload
from tests.sim_store.world import Counts, Result, run_world

DRAIN_S: Final = 240.0
"""Of virtual time: by then a healed group has given out everything, whatever was invisible or parked."""


class RocketMQ5Simulation(GroupSimulation):
    """The world of one seed."""

    broker_type = ServingBroker

    def __init__(self, options: GroupOptions, root: Path, *, trace: bool = False) -> None:
        super().__init__(options, root, trace=trace)
        dice = Random(f"rocketmq5/{options.seed}")
        to_hour_ms = HOUR_MS - EPOCH_MS % HOUR_MS
        begin_ms = dice.choice((0, to_hour_ms - 8_000, to_hour_ms - 300_000 - 5_000))
        self.scheduler.now_us = begin_ms * 1000  # an hour begins, or is loaded, while clients work
        self._events_left = dice.randrange(5, 60)
        self._resting: Waiter | None = None

    def further_clients(self) -> Sequence[FurtherClients]:
        """See ``GroupSimulation``."""
        seed = self.options.seed
        dice, renews, parks = Random(f"pop/{seed}"), seed % 6 == 0, seed % 8 == 4
        self.popping = PopWorkload(self._happened, dice, renews=renews, parks=parks)
        self.timed = TimedWorkload(self._happened, Random(f"timed/{seed}"), self.model)
        return self.popping, self.timed

    def made(self, broker: MemberBroker) -> None:
        """See ``GroupSimulation``."""
        assert isinstance(broker, ServingBroker)
        self.popping.brokers[broker.store] = self.timed.brokers[broker.store] = broker
        broker.copying = self._happened

    def prepare(self) -> None:
        """Topics and groups."""
        for member in self.members:
            if member.broker is not None and member.broker.is_master:
                self._on(member, lambda broker: broker.run(self.popping.prepare(broker)))
                self._on(member, lambda broker: broker.run(self.timed.prepare(broker)))

    def rest(self, for_us: int) -> None:
        """At times the master ends right behind something that a client was told, or when a message is due."""
        random, scheduler = self.random, self.scheduler
        due_us = (self.timed.next_due_ms() - wall_ms()) * 1000
        if due_us < for_us and random.random() < 0.3:
            scheduler.sleep_us(due_us + int(random.random() * 60_000))
            self.hits["crash when a message is due"] += 1
            self._crash_leader()
            return
        self._resting = Waiter(scheduler.current)
        if scheduler.block(self._resting, for_us):
            scheduler.sleep_us(int(random.random() * random.choice((1, 1_000, 20_000))))
            self.hits["crash behind an answer"] += 1
            self._events_left = random.randrange(5, 60)
            self._crash_leader()
        self._resting = None

    def _happened(self) -> None:
        """A client was told something, or a message is to be stored again."""
        self._events_left -= 1
        if self._events_left <= 0 and self._resting is not None and self.working:
            self.scheduler.wake(self._resting)

    def _down(self, member: Member, how: str, *, for_us: int | None = None) -> None:
        super()._down(member, how, for_us=for_us)
        if self.working and self.random.random() < 0.1:
            self.hits["hours gone"] += lose_hours(member.disk, everything=self.random.random() < 0.5)

    def _on(self, member: Member, action: Callable[[ServingBroker], object]) -> None:
        def act(broker: MemberBroker) -> None:
            assert isinstance(broker, ServingBroker)
            action(broker)

        self._run_on(member, act)

    def _on_master(self, action: Callable[[ServingBroker], object]) -> None:
        for member in self.members:
            if member.broker is not None and member.broker.is_master:
                self._on(member, action)
                return

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Everything that was promised is given out, and settled, and on every member."""
        self._deliver()
        self._drain()
        super()._finish()
        windows = set()
        for member in self.members:
            self._on(member, self.timed.look)
            self._on(member, self.popping.check)
            self._on(member, lambda broker: windows.add(str(self.popping.windows(broker))))
        require(len(windows) == 1, "members have different windows", *sorted(windows))
        self._compare_hours()

    def _deliver(self) -> None:
        """What is due comes soon, also what is sent now."""
        made: list[str] = []

        def send(broker: ServingBroker) -> None:
            sent = broker.run(self.timed.send(broker, wall_ms() + 500))
            made.extend([sent.handle] if sent.handle else [])

        for _ in range(40):
            self._on_master(send)
            if made:
                break
            self.scheduler.sleep_us(200_000)
            self._look_after()
        require(made, "the healed group takes no timed message")
        deadline_ms = wall_ms() + HEALTHY_MS
        while True:
            self._on_master(self.timed.look)
            late = self.timed.late()
            if not late and wall_ms() > deadline_ms - HEALTHY_MS + 600:
                return
            require(wall_ms() < deadline_ms, "timed messages do not come", *late[:3])
            self.scheduler.sleep_us(100_000)
            self._look_after()

    def _drain(self) -> None:
        deadline_us = self.scheduler.now_us + int(DRAIN_S * 1_000_000)
        done: list[bool] = []
        left: list[object] = []

        def drain(broker: ServingBroker) -> None:
            if self.popping.drain(broker):
                done.append(True)
            left[:] = self.popping.windows(broker)

        while not done:
            self._on_master(drain)
            require(self.scheduler.now_us < deadline_us, "messages are not given out", *left)
            self.scheduler.sleep_us(300_000)
            self._look_after()

    def _compare_hours(self) -> None:
        """The files of hours are the same on every member, and after they were built again."""
        logs = [one.broker.store for one in self.members if one.broker is not None]
        begin, end = max(one.log.min_offset for one in logs), min(one.dispatch_position for one in logs)
        files: dict[NodeId, dict[int, bytes]] = {}

        def read(name: NodeId, broker: ServingBroker) -> None:
            files[name] = self.timed.hours(broker, begin, end)

        for member in self.members:
            self._on(member, partial(read, member.name))
        first, before = self.members[0], dict(files)
        for name, found in before.items():
            require(found == before[first.name], "files of hours differ", first.name, name)
        first.end("kill")
        lose_hours(first.disk, everything=True)
        self._wait(self._is_well, "the group does not settle without the files of hours")
        self._on(first, partial(read, first.name))
        built, known = files[first.name], before[first.name]
        require(built == known, "files of hours are built in another way", first.name, sorted(built), sorted(known))

    def counts(self) -> Counts:
        """For the result."""
        found = super().counts()
        hits: Counter[str] = self.popping.hits + self.timed.hits
        return found._replace(hits=found.hits + hits)


def lose_hours(disk: Disk, *, everything: bool) -> bool:
    """Somebody removes files of hours while no broker runs: all, or the first one; whether there were any."""
    there = sorted(path for path in disk.copy() if path.parent.name == "timers")
    found = [path for path in there if everything or path.name != "hours"]
    gone = set(found if everything else found[:1])
    if gone:
        dirs = {one for one in disk.root.rglob("*") if one.is_dir()}
        disk.become({path: content for path, content in disk.copy().items() if path not in gone}, dirs | {disk.root})
    return bool(gone)


def run_rocketmq5(seed: int, *, trace: bool = False) -> Result:
    """Run one seed; never raises for what goes wrong in it."""
    options = group_with_rocketmq5(choose_group(seed))
    return run_world(lambda root: RocketMQ5Simulation(options, root, trace=trace))
