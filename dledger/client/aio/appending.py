"""The calls of a client that write: appends and commands, numbered and in batches. On the loop.

Kept apart so that a program which only asks or reads does not load them.

Appends go over a stream to the leader, opened again when that changes: over a node's connection, in order; each gets an
answer, or the reason why there is none.

Commands for a state machine are sent one request at a time. A producer's commands are applied in order, and a request
is repeated under the same numbers until it is answered, so each is applied once. Commands that are given while a
request is on its way go together in the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, overload

from dledger.client.aio.connections import Calls, NodeConnections, NodeLink
from dledger.client.shared import (
    REQUEST_BYTES_MAX,
    AppendResult,
    TimeLimit,
    is_retried,
    partly_appended,
    results_of,
    split,
)
from dledger.errors import (
    DLedgerError,
    EmptyBatchError,
    EntryTooLargeError,
    InvalidRequestError,
    PendingFullError,
    RequestTimeoutError,
    ResultForgottenError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.remoting import log_codec
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.remoting.log_codec import LogCode, error_of
from dledger.rpc.clients import group_codec
from dledger.rpc.clients.codec import Append
from dledger.rpc.clients.group_codec import NUMBERED_COMMANDS_MAX, Commands
from dledger.sending.aio import AsyncLinks, AsyncSender, BatchStream, OnAnswer, OnEnd
from dledger.sending.batch import AllStored, OutgoingBatch, ProducerNumbering, WindowRules, new_producer_name
from dledger.sending.futures import AsyncSentItem, AsyncSentMany, wait_for_batch
from dledger.sending.window import Window, WindowOptions
from dledger.types import AppendedBatch, LogIndex, Position, ProducerBatch
from dledger.values import MIB

WAITING_MAX: Final = 1024
_WAITING_BYTES_MAX: Final = 8 * MIB


class _Waiting:
    """A command, and who waits for its result."""

    def __init__(self, command: bytes, deadline: TimeLimit, future: asyncio.Future[bytes]) -> None:
        self.command = command
        self.deadline = deadline
        self.future = future


class CommandSender:
    """One client's."""

    def __init__(self, connections: NodeConnections, calls: Calls, group: str) -> None:
        self._connections = connections
        self._calls = calls
        self._group = group
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._producer = new_producer_name()
        self._sequence = 0

    async def send(self, command: bytes, timeout_s: float) -> bytes:
        """The result of one command. Raises ``DLedgerError``."""
        if self._connections.is_closed:
            raise UnavailableError("the client is closed")
        if self._waiting and (len(self._waiting) >= WAITING_MAX or self._bytes + len(command) > _WAITING_BYTES_MAX):
            raise PendingFullError(f"{len(self._waiting)} commands already wait in this client: wait for their results")
        waiting = _Waiting(command, TimeLimit(timeout_s), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._bytes += len(command)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.future
        except TimeoutError:
            error = RequestTimeoutError(f"no result within {timeout_s:g} s: the command may be applied")
            if waiting in self._waiting:  # it was never sent
                self._waiting.remove(waiting)
                self._bytes -= len(command)
                error.outcome = "not_applied"
            raise error from None

    async def close(self) -> None:
        """Unanswered commands fail, with an unknown outcome if they were sent."""
        while taken := self._taken(len(self._waiting)):  # as much as one request holds
            for one in taken:
                _fail(one, UnavailableError("the client was closed before the command was sent"))
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait((self._sending,))

    def _taken(self, count_max: int) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and len(taken) < count_max:
            size += len(self._waiting[0].command)
            if taken and size > REQUEST_BYTES_MAX:
                break
            one = self._waiting.popleft()
            self._bytes -= len(one.command)
            if not one.future.done():  # its caller may have been cancelled
                taken.append(one)
        return taken

    async def _send_all(self) -> None:
        try:
            while batch := self._taken(NUMBERED_COMMANDS_MAX):
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            results = await self._results(batch)
        except DLedgerError as error:
            if error.outcome == "unknown":  # these numbers may be used
                self._begin_anew()
            for one in batch:
                _fail(one, error)
        except asyncio.CancelledError:
            for one in batch:
                _fail(one, RequestTimeoutError("the client was closed: the command may be applied"))
            raise
        else:
            self._sequence += len(batch)
            for one, result in zip(batch, results, strict=True):
                if not one.future.done():
                    one.future.set_result(result)

    async def _results(self, batch: list[_Waiting]) -> tuple[bytes, ...]:
        deadline = max((one.deadline for one in batch), key=lambda one: one.remaining_s)
        commands = [one.command for one in batch]
        try:
            return await self._asked(commands, deadline)
        except UnknownProducerError as error:
            if error.outcome == "unknown":
                raise
        self._begin_anew()  # it was idle for so long that it was forgotten
        return await self._asked(commands, deadline)

    async def _asked(self, commands: list[bytes], deadline: TimeLimit) -> tuple[bytes, ...]:
        """Ask until there is an answer. The last error is about the last attempt, which may not have come as far as an
        earlier one: the outcome is unknown if that of any attempt is.
        """
        may_be_applied = False
        producer = ProducerBatch(self._producer, self._sequence)
        request = group_codec.encode_commands(Commands(self._group, commands, producer))

        async def ask(address: str, until: TimeLimit) -> tuple[bytes, ...]:
            nonlocal may_be_applied
            try:
                answer = await self._connections.call(address, LogCode.COMMAND, request, until, changes=True)
                return group_codec.decode_results(answer)
            except ResultForgottenError:
                raise
            except DLedgerError as error:
                if error.outcome == "unknown":  # repeated under the same numbers, it is applied once
                    may_be_applied = True
                    raise RequestTimeoutError(str(error)) from error
                raise

        try:
            return await self._calls.at_leader(ask, deadline)
        except DLedgerError as error:
            if may_be_applied:
                error.outcome = "unknown"
            raise

    def _begin_anew(self) -> None:
        self._producer, self._sequence = new_producer_name(), 0


def _fail(one: _Waiting, error: DLedgerError) -> None:
    if not one.future.done():
        one.future.set_exception(error)


AppendBatch = OutgoingBatch[None, AppendResult]
INFLIGHT_REQUESTS_MAX: Final = 32
"""Requests in flight at once: a leader remembers the places of as many, in case they are repeated."""
_DIRECT_APPENDS: Final = WindowOptions(
    linger_ms=0.0, batch_bytes=MIB, pending_bytes_max=64 * MIB, inflight_requests_max=INFLIGHT_REQUESTS_MAX
)
"""For the calls that append and wait. Concurrent appends of many threads share a request."""
APPEND_RULES: Final[WindowRules[None, AppendResult]] = WindowRules(
    is_retried=is_retried,
    bad_answer=InvalidRequestError,
    is_final=lambda error: isinstance(error, InvalidRequestError),
)
_STREAM_MASK: Final = (1 << 32) - 1


class _AppendStreams:
    """Opens streams; each has a number of its own on its connection, so that the node tells them apart."""

    def __init__(self, connections: NodeConnections, group: str) -> None:
        self._connections = connections
        self._group = group
        self._make_frame = connections.frame_maker(LogCode.APPEND)
        self._number = 0

    async def open(
        self,
        address: str,
        deadline: TimeLimit,
        on_answer: OnAnswer[None, AppendResult],
        on_end: OnEnd[None, AppendResult],
    ) -> PipelinedAppends:
        """Raises what ``NodeConnections.link`` does."""
        link = await self._connections.link(address, deadline)
        self._number = self._number % _STREAM_MASK + 1  # 0 is no stream
        return PipelinedAppends(self, link, self._number, on_answer, on_end)

    def frame(self, opaque: int, body: bytes) -> bytes:
        """The request with this body."""
        return self._make_frame(opaque, body)

    def body(self, stream: int, batch: AppendBatch) -> bytes:
        """The body for the ``sent`` items of a batch. Unnumbered ones are ordered: the node itself refuses to store one
        that follows a refused one.
        """
        payloads = batch.payloads
        bodies = payloads if len(batch.sent) == len(payloads) else [payloads[place] for place in batch.sent]
        producer = ProducerBatch(batch.producer, batch.sequence, len(bodies)) if batch.producer else None
        number = log_codec.UNORDERED if producer else stream
        return log_codec.encode_append(number, Append(self._group, bodies, producer=producer))


class PipelinedAppends:
    """A ``BatchStream`` that ends with its connection, or by ``close``, which leaves the connection to others."""

    def __init__(
        self,
        streams: _AppendStreams,
        link: NodeLink,
        number: int,
        on_answer: OnAnswer[None, AppendResult],
        on_end: OnEnd[None, AppendResult],
    ) -> None:
        self.address = link.address
        self.server_memory = ""
        self.broken: DLedgerError | None = None
        self.request_bytes_max = link.request_bytes_max
        self._streams = streams
        self._connection = link.connection
        self._number = number
        self._on_answer = on_answer
        self._on_end = on_end
        self._pending: dict[AppendBatch, None] = {}  # in order

    def submit(self, batch: AppendBatch) -> DLedgerError | None:
        if self.broken is not None:
            return UnavailableError(f"the stream to {self.address} is closed: {self.broken}")
        self._pending[batch] = None  # first: the connection may end while this is sent
        refusal: DLedgerError
        try:
            self._connection.submit(partial(self._frame, batch), partial(self._answered, batch))
        except DLedgerError as error:
            refusal = error
        except DisconnectedError as error:
            refusal = UnavailableError(str(error))
        except TooManyCallsError as error:
            refusal = PendingFullError(str(error))
        except (TypeError, ValueError) as error:  # a payload that is none
            refusal = InvalidRequestError(f"cannot send it: {error}")
        else:
            return None
        del self._pending[batch]
        return refusal

    async def close(self, why: str = "") -> None:
        self._fail(UnavailableError(why or "the stream was closed"))

    def _frame(self, batch: AppendBatch, opaque: int) -> bytes:
        body = self._streams.body(self._number, batch)
        if len(body) > self.request_bytes_max:
            why = f"the request has {len(body)} bytes, and {self.address} takes at most {self.request_bytes_max}"
            raise too_large(why)
        return self._streams.frame(opaque, body)

    def _answered(self, batch: AppendBatch, answer: Frame | DisconnectedError) -> None:
        if batch not in self._pending:
            return  # given up
        if isinstance(answer, DisconnectedError):
            self._fail(RequestTimeoutError(str(answer)))
            return
        del self._pending[batch]
        outcome: AllStored[AppendResult] | DLedgerError
        if answer.code:
            outcome = error_of(answer, self.address)
        else:
            try:
                appended = log_codec.decode_appended(answer.body)
            except DLedgerError as error:
                error.outcome = "unknown"
                self._on_answer(self, batch, error)
                self._fail(error)
                return
            outcome = AllStored(results_of(appended) if appended.duplicates else AppendedResults(appended))
        self._on_answer(self, batch, outcome)

    def _fail(self, why: DLedgerError) -> None:
        """All that is pending may be stored."""
        if self.broken is not None:
            return
        self.broken = why
        pending, self._pending = self._pending, {}
        for batch in pending:
            lost = RequestTimeoutError(f"the stream to {self.address} ended before the answer arrived: {why}")
            self._on_answer(self, batch, lost)
        self._on_end(self)


class AppendedResults(Sequence[AppendResult]):
    """One result per entry of a batch, built when read."""

    __slots__ = ("_batch",)

    def __init__(self, batch: AppendedBatch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch.positions)

    @overload
    def __getitem__(self, place: int) -> AppendResult: ...
    @overload
    def __getitem__(self, place: slice) -> list[AppendResult]: ...
    def __getitem__(self, place: int | slice) -> AppendResult | list[AppendResult]:
        batch = self._batch
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        return AppendResult(LogIndex(batch.first_index + place), batch.term, Position(batch.positions[place]))

    def __iter__(self) -> Iterator[AppendResult]:
        return iter(results_of(self._batch))


def too_large(why: str) -> EntryTooLargeError:
    """The error for a batch too large for one request."""
    return EntryTooLargeError(f"{why}: append smaller entries, or raise max_entry_bytes on every node")


_LINGER_MS: Final = 2.0
"""How long ``submit`` waits for more entries to go in one request."""
_SUBMITTED: Final = WindowOptions(
    linger_ms=_LINGER_MS, batch_bytes=MIB // 2, inflight_requests_max=INFLIGHT_REQUESTS_MAX
)


class Appending:
    """One client's; ``DLedgerClient`` says what the calls do and raise."""

    def __init__(
        self, connections: NodeConnections, calls: Calls, group: str, *, timeout_s: float, idempotent: bool
    ) -> None:
        self._connections = connections
        self._calls = calls
        self._group = group
        self._timeout_s = timeout_s
        self._idempotent = idempotent
        self._streams = _AppendStreams(connections, group)
        self._links = AsyncLinks(self._open_stream, calls.seeker.look, calls.directory.note_failure)
        self._direct: AsyncSender[None, AppendResult] | None = None
        self._submitting: AsyncSender[None, AppendResult] | None = None

    async def append(self, body: bytes, timeout_s: float) -> AppendResult:
        batch, place = await self._direct_sender().add(body, timeout_s=timeout_s)
        await wait_for_batch(batch)
        return AsyncSentItem(batch, place).result()

    async def append_many(self, bodies: Sequence[bytes], deadline: TimeLimit) -> list[AppendResult]:
        """Entries in order, in consecutive requests."""
        return await self._append_parts(self._direct_sender(), bodies, deadline)

    async def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], deadline: TimeLimit
    ) -> list[AppendResult]:
        """Entries under a producer name of the caller's own, numbered from ``sequence``."""
        sender = self._sender(_DIRECT_APPENDS, ProducerNumbering(producer))
        try:
            return await self._append_parts(sender, bodies, deadline, sequence)
        finally:  # a cancelled caller does not wait for the deadline of what is in flight
            await sender.abandon(UnavailableError("cancelled: nobody is waiting for it"))

    async def submit(self, body: bytes) -> AsyncSentItem[AppendResult]:
        return AsyncSentItem(*await self._submitting_sender().add(body))

    async def submit_many(self, bodies: Sequence[bytes]) -> AsyncSentMany[AppendResult]:
        return AsyncSentMany(await self._submitting_sender().add_many(bodies))

    async def flush(self) -> None:
        """Return when everything submitted so far has an outcome."""
        if self._submitting is not None:
            await self._submitting.flush()

    def begin(self, body: bytes, timeout_s: float) -> tuple[AppendBatch, int] | None:
        """The batch of an entry and its place in it; None if too much is pending."""
        return self._direct_sender().add_now(body, timeout_s=timeout_s)

    def begin_submit_many(self, bodies: Sequence[bytes], start: int) -> Iterator[tuple[AppendBatch, int, int]]:
        """Queue entries from ``start`` on as far as there is room."""
        return self._submitting_sender().add_some_now(bodies, start)

    def when_room(self, callback: Callable[[], object]) -> None:
        """Call it once ``begin_submit_many`` may go on."""
        self._submitting_sender().when_room(callback)

    async def finish_submitted(self) -> None:
        """Return when everything submitted has an outcome, and take nothing more. Idempotent."""
        if self._submitting is not None:
            await self._submitting.close()

    async def abandon(self) -> None:
        """End; appends in progress fail, as unknown if they may be stored. Idempotent."""
        closed = UnavailableError("the client is closed")
        for sender in (self._direct, self._submitting):
            if sender is not None:
                await sender.abandon(closed)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _direct_sender(self) -> AsyncSender[None, AppendResult]:
        if self._direct is None:
            self._direct = self._sender(_DIRECT_APPENDS, ProducerNumbering() if self._idempotent else None)
        return self._direct

    def _submitting_sender(self) -> AsyncSender[None, AppendResult]:
        if self._submitting is None:
            self._submitting = self._sender(_SUBMITTED, ProducerNumbering() if self._idempotent else None)
        return self._submitting

    def _sender(self, options: WindowOptions, numbering: ProducerNumbering | None) -> AsyncSender[None, AppendResult]:
        if self._connections.is_closed:
            raise UnavailableError("the client is closed")
        window = Window(replace(options, timeout_ms=self._timeout_s * 1000.0), APPEND_RULES, numbering)
        return AsyncSender(self._links, window, "dledger-appends")

    async def _append_parts(
        self,
        sender: AsyncSender[None, AppendResult],
        bodies: Sequence[bytes],
        deadline: TimeLimit,
        sequence: int | None = None,
    ) -> list[AppendResult]:
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        await self._check_sizes(bodies, deadline)
        results: list[AppendResult] = []
        for part in split(bodies):
            number = None if sequence is None else sequence + len(results)
            try:
                batch = await sender.add_whole(part, sequence=number, timeout_s=deadline.remaining_s)
                await wait_for_batch(batch)
                results += [AsyncSentItem(batch, place).result() for place in range(len(part))]
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    async def _check_sizes(self, bodies: Sequence[bytes], deadline: TimeLimit) -> None:
        """Refuse a body too large for any request before the parts in front of it are stored."""
        largest = max(map(len, bodies))
        if len(bodies) == 1 or largest <= REQUEST_BYTES_MAX:  # which every node takes
            return

        async def ask(address: str, until: TimeLimit) -> NodeLink:
            return await self._connections.link(address, until)

        link = await self._calls.at_leader(ask, deadline)
        fits = link.request_bytes_max - len(log_codec.encode_append(0, Append(self._group, [b""])))
        if largest > fits:
            raise too_large(f"an entry has {largest} bytes, and {link.address} takes at most {fits} in a request")

    async def _open_stream(
        self, timeout_s: float, on_answer: OnAnswer[None, AppendResult], on_end: OnEnd[None, AppendResult]
    ) -> BatchStream[None, AppendResult]:
        deadline = TimeLimit(timeout_s)

        async def attempt() -> BatchStream[None, AppendResult]:
            address = await self._calls.seeker.leader(deadline)
            try:
                return await self._streams.open(address, deadline, on_answer, on_end)
            except DLedgerError as error:
                self._calls.directory.note_failure(address, error)
                raise

        return await self._calls.repeated(attempt, deadline, changes=True)
