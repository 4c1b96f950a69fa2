"""Carries a window on an event loop: the other half of ``threads`` and ``stream``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

from dledger.errors import DLedgerError, PendingFullError, UnavailableError
from dledger.records import record
from dledger.sending.batch import Answer, Batch, ItemT, ResultT, partly_added
from dledger.sending.futures import NO_OUTCOME, SentItem
from dledger.sending.stream import LAST_WORD_S, Wire
from dledger.sending.window import NEVER, Window, Wish

SelfT = TypeVar("SelfT", bound="AsyncSender[Any, Any]")


async def wait_for_batch(batch: Batch[Any, Any]) -> None:
    """Return when the batch is done; it has a deadline. To be awaited on the loop of its sender."""
    if not batch.done:
        waiting = asyncio.Event()
        batch.when_done(waiting.set)
        await waiting.wait()


class AsyncSentItem(SentItem[ResultT]):
    """The result of one item: to be awaited, or asked once ``done``."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, ResultT]:
        yield from wait_for_batch(self._batch).__await__()
        return self.result()

    def result(self, timeout: float | None = 0.0) -> ResultT:
        """Where it is; raises its error, or ``TimeoutError`` if it is not done: await it instead."""
        return super().result(timeout)

    def exception(self, timeout: float | None = 0.0) -> DLedgerError | None:
        """Its error, or None; raises ``TimeoutError`` if it is not done."""
        return super().exception(timeout)


class AsyncSentMany(Generic[ResultT]):
    """The results of many items that were given together: one thing to wait for, an answer for each on request."""

    __slots__ = ("_spans",)

    def __init__(self, spans: list[tuple[Batch[Any, ResultT], int, int]]) -> None:
        self._spans = spans  # batches, the place of the first item in each, and how many there are

    def __len__(self) -> int:
        return sum(count for _, _, count in self._spans)

    def done(self) -> bool:
        """Whether all of them are."""
        return all(batch.done for batch, _, _ in self._spans)

    async def outcomes(self) -> list[ResultT | DLedgerError]:
        """Where each is, or why it is not stored, in the order in which they were given."""
        found: list[ResultT | DLedgerError] = []
        for batch, place, count in self._spans:
            await wait_for_batch(batch)
            found += [NO_OUTCOME if one is None else one for one in batch.outcomes[place : place + count]]
        return found

    async def results(self) -> list[ResultT]:
        """Where each is; raises the first error among them."""
        found: list[ResultT] = []
        for outcome in await self.outcomes():
            if isinstance(outcome, DLedgerError):
                raise outcome
            found.append(outcome)
        return found


class AsyncStream(Generic[ItemT, ResultT]):
    """As ``Stream``, on the loop. ``open`` it before anything is submitted."""

    def __init__(
        self,
        open_call: Callable[[AsyncIterator[bytes]], grpc.aio.StreamStreamCall[bytes, bytes]],
        address: str,
        wire: Wire[ItemT, ResultT],
        on_answer: Callable[[AsyncStream[ItemT, ResultT], Batch[ItemT, ResultT], Answer[ResultT]], None],
        on_end: Callable[[AsyncStream[ItemT, ResultT]], None],
    ) -> None:
        self.address = address
        self.server_memory = ""
        self.broken: DLedgerError | None = None
        self._wire = wire
        self._on_answer = on_answer
        self._on_end = on_end
        self._pending: dict[int, Batch[ItemT, ResultT]] = {}
        self._next_number = 0
        self._handed = 0  # the number of the last request that gRPC has
        self._closed_because = ""
        self._requests: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
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
        except BaseException:  # cancelled, most likely: nobody else would end it
            self._call.cancel()
            raise
        self.server_memory = self._wire.server_memory(told)
        self._reader = asyncio.create_task(self._read())

    def submit(self, batch: Batch[ItemT, ResultT]) -> DLedgerError | None:
        """Send what is ``sent`` of a batch; gives why it was not sent (not applied), if it was not."""
        if self.broken is not None:
            return UnavailableError(f"the stream to {self.address} is closed: {self.broken}")
        number = self._next_number + 1
        request = self._wire.encoded(batch, number)
        if isinstance(request, DLedgerError):
            return request
        self._next_number = number
        self._pending[number] = batch
        self._requests.put_nowait((number, request))
        return None

    async def close(self, why: str = "") -> None:
        """End the stream; what still waits gets its outcome, and ``why``, before this returns."""
        self._closed_because = self._closed_because or why
        self._call.cancel()
        if self._reader is not None:
            _, silent = await asyncio.wait((self._reader,), timeout=LAST_WORD_S)
            if silent:
                self._reader.cancel()
                await asyncio.wait((self._reader,))

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while True:
            number, request = await self._requests.get()
            if self.broken is not None:
                return  # it was said already that it was not sent
            self._handed = number
            yield request

    async def _read(self) -> None:
        failure: DLedgerError = UnavailableError(f"{self.address} ended the stream")
        try:
            async for data in self._call:
                number, answer = self._wire.decode(data, self.address)
                batch = self._pending.pop(number, None)
                if batch is None:
                    raise self._wire.bad_answer(f"{self.address} answered request {number}, which nobody waits for")
                self._on_answer(self, batch, answer)
        except grpc.RpcError as error:
            failure = self._wire.failure_of(error, self.address, False)
        except asyncio.CancelledError:  # the call's: our own close
            failure = UnavailableError(self._closed_because or "the stream was closed")
        except DLedgerError as error:  # garbage
            failure, failure.outcome = error, "unknown"
        finally:
            self._fail(failure)

    def _fail(self, failure: DLedgerError) -> None:
        self.broken = failure
        self._call.cancel()
        pending, self._pending = self._pending, {}
        for number, batch in pending.items():
            self._on_answer(self, batch, self._wire.outcome_of(failure, self.address, number <= self._handed))
        self._on_end(self)


