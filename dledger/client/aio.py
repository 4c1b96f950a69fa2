"""The client for asyncio: the same calls as ``DLedgerClient``, as coroutines and asynchronous iterators."""

from __future__ import annotations

from dledger.client.aio_calls import AsyncCalls
from dledger.client.appender import AppenderOptions, AsyncAppender
from dledger.config import MIB


class AsyncDLedgerClient(AsyncCalls):
    """As ``DLedgerClient``. Belongs to the event loop it is first used on; not for several threads."""

    async def close(self) -> None:
        """Close every connection; calls under way fail. Idempotent."""
        self._seeker.close()
        await super().close()

    def appender(
        self,
        *,
        linger_ms: float = 2,
        batch_bytes: int = MIB // 2,
        batch_entries: int = 1024,
        pending_bytes_max: int = 8 * MIB,
        inflight_entries_max: int = 4096,
        timeout_s: float | None = None,
        retry_unknown: bool = False,
    ) -> AsyncAppender:
        """See ``DLedgerClient.appender``. Use with ``async with``."""
        settings = AppenderOptions(
            linger_s=linger_ms / 1000,
            batch_bytes=batch_bytes,
            batch_entries=batch_entries,
            pending_bytes_max=pending_bytes_max,
            inflight_entries_max=inflight_entries_max,
            timeout_s=self._timeout_s(timeout_s),
            retry_unknown=retry_unknown,
            idempotent=self._idempotent,
        )
        return AsyncAppender(self._links, settings)
