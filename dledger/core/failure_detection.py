"""Failures of a leader that its heartbeats do not show: its process is gone, or it makes no progress.

**Gone**: such a leader is suspected at once; its followers need not wait for its silence. The transport finds out that
the leader's connection broke and that its address refuses another one. From then on this member no longer counts as
hearing its leader, so that it grants others' pre-votes, and soon asks for votes itself. Nothing else differs: terms,
votes and logs decide as ever, and a false alarm costs at most an election. No read may depend on a time within which
followers elect nobody (a lease): with suspicion there is none.

A live leader ends it by any message (``MemberState.follow``), and so does every change of term or role.

**Without progress**: heartbeats need neither pushes, flushes nor disks. A leader that a quorum answers, but that
commits nothing for several election timeouts although entries wait, steps down: the cause may be its own (a lost path
to its followers, a disk that hangs), and another member may do better. It leaves the others time to win before it tries
again, longer each time.

It stays where no member could do better: when too few members have disk space. Then it refuses appends.
"""

from __future__ import annotations

from typing import Final

from dledger.core.member_state import Candidate, Follower, Leader, MemberState, RoleState
from dledger.core.messages import VoteResponse, Wake
from dledger.types import NO_ENTRY, NO_TERM, LogIndex, NodeId, Term

RANK_MS: Final = 30
"""How much later each next member asks for votes: the one before it has probably won by then."""
SPREAD_MS: Final = 20
"""A random delay below this separates members that take themselves for the same rank."""
REPEAT_MS_MIN: Final = 30
REPEAT_MS_MAX: Final = 50
"""The time between two pre-votes of a suspecting member: others may learn of the leader's end a little later."""
REPEATS_MAX: Final = 10
"""So many rounds may follow soon upon each other; then the election timeout holds again."""
ANSWER_MS_MAX: Final = 100
"""How long a leader's answer is waited for where something accepts connections at its address."""


def suspect(state: MemberState, leader: NodeId, term: Term, now_ms: int) -> None:
    """``leader`` of ``term`` is gone: ask for votes soon, unless this member follows another one by now."""
    role = state.role
    if not isinstance(role, Follower) or role.leader != leader or state.term != term or role.suspects:
        return
    role.suspects = True
    due_ms = now_ms + RANK_MS * rank(state, leader) + state.draw(0, SPREAD_MS)
    role.election_due_ms = min(role.election_due_ms, due_ms)
    state.outbox.wake |= Wake.ELECTOR


def rank(state: MemberState, leader: NodeId) -> int:
    """This member's place among the leader's followers: the one that is known to hold most is first.

    By what the leader stated in its heartbeats, to all of them: while entries arrive, each member knows more of its own
    log, and would take itself for the first. A member without standing is the last.
    """
    others = [peer for peer in state.voting_peers if peer != leader]
    if not state.has_standing:
        return len(others)
    own = state.remembered.get(state.node_id, NO_ENTRY), state.node_id
    return sum((state.remembered.get(peer, NO_ENTRY), peer) > own for peer in others)


def doubt(state: MemberState, leader: NodeId, term: Term, now_ms: int) -> bool:
    """Something accepts connections at the address of ``leader``: whether to ask it if it leads ``term``.

    A killed process may have been started again already.
    """
    role = state.role
    if not isinstance(role, Follower) or role.leader != leader or state.term != term or role.suspects:
        return False
    role.answer_due_ms = now_ms + ANSWER_MS_MAX
    return True


def on_answer(state: MemberState, sender: NodeId, answer: VoteResponse, now_ms: int) -> None:
    """Suspect a leader that, in doubt, was asked at its own address and answers that it does not lead.

    It has been in the term that it led: an answer of an earlier one was given before, and has been long on its way. A
    pre-vote is granted in the term asked for, which is the next one.
    """
    role = state.role
    current = answer.pre_vote and answer.term >= state.term + answer.granted
    if isinstance(role, Follower) and role.leader == sender and now_ms <= role.answer_due_ms and current:
        role.answer_due_ms = 0
        if not answer.leads:
            suspect(state, sender, state.term, now_ms)


