"""Operations between the engine and the side that reads, writes and waits (``rocketstore.broker``).

An operation (``Pending``) is *done* when what it needs is applied on the leader, and so committed: not before that may
its client be answered (P1, P2). One that needs nothing waits for a tick, too: a leader that was replaced without its
knowing must not refuse handles of others, or prolong leases that they have ended. The engine says which are done; the
other side compares by identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

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
    """A receive."""

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
    """An operation."""

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
