"""Changes of a group's members, on its leader: one configuration at a time (M1), on request and as earlier ones intend.

A configuration says what is still to be done: which learner becomes a voter when it has caught up, and which voter
leaves for it. So any leader carries it on, and nobody has to wait for it. A leader never appends a configuration
without itself as a voter: it transfers leadership, and the next leader appends it.

``PeerCatchUp`` knows how far the members have followed their leader, and whether a learner may become a voter (M4). A
learner is ready if its process has standing and if it acknowledged durably, within the last minimum election timeout,
everything that was committed one such timeout earlier. So the entry that promotes it never waits for it, however long
its log is and however fast entries arrive.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from dledger.core.dispatcher import DispatcherState, EntryDispatcher
from dledger.core.member_state import NEVER_MS, Leader, MemberState
from dledger.core.membership import encode_configuration
from dledger.core.messages import Wake, hint
from dledger.core.noops import Noops
from dledger.errors import (
    ChangeInProgressError,
    CorruptLogError,
    DiskFullError,
    DLedgerError,
    EntryTooLargeError,
    InvalidRequestError,
    LeaderHint,
    LeaderNotReadyError,
    LeaderTransferringError,
    MemberExistsError,
    MemberUnknownError,
    NotLeaderError,
    NotReadyToPromoteError,
    StaleConfigurationError,
    TermChangedError,
    TooManyMembersError,
    WouldLoseQuorumError,
    invariant,
)
from dledger.records import record
from dledger.types import (
    ANY_CONFIGURATION,
    LEARNERS_MAX,
    NO_INDEX,
    NO_TERM,
    VOTERS_MAX,
    ChangeKind,
    ClusterMember,
    Configuration,
    LogIndex,
    MemberChange,
    MemberProgress,
    MemberRole,
    NodeId,
    Standing,
)

_RATE_MS: Final = 1000
"""A rate is that of at least so long."""
_SAMPLES_PER_TIMEOUT: Final = 5


@record(frozen=True, slots=True)
class _Place:
    """Up to where a member's log was equal to the leader's, in bytes of the log."""

    at_ms: int
    position: int
    rate: int


class PeerCatchUp:
    """One leadership's samples. Under the node's lock."""

    def __init__(self, state: MemberState, dispatchers: Mapping[NodeId, EntryDispatcher]) -> None:
        self._state = state
        self._dispatchers = dispatchers
        self._committed: deque[tuple[int, LogIndex]] = deque()
        self._places: dict[NodeId, _Place] = {}
        self._timeout_ms = state.election.election_timeout_ms_min

    @property
    def interval_ms(self) -> int:
        """How often to take a sample while a learner catches up."""
        return max(1, self._timeout_ms // _SAMPLES_PER_TIMEOUT)

    def begin(self) -> None:
        self._committed.clear()
        self._places.clear()

    def sample(self, leader: Leader, now_ms: int) -> None:
        """Note how much is committed, and how far each member is."""
        known = self._committed
        known.append((now_ms, self._state.commit_index))
        while len(known) > 1 and known[1][0] <= now_ms - self._timeout_ms:
            known.popleft()
        for gone in self._places.keys() - leader.match.keys():
            del self._places[gone]
        for peer, match in leader.match.items():
            before = self._places.get(peer)
            if before is None or now_ms >= before.at_ms + _RATE_MS:
                position = self._position_after(match)
                rate = 0 if before is None else (position - before.position) * 1000 // (now_ms - before.at_ms)
                self._places[peer] = _Place(now_ms, position, max(0, rate))

    def what_keeps_from_promoting(self, leader: Leader, peer: NodeId, now_ms: int) -> str:
        """Why a member may not become a voter now, for people; empty if it may."""
        silent_ms = now_ms - leader.contact_ms[peer]
        if silent_ms > self._timeout_ms:
            return (
                "it was never heard" if leader.contact_ms[peer] == NEVER_MS else f"it was last heard {silent_ms} ms ago"
            )
        if leader.disk_full[peer]:
            return "its disk is full"
        if not self._has_standing(leader, peer):
            return "it has no standing yet, which it takes when it holds an entry appended after it was first heard"
        if leader.memories.get(peer, (0, 0))[0] != leader.boot_ids.get(peer):
            return "it has not been heard since it took standing"
        if not self._committed or self._committed[0][0] > now_ms - self._timeout_ms:
            return f"the leader has not looked for {self._timeout_ms} ms yet: ask again"
        if leader.match[peer] < self._committed[0][1]:
            entries, size = self._lag(leader.match[peer])
            return f"it lacks {entries} entries ({size} bytes), and receives {self._rate(peer)} bytes per second"
        return ""

    def progress(self, leader: Leader, now_ms: int) -> tuple[MemberProgress, ...]:
        """The progress of each peer."""
        learners = self._state.membership.current.learners
        found = []
        for peer in self._state.peers:
            entries, size = self._lag(leader.match[peer])
            heard_ms = leader.contact_ms[peer]
            found.append(
                MemberProgress(
                    peer,
                    self._health(leader, peer, now_ms),
                    leader.match[peer],
                    entries,
                    size,
                    self._rate(peer) if entries else 0,
                    -1 if heard_ms == NEVER_MS else now_ms - heard_ms,
                    self.what_keeps_from_promoting(leader, peer, now_ms) if peer in learners else "",
                )
            )
        return tuple(found)

    def _health(self, leader: Leader, peer: NodeId, now_ms: int) -> str:
        heard_ms = leader.contact_ms[peer]
        if heard_ms == NEVER_MS or (
            peer not in leader.boot_ids and peer not in leader.stand and heard_ms <= leader.since_ms
        ):
            return "never seen"
        if now_ms - heard_ms > self._state.election.election_timeout_ms_max:
            return "unreachable"
        if leader.disk_full[peer]:
            return "disk full"
        dispatcher = self._dispatchers[peer]
        if dispatcher.state is DispatcherState.INSTALL:
            return "installing"
        behind = bool(self._committed) and leader.match[peer] < self._committed[0][1]
        if behind or leader.match[peer] == NO_INDEX:
            return "catching up"
        return "in sync" if self._has_standing(leader, peer) else "no standing"

    @staticmethod
    def _has_standing(leader: Leader, peer: NodeId) -> bool:
        """Also by its last heartbeat, which tells of a new process before that has answered a push."""
        return leader.counts[peer] and peer in leader.stand

    def _rate(self, peer: NodeId) -> int:
        place = self._places.get(peer)
        return 0 if place is None else place.rate

    def _lag(self, match: LogIndex) -> tuple[int, int]:
        """The entries and bytes that follow ``match``."""
        log = self._state.log
        return log.last.index - match, max(0, log.end_position - self._position_after(match))

    def _position_after(self, match: LogIndex) -> int:
        log = self._state.log
        following = LogIndex(match + 1)
        if following > log.last.index:
            return log.end_position
        if match <= log.begin.index:
            return log.begin.position
        try:
            return log.positions(following, following)[0]
        except CorruptLogError:  # maintenance of the log finds the damage
            return log.end_position


ChangeDone = Callable[[Configuration | DLedgerError], None]
HandOver = Callable[[int, Callable[[LeaderHint | DLedgerError], None] | None], None]
"""Transfers leadership to the best voter: the time, and who is told the result."""

_FAREWELL_MS: Final = 10_000
"""How long a leader tries to tell a removed member that its removal is committed."""
WAITING_MAX: Final = 64
"""How many repetitions of a request may wait for its change to be committed."""
HAND_OVER_PAUSE_MS: Final = 10_000
"""The time between two transfers to somebody who can remove this leader: each refuses appends for a while."""
_NODE_ID: Final = re.compile(r"[^-;:,\s]{1,64}")


@record(frozen=True, slots=True)
class _Pending:
    configuration: Configuration
    done: ChangeDone


class MemberChanges:
    """Takes requests that change the members. Under the node's lock; ``step`` is called from the elector's."""

    def __init__(self, state: MemberState, noops: Noops, dispatchers: Mapping[NodeId, EntryDispatcher]) -> None:
        self._state = state
        self._noops = noops
        self._dispatchers = dispatchers
        self._catch_up = PeerCatchUp(state, dispatchers)
        self.hand_over: HandOver
        """Set by the node, whose elector transfers leadership."""
        self._term = NO_TERM
        self._pending: list[_Pending] = []
        self._farewells: dict[NodeId, tuple[int, LogIndex]] = {}
        """Until when to tell a removed member what: the configuration without it is committed."""
        self._sample_due_ms = 0
        self._hand_over_due_ms = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, change: MemberChange, now_ms: int, done: ChangeDone) -> None:
        """Change the members; ``done`` gets the configuration once it is committed, or why there is none."""
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            error = NotLeaderError("this node is not the leader: ask the leader", leader=hint(state.leader_id))
            self._finish(done, error)
            return
        self._finish_committed()  # those of an earlier term first: what it appended may be gone
        self._begin_term(now_ms)
        current = state.membership.current
        if change.change_id and change.change_id == current.change_id:
            if len(self._pending) >= WAITING_MAX:
                self._finish(done, ChangeInProgressError(f"{WAITING_MAX} requests wait for this change: retry later"))
                return
            self._pending.append(_Pending(current, done))
            self._finish_committed()
            return
        wanted = self._refuse(leader, change) or self._changed(leader, change, now_ms)
        if isinstance(wanted, Configuration):
            wanted = self._check_quorum(leader, wanted, now_ms) or wanted
        if isinstance(wanted, DLedgerError):
            self._finish(done, wanted)
        elif state.node_id not in wanted.voters:
            self.hand_over(now_ms, partial(self._handed_over, done))
        else:
            appended = self._append(leader, wanted)
            if isinstance(appended, DLedgerError):
                self._finish(done, appended)
            else:
                self._pending.append(_Pending(appended, done))

    def progress(self, now_ms: int) -> tuple[MemberProgress, ...]:
        """The progress of the others; empty unless this member leads."""
        leader = self._state.role
        return self._catch_up.progress(leader, now_ms) if isinstance(leader, Leader) else ()

    def _handed_over(self, done: ChangeDone, result: LeaderHint | DLedgerError) -> None:
        if isinstance(result, DLedgerError):
            done(result)
        else:
            done(NotLeaderError("the leader transferred leadership before it leaves: ask the new one", leader=result))

    def _refuse(self, leader: Leader, change: MemberChange) -> DLedgerError | None:
        current = self._state.membership.current
        if change.expected_index not in (ANY_CONFIGURATION, current.index):
            return StaleConfigurationError(
                f"the members have changed: their configuration is {current.index}, not {change.expected_index}"
            )
        return self._not_now(leader)

    def _not_now(self, leader: Leader) -> DLedgerError | None:
        """Why no configuration may be appended now (M1)."""
        state = self._state
        membership = state.membership
        if state.commit_index < leader.noop_index:
            return LeaderNotReadyError("this leader has not committed an entry of its own term yet: retry shortly")
        if not membership.is_committed:
            waiting = ", ".join(peer for peer in state.voting_peers if leader.match[peer] < membership.current.index)
            return ChangeInProgressError(
                f"configuration {membership.current.index} is not committed yet; {waiting or 'nobody else'} has not "
                "acknowledged it"
            )
        if leader.transferring:
            return LeaderTransferringError("leadership is being transferred: retry shortly")
        if state.hard_state.standing is not Standing.FULL:
            return LeaderNotReadyError("not all members of this new group have been heard yet: start them all")
        return None

    def abandon(self, error: DLedgerError) -> None:
        """The node stops: waiting changes fail with ``error``, whose outcome is unknown."""
        while self._pending:
            self._finish(self._pending.pop().done, error)

    # -- what a change means -------------------------------------------------------------------------------------

    def _changed(self, leader: Leader, change: MemberChange, now_ms: int) -> Configuration | DLedgerError:
        """The configuration that a request asks for."""
        current = self._state.membership.current
        member = current.find(change.node_id)
        if change.kind is ChangeKind.ADD:
            wanted = _added(current, change)
        elif member is None:
            members = ", ".join(one.node_id for one in current.members)
            return MemberUnknownError(f"{change.node_id!r} is not a member; members: {members}")
        else:
            match change.kind:
                case ChangeKind.PROMOTE:
                    wanted = self._promoted(leader, current, member, now_ms)
                case ChangeKind.DEMOTE:
                    wanted = _demoted(current, member)
                case ChangeKind.REMOVE:
                    wanted = _without(current, member.node_id)
                case ChangeKind.UPDATE:
                    wanted = _moved(current, member, change)
        if isinstance(wanted, DLedgerError):
            return wanted
        return replace(wanted, change_id=change.change_id)

    def _promoted(
        self, leader: Leader, current: Configuration, member: ClusterMember, now_ms: int
    ) -> Configuration | DLedgerError:
        if member.role is MemberRole.VOTER:
            return MemberExistsError(f"{member.node_id} is a voter already")
        if len(current.voters) >= VOTERS_MAX:
            return TooManyMembersError(f"a group has at most {VOTERS_MAX} voters")
        lacking = self._catch_up.what_keeps_from_promoting(leader, member.node_id, now_ms)
        if lacking:
            return NotReadyToPromoteError(f"{member.node_id} cannot become a voter yet: {lacking}")
        return _with(current, replace(member, role=MemberRole.VOTER, promote=False))

    def _check_quorum(self, leader: Leader, wanted: Configuration, now_ms: int) -> WouldLoseQuorumError | None:
        """M5: enough of the voters that there would be are in contact, and count."""
        voters = wanted.voters
        live = [one for one in voters if self._is_live(leader, one, now_ms)]
        if voters and len(live) >= wanted.quorum:
            return None
        return WouldLoseQuorumError(
            f"the voters would be {', '.join(voters) or 'none'}, of whom {', '.join(live) or 'none'} can be counted "
            f"now; a majority would need {wanted.quorum}"
        )

    def _is_live(self, leader: Leader, member: NodeId, now_ms: int) -> bool:
        if member == self._state.node_id:
            return True
        heard_ms = leader.contact_ms.get(member)
        limit_ms = now_ms - self._state.election.election_timeout_ms_max
        return heard_ms is not None and heard_ms > limit_ms and leader.counts[member] and leader.supports[member]

    # -- time ----------------------------------------------------------------------------------------------------

    def step(self, now_ms: int) -> int | None:
        """Complete what is committed, and carry on what is intended; returns when to look again."""
        self._finish_committed()
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            return None
        self._begin_term(now_ms)
        if now_ms >= self._sample_due_ms:
            catching_up = bool(state.membership.current.learners)
            self._sample_due_ms = now_ms + (self._catch_up.interval_ms if catching_up else _RATE_MS)
            self._catch_up.sample(leader, now_ms)
        self._say_farewell(now_ms)
        if state.membership.is_committed and self._not_now(leader) is None:
            self._carry_on(leader, now_ms)
        return self._sample_due_ms

    def _begin_term(self, now_ms: int) -> None:
        if self._term != self._state.term:
            self._term = self._state.term
            self._catch_up.begin()
            self._farewells.clear()
            self._sample_due_ms = self._hand_over_due_ms = now_ms

    def _finish_committed(self) -> None:
        state = self._state
        for pending in tuple(self._pending):
            wanted = pending.configuration
            committed = state.membership.committed
            if committed.index >= wanted.index and committed.term >= wanted.term and state.term == self._term:
                self._pending.remove(pending)
                self._finish(pending.done, wanted)
            elif not isinstance(state.role, Leader) or state.term != self._term:
                self._pending.remove(pending)
                why = "leadership was lost: the change may or may not survive; look at the members"
                self._finish(pending.done, TermChangedError(why))

    def _say_farewell(self, now_ms: int) -> None:
        """Speak with a removed member until it knows that its removal is committed, or for some time (M9)."""
        membership = self._state.membership
        for back in self._farewells.keys() - set(membership.left):
            del self._farewells[back]
        for peer in membership.left:
            due_ms, index = self._farewells.setdefault(peer, (now_ms + _FAREWELL_MS, membership.committed.index))
            if now_ms >= due_ms or self._dispatchers[peer].commit_told >= index:
                del self._farewells[peer]
                self._state.release(peer)

    def _carry_on(self, leader: Leader, now_ms: int) -> None:
        """Do the next step of what the configuration intends."""
        current = self._state.membership.current
        for member in current.members:
            wanted = self._next_step(leader, current, member, now_ms)
            if wanted is None or self._check_quorum(leader, wanted, now_ms) is not None:
                continue
            if self._state.node_id in wanted.voters:
                self._append(leader, wanted)
            elif now_ms >= self._hand_over_due_ms:
                self.hand_over(now_ms, None)
                if leader.transferring:  # else it was refused, and no append had to wait
                    self._hand_over_due_ms = now_ms + HAND_OVER_PAUSE_MS
            return
        if self._known_memories(leader, current, new_only=True) != current.members:
            self._append(leader, current)

    def _next_step(
        self, leader: Leader, current: Configuration, member: ClusterMember, now_ms: int
    ) -> Configuration | None:
        replaced = current.find(member.replaces) if member.replaces else None
        if member.role is MemberRole.VOTER:
            return None if replaced is None else _without(current, replaced.node_id)
        if not member.promote or self._catch_up.what_keeps_from_promoting(leader, member.node_id, now_ms):
            return None
        if replaced is not None and self._leaves_first(leader, current, replaced, now_ms):
            return _without(current, replaced.node_id)
        if len(current.voters) >= VOTERS_MAX:
            return None
        return _with(current, replace(member, role=MemberRole.VOTER, promote=False))

    def _leaves_first(self, leader: Leader, current: Configuration, replaced: ClusterMember, now_ms: int) -> bool:
        """M14: the order with more live voters to spare in the middle; on a tie, the old voter leaves first."""
        if replaced.role is not MemberRole.VOTER or len(current.voters) >= VOTERS_MAX:
            return True
        live = sum(self._is_live(leader, one, now_ms) for one in current.voters)
        voters = len(current.voters)
        spare_if_added = live + 1 - ((voters + 1) // 2 + 1)
        spare_if_removed = live - self._is_live(leader, replaced.node_id, now_ms) - ((voters - 1) // 2 + 1)
        return voters > 1 and spare_if_removed >= spare_if_added

    # -- appending -----------------------------------------------------------------------------------------------

    def _append(self, leader: Leader, wanted: Configuration) -> Configuration | DLedgerError:
        """Append a configuration, which counts from now on (M2)."""
        state = self._state
        wanted = replace(wanted, members=self._known_memories(leader, wanted, new_only=False))
        try:
            batch = self._noops.append(state.log, state.term, encode_configuration(wanted))
        except (DiskFullError, EntryTooLargeError, InvalidRequestError) as error:
            return error
        appended = replace(wanted, index=batch.last_index, term=state.term)
        state.adopt(appended)
        invariant(state.membership.current is appended, "a leader's configuration is the newest", index=appended.index)
        state.outbox.wake |= Wake.FLUSH
        self._sample_due_ms = 0  # a new learner is looked at more often
        return appended

    def _known_memories(self, leader: Leader, wanted: Configuration, *, new_only: bool) -> tuple[ClusterMember, ...]:
        """The members with the uids that their processes have reported; a new one only once readmitted (M11).

        ``new_only``: only those that replace another one.
        """
        known: list[ClusterMember] = []
        for one in wanted.members:
            boot_id, uid = leader.memories.get(one.node_id, (0, 0))
            if one.node_id == self._state.node_id:
                uid = self._state.uid
            elif one.uid and (leader.blank_boot_ids.get(one.node_id) != boot_id or one.node_id not in leader.stand):
                uid = one.uid
            replaceable = bool(one.uid) or not new_only
            known.append(replace(one, uid=uid) if uid and replaceable else one)
        return tuple(known)

    def _finish(self, done: ChangeDone, result: Configuration | DLedgerError) -> None:
        self._state.outbox.completions.append(partial(done, result))


def _with(current: Configuration, member: ClusterMember) -> Configuration:
    """The configuration with ``member`` in place of the one with its id, or added."""
    others = [one for one in current.members if one.node_id != member.node_id]
    return replace(current, members=tuple(sorted([*others, member], key=lambda one: one.node_id)))


def _without(current: Configuration, node_id: NodeId) -> Configuration:
    """The configuration without a member; nobody replaces it any more."""
    kept = (one for one in current.members if one.node_id != node_id)
    members = tuple(replace(one, replaces="") if one.replaces == node_id else one for one in kept)
    return replace(current, members=members)


def _added(current: Configuration, change: MemberChange) -> Configuration | DLedgerError:
    if not _NODE_ID.fullmatch(change.node_id):
        return InvalidRequestError(f"invalid node id {change.node_id!r}: it ends at the first of - ; : , or a space")
    if current.find(change.node_id) is not None:
        return MemberExistsError(f"{change.node_id} is a member already: remove it first, or choose another id")
    if len(current.learners) >= LEARNERS_MAX:
        return TooManyMembersError(f"a group has at most {LEARNERS_MAX} learners at a time")
    replaced = current.find(change.replaces)
    if change.replaces and (replaced is None or replaced.role is not MemberRole.VOTER):
        return MemberUnknownError(f"{change.replaces!r} is not a voter; voters: {', '.join(current.voters)}")
    rival = next((one for one in current.members if change.replaces and one.replaces == change.replaces), None)
    if rival is not None:
        return MemberExistsError(f"{change.replaces} is being replaced by {rival.node_id} already")
    if change.promote and replaced is None and len(current.voters) >= VOTERS_MAX:
        return TooManyMembersError(f"a group has at most {VOTERS_MAX} voters: add a learner, or replace a voter")
    learner = ClusterMember(
        change.node_id,
        change.host,
        change.port,
        MemberRole.LEARNER,
        current.next_number,
        promote=change.promote,
        replaces=change.replaces,
    )
    refusal = _refuse_address(current, learner)
    return refusal or replace(_with(current, learner), next_number=current.next_number + 1)


def _demoted(current: Configuration, member: ClusterMember) -> Configuration | DLedgerError:
    if member.role is MemberRole.LEARNER:
        return MemberExistsError(f"{member.node_id} is a learner already")
    if len(current.learners) >= LEARNERS_MAX:
        return TooManyMembersError(f"a group has at most {LEARNERS_MAX} learners at a time")
    return _with(current, replace(member, role=MemberRole.LEARNER, promote=False, replaces=""))


def _moved(current: Configuration, member: ClusterMember, change: MemberChange) -> Configuration | DLedgerError:
    moved = replace(member, host=change.host, port=change.port)
    return _refuse_address(current, moved) or _with(current, moved)


def _refuse_address(current: Configuration, member: ClusterMember) -> DLedgerError | None:
    if not member.host or not 0 < member.port < 1 << 16:
        return InvalidRequestError(f"invalid member address {member.host}:{member.port}")
    for one in current.members:
        if one.node_id != member.node_id and (one.host, one.port) == (member.host, member.port):
            return MemberExistsError(f"{one.node_id} has the address {one.host}:{one.port}")
    return None
