"""What the broker's service needs of the store, of the broker state and of the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rocketstore.types import PutResult

StateDone = Callable[[PutResult], None]
"""Called once with what became of a change of state, on any thread; must not block."""
QueueKey = tuple[str, int]
"""Topic and queue id."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """What a broker knows of its group; a plain broker is alone. Addresses are brokers'."""

    role: str = ""
    term: int = 0
    leader: str = ""
    leader_address: str = ""
    members: dict[str, str] = field(default_factory=dict)
    """Node id to address, as far as known."""
