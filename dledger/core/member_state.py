"""The state of one member: term, vote, role, log, commit index. Every change of role goes through here.

Data that belongs to a role lives in the role's own record, so that nothing of an earlier role can survive in a later
one. Terms only grow; the term and the vote in it form ``HardState``, which the driver makes durable before any message
is sent (see ``dledger.core.messages``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from dledger.config import FlushMode, ServerConfig
from dledger.core.membership import Membership, implicit_configuration
from dledger.core.messages import Outbox, Readmission, RoleChange, RoleReason, Wake
from dledger.core.ports import Log, MachineState, Random
from dledger.core.producers import ProducerTable
from dledger.core.standing import Ballot, MemberRun
from dledger.errors import CorruptLogError, invariant
from dledger.types import (
    NO_ENTRY,
    NO_INDEX,
    Configuration,
    EntryId,
    HardState,
    LogIndex,
    MemberRole,
    NodeId,
    Role,
    Standing,
    Term,
)


@dataclass(slots=True)
class Follower:
    """Follows ``leader``, or none yet; campaigns when ``election_due_ms`` passes in silence."""

    leader: NodeId | None
    election_due_ms: int
    last_heard_ms: int | None = None
    transfer_target: str = ""
    """The member to which the leader last announced a transfer."""
    timeout_ms: int = field(default=0, compare=False)
    """How long it waits for this leader. Drawn once: a new draw per heartbeat could end before the elector wakes up."""
    suspects: bool = False
    """Its leader's process seems to be gone; see ``dledger.core.failure_detection``."""
    answer_due_ms: int = field(default=0, compare=False)
    """Until then the leader's answer that it does not lead makes it suspect."""


@dataclass(slots=True)
class Candidate:
    """Gathers votes, or (``pre_vote``) only asks whether it would get them; gives up at ``election_due_ms``."""

    pre_vote: bool
    election_due_ms: int
    ballots: dict[NodeId, Ballot] = field(default_factory=dict)
    """The granted votes, including its own."""
    repeats_left: int = 0
    """How many rounds may follow soon, because the leader's process is gone; see ``dledger.core.failure_detection``."""
    refused: set[NodeId] = field(default_factory=set)
    """Members that refused their vote."""


@dataclass(slots=True)
class Leader:
    """Leads its term. ``match`` holds what each peer has durably; ``contact_ms`` when it was last heard."""

    since_ms: int
    noop_index: LogIndex
    match: dict[NodeId, LogIndex]
    contact_ms: dict[NodeId, int]
    disk_full: dict[NodeId, bool]
    producers: ProducerTable
    counts: dict[NodeId, bool]
    """Whether ``match`` counts towards a quorum: the process that reported it has standing."""
    supports: dict[NodeId, bool]
    """Whether the peer's contact counts for check-quorum; true until it reports that it has no standing."""
    boot_ids: dict[NodeId, int]
    """The process that ``match`` belongs to."""
    doubted: dict[NodeId, int] = field(default_factory=dict)
    """Processes that hold less than an earlier one of the same peer did, and do not know it."""
    countersigns: dict[NodeId, int] = field(default_factory=dict)
    """The countersigns that peers asked for in this term, by which they recognize our heartbeats."""
    stand: set[NodeId] = field(default_factory=set)
    """Peers that have reported standing in this term."""
    transfer_target: str = ""
    transferring: bool = False
    reads_waiting: bool = False
    """Whether linearizable reads wait for a round or for the commit index."""
    memories: dict[NodeId, tuple[int, int]] = field(default_factory=dict)
    """The process and the uid that each peer with standing has reported in this term."""
    held: LogIndex = NO_INDEX
    """The last entry that a majority of the voters holds, committed or not: see ``QuorumAckChecker``."""
    blank_boot_ids: dict[NodeId, int] = field(default_factory=dict)
    """The last process of each peer that was heard without standing in this term."""

    def speak_with(self, contacts: tuple[NodeId, ...]) -> None:
        """Members have come or gone; a new one was never heard."""
        for known, start in (
            (self.match, NO_INDEX),
            (self.contact_ms, NEVER_MS),
            (self.disk_full, False),
            (self.counts, False),
            (self.supports, False),
        ):
            values: dict[NodeId, int] = known  # type: ignore[assignment]  # a bool or an index
            for gone in values.keys() - set(contacts):
                del values[gone]
            for peer in contacts:
                values.setdefault(peer, start)
        for told in (self.boot_ids, self.doubted, self.countersigns, self.memories, self.blank_boot_ids):
            kept: dict[NodeId, object] = told  # type: ignore[assignment]  # one or two numbers
            for gone in kept.keys() - set(contacts):
                del kept[gone]
        self.stand &= set(contacts)


