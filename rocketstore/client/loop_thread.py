"""The thread on which blocking clients run their asyncio counterparts: one for all clients of a process.

It starts with the first client, and ends with the last one. A forked child has none: clients made before the fork say
so there. At the interpreter's end, clients that are still open are closed, which sends what they have pending.

A caller waits for a bare lock, and never while it holds another one: so a signal handler may use, and close, the client
that its thread is waiting for, and an interrupted wait (Ctrl-C) leaves nothing behind but a cancelled call.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, Never, Protocol, TypeVar

import uvloop

from rocketstore.client.aio.errors import OTHER_PROCESS, ClientClosedError

_log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
"""How often a caller that waits makes sure that the thread is alive."""
_T = TypeVar("_T")


class AsyncClient(Protocol):
    """A client that the thread runs."""

    async def close(self) -> None:
        """Finish, for a bounded time, and close every connection."""


class ClientThread:
    """An event loop on a thread of its own, until ``stop``."""

    def __init__(self) -> None:
        self.loop: Final = uvloop.new_event_loop()
        self.is_left_behind = False
        """Whether this is a forked child, and the thread has stayed in its parent."""
        self._posting = threading.RLock()  # guards _is_over; also in signal handlers, on the thread that has it
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rocketmq-clients", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine on the loop. An interrupted wait cancels it. Not for the loop's own thread."""
        if threading.get_ident() == self._thread.ident:
            work.close()
            raise RuntimeError("a callback of a client must not wait for it: hand the work to another thread")
        call = _Call(work)
        try:
            self.post(call.begin)
        except ClientClosedError:
            work.close()
            raise
        try:
            while not call.done.acquire(timeout=LOOK_S):
                self._check_alive()
        except BaseException:
            with suppress(ClientClosedError):
                self.post(call.cancel)
            raise
        return call.result()

    def post(self, callback: Callable[[], object]) -> None:
        """Call it on the loop soon. From any thread, and from signal handlers. Raises ``ClientClosedError``."""
        with self._posting:
            if self._is_over:
                raise ClientClosedError("this client is closed")
            self.loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """End the thread once it has nothing to do at once; tasks that run there are cancelled."""
        if threading.get_ident() != self._thread.ident:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _check_alive(self) -> None:
        if not self._thread.is_alive():
            raise ClientClosedError("this client was closed meanwhile")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            with self._posting:
                self._is_over = True
            self.loop.run_until_complete(asyncio.sleep(0))  # begins what was posted until now
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


class _Call(Generic[_T]):
    """One coroutine on the loop, and the caller that waits for it."""

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        self._work = work
        self._task: asyncio.Task[_T] | None = None
        self._is_cancelled = False
        self.done = threading.Lock()
        self.done.acquire()

    def begin(self) -> None:
        if self._is_cancelled:
            self._work.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def result(self) -> _T:
        assert self._task is not None, "it is done"
        try:
            return self._task.result()
        except asyncio.CancelledError as error:
            raise ClientClosedError("this client was closed meanwhile") from error

    def _ended(self, task: asyncio.Task[_T]) -> None:
        if self._is_cancelled and not task.cancelled():
            task.exception()  # nobody waits for it any more
        self.done.release()


class SharedLoop:
    """The one thread of this process, and the clients that use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the fields below; also in signal handlers, on the thread that has it
        self._thread: ClientThread | None = None
        self._clients: set[AsyncClient] = set()

    def open(self, client: AsyncClient) -> ClientThread:
        """The thread, for a client that is open from now on."""
        with self._lock:
            if self._thread is None:
                self._thread = ClientThread()
            self._clients.add(client)
            return self._thread

    def close(self, client: AsyncClient) -> None:
        """Close a client, for a bounded time; the thread ends with the last one. Idempotent."""
        with self._lock:
            thread = self._thread
            if thread is None or client not in self._clients:
                return
        with suppress(ClientClosedError):  # another thread closes it, too
            thread.run(client.close())
        with self._lock:
            self._clients.discard(client)
            is_last = not self._clients and self._thread is thread
            if is_last:
                self._thread = None
        if is_last:
            thread.stop()

    def close_later(self, client: AsyncClient) -> None:
        """Close a client that nobody has any more. From the garbage collector: without waiting."""
        with self._lock:
            thread = self._thread if client in self._clients else None
        if thread is not None:
            thread.post(lambda: self._begin_to_close(client))

    def close_all(self) -> None:
        """At the interpreter's end: submitted messages are sent, for a bounded time."""
        for client in tuple(self._clients):
            try:
                self.close(client)
            except Exception:  # noqa: BLE001  # the others are closed all the same
                _log.exception("a client cannot be closed at the end of the program")

    def forget(self) -> None:
        """In a forked child: the thread has stayed behind."""
        self._lock = threading.RLock()
        if self._thread is not None:
            self._thread.is_left_behind = True
        self._thread = None
        self._clients = set()

    def _begin_to_close(self, client: AsyncClient) -> None:
        task = asyncio.get_running_loop().create_task(self._close(client))
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def _close(self, client: AsyncClient) -> None:
        try:
            await client.close()
        finally:
            with self._lock:
                self._clients.discard(client)
                is_last = not self._clients
                if is_last:
                    self._thread = None
            if is_last:
                asyncio.get_running_loop().stop()


_closing: Final[set[asyncio.Task[None]]] = set()
SHARED: Final = SharedLoop()
atexit.register(SHARED.close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.forget)


class BlockingClient:
    """Runs an asyncio client on the shared thread, until ``close``. The base of the blocking clients."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._thread = SHARED.open(client)
        self._is_closed = False

    def close(self) -> None:
        """Finish what is pending, for a bounded time, and close every connection. Idempotent.

        It may be called in a signal handler, also of the thread that waits for this client.
        """
        self._is_closed = True
        if not self._thread.is_left_behind:
            SHARED.close(self._client)

    def __reduce__(self) -> Never:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: make one in each process")

    def __del__(self) -> None:
        if not (getattr(self, "_is_closed", True) or self._thread.is_left_behind):
            SHARED.close_later(self._client)

    def _check(self) -> None:
        """Raises ``ClientClosedError``, also in a forked child."""
        if self._thread.is_left_behind:
            raise ClientClosedError(OTHER_PROCESS)
        if self._is_closed:
            raise ClientClosedError("this client is closed")

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a call of the client. Raises ``ClientClosedError``."""
        try:
            self._check()
        except ClientClosedError:
            work.close()
            raise
        return self._thread.run(work)
