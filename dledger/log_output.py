"""A bound for log lines that others cause: anyone who can connect could otherwise fill the disk that has the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Final

SPAN_S: Final = 10.0
LINES_MAX: Final = 20
"""In each span."""
_GROUP: Final[ContextVar[str]] = ContextVar("group", default="")


class BoundedLog:
    """Passes on a limited number of lines in each span of time, and says how many it left out. Thread-safe."""

    def __init__(self, log: logging.Logger, now_s: Callable[[], float] = monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._lock = threading.Lock()
        self._since_s = -SPAN_S
        self._lines = 0

    def info(self, text: str, *values: object) -> None:
        self._write(logging.INFO, text, values)

    def warning(self, text: str, *values: object) -> None:
        self._write(logging.WARNING, text, values)

    def _write(self, level: int, text: str, values: tuple[object, ...]) -> None:
        with self._lock:
            left_out = self._turn()
            self._lines += 1
            passes = self._lines <= LINES_MAX
        if left_out:
            self._tell(left_out)
        if passes:
            self._log.log(level, text, *values)

    def flush(self) -> None:
        """Say what was left out in a span that is over; for a loop that runs anyway."""
        with self._lock:
            left_out = self._turn()
        if left_out:
            self._tell(left_out)

    def _turn(self) -> int:
        """How many lines the span that has just ended left out."""
        now_s = self._now_s()
        if now_s - self._since_s < SPAN_S:
            return 0
        left_out = max(0, self._lines - LINES_MAX)
        self._since_s, self._lines = now_s, 0
        return left_out

    def _tell(self, left_out: int) -> None:
        self._log.info("%d more lines like the last ones were left out within %.0f s", left_out, SPAN_S)


def speaking_group() -> str:
    """The group that this thread, or task, works for; empty: none in particular."""
    return _GROUP.get()


@contextmanager
def speaks_for(group: str) -> Iterator[None]:
    """Whose log lines a thread writes, in a process of several groups: the group that it works for at the moment.

    Inside, lines are the group's.
    """
    before = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(before)
