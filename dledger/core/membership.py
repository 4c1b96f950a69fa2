"""The configurations in force: the newest in the log, and those before it down to the newest known to be committed.

A configuration counts from its append, on the leader and on followers, and is undone by truncation (rule M2). Since a
leader appends one only when the one before is committed (M1), few can be above the newest committed one.
"""

from __future__ import annotations

from dledger.config import ServerConfig
from dledger.core.ports import Log
from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.types import NO_INDEX, LogIndex, NodeId


def implicit_configuration(config: ServerConfig) -> Configuration:
    """The configured peers as voters, numbered in the order of their ids."""
    ordered = sorted(config.members, key=lambda one: one.node_id)
    members = tuple(ClusterMember(one.node_id, one.host, one.port, number=number) for number, one in enumerate(ordered))
    return Configuration(members, next_number=len(members))


def recover_membership(
    node_id: NodeId,
    log: Log,  # noqa: ARG001
    saved: Configuration | None,
    clear_to: LogIndex,  # noqa: ARG001
    implicit: Configuration,
) -> Membership:
    """What is in force when a member starts: the newest committed configuration that its directory holds (``saved``)
    or else ``implicit``, and those in the log's no-ops after ``clear_to``.
    """
    return Membership(node_id, saved or implicit)


class Membership:
    """One member's view of who belongs to its group. Under the node's lock.

    ``peers``: all other members, learners included. ``voters`` may lack this member: a learner, or one that was removed
    or waits to be added, never campaigns.
    """

    def __init__(self, node_id: NodeId, committed: Configuration) -> None:
        self._node_id = node_id
        self._history = [committed]
        self._note_current()

    @property
    def current(self) -> Configuration:
        """The configuration that counts."""
        return self._history[-1]

    @property
    def committed(self) -> Configuration:
        """The newest one known to be committed."""
        return self._history[0]

    @property
    def previous_voters(self) -> tuple[NodeId, ...]:
        """The voters before the current configuration, unless that is known to be committed (M6)."""
        return () if self.is_committed else self._history[-2].voters

    def copy(self) -> Membership:
        """One that does not change with this one."""
        other = Membership(self._node_id, self.committed)
        other._history = list(self._history)
        other._note_current()
        return other

    def adopt(self, configuration: Configuration) -> bool:
        """Put an appended configuration in force; False if a newer one, or this one, is known already (M10)."""
        if configuration.index <= self.current.index:
            return False
        self._history.append(configuration)
        self._note_current()
        return True

    def truncated(self, from_index: LogIndex) -> bool:
        """Undo what the log no longer holds; returns whether another configuration is in force now.

        The newest committed one stays, even if it came with a snapshot and lies above the log's end.
        """
        kept = [self._history[0], *(one for one in self._history[1:] if one.index < from_index)]
        if len(kept) == len(self._history):
            return False
        self._history = kept
        self._note_current()
        return True

    def commit(self, index: LogIndex) -> bool:
        """The log is committed up to ``index``; returns whether a newer configuration is known to be committed now."""
        known = sum(one.index <= index for one in self._history[1:])
        if not known:
            return False
        self._history = self._history[known:]
        self._note_current()
        return True

    def install(self, configuration: Configuration) -> bool:
        """Take over a committed configuration that came with a new begin of the log, however far ahead (M10)."""
        changed = configuration.index > self.committed.index
        if changed:
            self._history = [configuration, *(one for one in self._history if one.index > configuration.index)]
            self._note_current()
        return changed

    def _note_current(self) -> None:
        """Derive what every append and vote reads."""
        current = self.current
        self.is_committed = len(self._history) == 1
        """Whether the current configuration is known to be committed."""
        self.voters = frozenset(current.voters)
        self.quorum = current.quorum
        self.peers = tuple(one.node_id for one in current.members if one.node_id != self._node_id)
        self.voting_peers = tuple(peer for peer in self.peers if peer in self.voters)
        own = current.find(self._node_id)
        self.is_voter = own is not None and own.role is MemberRole.VOTER
        self.is_explicit = current.index != NO_INDEX
