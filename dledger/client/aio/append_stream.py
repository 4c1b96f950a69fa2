"""Appends over a node's connection, in order; each gets an answer, or the reason why there is none. On the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, overload

from dledger.client.aio.connections import NodeConnections, NodeLink
from dledger.client.shared import AppendResult, TimeLimit, is_retried, results_of
from dledger.errors import (
    DLedgerError,
    EntryTooLargeError,
    InvalidRequestError,
    PendingFullError,
    RequestTimeoutError,
    UnavailableError,
)
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.remoting.log import codec
from dledger.remoting.log.codec import LogCode, error_of
from dledger.rpc.clients.codec import Append
from dledger.sending.aio import OnAnswer, OnEnd
from dledger.sending.batch import AllStored, OutgoingBatch, WindowRules
from dledger.sending.window import WindowOptions
from dledger.types import AppendedBatch, LogIndex, Position, ProducerBatch
from dledger.values import MIB

AppendBatch = OutgoingBatch[None, AppendResult]
INFLIGHT_REQUESTS_MAX: Final = 32
"""Requests in flight at once: a leader remembers the places of as many, in case they are repeated."""
DIRECT_APPENDS: Final = WindowOptions(
    linger_ms=0.0, batch_bytes=MIB, pending_bytes_max=64 * MIB, inflight_requests_max=INFLIGHT_REQUESTS_MAX
)
"""For the calls that append and wait. Concurrent appends of many threads share a request."""
APPEND_RULES: Final[WindowRules[None, AppendResult]] = WindowRules(
    is_retried=is_retried,
    bad_answer=InvalidRequestError,
    is_final=lambda error: isinstance(error, InvalidRequestError),
)
_STREAM_MASK: Final = (1 << 32) - 1


class AppendStreams:
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
        number = codec.UNORDERED if producer else stream
        return codec.encode_append(number, Append(self._group, bodies, producer=producer))


class PipelinedAppends:
    """A ``BatchStream`` that ends with its connection, or by ``close``, which leaves the connection to others."""

    def __init__(
        self,
        streams: AppendStreams,
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
        """See ``BatchStream``."""
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
        """See ``BatchStream``."""
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
                appended = codec.decode_appended(answer.body)
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
