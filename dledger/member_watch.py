"""Problems of a group's members, as conditions of a node. Decides nothing.

Without threads of its own: it is told of new configurations and of vote requests, and looks at the node's status about
once a second.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from dledger.clock import Clock
from dledger.conditions import ConditionKind, Conditions
from dledger.config import ServerConfig
from dledger.core.membership import Membership
from dledger.members import Configuration, MemberRole
from dledger.rpc.ports import NodeStatus
from dledger.runtime.log_lines import members_text, peers_setting
from dledger.types import NO_INDEX, LogIndex, NodeId, Role
from dledger.values import address_text

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
