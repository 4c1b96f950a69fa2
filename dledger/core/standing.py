"""Whose votes count: elections among members some of which have forgotten, and how those regain standing.

A member without standing (``dledger.types.Standing``) counts for nothing by itself. Two rules bring it back;
docs/protocol.md, "Standing", gives their reasons:

1. An election in which *all* voters vote for one candidate may count it: no forgotten vote can then elect another one,
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
class MemberRun:
    """One run of a member: ``boot_id`` differs between any two; ``countersign`` is random, secret and not 0."""

    boot_id: int
    countersign: int


@record(frozen=True, slots=True)
class Ballot:
    """A granted vote and its voter's standing, process, and knowledge of committed entries."""

    standing: Standing
    boot_id: int
    used: bool


class Victory(Enum):
    """How an election is won."""

    MAJORITY = "majority"
    """A majority of the voters has standing and votes for the candidate."""
    UNANIMITY = "unanimity"
    """All voters vote for it, and at least one of any majority remembers."""
    FOUNDING = "founding"
    """All voters vote for it, and no other one can know of a committed entry: the group begins."""


@record(frozen=True, slots=True)
class Electorate:
    """The voters of the candidate's configuration, and of the one before it unless it is known to be committed (M6)."""

    voters: frozenset[NodeId]
    previous: frozenset[NodeId] = frozenset()
    may_found: bool = True
    """Whether the members are as configured: a group that changed them has begun long ago."""


def victory(ballots: Mapping[NodeId, Ballot], electorate: Electorate, candidate: NodeId) -> Victory | None:
    """How the candidate's ballots (including its own) win, if they do; those of others than voters do not count.

    A majority elects a candidate with standing only. One without may have voted for another one in a later term, and
    its acknowledgements as leader would count before it is known to hold what others committed.
    """
    voters = electorate.voters
    given = [ballots[voter].standing for voter in voters if voter in ballots]
    if ballots[candidate].standing.counts and sum(standing.counts for standing in given) >= _quorum(voters):
        return Victory.MAJORITY
    everyone = voters | electorate.previous
    if not everyone <= ballots.keys():
        return None
    all_given = {voter: ballots[voter] for voter in everyone}
    if electorate.may_found and _is_founding(all_given):
        return Victory.FOUNDING
    remembers = all(_blanks(all_given, some) < _quorum(some) for some in (voters, electorate.previous) if some)
    return Victory.UNANIMITY if remembers else None


def what_keeps_from_electing(ballots: Mapping[NodeId, Ballot], electorate: Electorate, candidate: NodeId) -> str:
    """Why a candidate that all answering members would elect is not elected, for people; empty if it is."""
    everyone = electorate.voters | electorate.previous
    won = victory(ballots, electorate, candidate) is not None
    ballots = {voter: ballot for voter, ballot in ballots.items() if voter in everyone}
    if won or all(ballot.standing.counts for ballot in ballots.values()):
        return ""
    lost = ", ".join(
        f"{one} ({ballot.standing.name.lower()})"
        for one, ballot in sorted(ballots.items())
        if not ballot.standing.counts
    )
    if len(ballots) < len(everyone):
        return (
            f"no majority remembers its votes and acknowledgements: {lost}; election needs the votes of all "
            f"{len(everyone)}"
        )
    return (
        f"a majority of the disks is new or has lost entries: {lost}; what only they held is gone, or in damaged-N "
        "in their directories. To accept that loss, stop enough members to form a majority, including the one with the "
        "longest log, and run `dledger restore-vote` on each"
    )


def _is_founding(ballots: Mapping[NodeId, Ballot]) -> bool:
    """Whether the group begins: no member knows of a committed entry, or it is the only one; some may lack standing.

    A member that knows of one knows that a majority had standing once: then disks were lost, and with them perhaps
    entries.
    """
    standings = {ballot.standing for ballot in ballots.values()}
    if not standings <= {Standing.BLANK, Standing.FOUNDER}:
        return False
    return len(ballots) == 1 or not any(ballot.used for ballot in ballots.values())


def _quorum(voters: frozenset[NodeId]) -> int:
    return len(voters) // 2 + 1


def _blanks(ballots: Mapping[NodeId, Ballot], voters: frozenset[NodeId]) -> int:
    return sum(ballots[voter].standing is Standing.BLANK for voter in voters)


@record(frozen=True, slots=True)
class _Waiting:
    boot_id: int
    index: LogIndex
    needs_majority: bool


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
            self._waiting[peer] = _Waiting(boot_id, self._elected_index, needs_majority=False)
        else:
            self._waiting[peer] = _Waiting(boot_id, LogIndex(last_index + 1), needs_majority=True)

    def needs_entry(self, last_index: LogIndex) -> bool:
        """Whether a peer waits for an entry that has not been appended yet."""
        return any(waiting.index > last_index for waiting in self._waiting.values())

    def due(self, peer: NodeId, held: LogIndex) -> Readmission | None:
        """The readmission to send to a peer now, if any; ``held``: what a majority without it has made durable.

        That may not be committed: while a change that adds a voter is in flight, this takes a majority of the voters
        before it, too, of which the peer may be needed itself. Once it holds the entry there is one.
        """
        waiting = self._waiting.get(peer)
        if waiting is None or (waiting.needs_majority and waiting.index > held):
            return None
        return Readmission(waiting.boot_id, waiting.index)
