"""Why a store currently refuses messages: one result, prepared when a reason changes and read by every put."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Final

from rocketstore.types import BrokerRole, PutMessageStatus, PutResult


class Obstacle(StrEnum):
    """Reasons besides the role that close a store to puts; RocketMQ's running flags, in words."""

    NOT_RUNNING = "the store is not running"
    MAINTENANCE = "writing is disabled"
    QUEUE_ERROR = "the consume queues cannot follow the log"
    INDEX_ERROR = "the index cannot follow the log"
    DISK_FULL = "the disk is full"
    SUPERSEDED = "this broker is not the master any more"
    TOO_FEW_REPLICAS = "too few brokers have a copy"


_ORDER: Final = tuple(Obstacle)


class PutGate:
    """Open while there is no obstacle and the role is a master's.

    ``refusal`` is the result of every put while the gate is closed, None while it is open. The priority of reasons is
    RocketMQ's: not running, slave, not writable.
    """

    def __init__(self, role: BrokerRole) -> None:
        self._lock = threading.Lock()  # guards role, _obstacles and refusal together
        self._obstacles: dict[Obstacle, str] = {Obstacle.NOT_RUNNING: ""}
        self.role = role
        self.refusal: PutResult | None = None
        self._renew()

    def close(self, obstacle: Obstacle, detail: str = "") -> bool:
        """Add a reason; False if it already existed."""
        with self._lock:
            new = obstacle not in self._obstacles
            if new:
                self._obstacles[obstacle] = detail
                self._renew()
            return new

    def open(self, obstacle: Obstacle) -> bool:
        """Remove a reason; False if it did not exist."""
        with self._lock:
            found = self._obstacles.pop(obstacle, None) is not None
            if found:
                self._renew()
            return found

    def become(self, role: BrokerRole) -> None:
        """Change the role."""
        with self._lock:
            self.role = role
            self._renew()

    def has(self, obstacle: Obstacle) -> bool:
        """Whether this reason exists."""
        return obstacle in self._obstacles

    def _renew(self) -> None:
        reasons = [_text(one, self._obstacles[one]) for one in _ORDER if one in self._obstacles]
        if self.role is BrokerRole.SLAVE:
            reasons.insert(1 if Obstacle.NOT_RUNNING in self._obstacles else 0, "this node is a slave")
        self.refusal = (
            PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reasons[0])
            if reasons
            else None
        )


def _text(obstacle: Obstacle, detail: str) -> str:
    return f"{obstacle.value}: {detail}" if detail else obstacle.value
