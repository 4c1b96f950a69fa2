"""Streams of sends over gRPC.

Order. Messages of one stream reach the store in the order in which they were sent, including those that wait until
their topic has been created.

Flow control. Beyond ``send_pending_messages_max`` or ``send_pending_bytes_max``, no stream is read until something has
been answered (which holds producers back through gRPC). One stream may use only a part of that, so that it cannot keep
others out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import grpc

from dledger.access.quota import Quota
from dledger.rpc.clients.calls import Call
from dledger.rpc.options import limit_metadata
from dledger.values import MIB
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.sending import Sending
from rocketstore.broker_grpc.codec import ResultEncoder, SendCall
from rocketstore.message.producer_names import MEMORY_KEY
from rocketstore.types import PutResult

STREAM_REQUESTS_PENDING_MAX: Final = 1024
STREAM_MESSAGES_PENDING_MAX: Final = 16_384
STREAM_BYTES_PENDING_MAX: Final = 16 * MIB
StreamContext = grpc.aio.ServicerContext[bytes, bytes]


class SendStream:
    """One producer's stream: stores requests as they arrive, and writes results when they are known.

    ``memory`` identifies the broker's producer table if it is lost when the broker ends: a producer that resends
    messages of unknown outcome learns from a changed name that nobody knows it any more.
    """

    def __init__(
        self,
        call: Call,
        sending: Sending,
        decode: Callable[[bytes], SendCall],
        encoder: ResultEncoder,
        request_bytes_max: int,
        memory: str = "",
    ) -> None:
        self._context = call.context
        self._connection = call.connection
        self._told = limit_metadata(request_bytes_max) + (((MEMORY_KEY, memory),) if memory else ())
        self._sending = sending
        self._decode = decode
        self._encoder = encoder
        self._answers: deque[tuple[SendCall, Sequence[PutResult]]] = deque()
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._requests_pending = 0
        self._messages_pending = 0
        self._bytes_pending = 0
        self._ended = False
        self._left = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the client ends the stream or ``stop`` is set, and everything accepted is answered.

        Raises ``InvalidRequestError``, and after ``stop`` ``Refusal``, which refuses everything not accepted.
        """
        # Tells the client that the stream is established: earlier failures mean that nothing was sent.
        await self._context.send_initial_metadata(self._told)
        writer = asyncio.create_task(self._write_answers())
        reader = asyncio.create_task(self._read_requests())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((reader, writer, stopping), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            elif writer.done():  # no more results will be written, so waiting for room would never end
                await writer
                return
            else:  # nothing more is accepted from here on, so the refusal below applies to everything unanswered
                reader.cancel()
                await asyncio.wait((reader,))
            self._ended = True
            self._answer_ready.set()
            await writer
            if stop.is_set():
                raise Refusal.of(self._sending.refusal_when_stopping())
        finally:
            for task in (reader, writer, stopping):
                task.cancel()
            self._left = True
            while self._answers:
                self._drop_answer()

    async def _read_requests(self) -> None:
        while isinstance(data := await self._context.read(), bytes):
            request = self._decode(data)
            await self._sending.ensure_topics(request.caller, request.batch.messages)
            self._take(request)
            await self._wait_room(request.caller.quota)

    async def _wait_room(self, quota: Quota) -> None:
        while True:
            if quota.is_full:  # other streams of the same client count, too
                await quota.wait_room(self._room)
            elif self._is_full or self._sending.is_full:
                await self._sending.wait_room(self._room)
            else:
                return

    @property
    def _is_full(self) -> bool:
        return (
            self._requests_pending >= STREAM_REQUESTS_PENDING_MAX
            or self._messages_pending >= STREAM_MESSAGES_PENDING_MAX
            or self._bytes_pending >= STREAM_BYTES_PENDING_MAX
        )

    def _take(self, request: SendCall) -> None:
        self._requests_pending += 1
        self._messages_pending += len(request.batch.messages)
        self._bytes_pending += request.batch.size
        self._sending.submit(request.caller, request.batch._replace(has_room=True), partial(self._on_done, request))

    def _on_done(self, request: SendCall, results: Sequence[PutResult]) -> None:
        if self._left:
            return
        request.caller.quota.take(len(request.batch.messages), 0)  # until the client has read the result
        self._answers.append((request, results))
        self._answer_ready.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                request, results = self._answers[0]
                answer = self._encoder.encode(request.request_id, results, packed=request.packed)
                with self._connection.writing():
                    await self._context.write(answer)
                # Only now: a client that reads no results must not fill the memory with them.
                self._drop_answer()
                self._requests_pending -= 1
                self._messages_pending -= len(request.batch.messages)
                self._bytes_pending -= request.batch.size
                self._room.set()
            if self._ended and not self._requests_pending:
                return
            self._answer_ready.clear()
            await self._answer_ready.wait()

    def _drop_answer(self) -> None:
        request, _ = self._answers.popleft()
        request.caller.quota.give(len(request.batch.messages), 0)
