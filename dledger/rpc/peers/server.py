"""The gRPC server for peers: handshakes, votes, heartbeats and transfers, on threads that clients cannot exhaust.

It listens on a Unix socket to which only this process can connect; ``PeerListener`` owns the peer port, and limits what
it relays.

With TLS it serves members only, and refuses others before they have sent anything: half a request, or an endless stream
of health checks or reflection, would occupy a thread that votes need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dledger.config import ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest
from dledger.errors import (
    ConfigError,
    DLedgerError,
    IdentityError,
    InvalidRequestError,
    TlsError,
    UnknownMemberError,
    told,
)
from dledger.rpc import options, tls
from dledger.rpc.bridge import Report, log_failure
from dledger.rpc.peers import codec
from dledger.rpc.peers.control_link import Learn
from dledger.rpc.peers.identity import PeerIdentity
from dledger.rpc.peers.listener import PeerListener
from dledger.rpc.peers.log_exchange import CheckSender, PeerBusyError, PeerLogService
from dledger.rpc.peers.push_server import PushServer
from dledger.rpc.ports import PeerLog, Receiver
from dledger.rpc.private_socket import PrivateSocket
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NodeId

STOP_TIMEOUT_S: Final = 5.0
CALLS_PER_PEER: Final = 64
"""The limit of calls per peer, waiting for a thread or being answered: many times what a peer has in flight.

