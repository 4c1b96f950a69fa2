"""Stores timed messages again that would expire before they are due, so that they may wait longer than the log's
retention.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dledger.clock import Clock
from dledger.conditions import ConditionKind, Conditions
from dledger.errors import CorruptLogError, InvalidRequestError
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import PROPERTY_REAL_TOPIC, HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.message.timed import rolled_message
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.entries import HOUR_MS, TimedEntry, open_entries
from rocketstore.types import TIMED_TOPIC, PutResult

LOOK_MS: Final = 60_000
"""How often to look for messages that are old enough."""
BATCH: Final = 64
RETRY_MS: Final = 1000
SPACE_PERCENT_MAX: Final = 20
"""Timed messages that take up more of the log than this are reported."""

_log = logging.getLogger("rocketstore")


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
            self._retry_at_ms = now_ms + RETRY_MS if failed else 0
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
        if size * 100 > whole * SPACE_PERCENT_MAX:
            self._conditions.set(
                ConditionKind.TIMED_MESSAGES,
                f"{held} timed messages take up {size} bytes of a log of {whole}, more than {SPACE_PERCENT_MAX}%: each "
                "is stored again before it expires (fileReservedTime), so look who delays so many",
            )
        else:
            self._conditions.clear(ConditionKind.TIMED_MESSAGES)

    def _submit(self, after_ms: int) -> None:
        """Those that are due before ``after_ms`` by now are on their way: a copy would be delivered, too."""
        messages: list[Message] = []
        while self._todo and len(messages) < BATCH:
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
