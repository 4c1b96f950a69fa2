"""One ``Node`` whose peers are the test: messages in by hand, effects out as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dledger.core.member_state import Leader
from dledger.core.messages import (
    CheckedAppend,
    HeartbeatRequest,
    HeartbeatResponse,
    LoadRun,
    Message,
    PushAppend,
    PushCompare,
    PushInstall,
    PushKind,
    PushResponse,
    ReceivedPush,
    RoleChange,
    SnapshotFetch,
    VoteRequest,
    VoteResponse,
    VoteResult,
    Wake,
)
from dledger.core.node import Node
from dledger.core.ports import MachineState, Random
from dledger.core.standing import MemberRun
from dledger.errors import CorruptLogError, ResponseCode
from dledger.types import NO_ENTRY, Boundary, EntryId, HardState, LogIndex, NodeId, Role, Standing, Term
from tests.support.cluster import N0, FixedTimeouts, fill, make_config
from tests.support.disk_log import DiskLog


class Solo:
    """Member n0 of a group of ``size``; its log holds one flushed entry per number in ``terms``."""

    def __init__(
        self,
        size: int = 3,
        *,
        terms: Iterable[int] = (),
        committed: int = -1,
        hard_state: HardState | None = None,
        random: Random | None = None,
        log: DiskLog | None = None,
        boot_id: int = 1,
        machine: MachineState | None = None,
        **changes: object,
    ) -> None:
        self.log = log if log is not None else DiskLog()
        fill(self.log, *terms, committed=committed)
        self.now_ms = 0
        self.config = make_config(N0, size, **changes)
        self.node = Node(
            self.config,
            log=self.log,
            hard_state=hard_state or HardState(Term(max(0, self.log.last.term)), standing=Standing.FULL),
            random=random or FixedTimeouts(0),
            run=MemberRun(boot_id, countersign=4711),
            now_ms=0,
            machine=machine,
        )
        self.state = self.node.state
        self.role_changes: list[RoleChange] = []
        self.damage: list[CorruptLogError] = []
        self.fetches: list[SnapshotFetch] = []
        self.woken = Wake.NONE
        self.epochs: dict[NodeId, int] = {}
        """The epoch of the last push to each peer."""

    # -- effects -------------------------------------------------------------------------------------------------

    def take(self) -> list[tuple[NodeId, Message]]:
        """Empty the outbox: run completions, note role changes, damage and wakes, give the messages."""
        outbox = self.state.outbox.take()
        for completion in outbox.completions:
            completion()
        self.role_changes += outbox.role_changes
        self.damage += outbox.damage
        if outbox.fetch_snapshot is not None:
            self.fetches.append(outbox.fetch_snapshot)
        self.woken = outbox.wake
        for target, message in outbox.messages:
            self.epochs[target] = getattr(message, "epoch", self.epochs.get(target, 0))
        return outbox.messages

    def sent(self, *kinds: type) -> list[Message]:
        """The messages of these kinds among what the outbox holds (the others are lost)."""
        return [message for _, message in self.take() if isinstance(message, kinds)]

    @property
    def role(self) -> Role:
        return self.state.role_name

    @property
    def leader_role(self) -> Leader:
        """Its role's record, which must be a leader's."""
        assert isinstance(self.state.role, Leader)
        return self.state.role

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, ms: int = 0) -> list[tuple[NodeId, Message]]:
        """Let ``ms`` pass, step the elector once, give what it sent."""
        self.now_ms += ms
        self.node.elector.step(self.now_ms)
        return self.take()

    def time_out(self) -> list[tuple[NodeId, Message]]:
        """Let the longest election timeout pass."""
        return self.tick(self.config.election.election_timeout_ms_max)

    def settle_quorum(self) -> None:
        """One step of the quorum-ack checker, its completions run."""
        self.node.quorum_ack.step(self.now_ms)
        self.take()

    # -- messages ------------------------------------------------------------------------------------------------

    def ask_vote(
        self,
        sender: NodeId,
        term: int,
        last: EntryId = NO_ENTRY,
        *,
        pre_vote: bool = False,
        transfer: bool = False,
        remembered: EntryId = NO_ENTRY,
    ) -> VoteResponse:
        """A peer asks for a vote."""
        request = VoteRequest(Term(term), last, pre_vote, transfer, remembered)
        response = self.node.answer(sender, request, self.now_ms)
        assert isinstance(response, VoteResponse)
        return response

    def hear(self, sender: NodeId, term: int, read_sequence: int = 0, **more: object) -> HeartbeatResponse:
        """A heartbeat arrives, with ``more`` of its fields; then the handler looks what it means."""
        heartbeat = HeartbeatRequest(Term(term), read_sequence, countersign=self.state.countersign)
        request = replace(heartbeat, **more)  # type: ignore[arg-type]  # by name
        response = self.node.answer(sender, request, self.now_ms)
        self.node.handler.step(self.now_ms)
        assert isinstance(response, HeartbeatResponse)
        return response

    def vote(
        self,
        sender: NodeId,
        *,
        granted: bool = True,
        term: int | None = None,
        pre_vote: bool = False,
        standing: Standing = Standing.FULL,
        boot_id: int = 7,
        used: bool = False,
        **more: object,
    ) -> None:
        """A peer answers a vote request of the present term (a pre-vote: of the next one), with ``more`` fields."""
        own = Term((self.state.term + (1 if pre_vote and granted else 0)) if term is None else term)
        response = VoteResponse(own, granted, pre_vote, standing=standing, boot_id=boot_id, used=used)
        self.node.receive(sender, replace(response, **more), self.now_ms)  # type: ignore[arg-type]  # by name

    def beat(
        self,
        sender: NodeId,
        read_sequence: int = 0,
        *,
        term: int | None = None,
        disk_full: bool = False,
        standing: Standing = Standing.FULL,
        boot_id: int = 7,
    ) -> None:
        """A peer answers a heartbeat."""
        own = self.state.term if term is None else Term(term)
        answer = HeartbeatResponse(own, read_sequence, disk_full, standing=standing, boot_id=boot_id)
        self.node.receive(sender, answer, self.now_ms)

    def campaign(self) -> None:
        """Time out and win the pre-vote: a candidate of a new term, its vote requests in the outbox."""
        self.time_out()
        needed = self.state.quorum - 1
        for peer in self.state.peers[:needed]:
            self.vote(peer, pre_vote=True)
        assert self.role is (Role.CANDIDATE if needed else Role.LEADER)

    def lead(self) -> None:
        """Win an election; the effects are lost."""
        self.campaign()
        for peer in self.state.peers[: self.state.quorum - 1]:
            self.vote(peer)
        assert self.role is Role.LEADER
        self.take()

    def matches(self, peer: NodeId, index: int) -> None:
        """As leader: a peer with standing holds everything up to there."""
        self.leader_role.match[peer] = LogIndex(index)
        self.leader_role.counts[peer] = True

    def push(
        self,
        sender: NodeId,
        push: ReceivedPush | PushAppend,
        *,
        flush: bool = True,
        confirm: bool = True,
        connection: int = 0,
    ) -> list[PushResponse]:
        """A push arrives and is executed, its sender confirming that it leads if asked; gives the answers."""
        if isinstance(push, PushAppend):
            push = CheckedAppend(push.term, push.epoch, push.commit_index, self.log.check_run(push.run))
        self.node.receive(sender, push, self.now_ms, connection)
        while self.node.handler.step(self.now_ms) is not None:
            pass
        if confirm:
            self.confirm(sender, push.term, begin=begin_of(push) if isinstance(push, PushInstall) else None)
        if flush:
            self.flush()
        return [message for message in self.sent(PushResponse) if isinstance(message, PushResponse)]

    def confirm(self, sender: NodeId, term: int, *, leads: bool = True, begin: Boundary | None = None) -> None:
        """A member answers whether it leads ``term``; and where its log begins, if it leads."""
        result = VoteResult.REJECT_ALREADY_HAS_LEADER
        answer = VoteResponse(Term(term), granted=False, pre_vote=True, result=result, leads=leads, begin=begin)
        self.node.handler.on_vote_response(sender, answer)
        while self.node.handler.step(self.now_ms) is not None:
            pass

    def flush(self) -> None:
        """The disk catches up."""
        self.log.flush()
        self.node.flushed()

    # -- as leader towards one peer ------------------------------------------------------------------------------

    def dispatch(self, peer: NodeId, ms: int = 0) -> list[Message]:
        """Step the dispatcher of ``peer`` once; gives what it sent to that peer."""
        self.now_ms += ms
        self.node.dispatchers[peer].step(self.now_ms)
        return [message for target, message in self.take() if target == peer]

    def respond(
        self,
        peer: NodeId,
        kind: PushKind,
        code: ResponseCode = ResponseCode.SUCCESS,
        *,
        verified: int = -1,
        flushed: int | None = None,
        end: int | None = None,
        conflict: EntryId = NO_ENTRY,
        epoch: int | None = None,
        term: int | None = None,
        boot_id: int = 7,
        standing: Standing = Standing.FULL,
    ) -> None:
        """A peer answers a push, by default the latest attempt's and with everything verified flushed."""
        self.node.receive(
            peer,
            PushResponse(
                term=self.state.term if term is None else Term(term),
                epoch=self.epochs.get(peer, 0) if epoch is None else epoch,
                kind=kind,
                code=code,
                verified_index=LogIndex(verified),
                flushed_index=LogIndex(verified if flushed is None else flushed),
                end_index=LogIndex(verified if end is None else end),
                conflict=conflict,
                boot_id=boot_id,
                standing=standing,
            ),
            self.now_ms,
        )

    def streaming(self, peer: NodeId, match: int | None = None) -> None:
        """Bring a dispatcher to APPEND with the peer matching up to ``match`` (default: the whole log)."""
        self.dispatch(peer)
        verified = self.log.last.index if match is None else match
        if verified < self.log.last.index:
            self.respond(peer, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, end=verified)
            self.dispatch(peer)
        self.respond(peer, PushKind.COMPARE, verified=verified)
        self.take()


