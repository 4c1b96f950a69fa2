"""Whether this broker is the master, which alone makes changes, and who is instead."""

from __future__ import annotations

from collections.abc import Callable

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
