"""From one start of delivery to its stop: a thread that loads hours, delivers what is due, and notes how far it is.

``Rolling`` stores timed messages again that would expire before they are due, so that they may wait longer than the
log's retention.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dledger.clock import Backoff, Clock
from dledger.errors import CorruptLogError, DiskFullError, InvalidRequestError, ShutdownError
from dledger.monitoring import ConditionKind, Conditions
from dledger.runtime.threads import Supervisor, Worker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed.listing import AskedRecall, RecallLookup, handle_for, no_message
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import LOOPBACK, PROPERTY_REAL_TOPIC, HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.message.timed import real_message, recall_message, rolled_message
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.due import DueRound, DueTable
from rocketstore.timer.hours import HOUR_MS, EntryKind, TimedEntry, TimedProgress, decode_entries, open_entries
from rocketstore.types import TIMED_TOPIC, BrokerRole, PutMessageStatus, PutResult

LOOK_MS: Final = 60_000
"""How often to look for messages that are old enough."""
ROLLED_AT_ONCE: Final = 64
_ROLL_RETRY_MS: Final = 1000
_SPACE_PERCENT_MAX: Final = 20
"""Timed messages that take up more of the log than this are reported."""


class Rolling:
    """Of one run, on its thread. One put at a time."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock,
        conditions: Conditions,
        store_host: HostAddress | None,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock
        self._conditions = conditions
        self._store_host = store_host
        self._wake = wake
        self._look_at_ms = 0
        self._retry_at_ms = 0
        self._hours: deque[int] = deque()
        self._todo: deque[TimedEntry] = deque()
        self._under_way: list[TimedEntry] = []
        self._results: Sequence[PutResult] | None = None
        self.rolled = 0

    def step(self, now_ms: int, wall_ms: int, after_ms: int) -> int:
        """Store some again of those that are due at ``after_ms`` or later; returns when to go on."""
        if self._under_way:
            if self._results is None:
                return now_ms + LOOK_MS  # the answer wakes us
            failed = [one for one, result in zip(self._under_way, self._results, strict=True) if not result.ok]
            self.rolled += len(self._under_way) - len(failed)
            self._under_way, self._results = [], None
            self._todo.extendleft(reversed(failed))
            self._retry_at_ms = now_ms + _ROLL_RETRY_MS if failed else 0
        if now_ms < self._look_at_ms and not (self._todo or self._hours):
            return self._look_at_ms
        if now_ms < self._retry_at_ms:
            return self._retry_at_ms
        timers, old_ms = self._store.timers, wall_ms - self._config.store.file_reserved_time * HOUR_MS // 2
        if not self._todo and self._hours:
            hour = self._hours.popleft()
            try:
                entries = open_entries(timers.entries(hour))
            except CorruptLogError as error:  # it is built again, and looked at the next time
                _log.warning("%s", error)
                return now_ms + 1
            old = entries[entries["store_timestamp"] < old_ms]
            self._todo.extend(TimedEntry(*map(int, row)) for row in old)
        elif not self._todo:
            self._look_at_ms = now_ms + LOOK_MS
            self._hours.extend(timers.old_hours(old_ms, after_ms))
            self._report(wall_ms)
        self._submit(after_ms)
        busy = bool(self._under_way)  # then the answer wakes us
        return now_ms if (self._todo or self._hours) and not busy else max(self._look_at_ms, now_ms + 1)

    def _report(self, wall_ms: int) -> None:
        log = self._store.log
        held, size = self._store.timers.open_count(wall_ms)
        whole = max(log.max_offset - log.min_offset, self._config.store.mapped_file_size_commit_log)
        if size * 100 > whole * _SPACE_PERCENT_MAX:
            self._conditions.set(
                ConditionKind.TIMED_MESSAGES,
                f"{held} timed messages take up {size} bytes of a log of {whole}, more than {_SPACE_PERCENT_MAX}%: "
                "each is stored again before it expires (fileReservedTime), so look who delays so many",
            )
        else:
            self._conditions.clear(ConditionKind.TIMED_MESSAGES)

    def _submit(self, after_ms: int) -> None:
        """Those that are due before ``after_ms`` by now are on their way: a copy would be delivered, too."""
        messages: list[Message] = []
        while self._todo and len(messages) < ROLLED_AT_ONCE:
            entry = self._todo.popleft()
            message = self._copy_of(entry) if entry.due_ms >= after_ms else None
            if message is not None:
                messages.append(message)
                self._under_way.append(entry)
        if not messages:
            return

        def done(results: Sequence[PutResult]) -> None:
            self._results = results
            self._wake()

        self._store.submit(messages, done)

    def _copy_of(self, entry: TimedEntry) -> Message | None:
        """None: there is nothing to keep."""
        try:
            record = self._store.read_record(entry.position)
            waiting = None if record is None else decode_record(record)
        except (CorruptLogError, InvalidRequestError) as error:
            _log.warning("the timed message at %d of the log cannot be stored again: %s", entry.position, error)
            return None
        if waiting is None or waiting.topic != TIMED_TOPIC:
            return None
        topic = waiting.properties.get(PROPERTY_REAL_TOPIC, "")
        if self._state.place_for(topic, 0, QueueOffset(TIMED_TOPIC, 0, entry.queue_offset)) is None:
            return None  # deleted since
        return rolled_message(waiting, entry.origin, self._store_host)


