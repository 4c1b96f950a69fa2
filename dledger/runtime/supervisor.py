"""Fail-stop: a thread that dies must not leave a process that looks alive.

Every thread of a node runs under one supervisor. The first exception is kept and reported once; from then on the node
acknowledges nothing, and the process is expected to exit with ``EXIT_FATAL``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from dledger.errors import ShutdownError
from dledger.log_output import speaking_group, speaks_for

EXIT_FATAL: Final = 70
"""Exit status of a node that stopped itself (EX_SOFTWARE)."""

_log = logging.getLogger("dledger")


class Supervisor:
    """Starts threads and calls ``on_fatal`` at the first exception in any of them."""

    def __init__(self, on_fatal: Callable[[BaseException], None], group: str = "") -> None:
        """``group``: whose log lines the threads write; empty: that of who makes it, or a process's."""
        self._on_fatal = on_fatal
        self._group = group or speaking_group()
        self._lock = threading.Lock()  # guards fatal
        self.fatal: BaseException | None = None

    def thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """A named, not yet started thread that runs ``target`` under supervision."""
        return threading.Thread(target=self.run, args=(target,), name=name)

    def run(self, target: Callable[[], None]) -> None:
        """Run ``target`` in the calling thread; an exception that escapes it is fatal for the node."""
        with speaks_for(self._group):
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - the one place that must see everything
                self.report(error)

    def report(self, error: BaseException) -> None:
        """Declare the node failed because of ``error``; only the first report counts."""
        with self._lock:
            if self.fatal is not None:
                return
            self.fatal = error
        where = threading.current_thread().name
        with speaks_for(self._group):
            _log.critical("stopping the node: %s failed in thread %s", error, where, exc_info=error)
        self._on_fatal(error)


class NodeFailedError(ShutdownError):
    """Raised to callers of a node that has stopped itself after a fatal error: another member may answer."""
