"""The configurations of a run: which entries hold one, which are committed, and what may follow which.

``ConfigurationChecks`` is a part of the checker. What is in force at a member must be what its own log says, or what is
committed and lies ahead of it; all else is checked when a configuration is seen for the first time, or committed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dledger.core.member_state import Leader
from dledger.core.membership import decode_configuration
from dledger.core.noop_payload import UnreadablePayloadError
from dledger.records import ENTRY_HEADER_BYTES
from dledger.types import NO_INDEX, Configuration, EntryId, LogIndex, NodeId, Standing, Term
from tests.sim.violations import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode


def is_noop(record: bytes) -> bool:
    """Whether a stored entry belongs to no application."""
    return record[:4] == b"\0\0\0\2" or record[32:36] == b"NOOP"


def configuration_in(record: bytes, entry: EntryId) -> Configuration | None:
    """The configuration that an entry holds, if it holds one."""
    if not is_noop(record):
        return None
    try:
        found = decode_configuration(record[ENTRY_HEADER_BYTES:])
    except UnreadablePayloadError:
        return None
    return None if found is None else replace(found, index=entry.index, term=entry.term)


class ConfigurationChecks:
    """What must hold of members and their configurations."""

    def __init__(self, founders: Configuration, on_change: Callable[[SimNode | None], None]) -> None:
        self._on_change = on_change
        self.committed: list[Configuration] = [founders]
        """By index, the implicit one first."""
        self._indexes: list[int] = [NO_INDEX]
        self._appended: dict[EntryId, Configuration] = {}
        self._grants: dict[tuple[NodeId, Term], dict[NodeId, bool]] = {}
        """Who said to vote for a candidate, and whether with standing."""

    @property
    def newest(self) -> Configuration:
        """The newest committed one."""
        return self.committed[-1]

    def before(self, index: int) -> Configuration:
        """The newest committed one at or before an entry."""
        return self.committed[bisect_right(self._indexes, index) - 1]

    def at(self, index: int) -> Configuration | None:
        """The committed one of this entry, if there is one."""
        found = self.before(index)
        return found if found.index == index else None

    # -- what members have -----------------------------------------------------------------------------------------

    def observe(self, node: SimNode, committed: list[EntryId]) -> None:
        """Check what is in force at a member (M2, M10), and every configuration that is new in its log."""
        if node.core is None:
            return
        log = node.log
        for one in reversed(log.configurations):
            entry = EntryId(one.term, one.index)
            known = self._appended.get(entry)
            if known is not None:
                require(known == one, "two configurations in one entry", node.name, known, one)
                break
            self._appended[entry] = one
            self._observe_new(node, one, committed)
        current = node.core.state.membership.current
        newest = log.configurations[-1] if log.configurations else self.before(log.begin.index)
        if node.is_unread:
            return
        if not current.members and (not log.configurations or node.core.state.membership.is_unsure):
            return  # it waits to be told
        if current.index != newest.index:
            ahead = current.index > newest.index and self.at(current.index) == current
            require(ahead, "another configuration is in force than the log's last", node.name, current, newest)
        elif current.index != NO_INDEX:
            right = current == newest or self.at(current.index) == current  # the log's entry is then to be cut off
            require(right, "a configuration in force is not as in the log", node.name, current, newest)

    def _observe_new(self, node: SimNode, one: Configuration, committed: list[EntryId]) -> None:
        """A leader has appended a configuration (M1, D6)."""
        state = node.core.state if node.core is not None else None
        require(state is not None and isinstance(state.role, Leader), "appended by no leader", node.name, one)
        if state is None or not isinstance(state.role, Leader):
            return
        earlier = [other for other in node.log.configurations if other.index < one.index]
        before = earlier[-1] if earlier else self.before(node.log.begin.index)
        place = before.index
        is_committed = place == NO_INDEX or (place < len(committed) and committed[place].term == before.term)
        require(is_committed, "two uncommitted configurations", node.name, before, one)
        own = node.log.term_at(state.commit_index)
        require(own == one.term == state.term, "a configuration before the term's first commit", node.name, one)
        standing = state.hard_state.standing
        require(standing is Standing.FULL, "a founder changed the members", node.name, standing)
        require(not state.role.transferring, "the members change during a transfer", node.name, one)
        require(node.name in one.voters, "a leader appended its own removal", node.name, one)
        require_step(before, one)
        self._on_change(node)

    def observe_commit(self, one: Configuration) -> None:
        """A configuration is committed."""
        require_step(self.newest, one)
        self.committed.append(one)
        self._indexes.append(one.index)
        self._on_change(None)

    # -- elections ---------------------------------------------------------------------------------------------------

    def observe_vote(self, voter: NodeId, candidate: NodeId, term: Term, *, counts: bool) -> None:
        """A vote was granted."""
        grants = self._grants.setdefault((candidate, term), {})
        grants[voter] = counts or grants.get(voter, False)

    def observe_leader(self, node: SimNode, term: Term, committed_end: int) -> None:
        """A leader is a voter, and has the votes of a majority that remembers, or of all (M6, M7)."""
        if node.core is None:
            return
        current = node.core.state.membership.current
        require(node.name in current.voters, "one that is no voter leads", node.name, term, current)
        grants = self._grants.get((node.name, term), {}) | {node.name: True}
        counting = sum(grants.get(voter, False) for voter in current.voters)
        if counting >= current.quorum:
            return
        needed = set(current.voters)
        if current.index > committed_end:
            needed |= set(self.before(current.index - 1).voters)
        lacking = sorted(needed - grants.keys())
        require(not lacking, "elected without a majority, nor by all", node.name, term, f"lacking {lacking}")

    def observe_contact(self, node: SimNode) -> None:
        """A leader that has just looked is in contact with a majority of the voters, which alone confirm reads (M7)."""
        core = node.core
        if core is None or not isinstance(core.state.role, Leader):
            return
        leader, current = core.state.role, core.state.membership.current
        limit_ms = node.now_ms - core.state.election.election_timeout_ms_max
        others = [voter for voter in current.voters if voter != node.name]
        heard = sum(leader.supports[peer] and leader.contact_ms[peer] > limit_ms for peer in others)
        enough = heard + 1 >= current.quorum
        require(enough, "a leader without a majority of the voters in contact", node.name, leader.contact_ms, current)
        answered = sorted((core.reads._answered.get(peer, 0) for peer in others), reverse=True)
        confirmed = current.quorum == 1 or core.reads.confirmed_round <= answered[current.quorum - 2]
        require(confirmed, "a round that no majority of the voters confirmed", node.name, answered, current)

    def observe_push(self, node: SimNode, target: NodeId, last_index: LogIndex) -> None:
        """A removal or demotion reaches its subject only once it is committed, as everything does a learner (M9)."""
        configurations = node.log.configurations
        state = None if node.core is None else node.core.state
        if state is not None and state.membership.is_committed and target in state.learners:
            require(
                last_index <= state.commit_index, "a learner gets what may be undone", node.name, target, last_index
            )
        if node.core is None or not configurations:
            return
        newest = configurations[-1]
        if target in newest.voters or newest.index > last_index or self.at(newest.index) == newest:
            return
        earlier = configurations[-2] if len(configurations) > 1 else self.before(newest.index - 1)
        require(target not in earlier.voters, "a removal reaches its subject first", node.name, target, newest)


def require_step(before: Configuration, after: Configuration) -> None:
    """One voter differs at most, and any two majorities have a member in common."""
    old, new = set(before.voters), set(after.voters)
    require(new, "a group without voters", before, after)
    require(len(old ^ new) <= 1, "more than one voter changes", before, after)
    require(before.quorum + after.quorum > len(old | new), "majorities without a common member", before, after)
    ids = [one.node_id for one in after.members]
    require(len(set(ids)) == len(ids), "a member twice", after)
    for one in after.members:
        known = before.find(one.node_id)
        same = known is not None and known.number == one.number
        require(same or one.number >= before.next_number, "a number is given twice", before, after)


RELEVANT_MAX: Final = 3


def relevant(newest: Configuration, nodes: list[SimNode], committed_end: int) -> tuple[Configuration, ...]:
    """The newest committed configuration, and those that may yet become committed."""
    found = {(newest.index, newest.term): newest}
    for node in nodes:
        for one in reversed(node.log.configurations):
            if one.index <= max(newest.index, committed_end):
                break
            found[one.index, one.term] = one
    return tuple(found[key] for key in sorted(found))[-RELEVANT_MAX:]
