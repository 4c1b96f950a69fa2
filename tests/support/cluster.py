"""A group of real ``Node`` objects in virtual time, joined by a wire whose every message a test may drop or hold.

A part is stepped only when its ``Wake`` flag was set or its own due time has come, exactly as a thread that waits on a
condition would: a missing wake-up therefore shows as a scenario that stands still. A part that keeps waking itself at
one instant fails the test, too. Nothing here uses threads, sockets or real time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from dledger.config import ElectionConfig, Member, ReplicationConfig, ServerConfig, StoreConfig
from dledger.core.dispatcher import EntryDispatcher
from dledger.core.member_state import Follower, Leader
from dledger.core.membership import Membership, implicit_configuration, recover_membership
from dledger.core.messages import (
    CheckedAppend,
    HeartbeatRequest,
    LoadRun,
    Message,
    PushAppend,
    RoleChange,
    TakeLeadership,
    VoteRequest,
    Wake,
)
from dledger.core.node import Node
from dledger.core.ports import Random
from dledger.core.standing import MemberRun
from dledger.errors import DLedgerError, LeaderHint
from dledger.types import (
    NO_INDEX,
    AppendedBatch,
    ChangeKind,
    Configuration,
    HardState,
    LogIndex,
    Magic,
    MemberChange,
    NodeId,
    Role,
    Standing,
    Term,
)
from dledger.values import MIB
from tests.support.disk_log import DiskLog
from tests.support.invariants import LastCheck, check

N0, N1, N2, N3, N4 = (NodeId(f"n{number}") for number in range(5))
STEPS_AT_ONE_INSTANT_MAX = 3000
_STANDING = {True: Standing.FULL, False: Standing.BLANK}
Result = TypeVar("Result")


class FixedTimeouts:
    """Randomness that always gives the start of the range plus ``offset``: elections come out the same every time."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def randrange(self, start: int, stop: int, /) -> int:
        return min(start + self.offset, stop - 1)


def make_config(node_id: NodeId, size: int, **changes: object) -> ServerConfig:
    """A member's settings; ``changes`` may name fields of any of the sections."""
    members = tuple(Member(NodeId(f"n{number}"), "127.0.0.1", 20911 + number) for number in range(size))
    timers = ElectionConfig(election_timeout_ms_min=500, election_timeout_ms_max=1000)  # whatever the defaults are
    sections = {"election": timers, "replication": ReplicationConfig(), "store": StoreConfig()}
    for name, value in changes.items():
        owner = next(key for key, section in sections.items() if hasattr(section, name))
        sections[owner] = replace(sections[owner], **{name: value})  # type: ignore[type-var]  # any section
    return ServerConfig(node_id=node_id, members=members, **sections).check()  # type: ignore[arg-type]  # by name


@dataclass(frozen=True, slots=True)
class Sent:
    """One message on the wire."""

    sender: NodeId
    target: NodeId
    message: Message


class Outcome(Generic[Result]):
    """What a ``done`` callback got; calling it twice is an error."""

    def __init__(self) -> None:
        self.results: list[Result | DLedgerError] = []

    def __call__(self, result: Result | DLedgerError) -> None:
        self.results.append(result)
        assert len(self.results) == 1, "completed twice"

    @property
    def pending(self) -> bool:
        return not self.results

    @property
    def error(self) -> DLedgerError:
        """The error it ended with."""
        (result,) = self.results
        assert isinstance(result, DLedgerError), result
        return result

    @property
    def value(self) -> Result:
        """What it ended with, which must be no error."""
        (result,) = self.results
        assert not isinstance(result, DLedgerError), repr(result)
        return result


@dataclass(slots=True)
class _Part:
    """One worker: what wakes it, what it does, when it wants to be called without being woken."""

    wake: int
    step: Callable[[int], int | None]
    runnable: bool = True
    due_ms: int | None = None


