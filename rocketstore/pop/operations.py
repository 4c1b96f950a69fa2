"""Operations between the engine and the side that reads, writes and waits (``rocketstore.broker``).

An operation (``Pending``) is *done* when what it needs is applied on the leader, and so committed: not before that may
its client be answered (P1, P2). One that needs nothing waits for a tick, too: a leader that was replaced without its
knowing must not refuse handles of others, or prolong leases that they have ended. The engine says which are done; the
other side compares by identity.

*Handles* are what a client sends back to name one delivery of a message (P5). They say themselves what they are for, so
that a new leader understands those of earlier ones. To clients they are opaque: base64url, without padding, of

    version 1 byte | flags 1 byte | queue u16 | offset u64 | attempt u16 | number u64 | generation u64 |
    length of the group u8, group | length of the topic u8, topic | CRC-32C of all of it u32

Flag 1: the message is in the group's retry topic of ``topic``. The checksum finds damage, and texts that are no
handles; it is no signature: a client's permissions on the group decide whether it may settle a message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, Protocol

from crc32c import crc32c

from dledger.errors import InvalidRequestError
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopRow

ANY_QUEUE: Final = -1


class PopView(Protocol):
    """The engine's view of the leader's tables, as of any moment: with everything that is applied by then."""

    def pop_window(self, place: PopPlace, /) -> LeaseWindow | None:
        """The window of a queue."""

    def pop_epoch(self) -> int:
        """``PopTables.epoch``."""

    def offset(self, group: str, topic: str, queue_id: int, /) -> int:
        """A group's offset in a queue; -1: it has none."""

    def pop_rules(self, group: str, /) -> PopRules:
        """A group's settings."""


class PopRules(NamedTuple):
    """Settings of a group that the engine looks at."""

    ordered: bool = False
    attempts_max: int = 17
    """After so many deliveries a message is dead; 0: never."""


class QueueBounds(NamedTuple):
    """Of a queue that a group may not have an offset in yet."""

    begin: int
    """The first message of the topic."""
    start: int
    """Where a new group begins (P9)."""
    end: int
    """After its last message: an earlier leader can have given out none from there on."""


class Origin(NamedTuple):
    """The message that a copy is of, as a property of the copy says (``Copy.origin``)."""

    place: PopPlace
    offset: int
    generation: int


class Loading(NamedTuple):
    """A topic as a group is to see it.

    ``copied``: the origins named by the last ``COPIES_MAX`` messages of the retry topic, and of the group's dead-letter
    topic. An earlier leader may have stored these copies, and failed before it settled the originals, which are given
    out no more then.
    """

    group: str
    topic: str
    retry_topic: str
    """Its name, whether or not it exists."""
    queues: Mapping[int, QueueBounds]
    """All of the topic."""
    retry_begin: int | None = None
    """The first message of the retry topic's queue 0; None: there is no such topic yet. Load again when there is."""
    copied: Sequence[Origin] = ()


class PopWish(NamedTuple):
    group: str
    topic: str
    queue_ids: Sequence[int]
    """Those that may be read, in the order of their priority if they have one."""
    max_messages: int
    invisible_ms: int
    client_id: str = ""
    attempt_id: str = ""
    auto_renew: bool = False
    by_priority: bool = False
    """Whether ``queue_ids`` are tried in their order; otherwise they are in turn, and begin anywhere."""
    owner: str = ""
    """Whose share of all leases it counts for; empty: nobody's."""
    with_retries: bool = True
    """Whether messages of the retry topic are wanted, too; not if the client names a queue."""


class PopRead(NamedTuple):
    """A place to read now. The engine gives the queue to no other receive until it is told what was found."""

    place: PopPlace
    offset: int
    count_max: int
    """Stop after so many messages that pass the filter."""
    only: Sequence[int] = ()
    """If there are any: look at these offsets, and at no other."""


class PopFound(NamedTuple):
    """A message that passes the filter."""

    offset: int
    attempt: int
    """Its record's reconsume times + 1."""


class Leased(NamedTuple):
    """A message of a delivery."""

    place: PopPlace
    offset: int
    attempt: int
    handle: str
    visible_at_ms: int
    generation: int
    number: int


class Verdict(Enum):
    """How an operation ended."""

    OK = "ok"
    INVALID_HANDLE = "invalid handle"
    FULL = "full"
    """A limit is reached; nothing was done."""
    FAILED = "failed"
    """The log did not take it, or not for certain: refuse the client with the log's outcome."""


class Pending:
    __slots__ = ("failure", "then", "verdict", "waits")

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        """None: not yet known."""
        self.failure: object = None
        """With ``FAILED``: what ``ticked`` was told."""
        self.then = Verdict.OK
        """For the engine: what the verdict is to be, once a tick confirms that this is still the leader."""
        self.waits = 0
        """For the engine: what must be applied first."""

    @property
    def is_done(self) -> bool:
        """Whether its client may be answered."""
        return self.verdict is not None


class Settling(Pending):
    """An ack, or a dead letter."""

    __slots__ = ()


class Changing(Pending):
    """A change of invisibility; the new handle counts if the verdict is ``OK``."""

    __slots__ = ("handle", "visible_at_ms")

    def __init__(self) -> None:
        super().__init__()
        self.handle = ""
        self.visible_at_ms = 0


