"""Detects a leader that makes no progress. Heartbeats do not show it: they need neither pushes, flushes nor disks.

A leader that a quorum answers, but that commits nothing for several election timeouts although entries wait, steps
down: the cause may be its own (a lost path to its followers, a disk that hangs), and another member may do better. It
leaves the others time to win before it tries again, longer each time.

It stays where no member could do better: when too few members have disk space. Then it refuses appends.
"""

from __future__ import annotations

from typing import Final

from dledger.core.member_state import Leader, MemberState
from dledger.types import NO_TERM, LogIndex, NodeId, Term

STALLED_TIMEOUTS: Final = 3
"""A leader steps down after this many of the longest election timeouts without progress."""
PATIENCE_DOUBLINGS: Final = 2
"""How often that time doubles while its leaderships end this way: where all disks are slow, it must be long enough."""
PAUSE_DOUBLINGS: Final = 6
"""The same, twice per leadership, for how long it declines leadership transfers."""
CAMPAIGN_PAUSE_DOUBLINGS: Final = 1
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
        if now_ms < self._since_ms + (stalled_ms << min(self._failures, PATIENCE_DOUBLINGS)):
            return False
        self.pause_until_ms = now_ms + (stalled_ms << min(self._failures, CAMPAIGN_PAUSE_DOUBLINGS))
        self.declines_until_ms = now_ms + (stalled_ms << min(2 * self._failures, PAUSE_DOUBLINGS))
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
