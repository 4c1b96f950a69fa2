"""One client's ``AppendStream``: requests are submitted as they arrive, answers written as they complete."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import grpc

from dledger.access.quota import Quota
from dledger.config import MIB
from dledger.errors import DLedgerError, EarlierRequestFailedError
from dledger.rpc import client_codec as codec
from dledger.rpc.bridge import LoopBridge
from dledger.types import AppendedBatch

REQUESTS_PENDING_MAX: Final = 1024
"""Requests of one stream that may wait for a quorum; beyond it the stream is not read, which holds the client back."""
BYTES_PENDING_MAX: Final = 16 * MIB

AppendOutcome = AppendedBatch | DLedgerError
Submit = Callable[[codec.Append, Callable[[AppendOutcome], None]], None]
StreamContext = grpc.aio.ServicerContext[bytes, bytes]


class AppendStream:
    """Lives on the loop; ``submit`` checks a request and hands it to the node."""

    def __init__(self, context: StreamContext, bridge: LoopBridge, submit: Submit, quota: Quota | None = None) -> None:
        self._context = context
        self._quota = quota
        self._bridge = bridge
        self._submit = submit
        self._answers: deque[bytes] = deque()
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._requests_pending = 0
        self._bytes_pending = 0
        self._ended = False
        self._failed = False

    async def run(self) -> None:
        """Serve until the client ends the stream and everything is answered. Raises ``InvalidRequestError``."""
        # Tells the client that the stream is established: what fails before that was certainly not sent.
        await self._context.send_initial_metadata(())
        writer = asyncio.create_task(self._write_answers())
        try:
            await self._read_requests()
            self._ended = True
            self._answer_ready.set()
            await writer
        finally:
            writer.cancel()

    async def _read_requests(self) -> None:
        while isinstance(data := await self._context.read(), bytes):
            self._take(codec.decode_append(data), len(data))
            while self._requests_pending >= REQUESTS_PENDING_MAX or self._bytes_pending >= BYTES_PENDING_MAX:
                self._room.clear()
                await self._room.wait()
            if self._quota is not None:
                while self._quota.is_full:  # also through other streams of the same account
                    await self._quota.wait_room(self._room)

    def _take(self, request: codec.Append, size: int) -> None:
        self._requests_pending += 1
        self._bytes_pending += size
        request_id, entries = request.request_id, len(request.bodies)
        if self._quota is not None:
            self._quota.take(entries, size)

        def done(outcome: AppendOutcome) -> None:
            self._bridge.post(lambda: self._on_done(request_id, entries, size, outcome))

        if request.ordered and self._failed:
            done(EarlierRequestFailedError("an earlier append of this stream failed: open a new stream"))
        else:
            self._submit(request, done)

    def _on_done(self, request_id: int, entries: int, size: int, outcome: AppendOutcome) -> None:
        self._requests_pending -= 1
        self._bytes_pending -= size
        if self._quota is not None:
            self._quota.give(entries, size)
        if isinstance(outcome, DLedgerError):
            self._failed = True
        self._answers.append(codec.encode_appended(request_id, outcome))
        self._answer_ready.set()
        self._room.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                await self._context.write(self._answers.popleft())
            if self._ended and not self._requests_pending:
                return
            self._answer_ready.clear()
            await self._answer_ready.wait()
