"""A node's knowledge of its group's members: at its start, the part that must stay on its disk (M3), and problems.

``MemberWatch`` shows the problems as conditions of the node, and decides nothing. Without threads of its own: it is
told of new configurations and of vote requests, and looks at the node's status about once a second.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.member_state import MemberState
from dledger.core.membership import Membership, implicit_configuration, recover_membership
from dledger.core.node import Node
from dledger.errors import CorruptLogError
from dledger.monitoring import ConditionKind, Conditions
from dledger.rpc.ports import NodeStatus
from dledger.runtime.events import members_text, peers_setting
from dledger.store.file_store import FileStore
from dledger.store.identity import layout_of, read_members
from dledger.types import NO_INDEX, Configuration, EntryId, LogIndex, MemberRole, NodeId, Role
from dledger.values import address_text


def had_peers(config: ServerConfig) -> bool:
    """Whether a node, not opened yet, has other members from which it could fetch its log."""
    saved = read_members(layout_of(config.store, config.node_id).directory)
    known = None if saved is None else saved.configuration
    return bool(config.peers) if known is None else any(one.node_id != config.node_id for one in known.members)


class MemberRecords:
    """The members as one node's directory has them: its file, and the log's entries that are newer."""

    def __init__(self, config: ServerConfig, log: FileStore) -> None:
        self._config = config
        self._log = log
        self._unread = False
        """Whether damage hid a part of the log that may hold configurations."""
        self.damage: tuple[CorruptLogError, ...] = ()
        """Damage that ``find`` met and the opening of the log did not: for its repair."""

    @property
    def uid(self) -> int:
        """See ``ClusterMember.uid``."""
        return self._log.members.uid

    @property
    def problem(self) -> str:
        """Why this node does not know who belongs to its group; empty if it does, or has yet to join."""
        saved = self._log.members.saved
        if not saved.lost or saved.configuration is not None or self._log.begin.index == NO_INDEX:
            return ""
        return (
            "it does not know the members of its group, and does not campaign: its file of them is lost, and its log "
            "does not go back to the first entry. The group's next change of its members ends this"
        )

    def find(self) -> Membership:
        """The configuration in force when the log has been opened.

        Damage in the log is left to its repair: a member with it counts for nothing before ``read_on``. Raises
        ``UnreadablePayloadError``, and ``CorruptLogError`` if nobody mends it.
        """
        try:
            found = self._recover()
        except CorruptLogError as damage:
            base = self._base()
            if not self._log.damage_at_start:
                alone = [one.node_id for one in base.members] == [self._config.node_id]
                if alone or not self._config.store.auto_repair:
                    raise
                self.damage = (damage,)
            self._unread = True
            return Membership(self._config.node_id, base)
        members = self._log.members
        if (members.saved.lost or not members.uid) and found.is_explicit:
            if self._may_be_old():
                found.distrust()
                return found
            own = found.current.find(self._config.node_id)
            if own is not None and own.uid and self._log.hard_state.load().standing.counts:
                members.recall(own.uid)
        if not self.problem:
            members.settle()
        return found

    def read_on(self, state: MemberState) -> bool:
        """Put configurations hidden by damage in force; returns whether none is hidden now. Under the node's lock."""
        if self._unread:
            try:
                found = self._recover()
            except CorruptLogError:
                return False
            self._unread = False
            if self._may_be_old() and not state.membership.is_explicit:  # no leader has told more meanwhile
                state.hold_until_told(found)
                return True
            if found.committed.index != NO_INDEX:
                state.install(found.committed)
            for one in found.appended:  # all: the one before the last has a say in elections (M6)
                state.adopt(one)
        return True

    def _may_be_old(self) -> bool:
        """Whether it was catching up when it lost the file: the last configuration that it holds may be an old one, and
        all voters of that are not enough to elect it (M10).
        """
        return self._log.members.saved.lost and not self._log.hard_state.load().standing.counts

    def _recover(self) -> Membership:
        saved = self._log.members.saved
        return recover_membership(self._config.node_id, self._log, saved.configuration, saved.clear_to, self._base())

    def _base(self) -> Configuration:
        """Before the first configuration in the log; no members if they cannot be known.

        One with standing has not yet to join: it would hold the entry that added it. So it is one of the configured.
        """
        saved = self._log.members.saved
        if saved.configuration is not None:
            return saved.configuration
        waits = self._config.join and not self._log.hard_state.load().standing.counts
        return Configuration() if waits or self.problem else implicit_configuration(self._config)

    def save(self, membership: Membership) -> None:
        """Record what is known to be committed. On a full disk, ``keep`` makes up for it."""
        with suppress(OSError):
            self._log.members.save_committed(_explicit(membership.committed), membership.committed.index)

    def keep(self, look: Callable[[Callable[[Node], _Known]], _Known]) -> None:
        """Record everything, as far as it has changed; ``look`` reads from the node under its lock."""
        committed, clear_to, remembered = look(self._known)
        self._log.members.save_all(_explicit(committed), clear_to, remembered)

    def _known(self, node: Node) -> _Known:
        """Together: every configuration that is committed up to the entry is the one named, or older.

        While some of the log wait for a leader's word, or for their repair, another start must find them again.
        """
        state = node.state
        hidden = self._unread or state.membership.is_unsure
        clear_to = NO_INDEX if hidden else state.commit_index
        return state.membership.committed, clear_to, dict(state.remembered)

    def last_removable(self, state: MemberState) -> LogIndex | None:
        """The last entry that may be removed; None: all may. Of a newer configuration the file must know first (M3)."""
        saved, committed = self._log.members.saved.configuration, state.membership.committed.index
        known = NO_INDEX if saved is None else saved.index
        return None if committed <= known else LogIndex(committed - 1)


