"""An event loop on a thread of its own, for blocking clients: runs coroutines and callbacks for other threads.

The thread is a daemon, so that a program may end without closing its clients; their owner says what is done then.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet

from dledger.errors import UnavailableError
from dledger.rpc import loops

_T = TypeVar("_T")
_CLOSED: Final = "the client is closed"
REASON: Final = (
    "this client was made before the process was forked, and works only in the parent: make a new one in the child "
    "(multiprocessing: the start method 'spawn')"
)


class LoopRunner:
    """Starts at the first use. Thread-safe. After a fork every use in the child raises ``UnavailableError``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock: threading.Lock | LostLock = threading.Lock()  # guards what follows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._posted: deque[Callable[[], object]] = deque()
        self._scheduled = False
        self._is_closed = False
        self._ending: asyncio.Task[object] | None = None
        mind_forks(self)

    def leave_behind(self) -> None:
        """See ``LeftBehind``."""
        self._lock = LostLock()

    @property
    def is_left_behind(self) -> bool:
        """Whether this is a forked child, in which the loop does not run."""
        return isinstance(self._lock, LostLock)

    @property
    def is_running(self) -> bool:
        """Whether it has been used, and not closed."""
        return self._thread is not None and not self._is_closed

    @property
    def is_current(self) -> bool:
        """Whether this is the loop's own thread, which must not wait for itself."""
        return self._thread is threading.current_thread()

    def check(self) -> None:
        """Raise ``UnavailableError`` in a forked child. Takes no lock."""
        if isinstance(self._lock, LostLock):
            self._lock.__enter__()

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop soon, in order: one wake-up for a burst. Raises ``UnavailableError``."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError(_CLOSED)
            if self._loop is None:
                self._start()
            self._posted.append(callback)
            if self._scheduled or self._loop is None:
                return
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._drain)

    def run(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the loop and wait for its result. An interrupt cancels it."""
        if self.is_current:
            raise UnavailableError("a callback of the client must not wait for the client: use another thread")
        waiting = threading.Lock()
        waiting.acquire()
        tasks: list[asyncio.Task[_T]] = []

        def start() -> None:
            task = asyncio.get_running_loop().create_task(make())
            tasks.append(task)
            task.add_done_callback(lambda _: waiting.release())

        self.post(start)
        try:
            waiting.acquire()
        except BaseException:  # Ctrl-C
            self._cancel(tasks)
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise UnavailableError(_CLOSED) from None

    def close_after(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """On the loop's own thread, which cannot wait: end the loop once this coroutine is done."""
        self._ending = asyncio.get_running_loop().create_task(make())
        self._ending.add_done_callback(lambda _: self.close())

    def join(self) -> None:
        """Wait for the end of a loop that is being closed; on its own thread, do not."""
        if self._thread is not None and not self.is_current:
            self._thread.join()

    def close(self) -> None:
        """End the loop, cancel what is left, and join the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            loop, stop, thread = self._loop, self._stop, self._thread
            if loop is not None and stop is not None and thread is not None and thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
        self.join()

    def _cancel(self, tasks: list[asyncio.Task[_T]]) -> None:
        def cancel() -> None:
            for task in tasks:
                task.cancel()

        with self._lock:
            if not self._is_closed and self._loop is not None:
                self._loop.call_soon_threadsafe(cancel)

    def _start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), name=self._name, daemon=True)
        self._thread.start()
        started.wait()

    def _main(self, started: threading.Event) -> None:
        try:
            loops.run(self._serve(started))
        finally:
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()

    def _drain(self) -> None:
        """A callback that fails is the loop's to log; those behind it still run."""
        with self._lock:
            self._scheduled = False
            posted, self._posted = self._posted, deque()
        try:
            while posted:
                posted.popleft()()
        finally:
            if posted:
                with self._lock:
                    posted.extend(self._posted)
                    self._posted = posted
                    self._scheduled = True
                asyncio.get_running_loop().call_soon(self._drain)


class LeftBehind(Protocol):
    """Something that is of no use in a forked child."""

    def leave_behind(self) -> None:
        """Called in the child, on its only thread; takes no lock."""


class LostLock:
    """A parent's clients in a forked child: their threads and connections stayed behind, and their callers are told so.

    A lock may be held by a thread that does not exist in the child. So the child gets a ``LostLock`` in its place,
    which anyone who uses the client then meets first. That costs nothing as long as nobody forks.

    Stands for a lock, also for a condition, of what was left behind.
    """

    def __enter__(self) -> Any:  # noqa: ANN401  # it never returns
        raise UnavailableError(REASON)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Never entered."""


_known: Final[WeakSet[LeftBehind]] = WeakSet()


def mind_forks(one: LeftBehind) -> None:
    """Call its ``leave_behind`` in every child that is forked while it lives."""
    _known.add(one)


def _in_child() -> None:
    for one in list(_known):
        one.leave_behind()
    _known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
