"""Full states, which a master writes when it becomes one, and again before the last one expires."""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from dledger.backoff import Backoff
from dledger.clock import Clock
from rocketstore.state.applier import StateApplier
from rocketstore.state.changes import split_full
from rocketstore.state.publisher import StatePublisher
from rocketstore.state.tables import Tables
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC, BrokerRole

FULL_PART_BYTES: Final = 128 * 1024
RETRY_MS: Final = 1000
RETRY_MS_MAX: Final = 60_000
"""A failed full state is retried after a second, then after two, and so on up to this."""

_log = logging.getLogger("rocketstore")


def is_past(store: MessageStore, tables: Tables, topic: str, queue_id: int, offset: int) -> bool:
    """Whether no message waits before an offset of one of the broker's own queues any more."""
    if topic == SCHEDULE_TOPIC:
        return tables.delay_offsets.get(queue_id + 1, 0) >= offset
    return store.min_offset(topic, queue_id) >= offset


class FullStates:
    """For the state's thread, but for ``wanted``."""

    def __init__(
        self, store: MessageStore, applier: StateApplier, publisher: StatePublisher, clock: Clock, interval_ms: int
    ) -> None:
        self._store = store
        self._applier = applier
        self._publisher = publisher
        self._clock = clock
        self._interval_ms = interval_ms
        self.wanted = False
        """Whether one is to be written as soon as that may be."""
        self._was_master = False
        self._due_ms = 0
        self._not_before_ms = 0
        self._backoff = Backoff(RETRY_MS, RETRY_MS_MAX)

    def step(self, now_ms: int) -> None:
        """Publish the full state if this is a master and it is due; the last one must not expire unreplaced."""
        applier = self._applier
        master = self._store.role is not BrokerRole.SLAVE
        if master and not self._was_master:
            self.wanted = True
        self._was_master = master
        if not master or not self._publisher.idle or applier.blocked or not applier.is_complete:
            return
        minimum = self._store.min_offset(BROKER_STATE_TOPIC, 0)
        expired = applier.full_offset < minimum and minimum > 0  # from 0 on, the messages themselves are the state
        if applier.next_offset > 0 and (now_ms >= self._due_ms or expired):
            self.wanted = True
        if not self.wanted or applier.next_offset != applier.end_offset or now_ms < self._not_before_ms:
            return
        if self._store.refusal is not None:
            return  # it has not been started yet, or its disk is full: wanted until it takes messages
        with applier.lock:
            tables = applier.tables.copy()
        tables.forget_begins(lambda topic, queue_id, begin: self._store.min_offset(topic, queue_id) >= begin)
        tables.forget_waits(partial(is_past, self._store, tables))
        changes = list(tables.as_changes())
        self.wanted = False
        self._due_ms = now_ms + self._interval_ms
        if not changes and applier.next_offset == 0:
            return  # there never was any state
        full_id = f"{self._clock.wall_ms()}-{applier.next_offset}"
        bodies = split_full(changes, full_id=full_id, upto=applier.next_offset, bytes_max=FULL_PART_BYTES)
        self._publisher.publish(bodies, self._on_end)

    def _on_end(self, stored: bool) -> None:
        if stored:
            self._backoff.succeeded()
            return
        pause_ms = round(self._backoff.pause())
        _log.warning("broker state: the full state was not written; retrying in %d s", pause_ms // 1000)
        self.wanted = True
        self._not_before_ms = self._clock.monotonic_ms() + pause_ms
