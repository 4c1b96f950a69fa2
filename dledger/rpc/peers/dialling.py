"""Calls a peer: a connection that this member makes, from TCP or TLS to the handshake. The subclass does the rest.

Each connection begins with a handshake. A handshake for pushes alone would not be enough:

1. A node whose ``segment_bytes`` differs from the others' wins an election, since votes do not mention segments.
2. Its heartbeats are answered, so no member campaigns and check-quorum is content.
3. Every one of its push connections is refused at the handshake: it leads for ever, and nothing is ever committed.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, cast

from dledger.config import Member
from dledger.errors import DLedgerError, InvalidRequestError, ResponseCode, TlsError
from dledger.rpc import loops, options, tls
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import FrameBuffer, FrameKind, Purpose
from dledger.rpc.peers.identity import Introduction, Reasons
from dledger.rpc.tls import TlsStream
from dledger.rpc.tls_keeper import TlsKeeper

CONNECT_TIMEOUT_S: Final = options.RECONNECT_MS_MAX / 1000
"""For connecting and the handshake together."""


class PeerDialler:
    """Calls one peer at its addresses in turn (``members``: of one id), and shakes hands. On an event loop."""

    def __init__(
        self, introduction: Introduction, members: tuple[Member, ...], purpose: Purpose, reasons: Reasons
    ) -> None:
        self._introduction = introduction
        self._members = members
        self._peer = members[0].node_id
        self._purpose = purpose
        self._reasons = reasons

    @property
    def address(self) -> str:
        """The peer's address, for people."""
        return f"{self._peer} at {self._members[0].address}"

    async def greet(self) -> None:
        """Shake hands, and hang up."""
        connection = DialledConnection(self, self._introduction.tls_keeper)
        try:
            await self._shake_hands(connection)
        except DLedgerError as error:
            self.on_refusal(error)
        except (OSError, TimeoutError, RuntimeError):  # the last if no thread was available to resolve the name
            return
        finally:
            connection.abort()

    async def _shake_hands(self, connection: DialledConnection) -> bool:
        """Connect; returns whether the peer agrees. An address that fails is tried last from then on.

        Raises ``OSError``, ``TimeoutError``, ``RuntimeError`` and ``DLedgerError``.
        """
        address, agreed = self._members[0], False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loops.connect(lambda: connection, address.host, address.port)
                agreed = await connection.agreed
        finally:
            if not agreed and self._members[0] == address:
                self._members = (*self._members[1:], address)
        return agreed

    # -- what the connection reports -----------------------------------------------------------------------------

    def handshake(self) -> bytes:
        """Our handshake."""
        identity, client_address, *_ = self._introduction
        return codec.encode_handshake(identity.handshake(self._peer, client_address, self._purpose))

    def check_names(self, names: tuple[str, ...]) -> None:
        """Raise ``TlsError`` unless they, of the other side's certificate, have the peer's."""
        tls.check_name(names, self._peer, f"of {self.address}")

    def on_frame(self, kind: FrameKind, payload: bytes | memoryview) -> bool:
        """Take a frame; returns whether it accepts our handshake. Raises ``DLedgerError`` to end the connection."""
        if kind is FrameKind.REFUSAL:
            raise InvalidRequestError(bytes(payload).decode(errors="replace"))
        if kind is FrameKind.HANDSHAKE_ANSWER:
            self._take_verdict(codec.decode_handshake_answer(payload))
            return True
        self._take(kind, payload)
        return False

    def _take_verdict(self, verdict: codec.HandshakeAnswer) -> None:
        identity, _, learn, _ = self._introduction
        identity.take_answer(self._peer, verdict)
        if verdict.code is not ResponseCode.SUCCESS:
            raise InvalidRequestError(verdict.reason)
        learn(self._peer, verdict.client_address)

    def _take(self, kind: FrameKind, _payload: bytes | memoryview) -> None:
        """Take any other frame. Raises ``DLedgerError`` to end the connection."""
        raise InvalidRequestError(f"expected an answer to the handshake, got {kind.name}")

    def on_writable(self) -> None:
        """The connection accepts more."""

    def on_refusal(self, error: DLedgerError) -> None:
        """Log a refusal, which needs a person, once."""
        self._complain(str(error))

    def _complain(self, reason: str) -> None:
        self._reasons.log(f"{self._introduction.identity.node_id} does not talk to {self._peer}: {reason}")


class DialledConnection(asyncio.Protocol):
    """One attempt, with TLS or not. ``agreed`` says how the handshake went, ``ended`` that the connection is over."""

    def __init__(self, dialler: PeerDialler, keeper: TlsKeeper | None) -> None:
        loop = asyncio.get_running_loop()
        self.agreed: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.writable = True
        self._dialler = dialler
        self._tls = None if keeper is None else TlsStream(keeper.connecting())
        self._said = b""  # received before TLS was agreed: perhaps not TLS at all
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None

    def write(self, kind: FrameKind, *payload: bytes) -> None:
        """Send a frame; bytes that the socket does not accept are buffered, and ``writable`` says when to pause."""
        for piece in frames.sealed(self._tls, kind, *payload):
            self._send(piece)

    def _send(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():  # otherwise we hear of its end next
            transport.write(data)

    def abort(self) -> None:
        """Break the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with TLS, or with our handshake."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        frames.tune(transport.get_extra_info("socket"))
        if self._tls is None:
            self.write(FrameKind.HANDSHAKE, self._dialler.handshake())
        else:
            self._send(self._tls.shake_hands(b""))

    def data_received(self, data: bytes) -> None:
        """Take answers."""
        try:
            if self._tls is not None:
                data = self._decrypt(self._tls, data)
            for kind, payload in self._frames.feed(data):
                if self._dialler.on_frame(kind, payload) and not self.agreed.done():
                    self.agreed.set_result(True)
        except DLedgerError as error:
            self._dialler.on_refusal(error)
            self.abort()

    def _decrypt(self, stream: TlsStream, data: bytes) -> bytes:
        """The plaintext of received bytes; empty until the TLS handshake is done. Raises ``TlsError``."""
        try:
            if stream.agreed:
                stream.feed(data)
            elif not self._shake_hands(stream, data):
                return b""
            plain = stream.read()
            self._send_due(stream)
        except ssl.SSLError as error:
            self._send_due(stream)  # the alert, if the connection still carries it
            refused = frames.refusal_in(self._said)
            address = self._dialler.address
            raise TlsError(f"{address}: {refused}" if refused else tls.explain(error, address)) from error
        except EOFError:
            self.abort()
            return b""
        return plain

    def _shake_hands(self, stream: TlsStream, data: bytes) -> bool:
        """Continue the TLS handshake; once it is done, check the peer's name and send our handshake."""
        self._said += data
        reply = stream.shake_hands(data)
        if stream.agreed:
            self._dialler.check_names(tls.names_of(stream.certificate))
        self._send(reply)
        if stream.agreed:
            self._said = b""
            self.write(FrameKind.HANDSHAKE, self._dialler.handshake())
        return stream.agreed

    def _send_due(self, stream: TlsStream) -> None:
        if stream.has_due:
            self._send(stream.due())

    def pause_writing(self) -> None:
        """The peer is slow: messages stay on the queue, which has a limit."""
        self.writable = False

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self.writable = True
        self._dialler.on_writable()

    def connection_lost(self, _error: Exception | None) -> None:
        """Wake the waiting task."""
        if not self.agreed.done():
            self.agreed.set_result(False)
        if not self.ended.done():
            self.ended.set_result(None)
