"""Clients: appends of unique bodies with their outcome, and linearizable reads with what they had to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from dledger.core.node import Node
from dledger.errors import DLedgerError, InvariantError
from dledger.types import AppendedBatch, LogIndex
from tests.sim.checker import Checker, require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation


class Append:
    """One batch and what became of it: ``acked``, ``not_applied``, ``unknown`` or (still open) the empty string."""

    def __init__(self, checker: Checker, node: SimNode, bodies: list[bytes]) -> None:
        self._checker = checker
        self._node = node
        self.bodies = bodies
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        core.quorum_ack.append(self.bodies, now_ms, self.done)

    def done(self, result: AppendedBatch | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self.outcome, "an append was completed twice", self.outcome, result)
        self._node.operations.remove(self)
        if isinstance(result, AppendedBatch):
            self.outcome = "acked"
            require(result.last_index - result.first_index + 1 == len(self.bodies), "a batch of another size", result)
            self._checker.observe_ack(result.term, result.first_index, self.bodies)
        else:
            require(not isinstance(result, InvariantError), "an append hit a bug", result)
            self.outcome = result.outcome

    def lose(self) -> None:
        """The member died: nobody knows."""
        self.outcome = "unknown"


class Read:
    """One linearizable read: it must see all that was acknowledged, or read, before it began."""

    def __init__(self, checker: Checker, node: SimNode) -> None:
        self._checker = checker
        self._node = node
        self._must_see = checker.known_index
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        core.reads.submit(now_ms, self.done)

    def done(self, result: LogIndex | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self.outcome, "a read was completed twice", self.outcome, result)
        self._node.operations.remove(self)
        if isinstance(result, DLedgerError):
            self.outcome = result.outcome
            return
        self.outcome = "acked"
        self._checker.observe_read(self._node, result, self._must_see)

    def lose(self) -> None:
        """The member died: no answer."""
        self.outcome = "unknown"


class Clients:
    """A few clients that keep asking whoever they believe leads."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self._random = random
        self._number = 0
        self._target = 0
        self._is_new = simulation.options.is_new
        self.stopped = False
        self.appends: list[Append] = []
        self.reads: list[Read] = []

    def start(self) -> None:
        """Begin to ask."""
        for _ in range(self._simulation.options.clients):
            self._later()

    def outcomes(self) -> Counter[str]:
        """How the appends and reads ended."""
        found = Counter(f"append {append.outcome}" for append in self.appends)
        return found + Counter(f"read {read.outcome}" for read in self.reads)

    def open_operations(self) -> int:
        """How many wait for an answer."""
        operations: list[Append | Read] = [*self.appends, *self.reads]
        return sum(not operation.outcome for operation in operations)

    def _later(self) -> None:
        delay_us = self._random.expovariate(1) * self._simulation.think_us
        self._simulation.scheduler.after(int(delay_us), self._think)

    def _think(self) -> None:
        if self.stopped:
            return
        self._later()
        node = self._choose()
        if node is None or len(node.operations) >= 30:
            return
        if self._random.random() < 0.25:
            self.read(self._oldest_leader(node) if self._is_new else node)
        else:
            self.append(node)

    def _choose(self) -> SimNode | None:
        nodes = self._simulation.nodes
        if self._simulation.options.patient and not any(node.role == "leader" for node in nodes):
            return None
        chance = self._random.random()
        if chance < 0.05:
            self._target = int(self._random.random() * len(nodes))
        elif chance < 0.4:
            self._target = self._simulation.believed_leader(self._target)
        elif chance < 0.7:
            claims = [
                number for number, node in enumerate(nodes) if node.core and node.core.state.role_name == "LEADER"
            ]
            self._target = self._random.choice(claims) if claims else self._target
        node = nodes[self._target]
        if node.core is None:
            self._target = (self._target + 1) % len(nodes)
            return None
        return node

    def _oldest_leader(self, otherwise: SimNode) -> SimNode:
        """Often whoever has not noticed yet that others lead, if there is one."""
        terms = {
            node.name: node.core.state.term for node in self._simulation.nodes if node.core and node.role == "leader"
        }
        if len(terms) < 2 or self._random.random() < 0.5:
            return otherwise
        return min((node for node in self._simulation.nodes if node.name in terms), key=lambda node: terms[node.name])

    def append(self, node: SimNode) -> Append:
        """Append a new batch at ``node``."""
        bodies = [self._body() for _ in range(self._random.choice((1, 1, 1, 2, 4)))]
        append = Append(self._simulation.checker, node, bodies)
        self.appends.append(append)
        self._ask(node, append, append.ask)
        return append

    def read(self, node: SimNode) -> None:
        """Read at ``node``."""
        read = Read(self._simulation.checker, node)
        self.reads.append(read)
        self._ask(node, read, read.ask)

    def _ask(self, node: SimNode, operation: Append | Read, question: Callable[[Node, int], None]) -> None:
        node.operations.append(operation)
        node.ask(question, node.boots)

    def _body(self) -> bytes:
        self._number += 1
        length = 120 if self._random.random() < 0.05 else int(self._random.random() * 12)
        return b"e%d " % self._number + b"x" * length
