"""``Transport`` over the network: one port for incoming messages, two links to each peer for outgoing ones.

Peers come and go with the group's members (``set_peers``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

from dledger.config import Member, ServerConfig
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
from dledger.rpc.loops import LoopBridge, Report, log_failure, supervise
from dledger.rpc.peers.frames import Purpose
from dledger.rpc.peers.identity import Introduction, PeerDialler, PeerIdentity, Reachable, Reasons
from dledger.rpc.peers.link import ControlQueue, PeerLink, PushQueue
from dledger.rpc.peers.port import PeerPort
from dledger.rpc.peers.server import PeerServer
from dledger.rpc.ports import PeerLog, PeerSnapshots, Receiver
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NodeId

SEARCH_PAUSE_S: Final = 0.5
"""The least time from one round to the next: anyone may send something under a name that is not known."""


class _Links(NamedTuple):
    control: PeerLink
    push: PeerLink


class PeerTransport:
    """The ``Transport`` of production. ``client_address`` is the address that our peers give to clients for this node.
    ``identity``: what it tells its peers of itself, and knows of where they are; by default as configured. ``port``: an
    open one, shared with other groups; by default its own.

    Pushes run on the event loop of ``bridge``, which must outlive this; without one, on that of the peer port.
    ``report`` is called for a task or thread that ends before ``close``: the node must not continue without it.
    """

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        *,
        client_address: str = "",
        bridge: LoopBridge | None = None,
        tls_keeper: TlsKeeper | None = None,
        log: PeerLog | None = None,
        snapshots: PeerSnapshots | None = None,
        identity: PeerIdentity | None = None,
        port: PeerPort | None = None,
        report: Report = log_failure,
    ) -> None:
        self._config = config
        self._report = report
        self._log = log
        self._snapshots = snapshots
        identity = identity or PeerIdentity.of(config)
        self._addresses = identity.addresses
        keeper = tls_keeper or TlsKeeper.of(config)
        self._introduction = Introduction(identity, client_address, self.learn, keeper)
        self._client_addresses: dict[NodeId, str] = {}
        self._owns_port = port is None
        self._port = port or PeerPort(config, {config.group}, keeper, report)
        self._control_bridge: LoopBridge | None = None
        self._pushes_bridge = bridge
        self._receiver: Receiver | None = None
        self._links_lock = threading.Lock()  # one change of _links at a time, which are replaced as a whole
        self._links: Mapping[NodeId, _Links] = {}
        self._search = AddressSearch(self._introduction, report)
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
        return self._port.port

    def dropped(self, peer: NodeId) -> int:
        """How many messages to ``peer`` were dropped or failed, for metrics."""
        return sum(link.dropped for link in self._links.get(peer, ()))

    @property
    def dropped_answers(self) -> int:
        """How many answers to pushes found no connection, for metrics."""
        return self._server.dropped if self._server is not None else 0

    def start(self, receiver: Receiver) -> None:
        """Accept the peers' connections; ours are made when messages are sent. Raises ``ConfigError`` if it cannot."""
        if self._server is not None:
            raise InvariantError("the transport can be started only once")
        if self._owns_port:
            self._port.open()
        server = PeerServer(
            self._config, self._introduction, self._port, receiver, self._log, self._hurry, self._snapshots
        )
        server.start()
        if self._owns_port:
            self._port.accept()
        self._control_bridge = self._port.bridge
        self._server, self._receiver = server, receiver
        if self._pushes_bridge is None:
            self._pushes_bridge = self._control_bridge
        self._addresses.listen(self.set_peers)

    def set_peers(self, peers: Reachable) -> None:
        """From now on there are links to these, made anew, moved to other addresses, or ended. Never waits."""
        control, pushes, receiver = self._control_bridge, self._pushes_bridge, self._receiver
        with self._links_lock:
            if control is None or pushes is None or receiver is None:
                return
            links: dict[NodeId, _Links] = {}
            for peer, members in peers.items():
                known = self._links.get(peer)
                if known is not None:
                    links[peer] = known
                    control.post(partial(known.control.move, members))
                    pushes.post(partial(known.push.move, members))
                    continue
                links[peer] = made = self._make_links(members, receiver, control, pushes)
                control.post(partial(made.control.start, self._report))
                pushes.post(partial(made.push.start, self._report))
                made.control.hurry()  # its links to this member may be in a pause
            for peer in self._links.keys() - links.keys():
                control.post(self._links[peer].control.end)
                pushes.post(self._links[peer].push.end)
            self._links = links

    def _make_links(
        self, members: tuple[Member, ...], receiver: Receiver, control: LoopBridge, pushes: LoopBridge
    ) -> _Links:
        reasons = Reasons(logging.ERROR, self._config.group)  # of both: they are mostly the same
        queue = PushQueue(2 * self._config.replication.inflight_pushes_max + 16)
        lost = partial(receiver.connection_lost, members[0].node_id)
        coalescer = self._port.coalescer
        return _Links(
            PeerLink(
                self._introduction,
                members,
                ControlQueue(sets_apart=coalescer is not None),
                receiver,
                control,
                reasons,
                _nothing,
                self._search.ask,
                coalescer,
            ),
            PeerLink(self._introduction, members, queue, receiver, pushes, reasons, lost),
        )

    def send(self, envelope: Envelope) -> None:
        """See ``Transport.send``. Raises ``InvariantError`` only for a message that never goes on the wire."""
        match envelope.message:
            case PushAppend() | PushCommit() | PushCompare() | PushTruncate() | PushInstall():
                if (links := self._links.get(envelope.target)) is not None:
                    links.push.send(envelope)
            case VoteRequest() | HeartbeatRequest() | TakeLeadership():
                if (links := self._links.get(envelope.target)) is not None:
                    links.control.send(envelope)
                elif self._control_bridge is not None:  # for example a new leader, of which this member has yet to hear
                    self._control_bridge.post(self._search.ask)
            case PushResponse():
                if self._server is not None:
                    self._server.respond(envelope)
            case _:
                raise InvariantError(f"{type(envelope.message).__name__} is not sent on its own")

    def close(self) -> None:
        with self._links_lock:
            links, self._links, self._receiver = self._links, {}, None
        bridge = self._control_bridge
        if bridge is not None and links:
            bridge.run(self._search.close())
        for link in links.values():
            if bridge is not None and self._pushes_bridge is not None:
                bridge.run(link.control.close())
                self._pushes_bridge.run(link.push.close())
        if self._server is not None:
            self._server.close()
        if self._owns_port:
            self._port.close()

    def _hurry(self, peer: NodeId) -> None:
        """A peer has connected to this member, so it can be reached."""
        for link in self._links.get(peer, ()):
            link.heard()

    def learn(self, peer: NodeId, client_address: str) -> None:
        """Note a peer's client address, unless it has none. On any thread."""
        known = self._client_addresses
        has_room = peer in known or peer in self._addresses.reachable or len(known) < _CLIENT_ADDRESSES_MAX
        if client_address and has_room:
            known[peer] = client_address


