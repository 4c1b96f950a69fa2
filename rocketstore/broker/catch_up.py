"""Tells when a restarted broker has caught up with what was committed before.

After a restart, a member does not know which of its entries are committed, so its queues and state may be outdated or
empty until it hears from the leader. A client that still takes it for the master would be told that a topic does not
exist, or that a queue ends before the offset it has reached. So reads are refused until then, and the client looks for
the master. After that, a slave serves what it has, which may lag behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.rpc.ports import NodeStatus
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole


class CatchUp:
    """A callable that returns whether this member has caught up; once true, it stays true. Create it before the node
    starts.
    """

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
        self._position: int | None = None  # the position up to which dispatch must get, once known
        self._done = False

    def __call__(self) -> bool:
        """Cheap; any thread."""
        if not self._done:
            self._done = self._store.role is not BrokerRole.SLAVE or self._has_caught_up()
        return self._done

    def _has_caught_up(self) -> bool:
        if self._position is None:
            status = self._status()
            # A new disk recovers nothing; its member's vote counts once it has everything the others had when it
            # joined.
            if status.leader is None or not status.voter:
                return False
            # Recovered entries may be replaced by fewer, so their last index may not be reached again.
            if status.committed_index < min(self._recovered_index, status.end_index):
                return False
            self._position = self._committed_position()
        dispatched = self._committed_position() - self._store.dispatch_behind_bytes
        return dispatched >= self._position and self._state_is_applied()
