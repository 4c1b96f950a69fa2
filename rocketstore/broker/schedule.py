"""Delivers delayed messages: reads each level's queue of ``SCHEDULE_TOPIC`` in order, and puts due messages again.

A message waits in the queue of its level (level less 1), with its real topic and queue in its properties. When it is
due, the original message is put, and the level's progress advances; progress is stored in the broker state, so the next
master continues from there.

**At least once.** Progress is written after the messages it covers, about once a second. If a master fails in between,
its successor delivers the last messages again. A put of unknown outcome is also retried. A stop waits for puts in
progress before writing progress, so a clean one repeats nothing. A message never counts as delivered unless it is
stored.

Deliberate differences from RocketMQ: the stored copy loses ``DELAY`` (RocketMQ keeps it, because it builds the property
string before clearing it), and with it ``REAL_TOPIC``, ``REAL_QID`` and ``WAIT``; a thread sleeps until the next
message is due instead of polling ten times a second; the due time is calculated from the record (store time plus its
level's delay, as for the consume queue's tags code), so a changed ``messageDelayLevel`` also applies to waiting
messages. Those of levels that it names no longer come after the delay of its last one.

A message that can never be delivered (without a real topic, or refused by the store as illegal) is skipped and logged;
its record stays in ``SCHEDULE_TOPIC``. So is one whose topic was deleted while it waited, whether or not there is a new
one of that name; one whose queue the topic has no more gets into another. Everything else is retried until it succeeds,
and its level waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dledger.clock import Backoff, Clock
from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from dledger.runtime.threads import Supervisor, Worker
from rocketstore.message.columns import topics_of
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_WAIT,
    DelayLevels,
    HostAddress,
    Message,
)
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QUEUE_ID_MAX, QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.store.stats import OTHERS
from rocketstore.types import (
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    BrokerRole,
    GetMessageStatus,
    PutMessageStatus,
    PutResult,
    RecordHead,
)

BATCH: Final = 32
"""Messages of one level put at once, before the other levels have their turn."""
PROGRESS_INTERVAL_MS: Final = 1000
_PROGRESS_MESSAGES: Final = 1000
RETRY_MS: Final = 100
RETRY_MS_MAX: Final = 5000
SLEEP_MS_MAX: Final = 10_000
"""Due times are wall-clock times, which may jump: check at least this often."""
_DROPPED_MAX: Final = 1024
"""Deleted topics whose messages are counted by themselves."""
STOP_TIMEOUT_S: Final = 10.0
FLUSH_TIMEOUT_S: Final = 2.0

_DROPPED: Final = frozenset({PROPERTY_DELAY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID, PROPERTY_WAIT})
_ILLEGAL: Final = frozenset({PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED})
_log = logging.getLogger("rocketstore")


@dataclass(slots=True)
class _Put:
    """Submitted messages of one level; the log's thread sets ``results``, then ``answered``."""

    offsets: list[int]
    end: int
    results: Sequence[PutResult] | None = None
    answered: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Level:
    """The state of one level. Owned by the thread, except ``arrived``."""

    number: int
    offset: int = 0
    due_ms: int = 0
    """When (wall-clock time) its next message is due; valid only if ``waiting``."""
    due_offset: int = -1
    """The message for which ``due_ms`` was last calculated."""
    waiting: bool = False
    arrived: bool = True
    """Whether its queue may contain something new."""
    retry_at_ms: int = 0
    """Monotonic; no attempt before then."""
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_MS, RETRY_MS_MAX))
    batch: int = BATCH
    """1 while searching for the message that the store refuses as illegal."""
    put: _Put | None = None
    noted: int = 0
    """The progress last passed to the broker state."""


@dataclass(slots=True)
class _Found:
    """The head of a level's queue: messages to put with their queue offsets, and the offset after them."""

    messages: list[Message] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0


