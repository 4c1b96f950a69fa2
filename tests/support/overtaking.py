"""Another thread that comes first: what happens between a look without a lock and the lock."""

from __future__ import annotations

import threading
from collections.abc import Callable


class OvertakenLock:
    """A lock; whoever wants it first finds that another thread has had it meanwhile, for ``what``."""

    def __init__(self, what: Callable[[], object]) -> None:
        self._what: Callable[[], object] | None = what
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        what, self._what = self._what, None
        if what is not None:
            what()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
