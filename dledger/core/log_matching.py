"""Checks of what peers say: that they share this member's history, and that the sender of pushes leads.

**One history**: the committed entries stated in votes, and who is fenced. Raft takes for granted that a member's
directory belongs to its group. One that was mixed up, restored from elsewhere or written by another program may have a
longer log of a higher term. So every vote states some of its sender's committed entries, with the chain CRC that covers
all entries before them: the last one, and those at one less than each power of two, so that any two members have stated
one in common. If two chain CRCs differ at an index that both have committed, there are two histories. The member that
has committed more compares the other's last entry, so that nothing is missed.

**One leader**: a follower accepts pushes of a sender that, asked at its own address, confirms that it leads. Without
TLS, anyone who connects to a member may claim to be any other one; and even a member may be wrong about itself. So the
first push of a term is held back until its sender, asked at its own address, has confirmed that it leads that term. The
question is a pre-vote, which changes nothing anywhere; the answer says whether the member leads, and where its log
begins (``VoteResponse.leads``, ``begin``).

A push that would drop this member's log (INSTALL) is held back each time, and must match the leader's answer.

Statements about members' memory in heartbeats have lasting effects: a member that holds less than others remember
counts for nothing. Heartbeats are too frequent to ask about each. So the question carries a random number, the
countersign, which is known only at the asked member's address, and the leader repeats it in its heartbeats. A heartbeat
without it is only a sign of life, and now and then a reason to ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import CommittedEntry, HeartbeatRequest, PushInstall, ReceivedPush, VoteRequest, VoteResponse
from dledger.errors import CorruptLogError
from dledger.records import record
from dledger.types import MEMBERS_MAX, NO_ENTRY, NO_INDEX, NO_TERM, Boundary, EntryId, LogIndex, NodeId, Term


def stated(state: MemberState) -> tuple[CommittedEntry, ...]:
    """The committed entries that this member states; none that it cannot verify."""
    log, top = state.log, state.commit_index
    if top < 0:
        return ()
    indexes = {top, *((1 << bits) - 1 for bits in range((top + 1).bit_length()))}
    found = []
    for index in sorted(LogIndex(one) for one in indexes if one >= log.begin.index):
        with suppress(CorruptLogError):  # maintenance of the log finds the damage
            found.append(CommittedEntry(index, log.chain_crc_at(index)))
    return tuple(found)


def agree(state: MemberState, told: Iterable[CommittedEntry]) -> bool | None:
    """Whether a peer's committed entries equal those here; None: no common entry to compare."""
    verdict = None
    for entry in told:
        if entry.index <= state.commit_index:
            same = _holds(state, entry)
            if same is False:
                return False
            verdict = same or verdict
    return verdict


def covers(state: MemberState, told: Iterable[CommittedEntry]) -> bool:
    """Whether this log contains everything that a voter has committed, with nothing else in its place (§5.4.3)."""
    return all(entry.index <= state.log.last.index and _holds(state, entry) is not False for entry in told)


def last_held(state: MemberState, told: Iterable[CommittedEntry]) -> LogIndex:
    """The last of a peer's committed entries that this log certainly holds: one that is damaged here may differ."""
    return max((entry.index for entry in told if _holds(state, entry)), default=NO_INDEX)


def _holds(state: MemberState, entry: CommittedEntry) -> bool | None:
    log = state.log
    if log.begin.index <= entry.index <= log.last.index:
        with suppress(CorruptLogError):
            return log.chain_crc_at(entry.index) == entry.chain_crc
    return None


def memory_of(state: MemberState, peer: NodeId) -> EntryId:
    """The entry to report to a peer as held by it: none before histories are compared, since it may be another's."""
    return state.remembered.get(peer, NO_ENTRY) if state.agrees.get(peer) else NO_ENTRY


def least_of(state: MemberState, peer: NodeId) -> EntryId:
    """The entry that a peer must hold for its vote to count; none if its history is known to differ.

    Also before histories were compared, as after every start of this member: all it costs the peer is this vote.
    """
    return state.remembered.get(peer, NO_ENTRY) if state.agrees.get(peer) is not False else NO_ENTRY


def note(state: MemberState, peer: NodeId, verdict: bool | None) -> None:
    """Record the result of a comparison of histories; of a member only, since anyone may ask for votes."""
    if peer in state.peers and (verdict is not None or peer not in state.agrees):
        state.agrees[peer] = verdict is not False


def on_answer(state: MemberState, sender: NodeId, answer: VoteResponse, now_ms: int) -> None:
    """Compare histories with a member that was asked at its own address.

    This member is fenced if most members contradict it, or if the leader that most have elected does. Unsolicited
    statements fence nobody, because anyone might have sent them.
    """
    verdict = False if answer.other_history else agree(state, answer.committed)
    note(state, sender, verdict)
    if verdict is None:
        return
    if verdict:
        state.contradicted_by.discard(sender)
        return
    state.contradicted_by.add(sender)
    leads = answer.leads and answer.term == state.term and state.leader_id == sender
    voters = state.contradicted_by & state.membership.voters
    if leads or (len(voters) >= state.quorum and not isinstance(state.role, Leader)):
        others = ", ".join(sorted(state.contradicted_by))
        state.fence(f"{others} committed different entries than this member", now_ms)


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
