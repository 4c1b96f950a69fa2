"""A node's identity towards its peers, and the messages it accepts: same cluster, group, addressee and old log.

Any node with these may connect, member or not: this member may be behind, and not know a new one yet (M7). While the
members are the configured ones on both sides, they must be the same: two groups may have one name.

``PeerAddresses`` says where this member reaches the others: as configured, as the group's configuration says, and as
others say of it. Statements of others are used for connecting only, so that a member that is behind, or has yet to
join, can ask a leader that it does not know whether it leads (``dledger.core.log_matching``). The log decides which
members count (M12).

``PeerDialler`` makes a connection to a peer, from TCP or TLS to the handshake; the subclass does the rest. Each
connection begins with a handshake. A handshake for pushes alone would not be enough:

1. A node whose ``segment_bytes`` differs from the others' wins an election, since votes do not mention segments.
2. Its heartbeats are answered, so no member campaigns and check-quorum is content.
3. Every one of its push connections is refused at the handshake: it leads for ever, and nothing is ever committed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, cast

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership, implicit_configuration
from dledger.core.messages import Envelope, Message
from dledger.errors import DLedgerError, IdentityError, InvalidRequestError, ResponseCode, TlsError, UnknownMemberError
from dledger.log_output import speaking_group, speaks_for
from dledger.rpc import loops, options, tls
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.codec import PROTOCOL_VERSION, EnvelopeHeader, Handshake, HandshakeAnswer
from dledger.rpc.peers.frames import FrameBuffer, FrameKind, Purpose
from dledger.rpc.tls import TlsStream
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NO_INDEX, BaseLog, Configuration, NodeId, why_apart

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


CONNECT_TIMEOUT_S: Final = options.RECONNECT_MS_MAX / 1000
"""For connecting and the handshake together."""


class PeerDialler:
    """Calls one peer at its addresses in turn (``members``: of one id), and shakes hands. On an event loop."""

    def __init__(
        self, introduction: Introduction, members: tuple[Member, ...], purpose: Purpose, reasons: Reasons
    ) -> None:
        self._introduction = introduction
        self._members = members
        self._peer = members[0].node_id
        self._purpose = purpose
        self._reasons = reasons

    @property
    def address(self) -> str:
        """The peer's address, for people."""
        return f"{self._peer} at {self._members[0].address}"

    async def greet(self) -> None:
        """Shake hands, and hang up."""
        connection = DialledConnection(self, self._introduction.tls_keeper)
        try:
            await self._shake_hands(connection)
        except DLedgerError as error:
            self.on_refusal(error)
        except (OSError, TimeoutError, RuntimeError):  # the last if no thread was available to resolve the name
            return
        finally:
            connection.abort()

    async def _shake_hands(self, connection: DialledConnection) -> bool:
        """Connect; returns whether the peer agrees. An address that fails is tried last from then on.

        Raises ``OSError``, ``TimeoutError``, ``RuntimeError`` and ``DLedgerError``.
        """
        address, agreed = self._members[0], False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loops.connect(lambda: connection, address.host, address.port)
                agreed = await connection.agreed
        finally:
            if not agreed and self._members[0] == address:
                self._members = (*self._members[1:], address)
        return agreed

    # -- what the connection reports -----------------------------------------------------------------------------

    def handshake(self) -> bytes:
        identity, client_address, *_ = self._introduction
        return codec.encode_handshake(identity.handshake(self._peer, client_address, self._purpose))

    def check_names(self, names: tuple[str, ...]) -> None:
        """Raise ``TlsError`` unless they, of the other side's certificate, have the peer's."""
        tls.check_name(names, self._peer, f"of {self.address}")

    def on_frame(self, kind: FrameKind, payload: bytes | memoryview) -> bool:
        """Take a frame; returns whether it accepts our handshake. Raises ``DLedgerError`` to end the connection."""
        if kind is FrameKind.REFUSAL:
            raise InvalidRequestError(bytes(payload).decode(errors="replace"))
        if kind is FrameKind.HANDSHAKE_ANSWER:
            self._take_verdict(codec.decode_handshake_answer(payload))
            return True
        self._take(kind, payload)
        return False

    def _take_verdict(self, verdict: codec.HandshakeAnswer) -> None:
        identity, _, learn, _ = self._introduction
        identity.take_answer(self._peer, verdict)
        if verdict.code is not ResponseCode.SUCCESS:
            raise InvalidRequestError(verdict.reason)
        learn(self._peer, verdict.client_address)

    def _take(self, kind: FrameKind, _payload: bytes | memoryview) -> None:
        """Take any other frame. Raises ``DLedgerError`` to end the connection."""
        raise InvalidRequestError(f"expected an answer to the handshake, got {kind.name}")

    def on_writable(self) -> None:
        """The connection accepts more."""

    def on_refusal(self, error: DLedgerError) -> None:
        """Log a refusal, which needs a person, once."""
        self._complain(str(error))

    def _complain(self, reason: str) -> None:
        self._reasons.log(f"{self._introduction.identity.node_id} does not talk to {self._peer}: {reason}")


