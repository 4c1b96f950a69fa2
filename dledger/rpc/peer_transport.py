"""``Transport`` over gRPC: one server for what peers send us, one ``PeerLink`` for what we send to each of them."""

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
from dledger.rpc.identity import Identity
from dledger.rpc.peer_link import PeerLink
from dledger.rpc.peer_server import PeerServer
from dledger.rpc.ports import Receiver
from dledger.types import NodeId


class GrpcTransport:
    """The production transport. ``client_address`` is what our peers shall tell clients to reach us at."""

    def __init__(self, config: ServerConfig, *, client_address: str = "") -> None:
        self._config = config
        self._identity = Identity.of(config)
        self._client_address = client_address
        self._client_addresses: dict[NodeId, str] = {}
        self._links: dict[NodeId, PeerLink] = {}
        self._server: PeerServer | None = None

    @property
    def client_addresses(self) -> Mapping[NodeId, str]:
        """Where clients reach each peer, as far as it said so (handshake, heartbeats)."""
        return MappingProxyType(self._client_addresses)

    @property
    def port(self) -> int:
        """The peer port listened on. Raises ``InvariantError`` before ``start``."""
        if self._server is None:
            raise InvariantError("the transport is not started")
        return self._server.port

    def dropped(self, peer: NodeId) -> int:
        """How many messages to ``peer`` were dropped or failed, for metrics."""
        link = self._links.get(peer)
        return link.dropped if link is not None else 0

    def start(self, receiver: Receiver) -> None:
        """Listen, then connect as messages come. Raises ``ConfigError`` if the address cannot be had."""
        if self._server is not None:
            raise InvariantError("the transport is started only once")
        server = PeerServer(
            self._config, self._identity, receiver, client_address=self._client_address, learn=self._learn
        )
        try:
            server.start()
        except BaseException:
            server.close()
            raise
        self._server = server
        replication = self._config.replication
        for peer in self._config.peers:
            link = PeerLink(
                self._identity,
                peer,
                receiver,
                client_address=self._client_address,
                learn=self._learn,
                control_timeout_s=self._config.election.election_timeout_ms_min / 1000,
                queue_pushes_max=2 * replication.inflight_pushes_max + 16,
            )
            link.start()
            self._links[peer.node_id] = link

    def send(self, envelope: Envelope) -> None:
        """As ``Transport.send``. Raises ``InvariantError`` only for what never goes on the wire."""
        match envelope.message:
            case PushAppend() | PushCommit() | PushCompare() | PushTruncate() | PushInstall():
                if (link := self._links.get(envelope.target)) is not None:
                    link.send_push(envelope)
            case VoteRequest() | HeartbeatRequest() | TakeLeadership():
                if (link := self._links.get(envelope.target)) is not None:
                    link.send_control(envelope)
            case PushResponse():
                if self._server is not None:
                    self._server.respond(envelope)
            case _:
                raise InvariantError(f"{type(envelope.message).__name__} is not sent by itself")

    def close(self) -> None:
        """As ``Transport.close``."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
        if self._server is not None:
            self._server.close()

    def _learn(self, peer: NodeId, client_address: str) -> None:
        if client_address:
            self._client_addresses[peer] = client_address
