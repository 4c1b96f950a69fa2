"""Whether members have one history: what votes state of committed entries, and who is fenced.

Raft takes for granted that a member's directory is one of this group's. One that was mixed up, restored from elsewhere
or written by somebody else may have a longer log of a higher term. So every vote states some of its sender's committed
entries, with the chain CRC that stands for all before them: the last one, and those at one less than each power of two,
so that any two members have stated one in common. Two chain CRCs that differ at an index that both have committed are
two histories. The one that has committed more compares the other's last entry, so that nothing is missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import CommittedEntry, VoteResponse
from dledger.errors import CorruptLogError
from dledger.types import NO_ENTRY, EntryId, LogIndex, NodeId


def stated(state: MemberState) -> tuple[CommittedEntry, ...]:
    """What this member says of its history; nothing of what it cannot prove."""
    log, top = state.log, state.commit_index
    if top < 0:
        return ()
    indexes = {top, *((1 << bits) - 1 for bits in range((top + 1).bit_length()))}
    found = []
    for index in sorted(LogIndex(one) for one in indexes if one >= log.begin.index):
        with suppress(CorruptLogError):  # whoever looks after the log finds it
            found.append(CommittedEntry(index, log.chain_crc_at(index)))
    return tuple(found)


def agree(state: MemberState, told: Iterable[CommittedEntry]) -> bool | None:
    """Whether what a peer has committed is what is committed here; None: there is nothing in common to compare."""
    verdict = None
    for entry in told:
        if entry.index <= state.commit_index:
            same = _holds(state, entry)
            if same is False:
                return False
            verdict = same or verdict
    return verdict


def covers(state: MemberState, told: Iterable[CommittedEntry]) -> bool:
    """Whether nothing that a voter has committed is missing in this log, or another entry there (§5.4.3)."""
    return all(entry.index <= state.log.last.index and _holds(state, entry) is not False for entry in told)


def _holds(state: MemberState, entry: CommittedEntry) -> bool | None:
    log = state.log
    if log.begin.index <= entry.index <= log.last.index:
        with suppress(CorruptLogError):
            return log.chain_crc_at(entry.index) == entry.chain_crc
    return None


def memory_of(state: MemberState, peer: NodeId) -> EntryId:
    """What to tell a peer that it held: nothing until histories were compared, for that may have been another one's."""
    return state.remembered.get(peer, NO_ENTRY) if state.agrees.get(peer) else NO_ENTRY


def least_of(state: MemberState, peer: NodeId) -> EntryId:
    """What a peer must hold for its vote to count; nothing if its history is known to be another one.

    Also before histories were compared, as after every start of this member: it takes no more than this vote from it.
    """
    return state.remembered.get(peer, NO_ENTRY) if state.agrees.get(peer) is not False else NO_ENTRY


def note(state: MemberState, peer: NodeId, verdict: bool | None) -> None:
    """A peer's history was compared."""
    if verdict is not None or peer not in state.agrees:
        state.agrees[peer] = verdict is not False


def on_answer(state: MemberState, sender: NodeId, answer: VoteResponse, now_ms: int) -> None:
    """Compare histories with a member that was asked, at its own address.

    This one is fenced if most members contradict it, or the leader whom most have elected. What others only say
    unasked fences nobody: anybody might have said it.
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
    if leads or (len(state.contradicted_by) >= state.quorum and not isinstance(state.role, Leader)):
        others = ", ".join(sorted(state.contradicted_by))
        state.fence(f"{others} committed different entries than this member", now_ms)