class Source:
    """Some other member's log as leader of ``term``, to make pushes from."""

    def __init__(self, term: int, *terms: int) -> None:
        self.term = Term(term)
        self.log = DiskLog()
        fill(self.log, *terms)
        self.epoch = 0

    def compare(self, index: int, *, epoch: int | None = None) -> PushCompare:
        """COMPARE at one of its entries."""
        self.epoch += 1
        at = LogIndex(index)
        previous = EntryId(self.log.term_at(at), at)
        return PushCompare(self.term, self.epoch if epoch is None else epoch, previous, self.log.chain_crc_at(at))

    def append(self, first: int, last: int | None = None, *, commit: int = -1, epoch: int | None = None) -> PushAppend:
        """APPEND of a range of its entries."""
        run = self.log.read_run(LogIndex(first), self.log.last.index if last is None else LogIndex(last))
        return PushAppend(self.term, self.epoch if epoch is None else epoch, LogIndex(commit), run)


def begin_of(push: PushInstall) -> Boundary:
    """Where the log of the leader begins that sends it."""
    return Boundary(push.before_begin.index, push.before_begin.term, push.position, push.chain_crc)


def load_runs(messages: Iterable[Message]) -> list[tuple[int, int]]:
    """First and last index of every APPEND among the messages."""
    return [(m.first_index, m.last_index) for m in messages if isinstance(m, LoadRun)]
