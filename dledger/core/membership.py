"""The configurations in force: the newest in the log, and those before it down to the newest known to be committed.

A configuration counts from its append, on the leader and on followers, and is undone by truncation (rule M2). Since a
leader appends one only when the one before is committed (M1), few can be above the newest committed one.

The encoding of a configuration is the payload of the NOOP that puts it in force, and its form on disk and wire.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from struct import Struct
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final

from dledger.config import ServerConfig
from dledger.core.noop_payload import PayloadKind, UnreadablePayloadError, find_payload, kind_in, with_head
from dledger.core.ports import Log
from dledger.errors import InvalidRequestError
from dledger.types import NO_INDEX, NOOP_CHANNEL, ClusterMember, Configuration, LogIndex, MemberRole, NodeId

CONFIGURATION_BYTES_MAX: Final = 4096

_TABLE: Final = Struct(">BQIH")
_MEMBER: Final = Struct(">QIBBHBBB")
_TEXT_BYTES_MAX: Final = 255
_PROMOTE: Final = 1


def encode_configuration(configuration: Configuration) -> bytes:
    """The payload of a configuration, without its index and term, which are those of its entry.

    Raises ``InvalidRequestError`` if it is too long.
    """
    members = configuration.members
    parts = [_TABLE.pack(0, configuration.change_id, configuration.next_number, len(members))]
    for one in members:
        texts = [text.encode() for text in (one.node_id, one.host, one.replaces)]
        lengths = [len(text) for text in texts]
        if max(lengths) > _TEXT_BYTES_MAX:
            raise InvalidRequestError(f"a name or an address of {max(lengths)} bytes; the limit is {_TEXT_BYTES_MAX}")
        flags = _PROMOTE if one.promote else 0
        parts.append(_MEMBER.pack(one.uid, one.number, one.role, flags, one.port, *lengths))
        parts += texts
    payload = with_head(PayloadKind.CONFIGURATION, b"".join(parts))
    if len(payload) > CONFIGURATION_BYTES_MAX:
        raise InvalidRequestError(
            f"the members' names and addresses take {len(payload)} bytes; the limit is {CONFIGURATION_BYTES_MAX}"
        )
    return payload


def decode_configuration(body: bytes) -> Configuration | None:
    """The configuration in a NOOP's body, without index and term; None if it holds none.

    Raises ``UnreadablePayloadError`` for one of a later version or a damaged one; other payloads may be unreadable.
    """
    found = find_payload(body) if kind_in(body) == PayloadKind.CONFIGURATION else None
    if found is None:
        return None
    try:
        return _decode(found[1])
    except (StructError, ValueError, InvalidRequestError) as error:
        raise UnreadablePayloadError(f"damaged configuration in the log: {error}") from error


def read_configuration(log: Log, index: LogIndex) -> Configuration | None:
    """The configuration that the entry at ``index`` puts in force, if it does.

    Raises ``UnreadablePayloadError`` and the errors of ``Log.read``.
    """
    entry = log.read(index)
    found = decode_configuration(entry.body)
    return None if found is None else replace(found, index=entry.index, term=entry.term)


def describe_configuration(configuration: Configuration) -> str:
    """The members, for people."""
    told = [
        f"{one.node_id} (learner)" if one.role is MemberRole.LEARNER else one.node_id for one in configuration.members
    ]
    return f"members: {', '.join(told)}"


def _decode(rest: bytes) -> Configuration:
    _, change_id, next_number, count = _TABLE.unpack_from(rest)
    at = _TABLE.size
    members = []
    for _ in range(count):
        uid, number, role, flags, port, *lengths = _MEMBER.unpack_from(rest, at)
        at += _MEMBER.size
        texts = []
        for length in lengths:
            texts.append(rest[at : at + length].decode())
            at += length
        name, host, replaces = texts
        promote = bool(flags & _PROMOTE)
        members.append(ClusterMember(NodeId(name), host, port, MemberRole(role), number, uid, promote, replaces))
    if at != len(rest) or len({one.node_id for one in members}) != count or not count:
        raise InvalidRequestError(f"{count} members, {at} of {len(rest)} bytes")
    return Configuration(tuple(members), next_number=next_number, change_id=change_id)


_CHUNK_ENTRIES: Final = 4096
"""How many entries' headers are looked at together."""


