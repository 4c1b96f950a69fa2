"""Sends votes, heartbeats and transfers to one peer, on its own TCP connection, without threads of ours.

It is separate from the connection for pushes, so that a megabyte of log in flight never delays a heartbeat. It does not
retry: the protocol repeats itself.

Each connection starts with a handshake. A handshake on the push connections alone would not be enough:

1. A node whose ``segment_bytes`` differs from the others' wins an election, since votes do not mention segments.
2. Its heartbeats are answered, so no member campaigns and check-quorum is content.
3. Every one of its push connections is refused at the handshake: it leads for ever, and nothing is ever committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import grpc

from dledger.config import Member
from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    TakeLeadership,
    VoteRequest,
)
from dledger.errors import DLedgerError, InvariantError, ResponseCode
from dledger.rpc import options, tls
from dledger.rpc.peers import codec
from dledger.rpc.peers.identity import PeerIdentity
from dledger.rpc.ports import Receiver
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

HEARTBEATS_MAX: Final = 4
"""The limit of unanswered heartbeats per peer. Beyond it, only the newest is kept until an answer or a deadline: it
says all that earlier ones said. A peer accepts several times as many (``server.CALLS_PER_PEER``).
"""
OTHERS_MAX: Final = 2
"""The same limit for votes and transfers, which heartbeats thus never delay."""
REASONS_MAX: Final = 32
"""The limit of distinct refusals logged per peer."""
MISCONFIGURED: Final = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Refusals that a dead, slow or busy peer never sends: they need a person, so they are logged."""

if TYPE_CHECKING:  # generic only in the stubs
    _Call = grpc.UnaryUnaryMultiCallable[bytes, bytes]

_METHODS: Final = ("Handshake", "Vote", "Heartbeat", "TakeLeadership")
Learn = Callable[[NodeId, str], None]
"""Records a peer's client address."""


class Refusals:
    """Logs each distinct reason for which two members cannot talk, once."""

    def __init__(self, node_id: NodeId, peer: NodeId) -> None:
        self._node_id = node_id
        self._peer = peer
        self._reasons: set[str] = set()

    def log(self, reason: str) -> None:
        """Log ``reason`` unless it was logged before."""
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            _LOG.error("%s does not talk to %s: %s", self._node_id, self._peer, reason)


class Introduction(NamedTuple):
    """What two members exchange in a handshake: our client address, the receiver of theirs, and the log of refusals."""

    client_address: str
    learn: Learn
    refusals: Refusals


class _Line(NamedTuple):
    """A channel, and the version of its certificates."""

    channel: grpc.Channel
    calls: dict[str, _Call]
    tls_version: int


class _Budget:
    """The calls of one kind in flight, and the one waiting for a free place. Under the link's lock."""

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        self.calls = 0
        self.waiting: Callable[[], None] | None = None


def peer_channel(peer: NodeId, address: str, tls_keeper: TlsKeeper | None) -> tuple[int, grpc.Channel]:
    """A new channel to a peer's port, and the version of its certificates."""
    wanted = options.peer_channel_options()
    if tls_keeper is None:
        return 0, grpc.insecure_channel(address, wanted)
    version, credentials = tls_keeper.channel_credentials()
    # The certificate must be the peer's, wherever its address leads.
    wanted.append(("grpc.ssl_target_name_override", peer))
    return version, grpc.secure_channel(address, credentials, wanted)


