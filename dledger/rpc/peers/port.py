"""The peer port of a process: one listener and one event loop for the members of all its groups.

``PeerAcceptor`` finds out whose connections are before anything is spent on them. A connection begins with TLS or with
a frame, in a group with TLS only with TLS; then comes the handshake. Until that is done, it occupies neither a thread
nor a place that members need. The handshake names the group: several share a port.

Heartbeats of several groups between two processes are sent together: an idle group costs a wake-up for each of its
messages on either side, ten groups ten. Each group has a control connection to the peer's member. For other groups,
such a connection carries heartbeats that repeat an answered one (``ControlQueue.next_repetition``), as an idle group's
do: the peer has accepted the group's handshake, and they change nothing, so that they wait for no disk. They are
answered with one message at once, in which a group that is not there, or busy, has no answer: its next heartbeat goes
alone, on its own connection. So a group that is stuck looks stuck, and delays no other one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from dledger.config import ServerConfig
from dledger.core.messages import HeartbeatResponse
from dledger.errors import (
    IdentityError,
    InvalidRequestError,
    InvariantError,
    ResponseCode,
    TlsError,
    UnknownMemberError,
)
from dledger.rpc import tls
from dledger.rpc.listening import Acceptor, Arrival, listen
from dledger.rpc.loops import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, TLS_RECORD, FrameBuffer, FrameKind, PeerConnection, Purpose
from dledger.rpc.peers.identity import Introduction, Reasons
from dledger.rpc.tls import TlsStream
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NodeId

PATIENCE_S: Final = 0.02
"""How long the groups of one message may keep it waiting, all together, for their nodes' locks."""

Process = tuple[str, int]
"""Where a peer's process listens: host and port."""
Settle = Callable[[HeartbeatResponse | None], None]
"""Told the answer to a heartbeat that was sent with others; None: there is none."""
AnswerHeartbeat = Callable[[codec.GroupHeartbeat, float], HeartbeatResponse | None]
"""Answers a group's heartbeat, if the node's lock is free within that many seconds."""


class HeartbeatLink(Protocol):
    """A group's control link to a peer, as far as it takes part. On the event loop."""

    @property
    def process(self) -> Process | None:
        """Where it is connected to; None: it is not."""

    @property
    def answers_owed(self) -> int:
        """How many messages with heartbeats of several groups it has carried that are not answered."""

    def beat_alone(self) -> None:
        """Send its heartbeat on its own connection."""

    def take_repetition(self) -> tuple[codec.GroupHeartbeat, Settle] | None:
        """Its heartbeat, to be sent by another one; None: it has none any more."""

    def carry(self, links: Sequence[HeartbeatLink]) -> None:
        """Send the heartbeats of ``links``, its own perhaps among them, as one message."""


