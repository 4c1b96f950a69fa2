"""Under which name batches are sent, and how their items are numbered.

A server stores a numbered batch only if it follows its producer's last one, and knows one that it has stored already.
So a batch whose outcome is unknown (it is *doubtful*) can be sent again under the numbers that it had: these are
fixed as long as any attempt at it may have been stored. All others may get other numbers: each attempt at them was
refused.

What happens after a failure (``regroup``, when nothing is under way and all that is unfinished waits in order):

1. Nothing is doubtful: numbering goes on behind what is surely stored. An item that was refused leaves no hole.
2. Something is doubtful, and what waits continues what is stored: the numbers stay.
3. A batch was refused for good or given up before it was sent, and one behind it is doubtful: the latter cannot have
   been stored, nor ever be, because its numbers are never reached. From there on all is sent under a new name.
4. A doubtful batch was given up: whether its numbers are taken is not known. What is doubtful, too, keeps its name
   and numbers (it is stored if the lost one is, else given up as well); all else is sent under a new name, which no
   hole blocks.
5. The server does not know what goes before the first batch (it has forgotten the producer): a new name.
6. The server cannot remember one more producer: nothing is numbered for a while. Nothing is sent twice then, either,
   but what is unknown stays unknown.

Names and numbers that the application gives are never replaced: after an item that failed, those behind it fail.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from dledger.core.producer_names import MADE_UP_BYTES, made_up_name
from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    TooManyProducersError,
    UnknownProducerError,
)
from dledger.sending.batch import OutgoingBatch

UNNUMBERED_MS: Final = 60_000.0
"""How long nothing is numbered after a server had no room for one more producer."""
AnyBatch = OutgoingBatch[Any, Any]  # Any: numbers do not depend on what is numbered


def new_producer_name() -> str:
    """A producer's name that nobody else has."""
    return made_up_name(secrets.token_bytes(MADE_UP_BYTES))


