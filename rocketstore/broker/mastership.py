"""Whether this broker is the master, which alone makes changes, and who is instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.rpc.ports import NodeStatus
from rocketstore.broker.ports import GroupView
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult


class Mastership:
    """For any thread. ``view`` is this broker's view of its group.

    ``has_caught_up``: whether it is known here which entries are committed; as long as it is not, no answer is
    reliable.
    """

    def __init__(
        self, store: MessageStore, view: Callable[[], GroupView], has_caught_up: Callable[[], bool] = lambda: True
    ) -> None:
        self._store = store
        self.view = view
        self._has_caught_up = has_caught_up

    @property
    def is_master(self) -> bool:
        """Whether this broker takes changes at this moment."""
        return self._store.role is not BrokerRole.SLAVE

    @property
    def leader_address(self) -> str:
        """The master's address, empty if it is unknown."""
        return self.view().leader_address

    def require(self) -> None:
        """Raises ``Refusal`` unless this broker is the master."""
        if self._store.role is BrokerRole.SLAVE:
            refused = self.refusal()
            raise Refusal.of(refused)

    def refusal(self) -> PutResult:
        """The result of a message that a slave is sent."""
        view = self.view()
        leader = view.leader_address
        if view.removed:
            reason = f"{view.removed}: look for the group's other brokers"
            return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason)
        reason = f"this broker is a slave: ask the master, {leader}"
        if not leader:
            reason = "this broker is a slave, and the master is unknown"
        return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason, leader=leader)

    def require_caught_up(self) -> None:
        """Raises ``Refusal`` as long as this broker does not know which entries are committed."""
        if not self._has_caught_up():
            view = self.view()
            reason = view.removed or "this broker has just started and does not know yet which entries are committed"
            raise Refusal(RefusalKind.UNAVAILABLE, reason, leader=view.leader_address)


class CatchUp:
    """Tells when a restarted broker has caught up with what was committed before.

    After a restart, a member does not know which of its entries are committed, so its queues and state may be outdated
    or empty until it hears from the leader. A client that still takes it for the master would be told that a topic does
    not exist, or that a queue ends before the offset it has reached. So reads are refused until then, and the client
    looks for the master. After that, a slave serves what it has, which may lag behind.

    A callable that returns whether this member has caught up; once true, it stays true. Create it before the node
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
