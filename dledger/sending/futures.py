"""Results of sent items, which cost next to nothing until they are read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from dledger.errors import DLedgerError, InvariantError
from dledger.sending.batch import OutgoingBatch, ResultT

_ItemT = TypeVar("_ItemT", bound="SentItem[Any]")
AnyBatch = OutgoingBatch[Any, ResultT]
_NO_OUTCOME: Final = InvariantError("done, but without an outcome")


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


async def wait_for_batch(batch: OutgoingBatch[Any, Any]) -> None:
    """Return when the batch is done (it has a deadline). Call it on the loop of its sender."""
    if not batch.done:
        waiting = asyncio.Event()
        batch.when_done(waiting.set)
        await waiting.wait()


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
            raise _NO_OUTCOME
        return outcome

    def exception(self, timeout: float | None = None) -> DLedgerError | None:
        """The item's error, or None; waits like ``result``."""
        batch = self._batch
        if not batch.done:
            wait_for(batch, timeout)
        outcome = batch.outcomes[self._place]
        return outcome if isinstance(outcome, DLedgerError) else None

    def add_done_callback(self: _ItemT, callback: Callable[[_ItemT], object]) -> None:
        """Call ``callback(self)`` when the item is done, on the client's thread (or immediately if it is done).

        It must not block; it may add more items, and close the sender. Exceptions are logged.
        """
        self._batch.when_done(lambda: callback(self))


class AsyncSentItem(SentItem[ResultT]):
    """The result of one item: await it, or read it once ``done``."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, ResultT]:
        yield from wait_for_batch(self._batch).__await__()
        return self.result()

    def result(self, timeout: float | None = 0.0) -> ResultT:
        """Where the item is stored; raises its error, or ``TimeoutError`` if it is not done: await it instead."""
        return super().result(timeout)

    def exception(self, timeout: float | None = 0.0) -> DLedgerError | None:
        """The item's error, or None; raises ``TimeoutError`` if it is not done."""
        return super().exception(timeout)


class AsyncSentMany(Generic[ResultT]):
    """The results of many items added together: one wait, one outcome per item on request."""

    __slots__ = ("_spans",)

    def __init__(self, spans: list[tuple[OutgoingBatch[Any, ResultT], int, int]]) -> None:
        self._spans = spans  # batches, the place of the first item in each, and the number of items

    def __len__(self) -> int:
        return sum(count for _, _, count in self._spans)

    def done(self) -> bool:
        """Whether all items are done."""
        return all(batch.done for batch, _, _ in self._spans)

    async def outcomes(self) -> list[ResultT | DLedgerError]:
        """Each item's place or error, in the order in which they were added."""
        found: list[ResultT | DLedgerError] = []
        for batch, place, count in self._spans:
            await wait_for_batch(batch)
            found += [_NO_OUTCOME if one is None else one for one in batch.outcomes[place : place + count]]
        return found

    async def results(self) -> list[ResultT]:
        """Each item's place; raises the first error among them."""
        found: list[ResultT] = []
        for outcome in await self.outcomes():
            if isinstance(outcome, DLedgerError):
                raise outcome
            found.append(outcome)
        return found
