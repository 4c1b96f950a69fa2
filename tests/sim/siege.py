"""A minority broken for good, and a majority that nothing else happens to: it has to get on.

Other strikes come too often for that to be seen: before ten seconds have passed the next one has come. During a siege
no other fault strikes, clients ask seldom, and it ends as soon as the majority has shown for a while that it gets on;
``Progress`` tells if it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.sim.network import CALLS, PUSHES

if TYPE_CHECKING:
    from random import Random

    from tests.sim.driver import SimNode
    from tests.sim.faults import Nemesis
    from tests.sim.simulation import Simulation

ENOUGH: Final = 4
"""So many times the limit are enough for ``Progress`` to speak."""
THINK_US: Final = 300_000
"""How long clients wait between two questions meanwhile, at the least."""


class Siege:
    """One at a time."""

    def __init__(self, simulation: Simulation, nemesis: Nemesis, random: Random) -> None:
        self._simulation = simulation
        self._nemesis = nemesis
        self._random = random
        self._begun_us = 0
        self._least_us = 0
        self._got_on = 0
        self.lasts = False

    def lay(self) -> bool:
        """Break a minority, mend all others; False if one of those has no standing."""
        nodes = self._simulation.voters
        if self.lasts or len(nodes) < 3:
            return False
        broken = self._random.sample(nodes, self._random.randrange(1, (len(nodes) + 1) // 2))
        leader = self._nemesis.leader()
        if leader is not None and leader not in broken and self._random.random() < 0.5:
            broken[0] = leader
        well = [node for node in nodes if node not in broken]
        if not all(node.hard.voter and not node.forgetful for node in well):
            return False
        limit_us = self._simulation.progress.limit_us
        self._least_us = int(self._random.random() * self._random.choice((0.2, 1)) * limit_us)
        self._simulation.network.quieten()
        for node in well:
            node.free_all()
            self._simulation.mender.mend(node)
            if node.core is None:
                node.start()
        for node in broken:
            self._nemesis.note(node)
            self._random.choice(self._ways())(node, nodes)
        self.lasts = True
        self._simulation.think_us = max(self._simulation.think_us, THINK_US)
        self._begun_us = self._simulation.scheduler.now_us
        self._got_on = self._simulation.progress.got_on
        self._simulation.scheduler.after(limit_us // 40, self._look)
        return True

    def _look(self) -> None:
        if not self.lasts:
            return
        progress, now_us = self._simulation.progress, self._simulation.scheduler.now_us
        lasted_us = now_us - self._begun_us
        if lasted_us >= ENOUGH * progress.limit_us or (lasted_us >= self._least_us and progress.got_on > self._got_on):
            self.raise_()
        else:
            self._simulation.scheduler.after(progress.limit_us // 40, self._look)

    def raise_(self) -> None:
        """It is over: what was broken works again."""
        if self.lasts:
            self.lasts = False
            self._simulation.think_us = self._simulation.options.think_us
            self._simulation.network.mend_all()
            for node in self._simulation.nodes:
                node.free_all()

    # -- how a member is broken -----------------------------------------------------------------------------------

    def _ways(self) -> tuple[Callable[[SimNode, list[SimNode]], None], ...]:
        return self._crash, self._pause, self._cut, self._cut, self._lose, self._lose, self._hang, self._fill

    def _long_us(self) -> int:
        return ENOUGH * self._simulation.progress.limit_us

    def _crash(self, node: SimNode, _nodes: list[SimNode]) -> None:
        if node.core is not None:
            self._simulation.crash(node, self._least_us + self._nemesis.duration_us())

    def _pause(self, node: SimNode, _nodes: list[SimNode]) -> None:
        node.paused_until_us = self._simulation.scheduler.now_us + self._least_us + self._nemesis.duration_us()

    def _cut(self, node: SimNode, nodes: list[SimNode]) -> None:
        """From all others, or some, both ways or one."""
        blocked = self._simulation.network.blocked
        others = [other for other in nodes if other is not node]
        chosen = self._random.sample(others, self._random.randrange(1, len(others) + 1))
        ways = self._random.choice(((True, True), (True, False), (False, True)))
        for other in chosen:
            for pair, cut in zip(((node.name, other.name), (other.name, node.name)), ways, strict=True):
                if cut:
                    blocked[pair] = True

    def _lose(self, node: SimNode, nodes: list[SimNode]) -> None:
        """Kinds of messages, to or from it or both."""
        lost = self._simulation.network.lost_kinds
        kinds = self._random.choice((PUSHES, CALLS, (self._random.choice((*PUSHES, *CALLS)),)))
        ways = self._random.choice(((True, True), (True, False), (False, True)))
        for other in nodes:
            for pair, loses in zip(((node.name, other.name), (other.name, node.name)), ways, strict=True):
                if loses and other is not node:
                    lost[pair] = kinds

    def _hang(self, node: SimNode, _nodes: list[SimNode]) -> None:
        node.slow_flush_us = self._long_us()

    def _fill(self, node: SimNode, _nodes: list[SimNode]) -> None:
        node.log.disk_full = True
