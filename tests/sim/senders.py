"""Real clients: the windows of ``dledger.sending`` as applications use them, against the group, under every fault.

A sender's streams break, its requests arrive late, also long after it has given up hope, and members die with them.
What it says of an entry must be so: stored entries are where it says, in the order in which they were given; what it
calls not applied is never in the log; and nothing is there twice (``Checker``).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Final

from dledger.client.aio.appending import APPEND_RULES, AppendBatch, AppendedResults
from dledger.client.shared import AppendResult, results_of
from dledger.core.node import Node
from dledger.core.noop_payload import MADE_UP_BYTES, made_up_name
from dledger.errors import (
    DLedgerError,
    EarlierRequestFailedError,
    InvariantError,
    RequestTimeoutError,
    UnavailableError,
)
from dledger.sending.batch import AllStored, ProducerNumbering
from dledger.sending.window import NEVER, Window, WindowOptions
from dledger.types import AppendedBatch, LogIndex, ProducerBatch
from tests.sim.checker import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation

PENDING_MAX: Final = 200
"""Entries of a sender that are not done, so that a run has an end."""


class Stream:
    """From a sender to one life of a member. Requests arrive in order; answers come as they come."""

    def __init__(self, sender: Sender, node: SimNode) -> None:
        self.sender = sender
        self.node = node
        self.boots = node.boots
        self.arrived_us = 0
        self.has_refused = False
        """Then the server stores nothing without a number that comes after."""
        self.pending: list[Request] = []
        self.arrived: deque[Request] = deque()
        """Requests in their order, also if the member was paused again while they waited for it."""

    def ask_next(self, core: Node, now_ms: int) -> None:
        """Submit the first that has arrived."""
        self.arrived.popleft().ask(core, now_ms)


class Request:
    """One batch on its way."""

    def __init__(self, stream: Stream, batch: AppendBatch) -> None:
        self._stream = stream
        self.batch = batch
        self._bodies = [batch.payloads[place] for place in batch.sent]
        self._producer = ProducerBatch(batch.producer, batch.sequence, len(batch.sent)) if batch.producer else None
        self._is_over = False

    def arrive(self) -> None:
        """At the member, if it still lives."""
        node, stream = self._stream.node, self._stream
        if node.core is None or node.boots != stream.boots:
            stream.sender.later(stream.sender.end, stream)
            return
        node.operations.append(self)
        stream.arrived.append(self)
        node.ask(stream.ask_next, stream.boots)

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        if self._stream.has_refused and self._producer is None:
            self.done(EarlierRequestFailedError("an earlier request of this stream was refused"))
        else:
            core.quorum_ack.append(self._bodies, now_ms, self.done, self._producer)

    def done(self, result: AppendedBatch | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self._is_over, "a sender's append was completed twice", result)
        require(not isinstance(result, InvariantError), "a sender's append hit a bug", result)
        self._is_over = True
        self._stream.node.operations.remove(self)
        self._stream.has_refused = self._stream.has_refused or isinstance(result, DLedgerError)
        self._stream.sender.later(self._stream.sender.hear, self, result)

    def lose(self) -> None:
        """The member died: the stream to it ends."""
        self._is_over = True
        self._stream.sender.later(self._stream.sender.end, self._stream)


class Sender:
    """An application with a window."""

    def __init__(self, simulation: Simulation, random: Random, name: str) -> None:
        self._simulation = simulation
        self._random = random
        self._name = name
        options = WindowOptions(
            linger_ms=random.choice((0.0, 0.0, 20.0)),
            batch_items=random.choice((1, 3, 10)),
            inflight_requests_max=random.choice((1, 2, 8)),
            timeout_ms=random.choice((700.0, 3000.0, 10_000.0)),
        )
        numbering = ProducerNumbering(make_name=lambda: made_up_name(random.randbytes(MADE_UP_BYTES)))
        self._window: Window[None, AppendResult] = Window(options, APPEND_RULES, numbering)
        self._breaks = random.choice((0.0, 0.02, 0.2))
        """How often a request's stream ends before its answer."""
        self._dawdles = random.choice((0.0, 0.02, 0.2))
        """How often a request is on its way for long."""
        self._stream: Stream | None = None
        self._wake_us = -1
        self._numbers = itertools.count()
        self._given: list[tuple[bytes, AppendBatch, int]] = []
        self._told = 0  # so many of the given ones, from the first on, have been checked
        self._last = -1  # where the last of them is that is stored
        self.outcomes: Counter[str] = Counter()
        self.refused: list[bytes] = []
        """What it was told is not applied."""

    @property
    def _now_ms(self) -> float:
        return self._simulation.scheduler.now_us / 1000

    def open_operations(self) -> int:
        """How many entries are not done."""
        return len(self._given) - self._told

    def later(self, call: object, *arguments: object) -> None:
        """Something reaches the sender after a while."""
        require(callable(call), "nothing to call", call)
        self._simulation.scheduler.after(int(self._random.random() * 3_000), call, *arguments)  # type: ignore[arg-type]

    def add(self) -> None:
        """Give some entries."""
        if self.open_operations() >= PENDING_MAX or self._window.is_full:
            return
        bodies = [
            b"%s/%d" % (self._name.encode(), next(self._numbers)) for _ in range(self._random.choice((1, 1, 2, 5)))
        ]
        if self._random.random() < 0.3:
            batch = self._window.add_whole(list(bodies), self._now_ms)
            self._given += [(body, batch, place) for place, body in enumerate(bodies)]
        else:
            self._given += [(body, *self._window.add(body, self._now_ms)) for body in bodies]
        self._drive()

    # --- what a driver does -----------------------------------------------------------------------------------------

    def _drive(self) -> None:
        window, stream = self._window, self._stream
        actions = window.step(self._now_ms)
        while stream is not None and (batch := window.next_to_send(self._now_ms)) is not None:
            self._send(stream, batch)
        if actions.leave and stream is not None:
            self.later(self.end, stream)
        if actions.look:
            self.later(self._looked)
        if actions.connect_until_ms is not None:
            self.later(self._connect)
        done, window.done = window.done, []
        for batch in done:
            batch.announce()
        self._check()
        self._wake_at(window.step(self._now_ms).wake_at_ms if done else actions.wake_at_ms)

    def _wake_at(self, at_ms: float) -> None:
        if at_ms == NEVER:
            return
        at_us = max(int(at_ms * 1000) + 1, self._simulation.scheduler.now_us + 100)
        if self._wake_us < self._simulation.scheduler.now_us or at_us < self._wake_us:
            self._wake_us = at_us
            self._simulation.scheduler.after(at_us - self._simulation.scheduler.now_us, self._woken, at_us)

    def _woken(self, at_us: int) -> None:
        if at_us == self._wake_us:
            self._wake_us = -1
            self._drive()

    def _send(self, stream: Stream, batch: AppendBatch) -> None:
        request = Request(stream, batch)
        stream.pending.append(request)
        scheduler, chance = self._simulation.scheduler, self._random.random()
        on_its_way_us = self._random.random() * (4_000_000 if chance < self._dawdles else 2_000)
        stream.arrived_us = max(stream.arrived_us, scheduler.now_us + int(on_its_way_us))
        scheduler.after(stream.arrived_us - scheduler.now_us, request.arrive)
        if self._random.random() < self._breaks:
            self.later(self.end, stream)

    def _connect(self) -> None:
        nodes = self._simulation.nodes
        number = int(self._random.random() * len(nodes))
        if self._random.random() < 0.8:
            number = self._simulation.believed_leader(number)
        node = nodes[number]
        if node.core is None:
            self._window.not_connected(UnavailableError(f"{node.name} is down"), self._now_ms)
        else:
            self._stream = Stream(self, node)
            self._window.connected()
        self._drive()

    def _looked(self) -> None:
        leader = self._simulation.nodes[self._simulation.believed_leader(0)]
        is_led_by_another = self._stream is not None and leader is not self._stream.node
        self._window.looked(self._now_ms, is_led_by_another=is_led_by_another)
        self._drive()

    def hear(self, request: Request, result: AppendedBatch | DLedgerError) -> None:
        """An answer, if the stream on which it comes is still there."""
        stream = self._stream
        if stream is None or request not in stream.pending:
            return
        stream.pending.remove(request)
        if isinstance(result, DLedgerError):
            self._window.answered(request.batch, result, self._now_ms)
        else:
            stored = results_of(result) if result.duplicates else AppendedResults(result)
            self._window.answered(request.batch, AllStored(stored), self._now_ms)
        self._drive()

    def end(self, stream: Stream) -> None:
        """A stream is over, here; what is on its way arrives all the same."""
        if self._stream is not stream:
            return
        self._stream = None
        for request in stream.pending:
            self._window.answered(request.batch, RequestTimeoutError("the stream ended"), self._now_ms)
        self._window.broken(self._now_ms)
        self._drive()

    # --- what it says -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Hold what it says of entries against the log, in the order in which they were given."""
        checker = self._simulation.checker
        while self._told < len(self._given) and self._given[self._told][1].done:
            body, batch, place = self._given[self._told]
            self._told += 1
            outcome = batch.outcomes[place]
            require(outcome is not None, "an entry is done without an outcome", body)
            if isinstance(outcome, AppendResult):
                self.outcomes["sender acked"] += 1
                require(body in checker.bodies, "said to be stored, and is not committed", body)
                index = checker.bodies[body]
                require(outcome.index in (-1, index), "said to be stored elsewhere", body, outcome, index)
                checker.observe_stored(LogIndex(index), [body])
                require(index > self._last, "stored before what was given before it", body, index, self._last)
                self._last = index
            elif isinstance(outcome, DLedgerError):
                self.outcomes[f"sender {outcome.outcome}"] += 1
                if outcome.outcome == "not_applied":
                    self.refused.append(body)


class Senders:
    """The senders of a run."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self._random = random
        self.all = [Sender(simulation, random, f"s{number}") for number in range(simulation.options.senders)]

    def start(self) -> None:
        """Begin to send."""
        for sender in self.all:
            self._later(sender)

    def open_operations(self) -> int:
        """How many entries are not done."""
        return sum(sender.open_operations() for sender in self.all)

    def outcomes(self) -> Counter[str]:
        """How the entries ended."""
        return sum((sender.outcomes for sender in self.all), Counter())

    def refused(self) -> list[bytes]:
        """What must never be in the log."""
        return [body for sender in self.all for body in sender.refused]

    def _later(self, sender: Sender) -> None:
        delay_us = self._random.expovariate(1) * self._simulation.think_us
        self._simulation.scheduler.after(int(delay_us), self._think, sender)

    def _think(self, sender: Sender) -> None:
        if not self._simulation.clients.stopped:
            self._later(sender)
            sender.add()
