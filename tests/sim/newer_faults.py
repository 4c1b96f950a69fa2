"""Faults that strike from the seed ``NEW_WORLDS`` on; they draw apart, so that older worlds stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from dledger.core.messages import HeartbeatRequest, LoadRun, Message, PushResponse, VoteRequest, VoteResponse
from dledger.types import NodeId
from tests.sim.siege import Siege

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.faults import Nemesis
    from tests.sim.simulation import Simulation


class NewerFaults:
    """What the nemesis does to members besides: their threads, clocks, reads, and the ends of their logs."""

    def __init__(self, simulation: Simulation, nemesis: Nemesis) -> None:
        self._simulation = simulation
        self._nemesis = nemesis
        self._nodes = simulation.group
        self.random = Random(f"newer faults/{simulation.options.seed}")
        self._dies, self._pauses = simulation.options.has("crash_send"), simulation.options.has("pause_leader")
        self.siege = Siege(simulation, nemesis, self.random)
        self.strikes: dict[str, Callable[[], bool]] = {
            "pause_leader": self._pause_leader,
            "come_back": self._come_back,
            "change_sides": self._change_sides,
            "stall": self._stall,
            "clock_jump": self._clock_jump,
            "hang_read": self._hang_read,
            "exhaust": self._exhaust,
            "lost_end": self._lose_end,
            "damage": self._damage,
            "siege": self.siege.lay,
        }

    def strikes_sender(self, node: SimNode, message: Message) -> bool:
        """A member that has just said something that others build upon dies before it says the next thing.

        Or it stops, while what it asked for is being answered.
        """
        if self._pauses and isinstance(message, HeartbeatRequest) and self.random.random() < 0.01:
            self._simulation.hit("pause_leader", node)
            self._pause(node)
        return self._dies and self._dies_after(node, message)

    def _dies_after(self, node: SimNode, message: Message) -> bool:
        match message:
            case VoteRequest(pre_vote=False) | VoteResponse(pre_vote=False, granted=True):
                probability = 0.03
            case LoadRun() | PushResponse():
                probability = 0.003
            case _:
                probability = 0.0002
        if self.random.random() >= probability:
            return False
        simulation = self._simulation
        simulation.hit("crash_send", node)
        if simulation.options.has("wipe") and self.random.random() < 0.5 and self._nemesis.may_forget(node):
            simulation.hit("wipe", node)
            self._nemesis.wipe(node)
        else:
            simulation.crash(node, self._nemesis.duration_us())
        return True

    def _until_us(self) -> int:
        return self._simulation.scheduler.now_us + self._nemesis.duration_us()

    def _timeouts_us(self, number: float) -> int:
        """So many of the shortest election time-outs."""
        return int(1000 * self._simulation.options.election.election_timeout_ms_min * number)

    def _one(self) -> SimNode:
        """The leader as often as anybody else."""
        leader = self._nemesis.leader()
        if leader is not None and self.random.random() < 0.5:
            return leader
        return self.random.choice(self._nodes)

    def _pause_leader(self) -> bool:
        """It is silent for about as long as another one needs to be elected, and does not know it.

        Either only the process stops, and what comes meanwhile waits for it; or the whole machine, a little later.
        """
        leader = self._nemesis.leader()
        if leader is None or leader.core is None:
            return False
        self._nemesis.note(leader)
        self._pause(leader)
        return True

    def _pause(self, node: SimNode) -> None:
        scheduler = self._simulation.scheduler
        pause_us = self._timeouts_us(0.5 + self.random.random() * self.random.choice((1, 3, 6)))
        node.paused_until_us = scheduler.now_us + pause_us
        if self.random.random() < 0.6:
            scheduler.after(int(self.random.random() * 10_000), self._deafen, node)
            scheduler.at(node.paused_until_us, self._hear, node)

    def _come_back(self) -> bool:
        """A leader is cut off, with fewer than half, until others have elected another one, who is soon gone again.

        What the first one wrote meanwhile is dropped, and it may lead once more.
        """
        leader = self._nemesis.leader()
        if leader is None or leader.core is None or len(self._nodes) < 3:
            return False
        others = [node for node in self._nodes if node is not leader]
        friends = self.random.sample(others, self.random.randrange((len(self._nodes) + 1) // 2))
        cut_us = self._timeouts_us(1 + self.random.random() * 3)
        self._nemesis.split([leader, *friends], cut_us)
        again_us = cut_us + self._timeouts_us(self.random.random() * self.random.choice((0.2, 1)))
        if self._simulation.options.has("stall") and self.random.random() < 0.6:
            self._stall_part(leader, again_us + self._timeouts_us(self.random.random()))
        self._nemesis.leave_alone(again_us)
        self._simulation.scheduler.after(again_us, self._offer_again, leader, leader.boots, 5)
        return True

    def _offer_again(self, node: SimNode, boot: int, times: int) -> None:
        """Whoever leads now hands over to ``node``, or goes down."""
        successor = self._nemesis.leader()
        if not self._nemesis.is_striking or node.core is None or node.boots != boot or successor in (None, node):
            return
        if self.random.random() < 0.2:
            self._simulation.crash(successor, self._nemesis.duration_us())
            return
        successor.ask(lambda core, now_ms: core.elector.transfer(node.name, now_ms), successor.boots)
        if times:
            self._simulation.scheduler.after(self._timeouts_us(0.3), self._offer_again, node, boot, times - 1)

    def _change_sides(self) -> bool:
        """A leader writes to one half of the others while its own disk is slow, falls, and is back with the other half.

        What the first half has acknowledged is not committed, and another entry takes its place.
        """
        leader = self._nemesis.leader()
        if leader is None or leader.core is None or len(self._nodes) < 3:
            return False
        self._nemesis.note(leader)
        others = [node for node in self._nodes if node is not leader]
        self.random.shuffle(others)
        half = len(others) // 2
        first_us = self._timeouts_us(0.2 + self.random.random())
        self._nemesis.split(others[half:], first_us)
        leader.slow_flush_us = 2 * first_us
        second_us = self._timeouts_us(2 + self.random.random() * 3)
        self._nemesis.leave_alone(first_us + second_us)
        self._simulation.scheduler.after(first_us, self._change, leader, leader.boots, others[:half], second_us)
        return True

    def _change(self, leader: SimNode, boot: int, half: list[SimNode], for_us: int) -> None:
        leader.slow_flush_us = 0
        if not self._nemesis.is_striking or leader.core is None or leader.boots != boot:
            return
        self._nemesis.split(half, for_us)
        slow_us = self._timeouts_us(self.random.choice((0, 0.5, 1)))
        for node in self._nodes:
            if slow_us and node is not leader and node not in half:
                node.slow_flush_us = slow_us
                self._simulation.scheduler.after(for_us, self._fast_flush, node)
        self._simulation.crash(leader, self._timeouts_us(self.random.random() * 0.3))

    def _fast_flush(self, node: SimNode) -> None:
        node.slow_flush_us = 0

    def _deafen(self, node: SimNode) -> None:
        self._simulation.network.deaf[node.name] = True

    def _hear(self, node: SimNode) -> None:
        self._simulation.network.deaf.pop(node.name, None)

    def _stall(self) -> bool:
        """One thread of a member gets no processor."""
        node = self._one()
        if node.core is None:
            return False
        self._nemesis.note(node)
        self._stall_part(node, self._timeouts_us(self.random.random() * self.random.choice((0.1, 1, 8))))
        return True

    def _stall_part(self, node: SimNode, for_us: int) -> None:
        part = "quorum-ack" if self.random.random() < 0.4 else self.random.choice(node.parts)
        node.stall(part, self._simulation.scheduler.now_us + for_us)

    def _clock_jump(self) -> bool:
        """A machine was suspended: it did nothing meanwhile, and then its clock jumps; or only the clock does."""
        node = self._one()
        self._nemesis.note(node)
        until_us = self._until_us() if self.random.random() < 0.5 else self._simulation.scheduler.now_us
        node.paused_until_us = until_us
        ahead_ms = int(self.random.random() * self.random.choice((1_000, 60_000, 3_600_000)))
        self._simulation.scheduler.at(until_us, node.jump, ahead_ms)
        return True

    def _hang_read(self) -> bool:
        """One member's disk gives nothing that is read from it; what is written and flushed goes on."""
        node = self._one()
        self._nemesis.note(node)
        node.hang_read_until_us = self._until_us() + self._nemesis.duration_us()
        return True

    def _exhaust(self) -> bool:
        """A member has no thread left: calls are refused, or connections for pushes, which are hung up on."""
        node = self._one()
        self._nemesis.note(node)
        network = self._simulation.network
        refuses = self.random.choice((network.refuses_calls, network.refuses_pushes))
        refuses[node.name] = True
        self._simulation.scheduler.at(self._until_us(), self._take_again, refuses, node)
        return True

    def _take_again(self, refuses: dict[NodeId, bool], node: SimNode) -> None:
        refuses.pop(node.name, None)

    def _lose_end(self) -> bool:
        """A start finds the end of the log damaged: it goes, and with it the member's standing."""
        victim = self._nemesis.only_victim()
        if victim is None or not victim.hard.voter:
            return False
        kept = victim.log.flushed.index - victim.log.begin.index
        if kept <= 1:
            return False
        lost = 1 + int(self.random.random() * min(kept - 1, self.random.choice((1, 5, 50))))
        self._nemesis.lose(victim)
        victim.log.cut(lost)
        victim.doubt("its log was damaged")
        return True

    def _damage(self) -> bool:
        """Sectors of one member's log cannot be read any more."""
        node = self._one()
        self._nemesis.note(node)
        return self._nemesis.may_forget(node) and self._simulation.mender.damage(node)
