"""The accepting side of members' connections: one thread for each, which only its own peer can delay.

A thread receives a message, gives it to the receiver, which may wait for the node's lock and the disk, and sends the
answer. Answers to pushes may also come from the flusher. A peer has at most one connection for each purpose: a newer
one ends the older, which may hang on a path not yet known to be dead.

It also finds out whether a leader whose connections broke is gone (``dledger.core.failure_detection``). A killed
process's sockets are closed by its kernel, and its port refuses connections at once. So one connection to the leader's
own address tells a killed leader from a replaced or lost connection; nobody else can give that answer. A power cut, a
cut cable or a firewall looks like silence, and is left to the election timeout.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from dledger.config import Member, ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest, HeartbeatResponse
from dledger.errors import DLedgerError, IdentityError, InvalidRequestError, TlsError, UnknownMemberError
from dledger.log_output import speaks_for
from dledger.rpc import loops, options
from dledger.rpc.loops import LoopBridge, Report, log_failure, supervise
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.codec import GroupHeartbeat
from dledger.rpc.peers.exchanges import PeerLogService, PeerSnapshotService
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, FrameKind, PeerConnection, Purpose
from dledger.rpc.peers.identity import Introduction
from dledger.rpc.peers.port import PeerCaller, PeerGroup, PeerPort
from dledger.rpc.ports import PeerLog, PeerSnapshots, Receiver
from dledger.types import NodeId, Term

LOOK_S_MAX: Final = 0.1
"""How long a look may take, connecting included."""
PAUSE_S: Final = 0.1
"""The least time from one look to the next: connections that break again and again must not become a load."""


class LeaderWatch:
    """Looks after leaders whose connections broke, one at a time. On one event loop."""

    def __init__(
        self, find: Callable[[NodeId], Member | None], receiver: Receiver, report: Report = log_failure
    ) -> None:
        """``find`` knows where a member is, if anybody does."""
        self._find = find
        self._receiver = receiver
        self._report = report
        self._task: asyncio.Task[None] | None = None
        self._lost: set[NodeId] = set()
        self._next_s = 0.0
        self._closed = False

    def broke(self, peer: NodeId) -> None:
        """The last connection of ``peer`` broke; if this member follows it, look whether it is there."""
        if self._closed or self._find(peer) is None or self._followed(peer) is None:
            return
        self._lost.add(peer)
        if self._task is None:
            self._task = asyncio.create_task(self._look(), name="dledger-leader-watch")
            supervise(self._task, self._report)

    def _followed(self, peer: NodeId) -> Term | None:
        try:
            return self._receiver.follows(peer)
        except DLedgerError:  # the node stops
            return None

    async def close(self) -> None:
        """Give up. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._lost:
                await asyncio.sleep(max(0.0, self._next_s - loop.time()))
                peer = self._lost.pop()
                term, address = self._followed(peer), self._find(peer)
                if term is not None and address is not None:
                    self._next_s = loop.time() + PAUSE_S
                    await self._dial(address, term)
        except DLedgerError:  # the node stops
            return
        finally:
            self._task = None

    async def _dial(self, leader: Member, term: Term) -> None:
        """Refused or reset: its process is gone. Accepted: something is there, and is asked. Else nothing is known."""
        peer = leader.node_id
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                transport, quiet = await loops.connect(_Quiet, leader.host, leader.port)
                try:
                    self._receiver.leader_lost(peer, term, gone=False)
                    await quiet.ended  # a dying process may still have accepted it
                finally:
                    transport.abort()
        except (ConnectionRefusedError, ConnectionResetError):
            self._receiver.leader_lost(peer, term, gone=True)
        except (OSError, RuntimeError):  # a time-out, an unreachable host, or no thread to resolve its name
            return


