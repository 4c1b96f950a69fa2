"""Whose word a follower takes: that of a leader that confirms, when it is asked where it is, that it leads.

Who connects to a member may say that it is any other one, unless there is TLS; and even a member may be wrong about
itself. So the first push of a term is held back until the sender, asked at its own address, has said that it leads that
term. The question is a pre-vote, which changes nothing anywhere; the answer tells whether the member leads, and where
its log begins (``VoteResponse.leads``, ``begin``). Members of versions that do not tell refuse the pre-vote because
there is a leader: that has to do.

A push that would drop this member's log (INSTALL) is held back each time, and must agree with what the leader says
then.

What heartbeats say of members' memory has effects that last: who holds less than others remember counts for nothing.
There are too many to ask about each. So the question carries a random number, the countersign, which nobody hears but
who is at the member's address, and the leader repeats it in its heartbeats. Without it a heartbeat is only a sign of
life, and a reason to ask (now and then). A leader of a version that does not know of this is believed without.
"""

from __future__ import annotations

from dataclasses import replace

from dledger.core.histories import stated
from dledger.core.member_state import MemberState
from dledger.core.messages import HeartbeatRequest, PushInstall, ReceivedPush, VoteRequest, VoteResponse, VoteResult
from dledger.records import record
from dledger.types import NO_TERM, Boundary, NodeId, Term


@record(frozen=True, slots=True)
class _Held:
    push: ReceivedPush
    connection: int


class Belief:
    """What one follower knows of who leads, by its own questions. Under the node's lock."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self._known: tuple[Term, NodeId | None] = (NO_TERM, None)
        self._held: dict[NodeId, _Held] = {}  # the newest of each sender
        self._judged: tuple[PushInstall, bool] | None = None
        self._countersigns_not: tuple[Term, NodeId | None] = (NO_TERM, None)
        self._ask_from_ms = 0
        self.refused = 0
        """Pushes that their sender did not confirm."""

    def is_known(self, sender: NodeId, term: Term) -> bool:
        """Whether ``sender`` has confirmed that it leads ``term``."""
        return self._known == (term, sender)

    def hold(self, sender: NodeId, push: ReceivedPush, connection: int) -> None:
        """Keep a push until its sender has confirmed it. An earlier one gives way: the leader repeats itself."""
        self._held[sender] = _Held(push, connection)
        self.ask(sender)

    def leaders_word(self, sender: NodeId, heartbeat: HeartbeatRequest) -> HeartbeatRequest:
        """A heartbeat without what only the leader may say, unless it proves to be the leader's."""
        if self._is_proven(sender, heartbeat):
            return heartbeat
        return replace(heartbeat, transfer_target="", readmission=None, founded=False, watermarks=(), doubted_boot_id=0)

    def on_heartbeat(self, sender: NodeId, heartbeat: HeartbeatRequest, now_ms: int) -> None:
        """Ask whose heartbeat it was; also while something is held back, for the question may have been lost."""
        held = self._held.get(sender)
        if held is not None and held.push.term == heartbeat.term:
            self.ask(sender)
            return
        state = self._state
        follows = (state.term, state.leader_id) == (heartbeat.term, sender)
        if follows and not self._is_proven(sender, heartbeat) and now_ms >= self._ask_from_ms:
            self._ask_from_ms = now_ms + state.election.heartbeat_interval_ms // 2
            self.ask(sender)

    def _is_proven(self, sender: NodeId, heartbeat: HeartbeatRequest) -> bool:
        known = heartbeat.countersign == self._state.countersign
        return known or self._countersigns_not == (heartbeat.term, sender)

    def ask(self, sender: NodeId) -> None:
        """Ask a member whether it leads, and what it has committed."""
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
        """Take an answer of a member to a pre-vote; gives what was held back until then, if it may be taken."""
        if not answer.pre_vote:
            return None
        leads = answer.result is VoteResult.REJECT_ALREADY_HAS_LEADER if answer.leads is None else answer.leads
        if leads and not answer.countersigns and self._state.leader_id == sender:
            self._countersigns_not = (answer.term, sender)
        held = self._held.pop(sender, None)
        if held is None:
            return None
        push = held.push
        if not leads or answer.granted or answer.term != push.term:
            self.refused += 1
            return None
        self._known = (push.term, sender)
        if isinstance(push, PushInstall):
            self._judged = push, answer.begin in (None, _begin_of(push))
        return push, held.connection

    def judge(self, push: PushInstall) -> bool | None:
        """Whether the leader, asked about this very push, says the same of its log; None: it was not asked yet."""
        if self._judged is None or self._judged[0] is not push:
            return None
        verdict, self._judged = self._judged[1], None
        if not verdict:
            self.refused += 1
        return verdict


def _begin_of(push: PushInstall) -> Boundary:
    before = push.before_begin
    return Boundary(before.index, before.term, push.position, push.chain_crc)
