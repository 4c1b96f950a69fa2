"""The transfer of leadership (dissertation §3.10): on request, to a preferred leader, from a full disk.

The leader announces it, accepts no appends until it is over, and asks the chosen member to campaign once that holds
everything and a quorum has heard the announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import TakeLeadership, Wake, hint
from dledger.core.quorum_ack import ReadIndexQueue
from dledger.errors import (
    ChangeInProgressError,
    DLedgerError,
    FallBehindError,
    LeaderHint,
    LeaderTransferringError,
    NotLeaderError,
    TransferFailedError,
    UnknownMemberError,
)
from dledger.types import NO_INDEX, NodeId, Term

_PREFERENCE_PAUSE: Final = 10
"""The pause, in check intervals, after a failed automatic transfer before the next one."""
_PREFERENCE_PAUSE_DOUBLINGS: Final = 6
"""How often that pause doubles for a member that fails repeatedly: each attempt refuses appends for a while."""

TransferDone = Callable[[LeaderHint | DLedgerError], None]


@dataclass(slots=True)
class _Transfer:
    """A transfer in progress: from the request until a leader of a later term is known, or ``due_ms``."""

    term: Term
    target: NodeId
    due_ms: int
    done: TransferDone | None
    round: int
    """The heartbeat round that announced it."""
    unasked: bool = False
    resend_due_ms: int = 0


class LeadershipTransfer:
    """A leader's side of transfers. Its elector calls ``step`` and ``step_preference``; all under the lock."""

    def __init__(self, state: MemberState, reads: ReadIndexQueue, announce: Callable[[int], None]) -> None:
        self._state = state
        self._reads = reads
        self._announce = announce
        """Sends a round of heartbeats."""
        self._preference_due_ms = 0
        self._transfer: _Transfer | None = None
        self._failed_unasked: dict[NodeId, tuple[int, int]] = {}
        """Members that did not take over in automatic transfers: failures in a row, and the end of their pause."""

    def lead(self, now_ms: int) -> None:
        """This member leads from now on."""
        self._preference_due_ms = now_ms + self._state.election.preferred_check_interval_ms

    def step_preference(self, leader: Leader, now_ms: int) -> int:
        """Hand over if another member should lead; returns when to look again."""
        if now_ms >= self._preference_due_ms:
            self._preference_due_ms = now_ms + self._state.election.preferred_check_interval_ms
            self._hand_over_if_better(leader, now_ms)
        return self._preference_due_ms

    def begin(
        self, target: NodeId | None, now_ms: int, done: TransferDone | None = None, *, unasked: bool = False
    ) -> None:
        """Transfer leadership to ``target`` (None: the most up-to-date peer); appends are refused meanwhile.

        ``done`` gets the new leader, or the error that kept the old one: ``NotLeaderError``,
        ``LeaderTransferringError``, ``UnknownMemberError``, ``FallBehindError`` or ``TransferFailedError``.
        """
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            error = NotLeaderError("this node is not the leader: ask the leader", leader=hint(state.leader_id))
            self._finish(done, error)
        elif target == state.node_id:
            self._finish(done, LeaderHint(state.node_id))
        else:
            chosen = target if target is not None else self._most_caught_up(leader, now_ms)
            refusal = self._refuse_transfer(leader, chosen, now_ms)
            if refusal is not None or chosen is None:
                self._finish(done, refusal or TransferFailedError("there is no other member to transfer leadership to"))
                return
            leader.transferring = True
            leader.transfer_target = chosen
            timeout_ms = state.election.transfer_timeout_ms
            if unasked:  # no caller waits for it, but appends do
                timeout_ms = min(timeout_ms, state.election.election_timeout_ms_min)
            self._announce(now_ms)  # the others must know before the target asks for their votes
            self._transfer = _Transfer(state.term, chosen, now_ms + timeout_ms, done, self._reads.round, unasked)
            state.outbox.wake |= Wake.ELECTOR | Wake.DISPATCHERS

    def _refuse_transfer(self, leader: Leader, target: NodeId | None, now_ms: int) -> DLedgerError | None:
        state = self._state
        if target is None:
            return None
        if target not in state.voting_peers:
            return UnknownMemberError(f"{target!r} is not a voter; voters: {self._members_to_lead(leader, now_ms)}")
        if not state.membership.is_committed:  # M1
            return ChangeInProgressError("the members are being changed: retry once that is committed")
        if self._transfer is not None:
            return LeaderTransferringError(f"leadership is already being transferred to {self._transfer.target}")
        if leader.disk_full[target]:
            return TransferFailedError(f"the disk of {target} is full")
        if leader.match[target] != NO_INDEX and not leader.counts[target]:
            return TransferFailedError(f"{target} has no vote at present: its log may lack entries it once held")
        lag = state.log.last.index - leader.match[target]
        if lag > state.election.transfer_max_lag_entries:
            return FallBehindError(f"{target} is {lag} entries behind: wait until it has caught up")
        silent = now_ms - leader.contact_ms[target] > state.election.election_timeout_ms_max
        if silent or leader.match[target] == NO_INDEX:  # a new leader counts every member as just heard
            return TransferFailedError(f"{target} has not answered recently: is it running?")
        return None

    def _members_to_lead(self, leader: Leader, now_ms: int) -> str:
        """All members, each with why it cannot lead now."""
        refusals = {peer: self._refuse_transfer(leader, peer, now_ms) for peer in self._state.voting_peers}
        told = {peer: f"{peer} ({refusal})" if refusal else str(peer) for peer, refusal in refusals.items()}
        told[self._state.node_id] = f"{self._state.node_id} (leads)"
        return ", ".join(told[member] for member in sorted(told))

    def _most_caught_up(self, leader: Leader, now_ms: int) -> NodeId | None:
        peers = self._state.voting_peers
        able = [peer for peer in peers if self._refuse_transfer(leader, peer, now_ms) is None]
        return max(able or peers, key=lambda peer: (leader.match[peer], leader.contact_ms[peer]), default=None)

    def _hand_over_if_better(self, leader: Leader, now_ms: int) -> None:
        """Transfer to a preferred leader, or from a leader whose disk is full to a member with room."""
        state = self._state
        preferred = state.election.preferred_leaders
        leaving = {one.replaces for one in state.membership.current.members}
        able = [
            peer
            for peer in state.voting_peers
            if peer not in leaving and self._refuse_transfer(leader, peer, now_ms) is None
        ]
        if not state.log.disk_full:
            able = [peer for peer in able if peer in preferred and state.node_id not in preferred]
        able = [peer for peer in able if now_ms >= self._failed_unasked.get(peer, (0, now_ms))[1]]
        if able:
            self.begin(max(able, key=lambda peer: leader.match[peer]), now_ms, unasked=True)

    def step(self, now_ms: int) -> int | None:
        transfer = self._transfer
        if transfer is None:
            return None
        state = self._state
        leader = state.role
        still_leads = isinstance(leader, Leader) and state.term == transfer.term
        if not still_leads and state.leader_id is not None:
            self._transfer = None
            won = state.leader_id == transfer.target
            if won:
                self._failed_unasked.pop(transfer.target, None)
            other = TransferFailedError(f"{state.leader_id} won the election instead", leader=hint(state.leader_id))
            self._finish(transfer.done, LeaderHint(transfer.target) if won else other)
            return None
        if now_ms >= transfer.due_ms:
            self._transfer = None
            if transfer.unasked:
                self._pause(transfer.target, now_ms)
            else:
                self._preference_due_ms = now_ms + _PREFERENCE_PAUSE * state.election.preferred_check_interval_ms
            if isinstance(leader, Leader):
                leader.transferring = False
                leader.transfer_target = ""
            error = TransferFailedError(f"{transfer.target} did not take over leadership in time; the group carries on")
            self._finish(transfer.done, error)
            return None
        if isinstance(leader, Leader) and still_leads and now_ms >= transfer.resend_due_ms:
            caught_up = leader.match[transfer.target] == state.log.last.index
            if caught_up and self._reads.confirmed_round >= transfer.round:
                transfer.resend_due_ms = now_ms + state.election.heartbeat_interval_ms
                state.outbox.messages.append((transfer.target, TakeLeadership(state.term)))
        return min(transfer.due_ms, now_ms + state.election.heartbeat_interval_ms)

    def abandon(self, error: DLedgerError) -> None:
        """The node stops: a caller that waits for a transfer gets ``error``."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._finish(transfer.done, error)

    def _pause(self, target: NodeId, now_ms: int) -> None:
        """Make no automatic transfers to a member that failed to take over; longer each time, as each costs appends."""
        failures = self._failed_unasked.get(target, (0, 0))[0] + 1
        pause_ms = _PREFERENCE_PAUSE * self._state.election.preferred_check_interval_ms
        pause_ms <<= min(failures - 1, _PREFERENCE_PAUSE_DOUBLINGS)
        self._failed_unasked[target] = failures, now_ms + pause_ms

    def _finish(self, done: TransferDone | None, result: LeaderHint | DLedgerError) -> None:
        if done is not None:
            self._state.outbox.completions.append(partial(done, result))
