"""Pipelined appends: thousands of cheap calls become few requests, in order, even across leader changes."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final

from dledger.client.appends import INFLIGHT_REQUESTS_MAX, RULES
from dledger.client.shared import AppendResult
from dledger.records import record
from dledger.sending.aio import AsyncLinks, AsyncSender
from dledger.sending.aio_futures import AsyncSentItem, AsyncSentMany
from dledger.sending.batch import ITEM_OVERHEAD_BYTES
from dledger.sending.futures import SentItem, SentMany
from dledger.sending.numbering import ProducerNumbering
from dledger.sending.threads import Links, Sender
from dledger.sending.window import Window, WindowOptions
from dledger.values import MIB

ENTRY_OVERHEAD_BYTES: Final = ITEM_OVERHEAD_BYTES
AppendFuture = SentItem[AppendResult]
AppendManyFuture = SentMany[AppendResult]


@record(frozen=True, slots=True)
class AppenderOptions:
    """See ``Appender``."""

    linger_s: float = 0.002
    batch_bytes: int = MIB // 2
    batch_entries: int = 1024
    pending_bytes_max: int = 8 * MIB
    inflight_entries_max: int = 4096
    timeout_s: float = 5.0
    retry_unknown: bool = False
    idempotent: bool = True

    def window(self) -> Window[None, AppendResult]:
        """A new window with these settings."""
        options = WindowOptions(
            linger_ms=self.linger_s * 1000.0,
            batch_bytes=self.batch_bytes,
            batch_items=self.batch_entries,
            pending_bytes_max=self.pending_bytes_max,
            inflight_requests_max=INFLIGHT_REQUESTS_MAX,
            inflight_items_max=self.inflight_entries_max,
            timeout_ms=self.timeout_s * 1000.0,
            retry_unknown=self.retry_unknown,
        )
        return Window(options, RULES, ProducerNumbering() if self.idempotent else None)


class Appender:
    """Use as a context manager; made by ``DLedgerClient.appender``.

    Entries are stored once, in the order of the ``append`` calls. An entry is sent again until ``timeout_s`` after it
    was added; it then fails, with ``outcome="unknown"`` unless every attempt was refused for certain. Without
    idempotence, an entry with an unknown outcome fails at once, or with ``retry_unknown`` is sent again, so that it may
    be in the log twice (at-least-once). ``append`` blocks while ``pending_bytes_max`` bytes are pending, at most for
    ``timeout_s``; each entry counts its body and ``ENTRY_OVERHEAD_BYTES``.

    Leaving the context (or ``close``) waits for everything; errors are reported by the futures only, and counted in
    ``failed_entries``.
    """

    def __init__(self, links: Links[None, AppendResult], options: AppenderOptions) -> None:
        self._sender = Sender(links, options.window(), "dledger-appender")

    def __enter__(self) -> Appender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failed_entries(self) -> int:
        """How many entries have failed so far."""
        return self._sender.failed_items

    @property
    def full(self) -> bool:
        """Whether ``append`` would block now."""
        return self._sender.is_full

    def append(self, body: bytes) -> AppendFuture:
        """Queue one entry. Raises ``PendingFullError`` if the queue stays full too long (nothing was queued)."""
        return SentItem(*self._sender.put(body))

    def append_many(self, bodies: Sequence[bytes]) -> AppendManyFuture:
        """Queue many entries in order, much more cheaply than with ``append``.

        Raises ``PendingFullError`` like ``append``; the first of them may have been queued then.
        """
        return SentMany(self._sender.add_many(bodies))

    def flush(self) -> None:
        """Return when everything appended so far has succeeded or failed."""
        self._sender.flush()

    def close(self) -> None:
        """Flush, then end the thread and the stream. Idempotent."""
        self._sender.close()


class AsyncAppender:
    """``Appender`` for asyncio: ``future = await appender.append(body)``, then ``result = await future``."""

    def __init__(self, links: AsyncLinks[None, AppendResult], options: AppenderOptions) -> None:
        self._sender = AsyncSender(links, options.window(), "dledger-appender")

    async def __aenter__(self) -> AsyncAppender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def failed_entries(self) -> int:
        """How many entries have failed so far."""
        return self._sender.failed_items

    async def append(self, body: bytes) -> AsyncSentItem[AppendResult]:
        """Queue one entry; waits only while too much is pending (``PendingFullError`` if that takes too long)."""
        return AsyncSentItem(*await self._sender.add(body))

    async def append_many(self, bodies: Sequence[bytes]) -> AsyncSentMany[AppendResult]:
        """See ``Appender.append_many``."""
        return AsyncSentMany(await self._sender.add_many(bodies))

    async def flush(self) -> None:
        """See ``Appender.flush``."""
        await self._sender.flush()

    async def close(self) -> None:
        """See ``Appender.close``."""
        await self._sender.close()
