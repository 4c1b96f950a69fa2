"""Notifies users of the library of role changes: in order, on its own thread, outside every lock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from dledger.core.outbox import RoleChange
from dledger.runtime.supervisor import Supervisor

JOIN_TIMEOUT_S = 10.0


class RoleChangeHandler(Protocol):
    """Follows a member's role, for example a broker that becomes master with it.

    All methods run on the role-change thread, one after the other. A handler may take its time: changes queue up (at
    most one per term and kind, so they stay few) and arrive in order. An exception stops the node.
    """

    def startup(self) -> None:
        """The node has started; no change has been reported yet."""

    def role_changed(self, change: RoleChange) -> None:
        """The member's role, term or known leader is now as ``change`` says."""

    def shutdown(self) -> None:
        """The node is stopping; no further change follows."""


class RoleChangeNotifier:
    """Queues changes and passes them to the handlers."""

    def __init__(self, node_name: str, supervisor: Supervisor) -> None:
        self._queue: queue.SimpleQueue[RoleChange | None] = queue.SimpleQueue()
        self._handlers: tuple[RoleChangeHandler, ...] = ()
        self._listeners_lock = threading.Lock()  # guards the replacement of _listeners
        self._listeners: tuple[Callable[[RoleChange], None], ...] = ()
        self._thread = supervisor.thread(f"dledger-role-change-{node_name}", self._run)

    def add_handler(self, handler: RoleChangeHandler) -> None:
        """Register a handler; only before ``start``."""
        self._handlers = (*self._handlers, handler)

    def publish(self, change: RoleChange) -> None:
        """Queue a change; never blocks."""
        self._queue.put(change)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Deliver queued changes, call ``shutdown`` on the handlers, end the thread. Idempotent.

        A handler may stop the node, too: then the thread ends by itself, once that handler has returned.
        """
        self._queue.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def listen(self, listener: Callable[[RoleChange], None]) -> Callable[[], None]:
        """Call ``listener`` for every change from now on, until the returned function is called."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)

        def cancel() -> None:
            with self._listeners_lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return cancel

    def _run(self) -> None:
        for handler in self._handlers:
            handler.startup()
        while (change := self._queue.get()) is not None:
            for handler in self._handlers:
                handler.role_changed(change)
            for listener in self._listeners:
                listener(change)
        for handler in self._handlers:
            handler.shutdown()