Calls that a peer gave up while this node was frozen, or waited for its lock, arrive all at once, and the node cannot
know that they were given up.
"""
_Context = grpc.ServicerContext


class PeerServer:
    """Listens on the peer address from ``start`` to ``close``."""

    def __init__(
        self,
        config: ServerConfig,
        identity: PeerIdentity,
        receiver: Receiver,
        *,
        client_address: str,
        learn: Learn,
        tls_keeper: TlsKeeper | None = None,
        report: Report = log_failure,
    ) -> None:
        self._config = config
        self._identity = identity
        self._receiver = receiver
        self._client_address = client_address
        self._learn = learn
        self._tls = tls_keeper
        self._log: PeerLogService | None = None
        # Votes and heartbeats may wait for the hard state; a peer may have several, and health checks come on top.
        threads = 8 + 4 * len(config.peers)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"dledger-peer-rpc-{config.node_id}")
        calls_max = CALLS_PER_PEER * (1 + len(config.peers))
        self._server = grpc.server(self._pool, options=options.peer_server_options(), maximum_concurrent_rpcs=calls_max)
        self._health = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=self._pool)
        self._pushes = PushServer(config, identity, receiver, client_address=client_address, learn=learn)
        self._socket: PrivateSocket | None = None
        self._listener = PeerListener(f"dledger-peer-listen-{config.node_id}", self._pushes.take, tls_keeper, report)
        self.respond: Final = self._pushes.respond

    @property
    def dropped(self) -> int:
        """Answers to pushes that found no connection."""
        return self._pushes.dropped

    @property
    def port(self) -> int:
        """The port listened on, once started."""
        return self._listener.port

    def serve_log(self, log: PeerLog) -> None:
        """Let peers read the log and compare it with theirs; only before ``start``."""
        self._log = PeerLogService(self._identity, log)

    def start(self) -> None:
        """Listen and serve. Raises ``ConfigError`` if it cannot listen."""
        member = self._config.self_member
        self._server.add_generic_rpc_handlers([self._handlers()])
        if self._tls is None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
            for service in ("", options.RAFT_SERVICE):
                self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
            names = [options.RAFT_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        self._socket = PrivateSocket(self._listen, self._config.store.base_dir)
        self._server.start()
        self._listener.start(self._config.bind_host or member.host, member.port, self._socket.path)

    def _listen(self, address: str) -> None:
        if self._tls is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, self._tls.peer_server_credentials())
        if not bound:
            raise ConfigError([f"cannot listen on the Unix socket {address} for the peer port"])

    def close(self) -> None:
        """Stop serving; joins every thread. Idempotent."""
        self._health.enter_graceful_shutdown()
        self._listener.close()
        self._pushes.close()
        self._server.stop(None).wait(STOP_TIMEOUT_S)
        self._pool.shutdown(wait=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _handlers(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        unary = self._of_members
        methods = {
            "Handshake": unary(self._handshake),
            "Vote": unary(self._request(codec.decode_vote_request)),
            "Heartbeat": unary(self._request(codec.decode_heartbeat_request)),
            "TakeLeadership": unary(self._take_leadership),
        }
        if self._log is not None:
            methods |= {
                "ReadLog": unary(self._of_log(self._log.read_log)),
                "ChainCrcs": unary(self._of_log(self._log.chain_crcs)),
            }
        return grpc.method_handlers_generic_handler(options.RAFT_SERVICE, methods)

    def _of_log(self, answer: Callable[[bytes, CheckSender], bytes]) -> Callable[[bytes, _Context], bytes]:
        def call(data: bytes, context: _Context) -> bytes:
            try:
                return answer(data, lambda sender: self._check_name(sender, context))
            except PeerBusyError as error:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except DLedgerError as error:
                _abort(context, error)

        return call

    def _of_members(self, answer: Callable[[bytes, _Context], bytes]) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A call with one request, as a stream of requests, so that it can be refused before the request arrives."""
        if self._tls is None:
            return grpc.unary_unary_rpc_method_handler(answer)

        def begin(requests: Iterator[bytes], context: _Context) -> bytes:
            try:
                tls.check_member(_names(context), self._identity.members, "that the caller showed")
                data = next(requests, None)
                if data is None:
                    raise InvalidRequestError("the call ended without a request")
            except DLedgerError as error:
                _abort(context, error)
            return answer(data, context)

        return grpc.stream_unary_rpc_method_handler(begin)

    def _handshake(self, data: bytes, context: _Context) -> bytes:
        try:
            handshake = codec.decode_handshake(data)
            self._identity.check(handshake.header)
            self._check_name(handshake.header.sender, context)
        except DLedgerError as error:
            _abort(context, error)
        self._learn(handshake.header.sender, handshake.client_address)
        return codec.encode_handshake_answer(self._identity.judge(handshake, self._client_address))

    def _request(self, decode: Callable[[bytes], Envelope]) -> Callable[[bytes, _Context], bytes]:
        def answer(data: bytes, context: _Context) -> bytes:
            if not context.is_active():  # the caller gave up while it waited for this thread
                return b""
            try:
                envelope = decode(data)
                self._identity.check(envelope)
                self._check_name(envelope.sender, context)
                if isinstance(envelope.message, HeartbeatRequest):
                    self._learn(envelope.sender, envelope.message.client_address)
                return codec.encode(self._receiver.request(envelope))
            except DLedgerError as error:
                _abort(context, error)

        return answer

    def _check_name(self, sender: NodeId, context: _Context) -> None:
        """Raise ``TlsError`` unless the caller's certificate belongs to the sender it claims to be."""
        if self._tls is not None:
            tls.check_name(_names(context), sender, "that the caller showed")

    def _take_leadership(self, data: bytes, context: _Context) -> bytes:
        try:
            envelope = codec.decode_take_leadership(data)
            self._identity.check(envelope)
            self._check_name(envelope.sender, context)
            self._receiver.receive(envelope)
        except DLedgerError as error:
            _abort(context, error)
        return codec.encode_take_leadership_answer()


def _names(context: _Context) -> Sequence[str]:
    """The DNS names of the caller's certificate."""
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]  # stubs: one value
    return [name.decode() for name in shown.get("peer_dns", ())]


def _abort(context: _Context, error: DLedgerError) -> NoReturn:
    match error:
        case InvalidRequestError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case IdentityError() | UnknownMemberError() | TlsError():
            code = grpc.StatusCode.FAILED_PRECONDITION
        case _:
            code = grpc.StatusCode.UNAVAILABLE
    context.abort(code, told(error))
