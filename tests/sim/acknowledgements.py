"""Who may count for what is committed: what members said to hold, and what lost disks held.

The rules are those of docs/protocol.md, "Standing" and "Committing": a leader commits what a quorum has acknowledged to
it in its own term, from processes that say that they remember; and it counts no process of which it knows that it held
more once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import HeartbeatResponse, PushResponse
from dledger.types import NO_ENTRY, NO_INDEX, LogIndex, NodeId, Term

if TYPE_CHECKING:
    from tests.sim.driver import SimNode

_Process = tuple[NodeId, int]


class Acknowledgements:
    """Of one run."""

    def __init__(self) -> None:
        self._said: dict[tuple[NodeId, Term], dict[int, LogIndex]] = {}
        """The highest that each process of a member said to hold durably, by the term in which it said so."""
        self._stood: dict[_Process, bool] = {}
        """Processes that have said that they count."""
        self._lost: dict[NodeId, list[tuple[LogIndex, list[int]]]] = {}
        """The chain CRCs that disks held which are gone, and before which entry they began."""

    def note(self, node: SimNode, answer: PushResponse | HeartbeatResponse) -> None:
        """A member answers a leader."""
        if answer.standing.counts:
            self._stood[node.name, answer.boot_id] = True
        if isinstance(answer, PushResponse) and answer.flushed_index > NO_INDEX:
            said = self._said.setdefault((node.name, answer.term), {})
            if said.get(answer.boot_id, NO_INDEX) < answer.flushed_index:
                said[answer.boot_id] = answer.flushed_index

    def note_loss(self, node: SimNode) -> None:
        """A member is about to lose its disk, or a part of it."""
        log = node.log
        kept = node.held_index - log.begin.index
        self._lost.setdefault(node.name, []).append((log.begin.index, log.chain_crcs()[:kept]))

    def held_once(self, member: NodeId, index: LogIndex, chain_crc: int) -> bool:
        """Whether a disk that a member has lost held an entry."""
        return any(
            begin < index <= begin + len(chain) and chain[index - begin - 1] == chain_crc
            for begin, chain in self._lost.get(member, ())
        )

    def count(self, leader: SimNode, term: Term, index: LogIndex) -> int:
        """How many members may count for ``index`` in ``term``, the leader included."""
        if leader.core is None:
            return 0
        voters = leader.in_force.voters
        own = leader.name in voters and leader.core.state.has_standing and leader.held_index >= index
        return own + sum(self._acknowledged(peer, term, index) for peer in voters if peer != leader.name)

    def _acknowledged(self, peer: NodeId, term: Term, index: LogIndex) -> bool:
        said = self._said.get((peer, term))
        return said is not None and any(
            held >= index and self._stood.get((peer, boot), False) for boot, held in said.items()
        )


def counts_one_that_forgot(leader: SimNode, role: Leader, peer: SimNode) -> bool:
    """Whether a leader counts a process that lacks, in this very term, what the leader knows it to have held."""
    core = peer.core
    if leader.core is None or core is None or not role.counts.get(peer.name):
        return False
    ours, theirs = leader.core.state, core.state
    same = ours.term == theirs.term and role.boot_ids.get(peer.name) == theirs.boot_id
    return same and peer.log.last.index < _known(ours, peer.name)


def _known(state: MemberState, peer: NodeId) -> LogIndex:
    """What a leader knows a peer to have held, of its own log."""
    log, remembered = state.log, state.remembered.get(peer, NO_ENTRY)
    if log.begin.index <= remembered.index <= log.last.index and log.term_at(remembered.index) == remembered.term:
        return remembered.index
    return NO_INDEX
