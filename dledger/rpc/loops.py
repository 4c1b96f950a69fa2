"""The event loop of servers, and of clients that have none: uvloop's.

It runs the same code as asyncio's own loop in less processor time; differences are in docs/decisions.md.

``LoopBridge`` connects other threads to a loop: one wake-up per burst, however many callbacks it has.

``LoopRunner`` is a loop on a thread of its own, for blocking clients: it runs coroutines and callbacks for other
threads. The thread is a daemon, so that a program may end without closing its clients; their owner says what is done
then.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar, cast
from weakref import WeakSet

import uvloop

from dledger.errors import InvariantError, UnavailableError
from dledger.rpc.ports import CommitEvent, LogNode, NodeEvent, RoleEvent
from dledger.types import NO_INDEX, LogIndex

_T = TypeVar("_T")
_P = TypeVar("_P", bound=asyncio.BaseProtocol)


def run(main: Coroutine[object, object, _T]) -> _T:
    """``asyncio.run`` on that loop; on any thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def connect(
    factory: Callable[[], _P],
    host: str,
    port: int,
    *,
    context: ssl.SSLContext | None = None,
    handshake_s_max: float | None = None,
) -> tuple[asyncio.Transport, _P]:
    """The loop's ``create_connection``, which may be given up at any time. Raises ``OSError``.

    uvloop's own would log an error of a look-up that was given up, whenever it comes, as one that nobody has asked for;
    and a connection that is given up in the turn in which its handshake ends would wait for the other side's end of
    TLS, perhaps until the loop is closed under it.
    """
    loop = asyncio.get_running_loop()
    addresses = [host]
    if not _is_address(host):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    failures: list[OSError] = []
    for address in addresses:
        try:
            if context is None:
                return await loop.create_connection(factory, address, port)
            return await _connect_tls(factory, address, port, context, host, handshake_s_max)
        except ssl.SSLError:
            raise
        except OSError as error:
            failures.append(error)
    raise failures[0] if failures else OSError(f"{host} has no address")


async def _connect_tls(
    factory: Callable[[], _P],
    address: str,
    port: int,
    context: ssl.SSLContext,
    name: str,
    handshake_s_max: float | None,
) -> tuple[asyncio.Transport, _P]:
    first = _FirstProtocol(factory())
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: first, address, port, ssl=context, server_hostname=name, ssl_handshake_timeout=handshake_s_max
        )
    except BaseException:
        if first.transport is not None:
            first.transport.abort()
        raise
    return transport, first.successor


class _FirstProtocol(asyncio.Protocol, Generic[_P]):
    """Of a connection until its handshake is done: keeps the transport, and puts its successor in its place."""

    def __init__(self, successor: _P) -> None:
        self.successor = successor
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        self.transport.set_protocol(self.successor)
        self.successor.connection_made(transport)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_LOG = logging.getLogger(__name__)

Report = Callable[[BaseException], None]
"""Receives failures that must not pass unnoticed, such as the end of a task or thread that others rely on."""


def log_failure(error: BaseException) -> None:
    """A ``Report`` that only logs."""
    _LOG.critical("background task failed: %s", error, exc_info=error)


