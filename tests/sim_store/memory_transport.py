"""The in-memory twin of the gRPC transport: same contract, same checks, and links that tests can cut and heal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Final

from dledger.config import ServerConfig
from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    TakeLeadership,
    VoteRequest,
)
from dledger.errors import DLedgerError, InvalidRequestError, InvariantError, ResponseCode
from dledger.rpc.peers.frames import Purpose
from dledger.rpc.peers.identity import PeerIdentity
from dledger.rpc.ports import Receiver
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

QUEUED_MAX: Final = 4096
"""Undelivered messages per node and kind; more are dropped."""

_Queue = SimpleQueue[Callable[[], None] | None]


class MemoryNetwork:
    """Connects transports by the addresses of their configurations. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both fields
        self._listening: dict[str, MemoryTransport] = {}
        self._cut: set[tuple[NodeId, NodeId]] = set()

    def cut(self, source: NodeId, target: NodeId, *, one_way: bool = False) -> None:
        """Deliver nothing from ``source`` to ``target`` any more, nor back unless ``one_way``; breaks the streams."""
        links = [(source, target)] if one_way else [(source, target), (target, source)]
        with self._lock:
            self._cut.update(links)
            ends = [one for one in self._listening.values() if one.node_id in (source, target)]
        for transport in ends:
            transport.break_streams(source if transport.node_id == target else target)

    def heal(self) -> None:
        """Deliver everything again."""
        with self._lock:
            self._cut.clear()

    def listen(self, address: str, transport: MemoryTransport) -> None:
        """Make ``transport`` reachable. Raises ``InvariantError`` if another one is there."""
        with self._lock:
            if address in self._listening:
                raise InvariantError(f"address {address} is in use")
            self._listening[address] = transport

    def leave(self, address: str) -> None:
        """Make whoever listens at ``address`` unreachable, and tell the others that their streams are broken."""
        with self._lock:
            gone = self._listening.pop(address, None)
            others = list(self._listening.values())
        if gone is not None:
            for transport in others:
                transport.break_streams(gone.node_id)

    def find(self, source: NodeId, address: str) -> MemoryTransport | None:
        """Who listens at ``address``, unless the link is cut."""
        with self._lock:
            transport = self._listening.get(address)
            if transport is None or (source, transport.node_id) in self._cut:
                return None
            return transport