RoleState = Follower | Candidate | Leader

NEVER_MS: Final = -(1 << 53)
"""The time of a contact that there has not been yet."""

_BOOT_IDS: Final = 1 << 62
_BOOT_ID_STEP: Final = 0x2545F4914F6CDD1D
"""Odd, so that all ids of one process differ, and none is a neighbour of another process's."""


class MemberState:
    """The shared state of one member. All access under the node's lock."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        *,
        log: Log,
        hard_state: HardState,
        random: Random,
        run: MemberRun,
        now_ms: int,
        membership: Membership | None = None,
        uid: int = 0,
        machine: MachineState | None = None,
    ) -> None:
        self.node_id = config.node_id
        self.machine: Final = machine
        """Of the state machine on this log; None if there is none."""
        self.uid = uid
        """Names this memory of the member: that of its directory."""
        self.membership = membership or Membership(self.node_id, implicit_configuration(config))
        self.on_membership: Callable[[], None] = lambda: None
        """Called when the members with which this one speaks may have changed."""
        self.removed_at = NO_INDEX
        """The configuration without this member, by the word of a member whose committed one it is (M8)."""
        self.unflushed: tuple[LogIndex, LogIndex] | None = None
        """The first and the last configuration appended here that may not be durable yet."""
        self._note_membership()
        self.log = log
        self.election = config.election
        self._replication = config.replication
        self.flush_mode = config.store.flush_mode
        self.boot_id = run.boot_id
        self.countersign = run.countersign
        """Known only to members that this one has asked at their own addresses; see ``log_matching``."""
        self.outbox = Outbox()
        self.remembered: dict[NodeId, EntryId] = {}
        """The last entry that each member is known to have held durably."""
        self.agrees: dict[NodeId, bool] = {}
        """Whether a peer's history equals this member's, where compared; see ``dledger.core.log_matching``."""
        self.contradicted_by: set[NodeId] = set()
        """Peers that answered that they have committed different entries."""
        self.whole = True
        """Whether no part of the log still has to be fetched; set by the driver, not durable."""
        self.readmission: Readmission | None = None
        """The leader's readmission in this term, until it is done."""
        self.readmission_standing = Standing.FULL
        self.commit_index: LogIndex = max(log.committed_index, log.begin.index)
        self.hard_state = hard_state
        """Term, vote and standing; changed by ``save_hard_state``."""
        self.term = hard_state.term
        """The current term: that of ``hard_state``, which alone sets it."""
        self.hard_state_version = 0
        """Counts the changes of ``hard_state``; messages that depend on a change may leave only once it is durable."""
        self._random = random
        self._adopt_term_of_log()
        # A single member waits for no leader's silence.
        first_due_ms = now_ms if self.is_alone else self.next_election_due_ms(now_ms)
        self.role: RoleState = Follower(None, first_due_ms)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def role_name(self) -> Role:
        """The role's name for people and on the wire."""
        match self.role:
            case Follower():
                return Role.FOLLOWER
            case Candidate():
                return Role.CANDIDATE
            case Leader():
                return Role.LEADER
            case role:
                assert_never(role)

    @property
    def leader_id(self) -> NodeId | None:
        """The leader of the current term, if known."""
        match self.role:
            case Follower(leader=leader):
                return leader
            case Candidate():
                return None
            case Leader():
                return self.node_id
            case role:
                assert_never(role)

    @property
    def standing(self) -> Standing:
        """The standing that this member has now: in doubt while its log is not whole."""
        known = self.hard_state.standing
        return known if self.whole or not known.counts else Standing.DOUBTFUL

    @property
    def has_standing(self) -> bool:
        """Whether its votes and acknowledgements count."""
        return self.standing.counts

    @property
    def fenced(self) -> str:
        """Why nothing that this member holds may be believed; empty if it may. Only a person can end this."""
        return (self.hard_state.doubt or "its history differs from the group's") if self.hard_state.fenced else ""

    @property
    def is_used(self) -> bool:
        """Whether this member knows of committed entries, or of flushed ones that it lost, or of a group that exists.

        One that waits to be added knows, and one that was told a configuration (M10) and holds no entry yet: with its
        vote nobody who has lost everything begins another group (M12).
        """
        membership = self.membership
        knows_group = membership.is_explicit or not membership.current.members
        return knows_group or self.commit_index != NO_INDEX or self.hard_state.lost

    @property
    def own_ballot(self) -> Ballot:
        """Its vote for itself."""
        forgot = self.membership.is_forgetful(self.node_id, self.uid)
        return Ballot(Standing.BLANK if forgot else self.standing, self.boot_id, self.is_used)

    @property
    def durable_index(self) -> LogIndex:
        """The last own entry that may count towards a quorum."""
        log = self.log
        if self.flush_mode is FlushMode.SYNC:
            return log.flushed.index
        return log.last.index if self.unflushed is None else self.surely_kept(log.last.index)

    def surely_kept(self, index: LogIndex) -> LogIndex:
        """The last entry up to ``index`` that may be acknowledged without a flush: configurations may not be (M3).

        A power cut must not take back a configuration that someone knows to be committed.
        """
        if self.unflushed is None:
            return index
        first, last = self.unflushed
        flushed = self.log.flushed.index
        if flushed >= last:
            self.unflushed = None
            return index
        return min(index, max(flushed, LogIndex(first - 1)))

    @property
    def is_alone(self) -> bool:
        """Whether this member is the only voter."""
        return self.quorum == 1 and self.membership.is_voter

    @property
    def may_campaign(self) -> bool:
        """Whether this member is a voter, as far as it knows, and has not been told otherwise."""
        return self.membership.is_voter and self.removed_at == NO_INDEX

    @property
    def is_learner(self) -> bool:
        """Whether this member is a learner, as far as it knows, and has not been told otherwise."""
        member = self.membership.current.find(self.node_id)
        return member is not None and member.role is MemberRole.LEARNER and self.removed_at == NO_INDEX

    def hears_leader(self, now_ms: int) -> bool:
        """Whether a leader seems alive to this member: then it does not help to depose it (§4.2.3)."""
        match self.role:
            case Leader():
                return True
            case Follower(suspects=True):
                return False
            case Follower(leader=leader, last_heard_ms=heard) if leader is not None and heard is not None:
                return now_ms - heard < self.election.election_timeout_ms_min
            case _:
                return False

    def next_election_due_ms(self, now_ms: int) -> int:
        """A new random deadline (§5.2: randomised so that split votes are rare)."""
        election = self.election
        return now_ms + self._random.randrange(election.election_timeout_ms_min, election.election_timeout_ms_max)

    def draw(self, start: int, stop: int) -> int:
        """A random integer in ``[start, stop)``."""
        return self._random.randrange(start, stop)

    # -- transitions ---------------------------------------------------------------------------------------------

    def become_follower(
        self, term: Term, leader: NodeId | None, now_ms: int, reason: RoleReason = RoleReason.HIGHER_TERM
    ) -> None:
        """Follow ``leader`` (None: not known yet) in ``term``, which must not be older than the current one."""
        invariant(term >= self.term, "a term never goes back", term=term, current=self.term)
        before = self._view()
        if term > self.term:
            self.readmission = None
            self.save_hard_state(replace(self.hard_state, term=term, vote=None))
        elif leader is not None:
            known = self.leader_id
            invariant(known in (None, leader), "one leader per term", term=term, known=known, claims=leader)
        if self.membership.release_all():
            self._membership_changed()
        heard = None if leader is None else now_ms
        due_ms = self.next_election_due_ms(now_ms)
        self.role = Follower(leader, due_ms, heard, timeout_ms=due_ms - now_ms)
        self._announce(before, reason)

    def become_candidate(
        self, now_ms: int, *, pre_vote: bool, reason: RoleReason = RoleReason.ELECTION_TIMEOUT
    ) -> None:
        """Ask for votes; a real campaign (not ``pre_vote``) starts a new term with a vote for itself."""
        before = self._view()
        if not pre_vote:
            self.readmission = None
            self.save_hard_state(replace(self.hard_state, term=Term(self.term + 1), vote=self.node_id))
        self.role = Candidate(pre_vote, self.next_election_due_ms(now_ms), {self.node_id: self.own_ballot})
        self._announce(before, reason)

    def become_leader(self, noop_index: LogIndex, now_ms: int, producers: ProducerTable | None = None) -> None:
        """Lead the current term; only a candidate that voted for itself in it may.

        ``producers``: as of the log's end, ``noop_index`` included; None: there are none.
        """
        role = self.role
        invariant(isinstance(role, Candidate) and not role.pre_vote, "only a candidate becomes leader")
        invariant(self.hard_state.vote == self.node_id, "a leader voted for itself", vote=self.hard_state.vote)
        invariant(self.has_standing, "a leader has standing", node=self.node_id)
        invariant(self.membership.is_voter, "a leader is a voter", node=self.node_id)
        before = self._view()
        contacts = self.membership.contact_ids
        self.role = Leader(
            since_ms=now_ms,
            noop_index=noop_index,
            match=dict.fromkeys(contacts, NO_INDEX),
            contact_ms=dict.fromkeys(contacts, now_ms),
            disk_full=dict.fromkeys(contacts, False),
            producers=ProducerTable(self._replication) if producers is None else producers,
            counts=dict.fromkeys(contacts, False),
            supports=dict.fromkeys(contacts, True),
            boot_ids={},
        )
        self._forget_other_histories()
        self._announce(before, RoleReason.ELECTED)
        self.outbox.wake |= Wake.ELECTOR | Wake.DISPATCHERS | Wake.FLUSH

    def follow(self, leader: NodeId, term: Term, now_ms: int) -> bool:
        """Record a message that only the leader of ``term`` can send; False if that term is over or has another leader.

        A second leader of a term is a bug or damage, but not this member's: no message may stop it. Its own changes of
        role keep the invariant (``become_follower``).
        """
        if term < self.term or (term == self.term and self.leader_id not in (None, leader)):
            return False
        role = self.role
        if term == self.term and isinstance(role, Follower) and role.leader == leader:
            role.last_heard_ms = now_ms
            role.election_due_ms = now_ms + role.timeout_ms
            role.suspects = False
        else:
            self.become_follower(term, leader, now_ms, RoleReason.LEADER_HEARD)
        return True

    def save_hard_state(self, hard_state: HardState) -> None:
        """Replace the hard state; the driver makes it durable before any effect of this step leaves."""
        old = self.hard_state
        invariant(hard_state.term >= old.term, "a term never goes back", new=hard_state, old=old)
        same_term_vote = hard_state.term > old.term or old.vote in (None, hard_state.vote)
        invariant(same_term_vote, "one vote per term", new=hard_state, old=old)
        self.hard_state = hard_state
        self.term = hard_state.term
        self.hard_state_version += 1

    def _adopt_term_of_log(self) -> None:
        """After a crash the log may be ahead of the hard state; the term of its last entry is then the current one.

        1. A push of term 5 arrives at a member of term 4: it moves to term 5 and writes the entry.
        2. The log is flushed, or the process is killed and the page cache survives, before the hard state is durable.
        3. The member comes back in term 4 with an entry of term 5.

        It has voted for nobody in term 5 as far as anyone knows, since no answer left before the save.
        """
        term = self.log.last.term
        if term > self.term:
            self.save_hard_state(replace(self.hard_state, term=term, vote=None))

    # -- standing ------------------------------------------------------------------------------------------------

    def take_standing(self, standing: Standing) -> None:
        """From now on this member's votes and acknowledgements count.

        The vote of the current term goes to its leader: an earlier life of this member may have given it to any member,
        so it must not go to another one now.
        """
        if self.hard_state.standing is not standing:
            vote = self.hard_state.vote or self.leader_id
            self.save_hard_state(HardState(self.term, vote, standing))

    def lose_standing(self, reason: str, now_ms: int) -> None:
        """This member lacks entries it once had, so it may have forgotten anything: it counts for nothing from now on.

        Its process's earlier statements are void, as after a restart.
        """
        if not self.hard_state.standing.counts:
            return
        self.save_hard_state(self.hard_state.doubted(reason))
        self.boot_id = (self.boot_id + _BOOT_ID_STEP) % _BOOT_IDS
        self.readmission = None
        if not isinstance(self.role, Follower):
            self.become_follower(self.term, None, now_ms, RoleReason.STANDING_LOST)

    def fence(self, reason: str, now_ms: int) -> None:
        """Most members have another history: this member's log must not be read, and counts for nothing.

        Durably: its entries are the same after a restart, when it may not reach any member.
        """
        if self.fenced:
            return
        self.lose_standing(reason, now_ms)
        self.readmission = None
        self.save_hard_state(self.hard_state.fence(reason))
        self.outbox.fenced = reason
        if not isinstance(self.role, Follower):
            self.become_follower(self.term, None, now_ms, RoleReason.STANDING_LOST)

    def heed(self, remembered: EntryId, witness: NodeId, now_ms: int) -> None:
        """``witness`` knows this member to have held ``remembered``: if it holds less, it has lost something.

        Entries truncated for a conflict were followed by one of a later term. Only a crash between the two looks like a
        loss without being one; then the doubt costs no more than the readmission.
        """
        if self.log.last < remembered:
            had, has = remembered, self.log.last
            reason = (
                f"{witness} has a record that it held entry {had.index} of term {had.term}; its log ends at {has.index}"
            )
            self.lose_standing(reason, now_ms)

    def remember(self, watermarks: Iterable[tuple[NodeId, EntryId]]) -> None:
        """Record what a leader knows members to hold; it may know less than this member does already.

        In the order of entries, by term first: an entry that a later leader truncated gives way to what it wrote
        instead.
        """
        for member, held in watermarks:
            if member == self.node_id or member in self.peers:
                self.remembered[member] = max(held, self.remembered.get(member, NO_ENTRY))

    def _forget_other_histories(self) -> None:
        """Entries that a leader's log lacks were never committed: a member that lacks them, too, has lost nothing."""
        self.remembered = {member: held for member, held in self.remembered.items() if self._may_hold(held)}

    def _may_hold(self, held: EntryId) -> bool:
        """Whether an entry is, or may be, in this log."""
        log = self.log
        if held.index > log.last.index or held.index < log.begin.index:
            return held.index <= log.last.index
        try:
            return log.term_at(held.index) == held.term
        except CorruptLogError as damage:
            self.outbox.damage.append(damage)
            return True

    # -- members -------------------------------------------------------------------------------------------------

    def adopt(self, configuration: Configuration) -> None:
        """A configuration has been appended here: it counts from now on (M2)."""
        if self.membership.adopt(configuration):
            first = configuration.index if self.unflushed is None else self.unflushed[0]
            self.unflushed = first, configuration.index
            if configuration.index > self.removed_at:
                self.removed_at = NO_INDEX
            self._membership_changed()

    def hold_until_told(self, found: Membership) -> None:
        """Hold configurations that damage had hidden, and that may be old: see ``Membership.hold_until_told``."""
        self.membership.hold_until_told(found)
        self._membership_changed()

    def truncated(self, from_index: LogIndex) -> None:
        """Entries from ``from_index`` on have been dropped, and what they put in force."""
        if self.membership.truncated(from_index):
            self._membership_changed()

    def install(self, configuration: Configuration) -> bool:
        """Take over a configuration that is committed elsewhere (M10); returns whether it is new here."""
        changed = self.membership.install(configuration)
        if changed:
            if configuration.index > self.removed_at:
                self.removed_at = NO_INDEX
            self._membership_changed()
        return changed

    def learn_committed(self, index: LogIndex) -> None:
        """Another member holds the entry ``index``, which is in this log too, as committed."""
        if self.membership.commit(index):
            if not isinstance(self.role, Leader):
                self.membership.release_all()
            self._membership_changed()

    def release(self, peer: NodeId) -> None:
        """A member that has left knows it, or is given up."""
        self.membership.release(peer)
        self._membership_changed()

    def learn_removed(self, index: LogIndex) -> None:
        """A member's committed configuration lacks this one: it is believed if it is newer than what is known here."""
        if index > max(self.membership.current.index, self.removed_at):
            self.removed_at = index

    def remembers(self, leader: Leader, peer: NodeId, boot_id: int) -> bool:
        """Whether a peer's process has the memory that the configuration names: else it counts for nothing (M11).

        Or whether this leader has readmitted it: its new memory can be recorded only when it counts.
        """
        expected = self._uids.get(peer, 0)
        process, uid = leader.memories.get(peer, (0, 0))
        readmitted = leader.blank_boot_ids.get(peer) == boot_id
        return expected == 0 or readmitted or (process == boot_id and uid in (0, expected))

    def removal_of(self, asker: NodeId) -> LogIndex:
        """The committed configuration without ``asker``; none if it is in that or in the current one (M8)."""
        membership = self.membership
        if membership.committed.find(asker) is None and membership.current.find(asker) is None:
            return membership.committed.index
        return NO_INDEX

    def _membership_changed(self) -> None:
        uids, numbers = self._uids, self._numbers
        self._note_membership()
        after = self._uids
        for peer, uid in uids.items():
            is_same = self._numbers.get(peer) == numbers[peer]  # not removed, nor perhaps added again since
            if not is_same or (0 not in (uid, after[peer]) and uid != after[peer]):
                self.remembered.pop(peer, None)  # of another memory
            if not is_same:
                self.agrees.pop(peer, None)
                self.contradicted_by.discard(peer)
        if isinstance(self.role, Leader):
            self.role.speak_with(self.membership.contact_ids)
        self.on_membership()
        self.outbox.membership = self.membership.copy()
        self.outbox.wake |= Wake.ELECTOR | Wake.QUORUM_ACK | Wake.DISPATCHERS

    def _note_membership(self) -> None:
        """Copy what every append reads."""
        membership = self.membership
        self.peers = membership.peers
        self.quorum = membership.quorum
        self.voting_peers = membership.voting_peers
        self.withheld = membership.withheld
        self.learners = membership.current.learners
        self._uids = {one.node_id: one.uid for one in membership.current.members}
        self._numbers = {one.node_id: one.number for one in membership.current.members}

    # -- the commit index ----------------------------------------------------------------------------------------

    def advance_commit(self, index: LogIndex) -> None:
        """Move the commit index forward to ``index``, if that is higher."""
        if index <= self.commit_index:
            return
        invariant(index <= self.log.last.index, "commit <= end", commit=index, end=self.log.last.index)
        self.commit_index = index
        self.log.set_committed(index)
        self.outbox.committed = index
        if not self.membership.is_committed:
            self.learn_committed(index)

    def _view(self) -> tuple[Role, Term, NodeId | None]:
        return self.role_name, self.term, self.leader_id

    def _announce(self, before: tuple[Role, Term, NodeId | None], reason: RoleReason) -> None:
        after = self._view()
        if after != before:
            self.outbox.role_changes.append(RoleChange(*after, reason))
            self.outbox.wake |= Wake.ELECTOR | Wake.QUORUM_ACK | Wake.DISPATCHERS
