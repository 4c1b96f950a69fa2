"""``stream`` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic

import grpc

from dledger.errors import DLedgerError, UnavailableError
from dledger.sending.batch import Answer, ItemT, OutgoingBatch, ResultT
from dledger.sending.stream import LAST_WORD_S, Request, Wire


def is_being_cancelled() -> bool:
    """Whether the current task is; otherwise gRPC raises ``CancelledError`` for a channel closed meanwhile."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncStream(Generic[ItemT, ResultT]):
    """``Stream`` on the event loop. ``open`` it before submitting."""

    def __init__(
        self,
        open_call: Callable[[AsyncIterator[bytes]], grpc.aio.StreamStreamCall[bytes, bytes]],
        address: str,
        wire: Wire[ItemT, ResultT],
        on_answer: Callable[[AsyncStream[ItemT, ResultT], OutgoingBatch[ItemT, ResultT], Answer[ResultT]], None],
        on_end: Callable[[AsyncStream[ItemT, ResultT]], None],
    ) -> None:
        self.address = address
        self.server_memory = ""
        self.request_bytes_max: int | None = None
        self.broken: DLedgerError | None = None
        self._wire = wire
        self._on_answer = on_answer
        self._on_end = on_end
        self._pending: dict[int, Request[ItemT, ResultT]] = {}
        self._next_number = 0
        self._handed = 0  # the last request passed to gRPC
        self._closed_because = ""
        self._requests: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._call = open_call(self._outgoing())
        self._reader: asyncio.Task[None] | None = None

    async def open(self, timeout_s: float) -> None:
        """Wait for the server to accept the stream. Raises ``UnavailableError`` (not applied)."""
        try:
            async with asyncio.timeout(timeout_s):
                told = await self._call.initial_metadata()
                await self._call.wait_for_connection()
        except TimeoutError:
            self._call.cancel()
            raise UnavailableError(f"{self.address} did not accept a stream within {timeout_s:g} s") from None
        except grpc.RpcError as error:
            raise self._wire.failure_of(error, self.address, False) from error
        except BaseException as error:  # cancelled, most likely: nothing else would end the call
            self._call.cancel()
            if isinstance(error, asyncio.CancelledError) and not is_being_cancelled():
                raise UnavailableError(f"the connection to {self.address} was closed") from error
            raise
        self.server_memory = self._wire.server_memory(told)
        self.request_bytes_max = self._wire.request_bytes_max(told)
        self._reader = asyncio.create_task(self._read())

    def submit(self, batch: OutgoingBatch[ItemT, ResultT]) -> DLedgerError | None:
        """Send the ``sent`` items of a batch; returns why they were not sent (not applied), if they were not."""
        if self.broken is not None:
            return UnavailableError(f"the stream to {self.address} is closed: {self.broken}")
        number = self._next_number + 1
        request = self._wire.encoded(batch, number, self.address, self.request_bytes_max)
        if isinstance(request, DLedgerError):
            return request
        self._next_number = number
        self._pending[number] = Request(batch, len(request))
        self._requests.put_nowait((number, request))
        return None

    async def close(self, why: str = "") -> None:
        """End the stream; every pending batch gets its outcome, with ``why``, before this returns."""
        self._closed_because = self._closed_because or why
        self._call.cancel()
        if self._reader is not None:
            _, silent = await asyncio.wait((self._reader,), timeout=LAST_WORD_S)
            if silent:
                self._reader.cancel()
                await asyncio.wait((self._reader,))

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while (item := await self._requests.get()) is not None:
            number, request = item
            if self.broken is not None:
                return  # already reported as not sent
            self._handed = number
            yield request

    async def _read(self) -> None:
        failure: DLedgerError = UnavailableError(f"{self.address} ended the stream")
        try:
            async for data in self._call:
                number, answer = self._wire.decode(data, self.address)
                request = self._pending.pop(number, None)
                if request is None:
                    raise self._wire.bad_answer(f"{self.address} answered request {number}, which is not pending")
                self._on_answer(self, request.batch, answer)
        except grpc.RpcError as error:
            failure = self._wire.failure_of(error, self.address, False)
        except asyncio.CancelledError:  # the call's: our own close
            failure = UnavailableError(self._closed_because or "the stream was closed")
        except DLedgerError as error:  # malformed
            failure, failure.outcome = error, "unknown"
        finally:
            self._fail(failure)

    def _fail(self, failure: DLedgerError) -> None:
        self.broken = failure
        self._call.cancel()
        self._requests.put_nowait(None)  # otherwise gRPC's task would wait for requests for ever
        pending, self._pending = self._pending, {}
        for batch, outcome in self._wire.outcomes_of(failure, self.address, pending, self._handed):
            self._on_answer(self, batch, outcome)
        self._on_end(self)
