"""One run of one seed: first everything may break, then it is healed and must make progress."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from typing import Final, cast

from dledger.core.member_state import Leader
from dledger.core.membership import implicit_configuration
from dledger.core.messages import Message, PushAppend
from dledger.errors import DLedgerError
from dledger.types import ClusterMember, Configuration, EntryRun, MemberRole, NodeId
from tests.sim.alarms import Alarms
from tests.sim.callers import Callers
from tests.sim.changes import Operators
from tests.sim.checker import Checker, Violation, require
from tests.sim.clients import Append, Clients
from tests.sim.configurations import relevant
from tests.sim.driver import SimNode
from tests.sim.faults import Nemesis
from tests.sim.fibers import DiskTime, Fibers
from tests.sim.machine_checks import MachineChecks
from tests.sim.mending import Mender
from tests.sim.network import Network
from tests.sim.options import Options, choose
from tests.sim.producers import Producers
from tests.sim.progress import Progress
from tests.sim.scheduler import Scheduler
from tests.sim.senders import Senders
from tests.sim_store import threads
from tests.sim_store.disk import Disk
from tests.support import memory_disk

HEAL_US: Final = 11_000_000
"""How long a healed group may take until it is well: a sender may wait for 10 s for an answer that was lost before."""
TAIL: Final = 40


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a seed."""

    seed: int
    events: int = 0
    simulated_ms: int = 0
    heal_ms: int = 0
    elections: int = 0
    committed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    roles: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same by what the member was at that moment."""
    trace_hash: int = 0
    failure: str | None = None
    tail: tuple[str, ...] = ()


class Simulation:
    """The world of one seed."""

    def __init__(self, options: Options, *, trace: bool = False) -> None:
        seed = options.seed
        self.options = options
        self.scheduler = Scheduler()
        self.random = Random(f"schedule/{seed}")
        self.hits: Counter[str] = Counter()
        self.roles: Counter[tuple[str, str]] = Counter()
        self.mender = Mender(self)
        self.checker = Checker(
            lambda: self.nodes,
            lambda node: self.nemesis.harass(node),
            lambda node: self.nemesis.harass_commit(node),
            self.mender.onlooker,
            implicit_configuration(options.config_of(options.names[0])),
            self._configuration_changed,
        )
        self.fibers = Fibers(self.scheduler)
        self.machine_checks = MachineChecks(self.checker)
        self._disks: Path | None = None
        self._disks_made = 0
        self.network = Network(
            options, self.scheduler, Random(f"network/{seed}"), self._deliver, self._stream_broke, self._strike_link
        )
        rates = [self.random.randrange(900, 1101) if options.has("drift") else 1000 for _ in options.names]
        rates += [1000] * len(options.spares)
        self.nodes = [SimNode(self, name, rate) for name, rate in zip(options.everybody, rates, strict=True)]
        """All that may ever be members; what has not been added need not run."""
        self.group = [node for node in self.nodes if node.name in options.names]
        """The members, as of the newest committed configuration and those that may follow it; kept up to date."""
        self.relevant: tuple[Configuration, ...] = (self.checker.members.newest,)
        self._by_name = {node.name: node for node in self.nodes}
        self.clients = Clients(self, Random(f"clients/{seed}"))
        self.producers = Producers(self, Random(f"producers/{seed}"))
        self.senders = Senders(self, Random(f"senders/{seed}"))
        self.alarms = Alarms(self, Random(f"alarms/{seed}"))
        self.operators = Operators(self, Random(f"operators/{seed}"))
        self.callers = Callers(self, Random(f"callers/{seed}"))
        self.nemesis = Nemesis(self, Random(f"nemesis/{seed}"))
        self.progress = Progress(self)
        self.think_us = options.think_us
        """How long clients wait between two questions."""
        self.events = 0
        self.healed_us: int | None = None
        self.well_us = 0
        self.trace_hash = seed
        self._trace: deque[tuple[int, str, NodeId | None, tuple[object, ...]]] = deque(maxlen=None if trace else TAIL)

    # -- what happens --------------------------------------------------------------------------------------------

    def event(self, what: str, node: SimNode | None, *details: object) -> None:
        """Count and trace an event; the hash takes in what the members hold, so that it shows any difference."""
        self.events += 1
        now_us = self.scheduler.now_us
        if node is None:
            self._trace.append((now_us, what, None, details))
            return
        log = node.log
        state = node.core.state if node.core is not None else None
        commit = state.commit_index if state is not None else -2
        self.trace_hash = hash((self.trace_hash, now_us, len(what), log.last_chain_crc, commit, node.hard.term))
        if node.machine is not None:
            node.machine.look()
            self.trace_hash = hash((self.trace_hash, *node.machine.register.state[:3]))
        self._trace.append((now_us, what, node.name, (*details, _Brief.of(node))))

    def trace_lines(self) -> list[str]:
        """The last events, as text."""
        return [
            f"{now_us / 1000:12.3f} ms  {name or '--':3} {what:14} {' '.join(map(_shown, details))}"
            for now_us, what, name, details in self._trace
        ]

    def hit(self, kind: str, node: SimNode) -> None:
        """Count that a fault struck a member."""
        self.hits[kind] += 1
        self.roles[kind, node.role] += 1

    def _strike_link(self, kind: str, target: NodeId) -> None:
        self.hit(kind, self._by_name[target])

    def slow(self, fault: str, probability: float, node: SimNode) -> bool:
        """Whether one of these operations of ``node`` is slow this time."""
        if not self.options.has(fault) or self.healed_us is not None or self.random.random() >= probability:
            return False
        self.hit(fault, node)
        return True

    def damaged(self, run: EntryRun, node: SimNode) -> EntryRun:
        """The run as it arrives at ``node``: sometimes with a flipped bit."""
        if not self.options.has("corrupt") or self.healed_us is not None or self.random.random() >= 0.02:
            return run
        self.hit("corrupt", node)
        data = bytearray(run.data)
        data[int(self.random.random() * len(data))] ^= 1 << int(self.random.random() * 8)
        return replace(run, data=bytes(data))

    def crash_point(self, node: SimNode) -> str | None:
        """Whether a member dies right ``before`` or right ``after`` it saves its hard state."""
        if self.options.has("crash_point") and self.healed_us is None and self.random.random() < 0.1:
            self.hit("crash_point", node)
            return self.random.choice(("before", "after"))
        return None

    def file_crash_point(self, node: SimNode) -> str | None:
        """Whether a member dies right ``before`` or right ``after`` it saves its members file."""
        if self.options.has("file_late") and self.healed_us is None and self.operators.random.random() < 0.2:
            self.hit("file_late", node)
            return self.operators.random.choice(("before", "after"))
        return None

    def _configuration_changed(self, leader: SimNode | None) -> None:
        """A leader has appended a configuration, or (None) one was committed."""
        self.look_at_members()
        self.operators.observe(leader, committed=leader is None)

    def look_at_members(self) -> None:
        """Note who may count by now; called often."""
        checker = self.checker
        found = relevant(checker.members.newest, self.nodes, len(checker.committed) - 1)
        if found != self.relevant:
            self.relevant = found
            names = {one.node_id for configuration in found for one in configuration.members}
            self.group[:] = [node for node in self.nodes if node.name in names]
            self.progress.regroup()

    @property
    def voters(self) -> list[SimNode]:
        """Those of the group that count, or may soon."""
        names = {name for configuration in self.relevant for name in configuration.voters}
        return [node for node in self.group if node.name in names]

    def remembers(self, node: SimNode) -> bool:
        """Whether a member counts, to itself and to the others, and has lost nothing."""
        known = [found.uid for one in self.relevant if (found := one.find(node.name)) is not None]
        if known and known[0] == node.file.uid and not node.file_is_lost:
            node.file_was_lost = False
        is_same = all(uid in (0, node.file.uid) for uid in known)
        return node.hard.voter and not node.forgetful and is_same and not node.file_was_lost

    # -- disks of state machines -----------------------------------------------------------------------------------

    def new_disk(self, node: SimNode) -> Disk:
        """An empty one; its files are there only if somebody writes any."""
        if self._disks is None:
            self._disks = Path(mkdtemp(prefix="sim-", dir=memory_disk.directory()))
        self._disks_made += 1
        random = Random(f"disk/{self.options.seed}/{self._disks_made}")

        def step_us() -> int:
            slow = self.slow("slow_snapshot", 0.3, node)
            return int(random.random() * (100_000 if slow else 1_000))

        time = DiskTime(self.fibers, self.scheduler, step_us, lambda: self._strikes_disk(node))
        return Disk(self._disks / str(self._disks_made), cast("threads.Scheduler", time), random)

    def _strikes_disk(self, node: SimNode) -> bool:
        """Whether a member's power fails before the next thing that it does to its snapshots."""
        if not self.nemesis.is_striking or not self.options.has("snapshot_cut") or self.random.random() >= 0.02:
            return False
        self.hit("snapshot_cut", node)
        self.scheduler.after(0, self._strike_disk, node, node.boots)
        return True

    def _strike_disk(self, node: SimNode, boot: int) -> None:
        if node.core is not None and node.boots == boot:
            self.crash(node)

    def close(self) -> None:
        """End what is a thread or a file of its own."""
        for node in self.nodes:
            if node.machine is not None:
                node.machine.kill()
        if self._disks is not None:
            rmtree(self._disks)

    # -- crashes ---------------------------------------------------------------------------------------------------

    def by_name(self, name: NodeId) -> SimNode:
        """One of all that may ever be members."""
        return self._by_name[name]

    def boot(self, node: SimNode) -> None:
        """Start a member that does not run."""
        if node.core is None:
            self._restart(node, node.boots)

    def crash(self, node: SimNode, down_us: int | None = None) -> None:
        """Kill a member (its page cache survives) or cut its power (a random part of what was not flushed is lost)."""
        if down_us is None:
            down_us = int(self.random.random() * 1_500_000)
        unflushed = node.log.unflushed_changes
        keep = self.random.choice((0, unflushed, int(self.random.random() * (unflushed + 1))))
        if node.is_async and keep < unflushed:
            keep = self._cut_power(node, keep, unflushed)
        self.event("crash", node, f"keeps {keep} of {unflushed}")
        node.stop(keep)
        if self.options.has_machines:
            if keep < unflushed or self.random.random() < 0.5:
                node.disk.cut_power()
            else:
                node.disk.kill()
        self.alarms.crashed(node)
        self.scheduler.after(down_us, self._restart, node, node.boots)

    def _cut_power(self, node: SimNode, keep: int, unflushed: int) -> int:
        """One that acknowledges before it flushes loses something and knows it; not while others have forgotten."""
        if not self.nemesis.may_forget(node):
            return unflushed
        self.hit("async_flush", node)
        self.checker.observe_loss(node)
        node.doubt("the machine was started anew, and it had acknowledged before it flushed")
        return keep

    def _restart(self, node: SimNode, boot: int) -> None:
        if node.core is None and node.boots == boot:
            node.start()
            self.event("start", node)

    def break_stream(self, sender: NodeId, target: NodeId) -> None:
        """The stream from ``sender`` to ``target`` breaks; ``sender`` hears of it soon."""
        self.scheduler.after(int(self.random.random() * 20_000), self._stream_broke, sender, target)
        self.alarms.broke(self._by_name[sender], self._by_name[target])

    def _stream_broke(self, sender: NodeId, target: NodeId) -> None:
        node = self._by_name[sender]
        node.lose_connection(target, node.boots)

    def _deliver(self, sender: NodeId, target: NodeId, message: Message) -> None:
        node = self._by_name[target]
        node.deliver(sender, message, node.boots)

    def believed_leader(self, otherwise: int) -> int:
        """The number of the running leader of the highest term, which clients and operators would find."""
        best, best_term = otherwise, -1
        for number, node in enumerate(self.nodes):
            if node.core is not None and isinstance(node.core.state.role, Leader) and node.core.state.term > best_term:
                best, best_term = number, node.core.state.term
        return best

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Both phases, then the final checks. Raises ``Violation``, or whatever the core raised."""
        late = self.random.choice(self.group) if self.options.has("late_start") and len(self.group) > 1 else None
        for node in self.group:
            delay_us = int(self.random.random() * (8_000_000 if node is late else 50_000))
            self.hits["late_start"] += node is late
            self.scheduler.after(delay_us, self._restart, node, node.boots)
        self.clients.start()
        self.producers.start()
        self.senders.start()
        self.nemesis.start()
        self.alarms.start()
        self.operators.start()
        self.callers.start()
        while self.events < self.options.events:
            require(self.scheduler.run_next(), "nothing happens any more")
            require(self.scheduler.now_us < 3_600_000_000, "time passes without events")
            if self.scheduler.now_us >= self.progress.due_us:
                self.progress.look()
        self._heal()
        self._converge()
        self.clients.stopped = True
        self._append_once_more()
        refused = [body for append in self.clients.appends if append.outcome == "not_applied" for body in append.bodies]
        self.checker.finish([*refused, *self.senders.refused()])
        self._check_producers()
        self.operators.finish()
        if self.options.has_machines:
            self.machine_checks.finish(self.group)
            self.callers.finish()

    def _check_producers(self) -> None:
        """In the order of their sequences, from 0 on, without a gap. (``Checker`` sees what is stored twice.)"""
        bodies = self.checker.bodies
        for session in self.producers.sessions:
            places = [bodies[body] for body in session.history if body in bodies]
            stored = session.history[: len(places)]
            require(all(body in bodies for body in stored), "a producer's entries have a gap", session.name)
            require(places == sorted(places), "a producer's entries are out of order", session.name)
            require(len(places) >= session.acked, "what was acknowledged is lost", session.name)

    def _heal(self) -> None:
        self.healed_us = self.scheduler.now_us
        self.clients.stopped = True
        self.nemesis.end()
        self.network.heal()
        for node in self.nodes:
            node.free_all()
            node.disk.full = False
            self.mender.mend(node)
            if node.core is None and (node.boots or node in self.group):
                node.start()
        self.event("healed", None)

    def _converge(self) -> None:
        self._run_until(self._is_well, "the healed group does not become well")

    def _append_once_more(self) -> None:
        appends: list[Append] = []

        def appended() -> bool:
            if not appends or appends[-1].outcome not in ("acked", ""):
                appends.append(self.clients.append(self.nodes[self.believed_leader(0)]))
            return appends[-1].outcome == "acked"

        self._run_until(appended, "the healed group takes no append")
        self._run_until(self._is_done, "the healed group does not settle")
        self.well_us = self.scheduler.now_us

    def _run_until(self, condition: object, otherwise: str) -> None:
        if self.healed_us is None or not callable(condition):
            raise TypeError(condition)
        check_us = self.scheduler.now_us
        while True:
            if self.scheduler.now_us >= check_us:
                if condition():
                    return
                check_us = self.scheduler.now_us + 20_000
            require(self.scheduler.now_us < self.healed_us + HEAL_US, otherwise, *map(_Brief.of, self.nodes))
            require(self.scheduler.run_next(), "nothing happens any more")

    def _is_well(self) -> bool:
        """One leader, whom all follow, and equal logs."""
        leader = self.nodes[self.believed_leader(0)]
        self.look_at_members()
        if len(self.relevant) > 1 or any(map(_is_unfinished, self.relevant[0].members)):
            return False
        for node in self.group:
            core = node.core
            if core is None or core.state.leader_id != leader.name or node.hard.term != leader.hard.term:
                return False
            if node.log.last_chain_crc != leader.log.last_chain_crc or node.log.last != leader.log.last:
                return False
        return not any(
            one.open_operations() for one in (self.clients, self.producers, self.senders, self.operators, self.callers)
        )

    def _is_done(self) -> bool:
        """Well, and everything is committed and durable everywhere."""
        if not self._is_well():
            return False
        for node in self.group:
            end = node.log.last.index
            if node.core is None or node.core.state.commit_index != end or node.log.flushed.index != end:
                return False
            if node.machine is not None and node.machine.host.applied_index != end:
                return False
        return True

    def result(self, failure: str | None = None) -> Result:
        """What came of it."""
        return Result(
            seed=self.options.seed,
            events=self.events,
            simulated_ms=self.scheduler.now_us // 1000,
            heal_ms=(self.well_us - (self.healed_us or 0)) // 1000,
            elections=self.checker.elections,
            committed=len(self.checker.chain),
            outcomes=self.clients.outcomes()
            + self.producers.outcomes()
            + self.senders.outcomes()
            + self.operators.outcomes
            + self.callers.outcomes,
            hits=self.hits,
            roles=self.roles,
            trace_hash=self.trace_hash & (1 << 64) - 1,
            failure=failure,
            tail=tuple(self.trace_lines()) if failure or self._trace.maxlen is None else (),
        )


def _is_unfinished(member: ClusterMember) -> bool:
    """Whether a leader still has something to do with a member."""
    return member.promote or (bool(member.replaces) and member.role is MemberRole.VOTER)


@dataclass(frozen=True, slots=True)
class _Brief:
    """How a member stood, cheaply noted with every event and made readable only when asked."""

    name: NodeId
    role: object
    term: int
    commit: int
    begin: int
    last: object
    flushed: int

    @classmethod
    def of(cls, node: SimNode) -> _Brief:
        core, log = node.core, node.log
        role = None if core is None else core.state.role
        term, commit = (-1, -1) if core is None else (core.state.term, core.state.commit_index)
        return cls(node.name, role, term, commit, log.begin.index, log.last, log.flushed.index)

    def __str__(self) -> str:
        role = "down" if self.role is None else type(self.role).__name__.lower()
        return (
            f"[{self.name} {role} term={self.term} begin={self.begin} commit={self.commit} "
            f"flushed={self.flushed} last={self.last}]"
        )


def _shown(detail: object) -> str:
    if isinstance(detail, PushAppend):
        run = detail.run
        return (
            f"PushAppend(term={detail.term}, epoch={detail.epoch}, commit={detail.commit_index}, "
            f"{run.first_index}..{run.last_index} after {run.previous})"
        )
    return str(detail)


def run_seed(seed: int, events: int, *, trace: bool = False) -> Result:
    """Run one seed; never raises for what goes wrong in it."""
    simulation = Simulation(choose(seed, events), trace=trace)
    try:
        simulation.run()
    except (Violation, DLedgerError) as error:
        return simulation.result(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever the core raises is a finding, and belongs to its seed
        return simulation.result(f"{type(error).__name__}: {error}")
    finally:
        simulation.close()
    return simulation.result()