def implicit_configuration(config: ServerConfig) -> Configuration:
    """The configured peers as voters, numbered in the order of their ids."""
    ordered = sorted(config.members, key=lambda one: one.node_id)
    members = tuple(ClusterMember(one.node_id, one.host, one.port, number=number) for number, one in enumerate(ordered))
    return Configuration(members, next_number=len(members))


def recover_membership(
    node_id: NodeId, log: Log, saved: Configuration | None, clear_to: LogIndex, implicit: Configuration
) -> Membership:
    """The state in force when a member starts: the newest committed configuration that its directory holds (``saved``)
    or else ``implicit``, and those in the log's no-ops after ``clear_to`` (M3).

    A member that cannot know gives no member in ``implicit``: it waits for a leader. Raises
    ``UnreadablePayloadError`` and ``CorruptLogError``.
    """
    found = Membership(node_id, saved or implicit)
    first = max(clear_to, found.current.index, log.begin.index) + 1
    for low in range(first, log.last.index + 1, _CHUNK_ENTRIES):
        high = min(low + _CHUNK_ENTRIES - 1, log.last.index)
        for channel, index, count in log.channel_runs(LogIndex(low), LogIndex(high)):
            noops = range(index, index + count) if channel == NOOP_CHANNEL else ()
            for noop in noops:
                configuration = read_configuration(log, LogIndex(noop))
                if configuration is not None:
                    found.adopt(configuration)
    found.commit(log.committed_index)
    found.release_all()
    return found


