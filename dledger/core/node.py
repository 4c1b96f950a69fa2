"""One complete member: assembles the parts and routes messages to them.

The caller holds the node's lock around every call, then takes the outbox and acts on it (``dledger.core.messages``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, assert_never

from dledger.config import ServerConfig
from dledger.core import failure_detection
from dledger.core.dispatcher import EntryDispatcher
from dledger.core.handler import EntryHandler
from dledger.core.leader_elector import LeaderElector
from dledger.core.member_changes import MemberChanges
from dledger.core.member_state import Leader, MemberState
from dledger.core.membership import Membership
from dledger.core.messages import (
    CheckedAppend,
    HeartbeatRequest,
    HeartbeatResponse,
    LoadRun,
    Message,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
    VoteResult,
    Wake,
)
from dledger.core.noop_payload import check_name
from dledger.core.noops import Noops, Wrap
from dledger.core.ports import Log, MachineState, Random
from dledger.core.quorum_ack import QuorumAckChecker, ReadIndexQueue, SequenceDone
from dledger.core.standing import MemberRun
from dledger.errors import DLedgerError, InvalidRequestError, UnknownMemberError
from dledger.types import EntryId, HardState, LogIndex, NodeId, Term

_NOTHING_REMEMBERED: Final[Mapping[NodeId, EntryId]] = {}
TERM_STEP_MAX = 10**6
"""How far ahead of its own a member accepts a term at once; at one election per second, eleven days of elections."""


class Node:
    """The protocol of one member.

    ``remembered`` is what an earlier run knew members to have held, or part of it; ``wrap_noop`` makes the bodies of
    no-op entries where the log has a record format of its own. ``membership``: as ``recover_membership`` found it, None
    for the configured members. ``uid``: of this member's directory, 0 if it has none. ``machine``: of a
    state machine on the log, None without one.
    """

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        *,
        log: Log,
        hard_state: HardState,
        random: Random,
        run: MemberRun,
        now_ms: int,
        remembered: Mapping[NodeId, EntryId] = _NOTHING_REMEMBERED,
        wrap_noop: Wrap | None = None,
        membership: Membership | None = None,
        uid: int = 0,
        machine: MachineState | None = None,
    ) -> None:
        replication = config.replication
        self.state = MemberState(
            config,
            log=log,
            hard_state=hard_state,
            random=random,
            run=run,
            now_ms=now_ms,
            membership=membership,
            uid=uid,
            machine=machine,
        )
        self.state.remember(remembered.items())
        self.reads = ReadIndexQueue(
            self.state, timeout_ms=replication.ack_timeout_ms, pending_max=replication.pending_entries_max
        )
        self.noops = Noops(config, wrap_noop)
        self.dispatchers: dict[NodeId, EntryDispatcher] = {}
        """Of all members with which this one speaks; changes as they do, under the lock."""
        self._replication = replication
        self._epoch = 0
        """The highest of members that are gone: one that comes back in the same term takes earlier attempts for given
        up.
        """
        self._make_dispatchers()
        self.state.on_membership = self._make_dispatchers
        self.changes = MemberChanges(self.state, self.noops, self.dispatchers)
        self.elector = LeaderElector(self.state, self.reads, self.noops, self.changes, config)
        self.changes.hand_over = lambda now_ms, done: self.elector.transfer(None, now_ms, done)
        self.handler = EntryHandler(self.state, replication, config.store.segment_bytes)
        self.quorum_ack = QuorumAckChecker(self.state, self.reads, self.noops, replication)

    def _make_dispatchers(self) -> None:
        contacts = self.state.membership.contact_ids
        for peer in contacts:
            if peer not in self.dispatchers:
                self.dispatchers[peer] = EntryDispatcher(self.state, peer, self._replication)
                self.dispatchers[peer].begin_after(self._epoch)
        for gone in self.dispatchers.keys() - set(contacts):
            dispatcher = self.dispatchers.pop(gone)
            dispatcher.end()
            self._epoch = max(self._epoch, dispatcher.epoch)

    # -- user requests; others go to ``quorum_ack`` (appends), ``reads`` and ``elector`` (transfers) -------------------

    def producer_sequence(self, name: str, now_ms: int, done: SequenceDone) -> None:
        """Ask for the number of a producer's next entry, which ``done`` gets; 0 if it is not known.

        All entries counted are committed then, and this member certainly leads: no other member has a later answer.
        """
        try:
            check_name(name)
        except InvalidRequestError as error:
            refusal = error  # the handler's name is unbound after it
            self.state.outbox.completions.append(lambda: done(refusal))
            return
        leader = self.state.role
        sequence = leader.producers.ask(name, now_ms) if isinstance(leader, Leader) else 0

        def confirmed(result: LogIndex | DLedgerError) -> None:
            done(result if isinstance(result, DLedgerError) else sequence)

        self.reads.submit(now_ms, confirmed, at_least=self.state.log.last.index)

    # -- messages ------------------------------------------------------------------------------------------------

    def answer(
        self, sender: NodeId, request: VoteRequest | HeartbeatRequest, now_ms: int
    ) -> VoteResponse | HeartbeatResponse:
        """Answer a request of any member of this cluster (M7: this member may be behind, and not know the sender).

        Send the answer only after the current hard state is durable.
        """
        self._refuse_own_name(sender)
        if request.term > self.state.term + TERM_STEP_MAX and not self._comes_near(sender, request, now_ms):
            term = self.state.term
            if isinstance(request, VoteRequest):
                return VoteResponse(term, granted=False, result=VoteResult.REJECT_EXPIRED_TERM)
            return HeartbeatResponse(term)
        match request:
            case VoteRequest():
                answer = self.elector.on_vote_request(sender, request, now_ms)
                return self._tell_who_leads(answer) if answer.pre_vote else answer
            case HeartbeatRequest():
                leader_check = self.handler.leader_check
                beat = self.elector.on_heartbeat_request(sender, leader_check.checked(request), now_ms)
                leader_check.on_heartbeat(sender, request, now_ms)
                return beat
            case _:
                assert_never(request)

    def _tell_who_leads(self, answer: VoteResponse) -> VoteResponse:
        """Say whether this member leads: followers ask before they accept pushes (``log_matching.LeaderCheck``)."""
        leads = isinstance(self.state.role, Leader)
        return replace(answer, leads=leads, begin=self.state.log.begin if leads else None)

    def receive(self, sender: NodeId, message: Message, now_ms: int, connection: int = 0) -> None:
        """Take any other message, also from a member that this one does not know (M7).

        ``connection``: see ``Envelope``.
        """
        self._refuse_own_name(sender)
        if message.term > self.state.term + TERM_STEP_MAX and not self._comes_near(sender, message, now_ms):
            return
        match message:
            case VoteResponse():
                self.handler.on_vote_response(sender, message)
                self.elector.on_vote_response(sender, message, now_ms)
                failure_detection.on_answer(self.state, sender, message, now_ms)
            case HeartbeatResponse():
                self.elector.on_heartbeat_response(sender, message, now_ms)
            case TakeLeadership():
                self.elector.on_take_leadership(sender, message, now_ms)
            case PushResponse():
                if sender in self.dispatchers:
                    self.dispatchers[sender].on_response(message, now_ms)
            case PushCompare() | PushTruncate() | CheckedAppend() | PushCommit() | PushInstall():
                self.handler.on_push(sender, message, connection)
            case VoteRequest() | HeartbeatRequest() | PushAppend() | LoadRun():
                raise InvalidRequestError(f"{type(message).__name__} cannot be received here")
            case _:
                assert_never(message)

    def connection_lost(self, peer: NodeId) -> None:
        """Pushes in flight towards ``peer`` are lost."""
        if peer in self.dispatchers:
            self.dispatchers[peer].on_connection_lost()

    def follows(self, leader: NodeId) -> Term | None:
        """The term in which this member follows ``leader``, if it does."""
        return self.state.term if self.state.leader_id == leader else None

    def leader_lost(self, leader: NodeId, term: Term, now_ms: int, *, gone: bool) -> None:
        """The connection of ``leader``, followed in ``term``, broke; ``gone``: and its address refuses another one.

        Otherwise something answers there: ask whether it leads.
        """
        if gone:
            while self.handler.step(now_ms) is not None:  # what the leader had sent before is no sign of life
                pass
            failure_detection.suspect(self.state, leader, term, now_ms)
        elif failure_detection.doubt(self.state, leader, term, now_ms):
            self.handler.leader_check.ask(leader)

    def flushed(self) -> None:
        """The log became more durable."""
        self.handler.on_flushed()
        self.state.outbox.wake |= Wake.QUORUM_ACK

    def abandon(self, error: DLedgerError) -> None:
        """No part is stepped any more: fail all that waits."""
        self.quorum_ack.abandon(error)
        self.reads.abandon(error)
        self.changes.abandon(error)
        self.elector.transfers.abandon(error)

    def _comes_near(self, sender: NodeId, message: Message, now_ms: int) -> bool:
        """Whether a term so far ahead is acceptable at once; if not, this member moves ``TERM_STEP_MAX`` towards it.

        Terms only grow, and end: no forged or damaged message may use up those of the whole group. But members whose
        terms have diverged must meet again, whatever the cause, so each message brings them closer; not while a leader
        is heard, because it needs no member in another term.
        """
        state = self.state
        if isinstance(message, VoteRequest) and (message.pre_vote or self.elector.is_blocked(sender, message, now_ms)):
            return True  # granted or refused without a change of term
        answer = isinstance(message, VoteResponse | HeartbeatResponse | PushResponse)
        if not (answer and state.hears_leader(now_ms)):
            state.become_follower(Term(state.term + TERM_STEP_MAX), None, now_ms)
        return False

    def _refuse_own_name(self, sender: NodeId) -> None:
        if sender == self.state.node_id:
            raise UnknownMemberError(f"a message to {sender!r} came in its own name")
