"""Who breaks things: at random moments one of the seed's faults strikes, and passes again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from dledger.core.messages import Message
from dledger.core.node import Node
from dledger.core.producers import needed_from
from dledger.types import NO_ENTRY, NO_INDEX, LogIndex, NodeId
from tests.sim.machine_faults import MachineFaults
from tests.sim.network import CALLS, PUSHES
from tests.sim.newer_faults import NewerFaults

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation


class Nemesis:
    """Strikes while ``active``; every fault is counted in ``simulation.hits``."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self._random = random
        self._nodes = simulation.group
        self._struck: list[str] = []
        self._pause_until_us = 0
        self.active = True
        strikes: dict[str, Callable[[], bool]] = {
            "partition": self._partition,
            "one_way": self._one_way,
            "isolate_leader": self._isolate_leader,
            "minority_leader": self._minority_leader,
            "bridge": self._bridge,
            "crash_one": lambda: self._crash(1),
            "crash_leader": self._crash_leader,
            "crash_minority": lambda: self._crash((len(self._nodes) - 1) // 2),
            "crash_majority": lambda: self._crash(len(self._nodes) // 2 + 1),
            "crash_all": lambda: self._crash(len(self._nodes)),
            "pause": self._pause,
            "slow_flush": self._slow_flush,
            "transfer": self._transfer,
            "disk_full": self._disk_full,
            "expire": self._expire,
            "wipe": self._wipe,
            "snapshot": self._snapshot,
            "set_back": self._set_back,
            "connection_lost": self._connection_lost,
            "lose_kind": self._lose_kind,
            "hang_flush": self._hang_flush,
        }
        self._newer = NewerFaults(simulation, self)
        strikes |= self._newer.strikes
        strikes |= MachineFaults(simulation, self).strikes
        self._strikes = [(name, strike) for name, strike in strikes.items() if simulation.options.has(name)]

    def start(self) -> None:
        """Begin to strike."""
        if self._strikes:
            self._later()

    def _later(self) -> None:
        delay_us = self._random.expovariate(1) * self._simulation.options.fault_interval_us
        self._simulation.scheduler.after(int(delay_us), self._strike)

    @property
    def is_striking(self) -> bool:
        """Whether whatever members do may bring a fault on."""
        return self.active and not self._newer.siege.lasts

    def end(self) -> None:
        """Never strike again."""
        self.active = False
        self._newer.siege.raise_()

    def leave_alone(self, for_us: int) -> None:
        """Let what has begun take its course."""
        self._pause_until_us = self._simulation.scheduler.now_us + for_us

    def _strike(self) -> None:
        if not self.active:
            return
        if self._simulation.scheduler.now_us < self._pause_until_us or self._newer.siege.lasts:
            self._later()
            return
        name, strike = self._random.choice(self._strikes)
        self._struck.clear()
        if strike():
            self._simulation.hits[name] += 1
            self._simulation.roles.update((name, role) for role in self._struck)
            self._simulation.event(f"fault {name}", None)
        self._later()

    def note(self, *nodes: SimNode) -> None:
        """The members that a strike is about to meet, as they are now."""
        self._struck += [node.role for node in nodes]

    def harass(self, node: SimNode) -> None:
        """Strike a new leader soon, so that terms overlap and logs differ at their ends (Raft figure 8)."""
        if self.is_striking and self._simulation.options.has("harass_leader") and self._random.random() < 0.7:
            delay_us = int(self._random.random() * self._random.choice((3_000, 30_000, 300_000)))
            self._simulation.scheduler.after(delay_us, self.strike_leader, node, node.boots)

    def harass_commit(self, node: SimNode) -> None:
        """Strike a leader that has just committed something, before all others know."""
        if self.is_striking and self._simulation.options.has("harass_commit") and self._newer.random.random() < 0.05:
            delay_us = int(self._newer.random.random() * self._newer.random.choice((300, 3_000)))
            self._simulation.scheduler.after(delay_us, self.strike_leader, node, node.boots, "harass_commit")

    def strikes_sender(self, node: SimNode, message: Message) -> bool:
        """Whether a member dies right after it has sent ``message``, before the next one."""
        return self.is_striking and self._newer.strikes_sender(node, message)

    def may_forget(self, victim: SimNode) -> bool:
        """Whether a member may lose what it said: no other one has forgotten anything."""
        simulation = self._simulation
        simulation.look_at_members()  # a change may just have left one voter
        voters = simulation.voters
        others = [node for node in voters if node is not victim]
        if any(one.voters == (victim.name,) for one in simulation.relevant):
            return False
        if any(self._knows_only(node, victim) for node in others) or self.is_needed_from_before(victim):
            return False
        if any(node.damaged_to != NO_INDEX and node.has_damage for node in others):
            return False  # it may be the last one that has the state
        sound = bool(others) and all(simulation.remembers(node) for node in others)
        # One that is to be promoted counts soon, whatever it remembers then.
        learners = [node for node in self._nodes if node is not victim and node not in voters]
        sound = sound and not any(node.forgetful or node.file_was_lost for node in learners)
        return sound and bool(simulation.checker.chain)

    def _knows_only(self, node: SimNode, victim: SimNode) -> bool:
        """Whether a member does not know yet that ``victim`` is no more the only voter: it may not lead without it."""
        unknown = [one for one in node.log.configurations if one.index > node.log.committed_index]
        before = self._simulation.checker.members.before(unknown[0].index - 1) if unknown else None
        return before is not None and before.voters == (victim.name,)

    def is_needed_from_before(self, victim: SimNode) -> bool:
        """Whether a majority of the voters before the newest configuration would have forgotten, and no voter that is
        left knows that one to be committed, even after a crash: then they elect nobody, and wait for a person (M6).

        So a member that was removed counts until then: its directory may not be emptied before another one is lost.
        """
        simulation = self._simulation
        known = simulation.checker.members
        newest, before = known.newest, known.before(known.newest.index - 1)
        if newest.index == NO_INDEX or victim.name not in before.voters:
            return False
        saved = [node.file.configuration for node in simulation.voters if node is not victim and not node.file_is_lost]
        if any(one is not None and one.index >= newest.index for one in saved):
            return False
        voters = [node for node in simulation.nodes if node.name in before.voters]
        forgot = sum(node is victim or not simulation.remembers(node) for node in voters)
        return forgot >= before.quorum

    def strike_leader(self, node: SimNode, boot: int, kind: str = "harass_leader") -> None:
        """A leader dies, stands still or is cut off."""
        if not self.is_striking or node.core is None or node.boots != boot:
            return
        self._simulation.hit(kind, node)
        self._simulation.event(f"fault {kind}", None)
        chance = self._random.random()
        if chance < 0.4 or len(self._nodes) == 1:
            self._simulation.crash(node, self.duration_us())
        elif chance < 0.6:
            node.paused_until_us = self._simulation.scheduler.now_us + self.duration_us()
        else:
            friends = self._some(self._random.randrange(0, (len(self._nodes) + 1) // 2))
            self.split([node, *(friend for friend in friends if friend is not node)])

    def duration_us(self) -> int:
        """For how long something lasts."""
        share = self._random.random()
        return self._scaled(int(share * self._random.choice((10_000, 100_000, 1_000_000, 4_000_000))))

    def _scaled(self, time_us: int) -> int:
        return time_us * self._simulation.options.tempo // 1000

    def _some(self, count: int) -> list[SimNode]:
        return self._random.sample(self._nodes, count)

    def _running(self) -> list[SimNode]:
        return [node for node in self._nodes if node.core is not None]

    def leader(self) -> SimNode | None:
        """Who leads, as far as an onlooker can tell."""
        return self._simulation.nodes[self._simulation.believed_leader(0)] if self._running() else None

    # -- partitions ----------------------------------------------------------------------------------------------

    def _cut(self, pairs: list[tuple[NodeId, NodeId]], for_us: int | None = None) -> bool:
        """One partition at a time: a new one replaces the old one, and ends on its own."""
        blocked = self._simulation.network.blocked
        blocked.clear()
        blocked.update(dict.fromkeys(pairs, True))
        last_us = self.duration_us() if for_us is None else for_us
        self._simulation.scheduler.after(last_us, self._mend, dict(blocked))
        return bool(pairs)

    def _mend(self, blocked: dict[tuple[NodeId, NodeId], bool]) -> None:
        if self._simulation.network.blocked == blocked:
            self._simulation.network.blocked.clear()

    def split(self, ours: list[SimNode], for_us: int | None = None, *, both: bool = True) -> bool:
        """Cut some members off from all others."""
        self.note(*ours)
        theirs = [node for node in self._simulation.nodes if node not in ours]
        pairs = [(one.name, other.name) for one in ours for other in theirs]
        if both:
            pairs += [(other, one) for one, other in pairs]
        return self._cut(pairs, for_us)

    def _partition(self) -> bool:
        return len(self._nodes) > 1 and self.split(self._some(self._random.randrange(1, len(self._nodes))))

    def _one_way(self) -> bool:
        if len(self._nodes) == 1:
            return False
        if self._random.random() < 0.5:
            one, other = self._some(2)
            self.note(one)
            return self._cut([(one.name, other.name)])
        return self.split(self._some(self._random.randrange(1, len(self._nodes))), both=False)

    def _isolate_leader(self) -> bool:
        leader = self.leader()
        return leader is not None and len(self._nodes) > 1 and self.split([leader])

    def _minority_leader(self) -> bool:
        leader = self.leader()
        if leader is None or len(self._nodes) < 5:
            return False
        return self.split([leader, next(node for node in self._some(2) if node is not leader)])

    def _bridge(self) -> bool:
        """Two pairs that see each other only through the fifth member."""
        if len(self._nodes) < 5:
            return False
        members = self._some(5)
        self.note(*members[:4])
        pairs = [(one.name, other.name) for one in members[:2] for other in members[2:4]]
        return self._cut(pairs + [(other, one) for one, other in pairs])

    def _lose_kind(self) -> bool:
        """Single kinds of messages get lost while all others go through: pushes but not heartbeats, or votes alone."""
        if len(self._nodes) == 1:
            return False
        lost = self._simulation.network.lost_kinds
        lost.clear()
        kinds = self._random.choice((PUSHES, CALLS, (self._random.choice((*PUSHES, *CALLS)),)))
        one, *others = self._some(len(self._nodes))
        self.note(one)
        for other in others[: self._random.randrange(1, len(self._nodes))]:
            for pair in self._random.choice((((one, other),), ((other, one),), ((one, other), (other, one)))):
                lost[pair[0].name, pair[1].name] = kinds
        self._simulation.scheduler.after(self.duration_us() * 2, self._find_kinds, dict(lost))
        return True

    def _find_kinds(self, lost: dict[tuple[NodeId, NodeId], tuple[type, ...]]) -> None:
        if self._simulation.network.lost_kinds == lost:
            self._simulation.network.lost_kinds.clear()

    # -- members -------------------------------------------------------------------------------------------------

    def _crash(self, count: int) -> bool:
        down_us = self.duration_us()
        struck = False
        for node in self._some(count):
            if node.core is not None:
                self.note(node)
                self._simulation.crash(node, down_us + int(self._random.random() * 200_000))
                struck = True
        return struck

    def _crash_leader(self) -> bool:
        leader = self.leader()
        if leader is None or leader.core is None:
            return False
        self.note(leader)
        self._simulation.crash(leader, self.duration_us())
        return True

    def _pause(self) -> bool:
        running = self._running()
        if not running:
            return False
        node = self._random.choice(running)
        self.note(node)
        node.paused_until_us = self._simulation.scheduler.now_us + self.duration_us()
        return True

    def _slow_flush(self) -> bool:
        for node in self._some(self._random.randrange(1, len(self._nodes) + 1)):
            self.note(node)
            node.slow_flush_us = self._scaled(self._random.choice((50_000, 500_000, 3_000_000)))
            self._simulation.scheduler.after(self.duration_us(), self._fast_flush, node)
        return True

    def _hang_flush(self) -> bool:
        """One member's disk answers no flush for longer than any time-out; heartbeats and reads go on."""
        (node,) = self._some(1)
        self.note(node)
        node.slow_flush_us = self._scaled(self._random.choice((5_000_000, 8_000_000)))
        self._simulation.scheduler.after(self.duration_us() * 2, self._fast_flush, node)
        return True

    def _fast_flush(self, node: SimNode) -> None:
        node.slow_flush_us = 0

    def _disk_full(self) -> bool:
        for node in self._some(self._random.randrange(1, len(self._nodes) + 1)):
            self.note(node)
            node.log.disk_full = node.disk.full = True
            self._simulation.scheduler.after(self.duration_us(), self._disk_free, node)
        return True

    def _disk_free(self, node: SimNode) -> None:
        node.log.disk_full = node.disk.full = False

    def _expire(self) -> bool:
        """Retention removes a random part of what a member has committed and flushed."""
        running = self._running()
        if not running:
            return False
        node = self._random.choice(running)
        self.note(node)
        if min(node.log.committed_index, node.log.flushed.index) <= node.log.begin.index + 1:
            return False
        self.expire(node, self._random.choice((0.5, 1.0, 1.0)))
        return True

    def expire(self, node: SimNode, share: float) -> None:
        """So much of a member's log has expired, and goes as far as it may."""
        limit = min(node.log.committed_index, node.log.flushed.index)
        if limit <= node.log.begin.index + 1:
            return
        wanted = limit - int(self._random.random() * (1 - share) * (limit - node.log.begin.index))
        onlooker = self._simulation.mender.onlooker
        onlooker.looks = True  # else it waits for the repair
        needed = needed_from(node.log, self._simulation.options.config_of(node.name))
        unsaved = next((one for one in node.log.configurations if one.index > node.file.clear_to), None)
        if unsaved is not None and unsaved.index <= limit and unsaved.index < (needed or limit):
            needed = unsaved.index
        if needed is not None and needed < wanted:  # as the server does it
            wanted = needed
            node.ask(lambda core, now_ms: core.quorum_ack.write_snapshot(now_ms), node.boots)
            self._simulation.hits["expire_blocked"] += 1
        if node.machine is not None:
            wanted = min(wanted, node.machine.host.last_removable(LogIndex(wanted - 1)) + 1)
        if wanted > node.log.begin.index + 1:
            node.log.drop_before(LogIndex(wanted))
        onlooker.looks = False

    def _wipe(self) -> bool:
        """One member loses its disk, at any moment at which no other member has forgotten anything."""
        victim = self.only_victim()
        if victim is None:
            return False
        self.wipe(victim)
        return True

    def wipe(self, victim: SimNode) -> None:
        """A member loses its disk, here and now."""
        self.lose(victim)
        victim.replace_disk()

    def lose(self, victim: SimNode) -> None:
        """A member goes down, and will come back with another disk, on which it holds less."""
        self.note(victim)
        self._simulation.checker.observe_loss(victim)
        self._simulation.crash(victim, self.duration_us())
        self._simulation.network.forget(victim.name)

    def only_victim(self) -> SimNode | None:
        """A member that may forget something, if any may."""
        victim, *_ = self._some(len(self._nodes))
        return victim if self.may_forget(victim) else None

    def _snapshot(self) -> bool:
        """Keep what one member's disk holds now."""
        node = self._random.choice(self._nodes)
        node.take_snapshot()
        return True

    def _set_back(self) -> bool:
        """One member's disk is set back to what it once held, at any moment at which no other member has forgotten.

        Either its start finds that out, or nothing on the disk tells, but all others know that it held more.
        """
        victim = self.only_victim()
        newest = self._simulation.relevant[-1].index
        if victim is None or victim.snapshot is None or victim.snapshot.members != newest:
            return False
        others = [node for node in self._nodes if node is not victim]
        last = victim.snapshot.last
        known = all(node.remembered.get(victim.name, NO_ENTRY) > last for node in others)
        if self._random.random() < 0.5 and not known:
            return False
        self.lose(victim)
        victim.set_back("" if known else "its disk was set back")
        return True

    def _transfer(self) -> bool:
        node = self._random.choice(self._nodes)
        leader = self.leader()
        if self._random.random() < 0.8 and leader is not None:
            node = leader
        self.note(node)
        target = None if self._random.random() < 0.3 else self._random.choice(self._nodes).name

        def question(core: Node, now_ms: int) -> None:
            core.elector.transfer(target, now_ms)

        node.ask(question, node.boots)
        return node.core is not None

    def _connection_lost(self) -> bool:
        if len(self._nodes) == 1:
            return False
        one, other = self._some(2)
        self.note(one)
        self._simulation.break_stream(one.name, other.name)
        return True