class Membership:
    """One member's view of who belongs to its group. Under the node's lock.

    ``peers``: all other members, learners included. ``voters`` may lack this member: a learner, or one that was removed
    or waits to be added, never campaigns.
    """

    def __init__(self, node_id: NodeId, committed: Configuration) -> None:
        self._node_id = node_id
        self._history = [committed]
        self._unsure: list[Configuration] = []
        """Those in the log of a member that cannot know whether they are the newest: they wait for a leader's word."""
        self._left: dict[NodeId, ClusterMember] = {}
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
    def appended(self) -> tuple[Configuration, ...]:
        """Those after it, oldest first."""
        return tuple(self._history[1:])

    @property
    def previous_voters(self) -> tuple[NodeId, ...]:
        """The voters before the current configuration, unless that is known to be committed (M6)."""
        return self._history[-2].voters if len(self._history) > 1 else ()

    @property
    def is_unsure(self) -> bool:
        """Whether configurations of its log are not in force: see ``distrust``."""
        return bool(self._unsure)

    @property
    def left(self) -> tuple[NodeId, ...]:
        """Those whose removal is committed, and who have not been released."""
        return tuple(self._left)

    def copy(self) -> Membership:
        """One that does not change with this one."""
        other = Membership(self._node_id, self.committed)
        other._history, other._left, other._unsure = list(self._history), dict(self._left), list(self._unsure)
        other._note_current()
        return other

    def distrust(self) -> None:
        """Use none of those in the log: this member may have been catching up, through old ones (M10).

        They are in force again, as far as they are newer, once a leader tells the newest committed one (``install``),
        or that one of them is committed: it has told none before, so there is none.
        """
        self._unsure = [one for one in self._history if one.index != NO_INDEX]
        self._history = [Configuration()]
        self._note_current()

    def hold_until_told(self, found: Membership) -> None:
        """Treat entries that the log turned out to hold as ``distrust`` does."""
        explicit = [one for one in (*found._history, *found._unsure) if one.index != NO_INDEX]
        if explicit:
            self._history, self._unsure = [Configuration()], explicit
            self._note_current()

    def adopt(self, configuration: Configuration) -> bool:
        """Put an appended configuration in force; False if a newer one, or this one, is known already (M10)."""
        if configuration.index <= self.current.index:
            return False
        self._history.append(configuration)
        self._note_current()
        return True

    def truncated(self, from_index: LogIndex) -> bool:
        """Undo what the log no longer holds; returns whether that was a configuration.

        The newest committed one stays, even if it came with a new begin of the log and lies above the log's end.
        """
        known = len(self._history) + len(self._unsure)
        self._unsure = [one for one in self._unsure if one.index < from_index]
        self._history = [self._history[0], *(one for one in self._history[1:] if one.index < from_index)]
        if len(self._history) + len(self._unsure) == known:
            return False
        self._note_current()
        return True

    def commit(self, index: LogIndex) -> bool:
        """The log is committed up to ``index``; returns whether a newer configuration is known to be committed now.

        A member that is no longer in it is leaving until it is released (M9).
        """
        if any(one.index <= index for one in self._unsure):
            self._history[1:] = sorted([*self._unsure, *self._history[1:]], key=lambda one: one.index)
            self._unsure = []
        known = sum(one.index <= index for one in self._history[1:])
        if not known:
            return False
        self._left |= {one.node_id: one for before in self._history[:known] for one in before.members}
        self._history = self._history[known:]
        self._note_current()
        return True

    def install(self, configuration: Configuration) -> bool:
        """Take over a committed configuration that came with a new begin of the log, however far ahead (M10)."""
        changed = configuration.index > self.committed.index
        if changed:
            known = sorted([*self._history, *self._unsure], key=lambda one: one.index)
            self._history = [configuration, *(one for one in known if one.index > configuration.index)]
            self._unsure = []
            self._note_current()
        return changed

    def release(self, node_id: NodeId) -> None:
        """This one has nothing more to tell a member that has left."""
        self._left.pop(node_id, None)
        self._note_current()

    def release_all(self) -> bool:
        """Only a leader tells members that they have left; returns whether any was leaving."""
        if not self._left:
            return False
        self._left.clear()
        self._note_current()
        return True

    def is_forgetful(self, node_id: NodeId, uid: int) -> bool:
        """Whether a process with this uid lacks the member's memory: its directory is another one (M11)."""
        member = self.current.find(node_id)
        return member is not None and 0 not in (uid, member.uid) and uid != member.uid

    def _note_current(self) -> None:
        """Derive what every append and vote reads."""
        current = self.current
        self.is_committed = len(self._history) == 1 and not self._unsure
        """Whether the current configuration is known to be committed."""
        self.voters = frozenset(current.voters)
        self.quorum = current.quorum
        self.peers = tuple(one.node_id for one in current.members if one.node_id != self._node_id)
        self.voting_peers = tuple(peer for peer in self.peers if peer in self.voters)
        own = current.find(self._node_id)
        self.is_voter = own is not None and own.role is MemberRole.VOTER
        self.is_explicit = current.index != NO_INDEX
        self.withheld: dict[NodeId, LogIndex] = {}
        """The last entry that a member may be sent whose removal or demotion is not committed yet (M9)."""
        leaving: dict[NodeId, ClusterMember] = dict(self._left)
        for before, after in pairwise(self._history):
            for one in before.members:
                follows = after.find(one.node_id)
                if follows is None or follows.role > one.role:
                    self.withheld.setdefault(one.node_id, LogIndex(after.index - 1))
                leaving[one.node_id] = one
        self._left = {one: member for one, member in self._left.items() if current.find(one) is None}
        self.leaving = tuple(
            member for one, member in sorted(leaving.items()) if one != self._node_id and current.find(one) is None
        )
        """Those that are not in the current configuration, but not all of them know it."""
        self.contact_ids = (*self.peers, *(one.node_id for one in self.leaving))