BATCH: Final = 128
"""Messages put at once,"""
BATCH_BYTES: Final = 256 * 1024
"""and their bytes."""
FLIGHTS_MAX: Final = 4
"""Puts under way."""
_LOAD_AHEAD_MS: Final = 300_000
"""How long before it begins an hour is loaded."""
LOAD_RETRY_MS: Final = 500
"""How often to look whether a damaged hour is built again."""
PROGRESS_INTERVAL_MS: Final = 1000
RETRY_MS: Final = 100
RETRY_MS_MAX: Final = 5000
SLEEP_MS_MAX: Final = 10_000
"""Due times are wall-clock times, which may jump: check at least this often."""
_PACE_MS: Final = 200
"""How far puts may be ahead of ``timed_bytes_per_s_max``."""
_LATE_MS: Final = 1000
DISPATCH_WAIT_S: Final = 2.0
STOP_TIMEOUT_S: Final = 10.0
FLUSH_TIMEOUT_S: Final = 2.0

_ILLEGAL: Final = frozenset({PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED})
_log = logging.getLogger("rocketstore")

RecallDone = Callable[[PutResult], None]


@dataclass(slots=True)
class _Flight:
    """Entries of the round that are being put, by place; the log's thread sets ``results``, then ``answered``."""

    places: list[int]
    results: Sequence[PutResult] | None = None
    answered: threading.Event = field(default_factory=threading.Event)


class _Delivery:
    """A round under way: which of its entries are done."""

    def __init__(self, round_: DueRound) -> None:
        self.round = round_
        self.todo = deque(range(len(round_)))
        self.done = np.zeros(len(round_), bool)
        self.first = 0
        """All before this place are done."""
        self.doubtful: set[int] = set()
        """Places whose put has an unknown outcome: these messages are put again, and may be delivered already."""

    def finish(self, place: int) -> None:
        """One is delivered, or never will be."""
        self.done[place] = True
        while self.first < len(self.done) and self.done[self.first]:
            self.first += 1

    def entry(self, place: int) -> TimedEntry:
        """The one at a place."""
        return TimedEntry(*map(int, self.round.entries[place]))

    def waiting(self, origin: int) -> TimedEntry | None:
        """The entry of a message that is not on its way, and certainly was not."""
        found = np.flatnonzero(self.round.entries["origin"] == origin).tolist()
        rest = set(self.todo) - self.doubtful if found else set()
        return next((self.entry(place) for place in reversed(found) if place in rest), None)


