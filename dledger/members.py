"""Membership of a group: the members of one configuration, and the requests that change it.

A configuration is an entry of the log. Before the first one, the configured ``peers`` are the voters: the *implicit*
configuration, at index -1. Rules, named M1 to M16: docs/protocol.md, "Membership".

``BaseLog`` is the older log that a log continues: its files, on which the members must agree. Raft replicates only what
is appended from now on. Members whose older files differ would serve different messages under the same offsets, so they
must not talk to each other at all, not even vote: the handshake compares both sides' base logs
(``dledger.rpc.peers.identity``). Files expire on every member by itself; what has expired on one side is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
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


DIGESTS_MAX: Final = 8192
"""How many of the newest files are compared: their digests fit a handshake."""
_ADVICE: Final = "Stop the members and compare their old logs: dledger upgrade check"


@dataclass(frozen=True, slots=True)
class BaseLog:
    """The files of an older log, all of ``file_bytes``, as they were when it was taken over. Positions in bytes."""

    begin: int
    end: int
    """Where the older log ends and the replicated one begins."""
    file_bytes: int
    digests: tuple[int, ...]
    """CRC32C of what each file holds, for the newest ``DIGESTS_MAX`` of them, oldest first."""
    kept_from: int
    """The start of the first file that is still there; ``end`` if all have expired."""

    @property
    def digests_from(self) -> int:
        """The start of the first file with a digest."""
        return self.end - len(self.digests) * self.file_bytes

    def digest_at(self, base: int) -> int:
        """The digest of the file that starts at ``base``, which must be one of those with a digest."""
        return self.digests[(base - self.digests_from) // self.file_bytes]


def why_apart(ours: BaseLog | None, theirs: BaseLog | None, our_name: str, their_name: str) -> str:
    """Why two members must not replicate with each other; empty if they may. None: the log continues no other."""
    if ours is None or theirs is None:
        return _of_one(ours, their_name, our_name) or _of_one(theirs, our_name, their_name)
    if ours.end != theirs.end or ours.file_bytes != theirs.file_bytes:
        return (
            f"the old log of {their_name} ends at {theirs.end} with files of {theirs.file_bytes} bytes, that of "
            f"{our_name} at {ours.end} with files of {ours.file_bytes} bytes. {_ADVICE}"
        )
    for base in range(max(ours.digests_from, theirs.digests_from), ours.end, ours.file_bytes):
        if ours.digest_at(base) != theirs.digest_at(base):
            return f"the old logs of {their_name} and {our_name} differ in file {base:020d}. {_ADVICE}"
    return _lacking(ours, theirs, our_name, their_name) or _lacking(theirs, ours, their_name, our_name)


def _of_one(one: BaseLog | None, without: str, having: str) -> str:
    if one is None or one.kept_from >= one.end:
        return ""
    return (
        f"{without} has no old log, and {having} still has the files of {one.kept_from} to {one.end}: copy them to "
        f"{without} before its first start. {_ADVICE} --align"
    )


def _lacking(one: BaseLog, other: BaseLog, name: str, other_name: str) -> str:
    """The files that ``one`` never had and ``other`` still has, as a sentence."""
    if one.begin <= other.kept_from or other.kept_from >= other.end:
        return ""
    return (
        f"the old log of {name} begins at {one.begin}, and {other_name} still has it from {other.kept_from} on: copy "
        f"the older files to {name} before its first start. {_ADVICE} --align"
    )
