"""Where this member reaches the others: as configured, as the group's configuration says, and as others say of it.

Statements of others are used for connecting only, so that a member that is behind, or has yet to join, can ask a leader
that it does not know whether it leads (``dledger.core.entry_pusher.leader_check``). The log decides which members
count (M12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership, implicit_configuration
from dledger.members import Configuration
from dledger.types import NO_INDEX, NodeId

_TOLD_MAX: Final = 2
"""Members that are behind say something else than others: neither may undo the other's word each time."""

Reachable = Mapping[NodeId, tuple[Member, ...]]
"""By id: the addresses to try, in this order."""


class PeerAddresses:
    """The addresses that one member knows. Thread-safe: what it gives out does not change."""

    def __init__(self, node_id: NodeId, seeds: Iterable[Member], membership: Membership) -> None:
        self._node_id: Final = node_id
        self._seeds: Final = tuple(seeds)
        self._lock = threading.Lock()  # one change at a time, told to the listener in order
        self._told: tuple[Configuration, ...] = ()
        self._listener: Callable[[Reachable], None] = lambda _reachable: None
        self._membership = membership
        self._kept: frozenset[NodeId] = frozenset()
        self._reachable: Reachable = {}
        self._reachable = self._find()

    @classmethod
    def of(cls, config: ServerConfig) -> PeerAddresses:
        """Of a member that knows no more than its configuration."""
        return cls(config.node_id, config.peers, Membership(config.node_id, implicit_configuration(config)))

    @property
    def reachable(self) -> Reachable:
        """All others that can be connected to, members or not."""
        return self._reachable

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """The other members."""
        return self._membership.peers

    @property
    def voting_peers(self) -> tuple[NodeId, ...]:
        """Those of the other members that are voters."""
        return self._membership.voting_peers

    @property
    def quorum(self) -> int:
        """How many voters are a majority."""
        return self._membership.quorum

    @property
    def compared(self) -> tuple[NodeId, ...]:
        """The ids that peers must have configured, too; empty if the members are a matter of the log, or unknown."""
        current = self._membership.current
        return tuple(sorted(one.node_id for one in current.members)) if current.index == NO_INDEX else ()

    @property
    def committed(self) -> Configuration | None:
        """The newest configuration in the log that is known to be committed."""
        committed = self._membership.committed
        return None if committed.index == NO_INDEX else committed

    def first(self, peer: NodeId) -> Member | None:
        """The address to try first."""
        found = self._reachable.get(peer)
        return found[0] if found else None

    def listen(self, listener: Callable[[Reachable], None]) -> None:
        """Call ``listener`` now, and whenever an address has changed; it must not wait."""
        with self._lock:
            self._listener = listener
            listener(self._reachable)

    def adopt(self, membership: Membership, kept: frozenset[NodeId]) -> None:
        """Other members count, or are known to be committed. ``kept``: who must stay reachable, member or not."""
        with self._lock:
            self._membership, self._kept = membership, kept
            self._update()

    def hear(self, configuration: Configuration) -> None:
        """Take what a member, asked at an address that was known already, says of the group."""
        with self._lock:
            if configuration.index > self._membership.current.index and configuration not in self._told:
                self._told = configuration, *self._told[: _TOLD_MAX - 1]
                self._update()

    def _update(self) -> None:
        found = self._find()
        if found != self._reachable:
            self._reachable = found
            self._listener(found)

    def _find(self) -> Reachable:
        membership = self._membership
        found = {one: members for one, members in self._reachable.items() if one in self._kept}
        told = [one for one in reversed(self._told) if one.index > membership.current.index]
        newest_last = [membership.current, membership.committed, *told]
        listed: dict[NodeId, tuple[Member, ...]] = {}
        for configuration in newest_last:
            for one in configuration.members:
                known = listed.get(one.node_id, ())
                address = Member(one.node_id, one.host, one.port)
                listed[one.node_id] = (address, *(other for other in known if other != address))
        found |= listed
        for seed in self._seeds:  # last, but always: all members may have moved, or somebody may have told nonsense
            known = found.get(seed.node_id, ())
            if seed not in known:
                found[seed.node_id] = (*known, seed)
        found.pop(self._node_id, None)
        return MappingProxyType(found)
