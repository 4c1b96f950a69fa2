"""Whether members share one history: the committed entries stated in votes, and who is fenced.

Raft takes for granted that a member's directory belongs to its group. One that was mixed up, restored from elsewhere or
written by another program may have a longer log of a higher term. So every vote states some of its sender's committed
entries, with the chain CRC that covers all entries before them: the last one, and those at one less than each power of
two, so that any two members have stated one in common. If two chain CRCs differ at an index that both have committed,
there are two histories. The member that has committed more compares the other's last entry, so that nothing is missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import CommittedEntry, VoteResponse
from dledger.errors import CorruptLogError
from dledger.types import NO_ENTRY, NO_INDEX, EntryId, LogIndex, NodeId


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
