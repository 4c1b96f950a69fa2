"""What must hold across members, checked after every event on the one member that the event touched.

Every check costs O(what changed). The chain CRC covers a whole prefix, so two logs that agree on the term and the
chain CRC of one entry agree up to it; the final check compares the bytes all the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dledger.core.member_state import Leader
from dledger.core.messages import HeartbeatResponse, Message, PushResponse, VoteRequest, VoteResponse, VoteResult
from dledger.errors import ResponseCode
from dledger.types import NO_INDEX, NO_TERM, Configuration, EntryId, HardState, LogIndex, NodeId, Term
from tests.sim.acknowledgements import Acknowledgements, counts_one_that_forgot
from tests.sim.configurations import ConfigurationChecks, configuration_in, is_noop
from tests.sim.mending import Onlooker
from tests.sim.violations import Violation, require
from tests.support import invariants

if TYPE_CHECKING:
    from tests.sim.driver import SimNode

__all__ = ["Checker", "Violation", "require"]


class Checker:
    """The omniscient observer of one run."""

    def __init__(
        self,
        nodes: Callable[[], Sequence[SimNode]],
        on_leader: Callable[[SimNode], None],
        on_commit: Callable[[SimNode], None],
        onlooker: Onlooker,
        founders: Configuration,
        on_configuration: Callable[[SimNode | None], None],
    ) -> None:
        self.members = ConfigurationChecks(founders, on_configuration)
        self._onlooker = onlooker
        self._nodes = nodes
        self._on_leader = on_leader
        self._on_commit = on_commit
        self.committed: list[EntryId] = []
        self.chain: list[int] = []
        self.records: list[bytes] = []
        self.bodies: dict[bytes, int] = {}
        """Every committed body that is no NOOP's, and where it is."""
        self._commit_terms: list[Term] = []
        self._leaders: dict[Term, tuple[NodeId, int]] = {}
        self._votes: dict[tuple[NodeId, Term], NodeId] = {}
        """Those that count."""
        self._entries: dict[EntryId, int] = {}
        self._acknowledgements = Acknowledgements()
        self._committed_at_loss: dict[NodeId, LogIndex] = {}
        """What had been committed when a member's disk was lost: it does not count again without it."""
        self._forgetful = False
        """Whether a disk was lost or set back."""
        self.elections = 0
        self.known_index = -1
        """What some client knows to be committed: it was told so, or has read that far."""

    # -- after every event ---------------------------------------------------------------------------------------

    def observe_damaged(self, node: SimNode) -> None:
        """The same where logs may be damaged: as if they were not."""
        before, self._onlooker.looks = self._onlooker.looks, True
        self.observe(node)
        self._onlooker.looks = before

    def observe(self, node: SimNode) -> None:
        """Check one running member against itself, its past and the others."""
        core = node.core
        if core is None:
            return
        node.seen = invariants.check(core, node.seen)
        state = core.state
        log = node.log
        # A group of one writes before its term is durable; a crash may take back both, and nobody has seen either.
        if log.write_sequence != node.seen_sequence and log.last.term <= node.hard.term:
            node.seen_sequence = log.write_sequence
            chain = self._entries.setdefault(log.last, log.last_chain_crc)
            require(chain == log.last_chain_crc, "log matching", node.name, log.last)
        self.members.observe(node, self.committed)
        role = state.role
        if state.commit_index > node.seen_commit:
            self._observe_commit(node, state.commit_index)
            if isinstance(role, Leader):
                self._observe_counting(node, state.term, state.commit_index)
        if isinstance(role, Leader):
            if node.seen_leader_term != state.term:
                node.seen_leader_term = state.term
                self._observe_leader(node, state.term)
            if self._forgetful:
                self._observe_counted(node, role)

    def _observe_counted(self, node: SimNode, leader: Leader) -> None:
        for other in self._nodes():
            if other.forgetful and other is not node:
                wrong = counts_one_that_forgot(node, leader, other)
                require(not wrong, "a leader counts a member that forgot", node.name, other.name)

    def observe_loss(self, node: SimNode) -> None:
        """A disk is about to be lost or set back: what it held counts all the same, where it was acknowledged."""
        self._forgetful = True
        self._acknowledgements.note_loss(node)
        self._committed_at_loss[node.name] = LogIndex(len(self.chain) - 1)

    def _observe_counting(self, node: SimNode, term: Term, commit: LogIndex) -> None:
        """A leader commits by counting what a quorum told it in its term, and only entries of that term (§5.4.2)."""
        own = node.log.term_at(commit)
        require(own == term, "an entry of an older term was committed by counting", node.name, commit, own, term)
        counted = self._acknowledgements.count(node, term, commit)
        require(counted >= node.in_force.quorum, "committed without a quorum of answers", node.name, commit, counted)
        self._on_commit(node)

    def _observe_commit(self, node: SimNode, commit: LogIndex) -> None:
        log = node.log
        node.seen_commit = commit
        new = len(self.chain)
        known = min(commit, new - 1)
        if known >= log.begin.index and known >= 0:
            ours = (log.term_at(LogIndex(known)), log.chain_crc_at(LogIndex(known)))
            require(ours == (self.committed[known].term, self.chain[known]), "state machine safety", node.name, known)
        if commit < new:
            return
        require(log.begin.index < new, "a gap in what was ever committed", node.name, new)
        for index in range(new, commit + 1):
            self.committed.append(EntryId(log.term_at(LogIndex(index)), LogIndex(index)))
            self.chain.append(log.chain_crc_at(LogIndex(index)))
            record = log.record_bytes(LogIndex(index))
            self.records.append(record)
            if not is_noop(record):
                require(record[48:] not in self.bodies, "an entry was committed twice", index, record[48:68])
                self.bodies[record[48:]] = index
            elif (configuration := configuration_in(record, self.committed[-1])) is not None:
                self.members.observe_commit(configuration)
                self._require_flushed(node, LogIndex(index))
        term = max(node.seen.term if node.seen else NO_TERM, self._commit_terms[-1] if self._commit_terms else NO_TERM)
        self._commit_terms += [term] * (len(self.chain) - new)
        self._require_durable(node, commit)

    def _require_durable(self, node: SimNode, index: LogIndex) -> None:
        """A quorum of the voters holds the entry durably at the moment in which anybody commits it."""
        holders = 0
        voters = node.in_force.voters
        for other in self._nodes():
            if other.name not in voters:
                continue
            log = other.log
            if log.begin.index <= index <= other.held_index and log.chain_crc_at(index) == self.chain[index]:
                holders += 1
            elif self._forgetful:
                holders += self._acknowledgements.held_once(other.name, index, self.chain[index])
        enough = holders >= node.in_force.quorum
        require(enough, "committed without a durable quorum", node.name, index, f"{holders} hold it")

    def _require_flushed(self, node: SimNode, index: LogIndex) -> None:
        """A quorum has flushed a configuration, whatever its flush mode (M3): no power cut may take it back."""
        voters = node.in_force.voters
        holders = sum(
            other.log.begin.index <= index <= other.log.flushed.index
            and other.log.chain_crc_at(index) == self.chain[index]
            for other in self._nodes()
            if other.name in voters
        )
        lost = sum(self._acknowledgements.held_once(name, index, self.chain[index]) for name in voters)
        enough = holders + lost >= node.in_force.quorum
        require(enough, "a configuration was committed and not flushed", node.name, index, f"{holders} hold it")

    def _observe_leader(self, node: SimNode, term: Term) -> None:
        me = (node.name, node.boots if node.in_force.quorum > 1 else 0)  # alone, it leads before its term is durable
        self.elections += 1
        require(self._leaders.setdefault(term, me) == me, "two leaders in a term", term, me, self._leaders[term])
        self.members.observe_leader(node, term, len(self.committed) - 1)
        log = node.log
        # One that was paused may win late, in a term that is over: it need not hold what later terms committed.
        last = LogIndex(bisect_left(self._commit_terms, term) - 1)
        if last >= 0:
            holds = log.begin.index <= last <= log.last.index and log.chain_crc_at(last) == self.chain[last]
            require(holds, "a leader lacks a committed entry", node.name, term, last, log.last)
        self._on_leader(node)

    # -- hard state and messages ---------------------------------------------------------------------------------

    def observe_save(self, node: SimNode, state: HardState) -> None:
        """One vote per term, over all the lives of a disk.

        A member that has forgotten whom it voted for may save another vote, as long as it does not say that it counts.
        """
        require(state.term >= node.hard.term, "a saved term goes back", node.name, state, node.hard)
        if state.voter and not node.hard.voter:
            lacking = self._committed_at_loss.get(node.name, NO_INDEX)
            held = node.log.flushed.index
            require(held >= lacking, "a member counts again that could lose what it said", node.name, held, lacking)
        node.forgetful = node.forgetful and not (state.voter and not node.hard.voter)
        if state.vote == node.name and state.term > node.hard.term:
            node.campaigns += 1
            possible = 5 + (node.now_ms - node.started_ms) // 200
            require(node.campaigns <= possible, "campaigns without a pause", node.name, node.campaigns, possible)
        if state.vote is None:
            return
        if node.hard.voter and not node.forgetful:
            self._observe_vote(node, state.term, state.vote)
        elif state.voter and not node.hard.voter:  # only now does it count: for the leader that gave it standing
            self._votes[node.name, state.term] = state.vote

    def _observe_vote(self, node: SimNode, term: Term, candidate: NodeId) -> None:
        vote = self._votes.setdefault((node.name, term), candidate)
        require(vote == candidate, "two votes in a term", node.name, term, candidate, vote)

    def observe_send(self, node: SimNode, target: NodeId, message: Message) -> None:
        """Nothing leaves before the term and vote it depends on are durable."""
        hard = node.hard
        match message:
            case VoteRequest(term=term, pre_vote=pre_vote):
                ready = (
                    hard.term >= term - 1
                    if pre_vote
                    else hard.term > term or (hard.term, hard.vote) == (term, node.name)
                )
            case VoteResponse(term=term, granted=granted, pre_vote=pre_vote, standing=standing):
                require(not message.other_history, "two histories where there is one", node.name, target)
                known = message.result is not VoteResult.REJECT_UNKNOWN_MEMBER
                require(known, "a vote was refused because of who asked or was asked", node.name, target)  # M7
                if granted and not pre_vote:
                    self.members.observe_vote(node.name, target, term, counts=standing.counts)
                if granted and not pre_vote and standing.counts:
                    self._observe_vote(node, term, target)
                voted = hard.term > term or (hard.term == term and hard.vote == target)
                ready = pre_vote or voted if granted else hard.term >= term  # a granted pre-vote promises nothing
            case HeartbeatResponse(term=term):
                self._acknowledgements.note(node, message)
                ready = hard.term >= term
            case PushResponse(term=term, code=code):
                require(code is not ResponseCode.OTHER_HISTORY, "two histories where there is one", node.name, message)
                self._acknowledgements.note(node, message)
                ready = hard.term >= term
            case _:
                ready = hard.term >= message.term
        require(ready, "a message left before its hard state was durable", node.name, message, hard)

    # -- clients -------------------------------------------------------------------------------------------------

    def observe_ack(self, term: Term, first_index: LogIndex, bodies: Sequence[bytes]) -> None:
        """What is acknowledged is committed, in the acknowledged place, with the bytes that were given."""
        for index in range(first_index, first_index + len(bodies)):
            require(index < len(self.records), "acknowledged before it was committed", index)
            require(self.committed[index].term == term, "acknowledged in another term", index, term)
        self.observe_stored(first_index, bodies)

    def observe_stored(self, first_index: LogIndex, bodies: Sequence[bytes]) -> None:
        """What is said to be stored somewhere is committed there."""
        for index, body in enumerate(bodies, first_index):
            require(index < len(self.records), "acknowledged before it was committed", index)
            require(self.records[index][48:] == body, "another entry was committed in its place", index)
            self.known_index = max(self.known_index, index)

    def observe_read(self, node: SimNode, result: LogIndex, must_see: int) -> None:
        """A linearizable read sees what was committed, and all that was known to be when it began."""
        require(result >= must_see, "a stale read", node.name, result, must_see)
        commit = node.core.state.commit_index if node.core else result
        require(result <= commit, "a read of what is not committed", result, commit)
        self.known_index = max(self.known_index, result)

    def finish(self, forbidden: Sequence[bytes]) -> None:
        """The O(n) checks: every replica byte for byte, no refused append in the log."""
        for body in forbidden:
            require(body not in self.bodies, "a refused append was applied", body[:20])
        members = {one.node_id for one in self.members.newest.members}
        for node in self._nodes():
            log = node.log
            ends = log.last.index == len(self.records) - 1 or node.name not in members
            require(ends, "a replica ends elsewhere", node.name, log.last)
            last = log.last.index if node.name in members else min(log.last.index, log.committed_index)
            for index in range(log.begin.index + 1, last + 1):
                same = log.record_bytes(LogIndex(index)) == self.records[index]
                require(same, "a replica differs", node.name, index)
