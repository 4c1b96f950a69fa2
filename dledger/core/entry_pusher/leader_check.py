"""Which pushes a follower accepts: those of a sender that, asked at its own address, confirms that it leads.

Without TLS, anyone who connects to a member may claim to be any other one; and even a member may be wrong about itself.
So the first push of a term is held back until its sender, asked at its own address, has confirmed that it leads that
term. The question is a pre-vote, which changes nothing anywhere; the answer says whether the member leads, and where
its log begins (``VoteResponse.leads``, ``begin``).

A push that would drop this member's log (INSTALL) is held back each time, and must match the leader's answer.

Statements about members' memory in heartbeats have lasting effects: a member that holds less than others remember
counts for nothing. Heartbeats are too frequent to ask about each. So the question carries a random number, the
countersign, which is known only at the asked member's address, and the leader repeats it in its heartbeats. A heartbeat
without it is only a sign of life, and now and then a reason to ask.
"""

from __future__ import annotations

from dataclasses import replace

from dledger.core.histories import stated
from dledger.core.member_state import MemberState
from dledger.core.messages import HeartbeatRequest, PushInstall, ReceivedPush, VoteRequest, VoteResponse
from dledger.members import MEMBERS_MAX
from dledger.records import record
from dledger.types import NO_TERM, Boundary, NodeId, Term


@record(frozen=True, slots=True)
class _Held:
    push: ReceivedPush
    connection: int


class LeaderCheck:
    """One follower's verified knowledge of the leader. Under the node's lock."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self._known: tuple[Term, NodeId | None] = (NO_TERM, None)
        self._held: dict[NodeId, _Held] = {}  # the newest push of each sender
        self._judged: tuple[PushInstall, bool] | None = None
        self._ask_from_ms = 0
        self.refused = 0
        """Pushes whose sender did not confirm that it leads."""

    def is_known(self, sender: NodeId, term: Term) -> bool:
        """Whether ``sender`` has confirmed that it leads ``term``."""
        return self._known == (term, sender)

    def hold(self, sender: NodeId, push: ReceivedPush, connection: int) -> None:
        """Hold a push back until its sender has confirmed that it leads, in place of an earlier one: leaders repeat
        themselves. Anyone may say that it leads, so few are held.
        """
        if sender not in self._held and len(self._held) >= MEMBERS_MAX:
            self._held.pop(next(iter(self._held)))
        self._held[sender] = _Held(push, connection)
        self.ask(sender)

    def checked(self, heartbeat: HeartbeatRequest) -> HeartbeatRequest:
        """The heartbeat, stripped of what only the leader may state unless it is proven to come from the leader."""
        if self._is_proven(heartbeat):
            return heartbeat
        return replace(heartbeat, transfer_target="", readmission=None, founded=False, watermarks=(), doubted_boot_id=0)

    def on_heartbeat(self, sender: NodeId, heartbeat: HeartbeatRequest, now_ms: int) -> None:
        """Ask the sender of a heartbeat whether it leads; also while a push is held back, as a question may have
        been lost.
        """
        held = self._held.get(sender)
        if held is not None and held.push.term == heartbeat.term:
            self.ask(sender)
            return
        state = self._state
        follows = (state.term, state.leader_id) == (heartbeat.term, sender)
        if follows and not self._is_proven(heartbeat) and now_ms >= self._ask_from_ms:
            self._ask_from_ms = now_ms + state.election.heartbeat_interval_ms // 2
            self.ask(sender)

    def _is_proven(self, heartbeat: HeartbeatRequest) -> bool:
        return heartbeat.countersign == self._state.countersign

    def ask(self, sender: NodeId) -> None:
        """Ask a member whether it leads, and which entries it has committed."""
        state = self._state
        question = VoteRequest(
            Term(state.term + 1),
            state.log.last,
            pre_vote=True,
            committed=stated(state),
            countersign=state.countersign,
        )
        state.outbox.messages.append((sender, question))

    def on_answer(self, sender: NodeId, answer: VoteResponse) -> tuple[ReceivedPush, int] | None:
        """Take a member's answer to a pre-vote; returns the push held back for it, if it may be accepted."""
        if not answer.pre_vote:
            return None
        held = self._held.pop(sender, None)
        if held is None:
            return None
        push = held.push
        if not answer.leads or answer.granted or answer.term != push.term:
            self.refused += 1
            return None
        self._known = (push.term, sender)
        if isinstance(push, PushInstall):
            self._judged = push, answer.begin == _begin_of(push)
        return push, held.connection

    def judge(self, push: PushInstall) -> bool | None:
        """Whether the leader, asked about this very push, describes its log's begin alike; None: not asked yet."""
        if self._judged is None or self._judged[0] is not push:
            return None
        verdict, self._judged = self._judged[1], None
        if not verdict:
            self.refused += 1
        return verdict


def _begin_of(push: PushInstall) -> Boundary:
    before = push.before_begin
    return Boundary(before.index, before.term, push.position, push.chain_crc)
