"""The peer port: accepts connections, and finds out whose they are before anything is spent on them.

A connection begins with TLS or with a frame, in a group with TLS only with TLS; then comes the handshake. Until that is
done, it occupies neither a thread nor a place that members need, only one of ``UNKNOWN_MAX``, and for a few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from dledger.config import ServerConfig
from dledger.errors import IdentityError, InvalidRequestError, ResponseCode, TlsError, UnknownMemberError
from dledger.rpc import tls
from dledger.rpc.listening import listen
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.connection import PeerConnection
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, TLS_RECORD, FrameBuffer, FrameKind, Purpose
from dledger.rpc.peers.identity import Introduction, Reasons
from dledger.rpc.tls_stream import TlsStream
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

UNKNOWN_MAX: Final = 256
"""The limit of connections whose handshake is not done; one more closes the oldest of the host with the most."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""How long a new connection may take for its handshake, including that of TLS."""
_TLS_HANDSHAKE_BYTES_MAX: Final = 256 * 1024
_READ_BYTES: Final = 16 * 1024
_ACCEPT_PAUSE_S: Final = 0.1
_REFUSALS: Final = (InvalidRequestError, IdentityError, UnknownMemberError, TlsError)
"""They need a person, so they are logged, and told to the other side."""


class PeerCaller(NamedTuple):
    """A peer whose handshake was accepted."""

    node_id: NodeId
    purpose: Purpose


class PeerAcceptor:
    """Accepts from ``open`` to ``close``, on the event loop that calls them; ``serve`` gets the peers' connections."""

    def __init__(self, introduction: Introduction, serve: Callable[[PeerConnection, PeerCaller], None]) -> None:
        self._introduction = introduction
        self._serve = serve
        self._listening: list[socket.socket] = []
        self._unknown: dict[asyncio.Task[None], str] = {}  # with their hosts, in order of arrival
        self.reasons = Reasons(logging.WARNING)

    def open(self, listening: list[socket.socket]) -> None:
        """Accept connections from these sockets, and own them."""
        self._listening = listening
        for one in listening:
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    async def close(self) -> None:
        """Stop accepting; ends connections whose handshake is not done. Idempotent."""
        listening, self._listening = self._listening, []
        for one in listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        tasks = tuple(self._unknown)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- accepting -----------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection. Not with ``sock_accept``: cancelling it could lose a connection just accepted."""
        loop = asyncio.get_running_loop()
        try:
            link, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the other side hung up already
            return
        except OSError as error:  # out of descriptors: it stays acceptable, so pause accepting
            _LOG.warning("cannot accept a connection to the peer port: %s", error)
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        link.setblocking(False)
        if len(self._unknown) >= UNKNOWN_MAX:
            self._make_room()
        greeting = _Greeting(link, str(address[0]))
        task = loop.create_task(self._greet(greeting))
        self._unknown[task] = greeting.host
        task.add_done_callback(partial(self._greeted, greeting))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _make_room(self) -> None:
        """Close the oldest unknown connection of the host with the most."""
        (host, _), *_ = Counter(self._unknown.values()).most_common(1)
        oldest = next(task for task, its_host in self._unknown.items() if its_host == host)
        del self._unknown[oldest]
        oldest.cancel()

    def _greeted(self, greeting: _Greeting, task: asyncio.Task[None]) -> None:
        """Runs in any case, also when the task was cancelled before its first step."""
        self._unknown.pop(task, None)
        if not greeting.is_handed_over:
            with suppress(OSError):  # what is unread would turn the end, and a refusal before it, into a reset
                greeting.link.recv(HANDSHAKE_BYTES_MAX)
            greeting.link.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a connection to the peer port was lost", exc_info=error)

    # -- the handshake -------------------------------------------------------------------------------------------------

    async def _greet(self, greeting: _Greeting) -> None:
        """Shake hands, and hand the connection over."""
        caller = None
        with suppress(OSError, EOFError, TimeoutError):  # it left, or took too long
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                try:
                    caller = await self._shake_hands(greeting)
                except _REFUSALS as error:
                    self.reasons.log(
                        f"{self._introduction.identity.node_id} refused a connection from {greeting.host}: {error}"
                    )
                    await greeting.send(FrameKind.REFUSAL, str(error).encode()[:HANDSHAKE_BYTES_MAX])
                    return
        if caller is None:
            return
        greeting.is_handed_over = True
        greeting.link.setblocking(True)
        self._serve(PeerConnection(greeting.link, greeting.tls, greeting.received), caller)

    async def _shake_hands(self, greeting: _Greeting) -> PeerCaller | None:
        """The peer; None if its settings differ from ours, as it was told. Raises ``EOFError`` and ``_REFUSALS``."""
        identity, client_address, learn, keeper = self._introduction
        frames.tune(greeting.link)
        first = await greeting.receive()
        if (first[0] == TLS_RECORD) != (keeper is not None):
            raise InvalidRequestError(_UNLIKE[keeper is not None])
        if keeper is None:
            greeting.received.add(first)
        else:
            await greeting.begin_tls(TlsStream(keeper.accepting(), server_side=True), first)
            tls.check_member(greeting.names, identity.members, f"that {greeting.host} showed")
        kind, payload = await greeting.frame()
        if kind is not FrameKind.HANDSHAKE:
            raise InvalidRequestError(f"expected a handshake first, got {kind.name}")
        handshake = codec.decode_handshake(payload)
        identity.check(handshake.header)
        sender = handshake.header.sender
        if keeper is not None:
            tls.check_name(greeting.names, sender, f"that {greeting.host} showed")
        learn(sender, handshake.client_address)
        answer = identity.judge(handshake, client_address)
        purpose = _purpose(handshake.purpose) if answer.code is ResponseCode.SUCCESS else None
        await greeting.send(FrameKind.HANDSHAKE_ANSWER, codec.encode_handshake_answer(answer))
        return None if purpose is None else PeerCaller(sender, purpose)


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
        self.is_handed_over = False

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
        """The next frame."""
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


def listen_for_peers(config: ServerConfig) -> list[socket.socket]:
    """Listen at the peer port. Raises ``ConfigError``."""
    member = config.self_member
    return listen(config.bind_host or member.host, member.port, "peer")
