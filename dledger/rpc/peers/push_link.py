"""The leader's end of a push connection: one TCP connection to one peer, on an event loop, in order.

It runs on the loop that also serves clients, so that on an idle group an append crosses no thread on its way from the
client to the followers and back: every crossing costs a wake-up and contention for the interpreter's lock.

The receiver gets ``connection_lost`` once per broken connection. Nothing is retried here: the protocol repeats itself.
The task that connects ends only when it is cancelled: without it a leader could never reach this peer again, while its
heartbeats keep it the leader.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from typing import cast

from dledger.backoff import Backoff
from dledger.config import Member
from dledger.core.messages import Envelope
from dledger.errors import DLedgerError, InvalidRequestError, ResponseCode, TlsError
from dledger.rpc import loops, options, tls
from dledger.rpc.bridge import LoopBridge, Report, log_failure, supervise
from dledger.rpc.peers import codec, push_frames
from dledger.rpc.peers.control_link import Introduction
from dledger.rpc.peers.identity import PeerIdentity
from dledger.rpc.peers.push_frames import FrameBuffer, FrameType
from dledger.rpc.ports import Receiver
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.rpc.tls_stream import SEAL_BYTES, TlsStream

CONNECT_TIMEOUT_S = options.RECONNECT_MS_MAX / 1000
"""For connecting and the handshake together."""


class PushLink:
    """Sends pushes to ``peer``. ``send`` is thread-safe, never blocks and never raises for a dead peer."""

    def __init__(
        self,
        identity: PeerIdentity,
        peer: Member,
        receiver: Receiver,
        bridge: LoopBridge,
        *,
        introduction: Introduction,
        queue_pushes_max: int,
        tls_keeper: TlsKeeper | None = None,
    ) -> None:
        self.peer = peer.node_id
        self.dropped = 0
        """Messages known here as not delivered. For monitoring: updates may race."""
        self._identity = identity
        self._member = peer
        self._receiver = receiver
        self._bridge = bridge
        self._client_address, self._learn, self._refusals = introduction
        self._queue_pushes_max = queue_pushes_max
        self._tls = tls_keeper
        self._queue: deque[Envelope] = deque()
        self._overflowed = False  # a push was dropped: the queue must not be sent as if it were complete
        self._wanted = asyncio.Event()  # set while there is something to send
        self._connection: _Connection | None = None
        self._backoff = Backoff(options.RECONNECT_MS_MIN / 1000, options.RECONNECT_MS_MAX / 1000)
        self._task: asyncio.Task[None] | None = None

    def send(self, envelope: Envelope) -> None:
        """Queue a push. If the queue is full, drop it and break the connection, because the peer is not reading."""
        if len(self._queue) < self._queue_pushes_max:
            self._queue.append(envelope)
        else:
            self.dropped += 1
            self._overflowed = True
        self._bridge.post(self._flush)

    async def start(self, report: Report = log_failure) -> None:
        """Start on the loop; connects when there is something to send. ``report`` is called if the task fails."""
        self._task = asyncio.create_task(self._run(), name=f"dledger-push-{self._identity.node_id}-{self.peer}")
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
            try:
                await self._connect()
            except DLedgerError as error:
                self.on_refusal(error)
            except RuntimeError as error:  # no thread was available to resolve the peer's name: later, perhaps
                self._refusals.log(f"cannot connect to {self.address}: {error}; retrying")
            self.dropped += len(self._queue)
            self._queue.clear()
            self._overflowed = False
            self._wanted.clear()
            try:
                self._receiver.connection_lost(self.peer)
            except DLedgerError as error:  # the node has stopped itself; its transport is closed next
                self._refusals.log(str(error))
            await asyncio.sleep(self._backoff.pause())

    async def _connect(self) -> None:
        """Connect; returns when the connection has ended, or could not be made."""
        connection = _Connection(self) if self._tls is None else _TlsConnection(self, self._tls)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loops.connect(lambda: connection, self._member.host, self._member.port)
                if not await connection.agreed:
                    return
            self._connection = connection
            self._flush()
            await connection.ended
        except (OSError, TimeoutError):
            return  # a dead or slow peer: that passes, and is not worth a line per attempt
        finally:
            self._connection = None
            connection.abort()

    def _flush(self) -> None:
        """Write what is queued, as far as the connection accepts it. On the loop."""
        connection = self._connection
        if connection is None:
            self._wanted.set()
        elif self._overflowed:
            connection.abort()
        else:
            while self._queue and connection.writable:
                connection.write(FrameType.PUSH, *codec.encode_pieces(self._queue.popleft()))

    # -- what the connection reports -----------------------------------------------------------------------------

    def introduction(self) -> bytes:
        """Our handshake."""
        return codec.encode_handshake(self._identity.handshake(self.peer, self._client_address))

    @property
    def address(self) -> str:
        """The peer's address, for people."""
        return f"{self.peer} at {self._member.address}"

    def on_writable(self) -> None:
        """The connection accepts more."""
        self._flush()

    def on_frame(self, kind: FrameType, payload: bytes) -> bool:
        """Take a frame; returns whether it accepts our handshake. Raises ``DLedgerError`` to end the connection."""
        match kind:
            case FrameType.PUSH_ANSWER:
                answer = codec.decode_push_response(payload)
                self._identity.check_answer(answer, self.peer)
                self._receiver.receive(answer)
                self._backoff.succeeded()
                return False
            case FrameType.HANDSHAKE_ANSWER:
                consent = codec.decode_handshake_answer(payload)
                self._identity.take_answer(self.peer, consent)
                if consent.code is not ResponseCode.SUCCESS:
                    raise InvalidRequestError(consent.reason)
                self._learn(self.peer, consent.client_address)
                return True
            case FrameType.REFUSAL:
                raise InvalidRequestError(payload.decode(errors="replace"))
            case _:
                raise InvalidRequestError(f"expected an answer, got {kind.name}")

    def on_refusal(self, error: DLedgerError) -> None:
        """Log a refusal, which needs a person, once, and wait longer before the next attempt."""
        self._backoff.calm_down()
        self._refusals.log(str(error))


