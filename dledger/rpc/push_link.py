"""The way of pushes towards one peer: one long-lived stream on an event loop, in order.

On the loop that also serves clients, so that on an idle group an append crosses no thread on its way from the client to
the followers and back: every crossing costs a wake-up and a fight for the interpreter's lock.

Whatever breaks the stream is told to the receiver as ``connection_lost``, once per broken stream. Nothing is retried
here: the protocol repeats itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

import grpc

from dledger.config import Member
from dledger.core.messages import Envelope
from dledger.errors import DLedgerError, ResponseCode
from dledger.rpc import codec, options
from dledger.rpc.bridge import LoopBridge
from dledger.rpc.control_link import MISCONFIGURED, Introduction
from dledger.rpc.identity import Identity
from dledger.rpc.ports import Receiver


class PushLink:
    """Outgoing pushes to ``peer``. ``send`` is thread-safe, never blocks and never raises for a dead peer."""

    def __init__(
        self,
        identity: Identity,
        peer: Member,
        receiver: Receiver,
        bridge: LoopBridge,
        *,
        introduction: Introduction,
        queue_pushes_max: int,
    ) -> None:
        self.peer = peer.node_id
        self.dropped = 0
        """Messages that were not delivered, as far as this side knows. For people: updates may race."""
        self._identity = identity
        self._address = peer.address
        self._receiver = receiver
        self._bridge = bridge
        self._client_address, self._learn, self._refusals = introduction
        self._queue_pushes_max = queue_pushes_max
        self._queue: deque[Envelope] = deque()
        self._overflowed = False  # something was dropped: what is on the queue must not go out as if nothing was
        self._ready = asyncio.Event()
        self._backoff_ms = options.RECONNECT_MS_MIN
        self._task: asyncio.Task[None] | None = None

    def send(self, envelope: Envelope) -> None:
        """Queue a push. If the queue is full, the message is dropped and the stream broken: the peer takes none."""
        if len(self._queue) < self._queue_pushes_max:
            self._queue.append(envelope)
        else:
            self.dropped += 1
            self._overflowed = True
        self._bridge.post(self._ready.set)

    async def start(self) -> None:
        """Begin on the loop; connects when there is something to send."""
        self._task = asyncio.create_task(self._run(), name=f"dledger-push-{self._identity.node_id}-{self.peer}")

    async def close(self) -> None:
        """Cancel everything under way."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options.peer_channel_options()) as channel:
            while True:
                await self._wait_for_push()
                await self._stream(channel)
                self.dropped += len(self._queue)
                self._queue.clear()
                self._overflowed = False
                try:
                    self._receiver.connection_lost(self.peer)
                except DLedgerError as error:  # the node has stopped itself; its transport is closed next
                    self._refusals.log(str(error))
                await asyncio.sleep(self._backoff_ms / 1000)
                self._backoff_ms = min(2 * self._backoff_ms, options.RECONNECT_MS_MAX)

    async def _wait_for_push(self) -> None:
        while not self._queue:
            self._ready.clear()
            if not self._queue:  # put between the two lines above
                await self._ready.wait()

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        try:
            if not await self._shake_hands(channel):
                return
            stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                options.method(options.RAFT_SERVICE, "Push"), request_serializer=None, response_deserializer=None
            )
            call = stream(None)
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
            finally:
                call.cancel()
                writer.cancel()
                await asyncio.wait((writer,))
        except grpc.RpcError as error:
            # What passes by itself (a dead or slow peer) is not worth a line per attempt; what needs a person is.
            if error.code() in MISCONFIGURED:
                self._refused(str(error.details()))
        except DLedgerError as error:
            self._refusals.log(str(error))

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        try:
            while True:
                await self._wait_for_push()
                if self._overflowed:
                    break
                await call.write(codec.encode(self._queue.popleft()))
        except (grpc.RpcError, asyncio.InvalidStateError):  # the call has ended: the reader says how
            return
        call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        try:
            while isinstance(data := await call.read(), bytes):
                answer = codec.decode_push_response(data)
                self._identity.check_answer(answer, self.peer)
                self._receiver.receive(answer)
                self._backoff_ms = options.RECONNECT_MS_MIN
        except asyncio.CancelledError:
            # Cancelled by us in `close`, or the call by `_write`: only the former may end the task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise

    async def _shake_hands(self, channel: grpc.aio.Channel) -> bool:
        shake: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            options.method(options.RAFT_SERVICE, "Handshake"), request_serializer=None, response_deserializer=None
        )
        request = codec.encode_handshake(self._identity.handshake(self.peer, self._client_address))
        data = await shake(request, timeout=options.RECONNECT_MS_MAX / 1000)
        try:
            answer = codec.decode_handshake_answer(data)
        except DLedgerError as error:
            self._refused(str(error))
            return False
        if answer.code is not ResponseCode.SUCCESS:
            self._refused(answer.reason)
            return False
        self._learn(self.peer, answer.client_address)
        return True

    def _refused(self, reason: str) -> None:
        self._backoff_ms = options.RECONNECT_MS_MAX
        self._refusals.log(reason)
