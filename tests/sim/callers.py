"""Clients of the state machine: commands under numbers, which come again until they are answered, others, and queries.

What they are told is held against the first application of each entry (S3, S4), and in the end one order must explain
all of it (``tests.support.map_history``).
"""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Final

from dledger.core.node import Node
from dledger.errors import (
    DLedgerError,
    InvariantError,
    OutOfOrderSequenceError,
    ResultForgottenError,
    StateMachineError,
    UnknownProducerError,
)
from dledger.types import NO_INDEX, ProducerBatch, QueryAnswer
from tests.sim.register import Found, Put, Swapped
from tests.sim.violations import require
from tests.support.map_history import Change, Look, MapHistory, Told, check

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation

KEYS: Final = ("a", "b", "c")


class Batch:
    """Some commands, and what became of them over all attempts; ``number`` None: there is only one attempt."""

    def __init__(self, puts: list[Put], number: ProducerBatch | None, began_us: int) -> None:
        self.puts = puts
        self.number = number
        self.began_us = began_us
        self.may_be_applied = False
        self.is_over = False


class Attempt:
    """One request with a batch."""

    def __init__(self, caller: Caller, node: SimNode, batch: Batch) -> None:
        self._caller = caller
        self._node = node
        self._batch = batch
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        if self._node.machine is None:
            raise TypeError(self._node.name)
        bodies = [put.encode() for put in self._batch.puts]
        self._node.machine.submit(core, now_ms, bodies, self.done, self._batch.number)

    def done(self, result: tuple[bytes, ...] | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self.outcome, "commands were answered twice", self.outcome, result)
        require(not isinstance(result, InvariantError), "commands hit a bug", result)
        self._node.operations.remove(self)
        if isinstance(result, DLedgerError):
            self.outcome = result.outcome
            self._caller.refused(self._batch, result)
        else:
            self.outcome = "acked"
            self._caller.answered(self._batch, result)

    def lose(self) -> None:
        """The member died: nobody knows."""
        self.outcome = "unknown"
        self._caller.lost(self._batch)


class Question:
    """One query."""

    def __init__(self, caller: Caller, node: SimNode, key: str, began_us: int, *, linearizable: bool) -> None:
        self._caller = caller
        self._node = node
        self.key = key
        self.began_us = began_us
        self.linearizable = linearizable
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        if self._node.machine is None:
            raise TypeError(self._node.name)
        self._node.machine.query(core, now_ms, self.key.encode(), self.done, linearizable=self.linearizable)

    def done(self, result: QueryAnswer | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self.outcome, "a query was answered twice", self.outcome, result)
        require(not isinstance(result, InvariantError | StateMachineError), "a query hit a bug", result)
        self._node.operations.remove(self)
        self.outcome = result.outcome if isinstance(result, DLedgerError) else "acked"
        self._caller.told(self, self._node, result)

    def lose(self) -> None:
        """The member died: no answer."""
        self.outcome = "unknown"
        self._caller.told(self, self._node, None)


