"""What peers call: handshake, votes, heartbeats and push streams, on a thread pool that clients cannot exhaust.

Two threads serve a push stream: gRPC's pool thread writes answers, a thread of ours reads requests. There is at most
one stream per peer: a newer one ends the older, which may hang on a connection that nobody has noticed is dead. Whose
a stream is, only its first message tells; one without would hold a thread of the pool that answers votes for ever, so
it has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dledger.config import ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest
from dledger.errors import DLedgerError, IdentityError, InvalidRequestError, UnknownMemberError
from dledger.rpc import codec, options
from dledger.rpc.control_link import Learn
from dledger.rpc.identity import Identity
from dledger.rpc.ports import Receiver
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
FIRST_MESSAGE_S: Final = 5.0
"""How long a push stream may stay without a message; a peer opens one only when it has something to send."""
_Context = grpc.ServicerContext


@dataclass(frozen=True, slots=True)
class _End:
    """Ends a response stream with this status."""

    code: grpc.StatusCode
    reason: str = ""


class PeerServer:
    """Listens on the peer address from ``start`` to ``close``."""

    def __init__(
        self, config: ServerConfig, identity: Identity, receiver: Receiver, *, client_address: str, learn: Learn
    ) -> None:
        self.port = 0
        """The port listened on, once started."""
        self.dropped = 0
        """Answers that found no stream, or a full one."""
        self._config = config
        self._identity = identity
        self._receiver = receiver
        self._client_address = client_address
        self._learn = learn
        self._queue_max = 4 * config.replication.handler_queue_pushes_max
        # Per peer: a stream, one that is about to be replaced, and concurrent votes, heartbeats and handshakes.
        threads = 8 + 8 * len(config.peers)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"dledger-peer-rpc-{config.node_id}")
        self._server = grpc.server(
            self._pool, options=options.peer_server_options(config), maximum_concurrent_rpcs=threads
        )
        self._health = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=self._pool)
        self._lock = threading.Lock()  # guards _streams, _readers, _closing
        self._streams: dict[NodeId, _PushStream] = {}
        self._readers: set[threading.Thread] = set()
        self._closing = False

    def start(self) -> None:
        """Bind and serve. Raises ``ConfigError`` if the address cannot be had."""
        member = self._config.self_member
        self._server.add_generic_rpc_handlers([self._handlers()])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for service in ("", options.RAFT_SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        names = [options.RAFT_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        self.port = options.bind(self._server, member.host, member.port, "peer")
        self._server.start()

    def respond(self, envelope: Envelope) -> None:
        """Send a push response on the stream that its target opened; dropped if there is none or it is full."""
        stream = self._streams.get(envelope.target)
        if stream is None or not stream.respond(envelope):
            self.dropped += 1

    def close(self) -> None:
        """Stop serving; joins the pool and every reader."""
        with self._lock:
            self._closing = True
        self._health.enter_graceful_shutdown()
        self._server.stop(None).wait(STOP_TIMEOUT_S)
        with self._lock:
            streams, readers = tuple(self._streams.values()), tuple(self._readers)
        for stream in streams:
            stream.end(_End(grpc.StatusCode.UNAVAILABLE, "the node is stopping"))
        self._pool.shutdown(wait=True)
        for reader in readers:
            reader.join()

    def _handlers(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            options.RAFT_SERVICE,
            {
                "Handshake": unary(self._handshake),
                "Vote": unary(self._request(codec.decode_vote_request)),
                "Heartbeat": unary(self._request(codec.decode_heartbeat_request)),
                "TakeLeadership": unary(self._take_leadership),
                "Push": grpc.stream_stream_rpc_method_handler(self._push),
            },
        )

    def _handshake(self, data: bytes, context: _Context) -> bytes:
        try:
            handshake = codec.decode_handshake(data)
            self._identity.check(handshake.header)
        except DLedgerError as error:
            _abort(context, error)
        self._learn(handshake.header.sender, handshake.client_address)
        return codec.encode_handshake_answer(self._identity.judge(handshake, self._client_address))

    def _request(self, decode: Callable[[bytes], Envelope]) -> Callable[[bytes, _Context], bytes]:
        def answer(data: bytes, context: _Context) -> bytes:
            try:
                envelope = decode(data)
                self._identity.check(envelope)
                if isinstance(envelope.message, HeartbeatRequest):
                    self._learn(envelope.sender, envelope.message.client_address)
                return codec.encode(self._receiver.request(envelope))
            except DLedgerError as error:
                _abort(context, error)

        return answer

    def _take_leadership(self, data: bytes, context: _Context) -> bytes:
        try:
            envelope = codec.decode_take_leadership(data)
            self._identity.check(envelope)
            self._receiver.receive(envelope)
        except DLedgerError as error:
            _abort(context, error)
        return codec.encode_take_leadership_answer()

    def _push(self, requests: Iterator[bytes], context: _Context) -> Iterator[bytes]:
        stream = _PushStream(context, self._queue_max)
        reader = threading.Thread(
            target=self._read, args=(requests, stream), name=f"dledger-push-in-{self._identity.node_id}"
        )
        with self._lock:
            if self._closing:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the node is stopping")
            self._readers.add(reader)
        # Whatever ends the call must release the pool thread that waits for an answer to write.
        if not context.add_callback(lambda: stream.end(_End(grpc.StatusCode.CANCELLED))):
            stream.end(_End(grpc.StatusCode.CANCELLED))
        reader.start()
        return stream.responses()

    def _read(self, requests: Iterator[bytes], stream: _PushStream) -> None:
        end = _End(grpc.StatusCode.INTERNAL, "reading the stream failed")
        sender: NodeId | None = None
        try:
            for data in requests:
                envelope = codec.decode_push_request(data)
                self._identity.check(envelope)
                if sender is None:
                    sender = envelope.sender
                    stream.begun = True
                    self._register(sender, stream)
                elif envelope.sender != sender:
                    raise IdentityError(f"the stream of {sender!r} carries a message of {envelope.sender!r}")
                self._receiver.receive(envelope)
            end = _End(grpc.StatusCode.OK)
        except DLedgerError as error:
            end = _End(_status_of(error), str(error))
            _LOG.warning("%s refuses a push stream: %s", self._identity.node_id, error)
        except grpc.RpcError:  # cancelled, by either side or a lost connection
            end = _End(grpc.StatusCode.CANCELLED)
        finally:
            stream.end(end)
            with self._lock:
                if sender is not None and self._streams.get(sender) is stream:
                    del self._streams[sender]
                self._readers.discard(threading.current_thread())

    def _register(self, sender: NodeId, stream: _PushStream) -> None:
        with self._lock:
            older = self._streams.get(sender)
            self._streams[sender] = stream
        if older is not None:
            older.end(_End(grpc.StatusCode.ABORTED, f"a newer stream of {sender!r} replaces this one"))


class _PushStream:
    """The answering side of one push stream."""

    def __init__(self, context: _Context, queue_max: int) -> None:
        self.begun = False
        """Whether its sender is known."""
        self._context = context
        self._queue_max = queue_max
        self._queue: SimpleQueue[Envelope | _End] = SimpleQueue()

    def respond(self, envelope: Envelope) -> bool:
        """Queue an answer; False if too many wait already."""
        if self._queue.qsize() >= self._queue_max:
            return False
        self._queue.put(envelope)
        return True

    def end(self, end: _End) -> None:
        """End the stream after the answers that are queued; only the first end counts."""
        self._queue.put(end)

    def responses(self) -> Iterator[bytes]:
        """What gRPC's thread writes."""
        while True:
            item = self._next()
            if isinstance(item, Envelope):
                yield codec.encode(item)
            elif item.code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
                return
            else:
                self._context.abort(item.code, item.reason)

    def _next(self) -> Envelope | _End:
        if not self.begun:
            try:
                return self._queue.get(timeout=FIRST_MESSAGE_S)
            except Empty:
                if not self.begun:
                    return _End(grpc.StatusCode.DEADLINE_EXCEEDED, f"no push came within {FIRST_MESSAGE_S} s")
        return self._queue.get()


def _status_of(error: DLedgerError) -> grpc.StatusCode:
    match error:
        case InvalidRequestError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case IdentityError() | UnknownMemberError():
            return grpc.StatusCode.FAILED_PRECONDITION
        case _:
            return grpc.StatusCode.UNAVAILABLE


def _abort(context: _Context, error: DLedgerError) -> NoReturn:
    context.abort(_status_of(error), str(error))
