"""A node's identity towards its peers, and the messages it accepts: same cluster, group, addressee and old log.

Any node with these may connect, member or not: this member may be behind, and not know a new one yet (M7). While the
members are the configured ones on both sides, they must be the same: two groups may have one name.

``PeerAddresses`` says where this member reaches the others: as configured, as the group's configuration says, and as
others say of it. Statements of others are used for connecting only, so that a member that is behind, or has yet to
join, can ask a leader that it does not know whether it leads (``dledger.core.log_matching``). The log decides which
members count (M12).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from dledger.base_log import BaseLog, why_apart
from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership, implicit_configuration
from dledger.core.messages import Envelope, Message
from dledger.errors import IdentityError, ResponseCode, UnknownMemberError
from dledger.log_output import speaking_group, speaks_for
from dledger.members import Configuration
from dledger.rpc.peers.codec import PROTOCOL_VERSION, EnvelopeHeader, Handshake, HandshakeAnswer
from dledger.rpc.tls_keeper import TlsKeeper
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


_LOG = logging.getLogger(__name__)

REASONS_MAX: Final = 32
"""The limit of distinct reasons logged, per peer or per port: anyone may connect, and fill logs."""

Learn = Callable[[NodeId, str], None]
"""Records a peer's client address."""


@dataclass(frozen=True, slots=True)
class BaseLogs:
    """A member's statement about the log that its own continues, and its reaction when a peer's differs."""

    own: Callable[[], BaseLog | None] = lambda: None
    """The base log as it is now: its files expire."""
    compared: Callable[[NodeId, str], None] = lambda _peer, _why: None
    """Called after each comparison with a peer's, on any thread: why the two stay apart, or empty if they agree."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The identity that members compare; made with ``of``."""

    cluster_id: str
    group: str
    node_id: NodeId
    addresses: PeerAddresses
    segment_bytes: int
    max_entry_bytes: int
    base_logs: BaseLogs = BaseLogs()

    @classmethod
    def of(
        cls, config: ServerConfig, base_logs: BaseLogs | None = None, addresses: PeerAddresses | None = None
    ) -> PeerIdentity:
        """The identity in a configuration."""
        return cls(
            cluster_id=config.effective_cluster_id,
            group=config.group,
            node_id=config.node_id,
            addresses=addresses or PeerAddresses.of(config),
            segment_bytes=config.store.segment_bytes,
            max_entry_bytes=config.store.max_entry_bytes,
            base_logs=base_logs or BaseLogs(),
        )

    def check(self, message: Envelope | EnvelopeHeader) -> None:
        """Raise ``IdentityError`` or ``UnknownMemberError`` unless the message is for us, and from somebody else."""
        if message.cluster_id != self.cluster_id:
            raise IdentityError(
                f"message for cluster {message.cluster_id!r} reached {self.node_id!r} of cluster {self.cluster_id!r}: "
                "check the addresses in the member list"
            )
        if message.group != self.group:
            raise IdentityError(
                f"message for group {message.group!r} reached {self.node_id!r} of group {self.group!r}: "
                "check the addresses in the member list"
            )
        if message.target != self.node_id:
            raise IdentityError(
                f"message for node {message.target!r} reached {self.node_id!r}: check the addresses in the member list"
            )
        if message.sender == self.node_id:
            raise UnknownMemberError(f"a message to {self.node_id!r} from another {self.node_id!r}: check the ids")

    def envelope_from(self, peer: NodeId, message: Message, connection: int = 0) -> Envelope:
        """A message to us that arrived on a connection whose handshake was ``peer``'s."""
        return Envelope(self.cluster_id, self.group, peer, self.node_id, message, connection)

    def handshake(self, peer: NodeId, client_address: str, purpose: int) -> Handshake:
        """Our handshake on a new connection to a peer."""
        return Handshake(
            header=EnvelopeHeader(self.cluster_id, self.group, self.node_id, peer),
            protocol_version=PROTOCOL_VERSION,
            purpose=purpose,
            members=self.addresses.compared,
            segment_bytes=self.segment_bytes,
            max_entry_bytes=self.max_entry_bytes,
            client_address=client_address,
            base_log=self.base_logs.own(),
        )

    def take_answer(self, peer: NodeId, answer: HandshakeAnswer) -> None:
        """Note what a peer's answer to our handshake says of our old logs, and of the group."""
        if answer.configuration is not None:
            self.addresses.hear(answer.configuration)
        if answer.code in (ResponseCode.SUCCESS, ResponseCode.OTHER_HISTORY):
            self.base_logs.compared(peer, "" if answer.code is ResponseCode.SUCCESS else answer.reason)

    def judge(self, handshake: Handshake, client_address: str) -> HandshakeAnswer:
        """Our answer to a peer's handshake, whose header was checked."""
        ours = self.handshake(handshake.header.sender, client_address, handshake.purpose)
        for what, theirs, mine in (
            ("protocol version", handshake.protocol_version, ours.protocol_version),
            ("members", ",".join(handshake.members), ",".join(ours.members)),
            ("segment_bytes", handshake.segment_bytes, ours.segment_bytes),
            ("max_entry_bytes", handshake.max_entry_bytes, ours.max_entry_bytes),
        ):
            if theirs != mine and not (what == "members" and not (theirs and mine)):
                reason = f"{what} of {handshake.header.sender} is {theirs}, of {self.node_id} {mine}: make them equal"
                return HandshakeAnswer(ResponseCode.UNEXPECTED_ARGUMENT, reason, client_address=client_address)
        apart = why_apart(ours.base_log, handshake.base_log, self.node_id, handshake.header.sender)
        self.base_logs.compared(NodeId(handshake.header.sender), apart)
        if apart:
            return HandshakeAnswer(ResponseCode.OTHER_HISTORY, apart, client_address=client_address)
        committed = self.addresses.committed
        return HandshakeAnswer(ResponseCode.SUCCESS, client_address=client_address, configuration=committed)


class Introduction(NamedTuple):
    """A member's identity for its peers, and the callback that learns theirs."""

    identity: PeerIdentity
    client_address: str
    learn: Learn
    tls_keeper: TlsKeeper | None = None
    """None: plaintext."""


class Reasons:
    """Logs each distinct reason, of which only people can remove the cause, once."""

    def __init__(self, level: int, group: str = "") -> None:
        """``group``: whose log lines they are."""
        self._level = level
        self._group = group
        self._logged: set[str] = set()

    def log(self, reason: str) -> None:
        """Log ``reason`` unless it was logged before."""
        if reason not in self._logged and len(self._logged) < REASONS_MAX:
            self._logged.add(reason)
            with speaks_for(self._group or speaking_group()):
                _LOG.log(self._level, "%s", reason)
