"""How far the members have followed their leader, and whether a learner may become a voter (M4).

A learner is ready if its process has standing and if it acknowledged durably, within the last minimum election
timeout, everything that was committed one such timeout earlier. So the entry that promotes it never waits for it,
however long its log is and however fast entries arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from dledger.core.entry_pusher import DispatcherState, EntryDispatcher
from dledger.core.member_state import NEVER_MS, Leader, MemberState
from dledger.errors import CorruptLogError
from dledger.members import MemberProgress
from dledger.records import record
from dledger.types import NO_INDEX, LogIndex, NodeId

RATE_MS: Final = 1000
"""A rate is that of at least so long."""
_SAMPLES_PER_TIMEOUT: Final = 5


@record(frozen=True, slots=True)
class _Place:
    """Up to where a member's log was equal to the leader's, in bytes of the log."""

    at_ms: int
    position: int
    rate: int


class PeerCatchUp:
    """One leadership's samples. Under the node's lock."""

    def __init__(self, state: MemberState, dispatchers: Mapping[NodeId, EntryDispatcher]) -> None:
        self._state = state
        self._dispatchers = dispatchers
        self._committed: deque[tuple[int, LogIndex]] = deque()
        self._places: dict[NodeId, _Place] = {}
        self._timeout_ms = state.election.election_timeout_ms_min

    @property
    def interval_ms(self) -> int:
        """How often to take a sample while a learner catches up."""
        return max(1, self._timeout_ms // _SAMPLES_PER_TIMEOUT)

    def begin(self) -> None:
        """A new leadership."""
        self._committed.clear()
        self._places.clear()

    def sample(self, leader: Leader, now_ms: int) -> None:
        """Note how much is committed, and how far each member is."""
        known = self._committed
        known.append((now_ms, self._state.commit_index))
        while len(known) > 1 and known[1][0] <= now_ms - self._timeout_ms:
            known.popleft()
        for gone in self._places.keys() - leader.match.keys():
            del self._places[gone]
        for peer, match in leader.match.items():
            before = self._places.get(peer)
            if before is None or now_ms >= before.at_ms + RATE_MS:
                position = self._position_after(match)
                rate = 0 if before is None else (position - before.position) * 1000 // (now_ms - before.at_ms)
                self._places[peer] = _Place(now_ms, position, max(0, rate))

    def what_keeps_from_promoting(self, leader: Leader, peer: NodeId, now_ms: int) -> str:
        """Why a member may not become a voter now, for people; empty if it may."""
        silent_ms = now_ms - leader.contact_ms[peer]
        if silent_ms > self._timeout_ms:
            return (
                "it was never heard" if leader.contact_ms[peer] == NEVER_MS else f"it was last heard {silent_ms} ms ago"
            )
        if leader.disk_full[peer]:
            return "its disk is full"
        if not self._has_standing(leader, peer):
            return "it has no standing yet, which it takes when it holds an entry appended after it was first heard"
        if leader.memories.get(peer, (0, 0))[0] != leader.boot_ids.get(peer):
            return "it has not been heard since it took standing"
        if not self._committed or self._committed[0][0] > now_ms - self._timeout_ms:
            return f"the leader has not looked for {self._timeout_ms} ms yet: ask again"
        if leader.match[peer] < self._committed[0][1]:
            entries, size = self._lag(leader.match[peer])
            return f"it lacks {entries} entries ({size} bytes), and receives {self._rate(peer)} bytes per second"
        return ""

    def progress(self, leader: Leader, now_ms: int) -> tuple[MemberProgress, ...]:
        """The progress of each peer."""
        learners = self._state.membership.current.learners
        found = []
        for peer in self._state.peers:
            entries, size = self._lag(leader.match[peer])
            heard_ms = leader.contact_ms[peer]
            found.append(
                MemberProgress(
                    peer,
                    self._health(leader, peer, now_ms),
                    leader.match[peer],
                    entries,
                    size,
                    self._rate(peer) if entries else 0,
                    -1 if heard_ms == NEVER_MS else now_ms - heard_ms,
                    self.what_keeps_from_promoting(leader, peer, now_ms) if peer in learners else "",
                )
            )
        return tuple(found)

    def _health(self, leader: Leader, peer: NodeId, now_ms: int) -> str:
        heard_ms = leader.contact_ms[peer]
        if heard_ms == NEVER_MS or (
            peer not in leader.boot_ids and peer not in leader.stand and heard_ms <= leader.since_ms
        ):
            return "never seen"
        if now_ms - heard_ms > self._state.election.election_timeout_ms_max:
            return "unreachable"
        if leader.disk_full[peer]:
            return "disk full"
        dispatcher = self._dispatchers[peer]
        if dispatcher.state is DispatcherState.INSTALL:
            return "installing"
        behind = bool(self._committed) and leader.match[peer] < self._committed[0][1]
        if behind or leader.match[peer] == NO_INDEX:
            return "catching up"
        return "in sync" if self._has_standing(leader, peer) else "no standing"

    @staticmethod
    def _has_standing(leader: Leader, peer: NodeId) -> bool:
        """Also by its last heartbeat, which tells of a new process before that has answered a push."""
        return leader.counts[peer] and peer in leader.stand

    def _rate(self, peer: NodeId) -> int:
        place = self._places.get(peer)
        return 0 if place is None else place.rate

    def _lag(self, match: LogIndex) -> tuple[int, int]:
        """The entries and bytes that follow ``match``."""
        log = self._state.log
        return log.last.index - match, max(0, log.end_position - self._position_after(match))

    def _position_after(self, match: LogIndex) -> int:
        log = self._state.log
        following = LogIndex(match + 1)
        if following > log.last.index:
            return log.end_position
        if match <= log.begin.index:
            return log.begin.position
        try:
            return log.positions(following, following)[0]
        except CorruptLogError:  # maintenance of the log finds the damage
            return log.end_position
