"""Threads for reads that may wait for a disk, which the event loop must not do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from rocketstore.store.message_store import MessageStore

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ReadThreads:
    """At most ``count`` threads."""

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
