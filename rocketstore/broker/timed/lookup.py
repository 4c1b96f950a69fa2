"""Finds the message that a recall names, while it waits for an hour that is not loaded yet.

As long as the message's first record is in the log, that says when it is due, and recalls are in memory;
so nothing is read but that record. Later, or if recalls are too many, the file of its hour is searched.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, InvalidRequestError
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.message import PROPERTY_REAL_TOPIC, Message
from rocketstore.message.properties import encode_properties
from rocketstore.message.record import decode_record
from rocketstore.message.timed import waiting_of
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.entries import HOUR_MS, TimedEntry
from rocketstore.timer.handles import NO_ID, RecallHandle, WrongHandleError, decode_handle
from rocketstore.types import TIMED_TOPIC

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
