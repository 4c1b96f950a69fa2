"""Event loops under a seed: ``asyncio`` itself, on the scheduler's time and on links of ``links`` instead of sockets.

Tasks, streams, time-outs and locks of ``asyncio`` are the real ones. What is ours is where a loop waits, what time it
is, and what connects it with others; so the product's code on event loops runs as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from tests.sim_store import links, threads
from tests.sim_store.threads import Killed, Waiter, running

_T = TypeVar("_T")
_CLOSES_MAX: Final = 100
"""A coroutine that waits while it is being closed is closed again; so often at most."""


class SimLoop(asyncio.BaseEventLoop):
    """One thread's."""

    def __init__(self) -> None:
        super().__init__()
        self._scheduler = running()
        self._group = self._scheduler.current.group
        self._selector = self  # what ``BaseEventLoop`` asks for events
        self._clock_resolution = 1e-6
        self._waiter: Waiter | None = None

    def time(self) -> float:
        """Virtual, in seconds."""
        return self._scheduler.now_us / 1_000_000

    def select(self, timeout_s: float | None) -> tuple[()]:
        """Wait until there is something to do, or for so long."""
        scheduler = self._scheduler
        if timeout_s is not None and timeout_s <= 0:
            scheduler.point(scheduler.preempt)
            return ()
        waiter = self._waiter = Waiter(scheduler.current)
        try:
            scheduler.block(waiter, None if timeout_s is None else int(timeout_s * 1_000_000) + 1)
        finally:
            self._waiter = None
        return ()

    def _process_events(self, event_list: object) -> None:
        """There are none: whoever has something for this loop calls it."""

    def _write_to_self(self) -> None:
        if self._waiter is not None:
            self._scheduler.wake(self._waiter)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody caught ends the process, unless it is dead."""
        error, group = context.get("exception"), self._group
        if group is not None and not group.dead and error is not None and not isinstance(error, Killed):
            group.failure = group.failure or error

    def remove_reader(self, _fd: object) -> bool:
        """There are no descriptors."""
        return False

    def run_in_executor(  # type: ignore[override]  # of one executor, whose threads are not counted
        self, executor: None, func: Callable[..., _T], *args: object
    ) -> asyncio.Future[_T]:
        """On a thread of its own."""
        future: asyncio.Future[_T] = self.create_future()

        def settle(value: _T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)  # type: ignore[arg-type]  # there is one, if there is no error
            else:
                future.set_exception(error)

        def work() -> None:
            value, failure = None, None
            try:
                value = func(*args)
            except Exception as error:  # noqa: BLE001 - given to who waits for it
                failure = error
            if not self.is_closed():
                self.call_soon_threadsafe(settle, value, failure)

        threads.Thread(target=work, name="executor").start()
        return future

    async def getaddrinfo(  # type: ignore[override]  # as far as it is used
        self, host: str, port: int, **_: object
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        """A machine's name is its address."""
        return [(0, 0, 0, "", (host, port))]

    async def create_connection(  # type: ignore[override]  # as far as it is used
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: object
    ) -> tuple[links.End, asyncio.BaseProtocol]:
        """A link to whoever listens there. Raises ``OSError``."""
        return await links.network().dial(self, protocol_factory, port)

    async def create_server(  # type: ignore[override]  # as far as it is used
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *_: object, sock: links.Listening, **__: object
    ) -> links.Listening:
        """Accept links at a port."""
        sock.open(self, protocol_factory)
        return sock

    def finish(self) -> None:
        """End what is left, here and now, and close."""
        for _ in range(_CLOSES_MAX):
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it ends with its process
                _close(task.get_coro())
        self._ready.clear()  # type: ignore[attr-defined]  # of ``BaseEventLoop``
        self.close()


def _close(work: Any) -> None:  # noqa: ANN401  # a coroutine, of any kind
    """End a coroutine where it stands, however often it wants to wait meanwhile."""
    for _ in range(_CLOSES_MAX):
        try:
            work.close()
        except (RuntimeError, Killed):
            continue
        return


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run``."""
    loop = SimLoop()
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task)
    finally:
        group = loop._group
        if group is None or not group.dead:
            _cancel_all(loop)
        loop.finish()


def _cancel_all(loop: SimLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in sorted(left, key=lambda one: one.get_name()):
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


class Answer:
    """What ``run_coroutine_threadsafe`` gives."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: SimLoop) -> None:
        self._ended = threads.Event()
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._loop = loop
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda _: self._ended.set())

    def result(self) -> Any:  # noqa: ANN401  # whatever the work gives
        """Wait for it."""
        try:
            self._ended.wait()
        except Killed:
            if self._task is None:
                with suppress(RuntimeError, Killed):
                    self._work.close()
            raise
        assert self._task is not None
        return self._task.result()


def fake_asyncio() -> SimpleNamespace:
    """``asyncio`` for the product."""
    return SimpleNamespace(**{**vars(asyncio), "run": run, "run_coroutine_threadsafe": Answer})
