"""Rounds of checks: the producers of transactions that have been open for too long are asked what became of them.

RocketMQ stores a half message again for every check, with its count. Here the log holds only when the last rounds of
checks were, one small message for each round, and which producer groups were asked about all that was due. So the next
master counts on. A round in which nobody of a group could be asked does not count: its producers may be down. A
successor does not know which single transactions its predecessor asked about in a round that reached only some: it asks
more often.

A new master reads from the log which transactions are open, before it ends one (``recover``). A transaction has ended
if its op is in the log, or its commit: a master may have died after the commit and before the op. Ops are in a queue of
their own; commits are anywhere in the log, behind the half that they belong to. Memory: one bit for each half from the
oldest open one on, and the open ones.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, Protocol

from dledger.clock import Clock
from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from dledger.records import record
from dledger.records import record as data_record
from rocketstore.broker.transactions.halves import Half, OpenHalves, half_of, op_target
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.columns import RecordColumns, topics_of
from rocketstore.message.message import SYS_FLAG_COMMITTED, SYS_FLAG_TRANSACTION, Message
from rocketstore.message.properties import encode_properties
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import (
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    TRANSACTION_CHECKS_TOPIC,
    GetMessageStatus,
    PutResult,
    RecordHead,
)

VERSION: Final = 2
_FIRST_VERSION: Final = 1
"""Its rounds do not say who was asked, so they do not count."""
ROUNDS_MAX: Final = 1000
GROUPS_MAX: Final = 10_000
"""Those of a message; what it does not name is asked more often."""
GROUP_CHARS_MAX: Final = 255


class CheckRound(NamedTuple):
    """When it was (ms since 1970), and the groups that were asked about all that was due."""

    time_ms: int
    groups: frozenset[str]


@record(frozen=True, slots=True)
class Rounds:
    """The last rounds, and the position before which every commit has its op."""

    rounds: tuple[CheckRound, ...] = ()
    scanned: int = 0

    def encode(self) -> bytes:
        names = sorted(set(chain.from_iterable(one.groups for one in self.rounds)))[:GROUPS_MAX]
        numbers = {name: number for number, name in enumerate(names)}
        rounds = [
            [time_ms, sorted(numbers[one] for one in groups if one in numbers)] for time_ms, groups in self.rounds
        ]
        return json.dumps({"version": VERSION, "groups": names, "rounds": rounds, "scanned": self.scanned}).encode()

    def until(self, now_ms: int) -> Rounds:
        """Without those of a clock that was ahead of ours: in no time from now on was anybody asked."""
        return Rounds(tuple(one for one in self.rounds if one.time_ms <= now_ms), self.scanned)

    def then(self, now_ms: int, groups: Collection[str], scanned: int, most: int) -> Rounds:
        """With another round, if anybody was asked in it, and another position."""
        named = frozenset(one for one in groups if len(one) <= GROUP_CHARS_MAX)
        rounds = (*self.rounds, CheckRound(now_ms, named)) if named else self.rounds
        return Rounds(rounds[-most:], scanned)


def decode_rounds(body: bytes) -> Rounds:
    """The rounds that a broker has stored; none if this version cannot read them."""
    try:
        found = json.loads(body)
        version, scanned = found["version"], found["scanned"]
        if type(scanned) is not int or scanned < 0:
            return Rounds()
        if version == _FIRST_VERSION:
            return Rounds((), scanned)
        names, rounds = found["groups"], found["rounds"]
        if version != VERSION or len(rounds) > ROUNDS_MAX or not all(type(one) is str for one in names):
            return Rounds()
        numbers = [number for time_ms, groups in rounds for number in (time_ms, *groups)]
        if not all(type(one) is int and one >= 0 for one in numbers):
            return Rounds()
        made = tuple(CheckRound(time_ms, frozenset(names[one] for one in groups)) for time_ms, groups in rounds)
    except (ValueError, TypeError, LookupError):
        return Rounds()
    return Rounds(made, scanned)


def due_at(half: Half, time_out_ms: int) -> int:
    """From when on (ms since 1970) its producer is asked."""
    return half.stored_ms + (time_out_ms if half.immunity_ms is None else half.immunity_ms)


def times_checked(half: Half, before: Rounds, time_out_ms: int) -> int:
    """How often its producer was asked: by earlier masters, in the rounds ``before``, and by this one."""
    due_ms = due_at(half, time_out_ms)
    earlier = sum(one.time_ms >= due_ms and half.group in one.groups for one in before.rounds)
    return half.checked_before + earlier + half.asked


_CHECKS_AT_ONCE: Final = 256
_ASKED_MS_MAX: Final = 30_000
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
        for _ in range(min(len(current.left), _CHECKS_AT_ONCE)):
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
            self._asking, self._asked_until_ms = len(askers), now_ms + _ASKED_MS_MAX
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


READ_AT_ONCE: Final = 256
SCAN_BYTES: Final = 1024 * 1024
_SCAN_BYTES_MAX: Final = 64 * SCAN_BYTES


class StoppedError(Exception):
    """Raised when nobody wants the result any more."""


@data_record(frozen=True, slots=True)
class Begin:
    """From where to read: queue offsets of halves and ops before which everything has ended."""

    half: int
    op: int


def recover(store: MessageStore, begin: Begin, scanned: int, check: Callable[[], None]) -> tuple[OpenHalves, int]:
    """The open transactions, and the next queue offset of the ops. ``check`` raises ``StoppedError``.

    ``scanned`` is a position before which every commit has its op. Only once everything in the log is dispatched.
    Raises ``CorruptLogError``, ``ShutdownError``.
    """
    first = max(begin.half, store.min_offset(HALF_TOPIC, 0), 0)
    end = store.max_offset(HALF_TOPIC, 0)
    position = store.dispatch_position
    halves = OpenHalves()
    halves.next_offset = min(first, end)
    op_end = store.max_offset(OP_TOPIC, 0)
    if first >= end:
        return halves, op_end
    ended = bytearray((end - first + 7) // 8)
    for found in _messages(store, OP_TOPIC, max(begin.op, store.min_offset(OP_TOPIC, 0), 0), op_end, check):
        if found is None:  # its commit must be found instead
            scanned = 0
            continue
        target = op_target(found) - first
        if 0 <= target < end - first:
            ended[target >> 3] |= 1 << (target & 7)
    for message in _messages(store, HALF_TOPIC, first, end, check):
        if message is None:
            continue
        at = message.queue_offset - first
        if not ended[at >> 3] >> (at & 7) & 1:
            text = encode_properties(message.properties)
            halves.add(half_of(message.queue_offset, message.offset, message.store_timestamp, text))
    halves.next_offset = end
    if len(halves):
        oldest = next(iter(halves)).offset
        for heads in _scanned(store, max(oldest, scanned), position, check):
            for head in commits_in(heads):
                halves.committed(head.prepared_offset, head.offset)
    return halves, op_end


def holds_end(store: MessageStore, half: Half, begin: int, end: int, check: Callable[[], None]) -> bool:
    """Whether the log has a commit of this half, or an op, between these positions, which must be readable."""
    for heads in _scanned(store, begin, end, check):
        if any(one.prepared_offset == half.offset for one in commits_in(heads)):
            return True
        for head in heads if OP_TOPIC in topics_of(heads) else ():
            record = store.read_record(head.offset) if head.topic == OP_TOPIC else None
            message = None if record is None else _decoded(record)
            if message is not None and op_target(message) == half.queue_offset:
                return True
    return False


def read_rounds(store: MessageStore) -> Rounds:
    """The rounds of checks that the last master has stored."""
    end = store.max_offset(TRANSACTION_CHECKS_TOPIC, 0)
    if end:
        for message in _messages(store, TRANSACTION_CHECKS_TOPIC, end - 1, end, lambda: None):
            if message is not None:
                return decode_rounds(message.body)
    return Rounds()


def commits_in(heads: Sequence[RecordHead]) -> list[RecordHead]:
    """The committed transactional messages among these records."""
    if isinstance(heads, RecordColumns):  # ordinary records only
        return []
    return [one for one in heads if one.sys_flag & SYS_FLAG_TRANSACTION == SYS_FLAG_COMMITTED]


def _messages(
    store: MessageStore, topic: str, first: int, end: int, check: Callable[[], None]
) -> Iterator[Message | None]:
    """The messages of a queue; None in the place of those that are damaged for good."""
    while first < end:
        check()
        try:
            found = store.get(topic, 0, first, max_count=min(READ_AT_ONCE, end - first))
        except CorruptLogError as damage:
            if damage.index is not None and store.log.is_repaired:  # it will be repaired
                raise
            _log.error("transactions: %s message %d is passed over: %s", topic, first, damage)
            yield None
            first += 1
            continue
        if found.status is GetMessageStatus.FOUND:
            yield from map(_decoded, found.records)
        elif found.next_offset <= first:
            raise ShutdownError(f"{topic} cannot be read from {first}: {found.status}")
        first = max(found.next_offset, first)


def _decoded(record: bytes) -> Message | None:
    try:
        return decode_record(record)
    except InvalidRequestError as damage:
        _log.error("transactions: a record is passed over: %s", damage)
        return None


def _scanned(store: MessageStore, at: int, end: int, check: Callable[[], None]) -> Iterator[Sequence[RecordHead]]:
    """Read the log between these positions."""
    at = max(at, store.log.min_offset)
    began, told = at, at
    while at < end:
        check()
        scanned = store.log.scan(at, SCAN_BYTES)
        if scanned.next_offset <= at:
            scanned = store.log.scan(at, _SCAN_BYTES_MAX)
        if scanned.next_offset <= at:
            raise ShutdownError(f"the log cannot be read from {at}")
        yield scanned.heads
        at = scanned.next_offset
        if at - told > 1 << 30:
            told = at
            _log.info("transactions: looking for commits: %d of %d MiB", (at - began) >> 20, (end - began) >> 20)
