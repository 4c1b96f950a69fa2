"""Finds timed messages on disk, for read threads: lists those that wait, and looks up the one that a recall names.

The list is the same on any member. A recall is looked up here while its message waits for an hour that is not loaded
yet. As long as the message's first record is in the log, that says when it is due, and recalls are in memory; so
nothing is read but that record. Later, or if recalls are too many, the file of its hour is searched.
"""

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
from rocketstore.message.properties import encode_properties
from rocketstore.message.record import decode_record
from rocketstore.message.timed import NO_ID, RecallHandle, WrongHandleError, decode_handle, waiting_of
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.hours import HOUR_MS, Entries, TimedEntry, open_entries, select
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


_FIRST: Final = (-1, -1)
"""Origin and recall of a message's first record."""


class AskedRecall(NamedTuple):
    """A recall whose handle was looked at.

    ``entry``: the message's first record; None if that has expired, and then ``due_ms`` is only what the handle says.
    """

    handle: RecallHandle
    due_ms: int
    entry: TimedEntry | None


def handle_for(topic: str, text: str, broker: str) -> RecallHandle:
    """A request's handle. Raises ``Refusal`` if it is for another topic or broker."""
    try:
        handle = decode_handle(text)
    except WrongHandleError as error:
        raise Refusal(RefusalKind.INVALID, str(error)) from error
    if handle.topic != topic or handle.broker != broker:
        raise Refusal(
            RefusalKind.INVALID,
            f"the recall handle is for topic {handle.topic} of broker {handle.broker}, not for {topic} of {broker}",
        )
    return handle


def no_message() -> Refusal:
    """There is nothing to recall."""
    return Refusal(
        RefusalKind.NO_MESSAGE,
        "there is no such timed message any more: it was delivered or recalled, or its topic was deleted",
    )


class RecallLookup:
    """For any thread. Everything raises ``Refusal``."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def ask(self, handle: RecallHandle) -> AskedRecall:
        """Refuse a message that was never there, at the cost of one record."""
        first = self._first(handle.origin)
        if first is None:
            if handle.origin >= self._store.max_offset(TIMED_TOPIC, 0):
                raise no_message()
            return AskedRecall(handle, handle.due_ms, None)
        waiting = waiting_of(encode_properties(first.properties))
        if waiting is None or waiting[1:] != _FIRST or not _is_of(first, handle):
            raise no_message()
        due_ms = waiting[0]
        place = (first.queue_offset, first.queue_offset, first.offset, first.store_timestamp, first.size)
        return AskedRecall(handle, due_ms, TimedEntry(due_ms, *place))

    def known(self, asked: AskedRecall) -> TimedEntry | None:
        """The message, without reading anything; None if it must be looked for."""
        recalled = self._store.timers.is_recalled(asked.due_ms // HOUR_MS, asked.handle.origin)
        if recalled:
            raise no_message()
        return None if recalled is None else asked.entry

    def find(self, asked: AskedRecall) -> TimedEntry:
        """The message's newest record, in the file of its hour.

        Or of one beside it: a client counts a delay from when it sent, the broker from the arrival.
        """
        around = (0,) if asked.entry is not None else (0, 1, -1)
        for hour in (asked.due_ms // HOUR_MS + ahead for ahead in around):
            try:
                found = self._store.timers.find(hour, asked.handle.origin)
            except CorruptLogError as error:
                raise Refusal(RefusalKind.BUSY, str(error)) from error
            if found is not None:
                return found
        raise no_message()

    def check(self, entry: TimedEntry, asked: AskedRecall) -> None:
        """Refuse an entry that is of another message than the handle."""
        if entry == asked.entry:
            return  # it was looked at
        record = self._store.read_record(entry.position)
        try:
            message = None if record is None else decode_record(record)
        except InvalidRequestError:
            message = None
        if message is None or message.topic != TIMED_TOPIC or message.queue_offset != entry.queue_offset:
            raise no_message()
        if not _is_of(message, asked.handle):
            raise no_message()

    def _first(self, queue_offset: int) -> Message | None:
        try:
            found = self._store.get(TIMED_TOPIC, 0, queue_offset, max_count=1).records
            message = decode_record(found[0]) if found else None
        except (CorruptLogError, InvalidRequestError):
            return None
        return message if message is not None and message.queue_offset == queue_offset else None


def _is_of(message: Message, handle: RecallHandle) -> bool:
    """Whether a record is of the message that a handle names."""
    same_topic = message.properties.get(PROPERTY_REAL_TOPIC) == handle.topic
    return same_topic and (message.unique_key or NO_ID) == handle.message_id