class _Quiet(asyncio.Protocol):
    """A connection on which nothing is said. ``ended`` raises if the other side's process does."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        """A closed connection, without an error, tells nothing: a live member may be at its limit."""
        if self.ended.done():
            return
        if isinstance(error, ConnectionResetError):
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


_LOG = logging.getLogger(__name__)

_CONTROL_BYTES_MAX: Final = 1 << 20
"""The longest control message accepted: a heartbeat names all members."""
CONNECTIONS_MAX: Final = 4
"""The limit of connections of one peer for one purpose: one in use, and some that have been replaced and whose threads
still wait for the disk.
"""
STRANGERS_MAX: Final = 3 * CONNECTIONS_MAX
"""The limit of connections of all callers that this member does not know: it may not have heard yet of new members."""

_HEARD: Final = (Purpose.CONTROL, Purpose.PUSH)
"""Connections on which a leader is heard."""
_THREADS: Final = {
    Purpose.CONTROL: "dledger-control-in",
    Purpose.PUSH: "dledger-push-in",
    Purpose.LOG: "dledger-log-in",
    Purpose.SNAPSHOT: "dledger-snapshot-in",
}


class PeerServer:
    """Serves a group's connections of the peer port from ``start`` to ``close``.

    ``log`` and ``snapshots`` are what peers may read; None: nothing.

    ``arrived`` is called on the loop with each peer that has connected.
    """

    def __init__(
        self,
        config: ServerConfig,
        introduction: Introduction,
        port: PeerPort,
        receiver: Receiver,
        log: PeerLog | None = None,
        arrived: Callable[[NodeId], None] = lambda _peer: None,
        snapshots: PeerSnapshots | None = None,
    ) -> None:
        self._port = port
        self.dropped = 0
        """Answers to pushes that found no connection, or a full one. For monitoring: updates may race."""
        self._config = config
        self._introduction = introduction
        self._identity = introduction.identity
        self._learn = introduction.learn
        self._receiver = receiver
        self._arrived = arrived
        self._log = None if log is None else PeerLogService(log)
        rate = config.snapshots.catch_up_rate_bytes_max
        self._snapshots = None if snapshots is None else PeerSnapshotService(snapshots, rate)
        self._addresses = introduction.identity.addresses
        find = self._addresses.first if config.election.fast_failover else _nowhere
        self._leaders = LeaderWatch(find, receiver)
        self._bridge: LoopBridge | None = None
        self._lock = threading.Lock()  # guards what follows
        self._registered = 0
        self._threads: dict[PeerConnection, tuple[PeerCaller, threading.Thread]] = {}
        self._in_use: dict[PeerCaller, PeerConnection] = {}
        self._heartbeats: dict[PeerConnection, HeartbeatRequest] = {}  # the last one answered there; not guarded
        self._closing = False

    def start(self) -> None:
        """Accept the group's connections at the port, which is open."""
        self._bridge = self._port.bridge
        self._port.add(self._identity.group, PeerGroup(self._introduction, self._begin, self._answer_heartbeat))

    def close(self) -> None:
        """Close all connections and join their threads. Idempotent."""
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            self._port.remove(self._identity.group)
            bridge.run(self._leaders.close())
        with self._lock:
            self._closing = True
            serving = tuple(self._threads.items())
        for connection, _ in serving:
            connection.end()
        for _, (_, thread) in serving:
            thread.join()

    def respond(self, envelope: Envelope) -> None:
        """Send an answer to pushes on its target's connection, or drop it if there is none. Never blocks."""
        connection = self._in_use.get(PeerCaller(envelope.target, Purpose.PUSH))
        if connection is None or not connection.send(FrameKind.PUSH_ANSWER, codec.encode(envelope.message)):
            self.dropped += 1

    # -- one connection ------------------------------------------------------------------------------------------------

    def _begin(self, connection: PeerConnection, caller: PeerCaller) -> None:
        """Serve a connection whose handshake is done, on a thread of its own, in place of the peer's older one.

        In the order in which they were accepted: threads may begin in any.
        """
        with self._lock:
            refused = self._closing or not self._has_room(caller)
            if not refused:
                self._registered += 1
                name = f"{_THREADS[caller.purpose]}-{self._identity.node_id}"
                thread = threading.Thread(target=self._serve, args=(connection, caller, self._registered), name=name)
                self._threads[connection] = caller, thread
                older, self._in_use[caller] = self._in_use.get(caller), connection
        if refused:
            connection.close()
            return
        if older is not None:
            older.end()
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the peer will try again
            _LOG.warning("%s cannot start a thread for a peer's connection: %s", self._identity.node_id, error)
            self._forget(connection, caller)
            return
        self._arrived(caller.node_id)

    def _has_room(self, caller: PeerCaller) -> bool:
        """Whether it may have another thread; under the lock."""
        known = self._addresses.reachable
        callers = [one for one, _ in self._threads.values()]
        if caller.node_id not in known and sum(one.node_id not in known for one in callers) >= STRANGERS_MAX:
            return False
        return callers.count(caller) < CONNECTIONS_MAX

    def _serve(self, connection: PeerConnection, caller: PeerCaller, number: int) -> None:
        """``number``: of the connection, above all earlier ones."""
        with speaks_for(self._identity.group):
            self._serve_purpose(connection, caller, number)

    def _serve_purpose(self, connection: PeerConnection, caller: PeerCaller, number: int) -> None:
        try:
            match caller.purpose:
                case Purpose.CONTROL:
                    self._serve_control(connection, caller)
                case Purpose.PUSH:
                    self._serve_pushes(connection, caller, number)
                case Purpose.LOG:
                    self._serve_log(connection)
                case Purpose.SNAPSHOT:
                    self._serve_snapshot(connection)
        except (InvalidRequestError, IdentityError, UnknownMemberError, TlsError) as error:
            self._port.reasons.log(f"{self._identity.node_id} refused a connection from {caller.node_id}: {error}")
            connection.send(FrameKind.REFUSAL, str(error).encode()[:HANDSHAKE_BYTES_MAX])
        except (DLedgerError, OSError, EOFError) as error:  # the node stops, or the connection broke: the peer retries
            _LOG.debug("%s closed a connection from %s: %s", self._identity.node_id, caller.node_id, error)
        finally:
            self._forget(connection, caller)

    def _forget(self, connection: PeerConnection, caller: PeerCaller) -> None:
        """A connection is over; if nothing is left on which its peer could be heard, look whether the peer is there.

        A killed process leaves all its connections; data sent on one may arrive after the end of another one.
        """
        with self._lock:
            self._threads.pop(connection, None)
            self._heartbeats.pop(connection, None)
            in_use = self._in_use.get(caller) is connection  # not replaced by a newer one
            if in_use:
                del self._in_use[caller]
            is_silent = not any(PeerCaller(caller.node_id, purpose) in self._in_use for purpose in _HEARD)
        connection.close()
        bridge = self._bridge
        if in_use and caller.purpose in _HEARD and is_silent and bridge is not None:  # and not closed by us
            bridge.post(partial(self._leaders.broke, caller.node_id))

    def _serve_control(self, connection: PeerConnection, caller: PeerCaller) -> None:
        while (frame := connection.receive(_CONTROL_BYTES_MAX)) is not None:
            kind, payload = frame
            match kind:
                case FrameKind.VOTE:
                    vote = self._identity.envelope_from(caller.node_id, codec.decode_vote_request(payload))
                    kind, answer = FrameKind.VOTE_ANSWER, codec.encode(self._receiver.request(vote).message)
                case FrameKind.HEARTBEAT:
                    heartbeat = codec.decode_heartbeat_request(payload)
                    self._learn(caller.node_id, heartbeat.client_address)
                    said = self._receiver.request(self._identity.envelope_from(caller.node_id, heartbeat))
                    kind, answer = FrameKind.HEARTBEAT_ANSWER, codec.encode(said.message)
                    self._heartbeats[connection] = heartbeat  # before its sender may repeat it
                case FrameKind.HEARTBEATS:
                    kind, answer = (
                        FrameKind.HEARTBEATS_ANSWER,
                        self._port.answer_heartbeats(payload, connection.names),
                    )
                case FrameKind.TAKE_LEADERSHIP:
                    taken = codec.decode_take_leadership(payload)
                    self._receiver.receive(self._identity.envelope_from(caller.node_id, taken))
                    kind, answer = FrameKind.TAKE_LEADERSHIP_ANSWER, b""
                case _:
                    raise InvalidRequestError(f"expected a control message, got {kind.name}")
            connection.send(kind, answer)

    def _answer_heartbeat(self, heartbeat: GroupHeartbeat, patience_s: float) -> HeartbeatResponse | None:
        """Answer a heartbeat that came with those of other groups, perhaps on the thread of another group."""
        own = self._in_use.get(PeerCaller(heartbeat.sender, Purpose.CONTROL))
        said = None if own is None else self._heartbeats.get(own)
        if said is None or said.read_sequence != heartbeat.repeats:
            return None
        message = replace(said, read_sequence=heartbeat.read_sequence)
        try:
            answer = self._receiver.request(self._identity.envelope_from(heartbeat.sender, message), patience_s).message
        except DLedgerError as error:  # busy, or it stops; or a mistake, which it is told on its own connection
            _LOG.debug("%s does not answer a heartbeat of %s: %s", self._identity.node_id, heartbeat.sender, error)
            return None
        return answer if isinstance(answer, HeartbeatResponse) else None

    def _serve_pushes(self, connection: PeerConnection, caller: PeerCaller, number: int) -> None:
        bytes_max = options.push_bytes_limit(self._config)
        while (frame := connection.receive(bytes_max)) is not None:
            kind, payload = frame
            if kind is not FrameKind.PUSH:
                raise InvalidRequestError(f"expected a push, got {kind.name}")
            push = frames.decode_push(payload)
            self._receiver.receive(self._identity.envelope_from(caller.node_id, push, number))

    def _serve_log(self, connection: PeerConnection) -> None:
        if self._log is None:
            raise InvalidRequestError("this member gives no log to its peers")
        self._log.serve(connection)

    def _serve_snapshot(self, connection: PeerConnection) -> None:
        if self._snapshots is None:
            raise InvalidRequestError("this member has no state machine: start all members of the group with the same")
        self._snapshots.serve(connection)


def _nowhere(_peer: NodeId) -> None:
    """Nobody is looked for."""
