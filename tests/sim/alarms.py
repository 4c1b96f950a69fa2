"""Who hears at once that a leader is gone: what the transport makes of a broken connection (``rpc.peers.suspicion``).

A crash tells some of the others, as the seed decides. One that is told looks a moment later whether anybody is there:
nobody, or a process that has come up again, and is asked. Now and then a live leader seems to refuse connections.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from dledger.core.node import Node
from dledger.types import NodeId, Term

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation

FOUND_US_MIN: Final = 2_300
"""What was sent before arrives before, unless the links are in disorder."""
LOOK_US_MAX: Final = 100_000
"""How long a look at the leader's address may take."""


class Alarms:
    """Tells members, true or not, that their leader is gone."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self._random = random
        self._told = simulation.options.told
        self._false_us = simulation.options.false_alarm_us

    def start(self) -> None:
        """Begin to give false alarms."""
        if self._false_us:
            delay_us = int(self._random.expovariate(1) * self._false_us)
            self._simulation.scheduler.after(delay_us, self._alarm)

    def _alarm(self) -> None:
        if not self._simulation.nemesis.active:
            return
        for node in self._simulation.nodes:
            leader = None if node.core is None else node.core.state.leader_id
            if leader is not None and leader != node.name and self._random.random() < 0.5:
                self._simulation.hit("false_alarm", node)
                self._tell(node, leader, gone=True)
        self.start()

    def crashed(self, victim: SimNode) -> None:
        """Its connections break."""
        for node in self._simulation.nodes:
            if node is not victim:
                self.broke(victim, node)

    def broke(self, sender: SimNode, target: SimNode) -> None:
        """A connection on which ``sender`` pushed broke, and ``target`` may hear of it."""
        if self._told and target.core is not None and self._random.random() < self._told:
            delay_us = FOUND_US_MIN + int(self._random.random() * 2_000)
            arrived_us = self._simulation.network.arrived_us(sender.name, target.name)
            time_us = max(self._simulation.scheduler.now_us + delay_us, arrived_us)
            self._simulation.scheduler.at(time_us, self._noticed, sender, target, target.boots)

    def _noticed(self, sender: SimNode, target: SimNode, boot: int) -> None:
        def note(core: Node, _now_ms: int) -> None:
            term = core.follows(sender.name)
            if term is not None:
                delay_us = int(self._random.random() * self._random.choice((2_000, 2_000, LOOK_US_MAX)))
                self._simulation.scheduler.after(delay_us, self._looked, sender, target, boot, term)

        target.ask(note, boot)

    def _looked(self, sender: SimNode, target: SimNode, boot: int, term: Term) -> None:
        network = self._simulation.network
        if target.boots != boot or not (
            network.is_heard(sender.name, target.name) and network.is_heard(target.name, sender.name)
        ):
            return  # neither an answer nor a refusal
        gone = sender.core is None
        self._simulation.hit("told" if gone else "in_doubt", target)
        self._tell(target, sender.name, gone=gone, term=term)

    def _tell(self, node: SimNode, leader: NodeId, *, gone: bool, term: Term | None = None) -> None:
        def tell(core: Node, now_ms: int) -> None:
            core.leader_lost(leader, core.state.term if term is None else term, now_ms, gone=gone)

        node.ask(tell, node.boots)
