"""Rounds of checks: the producers of transactions that have been open for too long are asked what became of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from dledger.clock import Clock
from dledger.errors import CorruptLogError
from rocketstore.broker.transactions.halves import Half
from rocketstore.broker.transactions.rounds import Rounds, due_at, times_checked
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import Message
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, TRANSACTION_CHECKS_TOPIC, PutResult

CHECKS_AT_ONCE: Final = 256
ASKED_MS_MAX: Final = 30_000
"""For how long to wait for those who ask, before asking on without them."""
_HOUR_MS: Final = 3_600_000
_READ_WRITE: Final = 6

_log = logging.getLogger("rocketstore")


class Check(NamedTuple):
    """A check of a half message: its places, its producer group, and how often that was asked, with this."""

    queue_offset: int
    offset: int
    group: str
    times: int


AskedDone = Callable[[Collection[int]], None]
"""Gets the queue offsets of the half messages about which a producer was asked."""
Asker = Callable[[Sequence[Check], AskedDone], None]
"""Asks producers, as far as there are any, in its own time, and then calls the function once, from any thread."""


class Askers:
    """One for each protocol."""

    def __init__(self) -> None:
        self.all: tuple[Asker, ...] = ()

    def add(self, asker: Asker) -> None:
        """Another one."""
        self.all = (*self.all, asker)


class OpenTransactions(Protocol):
    def open_before(self, is_due: Callable[[Half], bool]) -> list[Half]:
        """Those that are due."""

    def is_open(self, queue_offset: int) -> bool:
        """Whether one still is."""

    def give_up(self, half: Half, times: int) -> None:
        """End one about which no producer says anything."""

    def excess(self) -> int:
        """How many must end for half of the places to be free again, if all are taken; else 0."""

    def wake(self) -> None:
        """Step soon."""


class _Round:
    """One that is under way."""

    def __init__(self, time_ms: int, scanned: int, due: Sequence[tuple[Half, int]], excess: int) -> None:
        self.time_ms = time_ms
        self.scanned = scanned
        self.left = deque(due)
        """Those still to be asked about, with how often that was done before."""
        self.excess = excess
        """How many more may be given up to make room."""
        self.unasked = {one.queue_offset: one for one, _ in due}
        self.asked: set[str] = set()
        """The groups of which anybody was asked."""

    def take(self, queue_offset: int) -> None:
        """Somebody was asked about this half message."""
        half = self.unasked.pop(queue_offset, None)
        if half is not None:
            half.asked += 1
            self.asked.add(half.group)


class Checks:
    """Owned by the thread of transactions."""

    def __init__(
        self,
        opened: OpenTransactions,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock,
        askers: Askers,
    ) -> None:
        self._opened = opened
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock
        self._askers = askers
        self._inherited = Rounds()
        self._rounds = Rounds()
        self._round: _Round | None = None
        self._answers: deque[Collection[int]] = deque()
        self._due_ms = 0
        self._asking = 0
        self._asked_until_ms = 0
        self._making_topic = False

    def begin(self, rounds: Rounds) -> None:
        """Go on from what the last master has stored; the first round is in an interval, as in RocketMQ."""
        self._inherited = self._rounds = rounds
        self._due_ms = self._clock.monotonic_ms() + self._config.transaction_check_interval

    def step(self, now_ms: int, scanned: int) -> int:
        """Ask on; returns when (monotonic ms) to do so again. ``scanned``: see ``Rounds``."""
        self._take_answers()
        if self._asking and now_ms < self._asked_until_ms:
            return self._asked_until_ms
        self._asking = 0
        if self._round is not None and not self._round.left:
            self._end_round(self._round)
        if self._round is None and now_ms >= self._due_ms:
            self._due_ms = now_ms + self._config.transaction_check_interval
            self._begin_round(scanned)
        if self._round is not None and self._round.left:
            self._ask(self._round, now_ms)
            return now_ms if not self._asking else self._asked_until_ms
        return self._due_ms if self._round is None else now_ms

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_round(self, scanned: int) -> None:
        config, wall_ms = self._config, self._clock.wall_ms()
        before, time_out_ms = self._inherited.until(wall_ms), config.transaction_time_out

        def is_due(half: Half) -> bool:
            half.stored_ms = min(half.stored_ms, wall_ms)  # it may be from a master whose clock is ahead of ours
            return due_at(half, time_out_ms) <= wall_ms

        due = self._opened.open_before(is_due)
        if not due:
            return
        for one in due:
            one.rounds += 1
        counted = [(one, times_checked(one, before, time_out_ms)) for one in due]
        self._round = _Round(wall_ms, scanned, counted, self._opened.excess())

    def _take_answers(self) -> None:
        while self._answers:
            asked = self._answers.popleft()
            if self._round is not None:
                for queue_offset in asked:
                    self._round.take(queue_offset)

    def _end_round(self, ended: _Round) -> None:
        self._round = None
        incomplete = {half.group for half in ended.unasked.values() if self._opened.is_open(half.queue_offset)}
        before = self._rounds.until(self._clock.wall_ms())
        most = self._config.transaction_check_max
        self._rounds = before.then(ended.time_ms, ended.asked - incomplete, ended.scanned, most)
        if self._rounds != before:
            message = Message(TRANSACTION_CHECKS_TOPIC, self._rounds.encode(), born_timestamp=ended.time_ms)
            self._store.submit([message], lambda _results: None)  # else one more check is made

    def _ask(self, current: _Round, now_ms: int) -> None:
        checks: list[Check] = []
        oldest_ms = self._clock.wall_ms() - max(self._config.store.file_reserved_time, 1) * _HOUR_MS
        for _ in range(min(len(current.left), CHECKS_AT_ONCE)):
            half, times = current.left.popleft()
            if not self._opened.is_open(half.queue_offset):
                continue
            most = self._config.transaction_check_max
            if times >= most or half.stored_ms < oldest_ms:
                self._give_up(half, times)
            elif current.excess > 0 and half.rounds > most:  # nobody is there for it, and others find no place
                current.excess -= 1
                self._give_up(half, times)
            else:
                checks.append(Check(half.queue_offset, half.offset, half.group, times + 1))
        askers = self._askers.all
        if checks and askers:
            self._asking, self._asked_until_ms = len(askers), now_ms + ASKED_MS_MAX
            asked: deque[None] = deque()
            for asker in askers:
                asker(checks, partial(self._asked, asked, len(askers)))

    def _asked(self, asked: deque[None], wanted: int, about: Collection[int]) -> None:
        """On any thread."""
        self._answers.append(about)
        asked.append(None)
        if len(asked) == wanted:
            self._asked_until_ms = 0
            self._opened.wake()

    def _topic_put(self, _result: PutResult) -> None:
        """On any thread. If it failed, the next message that is given up tries again."""
        self._making_topic = False

    def _give_up(self, half: Half, times: int) -> None:
        if not self._making_topic and self._state.topic(CHECKED_TOO_OFTEN_TOPIC) is None:
            self._making_topic = True
            topic = TopicConfig(CHECKED_TOO_OFTEN_TOPIC, 1, 1, _READ_WRITE)
            self._state.put_topic(topic, self._topic_put)
        try:
            self._opened.give_up(half, times)
        except CorruptLogError as error:
            _log.error("transactions: half message %d cannot be read: %s", half.queue_offset, error)
