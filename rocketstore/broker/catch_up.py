"""Whether a broker that was started again knows what the others have long known.

A member does not know after a restart which of its entries are committed, so its queues and its state may be those of
long ago, or empty, until the leader has told. A client that still takes it for the master would hear that a topic does
not exist, or that a queue ends before the offset it has reached. So reads are refused until then, and the client looks
for the master. Afterwards a slave serves what it has, which may lag behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.rpc.ports import NodeStatus
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole


class CatchUp:
    """Call it to hear whether this member has caught up; once it has, it stays so. Made before the node is started."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        store: MessageStore,
        committed_position: Callable[[], int],
        state_is_applied: Callable[[], bool],
    ) -> None:
        self._status = status
        self._store = store
        self._committed_position = committed_position
        self._state_is_applied = state_is_applied
        self._recovered_index: Final = status().end_index
        self._position: int | None = None  # what has to be dispatched, once that is known
        self._done = False

    def __call__(self) -> bool:
        """Cheap; any thread."""
        if not self._done:
            self._done = self._store.role is not BrokerRole.SLAVE or self._has_caught_up()
        return self._done

    def _has_caught_up(self) -> bool:
        if self._position is None:
            status = self._status()
            # A new disk recovers nothing; its member's vote counts once it has what the others had when it came.
            if status.leader is None or not status.voter:
                return False
            # What was recovered may be replaced by less, so its own index may not come back.
            if status.committed_index < min(self._recovered_index, status.end_index):
                return False
            self._position = self._committed_position()
        dispatched = self._committed_position() - self._store.dispatch_behind_bytes
        return dispatched >= self._position and self._state_is_applied()
