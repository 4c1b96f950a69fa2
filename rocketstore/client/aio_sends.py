"""``SendFuture`` and ``SendManyFuture`` for asyncio: to be awaited."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dledger.errors import DLedgerError
from dledger.sending.aio_futures import AsyncSentItem, AsyncSentMany, wait_for_batch
from dledger.sending.futures import NO_OUTCOME
from rocketstore.client.receipts import SendReceipt
from rocketstore.client.sends import receipt_of


class AsyncSendFuture(AsyncSentItem[Any]):
    """The result of one message: to be awaited, or asked once ``done``."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, SendReceipt]:
        yield from super().__await__()
        return self.result()

    def result(self, timeout: float | None = 0.0) -> SendReceipt:
        """Where the message is; raises its error, or ``TimeoutError`` if it is not done: await it instead."""
        return receipt_of(super().result(timeout), self._batch.items[self._place])


class AsyncSendManyFuture(AsyncSentMany[Any]):
    """The results of many messages that were given together: one thing to wait for, a receipt for each on request."""

    __slots__ = ()

    async def outcomes(self) -> list[SendReceipt | DLedgerError]:
        """A receipt for each, or why it is not stored, in the order in which they were given; waits for all."""
        found: list[SendReceipt | DLedgerError] = []
        for batch, first, count in self._spans:
            await wait_for_batch(batch)
            for place in range(first, first + count):
                outcome = batch.outcomes[place] or NO_OUTCOME
                found.append(outcome if isinstance(outcome, DLedgerError) else receipt_of(outcome, batch.items[place]))
        return found
