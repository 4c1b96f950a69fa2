"""Servers, streams and time for a window, without any of them: what a bad day looks like, replayed by its seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PendingFullError,
    RequestTimeoutError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.sending.batch import AllStored, Answer, OutgoingBatch, ProducerNumbering, WindowRules
from dledger.sending.window import Window, WindowOptions

RULES: WindowRules[None, int] = WindowRules(
    is_retried=lambda error: (
        isinstance(error, NotLeaderError | PendingFullError | UnavailableError) and error.outcome == "not_applied"
    ),
    bad_answer=InvalidRequestError,
)
REFUSED = b"!"
"""What no server takes begins so."""


@dataclass
class Log:
    """What the servers have stored between them, and what they know of producers."""

    entries: list[bytes] = field(default_factory=list)
    next_of: dict[str, int] = field(default_factory=dict)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    producers_max: int = 1000

    def append(self, payloads: list[bytes], producer: str, sequence: int) -> Answer[int]:
        """All or nothing; numbered entries once."""
        if any(one.startswith(REFUSED) for one in payloads):
            return InvalidRequestError("an entry is not allowed")
        if not producer:
            first = len(self.entries)
            self.entries += payloads
            return AllStored(range(first, first + len(payloads)))
        known = self.next_of.get(producer)
        if known is None and sequence:
            return UnknownProducerError(f"{producer} is not known")
        if known is None and len(self.next_of) >= self.producers_max:
            return TooManyProducersError("no room for one more")
        known = known or 0
        if sequence > known:
            return OutOfOrderSequenceError(f"{sequence} does not follow {known}")
        for number, payload in enumerate(payloads, sequence):
            if number >= known:
                self.places[producer, number] = len(self.entries)
                self.entries.append(payload)
        self.next_of[producer] = max(known, sequence + len(payloads))
        return AllStored([self.places[producer, number] for number in range(sequence, sequence + len(payloads))])


class World:
    """A window, its driver and the servers behind it, under a clock of its own.

    ``faults``: how often something goes wrong, from 0 to 1. A stream to the leader fails in the ways in which real
    ones do: before or after the leader has stored what came, with a refusal, or by silence.
    """

    def __init__(
        self, options: WindowOptions, *, numbering: ProducerNumbering | None, seed: int = 0, faults: float = 0.0
    ) -> None:
        self.now_ms = 0.0
        self.log = Log()
        self.window: Window[None, int] = Window(options, RULES, numbering)
        self.dice = random.Random(seed)
        self.faults = faults
        self.requests: list[tuple[str, int, list[bytes]]] = []
        """All that were sent: the producer, the first number and the payloads."""
        self.refusals: list[DLedgerError] = []
        """What the leader answers next, instead of storing."""
        self.is_frozen = False
        self.is_led_by_another = False
        self.connects = 0
        self.most_under_way = 0
        self._stream = 0  # the number of the open one; 0: none
        self._under_way: dict[int, OutgoingBatch[None, int]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake_at_ms = float("inf")

    def later(self, delay_ms: float, what: Callable[[], None]) -> None:
        """Let something happen after a while."""
        heapq.heappush(self._events, (self.now_ms + delay_ms, next(self._order), what))

    def run(self, until_ms: float | None = None) -> None:
        """Go on until nothing is left to happen, or until that time."""
        self.drive()
        while True:
            at = min(self._wake_at_ms, self._events[0][0] if self._events else float("inf"))
            if at == float("inf") or (until_ms is not None and at > until_ms):
                break
            self.now_ms = max(self.now_ms, at)
            while self._events and self._events[0][0] <= self.now_ms:
                heapq.heappop(self._events)[2]()
            self.drive()
        if until_ms is not None:
            self.now_ms = max(self.now_ms, until_ms)
            self.drive()

    def drive(self) -> None:
        """What a driver does whenever something has happened."""
        wish = self.window.step(self.now_ms)
        while (batch := self.window.next_to_send(self.now_ms)) is not None:
            self._send(batch)
        if wish.leave:
            self._end()
        if wish.look:
            self.later(5, lambda: self.window.looked(self.now_ms, is_led_by_another=self.is_led_by_another))
        if wish.connect_until_ms is not None:
            self.connects += 1
            self.later(2, self._connect)
        for done in self._take_done():
            done.announce()
        self._wake_at_ms = self.window.step(self.now_ms).wake_at_ms if wish.leave else wish.wake_at_ms

    def _take_done(self) -> list[OutgoingBatch[None, int]]:
        done = self.window.done[:]
        self.window.done.clear()
        return done

    def _connect(self) -> None:
        if self.dice.random() < self.faults:
            self.window.not_connected(UnavailableError("no leader"), self.now_ms)
        else:
            self._stream = next(self._order) + 1
            self.window.connected()

    def _end(self) -> None:
        """The stream is over: nobody knows of what is under way."""
        self._stream = 0
        under_way, self._under_way = self._under_way, {}
        for batch in under_way.values():
            self.window.answered(batch, RequestTimeoutError("the stream ended"), self.now_ms)
        self.window.broken(self.now_ms)

    def _send(self, batch: OutgoingBatch[None, int]) -> None:
        payloads = [batch.payloads[place] for place in batch.sent]
        producer, sequence, stream = batch.producer, batch.sequence, self._stream
        self.requests.append((producer, sequence, payloads))
        number = next(self._order)
        self._under_way[number] = batch
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        arrives_ms = 1.0
        chance = self.dice.random()
        if chance < self.faults / 4:
            self.later(self.dice.uniform(0, 3), self._end)  # perhaps before it arrives, perhaps after
        elif chance < self.faults / 3:
            arrives_ms = self.dice.uniform(1, 3000)  # somewhere on its way for long
        elif chance < self.faults:
            refusals = [NotLeaderError("not here"), PendingFullError("full"), RequestTimeoutError("no quorum in time")]
            self.refusals.append(self.dice.choice(refusals))
        self.later(arrives_ms, lambda: self._arrive(number, stream, payloads, producer, sequence))

    def _arrive(self, number: int, stream: int, payloads: list[bytes], producer: str, sequence: int) -> None:
        if self.is_frozen:
            self.later(100, lambda: self._arrive(number, stream, payloads, producer, sequence))
            return
        if self.refusals:
            answer: Answer[int] = self.refusals.pop()
            if isinstance(answer, RequestTimeoutError) and self.dice.random() < 0.5:
                self.log.append(payloads, producer, sequence)
        else:
            answer = self.log.append(payloads, producer, sequence)
        if stream == self._stream:
            self.later(1, lambda: self._answer(number, stream, answer))

    def _answer(self, number: int, stream: int, answer: Answer[int]) -> None:
        batch = self._under_way.pop(number, None) if stream == self._stream else None
        if batch is not None:
            self.window.answered(batch, answer, self.now_ms)
