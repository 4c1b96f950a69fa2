"""Results of sent items, which cost next to nothing until they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from dledger.errors import DLedgerError, InvariantError
from dledger.sending.batch import OutgoingBatch, ResultT

SelfT = TypeVar("SelfT", bound="SentItem[Any]")
AnyBatch = OutgoingBatch[Any, ResultT]
NO_OUTCOME: Final = InvariantError("done, but without an outcome")


def wait_for(batch: AnyBatch[Any], timeout_s: float | None) -> None:
    """Return when the batch is done. Raises ``TimeoutError`` after ``timeout_s``; every batch has a deadline anyway."""
    if batch.done:
        return
    waiting = threading.Lock()
    waiting.acquire()
    batch.when_done(waiting.release)
    patience_s = -1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
    if not waiting.acquire(timeout=patience_s) and not batch.done:
        with suppress(ValueError):  # announced just now
            batch.callbacks.remove(waiting.release)  # repeated waits leave nothing behind
        raise TimeoutError(f"no outcome after {timeout_s} s")


class SentItem(Generic[ResultT]):
    """The result of one item; it shares its batch's state."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: AnyBatch[ResultT], place: int) -> None:
        self._batch = batch
        self._place = place

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._batch.done

    def result(self, timeout: float | None = None) -> ResultT:
        """Where the item is stored; raises its error, or ``TimeoutError`` if there is none within ``timeout`` seconds.

        It ends even without ``timeout``: every item has a deadline.
        """
        batch = self._batch
        if not batch.done:
            wait_for(batch, timeout)
        outcome = batch.outcomes[self._place]
        if isinstance(outcome, DLedgerError):
            raise outcome
        if outcome is None:
            raise NO_OUTCOME
        return outcome

    def exception(self, timeout: float | None = None) -> DLedgerError | None:
        """The item's error, or None; waits like ``result``."""
        batch = self._batch
        if not batch.done:
            wait_for(batch, timeout)
        outcome = batch.outcomes[self._place]
        return outcome if isinstance(outcome, DLedgerError) else None

    def add_done_callback(self: SelfT, callback: Callable[[SelfT], object]) -> None:
        """Call ``callback(self)`` when the item is done, on the client's thread (or immediately if it is done).

        It must not block; it may add more items, and close the sender. Exceptions are logged.
        """
        self._batch.when_done(lambda: callback(self))