_Known = tuple[Configuration, LogIndex, dict[NodeId, EntryId]]


def _explicit(configuration: Configuration) -> Configuration | None:
    return None if configuration.index == NO_INDEX else configuration


GONE_MS: Final = 600_000
"""How long a member is not heard from until that is a condition."""
STUCK_MS: Final = 10_000
"""How long a configuration is not committed until that is one."""
_TWICE_MS_MIN: Final = 3_000
_TWICE_MS_MAX: Final = 30_000
"""Vote requests of a member that hears its leader, over at least the first of these times within the second."""
_TWICE_TOLD_MS: Final = 60_000
_IN_CONTACT_MS: Final = 1_000


class MemberWatch:
    """The watch of one node. Thread-safe."""

    def __init__(self, config: ServerConfig, membership: Membership, conditions: Conditions, clock: Clock) -> None:
        self._config = config
        self._conditions = conditions
        self._clock = clock
        self._lock = threading.Lock()  # guards all below; a leaf
        self._membership = membership.copy()
        self._uncommitted_since_ms = clock.monotonic_ms()
        self._unheard_since_ms: dict[NodeId, int] = {}
        self._told_gone: set[NodeId] = set()
        self._asked_ms: dict[NodeId, deque[int]] = {}

    def members_changed(self, membership: Membership) -> None:
        """Other members count now, or are known to be committed."""
        with self._lock:
            if membership.current != self._membership.current:
                self._uncommitted_since_ms = self._clock.monotonic_ms()
            self._membership = membership

    def asked_for_vote(self, peer: NodeId, contact_ms: int) -> None:
        """A member asks the leader for its vote, which it had last heard of ``contact_ms`` ago (by an answer to it).

        A member that hears its leader asks for no votes; so if that goes on, two processes have this id.
        """
        if contact_ms > _IN_CONTACT_MS:
            return
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            asked = self._asked_ms.setdefault(peer, deque(maxlen=8))
            asked.append(now_ms)
            while asked[0] < now_ms - _TWICE_MS_MAX:
                asked.popleft()
            goes_on = len(asked) > 2 and now_ms - asked[0] >= _TWICE_MS_MIN
        if goes_on:
            why = (
                f"a process that calls itself {peer} asks for votes, while {peer} follows its leader: two processes "
                "have this id. Stop the one whose address is not in `dledger member list`"
            )
            self._conditions.set(ConditionKind.DUPLICATE_MEMBER, why, subject=peer, for_ms=_TWICE_TOLD_MS)

    def look(self, status: NodeStatus, removed_at: LogIndex) -> None:
        """Set and clear the conditions. ``removed_at``: see ``MemberState``."""
        with self._lock:
            membership, since_ms = self._membership, self._uncommitted_since_ms
        self._look_for_removal(membership, removed_at, has_standing=status.voter)
        self._compare_peers(membership)
        self._look_for_a_stuck_change(status, membership, self._clock.monotonic_ms() - since_ms)
        self._look_for_the_gone(status)

    def _look_for_removal(self, membership: Membership, removed_at: LogIndex, *, has_standing: bool) -> None:
        at = removal_index(self._config.node_id, membership.committed, removed_at, has_standing=has_standing)
        if at == NO_INDEX:
            self._conditions.clear(ConditionKind.REMOVED)
            return
        why = (
            f"it was removed from the group (configuration {at}): it serves what it has, and takes part in nothing. "
            "Stop it; to let it join again, add it anew and start it with an empty directory"
        )
        self._conditions.set(ConditionKind.REMOVED, why)

    def _compare_peers(self, membership: Membership) -> None:
        committed, config = membership.committed, self._config
        configured = {(one.node_id, address_text(one.host, one.port)) for one in config.members}
        present = {(one.node_id, address_text(one.host, one.port)) for one in committed.members}
        known = committed.index != NO_INDEX and committed.find(config.node_id) is not None
        if not known or configured == present:
            self._conditions.clear(ConditionKind.PEERS_DIFFER)
            return
        wanted = peers_setting(committed)
        why = f"its settings name other members than the group has; for its next start, write dLegerPeers={wanted}"
        self._conditions.set(ConditionKind.PEERS_DIFFER, why)

    def _look_for_a_stuck_change(self, status: NodeStatus, membership: Membership, lasted_ms: int) -> None:
        if status.role is not Role.LEADER or membership.is_committed or lasted_ms < STUCK_MS:
            self._conditions.clear(ConditionKind.CHANGE_STUCK)
            return
        current = membership.current
        behind = [one.node_id for one in status.peers if one.match_index < current.index]
        who = ", ".join(behind) or "this member itself"
        why = (
            f"the members {members_text(current)} (configuration {current.index}) have not been committed for "
            f"{lasted_ms // 1000} s: {who} did not acknowledge it"
        )
        self._conditions.set(ConditionKind.CHANGE_STUCK, why)

    def _look_for_the_gone(self, status: NodeStatus) -> None:
        now_ms = self._clock.monotonic_ms()
        contacts = {one.node_id: one.last_contact_ms for one in status.peers} if status.role is Role.LEADER else {}
        with self._lock:
            for peer, ago_ms in contacts.items():
                if 0 <= ago_ms < _IN_CONTACT_MS:
                    self._unheard_since_ms.pop(peer, None)
                else:
                    heard_ms = now_ms - ago_ms if ago_ms >= 0 else now_ms
                    self._unheard_since_ms[peer] = min(self._unheard_since_ms.get(peer, now_ms), heard_ms)
            for peer in self._unheard_since_ms.keys() - contacts.keys():
                del self._unheard_since_ms[peer]
            gone = {one: now_ms - since_ms for one, since_ms in self._unheard_since_ms.items()}
            over = self._told_gone - {one for one, lasted_ms in gone.items() if lasted_ms >= GONE_MS}
            self._told_gone = {one for one, lasted_ms in gone.items() if lasted_ms >= GONE_MS}
            told = sorted(self._told_gone)
        for peer in over:
            self._conditions.clear(ConditionKind.MEMBER_GONE, peer)
        learners = {one.node_id for one in status.members if one.role is MemberRole.LEARNER}
        for peer in told:
            step = f"cancel {peer}" if peer in learners else f"replace {peer} ID=HOST:PORT"
            why = f"not heard from for {gone[peer] // 60_000} min: start it, or give it up: `dledger member {step}`"
            self._conditions.set(ConditionKind.MEMBER_GONE, why, subject=peer)


def removal_index(node_id: NodeId, committed: Configuration, removed_at: LogIndex, *, has_standing: bool) -> LogIndex:
    """At which configuration a node was removed: by its own log, or as others say; ``NO_INDEX`` if it was not.

    One without standing may be new: it gets the members of which it is none yet before the entry that adds it.
    """
    if has_standing and committed.index != NO_INDEX and committed.find(node_id) is None:
        return LogIndex(max(committed.index, removed_at))
    return removed_at
