"""Which producer a sender's batches are of, and how their messages are numbered.

The broker stores a numbered batch only if it follows the producer's last one, and knows one that it has stored already.
So a batch whose outcome is unknown (it is *doubtful*) can be sent again under the numbers that it had: these are fixed
as long as any attempt at it may have been stored. All others may get other numbers: each attempt at them was refused.

What happens after a failure (``regroup``, when nothing is in flight and all that is unfinished waits in order):

1. Nothing is doubtful: numbering goes on behind what is surely stored. A message that was refused leaves no hole.
2. Something is doubtful, and what waits continues what is stored: the numbers stay.
3. A batch was refused for good or given up before it was sent, and one behind it is doubtful: the latter cannot have
   been stored, nor ever be, because its numbers are never reached. From there on all is sent under a new name.
4. A doubtful batch was given up: whether its numbers are taken is not known. What is doubtful, too, keeps its name and
   numbers (it is stored if the lost one is); all else is sent under a new name, which no hole blocks.
5. The broker does not know what goes before the first batch (it has forgotten the producer): a new name.
6. The broker cannot remember one more producer: nothing is numbered for a while. Nothing is sent twice then, either,
   but what is unknown stays unknown.

Names and numbers that the application gives are never replaced: after a message that failed, those behind it fail.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from dledger.core.producer_names import MADE_UP_BYTES, made_up_name
from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    TooManyProducersError,
    UnknownProducerError,
)
from rocketstore.client.batch import SendBatch
from rocketstore.message.producer_names import check_producer_name

UNNUMBERED_S: Final = 60.0
"""How long nothing is numbered after a broker had no room for one more producer."""


def new_name() -> str:
    """A producer's name that nobody else has."""
    return made_up_name(secrets.token_bytes(MADE_UP_BYTES))


class Numbers:
    """Of one sender, under its lock. ``name``: the application's own, then it gives the numbers as well."""

    def __init__(self, name: str = "", *, make_name: Callable[[], str] = new_name) -> None:
        if name:
            check_producer_name(name)
        self.are_given: Final = bool(name)
        self._make_name = make_name
        self._name = name or make_name()  # empty: nothing is numbered
        self._next = 0  # of the next batch without numbers
        self._stored = 0  # the producer's numbers below are stored for sure
        self._lost = False  # a doubtful batch was given up
        self._broken: DLedgerError | None = None  # given numbers: what became of one of the messages
        self._following: int | None = None  # given numbers: that of the next message; None: any
        self._unnumbered_until = 0.0

    # -- numbering -----------------------------------------------------------------------------------------------

    def check(self, sequence: int | None) -> None:
        """A message is added that the application has given this number, or none.

        Raises ``InvalidRequestError`` and, for a number that does not follow, ``OutOfOrderSequenceError``.
        """
        if not self.are_given:
            if sequence is not None:
                raise InvalidRequestError(
                    "only messages of a producer with a name can have numbers: give producer_name"
                )
            return
        if sequence is None or sequence < 0:
            raise InvalidRequestError(
                f"every message of the producer {self._name!r} needs its number (sequence), from next_sequence() on"
            )
        if self._following is not None and sequence != self._following:
            raise OutOfOrderSequenceError(
                f"message {sequence} of producer {self._name!r} does not follow: {self._following} is next"
            )
        self._following = sequence + 1

    def begin(self, batch: SendBatch, sequence: int | None) -> None:
        """The batch's first message has the number that the application has given it, if it does."""
        if sequence is not None:
            batch.producer, batch.sequence = self._name, sequence

    def assign(self, batch: SendBatch) -> None:
        """The batch is about to be sent: number its messages unless they are."""
        if batch.sequence >= 0 or self.are_given:
            return
        if not self._name and time.monotonic() >= self._unnumbered_until:
            self._take_new_name()
        batch.producer = self._name
        if self._name:
            batch.sequence = self._next
            self._next += len(batch.left)

    @property
    def are_off(self) -> bool:
        """Whether nothing is numbered at present."""
        return not self._name

    # -- what became of them -------------------------------------------------------------------------------------

    def stored(self, batch: SendBatch) -> None:
        """Messages of the batch are stored, and so are all before them; its ``sequence`` is behind them now."""
        if batch.producer == self._name:
            self._stored = max(self._stored, batch.sequence)

    def failed(self, batch: SendBatch) -> None:
        """Nothing more is tried with the batch, and some of it is not stored for sure."""
        if self.are_given:
            self._broken = self._broken or next(one for one in batch.outcomes if isinstance(one, DLedgerError))
        elif batch.doubtful:
            self._lost = True

    # -- after a failure -----------------------------------------------------------------------------------------

    def is_broken(self, waiting: Sequence[SendBatch]) -> bool:
        """Whether the messages that wait cannot be stored any more, because one before them was not."""
        if not self.are_given:
            return False
        if self._broken is None and waiting and self._is_misplaced(waiting[0]):
            self._broken = waiting[0].error
        return self._broken is not None

    def mend(self) -> DLedgerError:
        """Begin anew with whatever number comes next; gives what all that waits fails with."""
        why, self._broken, self._following = self._broken, None, None
        return OutOfOrderSequenceError(
            f"a message before it was not stored ({why}): ask for next_sequence({self._name!r}) and go on from there"
        )

    def regroup(self, waiting: Sequence[SendBatch]) -> None:
        """Nothing is in flight, and all that is unfinished waits in this order: make the numbers fit again."""
        if self.are_given or not self._name:
            return
        head = waiting[0] if waiting else None
        if head is not None and isinstance(head.error, TooManyProducersError) and not head.doubtful:
            self._unnumbered_until = time.monotonic() + UNNUMBERED_S
            self._name = ""
            _clear(waiting)
        elif self._lost or (head is not None and self._is_misplaced(head)):
            self._take_new_name()
            _clear(waiting)
        elif any(batch.doubtful for batch in waiting):
            self._keep(waiting)
        else:
            self._next = self._stored
            _clear(waiting)

    def _is_misplaced(self, head: SendBatch) -> bool:
        """Whether the broker says that the numbers do not follow what it knows of the producer, and nothing else could.

        A doubtful batch may be told so by a broker that does not know yet that it leads no more.
        """
        return not head.doubtful and isinstance(head.error, OutOfOrderSequenceError | UnknownProducerError)

    def _keep(self, waiting: Sequence[SendBatch]) -> None:
        """Leave what continues what is stored as it is, and send the rest under a new name."""
        name, expected = self._name, self._stored
        for place, batch in enumerate(waiting):
            if batch.producer != name or batch.sequence < 0:
                continue
            if batch.sequence > expected:
                for later in waiting[place:]:
                    if later.producer == name:
                        later.forget()
                self._take_new_name()
                return
            # If it is below: something behind it is stored, so an attempt at it that nobody answered was stored, too.
            expected = max(expected, batch.sequence + len(batch.left))
        self._next = expected

    def _take_new_name(self) -> None:
        self._name = self._make_name()
        self._next = self._stored = 0
        self._lost = False


def _clear(waiting: Sequence[SendBatch]) -> None:
    """Take the numbers from all batches that are not doubtful."""
    for batch in waiting:
        if not batch.doubtful:
            batch.forget()
