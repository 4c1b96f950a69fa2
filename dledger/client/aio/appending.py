"""The calls of a client that append: numbered batches over a stream to the leader, opened again when that changes.

Kept apart so that a program which only asks or reads does not load them. On the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from dledger.client.aio.append_stream import (
    APPEND_RULES,
    DIRECT_APPENDS,
    INFLIGHT_REQUESTS_MAX,
    AppendBatch,
    AppendStreams,
    too_large,
)
from dledger.client.aio.calls import Calls
from dledger.client.aio.connections import NodeConnections, NodeLink
from dledger.client.shared import REQUEST_BYTES_MAX, AppendResult, TimeLimit, partly_appended, split
from dledger.errors import DLedgerError, EmptyBatchError, UnavailableError
from dledger.remoting.log import codec
from dledger.rpc.clients.codec import Append
from dledger.sending.aio import AsyncLinks, AsyncSender, BatchStream, OnAnswer, OnEnd
from dledger.sending.futures import AsyncSentItem, AsyncSentMany, wait_for_batch
from dledger.sending.numbering import ProducerNumbering
from dledger.sending.window import Window, WindowOptions
from dledger.values import MIB

LINGER_MS: Final = 2.0
"""How long ``submit`` waits for more entries to go in one request."""
_SUBMITTED: Final = WindowOptions(
    linger_ms=LINGER_MS, batch_bytes=MIB // 2, inflight_requests_max=INFLIGHT_REQUESTS_MAX
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
        self._streams = AppendStreams(connections, group)
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
        sender = self._sender(DIRECT_APPENDS, ProducerNumbering(producer))
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
            self._direct = self._sender(DIRECT_APPENDS, ProducerNumbering() if self._idempotent else None)
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
        fits = link.request_bytes_max - len(codec.encode_append(0, Append(self._group, [b""])))
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