class HeartbeatCoalescer:
    """Gathers what the links of one process have to send in one turn of their event loop."""

    def __init__(self) -> None:
        self._waiting: dict[HeartbeatLink, None] = {}

    def add(self, link: HeartbeatLink) -> None:
        """A link has a heartbeat that may be sent with others."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting[link] = None

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        by_process: defaultdict[Process, list[HeartbeatLink]] = defaultdict(list)
        for link in waiting:
            if (process := link.process) is not None:
                by_process[process].append(link)
        for links in by_process.values():
            for first in range(0, len(links), codec.HEARTBEATS_GROUPS_MAX):
                self._send_together(links[first : first + codec.HEARTBEATS_GROUPS_MAX])

    def _send_together(self, links: Sequence[HeartbeatLink]) -> None:
        carrier = min(links, key=_owed)  # so that one silent connection does not silence all
        if len(links) == 1:
            carrier.beat_alone()
        else:
            carrier.carry(links)


def _owed(link: HeartbeatLink) -> int:
    return link.answers_owed


def answer(
    payload: bytes | memoryview, names: Collection[str] | None, groups: Callable[[str], AnswerHeartbeat | None]
) -> bytes:
    """The answer to a message with heartbeats of several groups, that a connection carried.

    ``names``: of the certificate at its other end; None for plaintext. Raises ``InvalidRequestError`` and ``TlsError``.
    """
    heartbeats = codec.decode_heartbeats(payload)
    if names is not None:
        for sender in {one.sender for one in heartbeats}:
            tls.check_name(tuple(names), sender, "behind heartbeats")
    end = time.monotonic() + PATIENCE_S
    answers: list[HeartbeatResponse | None] = []
    for one in heartbeats:
        of_group = groups(one.group)
        patience_s = max(0.0, end - time.monotonic())
        answers.append(None if of_group is None else of_group(one, patience_s))
    return codec.encode_heartbeats_answer(answers)


_LOG = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
"""How long a new connection may take for its handshake, including that of TLS."""
_TLS_HANDSHAKE_BYTES_MAX: Final = 256 * 1024
_READ_BYTES: Final = 16 * 1024
_REFUSALS: Final = (InvalidRequestError, IdentityError, UnknownMemberError, TlsError)
"""They need a person, so they are logged, and told to the other side."""


class PeerCaller(NamedTuple):
    """A peer whose handshake was accepted."""

    node_id: NodeId
    purpose: Purpose


class PeerGroup(NamedTuple):
    """A group's member at a peer port: its identity, and what takes its peers' connections."""

    introduction: Introduction
    serve: Callable[[PeerConnection, PeerCaller], None]
    answer_heartbeat: AnswerHeartbeat
    """Of a peer whose control connection it serves: a heartbeat that arrived with those of other groups."""


class PeerAcceptor:
    """Accepts from ``open`` to ``close``, on the event loop that calls them, for the groups added."""

    def __init__(self, name: str, groups: Collection[str], keeper: TlsKeeper | None) -> None:
        """``groups``: those that the port is for, added or not: a peer of one that is not is hung up on.

        ``keeper``: None for plaintext.
        """
        self._name = name
        self._expected = tuple(sorted(groups))
        self._groups: Mapping[str, PeerGroup] = MappingProxyType({})  # replaced as a whole
        self._keeper = keeper
        self._acceptor = Acceptor("peer", self._greet, HANDSHAKE_TIMEOUT_S)
        self.reasons = Reasons(logging.WARNING)
        self.open = self._acceptor.open
        self.close = self._acceptor.close

    def add(self, name: str, group: PeerGroup) -> None:
        """Accept connections for a group. On the event loop."""
        self._groups = MappingProxyType({**self._groups, name: group})

    def remove(self, name: str) -> None:
        """Accept no more for a group. On the event loop."""
        self._groups = MappingProxyType({one: group for one, group in self._groups.items() if one != name})

    def answerer(self, name: str) -> AnswerHeartbeat | None:
        """The function that answers a group's heartbeats, if the group is there. On any thread."""
        group = self._groups.get(name)
        return None if group is None else group.answer_heartbeat

    def _group_of(self, name: str) -> PeerGroup:
        """The one that a handshake names. Raises ``IdentityError`` for one that is none of this process's."""
        if len(self._expected) == 1:
            name, *_ = self._expected  # it says itself what is wrong with another name
        if (group := self._groups.get(name)) is not None:
            return group
        if name in self._expected:
            raise EOFError(f"group {name!r} is not there")  # it starts, or has stopped
        raise IdentityError(
            f"message for group {name!r} reached a process of the groups {', '.join(map(repr, self._expected))}: check "
            "the addresses in the member list"
        )

    # -- the handshake -------------------------------------------------------------------------------------------------

    async def _greet(self, arrival: Arrival) -> None:
        """Shake hands, and hand the connection over."""
        greeting = _Greeting(arrival.link, arrival.host)
        keeper = self._keeper
        try:
            group, caller = await self._shake_hands(greeting)
        except _REFUSALS as error:
            self.reasons.log(f"{self._name} refused a connection from {greeting.host}: {error}")
            await greeting.send(FrameKind.REFUSAL, str(error).encode()[:HANDSHAKE_BYTES_MAX])
            return
        if caller is not None:
            arrival.take().setblocking(True)
            names = None if keeper is None else greeting.names
            group.serve(PeerConnection(greeting.link, greeting.tls, greeting.received, names), caller)

    async def _shake_hands(self, greeting: _Greeting) -> tuple[PeerGroup, PeerCaller | None]:
        """Group and peer; None if its settings differ from ours, as it was told. Raises ``EOFError``, ``_REFUSALS``."""
        keeper = self._keeper
        frames.tune(greeting.link)
        first = await greeting.receive()
        if (first[0] == TLS_RECORD) != (keeper is not None):
            raise InvalidRequestError(_UNLIKE[keeper is not None])
        if keeper is None:
            greeting.received.add(first)
        else:
            await greeting.begin_tls(TlsStream(keeper.accepting(), server_side=True), first)
        kind, payload = await greeting.frame()
        if kind is not FrameKind.HANDSHAKE:
            raise InvalidRequestError(f"expected a handshake first, got {kind.name}")
        handshake = codec.decode_handshake(payload)
        group = self._group_of(handshake.header.group)
        identity, client_address, learn, _ = group.introduction
        identity.check(handshake.header)
        sender = handshake.header.sender
        if keeper is not None:
            tls.check_name(greeting.names, sender, f"that {greeting.host} showed")
        answer = identity.judge(handshake, client_address)
        purpose = _purpose(handshake.purpose) if answer.code is ResponseCode.SUCCESS else None
        if purpose is not None:
            learn(sender, handshake.client_address)
        await greeting.send(FrameKind.HANDSHAKE_ANSWER, codec.encode_handshake_answer(answer))
        return group, None if purpose is None else PeerCaller(sender, purpose)


_UNLIKE: Final = {
    True: "this node accepts only TLS from its peers: set tls_cert_path, tls_key_path and tls_trust_cert_path",
    False: "this node does not use TLS: configure certificates on all members, or on none",
}
"""By whether we have TLS, when the other side is unlike us."""


