"""Single appends of the client for asyncio: see ``dledger.client.appends``, of which this is the other half."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc

from dledger.client.lanes import Lane, LanePool, Ticket
from dledger.client.pipe import Outcome
from dledger.client.shared import (
    LOOK_AFTER_S,
    LOOK_AGAIN_S,
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    Deadline,
    Directory,
    is_retried,
    rpc_failure,
)
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.rpc import client_codec as codec
from dledger.rpc import options
from dledger.types import AppendedBatch, ProducerBatch


@dataclass(frozen=True, slots=True)
class AsyncLinks:
    """What appends need of the client that they belong to."""

    group: str
    directory: Directory
    channel: Callable[[str], grpc.aio.Channel]
    leader: Callable[[Deadline], Awaitable[str]]
    retry: Callable[..., Awaitable[Any]]  # Any: gives what the attempt that it is given gives
    is_led_by_another: Callable[[str], Awaitable[bool]]


class AsyncAppends:
    """The appending half of ``AsyncDLedgerClient``. Lives on one event loop."""

    def __init__(self, links: AsyncLinks, lanes: LanePool | None) -> None:
        self._links = links
        self._lanes = lanes
        self._pipes: dict[str, AsyncPipe] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._turns: dict[Lane, dict[Ticket, asyncio.Future[None]]] = {}
        self._closed = False

    async def close(self) -> None:
        """End all streams; what is under way becomes unknown."""
        self._closed = True
        pipes, self._pipes = self._pipes, {}
        for pipe in pipes.values():
            await pipe.close()

    # --- one append, until it is stored or its time is over ---------------------------------------------------------

    async def append(self, bodies: Sequence[bytes], deadline: Deadline) -> AppendedBatch:
        """Append a batch, all or nothing, once."""
        lanes = self._lanes
        if lanes is None:
            once: AppendedBatch = await self._links.retry(deadline, lambda: self._attempt(bodies, deadline))
            return once
        ticket = Ticket(len(bodies))
        number = partial(_number, lanes, ticket)
        try:
            try:
                batch = await self._attempt(bodies, deadline, number)
            except DLedgerError as error:
                batch = await self._append_again(lanes, ticket, bodies, deadline, error)
        except BaseException:
            if ticket.lane is not None:  # the caller was cancelled: nobody must wait for this append any more
                ticket.uncertain = True
                lanes.give_up(ticket, None)
            self._wake()
            raise
        if lanes.settle(ticket):
            self._wake()
        return batch

    async def _append_again(
        self, lanes: LanePool, ticket: Ticket, bodies: Sequence[bytes], deadline: Deadline, error: DLedgerError
    ) -> AppendedBatch:
        """As ``Appends._append_again``."""
        directory, number = self._links.directory, partial(_number, lanes, ticket)
        pause_s, hinted = RETRY_WAIT_S_MIN, False
        while True:
            final = lanes.judge(ticket, error)
            if final is None and (self._closed or deadline.remaining_s < RETRY_WAIT_S_MIN):
                final = lanes.give_up(ticket, error)
            self._wake()
            if final is not None:
                raise final from error
            hinted = not hinted and error.leader is not None and directory.leader is not None
            if not hinted:
                await asyncio.sleep(min(pause_s * random.uniform(1, 1.5), deadline.remaining_s / 2))
                pause_s = min(2 * pause_s, RETRY_WAIT_S_MAX)
            try:
                await self._await_turn(lanes, ticket, deadline)
                return await self._attempt(bodies, deadline, number)
            except DLedgerError as again:
                error = again

    async def _await_turn(self, lanes: LanePool, ticket: Ticket, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                while not lanes.is_first(ticket) and ticket.lane is not None:
                    await self._turn(ticket.lane, ticket)
        except TimeoutError:
            message = f"earlier appends were still under way after {deadline.timeout_s} s"
            raise UnavailableError(message) from None

    async def _turn(self, lane: Lane, ticket: Ticket) -> None:
        turns = self._turns.setdefault(lane, {})
        turn = turns[ticket] = asyncio.get_running_loop().create_future()
        try:
            await turn
        finally:
            del turns[ticket]
            if not turns:
                del self._turns[lane]

    def _wake(self) -> None:
        """Of each lane the first: thousands may wait behind it, and each is woken once."""
        for lane, turns in self._turns.items():
            turn = turns.get(next(iter(lane.tickets.values())))  # who waits is in it
            if turn is not None and not turn.done():
                turn.set_result(None)

    async def append_as(self, batch: ProducerBatch, bodies: Sequence[bytes], deadline: Deadline) -> AppendedBatch:
        """Append as a producer that the caller has named and numbered."""
        uncertain = False

        def retried(error: BaseException) -> bool:
            nonlocal uncertain
            unknown = isinstance(error, DLedgerError) and error.outcome == "unknown"
            uncertain = uncertain or unknown
            return is_retried(error) or unknown

        try:
            stored: AppendedBatch = await self._links.retry(
                deadline, lambda: self._attempt(bodies, deadline, lambda _pipe: batch), retried
            )
        except DLedgerError as error:
            if uncertain:
                error.outcome = "unknown"
            raise
        return stored

    async def _attempt(
        self,
        bodies: Sequence[bytes],
        deadline: Deadline,
        number: Callable[[AsyncPipe], ProducerBatch | None] | None = None,
    ) -> AppendedBatch:
        links = self._links
        address = await links.leader(deadline)
        try:
            pipe = await self._pipe(address, deadline)
            return await pipe.append(bodies, deadline, None if number is None else partial(number, pipe))
        except DLedgerError as error:
            links.directory.note_failure(address, error)
            raise

    # --- streams ----------------------------------------------------------------------------------------------------

    async def _pipe(self, address: str, deadline: Deadline) -> AsyncPipe:
        pipe = self._pipes.get(address)
        if pipe is not None and pipe.broken is None:
            return pipe
        async with self._opening.setdefault(address, asyncio.Lock()):
            pipe = self._pipes.get(address)
            if pipe is None or pipe.broken is not None:
                if pipe is not None:
                    await pipe.close()
                    if self._lanes is not None:
                        self._lanes.close(pipe.lane)
                pipe = AsyncPipe(self._links, address, look=self._lanes is not None)
                await pipe.open(deadline)
                if self._closed:
                    await pipe.close()
                    raise UnavailableError("the client is closed")
                self._pipes[address] = pipe
            return pipe


def _number(lanes: LanePool, ticket: Ticket, pipe: AsyncPipe) -> ProducerBatch | None:
    """What an append is sent as: what it was sent as before, or the next of its stream; None: without number."""
    if ticket.lane is None:
        pipe.lane = lanes.enter(ticket, pipe.lane)
    return ticket.producer


class Pending(NamedTuple):
    """An append whose answer is awaited."""

    answer: asyncio.Future[Outcome]
    overdue_at: float
    """As ``time.monotonic`` tells."""


class AsyncPipe:
    """As ``AppendPipe``, on the loop.

    ``look``: while answers are overdue it is asked, for all of them together, whether another node leads by now; if so,
    they are waited for no longer, and their outcome is unknown.
    """

    def __init__(self, links: AsyncLinks, address: str, *, look: bool) -> None:
        self.broken: DLedgerError | None = None
        self.lane: Lane | None = None
        """For whoever sends with it: from where its appends have their numbers."""
        self._links = links
        self._address = address
        self._look = look
        self._looking: asyncio.Task[None] | None = None
        self._pending: dict[int, Pending] = {}
        self._next_id = 0
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = links.channel(address).stream_stream(
            options.method(options.LOG_SERVICE, "AppendStream"), request_serializer=None, response_deserializer=None
        )
        self._call = stream(self._iterate())
        self._reader: asyncio.Task[None] | None = None

    async def open(self, deadline: Deadline) -> None:
        """Wait for the server to accept the stream. Raises ``UnavailableError`` (not applied)."""
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await self._call.wait_for_connection()
        except TimeoutError:
            self._call.cancel()
            message = f"{self._address} did not accept a stream within {deadline.timeout_s} s"
            raise UnavailableError(message) from None
        except grpc.RpcError as error:
            raise rpc_failure(error, self._address, sent=False) from error
        self._reader = asyncio.create_task(self._read())

    async def append(
        self,
        bodies: Sequence[bytes],
        deadline: Deadline,
        producer: Callable[[], ProducerBatch | None] | None = None,
    ) -> AppendedBatch:
        """As ``AppendPipe.append``."""
        if self.broken is not None:
            raise UnavailableError(f"the stream to {self._address} is closed: {self.broken}")
        if deadline.expired:
            raise UnavailableError(f"no time was left to ask {self._address}: {deadline.timeout_s} s are over")
        self._next_id += 1
        request_id = self._next_id
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = Pending(answer, time.monotonic() + LOOK_AFTER_S)
        numbered = None if producer is None else producer()
        request = codec.Append(self._links.group, bodies, request_id, producer=numbered)
        self._requests.put_nowait(codec.encode_append(request))
        if self._look and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_for_another())
        try:
            async with asyncio.timeout(deadline.remaining_s):
                outcome = await answer
        except TimeoutError:
            raise RequestTimeoutError(f"no answer of {self._address} within {deadline.timeout_s} s") from None
        finally:
            self._pending.pop(request_id, None)
        if isinstance(outcome, DLedgerError):
            raise outcome
        return outcome

    async def _look_for_another(self) -> None:
        """Until nothing is pending."""
        while self._pending:
            wait_s = next(iter(self._pending.values())).overdue_at - time.monotonic()
            if wait_s <= 0:
                if await self._links.is_led_by_another(self._address):
                    self._give_up_overdue()
                wait_s = LOOK_AGAIN_S
            await asyncio.sleep(wait_s)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for pending in self._pending.values():
            if pending.overdue_at <= now and not pending.answer.done():
                pending.answer.set_result(
                    RequestTimeoutError(f"no answer of {self._address}, and another node leads by now")
                )

    async def close(self) -> None:
        """End the stream; what still waits gets an unknown outcome."""
        self._call.cancel()
        if self._reader is not None:
            await self._reader

    async def _iterate(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._requests.get()

    async def _read(self) -> None:
        failure: DLedgerError = RequestTimeoutError(f"{self._address} ended the stream before the answer came")
        try:
            async for data in self._call:
                request_id, outcome = codec.decode_appended(data)
                pending = self._pending.get(request_id)
                if pending is not None and not pending.answer.done():
                    pending.answer.set_result(outcome)
        except grpc.RpcError as error:
            failure = rpc_failure(error, self._address, sent=True)
        except asyncio.CancelledError:  # our own close
            failure = RequestTimeoutError(f"the stream to {self._address} was closed before the answer came")
        except DLedgerError as error:  # garbage
            failure = error
        finally:
            self._fail(failure)

    def _fail(self, failure: DLedgerError) -> None:
        self.broken = failure
        self._call.cancel()
        if self._looking is not None:
            self._looking.cancel()
        if failure.outcome == "not_applied":
            failure = RequestTimeoutError(f"the stream to {self._address} ended before the answer came: {failure}")
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_result(failure)
