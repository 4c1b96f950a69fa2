"""Linearizable reads without writing (dissertation §6.4): ReadIndex, batched over heartbeat rounds.

A read records the commit index on arrival and waits until a heartbeat round that *began after its arrival* has been
answered by a quorum. A new leader first waits for the no-op of its term, since before that it does not know which
earlier entries are committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dledger.core.member_state import Leader, MemberState
from dledger.core.outbox import Wake, hint
from dledger.errors import DLedgerError, NotLeaderError, PendingFullError, QuorumAckTimeoutError
from dledger.types import NO_INDEX, LogIndex, NodeId, Term

ReadDone = Callable[[LogIndex | DLedgerError], None]


@dataclass(frozen=True, slots=True)
class _PendingRead:
    term: Term
    round: int
    index: LogIndex
    due_ms: int
    done: ReadDone


class ReadIndexQueue:
    """Reads that wait for their round. ``round`` is the number of the last heartbeat round sent."""

    def __init__(self, state: MemberState, *, timeout_ms: int, pending_max: int) -> None:
        self._state = state
        self._timeout_ms = timeout_ms
        self._pending_max = pending_max
        self._pending: deque[_PendingRead] = deque()
        self._answered: dict[NodeId, int] = {}
        self._round_wanted = False
        self.round = 0

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, now_ms: int, done: ReadDone, *, at_least: LogIndex = NO_INDEX) -> None:
        """Queue a read; ``done`` gets the index that the reader must see, or ``NotLeaderError`` and the like.

        ``at_least``: an entry that must be committed, too.
        """
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            self._finish(
                done, NotLeaderError("this node is not the leader: ask the leader", leader=hint(state.leader_id))
            )
            return
        if len(self._pending) >= self._pending_max:
            self._finish(done, PendingFullError(f"{self._pending_max} reads are already waiting: retry shortly"))
            return
        index = max(state.commit_index, leader.noop_index, at_least)
        self._pending.append(_PendingRead(state.term, self.round + 1, index, now_ms + self._timeout_ms, done))
        self._round_wanted = leader.reads_waiting = True
        state.outbox.wake |= Wake.ELECTOR

    def begin_round(self) -> int:
        """Start a heartbeat round; returns its number."""
        self.round += 1
        self._round_wanted = False
        return self.round

    @property
    def wants_round(self) -> bool:
        """Whether a read waits for a round that has not begun."""
        return self._round_wanted

    def on_answer(self, peer: NodeId, round_number: int) -> None:
        """``peer`` has answered a round (numbers never repeat, so a late answer confirms only older reads)."""
        self._answered[peer] = max(self._answered.get(peer, 0), round_number)
        if self._pending:
            self._state.outbox.wake |= Wake.ELECTOR

    def step(self, now_ms: int) -> int | None:
        """Finish the reads that can be finished; returns the time of the next timeout."""
        pending = self._pending
        if not pending:
            return None
        state = self._state
        leader = state.role
        leads = isinstance(leader, Leader)
        while pending and not (leads and pending[0].term == state.term):
            error = NotLeaderError("leadership lost before it could be confirmed", leader=hint(state.leader_id))
            self._finish(pending.popleft().done, error)
        confirmed = self.confirmed_round
        while pending and pending[0].round <= confirmed and pending[0].index <= state.commit_index:
            read = pending.popleft()
            self._finish(read.done, read.index)
        while pending and pending[0].due_ms <= now_ms:
            self._finish(pending.popleft().done, QuorumAckTimeoutError("leadership not confirmed by a quorum in time"))
        if isinstance(leader, Leader):
            leader.reads_waiting = bool(pending)
        return pending[0].due_ms if pending else None

    def abandon(self, error: DLedgerError) -> None:
        """The node stops: waiting reads fail with ``error``."""
        while self._pending:
            self._finish(self._pending.popleft().done, error)

    @property
    def confirmed_round(self) -> int:
        """The last round that a quorum has answered."""
        state = self._state
        answers = sorted((self._answered.get(peer, 0) for peer in state.voting_peers), reverse=True)
        return self.round if state.quorum == 1 else answers[state.quorum - 2]

    def _finish(self, done: ReadDone, result: LogIndex | DLedgerError) -> None:
        self._state.outbox.completions.append(partial(done, result))
