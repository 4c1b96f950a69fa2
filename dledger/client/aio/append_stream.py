"""Appends over a node's connection, in order; each gets an answer, or the reason why there is none. On the loop."""

from __future__ import annotations

from functools import partial
from typing import Final

from dledger.client.aio.connections import NodeConnections, NodeLink
from dledger.client.shared import AppendedResults, AppendResult, TimeLimit, results_of, too_large
from dledger.errors import DLedgerError, InvalidRequestError, PendingFullError, RequestTimeoutError, UnavailableError
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.remoting.log import codec
from dledger.remoting.log.codec import LogCode, error_of
from dledger.rpc.clients.codec import Append
from dledger.sending.aio import OnAnswer, OnEnd
from dledger.sending.batch import AllStored, OutgoingBatch
from dledger.types import ProducerBatch

AppendBatch = OutgoingBatch[None, AppendResult]
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
