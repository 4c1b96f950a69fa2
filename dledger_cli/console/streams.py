"""Server-sent events for all open pages, encoded once.

Belongs to the server's event loop. A page that does not read its events is dropped (it reconnects and gets the whole
current state); more than ``STREAMS_MAX`` pages are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Final

STREAMS_MAX: Final = 32
QUEUE_MAX: Final = 64
TICK_S: Final = 1.0
COALESCE_S: Final = 0.03
"""How long an urgent change waits for others, to be sent together."""


class TooManyStreamsError(Exception):
    """Raised when the maximum number of pages is open."""


def event(name: str, value: object) -> bytes:
    """One server-sent event."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n".encode()


class Streams:
    """Sends what changes to pages every second, and what is important at once."""

    def __init__(
        self,
        snapshot: Callable[[], dict[str, object]],
        update: Callable[[int], dict[str, object]],
        catalog: Callable[[], dict[str, object]],
        watch: Callable[[bool], None],
        limit: int = STREAMS_MAX,
    ) -> None:
        self._snapshot = snapshot
        self._update = update
        self._catalog = catalog
        self._watch = watch
        self._limit = limit
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._urgent = asyncio.Event()
        self._open = asyncio.Event()
        self._catalog_is_new = False
        self._closed = False

    @property
    def count(self) -> int:
        """The number of open pages."""
        return len(self._queues)

    def hurry(self, *, catalog: bool = False) -> None:
        """Publish soon: something important happened. Callable from any thread."""
        loop = self._loop
        if loop is None or self._closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._on_hurry, catalog)

    def close(self) -> None:
        """Close all streams. Must be called on the loop."""
        self._closed = True
        for queue in self._queues:
            _put(queue, None)
        self._open.set()
        self._urgent.set()

    def close_soon(self) -> None:
        """``close``, from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.close)

    async def run(self) -> None:
        """Publish until closed."""
        self._loop = asyncio.get_running_loop()
        while not self._closed:
            if not self._queues:
                self._open.clear()
                await self._open.wait()
                continue
            await self._wait_for_tick()
            if self._queues and not self._closed:
                self._publish()

    async def messages(self, queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        """The events of an admitted page: the whole state, then changes."""
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self.leave(queue)

    def admit(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Admit a page. Raises ``TooManyStreamsError``."""
        if self._closed or len(self._queues) >= self._limit:
            raise TooManyStreamsError(f"{len(self._queues)} pages are already open: close some")
        first = not self._queues
        self._queues.add(queue)
        if first:
            self._watch(True)
            self._number = 0
        snapshot = self._snapshot()
        number = snapshot["number"]
        self._number = max(self._number, number if first and isinstance(number, int) else 0)
        _put(queue, b"retry: 1000\n\n" + event("snapshot", snapshot) + event("catalog", self._catalog()))
        self._open.set()

    def leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Remove a closed page. Idempotent."""
        if queue in self._queues:
            self._queues.discard(queue)
            if not self._queues:
                self._watch(False)

    async def _wait_for_tick(self) -> None:
        try:
            await asyncio.wait_for(self._urgent.wait(), TICK_S)
        except TimeoutError:
            return
        if not self._closed:
            await asyncio.sleep(COALESCE_S)
        self._urgent.clear()

    def _publish(self) -> None:
        update = self._update(self._number)
        number = update["number"]
        self._number = number if isinstance(number, int) else self._number
        message = event("update", update)
        if self._catalog_is_new:
            self._catalog_is_new = False
            message += event("catalog", self._catalog())
        for queue in tuple(self._queues):
            if not _put(queue, message):
                self.leave(queue)
                _replace(queue)

    def _on_hurry(self, catalog: bool) -> None:
        self._catalog_is_new |= catalog
        self._urgent.set()


def _put(queue: asyncio.Queue[bytes | None], message: bytes | None) -> bool:
    try:
        queue.put_nowait(message)
    except asyncio.QueueFull:
        return False
    return True


def _replace(queue: asyncio.Queue[bytes | None]) -> None:
    """Close a page that is too slow, dropping its queued events."""
    while not queue.empty():
        queue.get_nowait()
    _put(queue, None)
