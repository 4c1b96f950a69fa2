"""The client for asyncio: the same calls as ``DLedgerClient``, as coroutines and asynchronous iterators."""

from __future__ import annotations

from dledger.client.aio_append_calls import AsyncAppendCalls


class AsyncDLedgerClient(AsyncAppendCalls):
    """``DLedgerClient`` for asyncio, bound to the event loop of its first use; not thread-safe."""

    async def close(self) -> None:
        """Close every connection; calls in progress fail. Idempotent."""
        self._seeker.close()
        await super().close()