def _purpose(number: int) -> Purpose:
    try:
        return Purpose(number)
    except ValueError as error:
        raise InvalidRequestError(f"a connection for purpose {number} is unknown") from error


class _Greeting:
    """A connection whose handshake is not done, on the event loop. Waiting calls raise ``EOFError`` at its end."""

    def __init__(self, link: socket.socket, host: str) -> None:
        self.link = link
        self.host = host
        self.tls: TlsStream | None = None
        self.names: tuple[str, ...] = ()
        """Of the other side's certificate."""
        self.received = FrameBuffer()

    async def receive(self) -> bytes:
        """Some bytes from the socket."""
        data = await asyncio.get_running_loop().sock_recv(self.link, _READ_BYTES)
        if not data:
            raise EOFError("connection closed")
        return data

    async def begin_tls(self, stream: TlsStream, data: bytes) -> None:
        """Do the TLS handshake, which begins with ``data``. Raises ``TlsError``."""
        loop, bytes_left = asyncio.get_running_loop(), _TLS_HANDSHAKE_BYTES_MAX
        self.tls = stream
        try:
            while True:
                await loop.sock_sendall(self.link, stream.shake_hands(data))
                if stream.agreed:
                    break
                bytes_left -= len(data)
                if bytes_left < 0:
                    raise EOFError("a TLS handshake that does not end")
                data = await self.receive()
        except ssl.SSLError as error:
            await loop.sock_sendall(self.link, stream.due())
            raise TlsError(tls.explain(error, f"a peer at {self.host}")) from error
        self.names = tls.names_of(stream.certificate)
        self.received.add(stream.read())

    async def frame(self) -> frames.Frame:
        while (frame := self.received.take()) is None:
            data = await self.receive()
            if self.tls is not None:
                self.tls.feed(data)
                data = self.tls.read()
            self.received.add(data)
        return frame

    async def send(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame, unless TLS has failed, which has told the other side itself."""
        if self.tls is not None and not self.tls.agreed:
            return
        for piece in frames.sealed(self.tls, kind, payload):
            await asyncio.get_running_loop().sock_sendall(self.link, piece)


def _listen_for_peers(config: ServerConfig) -> list[socket.socket]:
    """Listen at the peer port. Raises ``ConfigError``."""
    member = config.self_member
    return listen(config.bind_host or member.host, member.port, "peer")


class PeerPort:
    """Listens from ``open`` to ``close``, and takes connections from ``accept`` on.

    ``report``: of the end of its event loop, without which no group goes on.
    """

    def __init__(
        self,
        config: ServerConfig,
        groups: Collection[str],
        tls_keeper: TlsKeeper | None = None,
        report: Report = log_failure,
    ) -> None:
        """``config``: of any of the groups; they agree on what concerns the port."""
        self._config = config
        self._loop = LoopThread(f"dledger-peers-{config.node_id}", report)
        self._acceptor: Final = PeerAcceptor(config.node_id, groups, tls_keeper)
        self.reasons: Final = self._acceptor.reasons
        """Logs why connections are refused."""
        self.coalescer: Final = HeartbeatCoalescer() if len(groups) > 1 else None
        """Sends the groups' heartbeats together; None: there is one group."""
        self._listening: list[socket.socket] = []
        self.port = 0
        """The port listened on, once open."""

    def open(self) -> None:
        """Listen; connections wait for ``accept``. Raises ``ConfigError`` if it cannot."""
        self._loop.start()
        try:
            self._listening = _listen_for_peers(self._config)
        except BaseException:
            self._loop.stop()
            raise
        self.port = self._listening[0].getsockname()[1]

    def accept(self) -> None:
        """Take connections for the groups added."""
        listening, self._listening = self._listening, []
        self.bridge.post(partial(self._acceptor.open, listening))

    @property
    def bridge(self) -> LoopBridge:
        """The bridge to its event loop, once open. Raises ``InvariantError``."""
        if (bridge := self._loop.bridge) is None:
            raise InvariantError("the peer port is not open")
        return bridge

    def add(self, name: str, group: PeerGroup) -> None:
        """Accept connections for a group soon."""
        self.bridge.post(partial(self._acceptor.add, name, group))

    def remove(self, name: str) -> None:
        """Accept no more for a group, from the return on. From other threads than the loop's."""
        if (bridge := self._loop.bridge) is not None and self._loop.is_alive:
            bridge.run(self._remove(name))

    async def _remove(self, name: str) -> None:
        self._acceptor.remove(name)

    def answer_heartbeats(self, payload: bytes | memoryview, names: tuple[str, ...] | None) -> bytes:
        """See ``coalescing.answer``. On any thread."""
        return answer(payload, names, self._acceptor.answerer)

    def close(self) -> None:
        """Stop listening, and end the event loop, on which no group may have links any more. Idempotent."""
        if (bridge := self._loop.bridge) is not None and self._loop.is_alive:
            bridge.run(self._acceptor.close())
        self._loop.stop()
        for one in self._listening:
            one.close()
        self._listening = []