OnAnswer: TypeAlias = Callable[[AsyncStream[ItemT, ResultT], Batch[ItemT, ResultT], Answer[ResultT]], None]
OnEnd: TypeAlias = Callable[[AsyncStream[ItemT, ResultT]], None]


@record(frozen=True, slots=True)
class AsyncLinks(Generic[ItemT, ResultT]):
    """As ``Links``."""

    connect: Callable[[float, OnAnswer[ItemT, ResultT], OnEnd[ItemT, ResultT]], Awaitable[AsyncStream[ItemT, ResultT]]]
    find_leader: Callable[[], Awaitable[str | None]]
    note_failure: Callable[[str, DLedgerError], None]


def _now_ms() -> float:
    return time.monotonic() * 1000.0


class AsyncSender(Generic[ItemT, ResultT]):
    """As ``Sender``, on one event loop: the one on which it is used first."""

    def __init__(self, links: AsyncLinks[ItemT, ResultT], window: Window[ItemT, ResultT]) -> None:
        self._links = links
        self._window = window
        self._stream: AsyncStream[ItemT, ResultT] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = NEVER
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []  # for room
        self._blamed: list[tuple[str, DLedgerError]] = []
        self._is_driving = False

    async def __aenter__(self: SelfT) -> SelfT:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def failed_items(self) -> int:
        """How many have failed so far."""
        return self._window.failed_items

    async def add(
        self,
        payload: bytes,
        *,
        item: ItemT | None = None,
        sequence: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Batch[ItemT, ResultT], int]:
        """As ``Sender.add``; waits only while too much is pending."""
        window = self._window
        now_ms = _now_ms()
        if window.is_full:
            await self._wait_for_room(timeout_s)
        if sequence is not None or window.is_numbered_outside:
            window.check_number(sequence)
        timeout_ms = None if timeout_s is None else timeout_s * 1000.0
        batch, place = window.add(payload, now_ms, item=item, sequence=sequence, timeout_ms=timeout_ms)
        if window.open is not batch or not place:
            self._go_on()
        return batch, place

    async def add_many(
        self, payloads: Sequence[bytes], *, items: Sequence[ItemT] = (), sequence: int | None = None
    ) -> list[tuple[Batch[ItemT, ResultT], int, int]]:
        """As ``Sender.add_many``. Nothing that others add comes between, unless it has to wait for room."""
        window = self._window
        spans: list[tuple[Batch[ItemT, ResultT], int, int]] = []
        at = 0
        try:
            while at < len(payloads):
                if window.is_full:
                    await self._wait_for_room(None)
                number = None if sequence is None else sequence + at
                if number is not None or window.is_numbered_outside:
                    window.check_number(number)
                span = window.add_some(payloads, at, _now_ms(), items=items, sequence=number)
                spans.append(span)
                at += span[2]
                self._go_on()
        except DLedgerError as error:
            raise partly_added(error, at) from None
        return spans

    async def add_whole(
        self, payloads: list[bytes], *, sequence: int | None = None, timeout_s: float | None = None
    ) -> Batch[ItemT, ResultT]:
        """As ``Sender.add_whole``."""
        window = self._window
        now_ms = _now_ms()
        if window.is_full:
            await self._wait_for_room(timeout_s)
        if sequence is not None or window.is_numbered_outside:
            window.check_number(sequence)
        timeout_ms = None if timeout_s is None else timeout_s * 1000.0
        batch = window.add_whole(payloads, now_ms, sequence=sequence, timeout_ms=timeout_ms)
        self._go_on()
        return batch

    async def flush(self) -> None:
        """Return when everything added so far is done, well or badly."""
        self._window.seal()
        waiting = self._window.waiting()
        self._go_on()
        for batch in waiting:
            await wait_for_batch(batch)

    async def close(self) -> None:
        """Flush, then end the stream. Idempotent."""
        await self.flush()
        await self._end(UnavailableError("it is closed"))

    async def abandon(self, error: DLedgerError) -> None:
        """End it without waiting: what was sent and not answered is unknown, the rest fails with ``error``."""
        await self._end(error)

    async def _end(self, error: DLedgerError) -> None:
        window = self._window
        window.fail_all(error, _now_ms())
        self._tell()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if (stream := self._stream) is not None:
            await stream.close(str(error))
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    async def _wait_for_room(self, timeout_s: float | None) -> None:
        window = self._window
        timeout_s = window.options.timeout_ms / 1000.0 if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while window.is_full and not window.closed:
                    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(waiting)
                    await waiting
        except TimeoutError:
            raise PendingFullError(
                f"{window.pending_bytes} bytes wait to be sent (pending_bytes_max={window.options.pending_bytes_max}) "
                f"and none was finished within {timeout_s:g} s"
            ) from None

    # --- whenever something has happened ----------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Send what may be sent, tell what is done, and do what the window wishes."""
        if self._is_driving:
            return  # by what is told below: the loop there sees to it
        self._is_driving = True
        try:
            while True:
                wish = self._window.step(_now_ms())
                sent = self._send()
                self._grant(wish)
                if not (self._tell() or sent):
                    break
        finally:
            self._is_driving = False
        self._set_timer(wish.wake_at_ms)

    def _send(self) -> bool:
        stream, sent = self._stream, False
        while stream is not None and (batch := self._window.next_to_send(_now_ms())) is not None:
            sent = True
            if (refusal := stream.submit(batch)) is not None:
                self._answered(stream, batch, refusal)
        return sent

    def _answered(
        self, stream: AsyncStream[ItemT, ResultT], batch: Batch[ItemT, ResultT], answer: Answer[ResultT]
    ) -> None:
        blamed = self._window.answered(batch, answer, _now_ms())
        if blamed is not None:
            self._blamed.append((stream.address, blamed))

    def _tell(self) -> bool:
        done, self._window.done = self._window.done, []
        blamed, self._blamed = self._blamed, []
        for address, error in blamed:
            self._links.note_failure(address, error)
        for batch in done:
            batch.announce()
        if (done and not self._window.is_full) or self._window.closed:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        return bool(done)

    def _grant(self, wish: Wish) -> None:
        if wish.leave and self._stream is not None:
            self._begin(self._stream.close(wish.leave))
        if wish.look:
            self._begin(self._look())
        if wish.connect_until_ms is not None:
            self._begin(self._connect(wish.connect_until_ms))

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Only through a bug: whoever waits must hear of it, not wait for ever.
            self._window.fail_all(UnavailableError(f"sending ended: {error!r}"), _now_ms())
            self._tell()
            raise error

    def _set_timer(self, wake_at_ms: float) -> None:
        if self._timer is not None:
            if self._timer_at_ms <= wake_at_ms and self._timer_at_ms > _now_ms():
                return  # it wakes too early, and then looks again
            self._timer.cancel()
            self._timer = None
        if wake_at_ms != NEVER and not self._window.closed:
            self._timer_at_ms = wake_at_ms
            delay_s = max(wake_at_ms - _now_ms(), 0.0) / 1000.0
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._go_on()

    def _on_answer(
        self, stream: AsyncStream[ItemT, ResultT], batch: Batch[ItemT, ResultT], answer: Answer[ResultT]
    ) -> None:
        self._answered(stream, batch, answer)
        self._go_on()

    def _on_end(self, stream: AsyncStream[ItemT, ResultT]) -> None:
        if self._stream is stream:
            self._stream = None
            self._window.broken(_now_ms())
            self._go_on()

    # --- tasks ------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        leader: str | None = None
        try:
            leader = await self._links.find_leader()
        except DLedgerError:  # the client is closed
            leader = None
        finally:
            present = None if self._stream is None else self._stream.address
            self._window.looked(_now_ms(), is_led_by_another=leader not in (None, present))
        self._go_on()

    async def _connect(self, until_ms: float) -> None:
        old, self._stream = self._stream, None
        if old is not None:
            await old.close()
        try:
            timeout_s = max(until_ms - _now_ms(), 0.0) / 1000.0
            stream = await self._links.connect(timeout_s, self._on_answer, self._on_end)
        except DLedgerError as error:
            self._window.not_connected(error, _now_ms())
        else:
            self._stream = stream
            self._window.connected(stream.server_memory)
            if stream.broken is not None:  # before it was known here that it is the present one
                self._window.broken(_now_ms())
        self._go_on()
