"""Membership of a group: the members of one configuration, and the requests that change it.

A configuration is an entry of the log. Before the first one, the configured ``peers`` are the voters: the *implicit*
configuration, at index -1. Rules, named M1 to M16: docs/protocol.md, "Membership".
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

from dledger.records import record
from dledger.types import NO_INDEX, NO_TERM, LogIndex, NodeId, Term

VOTERS_MAX: Final = 9
LEARNERS_MAX: Final = 4
MEMBERS_MAX: Final = VOTERS_MAX + LEARNERS_MAX


class MemberRole(IntEnum):
    """A member's part in the group; the numbers are those in the log and on the wire."""

    VOTER = 1
    """It counts for elections, commits, check-quorum and linearizable reads, while it has standing."""
    LEARNER = 2
    """It receives the log and votes when asked, but never campaigns and never counts."""


@record(frozen=True, slots=True)
class ClusterMember:
    """A member in a configuration.

    ``number`` is given once and never again (a broker's id is it plus 1); ``uid`` names one memory of the member, 0 if
    not known. ``promote``: a learner that becomes a voter when it has caught up. ``replaces``: the voter that leaves
    for it (empty: none). Both stay until that is done, so that any later leader carries it on.
    """

    node_id: NodeId
    host: str
    port: int
    role: MemberRole = MemberRole.VOTER
    number: int = 0
    uid: int = 0
    promote: bool = False
    replaces: str = ""


@record(frozen=True, slots=True)
class Configuration:
    """All members of a group, as of the entry ``index`` (``NO_INDEX``: as configured), in the order of their ids.

    ``change_id`` is that of the request which made it, 0 if none did, so that a repeated request changes nothing.
    ``next_number``: of the next new member.
    """

    members: tuple[ClusterMember, ...] = ()
    index: LogIndex = NO_INDEX
    term: Term = NO_TERM
    next_number: int = 0
    change_id: int = 0

    @property
    def voters(self) -> tuple[NodeId, ...]:
        return tuple(one.node_id for one in self.members if one.role is MemberRole.VOTER)

    @property
    def learners(self) -> tuple[NodeId, ...]:
        return tuple(one.node_id for one in self.members if one.role is MemberRole.LEARNER)

    @property
    def quorum(self) -> int:
        """How many voters are a majority."""
        return len(self.voters) // 2 + 1

    def find(self, node_id: str) -> ClusterMember | None:
        """The member with this id, if there is one."""
        return next((one for one in self.members if one.node_id == node_id), None)


class ChangeKind(StrEnum):
    """The kinds of requests."""

    ADD = "add"
    """A learner, which becomes a voter when it has caught up unless ``MemberChange.promote`` is false."""
    PROMOTE = "promote"
    """Make a learner that has caught up a voter."""
    DEMOTE = "demote"
    """Make a voter a learner."""
    REMOVE = "remove"
    """Remove a member; of a learner that was being added, this cancels the addition."""
    UPDATE = "update"
    """Give a member another address."""


ANY_CONFIGURATION: Final = LogIndex(-2)


@record(frozen=True, slots=True)
class MemberChange:
    """A request to change the members.

    ``host``, ``port``: for ``ADD`` and ``UPDATE``. ``promote``, ``replaces``: for ``ADD``; see ``ClusterMember``.
    ``expected_index``: the index of the configuration that the caller saw; if it is another one by now, nothing is
    changed. ``change_id``: random and positive; a request with that of the current configuration succeeds at once.
    """

    kind: ChangeKind
    node_id: NodeId
    change_id: int
    host: str = ""
    port: int = 0
    promote: bool = True
    replaces: str = ""
    expected_index: LogIndex = ANY_CONFIGURATION


@record(frozen=True, slots=True)
class MemberProgress:
    """A leader's knowledge of another member.

    ``rate`` in bytes per second. ``not_ready``: why a learner cannot become a voter now, empty if it can.
    """

    node_id: NodeId
    state: str
    """``in sync``, ``catching up``, ``installing``, ``unreachable``, ``never seen``, ``no standing``, ``disk full``."""
    match_index: LogIndex
    lag_entries: int
    lag_bytes: int
    rate: int
    last_contact_ms: int
    """Milliseconds since it was last heard; -1: never."""
    not_ready: str = ""
