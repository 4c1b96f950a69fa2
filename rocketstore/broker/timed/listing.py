"""Lists messages that wait for a time of their own; for read threads, on any member."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger.errors import CorruptLogError, InvalidRequestError
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.message import (
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_OUT_MS,
    HostAddress,
    Message,
)
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.entries import HOUR_MS, Entries, TimedEntry, open_entries, select
from rocketstore.timer.handles import RecallHandle
from rocketstore.types import TIMED_TOPIC

LISTED_MAX: Final = 256
"""Messages of one answer."""
DISPATCH_WAIT_S: Final = 2.0
LOOKED_AT_MAX: Final = 20_000
"""Records that one request reads."""


class TimedListEntry(NamedTuple):
    """A message that waits. Times are ms since 1970; ``size`` is that of its record."""

    topic: str
    queue_id: int
    due_ms: int
    message_id: str
    keys: str
    tags: str
    size: int
    born_ms: int
    born_host: HostAddress
    handle: str


class TimedList(NamedTuple):
    """Messages by due time. There may be more, due at ``next_ms`` or later; -1: there are none.

    Of those due at that very millisecond, the ones whose place in ``TIMED_TOPIC`` is before ``next_offset`` were looked
    at.
    """

    messages: list[TimedListEntry]
    next_ms: int
    next_offset: int = 0


def list_timed(  # what is wanted of what
    store: MessageStore,
    state: BrokerState,
    broker: str,
    *,
    topic: str = "",
    key: str = "",
    begin: tuple[int, int] = (0, 0),
    count: int = LISTED_MAX,
) -> TimedList:
    """Those due from ``begin`` on, of one topic and with one key or id, if these are given.

    ``begin``: ``next_ms`` and ``next_offset`` of the answer before, or any time.
    Raises ``Refusal`` while the file of an hour is built again.
    """
    count = min(max(count, 1), LISTED_MAX)
    store.wait_dispatched(DISPATCH_WAIT_S)  # what was sent or recalled a moment ago is known, if it can be
    found: list[TimedListEntry] = []
    looked_at = 0
    for hour in store.timers.hours():
        if hour < begin[0] // HOUR_MS:
            continue
        entries, next_ms = _of_hour(store, state, hour, begin)
        for entry in entries:
            if len(found) >= count or looked_at >= LOOKED_AT_MAX:
                return TimedList(found, entry.due_ms, entry.queue_offset)
            looked_at += 1
            message = _message(store, entry)
            if message is None or (topic and message.properties.get(PROPERTY_REAL_TOPIC) != topic):
                continue
            if not key or key in message.keys or key == message.unique_key:
                found.append(_told(message, entry, broker))
        if next_ms >= 0:
            return TimedList(found, next_ms)
    return TimedList(found, -1)


def _of_hour(
    store: MessageStore, state: BrokerState, hour: int, begin: tuple[int, int]
) -> tuple[Iterator[TimedEntry], int]:
    """The first that wait, more than ``LOOKED_AT_MAX`` if there are; and when the next one is due, or -1."""
    from_ms, from_offset = begin
    progress = state.timed_progress

    def wanted(entries: Entries) -> NDArray[np.bool_]:
        which: NDArray[np.bool_] = (entries["due_ms"] >= from_ms) & ~progress.settled(entries)
        return which

    try:
        entries, next_ms = store.timers.first_due(hour, wanted, LOOKED_AT_MAX + 1)
    except CorruptLogError as error:
        raise Refusal(RefusalKind.BUSY, str(error)) from error
    entries = open_entries(entries)
    after = (entries["due_ms"] > from_ms) | (entries["queue_offset"] >= from_offset)
    return (TimedEntry(*map(int, row)) for row in select(entries, after)), next_ms


def _message(store: MessageStore, entry: TimedEntry) -> Message | None:
    try:
        record = store.read_record(entry.position)
        message = None if record is None else decode_record(record)
    except (CorruptLogError, InvalidRequestError):
        return None
    known = message is not None and message.topic == TIMED_TOPIC and PROPERTY_TIMER_OUT_MS in message.properties
    return message if known else None


def _told(message: Message, entry: TimedEntry, broker: str) -> TimedListEntry:
    found = message.properties
    topic, queue_id = found.get(PROPERTY_REAL_TOPIC, ""), found.get(PROPERTY_REAL_QUEUE_ID, "")
    return TimedListEntry(
        topic,
        int(queue_id) if queue_id.isdigit() else -1,
        entry.due_ms,
        message.unique_key,
        " ".join(message.keys),
        message.tags,
        entry.size,
        message.born_timestamp,
        message.born_host,
        RecallHandle(topic, broker, entry.due_ms, message.unique_key, entry.origin).encode(),
    )