class ControlLink:
    """Sends control messages to ``peer``. ``send`` never blocks and never raises for a dead peer."""

    def __init__(
        self,
        identity: PeerIdentity,
        peer: Member,
        receiver: Receiver,
        *,
        introduction: Introduction,
        timeout_s: float,
        tls_keeper: TlsKeeper | None = None,
    ) -> None:
        self.peer = peer.node_id
        self.dropped = 0
        """Messages known here as not delivered. For monitoring: updates may race."""
        self._identity = identity
        self._receiver = receiver
        self._client_address, self._learn, self._refusals = introduction
        self._timeout_s = timeout_s
        self._address = peer.address
        self._tls = tls_keeper
        self._line = self._connect()
        self._lock = threading.Lock()  # guards _line, the budgets, _agreed and _closed
        self._heartbeats, self._others = _Budget(HEARTBEATS_MAX), _Budget(OTHERS_MAX)
        self._agreed = False  # the peer's process, the same one as far as we know, accepted our handshake
        self._closed = False

    def send(self, envelope: Envelope) -> None:
        """Send a vote request, a heartbeat or ``TakeLeadership``; answers go to ``Receiver.receive``."""
        decode: Callable[[bytes], Envelope] | None
        budget = self._others
        match envelope.message:
            case VoteRequest():
                call, decode = "Vote", codec.decode_vote_response
            case HeartbeatRequest():
                call, decode, budget = "Heartbeat", codec.decode_heartbeat_response, self._heartbeats
            case TakeLeadership():
                call, decode = "TakeLeadership", None
            case _:
                raise InvariantError(f"{type(envelope.message).__name__} is not a control message")
        go = partial(self._go, budget, partial(self._send, budget, call, decode, codec.encode(envelope)))
        with self._lock:
            if self._closed:
                self.dropped += 1
                return
            if budget.calls >= budget.calls_max:
                self.dropped += budget.waiting is not None
                budget.waiting = go
                return
            budget.calls += 1
        go()

    def _go(self, budget: _Budget, send: Callable[[], None]) -> None:
        """Count and send one call."""
        if self._agreed:
            send()
        else:
            self._shake_hands(budget, send)

    def _send(self, budget: _Budget, call: str, decode: Callable[[bytes], Envelope] | None, data: bytes) -> None:
        try:
            future = self._line.calls[call].future(data, timeout=self._timeout_s)
        except ValueError:  # the channel was just closed
            self._ended(budget)
            return
        future.add_done_callback(partial(self._on_done, budget, decode))

    def _shake_hands(self, budget: _Budget, then: Callable[[], None]) -> None:
        """Continue only if the peer accepts our handshake."""
        self._use_new_certificates()
        request = codec.encode_handshake(self._identity.handshake(self.peer, self._client_address))
        try:
            future = self._line.calls["Handshake"].future(request, timeout=self._timeout_s)
        except ValueError:  # the channel was just closed
            self._ended(budget)
            return
        future.add_done_callback(partial(self._on_handshake, budget, then))

    def _on_handshake(self, budget: _Budget, then: Callable[[], None], future: grpc.CallFuture[bytes]) -> None:
        reason = ""
        if future.code() is grpc.StatusCode.OK:
            try:
                answer = codec.decode_handshake_answer(future.result())
            except DLedgerError as error:
                reason = str(error)
            else:
                self._identity.take_answer(self.peer, answer)
                if answer.code is ResponseCode.SUCCESS:
                    self._learn(self.peer, answer.client_address)
                    with self._lock:
                        self._agreed = True
                    then()
                    return
                reason = answer.reason
        elif future.code() in MISCONFIGURED:
            reason = str(future.details())
        elif self._tls is not None:
            reason = tls.explain_channel(str(future.details()), f"{self.peer} at {self._address}")
        self._ended(budget)
        self.dropped += 1
        if reason and not self._closed:
            self._refusals.log(reason)

    def _ended(self, budget: _Budget) -> None:
        """A call has ended: the waiting one takes its place."""
        with self._lock:
            then, budget.waiting = budget.waiting, None
            if then is None or self._closed:
                budget.calls -= 1
                return
        then()

    def close(self) -> None:
        """Cancel every call in flight."""
        with self._lock:
            self._closed = True
        self._line.channel.close()

    def _on_done(
        self, budget: _Budget, decode: Callable[[bytes], Envelope] | None, future: grpc.CallFuture[bytes]
    ) -> None:
        self._ended(budget)
        if self._closed:
            return
        if future.code() is not grpc.StatusCode.OK:
            self.dropped += 1
            if future.code() is grpc.StatusCode.UNAVAILABLE:
                # The next answer may come from another process, with another configuration.
                with self._lock:
                    self._agreed = False
            if future.code() in MISCONFIGURED:
                self._refusals.log(str(future.details()))
        elif decode is not None:
            self._deliver(decode, future.result())

    def _deliver(self, decode: Callable[[bytes], Envelope], data: bytes) -> None:
        try:
            answer = decode(data)
            self._identity.check_answer(answer, self.peer)
            if isinstance(answer.message, HeartbeatResponse):
                self._learn(self.peer, answer.message.client_address)
            self._receiver.receive(answer)
        except DLedgerError as error:
            self.dropped += 1
            self._refusals.log(str(error))

    def _connect(self) -> _Line:
        """Return the channel, which connects, and reconnects, when something is sent."""
        version, channel = peer_channel(self.peer, self._address, self._tls)
        calls: dict[str, _Call] = {
            name: channel.unary_unary(
                options.method(options.RAFT_SERVICE, name), request_serializer=None, response_deserializer=None
            )
            for name in _METHODS
        }
        return _Line(channel, calls, version)

    def _use_new_certificates(self) -> None:
        """Replace the channel, which keeps the certificates it was made with, by one with the new ones."""
        if self._tls is None or self._tls.version == self._line.tls_version:
            return
        line = self._connect()
        with self._lock:
            if not self._closed:
                line, self._line = self._line, line
        line.channel.close()
