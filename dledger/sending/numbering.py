"""The producer name under which batches are sent, and the numbers of their items.

A server stores a numbered batch only if it directly follows its producer's last one, and recognizes one that it has
already stored. So a batch whose outcome is unknown (it is *doubtful*) can be sent again under the same numbers, which
stay fixed while any attempt may have been stored. Every other batch may be renumbered, because each attempt at it was
refused.

After a failure (``regroup``, when nothing is in flight and all unfinished batches wait in order):

1. No batch is doubtful: numbering continues after the last item known to be stored. A refused item leaves no gap.
2. A batch is doubtful, and the waiting ones continue what is stored: the numbers stay.
3. A batch was refused for good or given up before it was sent, and a later one is doubtful: the later one cannot have
   been stored and never will be, because its numbers are never reached. Everything from there on is sent under a new
   name.
4. A doubtful batch was given up, so its numbers may or may not be taken. Other doubtful batches keep their name and
   numbers (they are stored if the lost one is, and given up otherwise); the rest is sent under a new name, which no gap
   blocks.
5. The server does not know what precedes the first batch (it has forgotten the producer): a new name.
6. The server cannot track another producer: nothing is numbered for a while. Nothing is sent twice during that time,
   but an unknown outcome stays unknown.

Names and numbers given by the application are never replaced: after a failed item, the ones behind it fail.
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
"""How long nothing is numbered after a server had no room for another producer."""
AnyBatch = OutgoingBatch[Any, Any]  # Any: numbering does not depend on the item type


def new_producer_name() -> str:
    """A unique producer name."""
    return made_up_name(secrets.token_bytes(MADE_UP_BYTES))


class ProducerNumbering:
    """One window's numbering. ``given_name``: a valid producer name from the application, which then numbers items
    itself.
    """

    def __init__(self, given_name: str = "", *, make_name: Callable[[], str] = new_producer_name) -> None:
        self.are_given: Final = bool(given_name)
        self._make_name = make_name
        self._name = given_name or make_name()  # empty: nothing is numbered
        self._next = 0  # the first number of the next batch to be numbered
        self._stored = 0  # every number of the producer below this one is known to be stored
        self._lost = False  # a doubtful batch was given up
        self._broken: DLedgerError | None = None  # numbers from the application: the failure of an item
        self._following: int | None = None  # numbers from the application: the next one expected; None: any
        self._unnumbered_until_ms = 0.0

    # --- numbering --------------------------------------------------------------------------------------------------

    def check(self, sequence: int | None) -> None:
        """Validate the number, or its absence, of an item about to be added.

        Raises ``InvalidRequestError`` and, for a number out of order, ``OutOfOrderSequenceError``.
        """
        if not self.are_given:
            if sequence is not None:
                raise InvalidRequestError("explicit sequence numbers require a named producer: set producer_name")
            return
        if sequence is None or sequence < 0:
            raise InvalidRequestError(
                f"the producer {self._name!r} must give every sequence number itself, starting at its next one"
            )
        if self._following is not None and sequence != self._following:
            raise OutOfOrderSequenceError(
                f"sequence {sequence} of producer {self._name!r} is out of order: next is {self._following}"
            )

    def follow(self, sequence: int) -> None:
        """Set the number expected of the next item."""
        self._following = sequence

    def begin(self, batch: AnyBatch, sequence: int | None) -> None:
        """Give the batch the number that the application assigned to its first item, if any."""
        if sequence is not None:
            batch.producer, batch.sequence = self._name, sequence

    def assign(self, batch: AnyBatch, now_ms: float) -> None:
        """Number the items of a batch about to be sent, unless they are numbered."""
        if batch.producer or self.are_given:
            return
        if not self._name and now_ms >= self._unnumbered_until_ms:
            self._take_new_name()
        if self._name:
            batch.producer, batch.sequence = self._name, self._next
            self._next += len(batch.left)

    # --- outcomes ---------------------------------------------------------------------------------------------------

    def stored(self, batch: AnyBatch) -> None:
        """Items of the batch, and so all before them, are stored; its ``sequence`` has moved past them."""
        if batch.producer == self._name:
            self._stored = max(self._stored, batch.sequence)

    def failed(self, batch: AnyBatch) -> None:
        """The batch is given up, and at least one of its items failed."""
        if self.are_given:
            self._broken = self._broken or next(one for one in batch.outcomes if isinstance(one, DLedgerError))
        elif batch.doubtful and batch.producer == self._name:
            self._lost = True

    def is_orphan(self, batch: AnyBatch, refusal: DLedgerError) -> bool:
        """Whether a doubtful batch was refused because of an earlier one that is no longer sent.

        Only a late copy of that one could help; the batches behind must not wait for it.
        """
        if self.are_given or not (batch.doubtful and batch.was_first):
            return False
        given_up = self._lost or batch.producer != self._name
        return given_up and isinstance(refusal, OutOfOrderSequenceError)

    # --- after a failure --------------------------------------------------------------------------------------------

    def is_broken(self, waiting: Sequence[AnyBatch]) -> bool:
        """Whether the waiting items can no longer be stored because an earlier one was not."""
        if not self.are_given:
            return False
        if self._broken is None and waiting and is_misplaced(waiting[0]):
            self._broken = waiting[0].error
        return self._broken is not None

    def mend(self) -> DLedgerError:
        """Accept any number next; returns the error with which all waiting items fail."""
        why, self._broken, self._following = self._broken, None, None
        return OutOfOrderSequenceError(
            f"an earlier item was not stored ({why}): ask for the next number of {self._name!r} and continue from there"
        )

    def regroup(self, waiting: Sequence[AnyBatch], now_ms: float) -> None:
        """Renumber the unfinished batches, given in order, while nothing is in flight."""
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
        """Keep the batches that continue what is stored, and send the rest under a new name."""
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
            # Below the expected number: something after it is stored, so an unknown attempt was stored, too.
            expected = max(expected, batch.sequence + len(batch.left))
        self._next = expected

    def _take_new_name(self) -> None:
        self._name = self._make_name()
        self._next = self._stored = 0
        self._lost = False


def is_misplaced(head: AnyBatch) -> bool:
    """Whether the server reports that the numbers do not follow what it knows of the producer, with no other cause.

    A doubtful batch may be refused this way by a server that does not know yet that it lost leadership. One sent behind
    another may be refused because of that one.
    """
    lost = isinstance(head.error, OutOfOrderSequenceError | UnknownProducerError)
    return lost and head.was_first and not head.doubtful


def _clear(waiting: Sequence[AnyBatch]) -> None:
    """Remove the numbers from all batches that are not doubtful."""
    for batch in waiting:
        if not batch.doubtful:
            batch.forget()