class TimedRun:
    """A stopped run puts nothing more, wherever its thread is."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock,
        conditions: Conditions,
        store_host: HostAddress | None,
        tally: Counter[str],
    ) -> None:
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock
        self._store_host = store_host
        self._tally = tally
        self._stopped = False
        self._stepping = threading.Lock()  # held while stepping and while a recall is looked at
        self._worker: Worker | None = None
        self._table = DueTable(state.timed_progress)
        self._inbox: deque[Sequence[TimedEntry]] = deque()
        self._delivery: _Delivery | None = None
        self._flights: deque[_Flight] = deque()
        self._recalling: set[int] = set()
        self._recalled: deque[tuple[TimedEntry, PutResult]] = deque()
        self._backoff = Backoff(RETRY_MS, RETRY_MS_MAX)
        self._retry_at_ms = 0
        self._batch = BATCH
        self._paced_to_ms = 0.0
        self._noted = self._table.progress
        self._note_due_ms = 0
        self._noting = False
        self._lookup = RecallLookup(store)
        self._load_at_ms = 0
        self._rolling = Rolling(config, store, state, clock, conditions, store_host, self._wake)

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, supervisor: Supervisor) -> None:
        self._worker = Worker("rocketstore-timed", self.step, self._clock, supervisor)
        self._worker.start()

    def stop(self) -> None:
        """Stop putting; if still master, wait for the puts in progress and write progress; end the thread."""
        with self._stepping:
            self._stopped = True  # from here on, this thread owns everything
        self._store.timers.unfollow()
        if self._store.role is not BrokerRole.SLAVE:
            deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
            for flight in self._flights:
                flight.answered.wait(max(0.0, deadline_s - time.monotonic()))
            self._land()
            if self._flights:
                _log.warning("a put timed out: some timed messages may be delivered twice")
            self._flush_progress()
        if self._worker is not None:
            self._worker.stop(STOP_TIMEOUT_S)

    def step(self) -> int:
        """Deliver what is due; returns when (monotonic ms) the next step is."""
        with self._stepping:
            now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
            if self._stopped:
                return now_ms + SLEEP_MS_MAX
            try:
                self._land()
                self._load(now_ms, wall_ms)
                dues = self._deliver(now_ms, wall_ms)
                dues.append(self._rolling.step(now_ms, wall_ms, self._table.loaded_ms))
            except ShutdownError:
                return now_ms + SLEEP_MS_MAX  # the store stopped before this service
            except DiskFullError as error:
                self._put_off(str(error))
                return self._retry_at_ms
            dues += [self._load_at_ms] if self._load_at_ms > now_ms else []
            dues += self._note_progress(now_ms)
            return min([now_ms + SLEEP_MS_MAX, *dues])

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load(self, now_ms: int, wall_ms: int) -> None:
        """Take in the hours that come next, and at first those before."""
        needed_ms = max(wall_ms + _LOAD_AHEAD_MS, self._table.progress.due_ms + 1)  # the clock may have been set back
        if self._delivery is not None or needed_ms < self._table.loaded_ms:
            return
        if now_ms < self._load_at_ms:
            return
        end_ms = (needed_ms // HOUR_MS + 1) * HOUR_MS
        found, reached_ms = self._store.timers.follow(self._table.loaded_ms, end_ms, self._on_arrival)
        if reached_ms < end_ms:  # the file of an hour is built again: the others do not wait
            self._load_at_ms, end_ms = now_ms + LOAD_RETRY_MS, reached_ms
            if end_ms <= self._table.loaded_ms:
                return
        self._take_in()
        began = time.monotonic()
        self._table.load(np.concatenate([decode_entries(b""), *found]), end_ms)
        _log.info("timed messages due before %d ms: %d are waiting, loaded within %.0f ms",
                  end_ms, len(self._table), (time.monotonic() - began) * 1000)  # fmt: skip

    def _on_arrival(self, entries: Sequence[TimedEntry]) -> None:
        """On the dispatch thread, under the files' lock."""
        self._inbox.append(entries)
        self._wake()

    def _take_in(self) -> int:
        """Add what has arrived; returns the queue offset before which everything is known."""
        arrived: list[Sequence[TimedEntry]] = []

        def take() -> None:
            arrived.extend(self._inbox)
            self._inbox.clear()

        seen = self._store.timers.seen_with(take)
        for entries in arrived:
            self._table.add(entries)
        while self._recalled:
            entry, result = self._recalled.popleft()
            if result.ok:
                self._table.add([entry._replace(kind=EntryKind.RECALL)])
            self._recalling.discard(entry.origin)
        return seen

    # -- delivering ----------------------------------------------------------------------------------------------------

    def _deliver(self, now_ms: int, wall_ms: int) -> list[int]:
        """Put what is due; returns when to go on."""
        seen = self._take_in()
        delivery = self._delivery
        if delivery is not None and delivery.first == len(delivery.round):
            self._table.end_round(delivery.round)
            delivery = self._delivery = None
        if delivery is None and self._table.loaded_ms <= self._table.progress.due_ms:
            return []  # an hour that was begun is damaged
        if delivery is None:
            round_ = self._table.begin_round(min(wall_ms, self._table.loaded_ms - 1), seen)
            if round_ is None:
                due_ms = self._table.next_due_ms()
                return [] if due_ms is None else [now_ms + max(due_ms - wall_ms, 1)]
            delivery = self._delivery = _Delivery(round_)
        if self._retry_at_ms > now_ms:
            return [self._retry_at_ms]
        while delivery.todo and len(self._flights) < FLIGHTS_MAX:
            if self._paced_to_ms > now_ms + _PACE_MS:
                return [now_ms + _PACE_MS // 2]
            if not self._submit(delivery, now_ms):
                break
        if delivery.first == len(delivery.round):
            return [now_ms]
        return [self._retry_at_ms] if self._retry_at_ms > now_ms else []

    def _submit(self, delivery: _Delivery, now_ms: int) -> bool:
        """Put the next batch; False if there is nothing to put now."""
        messages: list[Message] = []
        places: list[int] = []
        size = 0
        while delivery.todo and len(messages) < self._batch and size < BATCH_BYTES:
            place = delivery.todo[0]
            entry = delivery.entry(place)
            if entry.origin in self._recalling:
                break
            try:
                message = self._message(entry)
            except CorruptLogError as error:
                if error.index is not None and self._store.log.is_repaired:  # only entries are repaired
                    self._put_off(f"the message due at {entry.due_ms} cannot be read yet: {error}")
                    break
                self._skip(entry, str(error))
                message = None
            delivery.todo.popleft()
            if message is None:
                delivery.finish(place)
                continue
            messages.append(message)
            places.append(place)
            size += entry.size
        if not messages:
            return False
        flight = _Flight(places)
        self._flights.append(flight)
        self._paced_to_ms = max(self._paced_to_ms, now_ms) + size * 1000 / self._config.timed_bytes_per_s_max

        def done(results: Sequence[PutResult]) -> None:
            flight.results = results
            flight.answered.set()
            self._wake()

        self._store.submit(messages, done)
        return True

    def _message(self, entry: TimedEntry) -> Message | None:
        """The message to be delivered; None if there is none any more, which is counted."""
        if not self._table.is_current(entry.origin, entry.queue_offset):
            return None
        record = self._store.read_record(entry.position)
        if record is None:
            self._skip(entry, "its record has expired")
            return None
        try:
            waiting = decode_record(record)
        except InvalidRequestError as error:
            self._skip(entry, str(error))
            return None
        real = real_message(waiting, self._store_host) if waiting.topic == TIMED_TOPIC else None
        if real is None or waiting.queue_offset != entry.queue_offset:
            self._skip(entry, "its record names no topic and queue")
            return None
        queue_id = self._state.place_for(real.topic, real.queue_id, QueueOffset(TIMED_TOPIC, 0, entry.queue_offset))
        if queue_id is None:
            self._count("dropped", f"topic {real.topic} was deleted: timed messages for it are dropped")
            return None
        real.queue_id = queue_id
        return real

    def _land(self) -> None:
        """Take the answers to puts, in their order."""
        delivery = self._delivery
        while delivery is not None and self._flights and self._flights[0].results is not None:
            flight = self._flights.popleft()
            again: list[int] = []
            for place, result in zip(flight.places, flight.results or (), strict=True):
                if result.ok:
                    self._tally["delivered"] += 1
                    delivery.finish(place)
                elif result.status in _ILLEGAL and len(flight.places) == 1:
                    self._skip(delivery.entry(place), result.reason or result.status)
                    delivery.finish(place)
                else:
                    again.append(place)
                    refused = result
                    if result.outcome != "not_applied":
                        delivery.doubtful.add(place)
            if not again:
                self._backoff.succeeded()
                self._batch = BATCH
                continue
            delivery.todo.extendleft(reversed(again))
            if refused.status in _ILLEGAL:
                self._batch = 1  # to find the one to blame
            else:
                self._put_off(f"timed messages were refused: {refused.status} {refused.reason}")

    def _put_off(self, why: str) -> None:
        if not self._backoff.has_paused():
            _log.warning("%s", why)
        self._retry_at_ms = self._clock.monotonic_ms() + round(self._backoff.pause())

    def _skip(self, entry: TimedEntry, why: str) -> None:
        self._count("skipped", f"the timed message at {entry.position} of the log cannot be delivered: {why}")

    def _count(self, what: str, told: str) -> None:
        self._tally[what] += 1
        count = self._tally[what]
        if not count & (count - 1):  # there may be a million of them
            _log.warning("%s (%d so far)", told, count)

    # -- progress ------------------------------------------------------------------------------------------------------

    @property
    def _progress(self) -> TimedProgress:
        delivery = self._delivery
        return self._table.progress if delivery is None else delivery.round.progress(delivery.first)

    def _note_progress(self, now_ms: int) -> list[int]:
        """Pass progress to the broker state if it is time; returns when the next time is."""
        progress = self._progress
        if progress == self._noted or self._noting:
            return []
        if now_ms < self._note_due_ms:
            return [self._note_due_ms]
        self._note_due_ms = now_ms + PROGRESS_INTERVAL_MS
        self._noting = True

        def done(result: PutResult) -> None:
            if result.outcome == "stored":
                self._noted = progress
            self._noting = False
            self._wake()

        self._state.note_timed_progress(progress, done)
        return [self._note_due_ms]

    def _flush_progress(self) -> None:
        progress = self._progress
        if progress == self._noted:
            return
        answered = threading.Event()
        outcomes: list[str] = []

        def done(result: PutResult) -> None:
            outcomes.append(result.outcome)
            answered.set()

        self._state.note_timed_progress(progress, done)
        if not answered.wait(FLUSH_TIMEOUT_S) or outcomes != ["stored"]:
            _log.warning("timed messages: progress was not saved in time, so some may be delivered twice")

    def late(self, wall_ms: int) -> tuple[int, int]:
        """How many messages are due for more than a second, and for how long the first of them is (ms)."""
        with self._stepping:
            count, due_ms = self._table.count_due(wall_ms - _LATE_MS), self._table.next_due_ms()
            if self._delivery is not None:
                rest = self._delivery.round.entries["due_ms"][~self._delivery.done]
                count += int((rest <= wall_ms - _LATE_MS).sum())
                due_ms = int(rest.min()) if len(rest) else due_ms
        lag_ms = 0 if due_ms is None else wall_ms - due_ms
        return count, lag_ms if lag_ms > _LATE_MS else 0

    # -- recalling -----------------------------------------------------------------------------------------------------

    def recall(self, topic: str, text: str, done: RecallDone) -> str:
        """See ``TimedService.recall``."""
        handle = handle_for(topic, text, self._config.name)
        if not self._store.wait_dispatched(DISPATCH_WAIT_S):  # it may have been sent a moment ago
            raise Refusal(RefusalKind.BUSY, "queues and index are behind the log: try again")
        asked = self._lookup.ask(handle)
        found = None
        while not self._begin_recall(asked, found, done):
            found = self._lookup.find(asked)  # may read hundreds of thousands of entries: delivery does not wait
        return handle.message_id

    def _begin_recall(self, asked: AskedRecall, found: TimedEntry | None, done: RecallDone) -> bool:
        """Put the recall of a message, which is not delivered from now on; False if it must be looked for.

        ``found``: what was found, if it was looked for. Raises ``Refusal``.
        """
        origin, due_ms = asked.handle.origin, asked.due_ms if found is None else found.due_ms
        with self._stepping:
            if self._stopped:
                raise Refusal(RefusalKind.UNAVAILABLE, "this broker is not the master any more")
            self._take_in()
            if origin in self._recalling:
                raise Refusal(RefusalKind.NO_MESSAGE, "the message is being recalled already")
            if self._table.is_recalled(origin):
                raise no_message()
            if due_ms < self._table.loaded_ms:
                entry = self._loaded(origin, asked.entry)
                if entry is None and not (asked.entry is None and found is None):
                    raise no_message()
            else:
                entry = found or self._lookup.known(asked)
                if entry is not None and self._table.progress.settles(entry.due_ms, entry.queue_offset):
                    raise no_message()
            if entry is None:
                return False
            self._lookup.check(entry, asked)
            self._recalling.add(origin)
            self._put_recall(entry, asked.handle.message_id, done)
            return True

    def _put_recall(self, entry: TimedEntry, message_id: str, done: RecallDone) -> None:
        """While stepping is held up: after ``stop`` another master may have delivered the message."""
        host = self._store_host or LOOPBACK
        message = recall_message(entry.origin, entry.due_ms, message_id, host, self._clock.wall_ms())

        def stored(results: Sequence[PutResult]) -> None:
            self._recalled.append((entry, results[0]))
            self._wake()
            done(results[0])

        self._store.submit([message], stored)

    def _loaded(self, origin: int, first: TimedEntry | None) -> TimedEntry | None:
        found = self._table.find(origin, None if first is None else first.due_ms)
        if found is None and self._delivery is not None:
            found = self._delivery.waiting(origin)
            if found is not None and not self._table.is_current(origin, found.queue_offset):
                found = None
        return found

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()
