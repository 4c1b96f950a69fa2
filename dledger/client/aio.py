"""The client for asyncio: the same calls as ``DLedgerClient``, as coroutines and asynchronous iterators."""

from __future__ import annotations

from dledger.client.aio_calls import AsyncCalls


class AsyncDLedgerClient(AsyncCalls):
    """As ``DLedgerClient``. Belongs to the event loop it is first used on; not for several threads."""

    async def close(self) -> None:
        """Close every connection; calls under way fail. Idempotent."""
        self._seeker.close()
        await super().close()
