"""How a client's single appends get names and numbers, so that each can be sent again without being stored twice.

A *lane* is a producer's name and what was sent under it. An append takes the lane's next numbers at the moment in which
it goes into a stream, so requests reach the leader in the order of their numbers. Usually that is all.

When an append fails and is worth trying again, its lane takes no more; what comes later gets another one, and what is
under way in this one is sent again one after the other, in the order of the numbers, each when all before it are over.
For an append that was ever sent with an unknown outcome there is no other way: under another name it could be stored
twice, if the first one is still on its way somewhere. So what cannot go on in its lane, because something before it was
given up, is tried in a new lane only if it is certain that it was never stored; else its outcome is unknown.

A lane that has become empty, and in which nothing was given up with an unknown outcome, is used again: then all that is
stored of it is known. So the names that a client uses up are few, however often it is told to wait.

Where the group has no room for one more producer, appends that would need a new name go without numbers for a while:
they are stored as well, but what is unknown then is told, not repeated.

Nothing here waits or locks: the clients call it, the one for threads with its lock held.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

from dledger.client.shared import is_retried
from dledger.core.producer_names import MADE_UP_BYTES, made_up_name
from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    RequestTimeoutError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.types import ProducerBatch

LOST: Final = (OutOfOrderSequenceError, UnknownProducerError)
"""What says that something sent before is missing."""
UNNUMBERED_S: Final = 60.0
"""How long nobody asks for room for one more producer after there was none."""


def new_producer_name() -> str:
    """A name that nobody else has."""
    return made_up_name(secrets.token_bytes(MADE_UP_BYTES))


class Lane:
    """A producer of this client. ``tickets``: what is not over yet, in the order of its numbers."""

    __slots__ = ("closed", "name", "next_sequence", "spoiled", "stored", "tickets")

    def __init__(self, name: str, next_sequence: int = 0) -> None:
        self.name = name
        self.next_sequence = next_sequence
        self.stored = next_sequence
        """So many entries of it are certainly in the log."""
        self.tickets: dict[int, Ticket] = {}
        self.closed = False
        """Whether it takes no more; the name may go on in another lane."""
        self.spoiled = False
        """Whether its name must not be used again: it is not known what is stored, or the group has forgotten it."""


class Ticket:
    """One append: its place in a lane, from the first time that it is sent."""

    __slots__ = ("count", "lane", "sequence", "uncertain", "was_first")

    def __init__(self, count: int) -> None:
        self.count = count
        self.lane: Lane | None = None
        self.sequence = 0
        self.uncertain = False
        """Whether it may be stored: some time it was sent, and nobody said what became of that."""
        self.was_first = False
        """Whether everything before it in its lane was over when it was sent last."""

    @property
    def producer(self) -> ProducerBatch | None:
        """What to send with it; None without a lane: it is not numbered."""
        return None if self.lane is None else ProducerBatch(self.lane.name, self.sequence, self.count)


class LanePool:
    """The lanes of a client."""

    def __init__(self) -> None:
        self._free: list[Lane] = []
        self._unnumbered_until = 0.0

    def take(self) -> Lane:
        """A lane for a stream: one that is empty, or a new one."""
        return self._free.pop() if self._free else Lane(new_producer_name())

    def enter(self, ticket: Ticket, lane: Lane | None) -> Lane | None:
        """Give a ticket the next numbers of ``lane``, or of another one if that takes no more; returns which.

        None: it goes without, because there was no room for a new producer lately.
        """
        if lane is None or lane.closed:
            lane = self.take()
            if not lane.next_sequence and time.monotonic() < self._unnumbered_until:
                self._free.append(lane)
                return None
        ticket.lane, ticket.sequence = lane, lane.next_sequence
        lane.tickets[ticket.sequence] = ticket
        lane.next_sequence += ticket.count
        return lane

    def close(self, lane: Lane | None) -> None:
        """Let nothing more into a lane."""
        if lane is not None and not lane.closed:
            lane.closed = True
            self._free_if_empty(lane)

    def is_first(self, ticket: Ticket) -> bool:
        """Whether it may be sent again: nothing before it in its lane is open. Notes the answer."""
        lane = ticket.lane
        ticket.was_first = lane is None or next(iter(lane.tickets.values())) is ticket
        return ticket.was_first

    def settle(self, ticket: Ticket) -> bool:
        """It is stored; returns whether others may wait for that."""
        lane = ticket.lane
        if lane is None:
            return False
        lane.stored = max(lane.stored, ticket.sequence + ticket.count)
        return self._leave(ticket, lane)

    def judge(self, ticket: Ticket, error: DLedgerError) -> DLedgerError | None:
        """What to raise after a failed attempt, the ticket given up; None: try again, once it is first in its lane."""
        lane = ticket.lane
        if lane is None:  # it was never sent, or without numbers
            return None if is_retried(error) else error
        self.close(lane)
        if error.outcome == "unknown" and not isinstance(error, InvalidRequestError):
            ticket.uncertain = True
            return None
        if isinstance(error, LOST):
            if not ticket.was_first:
                return None
            lane.spoiled = lane.spoiled or isinstance(error, UnknownProducerError)
            if ticket.uncertain:
                return self.give_up(ticket, error)
            self._leave(ticket, lane)
            return None
        if isinstance(error, TooManyProducersError) and not ticket.uncertain:
            self._unnumbered_until = time.monotonic() + UNNUMBERED_S
            self._leave(ticket, lane)
            return None
        return None if is_retried(error) else self.give_up(ticket, error)

    def give_up(self, ticket: Ticket, error: DLedgerError | None) -> DLedgerError:
        """End a ticket that is not stored as far as anybody knows; gives the error that says what that means."""
        lane = ticket.lane
        if lane is not None:
            self.close(lane)
            lane.spoiled = lane.spoiled or ticket.uncertain
            self._leave(ticket, lane)
        if ticket.uncertain:
            return RequestTimeoutError(f"it is not known whether the append was stored: {error}")
        if isinstance(error, LOST):
            return UnavailableError(f"appends that were sent before failed, and no time was left to go on: {error}")
        return error or UnavailableError("the append was given up")

    def _leave(self, ticket: Ticket, lane: Lane) -> bool:
        lane.tickets.pop(ticket.sequence, None)
        ticket.lane = None
        self._free_if_empty(lane)
        return lane.closed

    def _free_if_empty(self, lane: Lane) -> None:
        if lane.closed and not lane.tickets and not lane.spoiled:
            lane.spoiled = True  # a new one goes on; what was refused for certain left its numbers unused
            self._free.append(Lane(lane.name, lane.stored))