def supervise(task: asyncio.Task[None], report: Report) -> None:
    """Report the exception that ends a task meant to run until cancelled."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            report(error)

    task.add_done_callback(ended)


_ROLE_EVENTS_MAX: Final = 256
"""The limit of unsent role changes per watcher; older ones are dropped."""


class LoopBridge:
    """Runs callbacks on the loop, in order. ``post`` is thread-safe and cheap; create it on the loop's own thread.

    The loop's exception handler gets what a callback raises, on whichever thread it was posted: an answer that cannot
    be sent must not fail the work that it is the answer of.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._posted: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def post(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop soon; at once when called there (which keeps a synchronous refusal in order)."""
        if threading.get_ident() == self._thread_id and not self._posted:
            self._call(callback)
            return
        self._posted.append(callback)
        # Two threads may both see False: one wake-up too many. None can be lost: the drain clears the flag first, so a
        # thread that saw True put its callback where that drain still finds it.
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed, so nothing waits any more
                self._posted.clear()

    def run(self, work: Coroutine[object, object, _T]) -> _T:
        """Run ``work`` on the loop and wait for its result; only from other threads, while the loop runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _drain(self) -> None:
        self._scheduled = False
        while self._posted:
            self._call(self._posted.popleft())

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  # handed to the loop's handler, as from any of its callbacks
            self._loop.call_exception_handler({"message": "a callback failed", "exception": error})


class LoopThread:
    """An event loop in its own thread, for callers without one."""

    def __init__(self, name: str, report: Report = log_failure) -> None:
        self._report = report
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._bridge: LoopBridge | None = None
        self._thread = threading.Thread(target=self._main, name=name)

    def start(self) -> LoopBridge:
        """Start the loop and return its bridge."""
        self._thread.start()
        self._started.wait()
        if self._bridge is None:
            raise InvariantError("the event loop did not start")
        return self._bridge

    @property
    def bridge(self) -> LoopBridge | None:
        """The bridge, once it has started."""
        return self._bridge

    @property
    def is_alive(self) -> bool:
        """Whether it has started and not ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the loop and join its thread. Idempotent."""
        if self._bridge is not None and self._stop is not None and self._thread.is_alive():
            self._bridge.post(self._stop.set)
            self._thread.join()

    def _main(self) -> None:
        try:
            run(self._run())
        except BaseException as error:
            self._report(error)
            raise
        finally:
            self._started.set()

    async def _run(self) -> None:
        self._bridge, self._stop = LoopBridge(), asyncio.Event()
        self._started.set()
        await self._stop.wait()


class LoopCallback(Generic[_T]):
    """A thread-safe ``done`` callback and the future that it resolves."""

    def __init__(self, bridge: LoopBridge, settled: Callable[[], None] | None = None) -> None:
        self.future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._bridge = bridge
        self._settled = settled  # called on the loop first, even if the future is no longer awaited

    def done(self, value: _T) -> None:
        """Resolve the future; on any thread."""
        self._bridge.post(partial(self._resolve, value))

    def _resolve(self, value: _T) -> None:
        if self._settled is not None:
            self._settled()
        if not self.future.done():  # the client may have gone
            self.future.set_result(value)


class EventHub:
    """One subscription to the node, shared by all follow and watch streams. Lives on the loop."""

    def __init__(self, node: LogNode, bridge: LoopBridge) -> None:
        self.committed_index: LogIndex = NO_INDEX
        self._bridge = bridge
        self._commit_lock = threading.Lock()  # held while committed_index is raised
        self._followers: set[asyncio.Event] = set()
        self._watchers: set[RoleWatch] = set()
        self._unsubscribe = node.subscribe(self._on_event)
        self._raise_committed(node.status().committed_index)

    def close(self) -> None:
        """Stop listening to the node."""
        self._unsubscribe()

    def follow(self) -> asyncio.Event:
        """An event that is set whenever ``committed_index`` has grown; pass it to ``unfollow`` when done."""
        follower = asyncio.Event()
        self._followers.add(follower)
        return follower

    def unfollow(self, follower: asyncio.Event) -> None:
        self._followers.discard(follower)

    def watch(self) -> RoleWatch:
        """The role changes from now on; pass it to ``unwatch`` when done."""
        watcher = RoleWatch()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: RoleWatch) -> None:
        self._watchers.discard(watcher)

    def _on_event(self, event: NodeEvent) -> None:  # on any thread
        match event:
            case CommitEvent(committed_index):
                self._raise_committed(committed_index)
                if self._followers:
                    self._bridge.post(self._wake_followers)
            case RoleEvent():
                self._bridge.post(lambda: self._tell_watchers(event))

    def _raise_committed(self, index: LogIndex) -> None:
        """Take a commit index from any thread; indexes may arrive out of order."""
        with self._commit_lock:
            self.committed_index = max(self.committed_index, index)

    def _wake_followers(self) -> None:
        for follower in tuple(self._followers):
            follower.set()

    def _tell_watchers(self, event: RoleEvent) -> None:
        for watcher in tuple(self._watchers):
            watcher.put(event)


class RoleWatch:
    """A bounded queue of role events: a slow watcher misses intermediate ones, never the last."""

    def __init__(self) -> None:
        self._events: deque[RoleEvent] = deque(maxlen=_ROLE_EVENTS_MAX)
        self._ready = asyncio.Event()

    def put(self, event: RoleEvent) -> None:
        self._events.append(event)
        self._ready.set()

    async def get(self) -> RoleEvent:
        while not self._events:
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()


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
            run(self._serve(started))
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
