"""A node's knowledge of its group's members at its start, and the part of it that must stay on its disk (M3)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from dledger.config import ServerConfig
from dledger.core.member_state import MemberState
from dledger.core.membership import Membership, implicit_configuration, recover_membership
from dledger.core.node import Node
from dledger.errors import CorruptLogError
from dledger.members import Configuration
from dledger.store.file_store import FileStore
from dledger.store.identity import layout_of
from dledger.store.members_file import read_members
from dledger.types import NO_INDEX, EntryId, LogIndex, NodeId


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