@dataclass(slots=True)
class Host:
    """One member's machine: what survives a crash (``log``, ``saved``) and what does not (``node``)."""

    node_id: NodeId
    log: DiskLog
    saved: HardState
    random: Random
    boots: int = 0
    up: bool = False
    flush_paused: bool = False
    uid: int = 0
    joins: bool = False
    members: Configuration | None = None
    """The newest committed explicit configuration, as its directory has it."""
    fixed_parts: list[_Part] = field(default_factory=list)
    pushers: dict[EntryDispatcher, _Part] = field(default_factory=dict)
    flush_wanted: bool = False
    role_changes: list[RoleChange] = field(default_factory=list)
    running: Node | None = None
    seen: LastCheck | None = None
    checked: int = -1
    """Up to where its committed entries were compared with the others'."""

    @property
    def parts(self) -> list[_Part]:
        """All workers."""
        return [*self.fixed_parts, *self.pushers.values()]

    @property
    def membership(self) -> Membership:
        """As the member that runs sees it."""
        return self.node.state.membership

    @property
    def node(self) -> Node:
        """The protocol of the member that runs now."""
        assert self.running is not None
        return self.running


class Cluster:
    """``size`` members; everything is deterministic. ``Cluster(3)`` elects n0 first, because it times out first."""

    def __init__(
        self,
        size: int,
        *,
        start: bool = True,
        voters: bool = True,
        logs: Mapping[NodeId, DiskLog] | None = None,
        **changes: object,
    ) -> None:
        self.now_ms = 0
        self.size = size
        self.changes = changes
        self._change_ids = 0
        self.wire: list[Sent] = []
        self.held: list[Sent] = []
        self.delivered: list[Sent] = []
        self.drops: list[Callable[[Sent], bool]] = []
        self.holds: list[Callable[[Sent], bool]] = []
        self.cut: list[tuple[NodeId, NodeId]] = []
        self.leaders: dict[Term, NodeId] = {}
        self.committed: dict[LogIndex, tuple[Term, bytes]] = {}
        self.ids = tuple(NodeId(f"n{number}") for number in range(size))
        self.hosts = {
            one: Host(
                one, DiskLog(), HardState(standing=_STANDING[voters]), FixedTimeouts(100 * number), uid=900 + number
            )
            for number, one in enumerate(self.ids)
        }
        for one, log in (logs or {}).items():
            self[one].log = log
            self[one].saved = HardState(max(log.last.term, Term(0)), standing=_STANDING[voters])
        if start:
            for one in self.ids:
                self.start(one)

    def __getitem__(self, node_id: NodeId) -> Host:
        return self.hosts[node_id]

    def config(self, node_id: NodeId) -> ServerConfig:
        """The settings of a member."""
        return make_config(node_id, max(self.size, int(node_id[1:]) + 1), **self.changes)

    # -- life ----------------------------------------------------------------------------------------------------

    def join(self, node_id: NodeId) -> Node:
        """Start a member of an empty disk that waits to be added (M12)."""
        self.ids = (*self.ids, node_id)
        number = int(node_id[1:])
        host = Host(node_id, DiskLog(), HardState(), FixedTimeouts(100 * number), uid=900 + number, joins=True)
        self.hosts[node_id] = host
        return self.start(node_id)

    def start(self, node_id: NodeId) -> Node:
        """Start a member from what its disk holds."""
        host = self[node_id]
        host.boots += 1
        config = self.config(node_id)
        implicit = Configuration() if host.joins else implicit_configuration(config)
        node = Node(
            config,
            log=host.log,
            hard_state=host.saved,
            random=host.random,
            run=MemberRun(int(node_id[1:]) * 1000 + host.boots, countersign=7000 + host.boots),
            now_ms=self.now_ms,
            membership=recover_membership(node_id, host.log, host.members, NO_INDEX, implicit),
            uid=host.uid,
        )
        host.running, host.up, host.flush_wanted, host.seen, host.checked = node, True, False, None, -1
        host.fixed_parts = [
            _Part(Wake.ELECTOR, node.elector.step),
            _Part(Wake.HANDLER, node.handler.step),
            _Part(Wake.QUORUM_ACK, node.quorum_ack.step),
        ]
        host.pushers = {}
        self._follow_dispatchers(host)
        return node

    def _follow_dispatchers(self, host: Host) -> None:
        """Dispatchers come and go with the members."""
        current = host.node.dispatchers.values()
        host.pushers = {one: part for one, part in host.pushers.items() if one in current}
        for one in current:
            host.pushers.setdefault(one, _Part(Wake.DISPATCHERS, one.step))

    def crash(self, node_id: NodeId, *, notice: bool = True) -> None:
        """Kill a member: unflushed entries and all memory are lost; with ``notice`` its peers see the stream break."""
        host = self[node_id]
        host.up = False
        host.log.crash()
        if notice:
            for peer in self.ids:
                if peer != node_id and self[peer].up:
                    self[peer].node.connection_lost(node_id)
                    self._collect(self[peer])

    def restart(self, node_id: NodeId) -> Node:
        """Crash a member and start it again at once."""
        self.crash(node_id)
        return self.start(node_id)

    def wipe(self, node_id: NodeId) -> None:
        """Crash a member and give it an empty disk."""
        self.crash(node_id)
        host = self[node_id]
        host.log, host.saved, host.members = DiskLog(), HardState(), None
        host.uid += 1000

    # -- the network ---------------------------------------------------------------------------------------------

    def isolate(self, node_id: NodeId) -> None:
        """Cut a member off from all others, both ways."""
        self.partition([node_id], [one for one in self.ids if one != node_id])

    def partition(self, some: Iterable[NodeId], others: Iterable[NodeId]) -> None:
        """Cut every link between two sides, both ways."""
        theirs = list(others)
        for one in some:
            self.cut += [(one, other) for other in theirs] + [(other, one) for other in theirs]

    def heal(self) -> None:
        """Undo partitions, drops and holds (what is held stays held until ``release``)."""
        self.cut.clear()
        self.drops.clear()
        self.holds.clear()

    def drop(self, *kinds: type, sender: NodeId | None = None, target: NodeId | None = None) -> None:
        """Lose messages of these kinds (any, when none is named) from ``sender`` to ``target``."""
        self.drops.append(lambda sent: _matches(sent, kinds, sender, target))

    def hold(self, *kinds: type, sender: NodeId | None = None, target: NodeId | None = None) -> None:
        """Keep such messages back until ``release``: a slow network."""
        self.holds.append(lambda sent: _matches(sent, kinds, sender, target))

    def release(self) -> None:
        """Deliver what was held, in order, and hold no longer."""
        self.holds.clear()
        held, self.held = self.held, []
        for sent in held:
            self.deliver(sent)
        self.settle()

    def deliver(self, sent: Sent) -> None:
        """Hand a message to its target now, whatever the network would do; a dead target loses it."""
        host = self.hosts.get(sent.target)
        if host is None or not host.up:
            return
        self.delivered.append(sent)
        node, message = host.node, sent.message
        if isinstance(message, VoteRequest | HeartbeatRequest):
            answer = node.answer(sent.sender, message, self.now_ms)
            self._collect(host)
            self._send(host, sent.sender, answer)
            return
        if isinstance(message, PushAppend):
            checked = host.log.check_run(message.run)
            message = CheckedAppend(message.term, message.epoch, message.commit_index, checked)
        node.receive(sent.sender, message, self.now_ms)
        self._collect(host)

    # -- time ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Step and deliver until nothing more happens at this instant."""
        for _ in range(STEPS_AT_ONE_INSTANT_MAX):
            if not self._do_something():
                return
        raise AssertionError("the group never comes to rest: some part wakes itself for ever")

    def advance(self, ms: int) -> None:
        """Let time pass, stopping at every due time on the way."""
        end = self.now_ms + ms
        self.settle()
        while (due := self._next_due()) is not None and due <= end:
            self.now_ms = max(due, self.now_ms)
            self.settle()
        self.now_ms = end
        self.settle()

    def advance_until(self, reached: Callable[[], bool], limit_ms: int = 10_000) -> None:
        """Let time pass in small steps until ``reached()``; fails after ``limit_ms``."""
        end = self.now_ms + limit_ms
        self.settle()
        while not reached():
            assert self.now_ms < end, "not reached in time"
            self.advance(10)

    def _next_due(self) -> int | None:
        dues = [part.due_ms for host in self.hosts.values() if host.up for part in host.parts]
        return min((due for due in dues if due is not None), default=None)

    def _do_something(self) -> bool:
        for host in self.hosts.values():
            if not host.up:
                continue
            for part in host.parts:
                if part.runnable or (part.due_ms is not None and part.due_ms <= self.now_ms):
                    part.runnable = False
                    part.due_ms = part.step(self.now_ms)
                    self._collect(host)
                    return True
            if host.flush_wanted and not host.flush_paused:
                self.flush(host.node_id)
                return True
        if not self.wire:
            return False
        sent = self.wire.pop(0)
        if any(hold(sent) for hold in self.holds):
            self.held.append(sent)
        elif (sent.sender, sent.target) in self.cut or any(drop(sent) for drop in self.drops):
            self.lose(sent)
        else:
            self.deliver(sent)
        return True

    def lose(self, sent: Sent) -> None:
        """Called for each message that the network loses; a place for tests to watch."""

    def flush(self, node_id: NodeId) -> None:
        """One flush of a member's disk."""
        host = self[node_id]
        host.flush_wanted = False
        host.log.flush()
        host.node.flushed()
        self._collect(host)

    def change_roles(self, host: Host, changes: Iterable[RoleChange]) -> None:
        """Called with each member's changes of role, term or leader; a place for tests to watch."""

    # -- what a driver does with an outbox -----------------------------------------------------------------------

    def _collect(self, host: Host) -> None:
        node = host.node
        outbox = node.state.outbox.take()
        host.saved = node.state.hard_state
        if outbox.membership is not None:
            committed = outbox.membership.committed
            host.members = None if committed.index == NO_INDEX else committed
            self._follow_dispatchers(host)
        for target, message in outbox.messages:
            self._send(host, target, message)
        for completion in outbox.completions:
            completion()
        host.role_changes += outbox.role_changes
        self.change_roles(host, outbox.role_changes)
        for part in host.parts:
            part.runnable = part.runnable or bool(part.wake & outbox.wake)
        host.flush_wanted = host.flush_wanted or bool(outbox.wake & Wake.FLUSH)
        host.seen = check(node, host.seen)
        self._check_group(host)

    def _send(self, host: Host, target: NodeId, message: Message) -> None:
        if isinstance(message, LoadRun):
            run = host.log.read_run(message.first_index, message.last_index)
            message = PushAppend(message.term, message.epoch, message.commit_index, run)
        self.wire.append(Sent(host.node_id, target, message))

    def _check_group(self, host: Host) -> None:
        """Election safety, and state machine safety by value (Raft figure 3)."""
        state = host.node.state
        if isinstance(state.role, Leader):
            known = self.leaders.setdefault(state.term, host.node_id)
            assert known == host.node_id, f"two leaders in term {state.term}: {known} and {host.node_id}"
        for number in range(max(host.checked, host.log.begin.index) + 1, state.commit_index + 1):
            entry = host.log.read(LogIndex(number))
            fact = (entry.term, entry.body)
            assert self.committed.setdefault(entry.index, fact) == fact, f"entry {number} was committed twice"
        host.checked = state.commit_index

    # -- what tests ask ------------------------------------------------------------------------------------------

    def leader(self) -> NodeId | None:
        """The running member that leads the highest term."""
        leading = [host.node.state for host in self.hosts.values() if host.up]
        leading = [state for state in leading if isinstance(state.role, Leader)]
        return max(leading, key=lambda state: state.term).node_id if leading else None

    def role(self, node_id: NodeId) -> Role:
        """A member's role."""
        return self[node_id].node.state.role_name

    def term(self, node_id: NodeId) -> Term:
        """A member's term."""
        return self[node_id].node.state.term

    def commit(self, node_id: NodeId) -> LogIndex:
        """A member's commit index."""
        return self[node_id].node.state.commit_index

    def terms(self, node_id: NodeId) -> list[int]:
        """The terms of a member's entries, in order."""
        log = self[node_id].log
        return [log.term_at(LogIndex(index)) for index in range(log.begin.index + 1, log.last.index + 1)]

    def bodies(self, node_id: NodeId) -> list[bytes]:
        """The bodies of a member's NORMAL entries."""
        log = self[node_id].log
        entries = log.read_range(LogIndex(log.begin.index + 1), log.last.index, MIB)
        return [entry.body for entry in entries if entry.magic is Magic.NORMAL]

    def same_logs(self) -> bool:
        """Whether all running members hold the same entries, all committed."""
        hosts = [host for host in self.hosts.values() if host.up]
        first = hosts[0].log
        return all(
            host.log.last == first.last
            and host.log.last_chain_crc == first.last_chain_crc
            and host.node.state.commit_index == first.last.index
            for host in hosts
        )

    def elect(self, node_id: NodeId = N0) -> Node:
        """Let the group settle and check that ``node_id`` leads it."""
        self.advance_until(lambda: self.leader() is not None)
        self.advance(150)
        assert self.leader() == node_id
        return self[node_id].node

    def act(self, node_id: NodeId) -> None:
        """Take what a direct call to a member put into its outbox, and let things happen."""
        self._collect(self[node_id])
        self.settle()

    def append(self, node_id: NodeId, *bodies: bytes) -> Outcome[AppendedBatch]:
        """Append a batch through a member."""
        outcome: Outcome[AppendedBatch] = Outcome()
        self[node_id].node.quorum_ack.append(bodies, self.now_ms, outcome)
        self.act(node_id)
        return outcome

    def read(self, node_id: NodeId) -> Outcome[LogIndex]:
        """Ask a member for a linearizable read."""
        outcome: Outcome[LogIndex] = Outcome()
        self[node_id].node.reads.submit(self.now_ms, outcome)
        self.act(node_id)
        return outcome

    def change(self, node_id: NodeId, kind: ChangeKind, member: NodeId, **more: Any) -> Outcome[Configuration]:  # noqa: ANN401  # by name
        """Ask a member to change the members."""
        outcome: Outcome[Configuration] = Outcome()
        self._change_ids += 1
        values: dict[str, Any] = {"change_id": self._change_ids, "host": "127.0.0.1", "port": 20911 + int(member[1:])}
        self[node_id].node.changes.submit(MemberChange(kind, member, **(values | more)), self.now_ms, outcome)
        self.act(node_id)
        return outcome

    def transfer(self, node_id: NodeId, target: NodeId | None) -> Outcome[LeaderHint]:
        """Ask a member to hand over leadership."""
        outcome: Outcome[LeaderHint] = Outcome()
        self[node_id].node.elector.transfer(target, self.now_ms, outcome)
        self.act(node_id)
        return outcome

    def deliver_election(self, node_id: NodeId, voters: Iterable[NodeId]) -> None:
        """Make ``node_id`` campaign and ``voters`` elect it, however well they still hear another leader."""
        state = self[node_id].node.state
        state.become_candidate(self.now_ms, pre_vote=False)
        request = VoteRequest(state.term, state.log.last, transfer=True)
        self._collect(self[node_id])
        self._announce(node_id)
        for voter in voters:
            self.deliver(Sent(node_id, voter, request))
        self.settle()
        assert self.role(node_id) is Role.LEADER

    def take_leadership(self, node_id: NodeId) -> None:
        """Make a follower campaign at once, as its leader's hand-over would."""
        state = self[node_id].node.state
        assert state.leader_id is not None
        self._announce(node_id)
        self.deliver(Sent(state.leader_id, node_id, TakeLeadership(state.term)))
        self.settle()

    def _announce(self, target: NodeId) -> None:
        """All have the leader's word that it hands over to ``target``."""
        for host in self.hosts.values():
            if host.up and isinstance(role := host.node.state.role, Leader | Follower):
                role.transfer_target = target


def _matches(sent: Sent, kinds: tuple[type, ...], sender: NodeId | None, target: NodeId | None) -> bool:
    return (
        (not kinds or isinstance(sent.message, kinds))
        and sender in (None, sent.sender)
        and target in (None, sent.target)
    )


def fill(log: DiskLog, *terms: int, committed: int = -1) -> None:
    """Append one entry per term (its body names index and term) and flush; optionally note a commit index."""
    for term in terms:
        log.append_as_leader(Term(term), [b"%d@%d" % (log.last.index + 1, term)])
    if committed >= 0:
        log.set_committed(LogIndex(committed))
    log.flush()


def made_log(*terms: int, committed: int = -1, begin: int = -1) -> DiskLog:
    """A log of one entry per term, whose entries up to ``begin`` have expired."""
    log = DiskLog()
    fill(log, *terms, committed=committed)
    if begin >= 0:
        log.expire(LogIndex(begin))
        log.flush()
    return log
