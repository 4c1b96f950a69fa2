"""The calls that append, of both clients of the log. ``make unasync`` generates ``append_calls.py`` from this.

Kept apart so that a command which only asks or reads does not load them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from dledger.client.aio_calls import AsyncCalls
from dledger.client.append_wire import wire_of
from dledger.client.appender import AppenderOptions, AsyncAppender
from dledger.client.appends import DIRECT, RULES, too_large
from dledger.client.security import ClientSecurity
from dledger.client.shared import AppendResult, Deadline, is_retried, partly_appended, split
from dledger.errors import DLedgerError, EmptyBatchError, InvariantError, UnavailableError
from dledger.rpc import options
from dledger.sending.aio import AsyncLinks, AsyncSender, OnAnswer, OnEnd
from dledger.sending.aio_futures import AsyncSentItem, wait_for_batch
from dledger.sending.aio_stream import AsyncStream
from dledger.sending.numbering import ProducerNumbering
from dledger.sending.window import Window
from dledger.values import MIB


class AsyncAppendCalls(AsyncCalls):
    """Connects when needed; see ``DLedgerClient``."""

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        group: str = "default",
        timeout_s: float = 5.0,
        security: ClientSecurity | None = None,
        enable_idempotence: bool = True,
    ) -> None:
        super().__init__(addresses, group=group, timeout_s=timeout_s, security=security)
        self._idempotent = enable_idempotence
        self._wire = wire_of(group)
        self._request_bytes_max = 0
        """The leader's last stated limit of a request's bytes; 0: none."""
        self._links = AsyncLinks(self._open_stream, self._seeker.look, self._directory.note_failure)
        self._lock = threading.Lock()  # guards the fields below
        self._direct: AsyncSender[None, AppendResult] | None = None
        self._closed = False

    async def close(self) -> None:
        """Close every connection; calls in progress fail, open iterators end with an error. Idempotent."""
        self._channels.stop()
        with self._lock:
            self._closed = True
            direct, self._direct = self._direct, None
        if direct is not None:
            await direct.abandon(UnavailableError("the client is closed"))
        await super().close()

    async def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """Append one entry; returns when a quorum has stored it, exactly once."""
        batch, place = await self._direct_sender().add(body, timeout_s=self._timeout_s(timeout_s))
        await wait_for_batch(batch)
        return AsyncSentItem(batch, place).result()

    async def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """Append entries in order, in consecutive requests of up to 1 MiB; each request is all or nothing.

        When a request fails, the ones before it are in the log (the error then has ``outcome="unknown"`` and a note),
        and the ones after it were not sent.
        """
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        return await self._append_parts(self._direct_sender(), bodies, self._deadline(timeout_s))

    async def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """Append entries under your own producer name, numbered from ``sequence``.

        Entries that the log already holds are not appended again, whoever repeats them and however often: a second
        attempt, another process, the next day (until the producer has been idle for ``producer_expiry_ms``). Only one
        caller at a time per producer. Split like ``append_many``; after an error, too, ``producer_sequence`` returns
        how far it got. Raises ``OutOfOrderSequenceError`` and ``UnknownProducerError``, besides what ``append`` raises.
        """
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        deadline = self._deadline(timeout_s)
        sender = self._sender(ProducerNumbering(producer))
        try:
            return await self._append_parts(sender, bodies, deadline, sequence)
        finally:  # a cancelled caller does not wait for the deadline of what is in flight
            await sender.abandon(UnavailableError("cancelled: nobody is waiting for it"))

    async def _append_parts(
        self,
        sender: AsyncSender[None, AppendResult],
        bodies: Sequence[bytes],
        deadline: Deadline,
        sequence: int | None = None,
    ) -> list[AppendResult]:
        results: list[AppendResult] = []
        await self._check_sizes(bodies, deadline)
        for part in split(bodies):
            number = None if sequence is None else sequence + len(results)
            try:
                batch = await sender.add_whole(part, sequence=number, timeout_s=deadline.remaining_s)
                await wait_for_batch(batch)
                results += [AsyncSentItem(batch, place).result() for place in range(len(part))]
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    async def _check_sizes(self, bodies: Sequence[bytes], deadline: Deadline) -> None:
        """Refuse a body too large for any request before the parts in front of it are stored."""
        largest = max(map(len, bodies))
        if largest + options.FRAMING_BYTES <= max(options.REQUEST_BYTES_MAX, self._request_bytes_max):
            return  # every server accepts the first ones
        stream = await self._open_stream(deadline.remaining_s, _unasked, lambda _stream: None)
        await stream.close()
        fits = self._request_bytes_max - options.FRAMING_BYTES
        if largest > fits > 0:
            raise too_large(f"an entry has {largest} bytes, and {stream.address} takes at most {fits} in a request")

    def _direct_sender(self) -> AsyncSender[None, AppendResult]:
        sender = self._direct
        if sender is None:
            with self._lock:
                if self._closed:
                    raise UnavailableError("the client is closed")
                sender = self._direct
                if sender is None:
                    sender = self._direct = self._sender(ProducerNumbering() if self._idempotent else None)
        return sender

    def _sender(self, numbering: ProducerNumbering | None) -> AsyncSender[None, AppendResult]:
        options = replace(DIRECT, timeout_ms=self.timeout_s * 1000.0)
        return AsyncSender(self._links, Window(options, RULES, numbering), "dledger-appends")

    def appender(
        self,
        *,
        linger_ms: float = 2,
        batch_bytes: int = MIB // 2,
        batch_entries: int = 1024,
        pending_bytes_max: int = 8 * MIB,
        inflight_entries_max: int = 4096,
        timeout_s: float | None = None,
        retry_unknown: bool = False,
    ) -> AsyncAppender:
        """A pipelining appender: many cheap ``append`` calls, few requests, order kept. See ``Appender``."""
        settings = AppenderOptions(
            linger_s=linger_ms / 1000,
            batch_bytes=batch_bytes,
            batch_entries=batch_entries,
            pending_bytes_max=pending_bytes_max,
            inflight_entries_max=inflight_entries_max,
            timeout_s=self._timeout_s(timeout_s),
            retry_unknown=retry_unknown,
            idempotent=self._idempotent,
        )
        return AsyncAppender(self._links, settings)

    async def _open_stream(
        self, timeout_s: float, on_answer: OnAnswer[None, AppendResult], on_end: OnEnd[None, AppendResult]
    ) -> AsyncStream[None, AppendResult]:
        deadline = Deadline(timeout_s)

        async def attempt() -> AsyncStream[None, AppendResult]:
            address = await self._seeker.leader(deadline)
            open_call = partial(self._channels.open_stream, "AppendStream", address)
            stream = AsyncStream(open_call, address, self._wire, on_answer, on_end)
            try:
                await stream.open(deadline.remaining_s)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                raise
            self._request_bytes_max = stream.request_bytes_max or 0
            return stream

        return await self._retry(deadline, attempt, is_retried)


def _unasked(*_told: object) -> NoReturn:
    raise InvariantError("an answer to a request that was never sent")