class Caller:
    """One client, which waits for one batch at a time."""

    def __init__(self, simulation: Simulation, random: Random, name: str, history: MapHistory) -> None:
        self._simulation = simulation
        self._random = random
        self._name = name
        self._history = history
        self._life = 0
        self._sequence = 0
        self._count = 0
        self._known: dict[str, int] = dict.fromkeys(KEYS, 0)
        self._patience_us = random.choice((300_000, 2_000_000, 8_000_000)) * simulation.options.tempo // 1000
        self._batch: Batch | None = None
        self.open = 0
        """Questions and attempts without an answer."""
        self.outcomes: Counter[str] = Counter()

    @property
    def is_waiting(self) -> bool:
        """Whether anything has no answer."""
        return self._batch is not None or self.open > 0

    @property
    def _now_us(self) -> int:
        return self._simulation.scheduler.now_us

    def act(self) -> None:
        """Ask something new; not while a batch is on its way."""
        if self._batch is not None or self.open > 3:
            return
        node = self._choose()
        if node is None:
            return
        if self._random.random() < 0.4:
            linearizable = self._random.random() < 0.85
            question = Question(self, node, self._random.choice(KEYS), self._now_us, linearizable=linearizable)
            self._ask(node, question)
            return
        count = self._random.choice((1, 1, 1, 2, 4))
        number = None
        puts = [self._put() for _ in range(count)]
        if self._random.random() < 0.75:
            number = ProducerBatch(f"{self._name}/{self._life}", self._sequence, count)
            for at, put in enumerate(puts):
                self._simulation.machine_checks.expect_number(put.encode(), number.producer, self._sequence + at)
            self._sequence += count
        batch = self._batch = Batch(puts, number, self._now_us)
        self._ask(node, Attempt(self, node, batch))
        self._simulation.scheduler.after(self._patience_us, self._late, batch)

    def _put(self) -> Put:
        key = self._random.choice(KEYS)
        self._count += 1
        condition = self._known[key] if self._random.random() < 0.5 else None
        return Put(key, f"{self._name}.{self._count}", condition)

    def _choose(self) -> SimNode | None:
        nodes = self._simulation.nodes
        number = int(self._random.random() * len(nodes))
        chance = self._random.random()
        if chance < 0.8:
            number = self._simulation.believed_leader(number)
        elif chance < 0.9:  # one that may not have noticed yet that others lead
            leaders = [at for at, node in enumerate(nodes) if node.role == "leader"]
            number = self._random.choice(leaders) if leaders else number
        node = nodes[number]
        return node if node.core is not None and len(node.operations) < 30 else None

    def _ask(self, node: SimNode, operation: Attempt | Question) -> None:
        self.open += 1
        node.operations.append(operation)
        node.ask(operation.ask, node.boots)

    # -- what becomes of commands ------------------------------------------------------------------------------------

    def answered(self, batch: Batch, results: tuple[bytes, ...]) -> None:
        """Commands were applied: the results are those of their first application, whoever gives them."""
        self.open -= 1
        require(len(results) == len(batch.puts), "another number of results", results, batch.puts)
        for put, result in zip(batch.puts, results, strict=True):
            first = self._simulation.machine_checks.result_of(put.encode())
            require(result == first, "another result than that of the first application", put, result, first)
        if batch.is_over:
            return
        self._end(batch)
        for put, result in zip(batch.puts, results, strict=True):
            swapped = Swapped(*json.loads(result))
            told = Told.DONE if swapped.done else Told.OTHER_REVISION
            self.outcomes[f"command {told}"] += 1
            self._known[put.key] = swapped.revision
            self._record(batch, put, told, swapped)

    def refused(self, batch: Batch, error: DLedgerError) -> None:
        """Perhaps they are sent again."""
        self.open -= 1
        self.outcomes[f"attempt {type(error).__name__}"] += 1
        forgotten = isinstance(error, ResultForgottenError)
        require(not forgotten, "the last results of a producer are not kept", batch.number, error)
        batch.may_be_applied = batch.may_be_applied or error.outcome == "unknown"
        if isinstance(error, UnknownProducerError | OutOfOrderSequenceError):
            self._give_up(batch)
        else:
            self._again(batch)

    def lost(self, batch: Batch) -> None:
        """The answer was lost with the member."""
        self.open -= 1
        batch.may_be_applied = True
        self._again(batch)

    def _again(self, batch: Batch) -> None:
        if batch.is_over:
            return
        if (
            batch.number is None
            or self._now_us > batch.began_us + 10 * self._patience_us
            or self._random.random() < 0.02
        ):
            self._give_up(batch)
            return
        delay_us = int(self._random.random() * self._random.choice((3_000, 30_000, 200_000)))
        self._simulation.scheduler.after(delay_us, self._send_again, batch)

    def _late(self, batch: Batch) -> None:
        """No answer in time: sent again, while the first request may still be under way."""
        if not batch.is_over:
            batch.may_be_applied = True
            self._again(batch)
            self._simulation.scheduler.after(self._patience_us, self._late, batch)

    def _send_again(self, batch: Batch) -> None:
        if batch.is_over:
            return
        node = self._choose()
        if node is None or self.open > 6:
            self._again(batch)
            return
        self._simulation.hits["command_repeated"] += 1
        self._ask(node, Attempt(self, node, batch))

    def _give_up(self, batch: Batch) -> None:
        """Nobody knows whether it is applied, or will be; under its name there may be a gap."""
        if batch.is_over:
            return
        self._end(batch)
        if batch.number is not None:
            self._life, self._sequence = self._life + 1, 0
        told = Told.UNKNOWN if batch.may_be_applied else Told.REFUSED
        self.outcomes[f"command {told}"] += len(batch.puts)
        for put in batch.puts:
            self._record(batch, put, told, None)

    def _end(self, batch: Batch) -> None:
        batch.is_over = True
        self._batch = None

    def _record(self, batch: Batch, put: Put, told: Told, result: Swapped | None) -> None:
        revision, former = (-1, None) if result is None else (result.revision, result.value)
        change = Change(put.key, put.value, batch.began_us, self._now_us, told, put.if_revision, revision, former)
        self._history.record(change)

    # -- what becomes of queries -------------------------------------------------------------------------------------

    def told(self, question: Question, node: SimNode, result: QueryAnswer | DLedgerError | None) -> None:
        """A query has an answer, or none."""
        self.open -= 1
        kind = "query" if question.linearizable else "old query"
        self.outcomes[f"{kind} {question.outcome}"] += 1
        if not isinstance(result, QueryAnswer):
            return
        found = Found(*json.loads(result.result))
        self._simulation.machine_checks.observe_found(node, found, result.applied_index)
        if question.linearizable:
            self._known[question.key] = found.revision
            index = max(found.at, NO_INDEX)
            look = Look(question.key, found.value, found.revision, index, question.began_us, self._now_us)
            self._history.record(look)


class Callers:
    """The callers of a run."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self._random = random
        self._history = MapHistory()
        self._all = [
            Caller(simulation, random, f"c{number}", self._history) for number in range(simulation.options.callers)
        ]

    def start(self) -> None:
        """Begin to ask."""
        for caller in self._all:
            self._later(caller)

    @property
    def outcomes(self) -> Counter[str]:
        """How commands and queries ended."""
        return sum((caller.outcomes for caller in self._all), Counter())

    def open_operations(self) -> int:
        """How many wait for an answer."""
        return sum(caller.is_waiting for caller in self._all)

    def finish(self) -> None:
        """One order explains all answers."""
        complaints = check(self._history.changes, self._history.looks)
        require(not complaints, "the history is not linearizable", *complaints)

    def _later(self, caller: Caller) -> None:
        delay_us = self._random.expovariate(1) * self._simulation.think_us / 2
        self._simulation.scheduler.after(int(delay_us), self._think, caller)

    def _think(self, caller: Caller) -> None:
        if not self._simulation.clients.stopped:
            self._later(caller)
            caller.act()