class _Connection(asyncio.Protocol):
    """One attempt. ``agreed`` says how the handshake went, ``ended`` that the connection is over."""

    def __init__(self, link: PushLink) -> None:
        loop = asyncio.get_running_loop()
        self.agreed: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.writable = True
        self._link = link
        self._frames = FrameBuffer(push_frames.HANDSHAKE_BYTES_MAX)
        self._transport: asyncio.Transport | None = None

    def write(self, kind: FrameType, *payload: bytes) -> None:
        """Send a frame; what the socket does not accept is buffered, and ``writable`` says when to pause."""
        self._send(push_frames.pack(kind, *payload))

    def _send(self, data: bytes) -> None:
        """Send bytes unless the connection has ended, which we are told of next: uvloop would refuse them."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        """Break the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our handshake."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        push_frames.tune(transport.get_extra_info("socket"))
        self._begin(transport)

    def _begin(self, transport: asyncio.Transport) -> None:
        transport.write(push_frames.PREAMBLE)
        self.write(FrameType.HANDSHAKE, self._link.introduction())

    def data_received(self, data: bytes) -> None:
        """Take answers."""
        try:
            self._take(data)
        except DLedgerError as error:
            self._link.on_refusal(error)
            self.abort()

    def _take(self, data: bytes) -> None:
        for kind, payload in self._frames.feed(data):
            if self._link.on_frame(kind, payload) and not self.agreed.done():
                self.agreed.set_result(True)

    def pause_writing(self) -> None:
        """The peer is slow: pushes stay on the queue, which has a limit."""
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


class _TlsConnection(_Connection):
    """One attempt with TLS."""

    def __init__(self, link: PushLink, keeper: TlsKeeper) -> None:
        super().__init__(link)
        self._stream = TlsStream(keeper.connecting())
        self._said = b""  # received before TLS was agreed: perhaps not TLS at all

    def write(self, kind: FrameType, *payload: bytes) -> None:
        """See ``_Connection.write``."""
        seal, send = self._stream.seal, self._send
        if self._transport is None or self._transport.is_closing():
            return
        *small, large = payload
        if len(large) <= SEAL_BYTES:
            send(seal(push_frames.pack(kind, *payload)))
            return
        send(seal(push_frames.pack_head(kind, sum(map(len, payload)), *small)))
        view = memoryview(large)
        for start in range(0, len(large), SEAL_BYTES):
            send(seal(view[start : start + SEAL_BYTES]))

    def _begin(self, transport: asyncio.Transport) -> None:
        transport.write(push_frames.TLS_PREAMBLE + self._stream.shake_hands(b""))

    def _take(self, data: bytes) -> None:
        try:
            if self._stream.agreed:
                self._stream.feed(data)
            elif not self._shake_hands(data):
                return
            plain = self._stream.read()
            self._send_due()
        except ssl.SSLError as error:
            self._send_due()  # the alert, if the connection still carries it
            raise TlsError(self._refusal_in_the_clear() or tls.explain(error, self._link.address)) from error
        except EOFError:
            self.abort()
            return
        super()._take(plain)

    def _shake_hands(self, data: bytes) -> bool:
        """Continue the TLS handshake; once it is done, check the peer's name and send our handshake."""
        stream = self._stream
        self._said += data
        reply = stream.shake_hands(data)
        if stream.agreed:
            tls.check_name(tls.names_of(stream.certificate), self._link.peer, f"of {self._link.address}")
        self._send(reply)
        if stream.agreed:
            self.write(FrameType.HANDSHAKE, self._link.introduction())
        return stream.agreed

    def _send_due(self) -> None:
        if self._stream.has_due:
            self._send(self._stream.due())

    def _refusal_in_the_clear(self) -> str:
        """A plaintext refusal from a peer without TLS, if it knows push connections."""
        try:
            frame = next(FrameBuffer(push_frames.HANDSHAKE_BYTES_MAX).feed(self._said), None)
        except DLedgerError:
            return ""
        return f"{self._link.address}: {frame[1].decode(errors='replace')}" if frame is not None else ""
