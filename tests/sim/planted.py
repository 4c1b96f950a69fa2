"""Bugs to plant on purpose: each breaks one rule of the core, and some seed must show it.

A simulator that never fails proves nothing. ``planted(name)`` replaces one method for the length of a ``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final, cast
from unittest.mock import patch

from dledger.config import ReplicationConfig, ServerConfig
from dledger.core import leader_elector, standing
from dledger.core.dispatcher import EntryDispatcher
from dledger.core.handler import EntryHandler
from dledger.core.leader_elector import LeaderElector
from dledger.core.member_changes import MemberChanges
from dledger.core.member_state import Candidate, Leader, MemberState
from dledger.core.messages import (
    CheckedAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushKind,
    PushResponse,
    PushTruncate,
    Readmission,
    ReceivedPush,
    RoleReason,
    VoteRequest,
    VoteResult,
    Wake,
)
from dledger.core.ports import Log, ProducersAt
from dledger.core.producers import Plan, ProducerTable, Rebuilt, rebuild
from dledger.core.quorum_ack import QuorumAckChecker, ReadDone, ReadIndexQueue
from dledger.core.standing import Ballot, Electorate, Readmissions, Victory
from dledger.errors import DLedgerError, QuorumAckTimeoutError, ResponseCode, TermChangedError
from dledger.types import NO_INDEX, Configuration, HardState, LogIndex, NodeId, ProducerBatch, Standing, Term
from tests.sim import faults
from tests.sim.plant import Plant
from tests.sim.planted_machines import MACHINE_PLANTS
from tests.sim.simulation import Result, run_seed


def _counted(leader: Leader) -> list[LogIndex]:
    return [index for peer, index in leader.match.items() if leader.counts[peer]]


def _commit_old_terms(self: QuorumAckChecker) -> None:
    state, leader = self._state, self._state.role
    if isinstance(leader, Leader):
        held = sorted([state.durable_index, *_counted(leader)], reverse=True)[state.quorum - 1]
        if held > state.commit_index:
            state.advance_commit(held)
            state.outbox.wake |= Wake.DISPATCHERS | Wake.ELECTOR


def _commit_without_quorum(self: QuorumAckChecker) -> None:
    state, leader = self._state, self._state.role
    if isinstance(leader, Leader):
        held = sorted([state.durable_index, *_counted(leader)], reverse=True)[max(state.quorum - 2, 0)]
        if held > state.commit_index and state.log.term_at(held) == state.term:
            state.advance_commit(held)
            state.outbox.wake |= Wake.DISPATCHERS | Wake.ELECTOR


_append = EntryHandler._append


def _truncate_on_overlap(self: EntryHandler, push: CheckedAppend) -> None:
    state, run = self._state, push.run.run
    if self._continues_log(push.run) and state.commit_index < run.first_index <= state.log.last.index:
        state.log.truncate(run.first_index)
    _append(self, push)


def _vote_unsaved(self: MemberState, hard_state: HardState) -> None:
    forgotten = hard_state.term == self.hard_state.term
    self.hard_state = hard_state
    self.hard_state_version += not forgotten


def _flushed_is_verified(self: EntryHandler) -> LogIndex:
    return self.verified_index


def _stale_push(self: EntryHandler, sender: NodeId, push: ReceivedPush, _connection: int, now_ms: int) -> None:
    self._state.follow(sender, push.term, now_ms)
    if self._session != (self._state.term, sender):
        self._begin_session(sender)
    self._leader_epoch = push.epoch
    match push:
        case PushCompare():
            self._compare(push)
        case PushTruncate():
            self._truncate(push)
        case CheckedAppend():
            self._append(push)
        case PushCommit(commit_index=commit_index):
            self._commit(commit_index)
        case PushInstall():
            self._install(push)


def _commit_unverified(self: EntryHandler, leader_commit: LogIndex) -> None:
    self._state.advance_commit(min(leader_commit, self._state.log.last.index))
    self.take_standing_if_due()


_judge_vote = LeaderElector._judge_vote
_judge_pre_vote = LeaderElector._judge_pre_vote


def _any_log_wins(self: LeaderElector, sender: NodeId, request: VoteRequest, now_ms: int) -> VoteResult:
    return _judge_vote(self, sender, replace(request, last=max(request.last, self._state.log.last)), now_ms)


def _any_log_may_win(self: LeaderElector, request: VoteRequest, now_ms: int) -> VoteResult:
    return _judge_pre_vote(self, replace(request, last=max(request.last, self._state.log.last)), now_ms)


def _unconfirmed_reads(self: ReadIndexQueue) -> int:
    return self.round


def _whoever_votes_counts(
    ballots: Mapping[NodeId, Ballot], electorate: Electorate, _candidate: NodeId
) -> Victory | None:
    return Victory.MAJORITY if len(ballots) > len(electorate.voters) // 2 else None


def _majority_of_blanks_founds(
    ballots: Mapping[NodeId, Ballot], electorate: Electorate, candidate: NodeId
) -> Victory | None:
    blank = all(ballot.standing is Standing.BLANK for ballot in ballots.values())
    enough = len(ballots) > len(electorate.voters) // 2
    return Victory.FOUNDING if blank and enough else standing.victory(ballots, electorate, candidate)


def _at_once(self: Readmissions, peer: NodeId, _commit_index: LogIndex) -> Readmission | None:
    waiting = self._waiting.get(peer)
    return None if waiting is None else Readmission(waiting.boot_id, NO_INDEX)


def _counted_whoever_says_so(self: EntryDispatcher, leader: Leader, response: PushResponse) -> None:
    _raise_watermark(self, leader, replace(response, standing=Standing.FULL))


_init_dispatcher = EntryDispatcher.__init__


def _no_deadline(self: EntryDispatcher, state: MemberState, peer: NodeId, config: ReplicationConfig) -> None:
    _init_dispatcher(self, state, peer, replace(config, push_timeout_ms=10**9))


def _success_in_another_term(self: QuorumAckChecker, now_ms: int) -> int | None:
    self._advance_commit()
    while self._pending:
        head = self._pending[0]
        if head.needed_index <= self._state.commit_index:
            self._pop(head.batch)
        elif not isinstance(self._state.role, Leader):
            self._pop(TermChangedError("lost"))
        elif head.due_ms <= now_ms:
            self._pop(QuorumAckTimeoutError("late"))
        else:
            return head.due_ms
    return None


def _verified_of_last_leader(self: EntryHandler, leader: NodeId) -> None:
    self._session = (self._state.term, leader)
    self._leader_epoch = 0
    self._deferred.clear()
    self._ack_due = False


def _campaign_in_old_term(
    self: MemberState, now_ms: int, *, pre_vote: bool, reason: RoleReason = RoleReason.ELECTION_TIMEOUT
) -> None:
    before = self._view()
    if not pre_vote:
        term = self.term if self.term > 0 and self.hard_state.vote in (None, self.node_id) else Term(self.term + 1)
        self.save_hard_state(replace(self.hard_state, term=term, vote=self.node_id))
    self.role = Candidate(pre_vote, self.next_election_due_ms(now_ms), {self.node_id: self.own_ballot})
    self._announce(before, reason)


_compare = EntryDispatcher._compare


def _install_always(self: EntryDispatcher, now_ms: int) -> int:
    if self._state.log.begin.index == NO_INDEX:
        return _compare(self, now_ms)
    self._epoch += 1
    return self._install(now_ms)


def _answer_before_durable(self: EntryHandler, epoch: int, kind: PushKind) -> None:
    self._answer(epoch, kind, ResponseCode.SUCCESS)


_raise_watermark = EntryDispatcher._raise_watermark


def _count_verified(self: EntryDispatcher, leader: Leader, response: PushResponse) -> None:
    _raise_watermark(self, leader, replace(response, flushed_index=response.verified_index))


_submit = ReadIndexQueue.submit


def _nothing(self: object, *_arguments: object) -> None:
    pass


def _read_what_is_committed(
    self: ReadIndexQueue, now_ms: int, done: ReadDone, *, at_least: LogIndex = NO_INDEX
) -> None:
    leader = self._state.role
    if isinstance(leader, Leader):
        with patch.object(leader, "noop_index", NO_INDEX):
            _submit(self, now_ms, done, at_least=at_least)
    else:
        _submit(self, now_ms, done, at_least=at_least)


def _nobody_is_known(
    _log: Log, config: ServerConfig, _last_index: LogIndex, _now_ms: int, _base: ProducersAt | None = None
) -> Rebuilt:
    return Rebuilt(ProducerTable(config.replication), None)


def _only_committed_counts(
    log: Log, config: ServerConfig, _last_index: LogIndex, now_ms: int, base: ProducersAt | None = None
) -> Rebuilt:
    return rebuild(log, config, max(log.committed_index, log.begin.index), now_ms, base)


def _nothing_is_needed(_log: Log, _config: ServerConfig) -> None:
    return None


_plan = ProducerTable.plan


def _repeated_is_committed(self: ProducerTable, batch: ProducerBatch, count: int) -> Plan | DLedgerError:
    plan = _plan(self, batch, count)
    return plan if isinstance(plan, DLedgerError) else replace(plan, stored_index=NO_INDEX)


def _gaps_are_taken(self: ProducerTable, batch: ProducerBatch, count: int) -> Plan | DLedgerError:
    expected = self.next_sequence(batch.producer)
    return _plan(self, replace(batch, sequence=min(batch.sequence, expected)), count)


_seek_leadership = LeaderElector._seek_leadership


def _asks_once(self: LeaderElector, now_ms: int) -> None:
    role = self._state.role
    if isinstance(role, Candidate):
        role.election_due_ms = now_ms + 10**9
    else:
        _seek_leadership(self, now_ms)


_adopt = MemberState.adopt
_advance = MemberState.advance_commit


def _adopt_later(self: MemberState, configuration: Configuration) -> None:
    self.__dict__.setdefault("late", []).append(configuration)


def _adopt_what_is_committed(self: MemberState, index: LogIndex) -> None:
    for one in self.__dict__.pop("late", []):
        (_adopt if one.index <= index else _adopt_later)(self, one)
    _advance(self, index)


def _learners_hold(self: QuorumAckChecker) -> None:
    with _learners_as_voters(self._state):
        _advance_commit(self)


def _learners_are_heard(self: LeaderElector, leader: Leader, now_ms: int) -> bool:
    with _learners_as_voters(self._state):
        return _quorum_is_in_contact(self, leader, now_ms)


def _learners_confirm(self: ReadIndexQueue) -> int:
    with _learners_as_voters(self._state):
        return _confirmed_round(self)


_advance_commit = QuorumAckChecker._advance_commit
_quorum_is_in_contact = LeaderElector._quorum_is_in_contact
_confirmed_round = cast("Callable[[ReadIndexQueue], int]", ReadIndexQueue.confirmed_round.fget)  # type: ignore[attr-defined]


@contextmanager
def _learners_as_voters(state: MemberState) -> Iterator[None]:
    before = state.voting_peers
    state.voting_peers = state.peers
    yield
    state.voting_peers = before


def _learners_refuse(self: LeaderElector, sender: NodeId, request: VoteRequest, now_ms: int) -> VoteResult:
    if not self._state.membership.is_voter:
        return VoteResult.REJECT_UNKNOWN_MEMBER
    return _judge_vote(self, sender, request, now_ms)


def _unknown_are_refused(self: LeaderElector, sender: NodeId, request: VoteRequest, now_ms: int) -> VoteResult:
    if sender not in self._state.membership.voters:
        return VoteResult.REJECT_UNKNOWN_MEMBER
    return _judge_vote(self, sender, request, now_ms)


def _not_installed(_self: MemberState, _configuration: Configuration) -> bool:
    return False


def _of_the_current_alone(self: LeaderElector) -> Electorate:
    return Electorate(self._state.membership.voters)


_not_now = MemberChanges._not_now


def _before_its_own_entry(self: MemberChanges, leader: Leader) -> DLedgerError | None:
    with patch.object(leader, "noop_index", NO_INDEX):
        return _not_now(self, leader)


def _while_another_waits(self: MemberChanges, leader: Leader) -> DLedgerError | None:
    with patch.object(self._state.membership, "is_committed", new=True):
        return _not_now(self, leader)


_note_membership = MemberState._note_membership


def _nothing_is_withheld(self: MemberState) -> None:
    _note_membership(self)
    self.withheld = {}


PLANTS: Final[dict[str, tuple[Plant, ...]]] = {
    "commit-old-terms": (Plant(QuorumAckChecker, "_advance_commit", _commit_old_terms),),
    "commit-without-quorum": (Plant(QuorumAckChecker, "_advance_commit", _commit_without_quorum),),
    "truncate-on-overlap": (Plant(EntryHandler, "_append", _truncate_on_overlap),),
    "vote-not-saved": (Plant(MemberState, "save_hard_state", _vote_unsaved),),
    "ack-before-flush": (Plant(EntryHandler, "_flushed_index", _flushed_is_verified),),
    "leader-counts-unflushed": (Plant(MemberState, "durable_index", property(lambda self: self.log.last.index)),),
    "watermark-from-verified": (Plant(EntryDispatcher, "_raise_watermark", _count_verified),),
    "stale-push": (Plant(EntryHandler, "_execute", _stale_push),),
    "commit-unverified": (Plant(EntryHandler, "_commit", _commit_unverified),),
    "any-log-wins": (
        Plant(LeaderElector, "_judge_vote", _any_log_wins),
        Plant(LeaderElector, "_judge_pre_vote", _any_log_may_win),
    ),
    "unconfirmed-reads": (Plant(ReadIndexQueue, "confirmed_round", property(_unconfirmed_reads)),),
    "read-before-noop": (Plant(ReadIndexQueue, "submit", _read_what_is_committed),),
    "blank-votes-count": (Plant(leader_elector, "victory", _whoever_votes_counts),),
    "majority-of-blanks-founds": (Plant(leader_elector, "victory", _majority_of_blanks_founds),),
    "readmitted-at-once": (Plant(Readmissions, "due", _at_once),),
    "blank-acks-count": (Plant(EntryDispatcher, "_raise_watermark", _counted_whoever_says_so),),
    "asks-for-votes-once": (Plant(LeaderElector, "_seek_leadership", _asks_once),),
    "no-push-deadline": (Plant(EntryDispatcher, "__init__", _no_deadline),),
    "success-in-another-term": (Plant(QuorumAckChecker, "step", _success_in_another_term),),
    "verified-of-last-leader": (Plant(EntryHandler, "_begin_session", _verified_of_last_leader),),
    "campaign-in-old-term": (Plant(MemberState, "become_candidate", _campaign_in_old_term),),
    "install-always": (Plant(EntryDispatcher, "_compare", _install_always),),
    "truncate-answered-early": (Plant(EntryHandler, "_answer_when_durable", _answer_before_durable),),
    "forgotten-producers": (Plant(leader_elector, "rebuild", _nobody_is_known),),
    "producers-of-what-is-committed": (Plant(leader_elector, "rebuild", _only_committed_counts),),
    "expired-producers": (Plant(faults, "needed_from", _nothing_is_needed),),
    "repeated-answered-early": (Plant(ProducerTable, "plan", _repeated_is_committed),),
    "gaps-taken": (Plant(ProducerTable, "plan", _gaps_are_taken),),
    "no-adopted-term": (Plant(MemberState, "_adopt_term_of_log", _nothing),),
    "members-before-an-own-entry": (Plant(MemberChanges, "_not_now", _before_its_own_entry),),
    "two-changes-in-flight": (Plant(MemberChanges, "_not_now", _while_another_waits),),
    "members-when-committed": (
        Plant(MemberState, "adopt", _adopt_later),
        Plant(MemberState, "advance_commit", _adopt_what_is_committed),
    ),
    "learners-hold-entries": (Plant(QuorumAckChecker, "_advance_commit", _learners_hold),),
    "learners-are-contact": (Plant(LeaderElector, "_quorum_is_in_contact", _learners_are_heard),),
    "learners-confirm-reads": (Plant(ReadIndexQueue, "confirmed_round", property(_learners_confirm)),),
    "learners-refuse-votes": (Plant(LeaderElector, "_judge_vote", _learners_refuse),),
    "unknown-candidates-refused": (Plant(LeaderElector, "_judge_vote", _unknown_are_refused),),
    "members-not-installed": (Plant(MemberState, "install", _not_installed),),
    "members-not-reverted": (Plant(MemberState, "truncated", _nothing),),
    "all-of-the-new-members": (Plant(LeaderElector, "_electorate", _of_the_current_alone),),
    "removal-sent-early": (Plant(MemberState, "_note_membership", _nothing_is_withheld),),
    **MACHINE_PLANTS,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run the block with one bug in the core, or (None) with none."""
    with ExitStack() as stack:
        for plant in PLANTS[name] if name else ():
            stack.enter_context(patch.object(plant.owner, plant.name, plant.replacement))
        yield


def run_planted(seed: int, events: int, plant: str | None, *, trace: bool = False) -> Result:
    """Run one seed, with a bug if one is named."""
    with planted(plant):
        return run_seed(seed, events, trace=trace)
