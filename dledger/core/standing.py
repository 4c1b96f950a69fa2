"""Whose votes count: elections among members some of which have forgotten, and how those regain standing.

A member without standing (``dledger.types.Standing``) counts for nothing by itself. Two rules bring it back;
docs/protocol.md, "Standing", gives their reasons:

1. An election in which *all* members vote for one candidate may count it: no forgotten vote can then elect another one,
   and any entry that a majority once had is still held by a member that has forgotten nothing, as long as fewer than a
   majority began blank.
2. It regains standing once it holds an entry that its leader appended after it had heard of it, and that a majority
   without it has made durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from dledger.core.messages import Readmission
from dledger.records import record
from dledger.types import NO_INDEX, LogIndex, NodeId, Standing


@record(frozen=True, slots=True)
class Ballot:
    """A granted vote and its voter's standing, process, and knowledge of committed entries."""

    standing: Standing
    boot_id: int
    used: bool


class Victory(Enum):
    """How an election is won."""

    MAJORITY = "majority"
    """A majority of all members has standing and votes for the candidate."""
    UNANIMITY = "unanimity"
    """All members vote for it, and at least one of any majority remembers."""
    FOUNDING = "founding"
    """All members vote for it, and no other one can know of a committed entry: the group begins."""


def victory(ballots: Mapping[NodeId, Ballot], members: int, candidate: NodeId) -> Victory | None:
    """How the candidate's ballots (including its own) win, if they do.

    A majority elects a candidate with standing only. One without may have voted for another one in a later term, and
    its acknowledgements as leader would count before it is known to hold what others committed.
    """
    quorum = members // 2 + 1
    given = ballots.values()
    if ballots[candidate].standing.counts and sum(ballot.standing.counts for ballot in given) >= quorum:
        return Victory.MAJORITY
    if len(ballots) < members:
        return None
    if _is_founding(ballots, members):
        return Victory.FOUNDING
    return Victory.UNANIMITY if _count(ballots, Standing.BLANK) < quorum else None


def what_keeps_from_electing(ballots: Mapping[NodeId, Ballot], members: int, candidate: NodeId) -> str:
    """Why a candidate that all answering members would elect is not elected, for people; empty if it is."""
    if victory(ballots, members, candidate) is not None or all(ballot.standing.counts for ballot in ballots.values()):
        return ""
    lost = ", ".join(
        f"{one} ({ballot.standing.name.lower()})"
        for one, ballot in sorted(ballots.items())
        if not ballot.standing.counts
    )
    if len(ballots) < members:
        return (
            f"no majority remembers its votes and acknowledgements: {lost}; election needs the votes of all {members}"
        )
    return (
        f"a majority of the disks is new or has lost entries: {lost}; what only they held is gone, or in damaged-N "
        "in their directories. To accept that loss, stop enough members to form a majority, including the one with the "
        "longest log, and run `dledger restore-vote` on each"
    )


def _is_founding(ballots: Mapping[NodeId, Ballot], members: int) -> bool:
    """Whether the group begins: no member knows of a committed entry, or it is the only one; some may lack standing.

    A member that knows of one knows that a majority had standing once: then disks were lost, and with them perhaps
    entries.
    """
    standings = {ballot.standing for ballot in ballots.values()}
    if not standings <= {Standing.BLANK, Standing.FOUNDER}:
        return False
    return members == 1 or not any(ballot.used for ballot in ballots.values())


def _count(ballots: Mapping[NodeId, Ballot], standing: Standing) -> int:
    return sum(ballot.standing is standing for ballot in ballots.values())


@record(frozen=True, slots=True)
class _Waiting:
    boot_id: int
    index: LogIndex
    needs_commit: bool


class Readmissions:
    """A leader's records, for one term: which peers may regain standing, and from which entry on."""

    def __init__(self) -> None:
        self._electors: dict[NodeId, int] = {}
        self._elected_index = NO_INDEX
        self._waiting: dict[NodeId, _Waiting] = {}

    def begin(self, ballots: Mapping[NodeId, Ballot], last_index: LogIndex, *, unanimous: bool) -> None:
        """Start a term won with a log that ended at ``last_index``.

        Unanimously: the processes that voted may be counted once they hold everything that the winner held.
        """
        self._waiting.clear()
        self._elected_index = last_index
        self._electors = {peer: ballot.boot_id for peer, ballot in ballots.items()} if unanimous else {}
        for peer, ballot in ballots.items():
            if not ballot.standing.counts:
                self.note(peer, ballot.standing, ballot.boot_id, last_index)

    def is_elector(self, peer: NodeId, boot_id: int) -> bool:
        """Whether this process's vote was part of a unanimous election."""
        return self._electors.get(peer) == boot_id

    def note(self, peer: NodeId, standing: Standing, boot_id: int, last_index: LogIndex) -> None:
        """A peer's process was heard while this log ended at ``last_index``."""
        if standing.counts:
            self._waiting.pop(peer, None)
            return
        known = self._waiting.get(peer)
        if known is not None and known.boot_id == boot_id:
            return
        if self.is_elector(peer, boot_id):
            self._waiting[peer] = _Waiting(boot_id, self._elected_index, needs_commit=False)
        else:
            self._waiting[peer] = _Waiting(boot_id, LogIndex(last_index + 1), needs_commit=True)

    def needs_entry(self, last_index: LogIndex) -> bool:
        """Whether a peer waits for an entry that has not been appended yet."""
        return any(waiting.index > last_index for waiting in self._waiting.values())

    def due(self, peer: NodeId, commit_index: LogIndex) -> Readmission | None:
        """The readmission to send to a peer now, if any."""
        waiting = self._waiting.get(peer)
        if waiting is None or (waiting.needs_commit and waiting.index > commit_index):
            return None
        return Readmission(waiting.boot_id, waiting.index)
