"""Reads messages of one queue: those in memory at once, others on a read thread.

Waiting for messages, and room for the answers that carry them, are the callers' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

from dledger.errors import InvalidRequestError
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.filter.filters import SQL92, TAG, Filters, MessageFilter
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetResult

_P = ParamSpec("_P")
_T = TypeVar("_T")
ALL = frozenset({"", "*"})
"""Expressions of tags that mean every message."""


class ReadLimits(NamedTuple):
    """How much one read returns at most; of at least one message, whatever its size."""

    messages: int
    size_bytes: int


class QueueReading:
    """On the loop. ``group`` counts for statistics; empty: nobody consumes what is read."""

    def __init__(self, store: MessageStore, readers: ReadThreads) -> None:
        self._store = store
        self._readers = readers

    async def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        wanted: MessageFilter | None,
        limits: ReadLimits,
        group: str = "",
    ) -> GetResult:
        """The messages from ``offset`` on that pass the filter ``wanted`` (None: all). Raises ``CorruptLogError``."""
        found = self.at_once(topic, queue_id, offset, limits, group) if wanted is None else None  # a filter reads much
        if found is not None:
            return found
        return await self._readers.run(
            self._store.get,
            topic,
            queue_id,
            offset,
            max_count=limits.messages,
            max_bytes=limits.size_bytes,
            matches_tags=_matches_code(wanted),
            matches_record=wanted.matches_record if wanted else None,
            group=group,
        )

    def at_once(self, topic: str, queue_id: int, offset: int, limits: ReadLimits, group: str = "") -> GetResult | None:
        """All messages from ``offset`` on, if that takes no read thread; None if ``read`` must decide."""
        count, size = limits
        return self._store.get_at_once(topic, queue_id, offset, max_count=count, max_bytes=size, group=group)

    async def end(self, topic: str, queue_id: int) -> int:
        """The offset after the queue's last message; 0 if there is no such queue."""
        return await self._readers.run(self._store.max_offset, topic, queue_id)

    async def stored_since(self, topic: str, queue_id: int, time_ms: int) -> int:
        """The offset of the first message stored at that time (ms since 1970) or later; the queue's end if there is
        none. Raises ``CorruptLogError``.
        """
        return await self._readers.run(self._store.offset_by_time, topic, queue_id, time_ms)

    def begin_at_once(self, topic: str, queue_id: int) -> int:
        """The offset of the queue's first message, without a change of thread."""
        return max(self._store.min_offset(topic, queue_id), 0)

    def end_at_once(self, topic: str, queue_id: int) -> int:
        """The same, without a change of thread."""
        return self._store.max_offset(topic, queue_id)


def _matches_code(wanted: MessageFilter | None) -> Callable[[int], bool] | None:
    return None if wanted is None or wanted.codes is None else wanted.codes.__contains__


class ReadThreads:
    """Threads for reads that may wait for a disk, which the event loop must not do.

    At most ``count`` threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._under_way = 0
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="rocketstore-read")

    async def run(self, read: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of ``read``."""
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, partial(read, *args, **kwargs))
        finally:
            self._under_way -= 1

    @property
    def waiting(self) -> int:
        """Reads for which no thread is free."""
        return max(0, self._under_way - self._count)

    def close(self) -> None:
        """Join the threads."""
        self._executor.shutdown(wait=True)


class RecordReader:
    """Reads messages at places in the log that clients name."""

    def __init__(self, store: MessageStore, threads: ReadThreads) -> None:
        self._store = store
        self._threads = threads

    async def at(self, offset: int) -> bytes | None:
        """The record that begins at this offset; None if none does."""
        return await self._threads.run(self._store.read_record, offset) if offset >= 0 else None


class SubscriptionFilters:
    """Consumers' subscriptions as filters, and which of them this broker serves.

    On the loop.
    """

    def __init__(self, live: LiveConfig, readers: ReadThreads) -> None:
        self._live = live
        self._readers = readers
        self._filters = Filters()

    @property
    def errors(self) -> int:
        """How often a message was not delivered because its filter had no result; may be read on any thread."""
        return self._filters.errors

    async def of(self, kind: str, expression: str) -> MessageFilter | None:
        """The filter of a subscription of this kind; None: all messages.

        A condition that is new is parsed on a read thread. Raises ``Refusal``.
        """
        if kind in ("", TAG) and expression in ALL:
            return None
        self.require_kind(kind)
        try:
            if kind != SQL92 or self._filters.is_known(kind, expression):
                return self._filters.of(kind, expression)
            return await self._readers.run(self._filters.of, kind, expression)
        except InvalidRequestError as error:
            raise Refusal(RefusalKind.WRONG_FILTER, str(error)) from error

    def require_kind(self, kind: str) -> None:
        """Raises ``Refusal``, in RocketMQ's words, for filters that this broker does not have."""
        if kind not in ("", TAG, SQL92) or (kind == SQL92 and not self._live.now.enable_property_filter):
            reason = f"The broker does not support consumer to filter message by {kind[:64]}"
            if kind == SQL92:
                reason += " (enablePropertyFilter)"
            raise Refusal(RefusalKind.INVALID, reason)
