"""The elector: candidate, leader and follower timers; votes; heartbeats; check-quorum; leadership transfer.

Raft §5.2 and §5.4.1 with the dissertation's pre-vote (§9.6), check-quorum (§6.2) and transfer (§3.10). Where DLedger's
Java elector differs (it campaigns again in its old term, compares logs before terms, and lets one expired answer depose
a leader with a quorum) Raft is followed; see docs/protocol.md.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import assert_never

from dledger.config import ServerConfig
from dledger.core import failure_detection, log_matching
from dledger.core.failure_detection import ProgressWatch
from dledger.core.leadership_transfer import LeadershipTransfer, TransferDone
from dledger.core.member_changes import MemberChanges
from dledger.core.member_state import Candidate, Follower, Leader, MemberState
from dledger.core.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    RoleReason,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
    VoteResult,
    Wake,
)
from dledger.core.noop_payload import UnreadablePayloadError
from dledger.core.noops import Noops
from dledger.core.producers import ProducerTable, rebuild
from dledger.core.quorum_ack import ReadIndexQueue
from dledger.core.standing import Ballot, Electorate, Readmissions, Victory, victory, what_keeps_from_electing
from dledger.errors import CorruptLogError, DiskFullError
from dledger.types import NO_INDEX, EntryId, NodeId, Standing, Term


class LeaderElector:
    """Decides who leads. Its thread calls ``step``; the transport's threads call ``on_...``; all under the lock."""

    def __init__(
        self, state: MemberState, reads: ReadIndexQueue, noops: Noops, changes: MemberChanges, config: ServerConfig
    ) -> None:
        self._state = state
        self._reads = reads
        self._noops = noops
        self._changes = changes
        self._config = config
        self._damaged = False
        """Whether rebuilding the producer table last failed; it is retried before a campaign."""
        self.unreadable_producers: str | None = None
        """Why this member cannot lead: its log's producer records are of an unknown format."""
        self._progress = ProgressWatch(state)
        self._heartbeat_due_ms = 0
        self.transfers = LeadershipTransfer(state, reads, announce=self._heartbeat)
        self._readmissions = Readmissions()
        self.vote_problem = ""
        """Why no leader is elected although all answering members would elect this one, for people."""
        self.client_address = ""
        self.pre_votes = 0
        """The number of pre-votes since this member started."""
        self.elections = 0
        """The number of campaigns, each in a new term."""

    # -- timers --------------------------------------------------------------------------------------------------

    def step(self, now_ms: int) -> int | None:
        """Do what is due and return the next due time."""
        due = self._step_role(now_ms)
        for other in (self.transfers.step(now_ms), self._changes.step(now_ms), self._reads.step(now_ms)):
            if other is not None:
                due = min(due, other)
        return due

    def _step_role(self, now_ms: int) -> int:
        state = self._state
        match state.role:
            case Leader() as leader:
                return self._step_leader(leader, now_ms)
            case Follower(election_due_ms=due) | Candidate(election_due_ms=due):
                if now_ms >= due:
                    self._seek_leadership(now_ms)
                    return self._role_due_ms()
                return due
            case role:
                assert_never(role)

    def _role_due_ms(self) -> int:
        match self._state.role:
            case Leader():
                return self._heartbeat_due_ms
            case Follower(election_due_ms=due) | Candidate(election_due_ms=due):
                return due
            case role:
                assert_never(role)

    def _step_leader(self, leader: Leader, now_ms: int) -> int:
        state = self._state
        if not self._quorum_is_in_contact(leader, now_ms):
            state.become_follower(state.term, None, now_ms, RoleReason.QUORUM_LOST)
            return self._role_due_ms()
        if state.quorum > 1 and self._progress.is_stuck(leader, now_ms):
            state.become_follower(state.term, None, now_ms, RoleReason.NO_PROGRESS)
            return self._role_due_ms()
        if now_ms >= self._heartbeat_due_ms or self._reads.wants_round:
            self._heartbeat(now_ms)
        return min(self._heartbeat_due_ms, self.transfers.step_preference(leader, now_ms))

    def _quorum_is_in_contact(self, leader: Leader, now_ms: int) -> bool:
        """Check-quorum: a leader that a quorum no longer answers must not believe that it leads."""
        limit = now_ms - self._state.election.election_timeout_ms_max
        peers = self._state.voting_peers
        in_contact = 1 + sum(leader.contact_ms[peer] > limit and leader.supports[peer] for peer in peers)
        return in_contact >= self._state.quorum

    def _heartbeat(self, now_ms: int) -> None:
        """Send a round of heartbeats, with what the leader remembers of its peers."""
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            return
        self._heartbeat_due_ms = now_ms + state.election.heartbeat_interval_ms
        self._append_for_waiting(leader)
        self._note_watermarks(leader)
        common = HeartbeatRequest(
            state.term,
            self._reads.begin_round(),
            self.client_address,
            transfer_target=leader.transfer_target,
            founded=state.hard_state.standing is Standing.FULL,
            watermarks=tuple(state.remembered.items()),
        )
        for peer in state.membership.contact_ids:
            readmission = self._readmissions.due(peer, max(state.commit_index, leader.held))
            doubted = leader.doubted.get(peer, 0)
            countersign = leader.countersigns.get(peer, 0)
            own = replace(common, readmission=readmission, doubted_boot_id=doubted, countersign=countersign)
            state.outbox.messages.append((peer, own))

    def _append_for_waiting(self, leader: Leader) -> None:
        """Append an entry for members without standing, which need one that a majority makes durable without them."""
        state = self._state
        log = state.log
        if leader.transferring or log.disk_full or not self._readmissions.needs_entry(log.last.index):
            return
        with suppress(DiskFullError):  # the next round tries again
            self._noops.append(log, state.term, b"")
            state.outbox.wake |= Wake.FLUSH | Wake.DISPATCHERS

    def _note_watermarks(self, leader: Leader) -> None:
        """Record what this leader knows to be durable, for others to remember."""
        state = self._state
        log = state.log
        known = [(peer, index) for peer, index in leader.match.items() if leader.counts[peer]]
        for member, index in ((state.node_id, state.durable_index), *known):
            if index > log.begin.index:
                try:
                    state.remember([(member, EntryId(log.term_at(index), index))])
                except CorruptLogError as damage:
                    state.outbox.damage.append(damage)

    # -- campaigns -----------------------------------------------------------------------------------------------

    def _seek_leadership(self, now_ms: int) -> None:
        """The election timeout passed without a leader: ask before disturbing the group (pre-vote)."""
        state = self._state
        if not state.may_campaign:
            state.become_follower(state.term, None, now_ms, RoleReason.NO_VOTER)
            if state.is_learner:  # changes nothing, but one that was removed is told so
                self._ask_for_votes(Term(state.term + 1), pre_vote=True)
            return
        if now_ms < self._progress.pause_until_ms:
            state.become_follower(state.term, None, now_ms, RoleReason.NO_PROGRESS)
            return
        if state.fenced:
            state.become_follower(state.term, None, now_ms, RoleReason.STANDING_LOST)
            return
        if not state.has_standing and state.log.flushed.sequence < state.log.write_sequence:
            # If elected by all, it would count at once, including what a power cut could still take from it.
            state.outbox.wake |= Wake.FLUSH
            state.become_follower(state.term, None, now_ms, RoleReason.STANDING_LOST)
            return
        if state.log.disk_full:  # it could not write its no-op, so winning would only cost a term
            state.become_follower(state.term, None, now_ms, RoleReason.DISK_FULL)
            return
        if self.unreadable_producers is not None:
            state.become_follower(state.term, None, now_ms, RoleReason.UNREADABLE_PRODUCERS)
            return
        if self._damaged and self._rebuilt(now_ms) is None:
            return
        if state.is_alone:
            self._campaign(now_ms, RoleReason.ELECTION_TIMEOUT)
            return
        self.pre_votes += 1
        role = state.role
        if isinstance(role, Candidate) and role.pre_vote and not role.repeats_left:  # all have had time to answer
            self.vote_problem = self._what_keeps_from_electing(role)
        repeats = failure_detection.repeats_left(role)
        reason = RoleReason.LEADER_GONE if repeats else RoleReason.ELECTION_TIMEOUT
        state.become_candidate(now_ms, pre_vote=True, reason=reason)
        failure_detection.hurry(state, repeats, now_ms)
        self._ask_for_votes(Term(state.term + 1), pre_vote=True)

    def _what_keeps_from_electing(self, candidate: Candidate) -> str:
        state = self._state
        problem = what_keeps_from_electing(candidate.ballots, self._electorate(), state.node_id)
        if state.contradicted_by and not problem:
            return f"{', '.join(sorted(state.contradicted_by))} committed different entries"
        return problem

    def _campaign(self, now_ms: int, reason: RoleReason) -> None:
        state = self._state
        self.elections += 1
        repeats = failure_detection.repeats_left(state.role)
        state.become_candidate(now_ms, pre_vote=False, reason=reason)
        failure_detection.hurry(state, repeats, now_ms)
        self._ask_for_votes(state.term, transfer=reason is RoleReason.LEADERSHIP_OFFERED)
        self._lead_if_elected(now_ms)

    def _ask_for_votes(self, term: Term, *, pre_vote: bool = False, transfer: bool = False) -> None:
        state = self._state
        committed = log_matching.stated(state)
        for peer in state.membership.contact_ids:
            remembered = log_matching.least_of(state, peer)
            countersign = state.countersign if pre_vote else 0
            request = VoteRequest(term, state.log.last, pre_vote, transfer, remembered, committed, countersign)
            state.outbox.messages.append((peer, request))

    def _electorate(self) -> Electorate:
        membership = self._state.membership
        return Electorate(membership.voters, frozenset(membership.previous_voters), not membership.is_explicit)

    def _lead_if_elected(self, now_ms: int) -> None:
        role = self._state.role
        if isinstance(role, Candidate):
            won = victory(role.ballots, self._electorate(), self._state.node_id)
            if won is not None and role.pre_vote:
                self._campaign(now_ms, RoleReason.PRE_VOTE_WON)
            elif won is not None:
                self._lead(role, won, now_ms)

    def _lead(self, candidate: Candidate, won: Victory, now_ms: int) -> None:
        """Won: append the no-op that lets earlier terms be committed (§5.4.2, §8), then send heartbeats at once.

        The no-op carries the log's producer records if the last ones lie so far back that new ones are due: the group
        waits for it. A leader without standing takes it: all members voted for it, so that none holds more.
        """
        state = self._state
        log = state.log
        last_index = log.last.index
        producers = self._rebuilt(now_ms)
        if producers is None:
            return
        due = producers.is_due(last_index, log.end_position, now_ms)
        try:
            payload = producers.snapshot(self._noops.room, now_ms) if due else b""
            batch = self._noops.append(log, state.term, payload)
        except DiskFullError:
            state.become_follower(state.term, None, now_ms, RoleReason.DISK_FULL)
            return
        if due:
            producers.written(batch.last_index, log.end_position, now_ms)
        if not state.has_standing:
            state.whole = True  # as far as anyone can tell: all of them vote for it
            state.take_standing(Standing.FOUNDER if won is Victory.FOUNDING else Standing.FULL)
        if not state.voting_peers:
            state.take_standing(Standing.FULL)
        self.vote_problem = ""
        self._readmissions.begin(candidate.ballots, last_index, unanimous=won is not Victory.MAJORITY)
        state.become_leader(batch.first_index, now_ms, producers)
        self.transfers.lead(now_ms)
        self._heartbeat(now_ms)

    def _rebuilt(self, now_ms: int) -> ProducerTable | None:
        """The producer table, rebuilt from the log; None if that cannot be read: then this member must not lead."""
        state = self._state
        self._damaged = False
        try:
            base = None if state.machine is None else state.machine.producers
            return rebuild(state.log, self._config, state.log.last.index, now_ms, base).table
        except UnreadablePayloadError as error:
            self.unreadable_producers = str(error)
            state.become_follower(state.term, None, now_ms, RoleReason.UNREADABLE_PRODUCERS)
        except CorruptLogError as damage:
            self._damaged = True
            state.outbox.damage.append(damage)
            state.become_follower(state.term, None, now_ms, RoleReason.DAMAGED_LOG)
        return None

    # -- votes ---------------------------------------------------------------------------------------------------

    def on_vote_request(self, sender: NodeId, request: VoteRequest, now_ms: int) -> VoteResponse:
        """Decide on a vote; the driver answers only after the hard state is durable."""
        state = self._state
        agree = log_matching.agree(state, request.committed)
        log_matching.note(state, sender, agree)
        self._note_countersign(sender, request, now_ms)
        if request.pre_vote:
            result = self._judge_pre_vote(request, now_ms)
        else:
            result = self._judge_vote(sender, request, now_ms)
        if result is VoteResult.ACCEPT and (agree is False or state.fenced):
            result = VoteResult.REJECT_SMALL_LEDGER_END
        granted = result is VoteResult.ACCEPT
        if granted and not request.pre_vote:
            state.save_hard_state(replace(state.hard_state, vote=sender))
            if isinstance(state.role, Follower):
                # Never earlier than the time until which the elector sleeps.
                state.role.election_due_ms = max(state.role.election_due_ms, state.next_election_due_ms(now_ms))
        return VoteResponse(
            term=request.term if granted else state.term,
            granted=granted,
            pre_vote=request.pre_vote,
            result=result,
            standing=self._standing_towards(request),
            boot_id=state.boot_id,
            used=state.is_used,
            remembered=log_matching.memory_of(state, sender),
            committed=log_matching.stated(state),
            other_history=agree is False,
            uid=state.uid,
            removed_at=state.removal_of(sender),
        )

    def _note_countersign(self, sender: NodeId, request: VoteRequest, now_ms: int) -> None:
        """Repeat it in heartbeats, in the first one of a term at once: the peer believes no others."""
        leader = self._state.role
        if not isinstance(leader, Leader) or not request.countersign or sender not in leader.match:
            return
        if sender not in leader.countersigns:
            self._heartbeat_due_ms = now_ms
            self._state.outbox.wake |= Wake.ELECTOR
        leader.countersigns[sender] = request.countersign

    def _standing_towards(self, request: VoteRequest) -> Standing:
        """The standing of this vote towards a candidate that remembers this member to have held more than it does.

        Only an answer to our own question takes standing for good: anyone can send a request in a member's name.
        """
        state = self._state
        is_less = state.standing.counts and state.log.last < request.remembered
        return Standing.DOUBTFUL if is_less else state.standing

    def _judge_pre_vote(self, request: VoteRequest, now_ms: int) -> VoteResult:
        state = self._state
        if state.hears_leader(now_ms):
            return VoteResult.REJECT_ALREADY_HAS_LEADER
        if request.term <= state.term:
            # A candidate's term must exceed those of all its voters: it may have led this one, and forgotten that.
            return VoteResult.REJECT_EXPIRED_TERM
        if request.last < state.log.last:
            return VoteResult.REJECT_SMALL_LEDGER_END
        return VoteResult.ACCEPT

    def _judge_vote(self, sender: NodeId, request: VoteRequest, now_ms: int) -> VoteResult:
        state = self._state
        if request.term < state.term:
            return VoteResult.REJECT_EXPIRED_TERM
        if request.term > state.term:
            if self.is_blocked(sender, request, now_ms):
                return VoteResult.REJECT_ALREADY_HAS_LEADER
            state.become_follower(request.term, None, now_ms)
        if state.leader_id is not None:
            return VoteResult.REJECT_ALREADY_HAS_LEADER
        if state.hard_state.vote not in (None, sender):
            return VoteResult.REJECT_ALREADY_VOTED
        if request.last < state.log.last:
            return VoteResult.REJECT_SMALL_LEDGER_END
        return VoteResult.ACCEPT

    def is_blocked(self, sender: NodeId, request: VoteRequest, now_ms: int) -> bool:
        """Whether a live leader blocks this request; not while that leader transfers leadership to ``sender``.

        The leader's own announcement is needed. Were ``request.transfer`` enough, anyone could depose it again and
        again.
        """
        role = self._state.role
        handed_over = request.transfer and not isinstance(role, Candidate) and role.transfer_target == sender
        return self._state.hears_leader(now_ms) and not handed_over

    def on_vote_response(self, sender: NodeId, response: VoteResponse, now_ms: int) -> None:
        """Count an answer; a quorum of them turns a pre-vote into a campaign and a campaign into leadership."""
        state = self._state
        state.learn_removed(response.removed_at)
        log_matching.on_answer(state, sender, response, now_ms)
        if sender not in state.contradicted_by:
            state.heed(response.remembered, sender, now_ms)
        role = state.role
        if response.pre_vote and response.granted:
            expected = Term(state.term + 1)
        else:
            expected = state.term
            if response.term > state.term:
                state.become_follower(response.term, None, now_ms)
                return
        if not isinstance(role, Candidate) or role.pre_vote != response.pre_vote or response.term != expected:
            return
        forgot = state.log.last < response.remembered and response.remembered.term >= expected
        if forgot and sender not in state.contradicted_by:
            # It held an entry of this very term, which it has forgotten: it may have led the term itself.
            state.become_follower(expected, None, now_ms)
            return
        if not state.membership.is_committed:  # if it is elsewhere, the voters before it are not needed (M6)
            state.learn_committed(log_matching.last_held(state, response.committed))
        if not response.granted or not log_matching.covers(state, response.committed):
            role.ballots.pop(sender, None)
            if sender in state.membership.voters:
                failure_detection.on_refusal(state, role, sender, now_ms)
            self._lead_if_elected(now_ms)  # by others, if this one is not needed
            return
        forgot = state.membership.is_forgetful(sender, response.uid)  # M11
        standing = Standing.BLANK if forgot else response.standing
        role.ballots[sender] = Ballot(standing, response.boot_id, response.used)
        self._lead_if_elected(now_ms)

    # -- heartbeats ----------------------------------------------------------------------------------------------

    def on_heartbeat_request(self, sender: NodeId, request: HeartbeatRequest, now_ms: int) -> HeartbeatResponse:
        """Follow the leader of the current or a later term; the answer to an older one carries the current term.

        Only the current leader's round is repeated: an earlier process of it also counted its rounds from 0.
        """
        state = self._state
        follows = state.follow(sender, request.term, now_ms)
        if follows:
            self._take_leaders_word(sender, request, now_ms)
        return HeartbeatResponse(
            term=state.term,
            read_sequence=request.read_sequence if follows and state.has_standing else 0,
            disk_full=state.log.disk_full,
            client_address=self.client_address,
            standing=state.standing,
            boot_id=state.boot_id,
            uid=state.uid,
            removed_at=state.removal_of(sender),
        )

    def _take_leaders_word(self, leader: NodeId, request: HeartbeatRequest, now_ms: int) -> None:
        """Apply what a leader states about itself and the members' memory."""
        state = self._state
        self.vote_problem = ""
        if isinstance(state.role, Follower):
            state.role.transfer_target = request.transfer_target
        state.remember(request.watermarks)
        if request.doubted_boot_id == state.boot_id:
            state.lose_standing(f"{leader} found that this member's log lacks entries it had acknowledged", now_ms)
        for member, held in request.watermarks:
            if member == state.node_id:
                state.heed(held, leader, now_ms)
        if request.founded and state.hard_state.standing is Standing.FOUNDER:
            state.take_standing(Standing.FULL)
        readmission = request.readmission
        if readmission is not None and readmission.boot_id == state.boot_id and not state.has_standing:
            state.readmission = readmission
            state.readmission_standing = Standing.FULL if request.founded else Standing.FOUNDER
            state.outbox.wake |= Wake.HANDLER

    def on_heartbeat_response(self, sender: NodeId, response: HeartbeatResponse, now_ms: int) -> None:
        """Record the contact; a higher term ends this leadership, so that the peer can rejoin (dledger #325)."""
        state = self._state
        state.learn_removed(response.removed_at)
        if response.term > state.term:
            state.become_follower(response.term, None, now_ms)
            return
        leader = state.role
        if isinstance(leader, Leader) and response.term == state.term and sender in leader.contact_ms:
            leader.contact_ms[sender] = now_ms
            leader.disk_full[sender] = response.disk_full
            if self._note_standing(leader, sender, response):
                self._reads.on_answer(sender, response.read_sequence)
            if leader.transferring:
                state.outbox.wake |= Wake.ELECTOR

    def _note_standing(self, leader: Leader, peer: NodeId, response: HeartbeatResponse) -> bool:
        """Count members with standing; let others regain it; once all have it, the group is founded.

        Returns whether the answer counts.
        """
        state = self._state
        if not response.standing.counts:
            leader.blank_boot_ids[peer] = response.boot_id
        counts = response.standing.counts and self._note_memory(leader, peer, response)
        self._readmissions.note(peer, response.standing, response.boot_id, state.log.last.index)
        leader.supports[peer] = counts or self._readmissions.is_elector(peer, response.boot_id)
        if not counts:
            leader.stand.discard(peer)
            return False
        leader.stand.add(peer)
        known = leader.boot_ids.get(peer) == response.boot_id and peer not in leader.doubted
        if known and not leader.counts[peer] and state.remembers(leader, peer, response.boot_id):
            leader.counts[peer] = True
            state.outbox.wake |= Wake.QUORUM_ACK
        if state.hard_state.standing is Standing.FOUNDER and leader.stand.issuperset(state.voting_peers):
            state.take_standing(Standing.FULL)
        return True

    def _note_memory(self, leader: Leader, peer: NodeId, response: HeartbeatResponse) -> bool:
        """Doubt a process whose directory is not the one in the configuration, unless it was readmitted since (M11).

        Returns whether it remembers.
        """
        leader.memories[peer] = response.boot_id, response.uid
        if self._state.remembers(leader, peer, response.boot_id):
            return True
        leader.counts[peer] = False
        leader.doubted[peer] = response.boot_id
        leader.match[peer] = NO_INDEX
        return False

    # -- leadership transfer -------------------------------------------------------------------------------------

    def transfer(self, target: NodeId | None, now_ms: int, done: TransferDone | None = None) -> None:
        """Transfer leadership to ``target``: see ``LeadershipTransfer.begin``."""
        self.transfers.begin(target, now_ms, done)

    def on_take_leadership(self, sender: NodeId, message: TakeLeadership, now_ms: int) -> None:
        """The leader transfers leadership here: campaign at once, without pre-vote (§3.10)."""
        state = self._state
        role = state.role
        follows = isinstance(role, Follower) and role.leader == sender
        able = state.may_campaign and state.has_standing and not state.log.disk_full
        able = able and self.unreadable_producers is None and now_ms >= self._progress.declines_until_ms
        if message.term == state.term and follows and able:
            if self._damaged and self._rebuilt(now_ms) is None:  # it may have been repaired since
                return
            self._campaign(now_ms, RoleReason.LEADERSHIP_OFFERED)
