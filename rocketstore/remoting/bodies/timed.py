"""Messages that wait for a time of their own, in answers to LIST_TIMED."""

from __future__ import annotations

from dledger.records import record
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import Int32, Int64


@record(frozen=True, slots=True)
class TimedMessageBody(Body):
    """One message. Times are ms since 1970."""

    topic: str
    queue_id: Int32
    due_ms: Int64
    message_id: str
    keys: str
    tags: str
    size: Int32
    born_ms: Int64
    handle: str


@record(frozen=True, slots=True)
class TimedMessagesBody(Body):
    """Some messages by due time, and how many there are.

    There may be more, from ``next_ms`` and ``next_offset`` on; -1: there are none. ``next_due_ms``: when the next of
    all is due.
    """

    messages: tuple[TimedMessageBody, ...]
    next_ms: Int64
    next_offset: Int64
    open: Int64
    late: Int64
    next_due_ms: Int64