def repeats_left(role: RoleState) -> int:
    """How many rounds of questions may follow soon upon the one that is due now."""
    match role:
        case Follower(suspects=True):
            return REPEATS_MAX
        case Candidate(repeats_left=left):
            return max(0, left - 1)
        case _:
            return 0


def hurry(state: MemberState, repeats: int, now_ms: int) -> None:
    """A round has begun, and ``repeats`` are left: a pre-vote is repeated soon, a campaign only once it is lost."""
    role = state.role
    if repeats > 0 and isinstance(role, Candidate):
        role.repeats_left = repeats
        if role.pre_vote:
            role.election_due_ms = now_ms + state.draw(REPEAT_MS_MIN, REPEAT_MS_MAX)


def on_refusal(state: MemberState, candidate: Candidate, voter: NodeId, now_ms: int) -> None:
    """A vote was refused. If, without the one that is gone, no majority can be left, two candidates split the vote: ask
    again soon.
    """
    candidate.refused.add(voter)
    lost = len(candidate.refused) >= len(state.membership.voters) - state.quorum
    if lost and candidate.repeats_left > 0 and not candidate.pre_vote:
        soon_ms = now_ms + state.draw(REPEAT_MS_MIN, REPEAT_MS_MAX)
        candidate.election_due_ms = min(candidate.election_due_ms, soon_ms)
        state.outbox.wake |= Wake.ELECTOR


STALLED_TIMEOUTS: Final = 3
"""A leader steps down after this many of the longest election timeouts without progress."""
_PATIENCE_DOUBLINGS: Final = 2
"""How often that time doubles while its leaderships end this way: where all disks are slow, it must be long enough."""
_PAUSE_DOUBLINGS: Final = 6
"""The same, twice per leadership, for how long it declines leadership transfers."""
_CAMPAIGN_PAUSE_DOUBLINGS: Final = 1
"""The same for how long it does not campaign: never long, because the only other member may be down."""


class ProgressWatch:
    """Watches one member's leaderships from its elector's step: it costs appends nothing."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self._seen: tuple[Term, LogIndex, int] = (NO_TERM, LogIndex(0), 0)
        self._since_ms = 0
        self._failures = 0
        self.pause_until_ms = 0
        """Until then this member leaves campaigning to the others."""
        self.declines_until_ms = 0
        """Until then it declines leadership transfers."""

    def is_stuck(self, leader: Leader, now_ms: int) -> bool:
        """Whether the leader should step down; if so, the two pauses begin.

        Progress is a commit, or more durable entries on a member that still lacks the awaited one: catching up may take
        hours, and a quorum may depend on it.
        """
        state = self._state
        needed = max(LogIndex(state.commit_index + 1), leader.noop_index)
        idle = state.commit_index >= state.log.last.index
        held = sum(min(leader.match[peer], needed) for peer in state.voting_peers)
        seen = (state.term, state.commit_index, held)
        if state.commit_index >= leader.noop_index:
            self._failures = 0
        if idle or seen != self._seen or full_members(state, leader):
            self._seen, self._since_ms = seen, now_ms
            return False
        stalled_ms = STALLED_TIMEOUTS * state.election.election_timeout_ms_max
        if now_ms < self._since_ms + (stalled_ms << min(self._failures, _PATIENCE_DOUBLINGS)):
            return False
        self.pause_until_ms = now_ms + (stalled_ms << min(self._failures, _CAMPAIGN_PAUSE_DOUBLINGS))
        self.declines_until_ms = now_ms + (stalled_ms << min(2 * self._failures, _PAUSE_DOUBLINGS))
        self._failures += 1
        return True


def full_members(state: MemberState, leader: Leader) -> tuple[NodeId, ...]:
    """The voters with full disks, if they leave no quorum with room; else none."""
    if not state.log.disk_full and True not in leader.disk_full.values():
        return ()
    full = [peer for peer in state.voting_peers if leader.disk_full[peer]]
    if state.log.disk_full:
        full.append(state.node_id)
    return tuple(sorted(full)) if len(state.voting_peers) + 1 - len(full) < state.quorum else ()