class DialledConnection(asyncio.Protocol):
    """One attempt, with TLS or not. ``agreed`` says how the handshake went, ``ended`` that the connection is over."""

    def __init__(self, dialler: PeerDialler, keeper: TlsKeeper | None) -> None:
        loop = asyncio.get_running_loop()
        self.agreed: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.writable = True
        self._dialler = dialler
        self._tls = None if keeper is None else TlsStream(keeper.connecting())
        self._said = b""  # received before TLS was agreed: perhaps not TLS at all
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None

    def write(self, kind: FrameKind, *payload: bytes) -> None:
        """Send a frame; bytes that the socket does not accept are buffered, and ``writable`` says when to pause."""
        for piece in frames.sealed(self._tls, kind, *payload):
            self._send(piece)

    def _send(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():  # otherwise we hear of its end next
            transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with TLS, or with our handshake."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        frames.tune(transport.get_extra_info("socket"))
        if self._tls is None:
            self.write(FrameKind.HANDSHAKE, self._dialler.handshake())
        else:
            self._send(self._tls.shake_hands(b""))

    def data_received(self, data: bytes) -> None:
        try:
            if self._tls is not None:
                data = self._decrypt(self._tls, data)
            for kind, payload in self._frames.feed(data):
                if self._dialler.on_frame(kind, payload) and not self.agreed.done():
                    self.agreed.set_result(True)
        except DLedgerError as error:
            self._dialler.on_refusal(error)
            self.abort()

    def _decrypt(self, stream: TlsStream, data: bytes) -> bytes:
        """The plaintext of received bytes; empty until the TLS handshake is done. Raises ``TlsError``."""
        try:
            if stream.agreed:
                stream.feed(data)
            elif not self._shake_hands(stream, data):
                return b""
            plain = stream.read()
            self._send_due(stream)
        except ssl.SSLError as error:
            self._send_due(stream)  # the alert, if the connection still carries it
            refused = frames.refusal_in(self._said)
            address = self._dialler.address
            raise TlsError(f"{address}: {refused}" if refused else tls.explain(error, address)) from error
        except EOFError:
            self.abort()
            return b""
        return plain

    def _shake_hands(self, stream: TlsStream, data: bytes) -> bool:
        """Continue the TLS handshake; once it is done, check the peer's name and send our handshake."""
        self._said += data
        reply = stream.shake_hands(data)
        if stream.agreed:
            self._dialler.check_names(tls.names_of(stream.certificate))
        self._send(reply)
        if stream.agreed:
            self._said = b""
            self.write(FrameKind.HANDSHAKE, self._dialler.handshake())
        return stream.agreed

    def _send_due(self, stream: TlsStream) -> None:
        if stream.has_due:
            self._send(stream.due())

    def pause_writing(self) -> None:
        """The peer is slow: messages stay on the queue, which has a limit."""
        self.writable = False

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self.writable = True
        self._dialler.on_writable()

    def connection_lost(self, _error: Exception | None) -> None:
        """Wake the waiting task."""
        if not self.agreed.done():
            self.agreed.set_result(False)
        if not self.ended.done():
            self.ended.set_result(None)
