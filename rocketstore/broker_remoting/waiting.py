"""Requests that wait for messages, and end with their connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dledger.remoting.connection import RemotingConnection


class WaitingTasks:
    """On the loop."""

    def __init__(self) -> None:
        self._tasks: dict[RemotingConnection, set[asyncio.Task[None]]] = {}

    @contextmanager
    def cancelled_with(self, connection: RemotingConnection) -> Iterator[None]:
        """While this runs, the end of the connection cancels the current task."""
        task = asyncio.current_task()
        assert task is not None
        waiting = self._tasks.setdefault(connection, set())
        waiting.add(task)
        try:
            yield
        finally:
            waiting.discard(task)
            if not waiting:
                self._tasks.pop(connection, None)

    def closed(self, connection: RemotingConnection) -> None:
        """Cancel what waits on a closed connection."""
        for task in tuple(self._tasks.get(connection, ())):
            task.cancel()
