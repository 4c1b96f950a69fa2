"""The parts of the store, the broker state and the group that the broker's service uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rocketstore.types import PutResult

StateDone = Callable[[PutResult], None]
"""Called once with the result of a state change, on any thread; must not block."""
QueueKey = tuple[str, int]
"""Topic and queue id."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A broker's view of its group; a plain broker is its only member. Addresses are those of brokers."""

    role: str = ""
    term: int = 0
    leader: str = ""
    leader_address: str = ""
    members: dict[str, str] = field(default_factory=dict)
    """Node id to address, as far as known."""
    learners: frozenset[str] = frozenset()
    """Those of them that do not count, and may still lack most of the log."""
    number: int = 0
    """This member's, which never changes and is never given again; -1 if it is not one, or not yet."""
    removed: str = ""
    """Why this broker is no member any more."""
