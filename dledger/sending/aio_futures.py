"""``futures`` for asyncio: awaitable results."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Generic

from dledger.errors import DLedgerError
from dledger.sending.batch import OutgoingBatch, ResultT
from dledger.sending.futures import NO_OUTCOME, SentItem


async def wait_for_batch(batch: OutgoingBatch[Any, Any]) -> None:
    """Return when the batch is done (it has a deadline). Call it on the loop of its sender."""
    if not batch.done:
        waiting = asyncio.Event()
        batch.when_done(waiting.set)
        await waiting.wait()


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
            found += [NO_OUTCOME if one is None else one for one in batch.outcomes[place : place + count]]
        return found

    async def results(self) -> list[ResultT]:
        """Each item's place; raises the first error among them."""
        found: list[ResultT] = []
        for outcome in await self.outcomes():
            if isinstance(outcome, DLedgerError):
                raise outcome
            found.append(outcome)
        return found