class ScheduleService:
    """Delivers delayed messages, on a master only. ``start`` and ``stop`` may be called any number of times.

    ``store_host`` is stored in delivered records; without it, they keep the address of the broker that accepted the
    message, which may be gone.
    """

    def __init__(
        self,
        store: MessageStore,
        state: BrokerState,
        delay_levels: DelayLevels,
        clock: Clock | None = None,
        *,
        supervisor: Supervisor | None = None,
        store_host: HostAddress | None = None,
    ) -> None:
        self._store = store
        self._state = state
        self._delays = delay_levels
        self._clock = clock or Clock()
        self._supervisor = supervisor or Supervisor(lambda _error: None)
        self._store_host = store_host
        self._lifecycle = threading.Lock()  # serializes start and stop
        self._run: _Run | None = None
        self.skipped = 0
        """The number of messages that could never be delivered."""
        self.dropped: Counter[str] = Counter()
        """The number of messages that waited when their topic was deleted, by topic."""
        store.add_arrival_listener(self._on_arrival)

    def start(self) -> None:
        """Start at the replicated progress; call after the store became master. Does nothing if running."""
        with self._lifecycle:
            if self._run is None:
                self._run = _Run(self, self._store, self._state, self._delays, self._clock)
                self._run.start(self._supervisor)
        self._state.wake()

    def stop(self) -> None:
        """Stop putting messages; a master first writes its progress. Idempotent."""
        with self._lifecycle:
            run, self._run = self._run, None
            if run is not None:
                run.stop()

    @property
    def fatal(self) -> BaseException | None:
        """The error that ended delivery, after which the broker must stop."""
        return self._supervisor.fatal

    def progress(self) -> dict[int, tuple[int, int]]:
        """Maps each level to (next queue offset to deliver, end of its queue)."""
        run = self._run
        return {
            number: (
                run.offset(number) if run is not None else self._state.delay_offset(number),
                self._store.max_offset(SCHEDULE_TOPIC, number - 1),
            )
            for number in range(1, (self.level_max if run is None else run.level_max) + 1)
        }

    @property
    def level_max(self) -> int:
        """The highest level that there is, or was when messages of it were stored."""
        stored = [queue_id + 1 for topic, queue_id in self._store.queues() if topic == SCHEDULE_TOPIC]
        return max([self._delays.level_max, *stored])

    def runtime_info(self) -> dict[str, str]:
        """RocketMQ's ``scheduleMessageOffset_<level>``: progress and end."""
        return {f"scheduleMessageOffset_{level}": f"{at},{end}" for level, (at, end) in self.progress().items()}

    def real_message(self, message: Message) -> Message | None:
        """The producer's original message; None if the stored message does not name its topic or queue."""
        topic = message.properties.get(PROPERTY_REAL_TOPIC, "")
        queue_id = message.properties.get(PROPERTY_REAL_QUEUE_ID, "")
        known = queue_id.isascii() and queue_id.isdigit() and len(queue_id) <= 9 and int(queue_id) <= QUEUE_ID_MAX
        if not topic or topic in (HALF_TOPIC, SCHEDULE_TOPIC) or not known:  # as in RocketMQ
            return None
        return Message(
            topic,
            message.body,
            int(queue_id),
            {name: value for name, value in message.properties.items() if name not in _DROPPED},
            flag=message.flag,
            sys_flag=message.sys_flag,
            born_timestamp=message.born_timestamp,
            born_host=message.born_host,
            store_host=self._store_host or message.store_host,
            reconsume_times=message.reconsume_times,
        )

    def skip(self, level: int, offset: int, why: str) -> None:
        """Count and log a message that can never be delivered."""
        self.skipped += 1
        _log.error("delayed message %d of level %d cannot be delivered: %s", offset, level, why)

    def place(self, message: Message, waited: QueueOffset) -> bool:
        """Choose the queue for a message that is due; False if its topic was deleted since it was sent."""
        queue_id = self._state.place_for(message.topic, message.queue_id, waited)
        if queue_id is not None:
            message.queue_id = queue_id
            return True
        name = message.topic if message.topic in self.dropped or len(self.dropped) < _DROPPED_MAX else OTHERS
        self.dropped[name] += 1
        count = self.dropped[name]
        if not count & (count - 1):  # there may be a million of them
            _log.warning("topic %s was deleted: %d delayed messages for it are dropped, the last one %d of level %d",
                         message.topic, count, waited.offset, waited.queue_id + 1)  # fmt: skip
        return False

    @property
    def dropped_count(self) -> int:
        """The number of messages that waited when their topic was deleted."""
        return self.dropped.total()

    def step(self) -> int | None:
        """Do what is due now; returns when (monotonic ms) the next step is. Tests call it instead of the thread."""
        run = self._run
        return run.step() if run is not None else None

    def _on_arrival(self, heads: Sequence[RecordHead]) -> None:
        run = self._run
        if run is not None and SCHEDULE_TOPIC in topics_of(heads):
            for queue_id in {head.queue_id for head in heads if head.topic == SCHEDULE_TOPIC}:
                run.on_arrival(queue_id + 1)


