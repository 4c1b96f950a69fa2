"""How an appender's batches get their numbers, and what becomes of them when one in between is given up.

All batches are numbered one after the other under one name, at the moment in which they are sent first, and keep their
numbers when they are sent again: then the group knows what it has stored of them. When a batch is given up, what was
numbered after it cannot be stored under its number any more. If it is certain what is stored, the rest is numbered anew
from there; if not, under a new name. Only a batch that may itself be stored under its old number must not get another
one: if it turns out to be missing there, its outcome is unknown.

Where the group has no room for one more producer, batches go without numbers for a while; what is unknown then is told,
not repeated.

Nothing here waits or locks: it is called with the appender's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from dledger.client.append_batch import AppendBatch
from dledger.client.lanes import LOST, UNNUMBERED_S, new_producer_name
from dledger.client.shared import is_retried
from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    RequestTimeoutError,
    TooManyProducersError,
    UnknownProducerError,
)
from dledger.types import ProducerBatch


class Numbering:
    """The present name of an appender and its count."""

    def __init__(self) -> None:
        self._name = new_producer_name()  # empty: nothing is numbered
        self._unnumbered_until = 0.0
        self._refused = False  # there was no room for the name: nothing is stored under it
        self._next_sequence = 0
        self._stored = 0
        self._gap: int | None = None  # the lowest number that was given up, and that nothing after it was stored
        self._doubtful = False  # whether what was given up may be stored, or the group knows the name no more

    def number(self, batch: AppendBatch) -> None:
        """Give a batch its number, unless it has one."""
        if not self._name and time.monotonic() >= self._unnumbered_until:
            self._name = new_producer_name()
        if batch.producer is None and self._name:
            batch.producer = ProducerBatch(self._name, self._next_sequence, len(batch.bodies))
            self._next_sequence += len(batch.bodies)

    def finish(self, batch: AppendBatch, *, stored: bool) -> None:
        """A batch is over."""
        producer = batch.producer
        if producer is None or producer.producer != self._name:
            return
        if stored:
            end = producer.sequence + producer.count
            self._stored = max(self._stored, end)
            if self._gap is not None and self._gap < end:  # it was stored after all: nothing is stored across a gap
                self._gap, self._doubtful = None, False
        else:
            self._note_gap(producer.sequence)
            self._doubtful = self._doubtful or batch.uncertain

    def _note_gap(self, sequence: int) -> None:
        self._gap = sequence if self._gap is None else min(self._gap, sequence)

    def judge(self, batch: AppendBatch, error: DLedgerError) -> DLedgerError | None:
        """What a batch ends with after a failed attempt; None: it is sent again."""
        if batch.producer is None:
            return None if is_retried(error) else error
        if isinstance(error, TooManyProducersError) and not batch.uncertain:
            self._refused = True
            return None
        if error.outcome == "unknown" and not isinstance(error, InvalidRequestError):
            batch.uncertain = True
            return None
        if not isinstance(error, LOST):
            final = None if is_retried(error) else error
        elif not batch.sent_alone:
            final = None  # because of an earlier one, which is sent again first
        elif batch.uncertain:
            final = error
        else:
            if batch.producer is not None:
                self._note_gap(batch.producer.sequence)
            self._doubtful = self._doubtful or isinstance(error, UnknownProducerError)
            final = None
        if final is not None and batch.uncertain:
            return RequestTimeoutError(f"it is not known whether the append was stored: {final}")
        return final

    def close_gaps(self, batches: Iterable[AppendBatch]) -> None:
        """Number anew what was numbered across a gap; nothing is under way, and this is all that is to be sent."""
        numbered = [batch for batch in batches if batch.producer is not None]
        if self._refused:
            self._go_without([batch for batch in numbered if not batch.uncertain])
            return
        if self._gap is None or any(batch.uncertain for batch in numbered):
            return
        for batch in numbered:
            batch.producer = None
        if self._doubtful:
            self._name, self._stored = new_producer_name(), 0
        self._next_sequence = self._stored
        self._gap, self._doubtful = None, False

    def _go_without(self, certain: Iterable[AppendBatch]) -> None:
        """Send without numbers for a while, also those numbered batches that are certainly not stored."""
        for batch in certain:
            batch.producer = None
        self._name, self._next_sequence, self._stored = "", 0, 0
        self._unnumbered_until = time.monotonic() + UNNUMBERED_S
        self._gap, self._doubtful, self._refused = None, False, False
