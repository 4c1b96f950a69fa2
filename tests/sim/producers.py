"""Clients that repeat: producers whose requests overlap, overtake each other and come again, under every fault.

A session has a history of bodies that only grows. Each request is a stretch of it, old, new or both, sent to whoever
may lead, also while earlier requests wait for their answers. So nothing but the group itself keeps entries from being
stored twice (``Checker``), and whatever was acknowledged must be found at the place that the answer names.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from dledger.core.node import Node
from dledger.errors import DLedgerError, InvariantError, OutOfOrderSequenceError, UnknownProducerError
from dledger.types import AppendedBatch, LogIndex, ProducerBatch
from tests.sim.checker import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation

REQUESTS_MAX = 6
"""Of a session at once."""


class Request:
    """One stretch of a session's history on its way."""

    def __init__(self, session: Session, node: SimNode, first: int, bodies: list[bytes]) -> None:
        self._session = session
        self._node = node
        self.first = first
        self.bodies = bodies
        self._acked = session.acked
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        core.quorum_ack.append(self.bodies, now_ms, self.done, ProducerBatch(self._session.name, self.first))

    def done(self, result: AppendedBatch | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self.outcome, "a producer's append was completed twice", self.outcome, result)
        self._node.operations.remove(self)
        if isinstance(result, AppendedBatch):
            self.outcome = "acked"
            self._session.observe_ack(self.first, self.bodies, result)
        else:
            require(not isinstance(result, InvariantError), "a producer's append hit a bug", result)
            self.outcome = result.outcome
            if isinstance(result, UnknownProducerError | OutOfOrderSequenceError):
                self.outcome = type(result).__name__
                # Whoever says so leads, and knows what was acknowledged before it was asked.
                require(self.first > self._acked, "a producer is not known", self._session.name, self.first, result)

    def lose(self) -> None:
        """The member died: nobody knows."""
        self.outcome = "unknown"


class Question:
    """How far a session is, as the leader says."""

    def __init__(self, session: Session, node: SimNode) -> None:
        self._session = session
        self._node = node
        self._at_least = session.acked
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        core.producer_sequence(self._session.name, now_ms, self.done)

    def done(self, result: int | DLedgerError) -> None:
        """What was acknowledged before the question counts, and nothing that was never sent."""
        require(not self.outcome, "a question was answered twice", self.outcome, result)
        self._node.operations.remove(self)
        if isinstance(result, DLedgerError):
            self.outcome = result.outcome
            return
        self.outcome = "acked"
        history = len(self._session.history)
        require(self._at_least <= result <= history, "a producer is elsewhere", result, self._at_least, history)

    def lose(self) -> None:
        """The member died: no answer."""
        self.outcome = "unknown"


class Session:
    """A producer and all that it ever wanted to store."""

    def __init__(self, simulation: Simulation, random: Random, name: str) -> None:
        self._simulation = simulation
        self._random = random
        self.name = name
        self.history: list[bytes] = []
        self.acked = 0
        """How many entries, from the first on, are known to be stored."""
        self.operations: list[Request | Question] = []
        self.outcomes: Counter[str] = Counter()

    def act(self, node: SimNode) -> None:
        """Send something new, something again, or both; or ask."""
        self._forget_finished()
        if len(self.operations) >= REQUESTS_MAX or len(node.operations) >= 30:
            return
        asks = self._random.random() < 0.1
        operation = Question(self, node) if asks else self._request(node)
        self.operations.append(operation)
        node.operations.append(operation)
        node.ask(operation.ask, node.boots)

    def _request(self, node: SimNode) -> Request:
        known = len(self.history)
        back = self._random.choice((0, 0, 1, 1, 2, 3, 8, known - self.acked, known - self.acked))
        first = max(0, known - back)
        length = self._random.choice((1, 1, 2, 3, known - first, known - first + 1)) or 1
        for number in range(known, first + length):
            self.history.append(b"%s/%d " % (self.name.encode(), number) + b"x" * int(self._random.random() * 8))
        return Request(self, node, first, self.history[first : first + length])

    def _forget_finished(self) -> None:
        for operation in [one for one in self.operations if one.outcome]:
            self.operations.remove(operation)
            self.outcomes[f"producer {operation.outcome}"] += 1

    def observe_ack(self, first: int, bodies: list[bytes], result: AppendedBatch) -> None:
        """Every entry is committed, each where the answer says, in the order of the history."""
        checker = self._simulation.checker
        at = 0
        for run in result.duplicates:
            if run.first_index:
                checker.observe_stored(run.first_index, bodies[at : at + run.count])
            else:
                for body in bodies[at : at + run.count]:
                    require(body in checker.bodies, "acknowledged as stored before, and is not committed", body)
                    checker.observe_stored(LogIndex(checker.bodies[body]), [body])
            at += run.count
        new = result.last_index - result.first_index + 1
        require(at + new == len(bodies), "a batch of another size", result)
        checker.observe_ack(result.term, result.first_index, bodies[at:])
        if first <= self.acked:
            self.acked = max(self.acked, first + len(bodies))


class Producers:
    """The sessions of a run."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self._random = random
        self.sessions = [Session(simulation, random, f"p{number}") for number in range(simulation.options.producers)]

    def start(self) -> None:
        """Begin to send."""
        if self.sessions:
            self._later()

    def open_operations(self) -> int:
        """How many wait for an answer."""
        return sum(not operation.outcome for session in self.sessions for operation in session.operations)

    def outcomes(self) -> Counter[str]:
        """How the requests ended."""
        return sum((session.outcomes for session in self.sessions), Counter())

    def _later(self) -> None:
        delay_us = self._random.expovariate(1) * self._simulation.think_us
        self._simulation.scheduler.after(int(delay_us), self._think)

    def _think(self) -> None:
        clients = self._simulation.clients
        if clients.stopped:
            return
        self._later()
        nodes = self._simulation.nodes
        if self._simulation.options.patient and not any(node.role == "leader" for node in nodes):
            return
        session = self._random.choice(self.sessions)
        number = int(self._random.random() * len(nodes))
        if self._random.random() < 0.8:
            number = self._simulation.believed_leader(number)
        if nodes[number].core is not None:
            session.act(nodes[number])