class _Run:
    """From one ``start`` to its ``stop``. A stopped run puts nothing more, wherever its thread is."""

    def __init__(
        self,
        service: ScheduleService,
        store: MessageStore,
        state: BrokerState,
        delays: DelayLevels,
        clock: Clock,
    ) -> None:
        self._service = service
        self._store = store
        self._state = state
        self._delays = delays
        self._clock = clock
        self._stopped = False
        self._stepping = threading.Lock()  # held while stepping: stop waits for it, so that no put follows the stop
        self._worker: Worker | None = None
        self._delivered = 0
        self._progress_due_ms = 0
        self._progress_busy = False
        self._levels = {number: self._begin(number) for number in range(1, service.level_max + 1)}

    def start(self, supervisor: Supervisor) -> None:
        self._worker = Worker("rocketstore-schedule", self.step, self._clock, supervisor)
        self._worker.start()

    def stop(self) -> None:
        """Stop putting; if still master, wait for the puts in progress and write progress; end the thread."""
        with self._stepping:
            self._stopped = True  # from here on, this thread owns the levels
        if self._store.role is not BrokerRole.SLAVE:
            self._land_all()
            self._flush_progress()
        if self._worker is not None:
            self._worker.stop(STOP_TIMEOUT_S)

    @property
    def level_max(self) -> int:
        return len(self._levels)

    def offset(self, number: int) -> int:
        """A level's progress."""
        return self._levels[number].offset

    def on_arrival(self, number: int) -> None:
        """On the dispatch thread: an idle level has work again."""
        level = self._levels.get(number)
        if level is not None and not level.arrived:
            level.arrived = True
            self._wake()

    def step(self) -> int:
        """Give every level a turn; returns when the next one is due."""
        with self._stepping:
            now_ms = self._clock.monotonic_ms()
            if self._stopped:
                return now_ms + SLEEP_MS_MAX
            try:
                dues = [due for level in self._levels.values() if (due := self._turn(level, now_ms)) is not None]
            except ShutdownError:
                return now_ms + SLEEP_MS_MAX  # the store stopped before this service
            dues += self._note_progress(now_ms)
            return min([now_ms + SLEEP_MS_MAX, *dues])

    def _begin(self, number: int) -> _Level:
        """A level at its replicated progress, limited to its queue's end; ``_find`` handles a missing head."""
        noted = self._state.delay_offset(number)
        end = self._store.max_offset(SCHEDULE_TOPIC, number - 1)
        offset = min(noted, end)
        if offset < noted:
            _log.error("delay level %d: its progress %d is beyond its queue's end %d", number, noted, end)
        if offset < end and number > self._delays.level_max:
            _log.warning(
                "delay level %d is not in messageDelayLevel any more: its %d waiting messages come after the delay of "
                "level %d, %d ms",
                number, end - offset, self._delays.level_max, self._delay_ms(number),
            )  # fmt: skip
        return _Level(number, offset, noted=noted)

    def _delay_ms(self, number: int) -> int:
        return self._delays.delay_ms(self._delays.cap(number))

    def _turn(self, level: _Level, now_ms: int) -> int | None:
        """Advance one level by at most a batch; returns when (monotonic ms) its next turn is, or None: when woken."""
        if level.put is not None and not self._land(level, level.put):
            return None  # the response wakes us
        if level.retry_at_ms > now_ms:
            return level.retry_at_ms
        wall_ms = self._clock.wall_ms()
        if level.waiting:
            level.due_ms = min(level.due_ms, wall_ms + self._delay_ms(level.number))  # the clock was set back
            if level.due_ms > wall_ms:
                return now_ms + level.due_ms - wall_ms
        elif not level.arrived:
            return None
        found = self._find(level, wall_ms)
        if found is None:
            return self._wait(level, now_ms, wall_ms)
        if not found.messages:
            level.offset = found.end
            return now_ms
        self._submit(level, found)
        return now_ms if level.put is None or level.put.results is not None else None

    def _wait(self, level: _Level, now_ms: int, wall_ms: int) -> int | None:
        if level.waiting:
            return now_ms + max(level.due_ms - wall_ms, 1)
        return level.retry_at_ms if level.retry_at_ms > now_ms else None

    def _find(self, level: _Level, wall_ms: int) -> _Found | None:
        """The due messages at the head of the level's queue; None if there are none, then see ``waiting`` and
        ``due_ms``.
        """
        level.waiting = False
        level.arrived = False  # before reading: later arrivals set it again
        queue_id = level.number - 1
        try:
            result = self._store.get(SCHEDULE_TOPIC, queue_id, level.offset, max_count=level.batch)
        except CorruptLogError:
            try:
                result = self._store.get(SCHEDULE_TOPIC, queue_id, level.offset, max_count=1)
            except CorruptLogError as error:
                level.arrived = True
                if error.index is not None and self._store.log.is_repaired:  # only entries are repaired
                    self._put_off(level, f"cannot be read before the log is repaired: {error}")
                    return None
                self._service.skip(level.number, level.offset, str(error))
                return _Found(end=level.offset + 1)
        except ShutdownError:
            level.arrived = True  # nothing was read
            raise
        if result.status is GetMessageStatus.FOUND:
            level.arrived = True
            return self._due(level, result.records, result.next_offset, wall_ms)
        after = max(result.min_offset, level.offset)
        if result.status in (GetMessageStatus.MESSAGE_WAS_REMOVING, GetMessageStatus.NO_MATCHED_MESSAGE):
            after = max(result.next_offset, after)
        if after > level.offset:  # expired before it was delivered: it is lost
            self._service.skip(level.number, level.offset, f"messages up to {after - 1} have expired")
            level.arrived = True
            return _Found(end=after)
        if level.offset < result.max_offset:  # not readable yet
            level.waiting, level.due_ms, level.due_offset = True, wall_ms + RETRY_MS, -1
        return None

    def _due(self, level: _Level, records: Sequence[bytes], next_offset: int, wall_ms: int) -> _Found | None:
        found = _Found(end=level.offset)
        delay_ms = self._delay_ms(level.number)
        for record in records:
            try:
                message = decode_record(record)
            except InvalidRequestError as error:
                self._service.skip(level.number, found.end, str(error))
                found.end += 1
                continue
            due_ms = min(message.store_timestamp, wall_ms) + delay_ms
            if message.queue_offset == level.due_offset:
                due_ms = min(due_ms, level.due_ms)  # keep the earlier due time from the first look
            if due_ms > wall_ms:
                level.waiting, level.due_ms, level.due_offset = True, due_ms, message.queue_offset
                return found if found.end > level.offset else None
            real = self._service.real_message(message)
            if real is None:
                self._service.skip(level.number, message.queue_offset, "it names no target topic and queue")
            elif self._service.place(real, QueueOffset(SCHEDULE_TOPIC, message.queue_id, message.queue_offset)):
                found.messages.append(real)
                found.offsets.append(message.queue_offset)
            found.end = message.queue_offset + 1
        found.end = max(found.end, next_offset)
        return found

    def _submit(self, level: _Level, found: _Found) -> None:
        put = level.put = _Put(found.offsets, found.end)

        def done(results: Sequence[PutResult]) -> None:
            put.results = results
            put.answered.set()
            self._wake()

        self._store.submit(found.messages, done)

    def _land(self, level: _Level, put: _Put) -> bool:
        """Whether the response to a put has arrived; then progress moves past what is stored."""
        if put.results is None:
            return False
        level.put = None
        for offset, result in zip(put.offsets, put.results, strict=True):
            if result.status in _ILLEGAL and len(put.offsets) == 1:
                self._service.skip(level.number, offset, result.reason or result.status)
            elif not result.ok:
                self._go_back(level, offset, result)
                return True
            self._delivered += 1
        level.offset, level.batch = put.end, BATCH
        level.backoff.succeeded()
        return True

    def _go_back(self, level: _Level, offset: int, result: PutResult) -> None:
        """Continue with this message: later, or if the store may never accept it, now and alone."""
        level.offset = offset
        level.waiting, level.arrived = False, True
        if result.status in _ILLEGAL:
            level.batch = 1
            return
        self._put_off(level, f"was refused: {result.status} {result.reason}")

    def _put_off(self, level: _Level, why: str) -> None:
        """Retry the level's next message after a pause, which grows each time."""
        if not level.backoff.has_paused():
            _log.warning("delay level %d: message %d %s", level.number, level.offset, why)
        level.retry_at_ms = self._clock.monotonic_ms() + round(level.backoff.pause())

    def _note_progress(self, now_ms: int) -> list[int]:
        """Pass progress to the broker state if it is time; returns when the next time is."""
        changed = {level.number: level.offset for level in self._levels.values() if level.offset != level.noted}
        if not changed or self._progress_busy:
            return []
        if now_ms < self._progress_due_ms and self._delivered < _PROGRESS_MESSAGES:
            return [self._progress_due_ms]
        self._progress_due_ms = now_ms + PROGRESS_INTERVAL_MS
        self._delivered = 0
        self._progress_busy = True

        def done(result: PutResult) -> None:
            if result.outcome == "stored":
                for number, offset in changed.items():
                    self._levels[number].noted = offset
            self._progress_busy = False
            self._wake()

        self._state.commit_delay_offsets(changed, done)
        return [self._progress_due_ms]

    def _land_all(self) -> None:
        """Wait for the responses to all puts in progress, so that progress covers what is stored."""
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        for level in self._levels.values():
            put = level.put
            if put is None:
                continue
            if put.answered.wait(max(0.0, deadline_s - time.monotonic())):
                self._land(level, put)
            else:
                _log.warning("delay level %d: a put timed out: up to %d messages may be delivered twice",
                             level.number, len(put.offsets))  # fmt: skip

    def _flush_progress(self) -> None:
        changed = {level.number: level.offset for level in self._levels.values() if level.offset != level.noted}
        if not changed:
            return
        answered = threading.Event()
        outcomes: list[str] = []

        def done(result: PutResult) -> None:
            outcomes.append(result.outcome)
            answered.set()

        self._state.commit_delay_offsets(changed, done)
        if not answered.wait(FLUSH_TIMEOUT_S) or outcomes != ["stored"]:
            _log.warning("delayed messages: progress was not saved in time, so some may be delivered twice")

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()
