"""``Transport`` over the network: one port for incoming messages, two links to each peer for outgoing ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dledger.config import ServerConfig
from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    TakeLeadership,
    VoteRequest,
)
from dledger.errors import InvariantError
from dledger.rpc.bridge import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.peers.control_link import ControlLink, Introduction, Refusals
from dledger.rpc.peers.identity import OldLogs, PeerIdentity
from dledger.rpc.peers.push_link import PushLink
from dledger.rpc.peers.server import PeerServer
from dledger.rpc.ports import PeerLog, Receiver
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NodeId


class GrpcTransport:
    """The production transport. ``client_address`` is the address that our peers give to clients for this node.

    Pushes run on the event loop of ``bridge``, which must outlive this; without one, on a loop of their own. ``report``
    is called for a task or thread that ends before ``close``: the node must not continue without it.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        client_address: str = "",
        bridge: LoopBridge | None = None,
        tls_keeper: TlsKeeper | None = None,
        log: PeerLog | None = None,
        old_logs: OldLogs | None = None,
        report: Report = log_failure,
    ) -> None:
        self._config = config
        self._report = report
        self._tls = tls_keeper or TlsKeeper.of(config)
        self._log = log
        self._identity = PeerIdentity.of(config, old_logs)
        self._client_address = client_address
        self._client_addresses: dict[NodeId, str] = {}
        self._bridge = bridge
        self._own_loop = LoopThread(f"dledger-push-{config.node_id}", report) if bridge is None else None
        self._links: dict[NodeId, tuple[ControlLink, PushLink]] = {}
        self._server: PeerServer | None = None

    @property
    def client_addresses(self) -> Mapping[NodeId, str]:
        """Each peer's client address, once known from a handshake or heartbeat."""
        return MappingProxyType(self._client_addresses)

    @property
    def port(self) -> int:
        """The peer port listened on. Raises ``InvariantError`` before ``start``."""
        if self._server is None:
            raise InvariantError("the transport is not started")
        return self._server.port

    def dropped(self, peer: NodeId) -> int:
        """How many messages to ``peer`` were dropped or failed, for metrics."""
        return sum(link.dropped for link in self._links.get(peer, ()))

    @property
    def dropped_answers(self) -> int:
        """How many answers to pushes found no connection, for metrics."""
        return self._server.dropped if self._server is not None else 0

    def start(self, receiver: Receiver) -> None:
        """Listen; connections are made when messages are sent. Raises ``ConfigError`` if it cannot listen."""
        if self._server is not None:
            raise InvariantError("the transport can be started only once")
        server = PeerServer(
            self._config,
            self._identity,
            receiver,
            client_address=self._client_address,
            learn=self._learn,
            tls_keeper=self._tls,
            report=self._report,
        )
        if self._log is not None:
            server.serve_log(self._log)
        try:
            server.start()
        except BaseException:
            server.close()
            raise
        self._server = server
        if self._own_loop is not None:
            self._bridge = self._own_loop.start()
        bridge = self._bridge
        if bridge is None:
            raise InvariantError("the transport has no event loop")
        replication = self._config.replication
        for peer in self._config.peers:
            refusals = Refusals(self._identity.node_id, peer.node_id)
            introduction = Introduction(self._client_address, self._learn, refusals)
            control = ControlLink(
                self._identity,
                peer,
                receiver,
                introduction=introduction,
                timeout_s=self._config.election.election_timeout_ms_min / 1000,
                tls_keeper=self._tls,
            )
            push = PushLink(
                self._identity,
                peer,
                receiver,
                bridge,
                introduction=introduction,
                queue_pushes_max=2 * replication.inflight_pushes_max + 16,
                tls_keeper=self._tls,
            )
            bridge.run(push.start(self._report))
            self._links[peer.node_id] = control, push

    def send(self, envelope: Envelope) -> None:
        """See ``Transport.send``. Raises ``InvariantError`` only for a message that never goes on the wire."""
        match envelope.message:
            case PushAppend() | PushCommit() | PushCompare() | PushTruncate() | PushInstall():
                if (links := self._links.get(envelope.target)) is not None:
                    links[1].send(envelope)
            case VoteRequest() | HeartbeatRequest() | TakeLeadership():
                if (links := self._links.get(envelope.target)) is not None:
                    links[0].send(envelope)
            case PushResponse():
                if self._server is not None:
                    self._server.respond(envelope)
            case _:
                raise InvariantError(f"{type(envelope.message).__name__} is not sent on its own")

    def close(self) -> None:
        """See ``Transport.close``."""
        links, self._links = self._links, {}
        for control, push in links.values():
            control.close()
            if self._bridge is not None:
                self._bridge.run(push.close())
        if self._server is not None:
            self._server.close()
        if self._own_loop is not None:
            self._own_loop.stop()

    def _learn(self, peer: NodeId, client_address: str) -> None:
        if client_address:
            self._client_addresses[peer] = client_address
