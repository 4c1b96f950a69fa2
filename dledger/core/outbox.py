"""The effects of a step outside the node's lock, in the order in which the driver must carry them out.

The durability contract (Raft figure 2, "persistent state"; etcd's ``Ready``): the driver empties the outbox under the
lock and then, outside it, **first** makes the current hard state durable, **then** sends ``messages``, and **then**
passes on ``role_changes`` and runs ``completions``, in order. A message never overtakes the vote or term it depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dledger.core.membership import Membership
from dledger.core.messages import Message
from dledger.errors import CorruptLogError, LeaderHint
from dledger.records import record
from dledger.types import LogIndex, NodeId, Role, Term


class Wake:
    """Which workers have new work: bits of a plain ``int``.

    ``enum.Flag`` creates an object per operation, and an append needs some thirty operations.
    """

    NONE: Final = 0
    ELECTOR: Final = 1
    DISPATCHERS: Final = 2
    HANDLER: Final = 4
    QUORUM_ACK: Final = 8
    FLUSH: Final = 16


class RoleReason(StrEnum):
    """Why a member's role, term or known leader changed: for people, logs and counters; decides nothing."""

    ELECTION_TIMEOUT = "election_timeout"
    """No leader was heard for an election timeout: the member asks for votes (or, alone in its group, leads)."""
    LEADER_GONE = "leader_gone"
    """Its leader's process has ended: the member asks for votes at once."""
    PRE_VOTE_WON = "pre_vote_won"
    """A quorum would vote for it: it campaigns in a new term."""
    LEADERSHIP_OFFERED = "leadership_offered"
    """The leader transfers leadership to it: it campaigns at once."""
    ELECTED = "elected"
    """A quorum voted for it."""
    LEADER_HEARD = "leader_heard"
    """A leader of its term or of a later one spoke to it."""
    HIGHER_TERM = "higher_term"
    """A message carried a later term."""
    QUORUM_LOST = "quorum_lost"
    """It led, and a quorum has not answered for an election timeout."""
    NO_PROGRESS = "no_progress"
    """It led, and nothing was committed for several election time-outs although something waited."""
    DISK_FULL = "disk_full"
    """Its disk has no room for a new leader's first entry."""
    UNREADABLE_PRODUCERS = "unreadable_producers"
    """Its log's producer records are of a later version."""
    STANDING_LOST = "standing_lost"
    """It led or campaigned, and learned that it lacks what it once had, or that its history is not the group's."""
    NO_VOTER = "no_voter"
    """It is a learner, or was removed or not added yet: it neither campaigns nor leads."""
    DAMAGED_LOG = "damaged_log"
    """Its log's producer records are damaged: it could not recognize repeats."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The member's role, term or known leader changed."""

    role: Role
    term: Term
    leader: NodeId | None
    reason: RoleReason | None = field(default=None, compare=False)
    """The cause; None if the record's creator does not know it."""


@record(frozen=True, slots=True)
class SnapshotFetch:
    """This member's state machine needs entries that ``leader`` does not keep any more.

    It needs a snapshot of ``at_least`` that entry, or of a later one, from the leader or from any member whose chain
    CRC there equals the leader's.
    """

    leader: NodeId
    at_least: LogIndex


@dataclass(slots=True)
class Outbox:
    """Effects gathered since the driver last took them."""

    messages: list[tuple[NodeId, Message]] = field(default_factory=list)
    completions: list[Callable[[], None]] = field(default_factory=list)
    role_changes: list[RoleChange] = field(default_factory=list)
    committed: LogIndex | None = None
    """The new commit index, if it moved."""
    wake: int = Wake.NONE
    """Bits of ``Wake``."""
    damage: list[CorruptLogError] = field(default_factory=list)
    """Damage that a part found in the own log: it has done nothing that depends on it, and will retry."""
    fenced: str = ""
    """Why this member was just fenced."""
    membership: Membership | None = None
    """A copy of the member's, if the configuration in force, the one known to be committed, or the members with which
    this one still speaks have changed. The driver acts on it before it sends ``messages``.
    """
    fetch_snapshot: SnapshotFetch | None = None
    """The snapshot that this member lacks; repeated while it does, so the driver ignores it during a fetch."""

    def take(self) -> Outbox:
        """Return everything gathered and start empty."""
        taken = Outbox(
            self.messages,
            self.completions,
            self.role_changes,
            self.committed,
            self.wake,
            self.damage,
            self.fenced,
            self.membership,
            self.fetch_snapshot,
        )
        self.messages, self.completions, self.role_changes = [], [], []
        if taken.damage:
            self.damage = []
        self.committed, self.wake, self.fenced, self.membership = None, Wake.NONE, "", None
        self.fetch_snapshot = None
        return taken

    def __bool__(self) -> bool:
        return bool(
            self.messages
            or self.completions
            or self.role_changes
            or self.committed is not None
            or self.wake
            or self.damage
            or self.fenced
            or self.membership is not None
            or self.fetch_snapshot is not None
        )


def hint(leader: NodeId | None) -> LeaderHint | None:
    """A leader hint without an address; the server adds the address it has learned."""
    return None if leader is None else LeaderHint(leader)
