"""Invariants that hold after every event; the simulator checks them each time, tests whenever they like.

``check`` covers one member; the simulator checks properties that span members (one leader per term, log matching,
leader completeness).
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger.core.member_state import Leader
from dledger.core.node import Node
from dledger.errors import invariant
from dledger.types import LogIndex, Term


@dataclass(frozen=True, slots=True)
class LastCheck:
    """The values of a member's last check since its start; later ones must not be lower."""

    term: Term
    commit_index: LogIndex


def check(node: Node, before: LastCheck | None = None) -> LastCheck:
    """Raise ``InvariantError`` if ``node`` contradicts itself or its past; returns the values for the next check."""
    state = node.state
    log = state.log
    if before is not None:
        invariant(state.term >= before.term, "term never goes back", now=state.term, before=before.term)
        invariant(
            state.commit_index >= before.commit_index,
            "commit index never goes back",
            now=state.commit_index,
            before=before.commit_index,
        )
    invariant(state.commit_index <= log.last.index, "commit <= end", commit=state.commit_index, last=log.last)
    invariant(log.begin.index <= state.commit_index, "only committed entries expire", begin=log.begin)
    invariant(log.flushed.index <= log.last.index, "flushed <= end", flushed=log.flushed, last=log.last)
    invariant(log.last.term <= state.term, "no entry is newer than its holder's term", last=log.last, term=state.term)
    invariant(node.handler.verified_index <= log.last.index or isinstance(state.role, Leader), "verified <= end")
    contacts = state.membership.contact_ids
    invariant(node.dispatchers.keys() == set(contacts), "a dispatcher for each contact", contacts=contacts)
    invariant(state.membership.committed.index <= state.membership.current.index, "in force is what is newest")
    if isinstance(state.role, Leader):
        invariant(state.membership.is_voter, "a leader is a voter", node=state.node_id)
        invariant(state.role.match.keys() == set(contacts), "a leader knows its contacts", contacts=contacts)
        noop = max(state.role.noop_index, log.begin.index)
        invariant(log.term_at(noop) == state.term, "a leader's no-op is of its term")
        for peer, match in state.role.match.items():
            invariant(match <= log.last.index, "match <= end", peer=peer, match=match)
        invariant(state.has_standing, "a leader has standing", node=state.node_id)
    return LastCheck(state.term, state.commit_index)
