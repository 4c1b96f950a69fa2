"""What a step wants to happen outside the node's lock, in the order in which the driver must do it.

The durability contract (Raft figure 2, "persistent state"; etcd's ``Ready``): the driver empties the outbox under the
lock and then, outside it, **first** makes the hard state of that moment durable, **then** sends ``messages``, and
**then** hands on ``role_changes`` and runs ``completions``, in order. A message never overtakes the vote or term it
depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto

from dledger.core.messages import Message
from dledger.errors import LeaderHint
from dledger.types import LogIndex, NodeId, Role, Term


class Wake(Flag):
    """Which workers have something new to look at."""

    NONE = 0
    ELECTOR = auto()
    DISPATCHERS = auto()
    HANDLER = auto()
    QUORUM_ACK = auto()
    FLUSH = auto()


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The member's role, term or known leader changed."""

    role: Role
    term: Term
    leader: NodeId | None


@dataclass(slots=True)
class Outbox:
    """Effects gathered since the driver last took them."""

    messages: list[tuple[NodeId, Message]] = field(default_factory=list)
    completions: list[Callable[[], None]] = field(default_factory=list)
    role_changes: list[RoleChange] = field(default_factory=list)
    committed: LogIndex | None = None
    """The new commit index, if it moved."""
    wake: Wake = Wake.NONE

    def take(self) -> Outbox:
        """Give everything gathered and start anew."""
        taken = Outbox(self.messages, self.completions, self.role_changes, self.committed, self.wake)
        self.messages, self.completions, self.role_changes = [], [], []
        self.committed, self.wake = None, Wake.NONE
        return taken

    def __bool__(self) -> bool:
        return bool(self.messages or self.completions or self.role_changes or self.committed is not None or self.wake)


def hint(leader: NodeId | None) -> LeaderHint | None:
    """A leader hint without an address; the server adds the address it has learned."""
    return None if leader is None else LeaderHint(leader)
