"""Drives a window on an event loop. Results of sent items cost next to nothing until they are read."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from dledger.errors import DLedgerError, PendingFullError, UnavailableError
from dledger.records import record
from dledger.sending.batch import Answer, ItemT, OutgoingBatch, ResultT, partly_added
from dledger.sending.futures import wait_for_batch
from dledger.sending.window import NEVER, Window, WindowActions, connect_timeout_s

_SenderT = TypeVar("_SenderT", bound="AsyncSender[Any, Any]")
_log = logging.getLogger(__name__)


class BatchStream(Protocol[ItemT, ResultT]):
    """A stream of requests to one server, in order; each gets an answer, or the reason why there is none."""

    address: str
    server_memory: str
    broken: DLedgerError | None

    def submit(self, batch: OutgoingBatch[ItemT, ResultT]) -> DLedgerError | None:
        """Send the ``sent`` items of a batch; returns why they were not sent (not applied), if they were not."""

    async def close(self, why: str = "") -> None:
        """End the stream; every pending batch gets its outcome, with ``why``, before this returns."""


OnAnswer: TypeAlias = Callable[[BatchStream[ItemT, ResultT], OutgoingBatch[ItemT, ResultT], Answer[ResultT]], None]
OnEnd: TypeAlias = Callable[[BatchStream[ItemT, ResultT]], None]


@record(frozen=True, slots=True)
class AsyncLinks(Generic[ItemT, ResultT]):
    """How a sender finds a leader and opens a stream to it."""

    connect: Callable[[float, OnAnswer[ItemT, ResultT], OnEnd[ItemT, ResultT]], Awaitable[BatchStream[ItemT, ResultT]]]
    find_leader: Callable[[], Awaitable[str | None]]
    note_failure: Callable[[str, DLedgerError], None]


def _now_ms() -> float:
    return time.monotonic() * 1000.0


class AsyncSender(Generic[ItemT, ResultT]):
    """Sends what is added, in order; bound to the event loop of its first use."""

    def __init__(self, links: AsyncLinks[ItemT, ResultT], window: Window[ItemT, ResultT], name: str) -> None:
        self._links = links
        self._window = window
        self._name: Final = name
        self._stream: BatchStream[ItemT, ResultT] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = NEVER
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []  # for room
        self._blamed: list[tuple[str, DLedgerError]] = []
        self._is_driving = False
        weakref.finalize(self, _tell_loss, window, name, os.getpid())  # also at the program's end

    async def __aenter__(self: _SenderT) -> _SenderT:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def add(
        self,
        payload: bytes,
        *,
        item: ItemT | None = None,
        sequence: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[OutgoingBatch[ItemT, ResultT], int]:
        """Add an item; returns its batch and its place in it. Waits only while too much is pending."""
        if self._window.is_full:
            await self._wait_for_room(timeout_s)
        return self._add(payload, item, sequence, timeout_s)

    def add_now(
        self, payload: bytes, *, timeout_s: float | None = None
    ) -> tuple[OutgoingBatch[ItemT, ResultT], int] | None:
        """``add`` without waiting: None if too much is pending, and nothing was added."""
        return None if self._window.is_full else self._add(payload, None, None, timeout_s)

    def add_some_now(
        self, payloads: Sequence[bytes], start: int
    ) -> Iterator[tuple[OutgoingBatch[ItemT, ResultT], int, int]]:
        """Add as many of ``payloads`` from ``start`` on as there is room for, without waiting: batches, the place of
        the first of each, and their number.
        """
        window = self._window
        while start < len(payloads) and not window.is_full:
            if window.is_numbered_outside:
                window.check_number(None)
            span = window.add_some(payloads, start, _now_ms())
            start += span[2]
            yield span
            self._go_on()

    def _add(
        self, payload: bytes, item: ItemT | None, sequence: int | None, timeout_s: float | None
    ) -> tuple[OutgoingBatch[ItemT, ResultT], int]:
        window = self._window
        if sequence is not None or window.is_numbered_outside:
            window.check_number(sequence)
        timeout_ms = None if timeout_s is None else timeout_s * 1000.0
        batch, place = window.add(payload, _now_ms(), item=item, sequence=sequence, timeout_ms=timeout_ms)
        if window.open is not batch or not place:
            self._go_on()
        return batch, place

    async def add_many(
        self, payloads: Sequence[bytes], *, items: Sequence[ItemT] = (), sequence: int | None = None
    ) -> list[tuple[OutgoingBatch[ItemT, ResultT], int, int]]:
        """Add items in order: batches, the place of the first item in each, and their number.

        Other callers' items come between only if it has to wait for room.
        """
        window = self._window
        spans: list[tuple[OutgoingBatch[ItemT, ResultT], int, int]] = []
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

    def add_many_at_once(
        self, payloads: Sequence[bytes], items: Sequence[ItemT], *, sequence: int | None = None
    ) -> list[tuple[OutgoingBatch[ItemT, ResultT], int, int]]:
        """As ``add_many``, without waiting for room: the caller counts what is pending, and checks ``sequence``."""
        spans: list[tuple[OutgoingBatch[ItemT, ResultT], int, int]] = []
        at = 0
        while at < len(payloads):
            number = None if sequence is None else sequence + at
            span = self._window.add_some(payloads, at, _now_ms(), items=items, sequence=number)
            spans.append(span)
            at += span[2]
        self._go_on()
        return spans

    async def add_whole(
        self, payloads: list[bytes], *, sequence: int | None = None, timeout_s: float | None = None
    ) -> OutgoingBatch[ItemT, ResultT]:
        """Add items that go in one request, or not at all."""
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
        """Return when everything added so far has succeeded or failed."""
        self._window.seal()
        waiting = self._window.waiting()
        self._go_on()
        for batch in waiting:
            await wait_for_batch(batch)

    async def close(self) -> None:
        """Flush, then end the stream. Idempotent."""
        await self.flush()
        await self._end(UnavailableError("closed"))

    async def abandon(self, error: DLedgerError) -> None:
        """End without waiting: items in flight become unknown, the rest fails with ``error``."""
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

    def when_room(self, callback: Callable[[], object]) -> None:
        """Call it once something has completed, on the loop."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda _: callback())
        self._waiting.append(waiting)

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
                f"{window.pending_bytes} bytes are waiting to be sent "
                f"(pending_bytes_max={window.options.pending_bytes_max}), and nothing completed within "
                f"{timeout_s:g} s"
            ) from None

    # --- after each event -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Send what may be sent, announce outcomes, and carry out the window's actions."""
        if self._is_driving:
            return  # called by a callback below: the outer loop handles it
        self._is_driving = True
        try:
            while True:
                actions = self._window.step(_now_ms())
                sent = self._send()
                self._carry_out(actions)
                if not (self._tell() or sent):
                    break
        finally:
            self._is_driving = False
        self._set_timer(actions.wake_at_ms)

    def _send(self) -> bool:
        stream, sent = self._stream, False
        while stream is not None and (batch := self._window.next_to_send(_now_ms())) is not None:
            sent = True
            if (refusal := stream.submit(batch)) is not None:
                self._answered(stream, batch, refusal)
        return sent

    def _answered(
        self, stream: BatchStream[ItemT, ResultT], batch: OutgoingBatch[ItemT, ResultT], answer: Answer[ResultT]
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

    def _carry_out(self, actions: WindowActions) -> None:
        if actions.leave and self._stream is not None:
            self._begin(self._stream.close(actions.leave))
        if actions.look:
            self._begin(self._look())
        if actions.connect_until_ms is not None:
            self._begin(self._connect(actions.connect_until_ms))

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Only a bug gets here: waiting callers must get an error, not wait for ever.
            self._window.fail_all(UnavailableError(f"{self._name} has ended: {error!r}"), _now_ms())
            self._tell()
            raise error

    def _set_timer(self, wake_at_ms: float) -> None:
        if self._timer is not None:
            if self._timer_at_ms <= wake_at_ms and self._timer_at_ms > _now_ms():
                return  # it fires early, and the window is asked again
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
        self, stream: BatchStream[ItemT, ResultT], batch: OutgoingBatch[ItemT, ResultT], answer: Answer[ResultT]
    ) -> None:
        self._answered(stream, batch, answer)
        self._go_on()

    def _on_end(self, stream: BatchStream[ItemT, ResultT]) -> None:
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
            timeout_s = connect_timeout_s(until_ms - _now_ms())
            stream = await self._links.connect(timeout_s, self._on_answer, self._on_end)
        except DLedgerError as error:
            self._window.not_connected(error, _now_ms())
        else:
            self._stream = stream
            self._window.connected(stream.server_memory)
            if stream.broken is not None:  # it broke before it became the current stream
                self._window.broken(_now_ms())
        self._go_on()


def _tell_loss(window: Window[Any, Any], name: str, process: int) -> None:
    """Its loop has ended before it: nothing can be sent any more."""
    if (left := window.pending_items) and not window.closed and os.getpid() == process:
        _log.warning(
            "%d items were still in %s when its event loop ended, and are lost unless they were on their way: close "
            "it, or use it in an async with statement",
            left,
            name,
        )
