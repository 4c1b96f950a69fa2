"""A parent's clients in a forked child: their threads and connections stayed behind, and their callers are told so.

A lock may be held by a thread that does not exist in the child. So the child gets a ``LostLock`` in its place, which
anyone who uses the client then meets first. That costs nothing as long as nobody forks.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Final, Protocol
from weakref import WeakSet

from dledger.errors import UnavailableError

REASON: Final = (
    "this client was made before the process was forked, and works only in the parent: make a new one in the child "
    "(multiprocessing: the start method 'spawn')"
)


class LeftBehind(Protocol):
    """Something that is of no use in a forked child."""

    def leave_behind(self) -> None:
        """Called in the child, on its only thread; takes no lock."""


class LostLock:
    """Stands for a lock, also for a condition, of what was left behind."""

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
