"""``SendFuture`` and ``SendManyFuture`` for asyncio, to be awaited."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dledger.errors import DLedgerError
from dledger.sending.aio_futures import AsyncSentItem, AsyncSentMany, wait_for_batch
from dledger.sending.futures import NO_OUTCOME
from rocketstore.client.receipts import SendReceipt
from rocketstore.client.sends import receipt_of


class AsyncSendFuture(AsyncSentItem[Any]):
    """The result of one message: await it, or call ``result`` once ``done``."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, SendReceipt]:
        yield from super().__await__()
        return self.result()

    def result(self, timeout: float | None = 0.0) -> SendReceipt:
        """The message's receipt; raises its error, or ``TimeoutError`` if it is not done: await it instead."""
        return receipt_of(super().result(timeout), self._batch.items[self._place])


class AsyncSendManyFuture(AsyncSentMany[Any]):
    """The results of many messages that were queued together: one future, with a receipt for each on request."""

    __slots__ = ()

    async def outcomes(self) -> list[SendReceipt | DLedgerError]:
        """A receipt or an error for each message, in order; waits for all."""
        found: list[SendReceipt | DLedgerError] = []
        for batch, first, count in self._spans:
            await wait_for_batch(batch)
            for place in range(first, first + count):
                outcome = batch.outcomes[place] or NO_OUTCOME
                found.append(outcome if isinstance(outcome, DLedgerError) else receipt_of(outcome, batch.items[place]))
        return found
