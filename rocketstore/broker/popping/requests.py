"""Requests and answers of pop, shared by the service and every protocol's adapter. The broker gives out single messages
of any queue for a time, and takes an answer for each.

A message that was received is *invisible* to the group's other consumers until its lease ends. Its *handle*, a text,
says which delivery of which message is meant; a client sends it back to settle the message (``Ack``), or to change how
long it stays invisible (``ChangeInvisible``). Handles are valid at every later master, too.

Errors: every method of ``Popping`` raises ``Refusal``, whose ``kind`` an adapter maps to a code of its protocol:

* ``INVALID``: a number, a name or a combination in the request is wrong; the sentence says which. Repeating is useless;
* ``WRONG_FILTER``: the expression cannot be parsed, with the place;
* ``NO_TOPIC``, ``NO_QUEUE``, ``NO_GROUP``: there is none of that name (number), and it may not be created;
* ``NOT_PERMITTED``: the topic is not readable, the group's consumption is disabled, or the group's consumers pull
  (P11), whose client ids the sentence gives;
* ``TOO_MANY``: a limit is reached (waiting receives of this client or in all, leases of a queue or in all, changes that
  wait): try again after a moment;
* ``BUSY``: the log takes nothing right now: try again;
* ``UNAVAILABLE``: this member is not the master, or not yet or not any more: ask ``leader``, or try again;
* ``FAILED``: the log did not confirm a change in time.

``outcome`` says whether something may have happened. After a receive that was refused with ``"unknown"``, messages may
be reserved for nobody: they come again when the lease that they would have had ends. After any other refused call,
sending the same again is right: an ack that was done says ``INVALID_HANDLE`` then.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from rocketstore.broker.reading import TAG
from rocketstore.message.record import QueuePlace

ANY_QUEUE: Final = -1
"""A receive from any queue of the topic."""
MESSAGES_MAX: Final = 32
"""Messages of one receive."""
INVISIBLE_MS_MAX: Final = 12 * 3_600_000
INVISIBLE_MS_MIN: Final = 1_000
"""Shorter ones are raised to it, except for the 0 of a message that shall be visible again at once."""
AUTO_RENEW_MS: Final = 60_000
"""How long a message is invisible whose lease the broker itself prolongs, at a time."""
AUTO_RENEW_MS_MAX: Final = 3 * 3_600_000
"""The broker prolongs a lease no longer than this."""
WAIT_MS_MAX: Final = 30_000
ATTEMPT_ID_MAX: Final = 64
"""Characters."""
CLIENT_ID_MAX: Final = 255
"""Characters."""


class PopResult(Enum):
    """The outcome of a request for one handle."""

    OK = "ok"
    """It is done, and survives the failure of this member."""
    INVALID_HANDLE = "invalid handle"
    """Nothing was done, and the same handle never becomes valid: it is no handle, of another group or topic, of a
    message that is settled already (acknowledged, dead, or given out again after its lease had ended), of an older
    delivery, or from before a reset of the group's offsets or a deletion.
    """


class Receive(NamedTuple):
    """Messages are wanted."""

    group: str
    topic: str
    queue_id: int = ANY_QUEUE
    """A queue of the topic: messages of this one only (and none to be tried again, without ``with_retries``); or
    ``ANY_QUEUE``.
    """
    max_messages: int = MESSAGES_MAX
    """1 to ``MESSAGES_MAX``."""
    invisible_ms: int = AUTO_RENEW_MS
    """1 to ``INVISIBLE_MS_MAX``; not looked at with ``auto_renew``."""
    wait_ms: int = 0
    """How long to wait for the first message, up to ``WAIT_MS_MAX``."""
    kind: str = TAG
    """The language of ``expression``: ``rocketstore.broker.reading.TAG`` or ``SQL92``."""
    expression: str = "*"
    """Messages that do not match are settled for the group at once."""
    attempt_id: str = ""
    """Of ordered groups: the same again gives the same messages, with the same handles, if their lease runs; up to
    ``ATTEMPT_ID_MAX`` characters.
    """
    client_id: str = ""
    """The client's id, up to ``CLIENT_ID_MAX`` characters: limits count by it, and ``client_gone`` names it."""
    from_first: bool = False
    """A group that is new to the topic begins with its first messages, not at its end (P9)."""
    since_ms: int = 0
    """It begins with what was stored then (ms since 1970) or later: it has subscribed since; 0: at the end."""
    with_retries: bool = False
    """With a queue: also messages of any queue that are to be tried again."""
    auto_renew: bool = False
    """Prolong the leases until the messages are settled, the client is gone, or ``AUTO_RENEW_MS_MAX`` have passed."""


class PoppedRecord(NamedTuple):
    """One delivery of a message."""

    record: bytes
    """As it is stored; that of a message given out again is one in the group's retry topic, whose properties name the
    origin.
    """
    handle: str
    attempt: int
    """1 for the first delivery."""
    visible_at_ms: int
    """When the lease ends, ms since 1970."""
    place: QueuePlace
    """Where the record is stored."""


class Received(NamedTuple):
    """The answer to a receive."""

    messages: Sequence[PoppedRecord]
    """Empty: there were none in time."""
    full: bool = False
    """Whether there are none because the group has as many unsettled messages as it may have (P10): adapters whose
    protocol can say so answer that there are too many, and clients ask again after a pause.
    """
    rest: int = 0
    """How many messages of the queues asked were left, about; for protocols that say so."""


class Ack(NamedTuple):
    """A message is consumed: it is never given out to the group again once this is answered with ``OK``."""

    group: str
    topic: str
    """The topic that was received from; the retry topic's name is accepted as well, some clients send it."""
    handle: str


class ChangeInvisible(NamedTuple):
    """Give a message back, or keep it longer."""

    group: str
    topic: str
    handle: str
    duration_ms: int
    """From now, 0 to ``INVISIBLE_MS_MAX``; 0: visible again at once."""
    suspend: bool = False
    """The next delivery is no further attempt: nothing was tried."""
    push: bool = False
    """Of a push consumer, whose ``duration_ms`` is raised to ``INVISIBLE_MS_MIN``: some clients err in its unit."""


class ChangedInvisible(NamedTuple):
    """The answer: the new handle with ``OK``, otherwise an empty text."""

    result: PopResult
    handle: str = ""
    visible_at_ms: int = 0


class DeadLetter(NamedTuple):
    """A message cannot be consumed: store it with the group's dead letters, and settle it."""

    group: str
    topic: str
    handle: str
    reason: str = ""
    """Noted with the dead letter, cut to 200 characters; empty if the client gave none."""
