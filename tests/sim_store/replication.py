"""One run of one seed with a master and its slaves: classic replication, crashes, promotions, old masters that return.

A round: clients work while links, disks and brokers misbehave; then whoever looks after the brokers puts things right,
as the documents tell people to, and everything is held against the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from dledger.errors import DLedgerError
from rocketstore.ha.promotion import Master, OtherSlave, checks
from rocketstore.message.message import Message
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult
from tests.sim_store.broker import ReplicatingBroker
from tests.sim_store.checks import all_delivered, check_consumers, check_keys, check_queues, wait_until
from tests.sim_store.clients import Clients
from tests.sim_store.links import Network, connect
from tests.sim_store.machine import Machine
from tests.sim_store.model import Consumer, Model, Sent, require
from tests.sim_store.replication_options import ReplicationOptions, choose_replication
from tests.sim_store.world import Counts, Result, World, run_world

HEAL_S: Final = 60.0
"""Of virtual time: a slave follows, and has everything, so long after all was healed."""
LOOK_US: Final = 3_000
NUMBERED_US: Final = 5_000_000
"""A new master has written down by then what a new slave cannot know otherwise: how far queues were numbered."""
_WIPE: Final = ("wipe", "perhaps the master was replaced by an older copy")
"""What a slave says that does not fit its master."""


class WatchedModel(Model):
    """Looks at every answer when it comes."""

    def __init__(self, world: ReplicationSimulation) -> None:
        super().__init__()
        self._world = world
        self.safe_end = 0
        """The furthest end of what a SYNC_MASTER acknowledged."""

    def answered(self, sent: Sent, result: PutResult) -> None:
        """As it is; and a slave must have it."""
        super().answered(sent, result)
        if sent.outcome == "acked":
            self._is_safe(sent.position, sent.end, sent)

    def committed(self, consumer: Consumer, offset: int, result: PutResult) -> None:
        """As it is; and a slave must have it."""
        super().committed(consumer, offset, result)
        if result.status is PutMessageStatus.PUT_OK and result.stored is not None:
            self._is_safe(result.stored.offset, result.stored.offset + result.stored.size, consumer)

    def _is_safe(self, begin: int, end: int, what: object) -> None:
        if self._world.options.is_sync:
            self.safe_end = max(end, self.safe_end)
            self._world.require_copy(begin, end, what)


class ReplicationSimulation(World):
    """The world of one seed with a master and its slaves."""

    model: WatchedModel

    def __init__(self, options: ReplicationOptions, root: Path, *, trace: bool = False) -> None:
        super().__init__(options.seed, root, preempt=options.preempt, trace=trace)
        self.options = options
        self.model = WatchedModel(self)
        self.clients = Clients(
            self.scheduler,
            self.model,
            Random(f"clients/{options.seed}"),
            queues=options.queues,
            retention=False,
            may_fail=lambda: self.master.faulty,
            alone=False,
        )
        self.network = Network(self.scheduler, Random(f"links/{options.seed}"))
        self.machines = [Machine(self, number) for number in range(1 + options.slaves)]
        self.master = self.machines[0]

    @property
    def master_address(self) -> str:
        """As name servers tell it."""
        return self.master.address

    @property
    def slaves(self) -> list[Machine]:
        """All but the master."""
        return [one for one in self.machines if one is not self.master]

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All rounds. Raises ``ViolationError``, or whatever a broker raised."""
        connect(self.network)
        for machine in self.machines:
            machine.start()
        for _ in range(self.options.rounds):
            self._work()
            self._put_right()
        wait_until(
            self.scheduler,
            lambda: all_delivered(self.master.up.store, self.model),
            "delayed messages are not delivered",
        )
        self._check()

    def _work(self) -> None:
        """Clients work, and whatever may go wrong does, until the master ends, or for a while."""
        options, scheduler, random = self.options, self.scheduler, self.random
        broker, stopped = self.master.up, [False]
        for number in range(options.clients):
            scheduler.spawn(
                f"client-{number}",
                lambda: self.clients.run(broker.group, broker.store, broker.state, lambda: stopped[0]),
                broker.group,
            )
        end_us = scheduler.now_us + int(random.random() * options.work_ms * 1000)
        strike_us = 0
        while scheduler.now_us < end_us and self.master.broker is broker:
            scheduler.sleep_us(LOOK_US)
            self._look()
            if scheduler.now_us >= strike_us:
                strike_us = scheduler.now_us + int(random.random() * random.choice((30_000, 300_000)))
                self._strike()
        stopped[0] = True
        self._end_of_master(random.choice(("", "", "kill", "power", "clean_stop")))

    def _end_of_master(self, how: str) -> None:
        if how and self.options.has(how):
            if how == "clean_stop":
                self.master.stop()
            else:
                self.master.crash(how)
                if self.random.random() < 0.2:
                    self._crash_slave()

    # -- faults --------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        random, network = self.random, self.network
        strikes: dict[str, Callable[[], object]] = {
            "kill": lambda: self._crash_slave("kill"),
            "power": lambda: self._crash_slave("power"),
            "cut": lambda: network.cut(random.choice(self.machines).name),
            "partition": lambda: network.parted.add(frozenset((self.master.name, random.choice(self.slaves).name))),
            "slow_links": lambda: setattr(network, "delay_us", random.choice((500, 5_000, 100_000))),
            "slow": lambda: setattr(random.choice(self.machines).disk, "slow_us", random.choice((500, 20_000))),
            "full": self._fill_a_slave,
            "garble": lambda: setattr(network, "garble", random.choice((0.02, 0.3))),
        }
        name = random.choice([name for name in strikes if self.options.has(name)] or [""])
        if name and random.random() < 0.6:
            self.event(f"strike: {name}")
            self.hits[name] += 1
            strikes[name]()
        elif random.random() < 0.5:
            self._heal()
        for one in self.slaves:
            if one.broker is None and random.random() < 0.4:
                one.start()

    def _heal(self) -> None:
        self.network.heal()
        self.network.delay_us = 500
        for machine in self.machines:
            machine.heal_disk()

    def _crash_slave(self, how: str = "kill") -> None:
        self.random.choice(self.slaves).crash(how)

    def _fill_a_slave(self) -> None:
        one = self.random.choice(self.slaves)
        if one.broker is not None:
            one.disk.full, one.disk.full_chance, one.faulty = True, self.random.choice((0.3, 1.0)), True

    # -- what holds at any time ----------------------------------------------------------------------------------

    def _look(self) -> None:
        for machine in self.machines:
            group, broker = machine.group, machine.broker
            if group is not None and group.failure is not None:
                raise group.failure
            if broker is not None and not machine.faulty:
                require(
                    not (broker.failure or broker.poison),
                    "a broker gave up",
                    machine.name,
                    broker.failure,
                    broker.poison,
                )
        master = self.master.broker
        if master is None:
            return
        followers = {one.broker_id: one for one in master.ha.slaves()}
        for slave in self.slaves:
            view = None if slave.broker is None else slave.broker.ha.master()
            follower = followers.get(slave.config().broker_id)
            if view is not None and view.is_connected and follower is not None:
                slave.floor = max(slave.floor, follower.acknowledged)
                self._compare(slave, slave.up)

    def _compare(self, slave: Machine, broker: ReplicatingBroker) -> None:
        """A slave that follows has a part of its master's log, and has what it acknowledged."""
        log, master = broker.store.log, self.master.up.store.log
        end = log.end_offset
        require(end <= master.end_offset, "a slave has more than its master", slave.name, end, master.end_offset)
        safe = log.flushed_offset if self.options.is_flushed else end
        require(slave.floor <= safe, "a slave acknowledged what it does not have", slave.name, slave.floor, safe)
        pair = (self.master.boots, slave.boots)
        begin = max(log.min_offset, master.min_offset, slave.compared[2] if slave.compared[:2] == pair else 0)
        if end > begin:
            same = slave.has(begin, end, self.master)
            require(same, "a slave's log differs from its master's", slave.name, begin, end)
        slave.compared = (*pair, end)
        if end >= self.model.safe_end:
            slave.lost_copy = False

    def require_copy(self, begin: int, end: int, what: object) -> None:
        """A slave has what a SYNC_MASTER has just acknowledged, or lost it with its power since."""
        for slave in self.slaves:
            if slave.lost_copy and slave.broker is None:
                return
            if slave.has(begin, end, self.master):
                return
            if slave.lost_copy and slave.boots != slave.compared[1]:
                return
        require(False, "acknowledged, and no slave has it", what, begin, end)

    # -- putting things right ------------------------------------------------------------------------------------

    def _put_right(self) -> None:
        """Whoever looks after the brokers has a master again, and slaves that follow."""
        self._heal()
        for slave in self.slaves:
            if slave.broker is not None and (slave.broker.failure or slave.broker.poison):
                self.hits["gave up"] += 1
                slave.crash("kill")
            if slave.broker is None:
                slave.start()
        if self.master.broker is None:
            self._replace_or_restart()
        self._settle()
        self._check()

    def _replace_or_restart(self) -> None:
        """The master is gone: its place is for a slave, or for itself."""
        random, old = self.random, self.master
        self.model.crashed()
        best = self._best()
        held, in_doubt = best.end, any(slave.lost_copy for slave in self.slaves)
        if self.options.has("promote") and random.random() < 0.5 and self._may_promote(best):
            self._promote(best)
            return
        if self.options.has("older_copy"):
            if old.copy is not None and random.random() < 0.5:
                old.return_to_copy()
            else:
                old.take_copy()
        end = old.start().recovered_end
        if in_doubt and max(end, held) < self.model.safe_end:  # more brokers than one have lost what they had
            self.model.safe_end = max(end, held)
        self._idle(int(random.random() * 2_000_000))  # slaves come, and find what there is
        if best.compared[0] == old.boots:  # it follows: what both have behind this end is new
            self._lose(end, end)
        if end < self.model.safe_end or (best.end > end and random.random() < 0.5):
            if self._may_promote(best):
                self.hits["master behind its slave"] += 1
                old.crash("kill")
                self._promote(best)
                return
            require(end >= self.model.safe_end, "what was acknowledged is nowhere", end, self.model.safe_end)
        self._lose(end, end)

    def _lose(self, end: int, durable: int) -> None:
        """The log goes on at ``end``; of what it does not have, nothing before ``durable`` may be missing."""
        self.model.lose_from(end, max(durable, self.model.safe_end) if self.options.is_sync else durable)

    def _best(self) -> Machine:
        return max(self.slaves, key=lambda one: (one.up.ha.epoch, one.end))

    def _may_promote(self, best: Machine) -> bool:
        """Whether a careful person would: the best slave has everything that was acknowledged."""
        model = self.model
        if not self.options.is_sync:
            return True
        if not any(slave.lost_copy for slave in self.slaves):
            require(best.end >= model.safe_end, "no slave has what was acknowledged", best.name, best.end)
        return best.end >= model.safe_end

    def _idle(self, for_us: int) -> None:
        end_us = self.scheduler.now_us + for_us
        while self.scheduler.now_us < end_us:
            self.scheduler.sleep_us(LOOK_US)
            self._look()

    def _promote(self, best: Machine) -> None:
        """The best slave becomes the master; the old one comes back, as a slave, or by mistake as what it was."""
        old = self.master
        self._ask_before(best)
        self.hits["promotion"] += 1
        self.event("promote", best.name, best.end)
        epoch = best.up.ha.epoch
        best.promote()
        best.crash(self.random.choice(("kill", "power")) if self.options.is_flushed else "kill")
        self.master = best
        broker = best.start()
        require(broker.is_master, "a promoted slave is no master", best.name)
        require(broker.ha.epoch > epoch, "a new master has its predecessor's number", epoch, broker.ha.epoch)
        self._lose(broker.recovered_end, best.floor)
        if self.options.has("two_masters") and self.random.random() < 0.5:
            self._return_as_master(old)
        old.role = BrokerRole.SLAVE
        old.start()
        if old.up.is_master:  # it had been promoted, too
            old.undo_promotion()
            old.crash("kill")
            old.start()

    def _ask_before(self, best: Machine) -> None:
        """What ``dledger ha promote`` says; where it sees no loss, there is none."""
        others = [OtherSlave(one.name, one.end, one.up.ha.epoch) for one in self.slaves if one is not best]
        self._idle(100_000)
        found = checks(best.up.ha.facts(), [Master(self.master.address, False, "gone")], others, [])
        losses = [one for one in found if one.loss is not None]
        if not losses and self.options.is_sync:
            require(best.end >= self.model.safe_end, "a promotion that loses is called safe", best.end)

    def _return_as_master(self, old: Machine) -> None:
        """It takes messages that nobody will read: it must not say that they are safe."""
        if any(slave.up.ha.epoch < self.master.up.ha.epoch for slave in self.slaves if slave is not old):
            return  # it would follow whomever it is told to
        self.hits["two masters"] += 1
        broker, answers = old.start(), list[PutResult]()
        if not broker.is_master:
            old.crash("kill")
            return
        successor, self.master = self.master, old  # what slaves are told
        scheduler = self.scheduler

        def put(number: int) -> None:
            try:
                broker.store.submit([Message("A", b"stray %d" % number, 0)], answers.extend)
            except DLedgerError:
                return

        for number in range(self.random.randrange(1, 8)):
            old.run(partial(put, number), "stray")
            scheduler.sleep_us(int(self.random.random() * 400_000))
        scheduler.sleep_us(int(self.random.random() * 6_000_000))
        others = [one for one in self.slaves if one is not successor]
        if self.options.is_sync:
            taken = [one for one in answers if one.status is PutMessageStatus.PUT_OK]
            require(not taken, "an old master says that a slave has it", *taken)
        require(not broker.ha.slaves(), "an old master has slaves", *(one.name for one in others))
        self.master = successor
        old.crash("kill")

    def _settle(self) -> None:
        """All slaves follow and have everything; one that cannot says so, with a reason, and is wiped."""
        wiped: set[str] = set()
        want_us = self.scheduler.now_us + int(HEAL_S * 1_000_000)
        end = self.master.up.store.log.end_offset
        while True:
            self.scheduler.sleep_us(20_000)
            self._look()
            if all(self._follows(slave, end) for slave in self.slaves):
                if wiped:
                    self._idle(NUMBERED_US)
                return
            for slave in self.slaves:
                view = slave.up.ha.master()
                problem = "" if view is None or view.is_connected else view.problem
                if any(words in problem for words in _WIPE) and not self._fits(slave):
                    self._refused(slave, problem)
                    require(slave.name not in wiped, "a wiped slave does not fit", slave.name, problem)
                    wiped.add(slave.name)
                    want_us = self.scheduler.now_us + int(HEAL_S * 1_000_000)
            states = [(slave.name, slave.end, slave.up.ha.master()) for slave in self.slaves]
            require(self.scheduler.now_us < want_us, "a healed slave does not catch up", end, *states)

    def _follows(self, slave: Machine, end: int) -> bool:
        view = slave.up.ha.master()
        return view is not None and view.is_connected and slave.end >= end

    def _fits(self, slave: Machine) -> bool:
        """Whether its log is a part of the master's: then it may have been refused by another, but is not for long."""
        begin, end = max(slave.up.store.log.min_offset, self.master.up.store.log.min_offset), slave.end
        return begin <= end <= self.master.end and slave.has(begin, end, self.master)

    def _refused(self, slave: Machine, problem: str) -> None:
        """It says why it does not follow, and somebody does what it says."""
        self.event("refused", slave.name, problem)
        self.hits["refused slave"] += 1
        slave.crash("kill")
        slave.wipe()
        slave.start()

    # -- checks --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for machine in self.machines:
            machine.run(partial(self._wait_applied, machine), "dispatch")
            machine.run(partial(self._check_one, machine), "check")

    def _wait_applied(self, machine: Machine) -> None:
        """Its queues and its state have all that is in its log."""
        store, state = machine.up.store, machine.up.state
        wait_until(self.scheduler, lambda: store.wait_dispatched(1.0), "the log is not dispatched")
        wait_until(self.scheduler, lambda: state.is_applied, f"{machine.name} does not know its state")

    def _check_one(self, machine: Machine) -> None:
        broker = machine.up
        store, state = broker.store, broker.state
        if machine is self.master or store.log.end_offset >= self.master.up.store.log.max_offset:
            count = check_queues(store, self.model)
            check_keys(store, self.model, self.scheduler)
            check_consumers(state, store, self.model)
            self.event("checked", machine.name, count, store.log.min_offset, store.log.max_offset)
        for consumer in self.model.commits:
            noted = state.offset(*consumer)
            before = machine.offsets.get(consumer, -1)
            require(noted >= before, "a consumer's offset went back", machine.name, consumer, noted, before)
            machine.offsets[consumer] = noted

    def counts(self) -> Counts:
        """For the result."""
        hits = sum((machine.disk.hits for machine in self.machines), self.network.hits)
        changes = sum(machine.disk.changes for machine in self.machines)
        return Counts(changes, self.hits["power"] + self.hits["kill"], Counter(hits))


def run_replication(seed: int, *, trace: bool = False) -> Result:
    """Run one seed of a master and its slaves; never raises for what goes wrong in it."""
    options = choose_replication(seed)
    return run_world(lambda root: ReplicationSimulation(options, root, trace=trace))