_CLIENT_ADDRESSES_MAX: Final = 64
"""Anyone may say that it is a member, before those that become one; they are few."""


def _nothing() -> None:
    """A lost control connection needs no word: the protocol's timers notice the silence."""


class AddressSearch:
    """Asks the members that are known where the others are: for one that is behind, or has yet to join.

    The answer to a handshake has the group's members (``PeerIdentity.judge``). A member asks when it must speak to
    somebody whose address it does not know, such as the leader of members that were added while it was down.

    One round at a time. On one event loop.
    """

    def __init__(self, introduction: Introduction, report: Report = log_failure) -> None:
        self._introduction = introduction
        self._report = report
        self._reasons = Reasons(logging.WARNING, introduction.identity.group)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._next_s = 0.0

    def ask(self) -> None:
        """Ask soon, unless that is under way."""
        if self._closed or self._task is not None:
            return
        self._task = asyncio.create_task(self._ask(), name=f"dledger-search-{self._introduction.identity.node_id}")
        supervise(self._task, self._report)

    async def close(self) -> None:
        """Give up. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))
            self._next_s = loop.time() + SEARCH_PAUSE_S
            known = self._introduction.identity.addresses.reachable.values()
            diallers = [PeerDialler(self._introduction, members, Purpose.LOG, self._reasons) for members in known]
            await asyncio.gather(*(dialler.greet() for dialler in diallers))
        finally:
            self._task = None
