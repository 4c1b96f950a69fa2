"""One event loop thread per process for all client servers in it.

``grpc.aio`` has a single poller per process, whose events any loop may pick up: with several loops each event takes a
detour over the wrong one, and one for a loop that was closed meanwhile is an error in the log. A process normally runs
one node; tests and demos that run several share the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from dledger.errors import InvariantError

_T = TypeVar("_T")


class LoopThread:
    """Use ``lease`` and ``release``; the thread ends with the last user."""

    _lock: ClassVar[threading.Lock] = threading.Lock()  # guards _current and its _users
    _current: ClassVar[LoopThread | None] = None

    def __init__(self) -> None:
        self._users = 0
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="dledger-client-rpc")
        self._thread.start()
        self._ready.wait()

    @classmethod
    def lease(cls) -> LoopThread:
        """The process's loop thread, started if need be; ``release`` it once."""
        with cls._lock:
            if cls._current is None:
                cls._current = LoopThread()
            cls._current._users += 1
            return cls._current

    def release(self) -> None:
        """Give it back; joins the thread if nobody else uses it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            LoopThread._current = None
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and wait for it; not from the loop's own thread."""
        if self._loop is None or threading.current_thread() is self._thread:
            work.close()
            raise InvariantError("the loop thread cannot wait for itself")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
