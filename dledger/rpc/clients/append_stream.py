"""One client's ``AppendStream``: submits requests as they arrive and writes answers as they complete."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc

from dledger.access.guard import Caller
from dledger.access.quota import Quota
from dledger.errors import DLedgerError, EarlierRequestFailedError
from dledger.records import record
from dledger.rpc import options
from dledger.rpc.bridge import LoopBridge
from dledger.rpc.clients import codec
from dledger.rpc.clients.answers import SMALL_BYTES, AnswerRoom, Leases
from dledger.rpc.clients.connections import Connection
from dledger.rpc.clients.log_requests import AppendOutcome
from dledger.values import MIB

REQUESTS_PENDING_MAX: Final = 1024
"""The limit of a stream's requests waiting for a quorum; beyond it the stream is not read, which slows the client."""
BYTES_PENDING_MAX: Final = 16 * MIB

Submit = Callable[[codec.Append, Callable[[AppendOutcome], None]], None]


class AppendStream:
    """Lives on the loop; ``submit`` checks a request and passes it to the node."""

    def __init__(
        self,
        call: Call,
        bridge: LoopBridge,
        submit: Submit,
        on_refusal: Callable[[DLedgerError], None],
        request_bytes_max: int,
    ) -> None:
        """``on_refusal`` is called for every failed append."""
        self._context = call.context
        self._quota = call.quota
        self._connection = call.connection
        self._on_refusal = on_refusal
        self._bridge = bridge
        self._submit = submit
        self._request_bytes_max = request_bytes_max
        self._answers: deque[tuple[bytes, int, int]] = deque()  # encoded answer, and its request's entries and bytes
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._requests_pending = 0
        self._bytes_pending = 0
        self._ended = False
        self._left = False
        self._failed = False

    async def run(self) -> None:
        """Serve until the client ends the stream and every request is answered. Raises ``InvalidRequestError``."""
        # Tells the client that the stream is accepted: requests that fail before that were certainly not sent.
        await self._context.send_initial_metadata(options.limit_metadata(self._request_bytes_max))
        writer = asyncio.create_task(self._write_answers())
        reader = asyncio.create_task(self._read_requests())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():  # no answers are written any more, so a reader waiting for room would never get any
                reader.cancel()
                await writer
                return
            reader.result()
            self._ended = True
            self._answer_ready.set()
            await writer
        finally:
            reader.cancel()
            writer.cancel()
            self._left = True
            while self._answers:
                _, entries, size = self._answers.popleft()
                self._quota.give(entries, size)

    async def _read_requests(self) -> None:
        while isinstance(data := await self._context.read(), bytes):
            self._take(codec.decode_append(data), len(data))
            while self._requests_pending >= REQUESTS_PENDING_MAX or self._bytes_pending >= BYTES_PENDING_MAX:
                self._room.clear()
                await self._room.wait()
            while self._quota.is_full:  # including the client's other streams
                await self._quota.wait_room(self._room)

    def _take(self, request: codec.Append, size: int) -> None:
        self._requests_pending += 1
        self._bytes_pending += size
        request_id, entries = request.request_id, len(request.bodies)
        self._quota.take(entries, size)

        done = partial(self._answered, request_id, entries, size)
        if request.ordered and self._failed:
            done(EarlierRequestFailedError("an earlier append of this stream failed: open a new stream"))
        else:
            self._submit(request, done)

    def _answered(self, request_id: int, entries: int, size: int, outcome: AppendOutcome) -> None:  # on any thread
        self._bridge.post(partial(self._on_done, request_id, entries, size, outcome))

    def _on_done(self, request_id: int, entries: int, size: int, outcome: AppendOutcome) -> None:
        if isinstance(outcome, DLedgerError):
            self._failed = True
            self._on_refusal(outcome)
        if self._left:
            self._quota.give(entries, size)
            return
        self._answers.append((codec.encode_appended(request_id, outcome), entries, size))
        self._answer_ready.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                answer, entries, size = self._answers[0]
                with self._connection.writing():
                    await self._context.write(answer)
                # Only now: a client that reads no answers must not fill the memory with them.
                self._answers.popleft()
                self._requests_pending -= 1
                self._bytes_pending -= size
                self._quota.give(entries, size)
                self._room.set()
            if self._ended and not self._requests_pending:
                return
            self._answer_ready.clear()
            await self._answer_ready.wait()


@record(frozen=True, slots=True)
class Call:
    """The context of a request, for its handler. ``caller`` is None without access control."""

    context: grpc.aio.ServicerContext[Any, Any]  # Any: of any messages
    connection: Connection
    quota: Quota
    caller: Caller | None
    room: AnswerRoom

    def leases(self) -> Leases:
        """Room for this call's answers, one at a time."""
        return Leases(self.room, self.quota, self.connection)

    def until_done(self, leases: Leases) -> Leases:
        """Keep the room of the call's only answer until gRPC has finished the call."""
        self.context.add_done_callback(lambda _: leases.end())  # type: ignore[arg-type]  # grpc-stubs: of their own type
        return leases

    def check_answer(self, size: int) -> None:
        """Take room for an answer made without it. Raises ``TooManyWaitsError``: the answer must then be dropped."""
        if size > SMALL_BYTES:
            self.until_done(self.leases()).take_now(size)