class MemoryTransport:
    """Implements ``Transport``. Two threads deliver: one runs requests, which may wait, one everything else."""

    def __init__(
        self,
        network: MemoryNetwork,
        config: ServerConfig,
        *,
        client_address: str = "",
        identity: PeerIdentity | None = None,
    ) -> None:
        self.identity = identity or PeerIdentity.of(config)
        self.node_id = config.node_id
        self.client_address = client_address
        self._network = network
        self._address = config.self_member.address
        self._push_bytes_max = config.replication.push_bytes_max + config.store.max_entry_bytes
        self._receiver: Receiver | None = None
        self._inbox: _Queue = SimpleQueue()
        self._requests: _Queue = SimpleQueue()
        self._threads = [
            threading.Thread(target=_deliver, args=(queue,), name=f"dledger-memory-{name}-{self.node_id}")
            for name, queue in (("in", self._inbox), ("request", self._requests))
        ]
        self._lock = threading.Lock()  # guards the fields below
        self._client_addresses: dict[NodeId, str] = {}
        self._streams_to: set[NodeId] = set()
        self._streams_from: set[NodeId] = set()
        self._dropped: dict[NodeId, int] = {}
        self._reasons: set[str] = set()
        self._closed = False

    @property
    def client_addresses(self) -> Mapping[NodeId, str]:
        """Where clients reach each peer, as far as it said so."""
        return MappingProxyType(self._client_addresses)

    def dropped(self, peer: NodeId) -> int:
        """How many messages to ``peer`` were dropped."""
        return self._dropped.get(peer, 0)

    def start(self, receiver: Receiver) -> None:
        """As ``Transport.start``."""
        self._receiver = receiver
        self._network.listen(self._address, self)
        for thread in self._threads:
            thread.start()

    def send(self, envelope: Envelope) -> None:
        """As ``Transport.send``."""
        match envelope.message:
            case PushAppend() | PushCommit() | PushCompare() | PushTruncate() | PushInstall():
                self._send_push(envelope)
            case VoteRequest() | HeartbeatRequest() | TakeLeadership():
                if (peer := self._peer(envelope)) is not None:
                    peer.take_control(envelope, self)
            case PushResponse():
                if envelope.target in self._streams_from and (peer := self._peer(envelope)) is not None:
                    peer.take(envelope, self.node_id)
            case _:
                raise InvariantError(f"{type(envelope.message).__name__} is not sent on its own")

    def close(self) -> None:
        """As ``Transport.close``."""
        with self._lock:
            if self._closed or self._receiver is None:
                return
            self._closed = True
        self._network.leave(self._address)
        for queue, thread in zip((self._inbox, self._requests), self._threads, strict=True):
            queue.put(None)
            thread.join()

    # --- what transports tell each other ----------------------------------------------------------------------------

    def take_control(self, envelope: Envelope, sender: MemoryTransport) -> None:
        """Deliver a vote request, heartbeat or ``TakeLeadership`` and send back the answer."""
        self._post(self._requests, lambda: self._run_request(envelope, sender))

    def take_push(self, envelope: Envelope, sender: MemoryTransport) -> None:
        """Deliver a push, or break the stream if it is not for us."""
        self._post(self._inbox, lambda: self._run_push(envelope, sender))

    def take(self, answer: Envelope, peer: NodeId) -> None:
        """Deliver an answer of ``peer``."""
        self._post(self._inbox, lambda: self._run_answer(answer, peer))

    def break_streams(self, peer: NodeId, reason: str = "") -> None:
        """Forget the streams to and from ``peer``; the receiver hears of the first."""
        with self._lock:
            self._streams_from.discard(peer)
            had_one = peer in self._streams_to
            self._streams_to.discard(peer)
        if reason:
            self._refused(peer, reason)
        if had_one:
            self._post(self._inbox, lambda: self._tell_lost(peer))

    def learn(self, peer: NodeId, client_address: str) -> None:
        """Note where clients reach ``peer``."""
        if client_address:
            self._client_addresses[peer] = client_address

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send_push(self, envelope: Envelope) -> None:
        target = envelope.target
        with self._lock:
            fresh = target not in self._streams_to
            self._streams_to.add(target)
        peer = self._peer(envelope)
        if peer is None:
            self.break_streams(target)
        elif not fresh or self._shake_hands(target, peer):
            peer.take_push(envelope, self)

    def _shake_hands(self, target: NodeId, peer: MemoryTransport) -> bool:
        handshake = self.identity.handshake(target, self.client_address, Purpose.PUSH)
        try:
            peer.identity.check(handshake.header)
        except DLedgerError as error:
            self.break_streams(target, str(error))
            return False
        answer = peer.identity.judge(handshake, peer.client_address)
        if answer.code is not ResponseCode.SUCCESS:
            self.break_streams(target, answer.reason)
            return False
        self.learn(target, answer.client_address)
        peer.learn(self.node_id, self.client_address)
        return True

    def _peer(self, envelope: Envelope) -> MemoryTransport | None:
        member = self.identity.addresses.first(envelope.target)
        peer = self._network.find(self.node_id, member.address) if member is not None else None
        if peer is None or self._closed:
            self._dropped[envelope.target] = self._dropped.get(envelope.target, 0) + 1
            return None
        return peer

    # --- delivering, on our threads ---------------------------------------------------------------------------------

    def _run_request(self, envelope: Envelope, sender: MemoryTransport) -> None:
        try:
            self.identity.check(envelope)
            if isinstance(envelope.message, HeartbeatRequest):
                self.learn(envelope.sender, envelope.message.client_address)
            if isinstance(envelope.message, TakeLeadership):
                self._the_receiver.receive(envelope)
                return
            answer = self._the_receiver.request(envelope)
        except DLedgerError as error:
            sender.break_streams(self.node_id, str(error))
            return
        if self._network.find(self.node_id, sender._address) is sender:
            sender.take(answer, envelope.target)

    def _run_push(self, envelope: Envelope, sender: MemoryTransport) -> None:
        message = envelope.message
        try:
            if isinstance(message, PushAppend) and len(message.run.data) > self._push_bytes_max:
                raise InvalidRequestError(f"a push of {len(message.run.data)} bytes is too large")
            self.identity.check(envelope)
            self._streams_from.add(envelope.sender)
            self._the_receiver.receive(envelope)
        except DLedgerError as error:
            sender.break_streams(envelope.target, str(error))

    def _run_answer(self, answer: Envelope, peer: NodeId) -> None:
        try:
            self.identity.check(answer)
            if isinstance(answer.message, HeartbeatResponse):
                self.learn(peer, answer.message.client_address)
            self._the_receiver.receive(answer)
        except DLedgerError as error:
            self._refused(peer, str(error))

    def _tell_lost(self, peer: NodeId) -> None:
        try:
            self._the_receiver.connection_lost(peer)
        except DLedgerError as error:  # the node has stopped itself; its transport is closed next
            self._refused(peer, str(error))

    def _post(self, queue: _Queue, action: Callable[[], None]) -> None:
        if not self._closed and queue.qsize() < QUEUED_MAX:
            queue.put(action)

    def _refused(self, peer: NodeId, reason: str) -> None:
        self._dropped[peer] = self._dropped.get(peer, 0) + 1
        if reason not in self._reasons:
            self._reasons.add(reason)
            _LOG.error("%s does not talk to %s: %s", self.node_id, peer, reason)

    @property
    def _the_receiver(self) -> Receiver:
        if self._receiver is None:
            raise InvariantError("the transport is not started")
        return self._receiver


def _deliver(queue: _Queue) -> None:
    while (action := queue.get()) is not None:
        action()
