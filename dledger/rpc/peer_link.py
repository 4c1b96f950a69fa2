"""The way towards one peer: a control channel for votes and heartbeats, a push channel for the log.

They are separate TCP connections, so that a megabyte of log on its way never delays a heartbeat. Pushes travel on one
long-lived stream, in order; whatever breaks it is told to the receiver as ``connection_lost``, once per broken stream,
from the link's own thread. Nothing is retried here: the protocol repeats itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
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
from dledger.errors import DLedgerError, InvariantError, ResponseCode
from dledger.rpc import codec, options
from dledger.rpc.identity import Identity
from dledger.rpc.ports import Receiver
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

CONTROL_CALLS_MAX: Final = 32
"""Unanswered votes and heartbeats per peer; more are dropped (a black-holed peer answers none until their deadline)."""
REASONS_MAX: Final = 32
"""Distinct refusals that are logged per peer."""

Learn = Callable[[NodeId, str], None]
"""Takes a peer's client address."""

_Queue = SimpleQueue[Envelope | None]  # None ends the stream


class PeerLink:
    """Outgoing messages to ``peer``. ``send_*`` never block and never raise for a dead peer."""

    def __init__(
        self,
        identity: Identity,
        peer: Member,
        receiver: Receiver,
        *,
        client_address: str,
        learn: Learn,
        control_timeout_s: float,
        queue_pushes_max: int,
    ) -> None:
        self.peer = peer.node_id
        self.dropped = 0
        """Messages that were not delivered, as far as this side knows. For people: updates may race."""
        self._identity = identity
        self._receiver = receiver
        self._client_address = client_address
        self._learn = learn
        self._control_timeout_s = control_timeout_s
        self._queue_pushes_max = queue_pushes_max
        self._control_channel = grpc.insecure_channel(peer.address, options.peer_channel_options())
        self._push_channel = grpc.insecure_channel(peer.address, options.peer_channel_options())
        self._vote = _unary(self._control_channel, "Vote")
        self._heartbeat = _unary(self._control_channel, "Heartbeat")
        self._take_leadership = _unary(self._control_channel, "TakeLeadership")
        self._handshake = _unary(self._push_channel, "Handshake")
        self._push: grpc.StreamStreamMultiCallable[Envelope, bytes] = self._push_channel.stream_stream(
            options.method(options.RAFT_SERVICE, "Push"), request_serializer=codec.encode, response_deserializer=None
        )
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards _queue, _overflowed, _call, _control_calls
        self._queue: _Queue = SimpleQueue()
        self._overflowed = False  # something was dropped: what is on the queue must not go out as if nothing was
        self._call: grpc.Call | None = None  # the handshake or the stream, whichever is under way
        self._control_calls = 0
        self._reasons: set[str] = set()
        self._backoff_ms = options.RECONNECT_MS_MIN
        self._thread = threading.Thread(target=self._run, name=f"dledger-push-{identity.node_id}-{self.peer}")

    def start(self) -> None:
        """Start the thread that keeps the push stream; it connects when there is something to send."""
        self._thread.start()

    def send_push(self, envelope: Envelope) -> None:
        """Queue a push. If the queue is full, the message is dropped and the stream broken: the peer takes none."""
        with self._lock:
            if self._queue.qsize() < self._queue_pushes_max:
                self._queue.put(envelope)
                return
            self._overflowed = True
            call = self._call
        self.dropped += 1
        _cancel(call)

    def send_control(self, envelope: Envelope) -> None:
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
            if self._stopping.is_set() or self._control_calls >= CONTROL_CALLS_MAX:
                self.dropped += 1
                return
            self._control_calls += 1
        try:
            future = call.future(codec.encode(envelope), timeout=self._control_timeout_s)
        except ValueError:  # the channel was closed just now
            return
        future.add_done_callback(partial(self._on_control_done, decode))

    def close(self) -> None:
        """Cancel everything under way and join the thread."""
        self._stopping.set()
        with self._lock:
            self._queue.put(None)
            call = self._call
        _cancel(call)
        # Closing the channels ends whatever the cancellation did not reach; only then is the thread sure to end.
        self._push_channel.close()
        self._control_channel.close()
        if self._thread.is_alive():
            self._thread.join()

    def _on_control_done(self, decode: Callable[[bytes], Envelope] | None, future: grpc.CallFuture[bytes]) -> None:
        with self._lock:
            self._control_calls -= 1
        if self._stopping.is_set():
            return
        if future.code() is not grpc.StatusCode.OK:
            self.dropped += 1
            if future.code() in _MISCONFIGURED:
                self._log_once(str(future.details()))
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
            self._log_once(str(error))

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            self._stream(first)
            self._abandon_queue()
            if self._stopping.is_set():
                return
            try:
                self._receiver.connection_lost(self.peer)
            except DLedgerError as error:  # the node has stopped itself; its transport is closed next
                self._log_once(str(error))
            self._stopping.wait(self._backoff_ms / 1000)
            self._backoff_ms = min(2 * self._backoff_ms, options.RECONNECT_MS_MAX)

    def _abandon_queue(self) -> None:
        # The old stream's request iterator may still wait on the old queue: it gets its end there, and can take
        # nothing that is meant for the next stream. Swapped under the lock, so that every message put before
        # connection_lost is called is lost with the stream, and every later one is on the new queue.
        with self._lock:
            lost, self._queue = self._queue, SimpleQueue()
            self._call, self._overflowed = None, False
        try:
            while True:
                if lost.get_nowait() is not None:
                    self.dropped += 1
        except Empty:
            lost.put(None)

    def _stream(self, first: Envelope) -> None:
        try:
            if not self._shake_hands():
                return
            with self._lock:
                if self._stopping.is_set() or self._overflowed:
                    return
                call = self._push(_requests(first, self._queue))
                self._call = call
            for data in call:
                answer = codec.decode_push_response(data)
                self._identity.check_answer(answer, self.peer)
                self._receiver.receive(answer)
                self._backoff_ms = options.RECONNECT_MS_MIN
        except grpc.RpcError as error:
            # What passes by itself (a dead or slow peer) is not worth a line per attempt; what needs a person is.
            if error.code() in _MISCONFIGURED and not self._stopping.is_set():
                self._refused(str(error.details()))
        except DLedgerError as error:
            self._log_once(str(error))
            _cancel(self._call)
        except ValueError:  # the channel was closed just now
            return

    def _shake_hands(self) -> bool:
        request = codec.encode_handshake(self._identity.handshake(self.peer, self._client_address))
        with self._lock:
            if self._stopping.is_set():
                return False
            call = self._handshake.future(request, timeout=options.RECONNECT_MS_MAX / 1000)
            self._call = call
        try:
            answer = codec.decode_handshake_answer(call.result())
        except grpc.FutureCancelledError:
            return False
        except DLedgerError as error:
            self._refused(str(error))
            return False
        if answer.code is not ResponseCode.SUCCESS:
            self._refused(answer.reason)
            return False
        self._learn(self.peer, answer.client_address)
        return True

    def _refused(self, reason: str) -> None:
        self._backoff_ms = options.RECONNECT_MS_MAX
        self._log_once(reason)

    def _log_once(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            _LOG.error("%s does not talk to %s: %s", self._identity.node_id, self.peer, reason)


_MISCONFIGURED: Final = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def _requests(first: Envelope, queue: _Queue) -> Iterator[Envelope]:
    yield first
    while (envelope := queue.get()) is not None:
        yield envelope


def _cancel(call: grpc.Call | None) -> None:
    if call is not None:
        call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped


def _unary(channel: grpc.Channel, name: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        options.method(options.RAFT_SERVICE, name), request_serializer=None, response_deserializer=None
    )
    return call