class ProducerNumbering:
    """Of one window. ``given_name``: the application's own, which has been checked; then it gives the numbers, too."""

    def __init__(self, given_name: str = "", *, make_name: Callable[[], str] = new_producer_name) -> None:
        self.are_given: Final = bool(given_name)
        self._make_name = make_name
        self._name = given_name or make_name()  # empty: nothing is numbered
        self._next = 0  # of the next batch without numbers
        self._stored = 0  # the producer's numbers below are stored for sure
        self._lost = False  # a doubtful batch was given up
        self._broken: DLedgerError | None = None  # given numbers: what became of one of the items
        self._following: int | None = None  # given numbers: that of the next item; None: any
        self._unnumbered_until_ms = 0.0

    @property
    def are_off(self) -> bool:
        """Whether nothing is numbered at present."""
        return not self._name

    # --- numbering --------------------------------------------------------------------------------------------------

    def check(self, sequence: int | None) -> None:
        """An item is to be added to which the application has given this number, or none.

        Raises ``InvalidRequestError`` and, for a number that does not follow, ``OutOfOrderSequenceError``.
        """
        if not self.are_given:
            if sequence is not None:
                raise InvalidRequestError("explicit sequence numbers require a named producer: set producer_name")
            return
        if sequence is None or sequence < 0:
            raise InvalidRequestError(
                f"the producer {self._name!r} must give every sequence number itself, starting at next_sequence()"
            )
        if self._following is not None and sequence != self._following:
            raise OutOfOrderSequenceError(
                f"sequence {sequence} of producer {self._name!r} is out of order: next is {self._following}"
            )

    def follow(self, sequence: int) -> None:
        """The number of the next item, now that those before it are added."""
        self._following = sequence

    def begin(self, batch: AnyBatch, sequence: int | None) -> None:
        """The batch's first item has the number that the application has given it, if it does."""
        if sequence is not None:
            batch.producer, batch.sequence = self._name, sequence

    def assign(self, batch: AnyBatch, now_ms: float) -> None:
        """The batch is about to be sent: number its items unless they are."""
        if batch.producer or self.are_given:
            return
        if not self._name and now_ms >= self._unnumbered_until_ms:
            self._take_new_name()
        if self._name:
            batch.producer, batch.sequence = self._name, self._next
            self._next += len(batch.left)

    # --- what became of them ----------------------------------------------------------------------------------------

    def stored(self, batch: AnyBatch) -> None:
        """Items of the batch are stored, and so are all before them; its ``sequence`` is behind them now."""
        if batch.producer == self._name:
            self._stored = max(self._stored, batch.sequence)

    def failed(self, batch: AnyBatch) -> None:
        """Nothing more is tried with the batch, and some of it is not stored for sure."""
        if self.are_given:
            self._broken = self._broken or next(one for one in batch.outcomes if isinstance(one, DLedgerError))
        elif batch.doubtful and batch.producer == self._name:
            self._lost = True

    def is_orphan(self, batch: AnyBatch, refusal: DLedgerError) -> bool:
        """Whether the batch, which is doubtful, was refused because of one before it that nobody sends any more.

        Only a late copy of that one could help; what waits behind must not wait for it.
        """
        if self.are_given or not (batch.doubtful and batch.was_first):
            return False
        given_up = self._lost or batch.producer != self._name
        return given_up and isinstance(refusal, OutOfOrderSequenceError)

    # --- after a failure --------------------------------------------------------------------------------------------

    def is_broken(self, waiting: Sequence[AnyBatch]) -> bool:
        """Whether the items that wait cannot be stored any more, because one before them was not."""
        if not self.are_given:
            return False
        if self._broken is None and waiting and is_misplaced(waiting[0]):
            self._broken = waiting[0].error
        return self._broken is not None

    def mend(self) -> DLedgerError:
        """Begin anew with whatever number comes next; gives what all that waits fails with."""
        why, self._broken, self._following = self._broken, None, None
        return OutOfOrderSequenceError(
            f"an earlier item was not stored ({why}): call next_sequence({self._name!r}) and continue from there"
        )

    def regroup(self, waiting: Sequence[AnyBatch], now_ms: float) -> None:
        """Nothing is under way, and all that is unfinished waits in this order: make the numbers fit again."""
        if self.are_given or not self._name:
            return
        head = waiting[0] if waiting else None
        if head is not None and isinstance(head.error, TooManyProducersError) and not head.doubtful:
            self._unnumbered_until_ms = now_ms + UNNUMBERED_MS
            self._name = ""
            _clear(waiting)
        elif self._lost or (head is not None and is_misplaced(head)):
            self._take_new_name()
            _clear(waiting)
        elif any(batch.doubtful and batch.producer == self._name for batch in waiting):
            self._keep(waiting)
        else:
            self._next = self._stored
            _clear(waiting)

    def _keep(self, waiting: Sequence[AnyBatch]) -> None:
        """Leave what continues what is stored as it is, and send the rest under a new name."""
        name, expected = self._name, self._stored
        for place, batch in enumerate(waiting):
            if batch.producer != name:
                continue
            if batch.sequence > expected:
                for later in waiting[place:]:
                    if later.producer == name:
                        later.forget()
                self._take_new_name()
                return
            # Below what is expected: something behind it is stored, so an attempt that nobody knew of was stored, too.
            expected = max(expected, batch.sequence + len(batch.left))
        self._next = expected

    def _take_new_name(self) -> None:
        self._name = self._make_name()
        self._next = self._stored = 0
        self._lost = False


def is_misplaced(head: AnyBatch) -> bool:
    """Whether the server says that the numbers do not follow what it knows of the producer, and nothing else could.

    A doubtful batch may be told so by a server that does not know yet that it leads no more. One that was sent behind
    another may be told so because of that one.
    """
    lost = isinstance(head.error, OutOfOrderSequenceError | UnknownProducerError)
    return lost and head.was_first and not head.doubtful


def _clear(waiting: Sequence[AnyBatch]) -> None:
    """Take the numbers from all batches that are not doubtful."""
    for batch in waiting:
        if not batch.doubtful:
            batch.forget()
