"""One run of one seed with a group of brokers: each a process on a machine and a disk of its own, links between them.

First everything may break; then all is healed, and the group must be well: one master, equal logs, everything that was
acknowledged on every member.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from dledger.errors import CorruptLogError, DLedgerError
from dledger.store.format import BLANK, HEADER
from dledger.store.identity import MEMBERS_FILE
from dledger.types import NO_ENTRY, EntryId, Magic, NodeId, Position
from tests.sim_store.broker import MemberBroker
from tests.sim_store.checks import all_delivered, check_consumers, check_keys, check_queues
from tests.sim_store.clients import ANSWER_S, Clients, FurtherClients
from tests.sim_store.disk import Disk, SimFs
from tests.sim_store.members import SimNetwork, connect
from tests.sim_store.model import ViolationError, require
from tests.sim_store.options import GroupOptions, choose_group, group_with_transactions, in_group
from tests.sim_store.threads import Clock, Group, Waiter
from tests.sim_store.transactions import Producers
from tests.sim_store.world import Counts, Result, World, run_world

SET_ASIDE_US: Final = 20_000_000
"""A damaged log that is not repaired by then is set aside, as its member asks for, if nobody else can repair it."""
HEAL_S: Final = 120.0
"""How long a healed group may take until it is well (virtual time)."""


class Member:
    """A machine: its disk, and while it runs, a broker."""

    def __init__(self, world: GroupSimulation, name: NodeId) -> None:
        self.world = world
        self.name = name
        self.disk = Disk(world.root / name, world.scheduler, Random(f"disk/{world.seed}/{name}"))
        self.disk.trace = lambda what, where: world.event(what, where)
        self.group: Group | None = None
        self.broker: MemberBroker | None = None
        self.boots = 0
        self.power_cuts = 0
        self.faulty = False
        """Its disk failed in this life: it may give up."""
        self.impaired = ""
        """What its disk has lost beyond what a crash takes, until it counts again."""
        self.damaged = False
        """A bit of its log was turned, perhaps not noticed yet."""
        self.expired_to = 0
        """Where its log began at last: a crash may bring back segments that queues and index have forgotten."""
        self.repair = False
        self.back_at_us = 0
        """When it comes back, while it is down."""
        self.snapshot: tuple[dict[Path, bytes], set[Path]] | None = None
        self.snapshot_last = NO_ENTRY
        """The last entry of the log in the snapshot, or one behind it."""
        self.serving = False
        """Whether its broker has said that it serves: a client that asked it itself would wait for ever if it died."""

    @property
    def up(self) -> bool:
        """Whether its process runs."""
        return self.group is not None

    def start(self) -> None:
        """Begin a process."""
        world = self.world
        self.boots += 1
        self.faulty = self.disk.full or self.disk.fail_sync + self.disk.fail_write > 0
        group = self.group = Group(f"{self.name}/{self.boots}", boot_id=f"{self.name}-{self.power_cuts}")
        group.fs = SimFs(self.disk, lambda: group.dead)
        world.groups.append(group)
        world.event("start", self.name, self.impaired, "repair" if self.repair else "")
        config, repair = world.options.config_of(self.name, self.disk.root / "node"), self.repair
        self.repair = False

        def run() -> None:
            store = in_group(world.options, self.disk.root / "store")
            clock, model = Clock(world.scheduler), world.model
            broker = world.broker_type.make(
                group, config, store, world.options.state, clock, model, repair=repair, producers=world.producers
            )
            world.made(broker)
            broker.start()
            self.broker = broker
            while not broker.serves:
                world.scheduler.sleep_us(5_000)
            self.serving = True

        world.scheduler.spawn(f"{self.name}-main", run, group)

    def end(self, how: str) -> None:
        """The process ends here and now."""
        if self.broker is not None:
            self.expired_to = max(self.expired_to, self.broker.store.log.min_offset)
        group, self.group, self.broker, self.serving = self.group, None, None, False
        if group is None:
            return
        world = self.world
        if how != "power" and any(inode.forgotten for inode in self.disk.names.values()):
            how = "power"
        world.event(f"crash: {how}", self.name)
        world.hits[how] += 1
        world.scheduler.kill(group)
        world.groups.remove(group)
        world.network.leave(f"127.0.0.1:{1 + world.options.names.index(self.name)}")
        if how == "power":
            self.power_cuts += 1
            self.disk.cut_power()
        else:
            self.disk.kill()
        self.heal_disk()

    def heal_disk(self) -> None:
        """The disk does what it should."""
        disk = self.disk
        disk.full, disk.fail_sync, disk.fail_write, disk.hang_until_us, disk.slow_us = False, 0.0, 0.0, 0, 0

    def take_snapshot(self) -> None:
        """Keep what the disk holds, for ``set_back``."""
        if self.broker is not None:
            self.snapshot, self.snapshot_last = self.disk.snapshot(), self.broker.node._node.state.log.last

    def durably_remembers(self, other: NodeId) -> EntryId:
        """What it knows ``other`` to have held, even if it is cut off from its power."""
        inode = self.disk.durable_names.get(self.disk.root / "node" / f"dledger-{self.name}" / MEMBERS_FILE)
        found = {} if inode is None else json.loads(inode.durable.partition(b"\n")[2])["remembered"]
        return EntryId(*found[other]) if other in found else NO_ENTRY

    def counts_again(self) -> bool:
        """Whether it is up and has standing, and nothing of its log is missing."""
        broker = self.broker
        if broker is None or not broker.node._node.state.whole:
            return False
        status = broker.node.status()
        return status.voter and broker.serves and status.committed_index == status.end_index


class GroupSimulation(World):
    """The world of one seed with a group."""

    broker_type: type[MemberBroker] = MemberBroker

    def __init__(self, options: GroupOptions, root: Path, *, trace: bool = False) -> None:
        super().__init__(options.seed, root, preempt=options.preempt, trace=trace)
        self.options = options
        dice = Random(f"transactions/{options.seed}")
        self.producers = Producers(self.scheduler, dice) if options.transactions else None
        self.clients = Clients(
            self.scheduler,
            self.model,
            Random(f"clients/{options.seed}"),
            queues=options.queues,
            retention=True,
            may_fail=lambda: True,
            alone=False,
            producers=self.producers,
            further=self.further_clients(),
        )
        self.members = [Member(self, name) for name in options.names]
        self.network: SimNetwork
        self.working = True

    # -- what worlds of another kind add ---------------------------------------------------------------------------

    def further_clients(self) -> Sequence[FurtherClients]:
        """Called while it is made."""
        return ()

    def made(self, broker: MemberBroker) -> None:
        """A broker is about to start."""

    def prepare(self) -> None:
        """The group is well, and has no clients yet."""

    def rest(self, for_us: int) -> None:
        """Let the clients work for so long."""
        self.scheduler.sleep_us(for_us)

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Break, heal, check. Raises ``ViolationError``, or whatever a broker raised."""
        options, scheduler = self.options, self.scheduler
        self.network = SimNetwork(scheduler, Random(f"network/{self.seed}"))
        connect(self.network)
        for member in self.members:
            member.start()
        self._wait(self._is_well, "a new group does not become well")
        self.prepare()
        clients = Group("clients")
        self.groups.append(clients)
        for number in range(options.clients):
            scheduler.spawn(f"client-{number}", self._client, clients)
        end_us = scheduler.now_us + options.work_ms * 1000
        while scheduler.now_us < end_us:
            self.rest(int(self.random.random() * self.random.choice((50_000, 300_000, 1_000_000))))
            self._look_after()
            if clients.failure is not None:
                raise clients.failure
            self._strike()
        self._heal(clients)
        self._finish()

    def _client(self) -> None:
        dice = self.clients.dice
        while self.working:
            member = self._pick(dice)
            if member is not None and member.broker is not None and member.group is not None:
                self._do(member, member.broker, member.group, self.clients.pick())
            self.scheduler.sleep_us(int(dice.random() * dice.choice((2_000, 50_000, 200_000))))

    def _pick(self, dice: Random) -> Member | None:
        masters = [one for one in self.members if one.broker is not None and one.broker.is_master]
        if masters and dice.random() < 0.85:
            return masters[int(dice.random() * len(masters))]
        serving = [one for one in self.members if one.serving and one.broker is not None and not one.broker.node.fenced]
        return serving[int(dice.random() * len(serving))] if serving else None

    def _do(self, member: Member, broker: MemberBroker, group: Group, name: str) -> None:
        """One operation, as a thread of the broker's process; it ends with that, and so does what was asked."""
        self.clients.operations[name] += 1
        client = self.clients.client(group, broker.store, broker.state)

        def run() -> None:
            try:
                client.do(name)
            except DLedgerError as error:
                self.event("refused", name, type(error).__name__)

        task = self.scheduler.spawn(f"{member.name}-{name}", run, group)
        waiter = Waiter(self.scheduler.current)
        task.ended.append(waiter)
        if not task.done and not self.scheduler.block(waiter, int(2 * ANSWER_S * 1_000_000)):
            raise ViolationError(f"{name} does not end on {member.name}")
        client.lose()

    # -- faults --------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Restart whoever is due; let those stop that gave up."""
        for member in self.members:
            group, broker = member.group, member.broker
            if group is None:
                if self.scheduler.now_us >= member.back_at_us:
                    member.start()
                continue
            if group.failure is not None:
                self._failed(member, group.failure)
            elif broker is not None and broker.failure is not None:
                if not member.faulty:
                    problem = f"{member.name} gave up on a sound disk: {broker.failure!r}"
                    raise ViolationError(problem) from broker.failure
                self.hits["gave up"] += 1
                self._down(member, "kill")
            elif member.impaired and member.counts_again():
                self.event("counts again", member.name)
                member.impaired = ""
            elif member.damaged and self._needs_a_person(member):
                self.hits["set aside"] += 1
                member.repair = True
                self._down(member, "kill", for_us=0)

    def _needs_a_person(self, member: Member) -> bool:
        """Whether, long after all was healed, it still cannot read what no other member holds any more."""
        broker = member.broker
        if self.working or self.scheduler.now_us < self.healed_at_us + SET_ASIDE_US or broker is None or member.repair:
            return False
        told = " ".join(one.message for one in broker.node.status().conditions)
        position = broker.store.dispatch_position

        def lacks_it(other: Member) -> bool:
            begin = other.broker.store.log.min_offset if other.broker is not None else 0
            return begin > position or f"{other.name}: it does not hold the log" in told

        return "damaged at offset" in told and all(lacks_it(other) for other in self.members if other is not member)

    def _failed(self, member: Member, error: BaseException) -> None:
        self.event("start failed", member.name, repr(error))
        if isinstance(error, ViolationError) or not (member.faulty or member.impaired):
            raise error
        self.hits["start refused"] += 1
        member.repair = member.impaired == "damage"
        self._down(member, "kill")

    def _down(self, member: Member, how: str, *, for_us: int | None = None) -> None:
        if for_us is None:
            for_us = int(self.random.random() * self.random.choice((50_000, 1_000_000, 3_000_000)))
        member.end(how)
        member.back_at_us = self.scheduler.now_us + for_us

    def _strike(self) -> None:
        random, options = self.random, self.options
        if random.random() < 0.4:
            return
        strikes: dict[str, Callable[[], None]] = {
            "kill": lambda: self._crash(random.choice(self.members)),
            "power": lambda: self._crash(random.choice(self.members), "power"),
            "leader": self._crash_leader,
            "majority": lambda: self._crash_many(options.size // 2 + 1),
            "all": lambda: self._crash_many(options.size),
            "partition": self._partition,
            "loss": lambda: setattr(self.network, "loss", random.choice((0.0, 0.02, 0.2))),
            "spikes": lambda: setattr(self.network, "spikes", random.choice((0.0, 0.02, 0.1))),
            "full": lambda: self._break_disk("full"),
            "eio": lambda: self._break_disk("eio"),
            "hang": lambda: self._break_disk("hang"),
            "slow": lambda: self._break_disk("slow"),
            "wipe": lambda: self._impair("wipe"),
            "set_back": lambda: self._impair("set_back"),
            "damage": lambda: self._impair("damage"),
            "transfer": self._transfer,
            "clean_stop": self._clean_stop,
        }
        wanted = [name for name in strikes if options.has(name)]
        if not wanted:
            return
        name = random.choice(wanted)
        self.event(f"strike: {name}")
        strikes[name]()
        if random.random() < 0.4:
            self.network.heal()
            for member in self.members:
                if random.random() < 0.5:
                    member.heal_disk()
            if options.has("set_back") and random.random() < 0.3:
                member = random.choice(self.members)
                if not member.impaired:
                    member.take_snapshot()

    def _how(self) -> str:
        return self.random.choice([how for how in ("kill", "power") if self.options.has(how)] or ["kill"])

    def _crash(self, member: Member, how: str = "") -> None:
        if member.up:
            self._down(member, how or self._how())

    def _crash_leader(self) -> None:
        for member in self.members:
            if member.broker is not None and member.broker.is_master:
                self.hits["crash of a master"] += 1
                self._down(member, self._how())

    def _crash_many(self, count: int) -> None:
        self.hits["crash of many"] += 1
        for member in self.random.sample(self.members, count):
            self._crash(member)

    def _partition(self) -> None:
        self.hits["partition"] += 1
        one, other = self.random.sample(self.options.names, 2)
        self.network.cut(one, other, one_way=self.random.random() < 0.3)
        if self.random.random() < 0.5:
            for third in self.options.names:
                if third != one:
                    self.network.cut(one, third)

    def _break_disk(self, kind: str) -> None:
        member, random = self.random.choice(self.members), self.random
        disk = member.disk
        self.hits[kind] += 1
        self.event(f"disk: {kind}", member.name)
        if kind == "full":
            disk.full, disk.full_chance = True, random.choice((0.1, 0.7, 1.0))
            member.faulty = True  # a start may need room
        elif kind == "eio":
            member.faulty = True
            disk.fail_sync, disk.fail_write = random.choice((0.02, 0.5)), random.choice((0.0, 0.05))
        elif kind == "hang":
            disk.hang_until_us = self.scheduler.now_us + int(random.random() * 8_000_000)
        else:
            disk.slow_us = random.choice((500, 20_000))

    def _impair(self, kind: str) -> None:
        """One member's disk loses what it had; the next one only once this one counts again.

        Nothing on a disk that is set back tells of it: that is harmless as long as nobody has forgotten what it held.
        """
        if any(member.impaired for member in self.members):
            return
        member = self.random.choice(self.members)
        if kind == "set_back" and not (member.snapshot and self._all_know(member)):
            return
        if member.up:
            self._down(member, "power")
        disk = member.disk
        if kind == "wipe":
            disk.become({}, {disk.root})
            member.snapshot, member.expired_to = None, 0
        elif kind == "set_back" and member.snapshot is not None:
            disk.become(*member.snapshot)
        elif not self._turn_bit(disk):
            return
        member.impaired = kind
        member.damaged = member.damaged or kind == "damage"
        self.hits[kind] += 1
        self.event(f"impaired: {kind}", member.name)

    def _all_know(self, member: Member) -> bool:
        """Whether all others know durably that it held more than its snapshot does."""
        others = [one for one in self.members if one is not member]
        return all(other.durably_remembers(member.name) > member.snapshot_last for other in others)

    def _turn_bit(self, disk: Disk) -> bool:
        """In a data segment; whether there was one."""
        segments = [path for path in sorted(disk.names) if path.parent.name == "data" and path.name.isdigit()]
        if not segments:
            return False
        path = self.random.choice(segments)
        content = bytearray(path.read_bytes())
        used = len(content.rstrip(b"\0"))
        if not used:
            return False
        at = int(self.random.random() * used)
        content[at] ^= 1 << int(self.random.random() * 8)
        files = {name: name.read_bytes() for name in disk.names}
        disk.become(files | {path: bytes(content)}, set(disk.durable_dirs) | {name.parent for name in files})
        return True

    def _transfer(self) -> None:
        for member in self.members:
            broker, group = member.broker, member.group
            if broker is not None and group is not None and broker.is_master:
                self.hits["transfer"] += 1
                self.scheduler.spawn("transfer", partial(broker.node.submit_transfer, None, lambda _: None), group)
                return

    def _clean_stop(self) -> None:
        member = self.random.choice(self.members)
        broker, group = member.broker, member.group
        if broker is None or group is None or broker.failure is not None:
            return
        member.heal_disk()
        self.hits["clean stop"] += 1
        ended: list[bool] = []

        def stop() -> None:
            try:
                broker.stop()
            except DLedgerError as error:
                self.event("stopped badly", member.name, repr(error))
                require(member.faulty, "a sound broker stopped badly", member.name, error)
            ended.append(True)

        self.event("stop", member.name)
        self.scheduler.spawn(f"{member.name}-stop", stop, group)
        deadline_us = self.scheduler.now_us + int(ANSWER_S * 2_000_000)
        while not ended and group.failure is None:
            require(self.scheduler.now_us < deadline_us, "a stop does not end", member.name)
            self.scheduler.sleep_us(10_000)
        if group.failure is not None:
            raise group.failure
        self._down(member, "kill")

    # -- healing -------------------------------------------------------------------------------------------------

    def _heal(self, clients: Group) -> None:
        self.event("heal")
        self.working = False
        self.healed_at_us = self.scheduler.now_us
        self.network.calm()
        for member in self.members:
            member.heal_disk()
            member.back_at_us = 0
        self._wait(lambda: not clients.tasks or clients.failure is not None, "clients do not end")
        if clients.failure is not None:
            raise clients.failure
        self._wait(self._is_well, "the healed group does not become well")

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        deadline_us = self.scheduler.now_us + int(HEAL_S * 1_000_000)
        while not condition():
            self._look_after()
            require(self.scheduler.now_us < deadline_us, problem, *map(self._brief, self.members))
            self.scheduler.sleep_us(20_000)

    def _is_well(self) -> bool:
        """One master, and everything is committed and dispatched everywhere."""
        brokers = [member.broker for member in self.members if member.broker is not None]
        if len(brokers) < len(self.members) or sum(broker.is_master for broker in brokers) != 1:
            return False
        ends = {broker.store.log.end_offset for broker in brokers}
        if len(ends) != 1 or not all(broker.serves for broker in brokers):
            return False
        end = ends.pop()
        return all(broker.store.log.max_offset == end == broker.store.dispatch_position for broker in brokers)

    def _brief(self, member: Member) -> str:
        broker = member.broker
        if broker is None:
            return f"{member.name} down {member.impaired}"
        status, store = broker.node.status(), broker.store
        log, leader = store.log, status.leader and status.leader.node_id
        counts = f"{'' if status.voter else 'blank '}{member.impaired}"
        return (
            f"{member.name} {status.role} term {status.term} of {leader} {store.role} {counts} "
            f"log {log.min_offset}..{log.max_offset} of {log.end_offset} dispatched {store.dispatch_position} "
            f"serves {broker.serves} {[one.message for one in status.conditions]}"
        )

    def _finish(self) -> None:
        """Everything that was promised is on every member."""
        self._put_once_more()
        self._wait(self._has_delivered, "delayed messages are not delivered")
        self._wait(self._have_ended, "transactions stay open")
        self._wait(self._is_well, "the group does not settle")
        for member in self.members:
            self._run_on(member, partial(self._check, member))
        logs = [one.broker.store.log for one in self.members if one.broker is not None]
        begin, end = max(log.min_offset for log in logs), min(log.max_offset for log in logs)
        digests = {self._digest(member, begin, end) for member in self.members}
        require(len(digests) == 1, "logs differ", begin, end, digests)

    def _put_once_more(self) -> None:
        before = self.model.acked
        for _ in range(40):  # who leads may still give up, for what its disk did before it was healed
            for member in self.members:
                if member.broker is not None and member.group is not None and member.broker.is_master:
                    self._do(member, member.broker, member.group, "put")
            if self.model.acked > before:
                return
            self.scheduler.sleep_us(200_000)
            self._look_after()
        raise ViolationError("the healed group takes no message")

    def _have_ended(self) -> bool:
        """All transactions have, for their producers answer."""
        if self.producers is None:
            return True
        brokers = [one.broker for one in self.members if one.broker is not None and one.broker.is_master]
        return any(one.transactions.is_ready and one.transactions.open_count == 0 for one in brokers)

    def _has_delivered(self) -> bool:
        answers: list[bool] = []
        for member in self.members:
            if member.broker is not None and member.broker.is_master:
                self._run_on(member, lambda broker: answers.append(all_delivered(broker.store, self.model)))
        return any(answers)

    def _run_on(self, member: Member, action: Callable[[MemberBroker], None]) -> None:
        """Do something as a thread of a member's process, and wait for it."""
        broker, group = member.broker, member.group
        if broker is None or group is None:
            raise ViolationError(f"{member.name} went away")
        ended: list[bool] = []

        def run() -> None:
            for _ in range(100):
                try:
                    action(broker)
                except CorruptLogError:
                    if not member.damaged:
                        raise
                    self.scheduler.sleep_us(500_000)  # it was found just now, and the others have it
                else:
                    break
            else:
                action(broker)
            ended.append(True)

        self.scheduler.spawn(f"{member.name}-check", run, group)
        deadline_us = self.scheduler.now_us + 600_000_000
        while not ended:
            self._look_after()
            require(self.scheduler.now_us < deadline_us and not group.dead, "a check does not end", member.name)
            self.scheduler.sleep_us(2_000)

    def _check(self, member: Member, broker: MemberBroker) -> None:
        store = broker.store
        count = check_queues(store, self.model, member.expired_to)
        check_keys(store, self.model, self.scheduler, member.expired_to)
        check_consumers(broker.state, store, self.model)
        if self.producers is not None:
            self.producers.check(store, all_kept=True)
        self.event("checked", count, store.log.min_offset, store.log.max_offset)

    def _digest(self, member: Member, begin: int, end: int) -> int:
        """Of a stretch of the log, byte for byte; a turned bit that nobody has met yet is met, and mended, here."""
        digest = 0

        def read(broker: MemberBroker) -> None:
            nonlocal digest
            at, digest = begin, 0
            while at < end:
                chunk = broker.node.log.read_committed(Position(at), self.options.node.segment_bytes)
                require(chunk.data, "the log cannot be read", member.name, at, end)
                data = bytearray(chunk.data[: end - chunk.position])
                if any(one.damaged for one in self.members):
                    blank_what_readers_pass_over(data)
                digest = zlib.crc32(data, digest)
                at = chunk.position + len(chunk.data)

        self._run_on(member, read)
        return digest

    def counts(self) -> Counts:
        """For the result."""
        hits: Counter[str] = Counter()
        for member in self.members:
            hits += member.disk.hits
        if self.producers is not None:
            hits += self.producers.hits
        network = getattr(self, "network", None)
        if network is not None:
            hits += network.hits
        return Counts(sum(one.disk.changes for one in self.members), self.hits["power"] + self.hits["kill"], hits)


def blank_what_readers_pass_over(data: bytearray) -> None:
    """Of each entry the term, the channel and the chain: what turns there only a scrubber's round finds."""
    at = 0
    while at + HEADER.size <= len(data):
        magic, size = BLANK.unpack_from(data, at)
        if magic not in (Magic.NORMAL, Magic.NOOP):
            return
        data[at + 16 : at + 24] = data[at + 32 : at + 40] = bytes(8)
        at += size


def run_group(seed: int, *, trace: bool = False, transactions: bool = False) -> Result:
    """Run one seed of a group; never raises for what goes wrong in it."""
    options = group_with_transactions(choose_group(seed)) if transactions else choose_group(seed)
    return run_world(lambda root: GroupSimulation(options, root, trace=trace))
