"""A machine of a master or a slave: its disk, and while it runs, a broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import RoleOverride, overridden, remove_override, write_override
from rocketstore.types import BrokerRole
from tests.sim_store.broker import ReplicatingBroker
from tests.sim_store.disk import Disk, SimFs
from tests.sim_store.model import Consumer, require
from tests.sim_store.replication_options import port_of
from tests.sim_store.threads import EPOCH_MS, Group

if TYPE_CHECKING:
    from tests.sim_store.replication import ReplicationSimulation

_STEP_US: Final = 5_000
_ACTION_US: Final = 600_000_000
"""Of virtual time: whatever a process is asked to do has ended by then."""


class Machine:
    """One of a world."""

    def __init__(self, world: ReplicationSimulation, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"b{number}"
        self.disk = Disk(world.root / self.name, world.scheduler, Random(f"disk/{world.seed}/{self.name}"))
        self.disk.trace = lambda what, where: world.event(what, where)
        self.role = world.options.role if number == 0 else BrokerRole.SLAVE
        """As its conf file says; a promotion stands above it."""
        self.group: Group | None = None
        self.broker: ReplicatingBroker | None = None
        self.boots = 0
        self.power_cuts = 0
        self.faulty = False
        self.durable = 0
        """Up to where its log must be there at the next start."""
        self.floor = 0
        """The furthest that its master was told it has."""
        self.lost_copy = False
        """Whether it may lack what was acknowledged because it had it: wiped, or not flushed when the power failed."""
        self.compared = (0, 0, 0)
        """With which process of the master, by which of its own, and up to where its log was the same."""
        self.offsets: dict[Consumer, int] = {}
        """Consumers' offsets, as it once had them."""
        self.copy: tuple[dict[Path, bytes], int] | None = None
        """An older copy of its disk, and the log's end in it."""

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def up(self) -> ReplicatingBroker:
        """Its broker, which runs."""
        require(self.broker is not None, f"{self.name} does not run")
        assert self.broker is not None
        return self.broker

    @property
    def log_dir(self) -> Path:
        """Where its log is."""
        return self.disk.root / "store" / "commitlog"

    @property
    def end(self) -> int:
        """Where its log ends, as far as anybody knows."""
        return self.broker.store.log.end_offset if self.broker is not None else self.durable

    def config(self) -> BrokerConfig:
        """Its conf file's."""
        return self.world.options.config_of(self.number, self.role, self.disk.root / "store")

    def start(self) -> ReplicatingBroker:
        """Begin a process, and wait until it serves. Raises ``ViolationError``, or what it ended with."""
        world = self.world
        self.boots += 1
        self.faulty = False
        group = self.group = Group(f"{self.name} {self.boots}", boot_id=f"{self.name}-{self.power_cuts}")
        group.fs = SimFs(self.disk, lambda: group.dead)
        world.groups.append(group)
        world.network.is_back(self.name)
        world.event("start", self.name, self.role)
        made: list[ReplicatingBroker] = []

        def run() -> None:
            config, _ = overridden(self.config())
            broker = ReplicatingBroker.make_replicating(
                group, config, world.options.state, world.scheduler, lambda: world.master_address
            )
            broker.start()
            made.append(broker)

        self.run(run, "start")
        self.broker = made[0]
        end = self.broker.recovered_end
        details = (self.name, end, self.durable, self.floor)
        require(end >= self.durable, "a log lost what was durable", *details)
        if self.lost_copy:
            self.floor = min(self.floor, end)
        require(end >= self.floor, "a slave lost what it had acknowledged", *details)
        self.durable = end
        return self.broker

    def run(self, action: Callable[[], object], name: str) -> None:
        """Do something as a thread of its process, and wait for it. Raises what it raised."""
        world, group = self.world, self.group
        assert group is not None
        ended: list[bool] = []

        def act() -> None:
            action()
            ended.append(True)

        world.scheduler.spawn(f"{self.name}-{name}", act, group)
        deadline_us = world.scheduler.now_us + _ACTION_US
        while not ended:
            if group.failure is not None:
                raise group.failure
            require(world.scheduler.now_us < deadline_us, f"{name} of {self.name} does not end")
            world.scheduler.sleep_us(_STEP_US)

    def crash(self, how: str) -> None:
        """The process ends here and now: ``kill`` or ``power``."""
        world, group, broker = self.world, self.group, self.broker
        if group is None:
            return
        if how != "power" and any(inode.forgotten for inode in self.disk.names.values()):
            how = "power"
        if broker is not None:
            log = broker.store.log
            self.durable = max(self.durable, log.flushed_offset) if how == "power" else log.end_offset
        world.event(f"crash: {how}", self.name, self.durable)
        world.hits[how] += 1
        self.group = self.broker = None
        world.scheduler.kill(group)
        world.groups.remove(group)
        world.network.died(self.name, silently=how == "power" and world.random.random() < 0.5)
        self.heal_disk()
        if how == "power":
            self.power_cuts += 1
            if not world.options.is_flushed:
                self.lost_copy, self.offsets = True, {}
            self.disk.cut_power()
        else:
            self.disk.kill()

    def stop(self) -> None:
        """Stop it as its users do."""
        self.heal_disk()
        broker = self.up
        self.world.event("stop", self.name)
        self.run(broker.stop, "stop")
        self.world.hits["stop"] += 1
        end = broker.store.log.flushed_offset
        self.broker = None  # whose log is closed
        self.crash("kill")
        self.durable = end

    def heal_disk(self) -> None:
        """The disk does what it should."""
        self.disk.full, self.disk.slow_us = False, 0

    # -- what people do ------------------------------------------------------------------------------------------

    def promote(self) -> None:
        """``dledger ha promote``, which writes a file beside a stopped or running slave."""
        config = self.config()
        override = RoleOverride(self.world.options.role, config.broker_id, EPOCH_MS + self.world.scheduler.now_ms)
        self.run(lambda: write_override(config, override), "promote")

    def demote(self) -> None:
        """Set its conf file to a slave's, while it does not run."""
        self.role = BrokerRole.SLAVE

    def undo_promotion(self) -> None:
        """``dledger ha promote --undo``."""
        self.run(lambda: remove_override(self.config()), "undo")

    def wipe(self) -> None:
        """Remove its store, while it does not run."""
        self.world.event("wipe", self.name)
        self.world.hits["wipe"] += 1
        self.disk.become({}, {self.disk.root})
        self.durable = self.floor = 0
        self.lost_copy, self.offsets = True, {}

    def take_copy(self) -> None:
        """Keep a copy of its disk, while it does not run."""
        self.copy = (self.disk.copy(), self.durable)

    def return_to_copy(self) -> None:
        """Put it in the place of what it has."""
        assert self.copy is not None
        contents, self.durable = self.copy
        self.world.event("older copy", self.name, self.durable)
        self.world.hits["older copy"] += 1
        dirs = {above for path in contents for above in path.parents if self.disk.root in (above, *above.parents)}
        self.disk.become(contents, dirs | {self.disk.root})
        self.floor = min(self.floor, self.durable)
        self.lost_copy, self.offsets = True, {}

    # -- its log -------------------------------------------------------------------------------------------------

    def log_bytes(self, begin: int, end: int) -> bytes:
        """A part of its log, as its files have it."""
        size = self.world.options.store.mapped_file_size_commit_log
        pieces, at = [], begin
        while at < end:
            base = at - at % size
            path = self.log_dir / f"{base:020d}"
            to = min(end, base + size)
            with path.open("rb") as file:
                file.seek(at - base)
                pieces.append(file.read(to - at))
            at = to
        return b"".join(pieces)

    def has(self, begin: int, end: int, other: Machine) -> bool:
        """Whether its log holds the same there as another's."""
        try:
            return self.log_bytes(begin, end) == other.log_bytes(begin, end)
        except FileNotFoundError:
            return False

    @property
    def address(self) -> str:
        """For slaves."""
        return f"{self.name}:{port_of(self.number)}"
