"""The way of votes, heartbeats and hand-overs towards one peer: a TCP connection of its own, and none of our threads.

Apart from the pushes' connection, so that a megabyte of log on its way never delays a heartbeat. Nothing is retried
here: the protocol repeats itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import grpc

from dledger.config import Member
from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    TakeLeadership,
    VoteRequest,
)
from dledger.errors import DLedgerError, InvariantError
from dledger.rpc import codec, options
from dledger.rpc.identity import Identity
from dledger.rpc.ports import Receiver
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

CONTROL_CALLS_MAX: Final = 32
"""Unanswered votes and heartbeats per peer; more are dropped (a black-holed peer answers none until their deadline)."""
REASONS_MAX: Final = 32
"""Distinct refusals that are logged per peer."""
MISCONFIGURED: Final = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
"""What a dead or slow peer never answers: it needs a person, so it is worth a line in the log."""

Learn = Callable[[NodeId, str], None]
"""Takes a peer's client address."""


class Refusals:
    """Logs every distinct reason why two members do not talk, once."""

    def __init__(self, node_id: NodeId, peer: NodeId) -> None:
        self._node_id = node_id
        self._peer = peer
        self._reasons: set[str] = set()

    def log(self, reason: str) -> None:
        """Log ``reason`` unless it was logged before."""
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            _LOG.error("%s does not talk to %s: %s", self._node_id, self._peer, reason)


class ControlLink:
    """Outgoing control messages to ``peer``. ``send`` never blocks and never raises for a dead peer."""

    def __init__(
        self,
        identity: Identity,
        peer: Member,
        receiver: Receiver,
        *,
        learn: Learn,
        timeout_s: float,
        refusals: Refusals,
    ) -> None:
        self.peer = peer.node_id
        self.dropped = 0
        """Messages that were not delivered, as far as this side knows. For people: updates may race."""
        self._identity = identity
        self._receiver = receiver
        self._learn = learn
        self._timeout_s = timeout_s
        self._refusals = refusals
        self._channel = grpc.insecure_channel(peer.address, options.peer_channel_options())
        self._vote = self._unary("Vote")
        self._heartbeat = self._unary("Heartbeat")
        self._take_leadership = self._unary("TakeLeadership")
        self._lock = threading.Lock()  # guards _calls and _closed
        self._calls = 0
        self._closed = False

    def send(self, envelope: Envelope) -> None:
        """Send a vote request, a heartbeat or ``TakeLeadership``; an answer goes to ``Receiver.receive``."""
        decode: Callable[[bytes], Envelope] | None
        match envelope.message:
            case VoteRequest():
                call, decode = self._vote, codec.decode_vote_response
            case HeartbeatRequest():
                call, decode = self._heartbeat, codec.decode_heartbeat_response
            case TakeLeadership():
                call, decode = self._take_leadership, None
            case _:
                raise InvariantError(f"{type(envelope.message).__name__} is no control message")
        with self._lock:
            if self._closed or self._calls >= CONTROL_CALLS_MAX:
                self.dropped += 1
                return
            self._calls += 1
        try:
            future = call.future(codec.encode(envelope), timeout=self._timeout_s)
        except ValueError:  # the channel was closed just now
            return
        future.add_done_callback(partial(self._on_done, decode))

    def close(self) -> None:
        """Cancel everything under way."""
        with self._lock:
            self._closed = True
        self._channel.close()

    def _on_done(self, decode: Callable[[bytes], Envelope] | None, future: grpc.CallFuture[bytes]) -> None:
        with self._lock:
            self._calls -= 1
            if self._closed:
                return
        if future.code() is not grpc.StatusCode.OK:
            self.dropped += 1
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

    def _unary(self, name: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            options.method(options.RAFT_SERVICE, name), request_serializer=None, response_deserializer=None
        )
        return call
