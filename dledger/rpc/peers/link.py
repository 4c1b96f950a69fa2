"""A link to one peer for one purpose: a TCP connection that this member makes, kept, and made again, on an event loop.

The links for pushes run on the loop that also serves clients, so that on an idle group an append crosses no thread on
its way from the client to the followers and back: every crossing costs a wake-up and contention for the interpreter's
lock. Those for control messages run on the peer port's loop, which neither clients nor pushes can delay.

Nothing is retried here: the protocol repeats itself. A peer that connects to this member cuts the pause between two
attempts short, so that one that comes back is reached at once. The task that connects ends only when it is cancelled:
without it a leader could never reach this peer again, while its heartbeats keep it the leader.

Each connection begins with a handshake. A handshake for pushes alone would not be enough:

1. A node whose ``segment_bytes`` differs from the others' wins an election, since votes do not mention segments.
2. Its heartbeats are answered, so no member campaigns and check-quorum is content.
3. Every one of its push connections is refused at the handshake: it leads for ever, and nothing is ever committed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from dledger.backoff import Backoff
from dledger.config import Member
from dledger.core.messages import Envelope, HeartbeatResponse
from dledger.errors import DLedgerError, InvalidRequestError, ResponseCode, TlsError
from dledger.rpc import loops, options, tls
from dledger.rpc.bridge import LoopBridge, Report, log_failure, supervise
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import FrameBuffer, FrameKind, Purpose
from dledger.rpc.peers.identity import Introduction, Reasons
from dledger.rpc.peers.outgoing import Outgoing
from dledger.rpc.ports import Receiver
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.rpc.tls_stream import TlsStream

CONNECT_TIMEOUT_S: Final = options.RECONNECT_MS_MAX / 1000
"""For connecting and the handshake together."""
PAUSE_S_MIN: Final = 0.01
"""The least time from a lost connection, or a failed attempt, to the next one: two members that make each other hurry
must not become a load, whatever ends their connections.
"""


class PeerLink:
    """Sends what is in ``queue`` to ``peer``, and its answers to ``receiver``.

    ``send`` is thread-safe, never blocks and never raises for a dead peer. ``lost`` is called on the loop once per
    broken connection, or failed attempt.
    """

    def __init__(
        self,
        introduction: Introduction,
        peer: Member,
        queue: Outgoing,
        receiver: Receiver,
        bridge: LoopBridge,
        reasons: Reasons,
        lost: Callable[[], None],
    ) -> None:
        self._introduction = introduction
        self._member = peer
        self._queue = queue
        self._receiver = receiver
        self._bridge = bridge
        self._reasons = reasons
        self._lost = lost
        self._is_flush_due = False  # posted, and not run yet
        self._wanted = asyncio.Event()  # set while there is something to send, or a peer to greet
        self._hurried = asyncio.Event()  # set if the peer was heard of since the last attempt began
        self._connection: _Connection | None = None
        self._backoff = Backoff(options.RECONNECT_MS_MIN / 1000, options.RECONNECT_MS_MAX / 1000)
        self._task: asyncio.Task[None] | None = None

    @property
    def dropped(self) -> int:
        """Messages known here as not delivered."""
        return self._queue.dropped

    @property
    def address(self) -> str:
        """The peer's address, for people."""
        return f"{self._member.node_id} at {self._member.address}"

    def send(self, envelope: Envelope) -> None:
        """Queue a message, within the limits of the queue, and send it soon."""
        self._queue.add(envelope)
        # As in ``LoopBridge.post``: `_flush` clears the flag first, so it finds whatever a thread added that saw True.
        if not self._is_flush_due:
            self._is_flush_due = True
            self._bridge.post(self._flush)

    def hurry(self) -> None:
        """The peer has connected to this member: it is there, so try again now if an attempt has failed.

        A link for control messages connects even if there is nothing to send yet: votes are in a hurry. Thread-safe.
        """
        self._bridge.post(self._hurry)

    def _hurry(self) -> None:
        if self._connection is None:
            self._hurried.set()
            if self._queue.purpose is Purpose.CONTROL:
                self._wanted.set()

    async def start(self, report: Report = log_failure) -> None:
        """Start on the loop; connects when there is something to send. ``report`` is called if the task fails."""
        name = f"dledger-{self._queue.purpose.name.lower()}-{self._introduction.identity.node_id}"
        self._task = asyncio.create_task(self._run(), name=f"{name}-{self._member.node_id}")
        supervise(self._task, report)

    async def close(self) -> None:
        """Cancel the task and drop the connection."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._hurried.clear()
            try:
                await self._connect()
            except DLedgerError as error:
                self.on_refusal(error)
            except RuntimeError as error:  # no thread was available to resolve the peer's name: later, perhaps
                self._complain(f"cannot connect to {self.address}: {error}; retrying")
            self._queue.clear()
            self._wanted.clear()
            try:
                self._lost()
            except DLedgerError as error:  # the node has stopped itself; its transport is closed next
                self._complain(str(error))
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(PAUSE_S_MIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.pause() - PAUSE_S_MIN):
                await self._hurried.wait()
                self._hurry()  # whatever was wanted before the pause is forgotten

    async def _connect(self) -> None:
        """Connect; returns when the connection has ended, or could not be made."""
        connection = _Connection(self, self._introduction.tls_keeper)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loops.connect(lambda: connection, self._member.host, self._member.port)
                if not await connection.agreed:
                    return
            self._connection = connection
            self._hurried.clear()
            self._flush()
            await connection.ended
        except (OSError, TimeoutError):
            return  # a dead or slow peer: that passes, and is not worth a line per attempt
        finally:
            self._connection = None
            connection.abort()

    def _flush(self) -> None:
        """Write what is queued, as far as the connection accepts it. On the loop."""
        self._is_flush_due = False
        connection, queue = self._connection, self._queue
        if connection is None:
            self._wanted.set()
        elif queue.is_stuck:
            connection.abort()
        else:
            while connection.writable and (found := queue.next()) is not None:
                kind, envelope = found
                connection.write(kind, *codec.encode_pieces(envelope.message))

    # -- what the connection reports -----------------------------------------------------------------------------

    def handshake(self) -> bytes:
        """Our handshake."""
        identity, client_address, *_ = self._introduction
        return codec.encode_handshake(identity.handshake(self._member.node_id, client_address, self._queue.purpose))

    def on_writable(self) -> None:
        """The connection accepts more."""
        self._flush()

    def on_frame(self, kind: FrameKind, payload: bytes | memoryview) -> bool:
        """Take a frame; returns whether it accepts our handshake. Raises ``DLedgerError`` to end the connection."""
        if kind is FrameKind.REFUSAL:
            raise InvalidRequestError(bytes(payload).decode(errors="replace"))
        if kind is FrameKind.HANDSHAKE_ANSWER:
            self._take_verdict(codec.decode_handshake_answer(payload))
            return True
        answer = self._queue.take_answer(kind, payload)
        if answer is not None:
            peer, introduction = self._member.node_id, self._introduction
            if isinstance(answer, HeartbeatResponse):
                introduction.learn(peer, answer.client_address)
            self._receiver.receive(introduction.identity.envelope_from(peer, answer))
        self._backoff.succeeded()
        if kind is not FrameKind.PUSH_ANSWER and self._connection is not None:
            self._flush()  # the answer may have made room for a control message that waits
        return False

    def _take_verdict(self, verdict: codec.HandshakeAnswer) -> None:
        identity, _, learn, _ = self._introduction
        identity.take_answer(self._member.node_id, verdict)
        if verdict.code is not ResponseCode.SUCCESS:
            raise InvalidRequestError(verdict.reason)
        learn(self._member.node_id, verdict.client_address)

    def check_names(self, names: tuple[str, ...]) -> None:
        """Raise ``TlsError`` unless they, of the other side's certificate, have the peer's."""
        tls.check_name(names, self._member.node_id, f"of {self.address}")

    def on_refusal(self, error: DLedgerError) -> None:
        """Log a refusal, which needs a person, once, and wait longer before the next attempt."""
        self._backoff.calm_down()
        self._complain(str(error))

    def _complain(self, reason: str) -> None:
        self._reasons.log(f"{self._introduction.identity.node_id} does not talk to {self._member.node_id}: {reason}")


class _Connection(asyncio.Protocol):
    """One attempt, with TLS or not. ``agreed`` says how the handshake went, ``ended`` that the connection is over."""

    def __init__(self, link: PeerLink, keeper: TlsKeeper | None) -> None:
        loop = asyncio.get_running_loop()
        self.agreed: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.writable = True
        self._link = link
        self._tls = None if keeper is None else TlsStream(keeper.connecting())
        self._said = b""  # received before TLS was agreed: perhaps not TLS at all
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None

    def write(self, kind: FrameKind, *payload: bytes) -> None:
        """Send a frame; what the socket does not accept is buffered, and ``writable`` says when to pause."""
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
            self.write(FrameKind.HANDSHAKE, self._link.handshake())
        else:
            self._send(self._tls.shake_hands(b""))

    def data_received(self, data: bytes) -> None:
        """Take answers."""
        try:
            if self._tls is not None:
                data = self._decrypt(self._tls, data)
            for kind, payload in self._frames.feed(data):
                if self._link.on_frame(kind, payload) and not self.agreed.done():
                    self.agreed.set_result(True)
        except DLedgerError as error:
            self._link.on_refusal(error)
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
            address = self._link.address
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
            self._link.check_names(tls.names_of(stream.certificate))
        self._send(reply)
        if stream.agreed:
            self._said = b""
            self.write(FrameKind.HANDSHAKE, self._link.handshake())
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
        self._link.on_writable()

    def connection_lost(self, _error: Exception | None) -> None:
        """Wake the waiting task."""
        if not self.agreed.done():
            self.agreed.set_result(False)
        if not self.ended.done():
            self.ended.set_result(None)