class PopDelivery(Pending):
    """A receive: what it has got so far. ``OK`` with no messages left: somebody reset the offsets meanwhile."""

    __slots__ = ("full", "messages", "places", "reading", "wish")

    def __init__(self, wish: PopWish, places: list[PopPlace]) -> None:
        super().__init__()
        self.wish = wish
        self.places = places
        """For the engine: those that are still to be tried, the next one last."""
        self.messages: list[Leased] = []
        self.full = False
        """Whether a queue was passed over because its window is full (P10)."""
        self.reading: PopRead | None = None

    @property
    def room(self) -> int:
        """How many more messages it may get."""
        return self.wish.max_messages - len(self.messages)


class PopCopy(NamedTuple):
    """A message to be stored again (P4): in the retry topic, or with the dead letters.

    The copy must name its ``origin`` in a property. Exactly one call of ``copied`` must follow, once it is *certain*
    whether the copy is in the log.
    """

    origin: Origin
    topic: str
    """The topic as the consumers know it."""
    attempt: int
    """Deliveries so far that count; -1: as many as the record says, its reconsume times + 1."""
    attempts_max: int
    forced: bool = False
    """Dead whatever the attempts."""

    def next_attempt(self, record_attempt: int) -> int:
        """The number of the copy's next delivery, if it gets one; its reconsume times are one less."""
        return (record_attempt if self.attempt < 0 else self.attempt) + 1

    def is_dead(self, record_attempt: int) -> bool:
        """Whether it goes to the dead letters."""
        return self.forced or 0 < self.attempts_max < self.next_attempt(record_attempt)


class CopyResult(Enum):
    """The outcome of a copy."""

    STORED = "stored"
    """Committed."""
    GONE = "gone"
    """The original has expired, so there is nothing to give out any more."""
    NOT_STORED = "not stored"
    """It never will be: it is tried again after a second."""


@dataclass(slots=True, eq=False)
class Tick:
    """Rows to be written as one change of the broker's state, even if there are none."""

    rows: tuple[PopRow, ...]
    waiting: list[tuple[PopPlace, list[Pending]]] = field(default_factory=list)
    """For the engine, as what follows."""
    confirmed: list[Pending] = field(default_factory=list)


HANDLE_CHARS_MAX: Final = 512
_VERSION: Final = 1
_RETRY: Final = 1
_HEAD: Final = Struct(">BBHQHQQ")
_SUM: Final = Struct(">I")
_ATTEMPT_MAX: Final = 0xFFFF
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_NAMES_MAX: Final = 1024
"""Groups with topics whose names are remembered in either form."""


class Handle(NamedTuple):
    """The fields of a handle."""

    group: str
    topic: str
    """As the consumer knows it, of a message in the retry topic, too."""
    is_retry: bool
    queue_id: int
    offset: int
    attempt: int
    """1 for the first delivery; at most 65,535 is written."""
    number: int
    """Each delivery of a queue's messages, and each change of a lease, has a higher one."""
    generation: int
    """Of the window."""


class InvalidHandleError(InvalidRequestError):
    """Raised when a text is no handle."""


def encode_handle(handle: Handle) -> str:
    head = _HEAD.pack(
        _VERSION,
        _RETRY * handle.is_retry,
        handle.queue_id,
        handle.offset,
        min(handle.attempt, _ATTEMPT_MAX),
        handle.number,
        handle.generation,
    )
    data = head + _encoded_names(handle.group, handle.topic)
    return base64.urlsafe_b64encode(data + _SUM.pack(crc32c(data))).rstrip(b"=").decode()


def decode_handle(text: str) -> Handle:
    """Raises ``InvalidHandleError``."""
    if len(text) > HANDLE_CHARS_MAX:
        raise InvalidHandleError(f"a handle has at most {HANDLE_CHARS_MAX} characters, this one {len(text)}")
    try:
        padded = text.encode("ascii").translate(_STANDARD) + b"=" * (-len(text) % 4)
        whole = binascii.a2b_base64(padded, strict_mode=True)
    except ValueError as error:  # binascii's is one, too
        raise InvalidHandleError("a handle is base64url: send it back as it was received") from error
    data, checksum = whole[: -_SUM.size], whole[-_SUM.size :]
    if len(data) < _HEAD.size + 2 or data[0] != _VERSION or _SUM.pack(crc32c(data)) != checksum:
        raise InvalidHandleError("invalid or damaged handle: send it back as it was received")
    _, flags, queue_id, offset, attempt, number, generation = _HEAD.unpack_from(data)
    group, topic = _names(data[_HEAD.size :])
    return Handle(group, topic, bool(flags & _RETRY), queue_id, offset, attempt, number, generation)


@lru_cache(_NAMES_MAX)
def _encoded_names(group: str, topic: str) -> bytes:
    names = group.encode(), topic.encode()
    return b"".join(b"%c%b" % (len(one), one) for one in names)


@lru_cache(_NAMES_MAX)
def _names(data: bytes) -> tuple[str, str]:
    group, rest = _text(data)
    topic, rest = _text(rest)
    if rest:
        raise InvalidHandleError("invalid handle: it is too long")
    return group, topic


def _text(data: bytes) -> tuple[str, bytes]:
    if not data or len(data) <= data[0]:
        raise InvalidHandleError("invalid handle: it is too short")
    end = 1 + data[0]
    try:
        return data[1:end].decode(), data[end:]
    except UnicodeDecodeError as error:
        raise InvalidHandleError("invalid handle: its names are damaged") from error
