"""A stream of requests to one server, in order; each request gets an answer, or the reason why there is none.

A stream costs a third of a unary call per request, and knows more: no request is passed to gRPC before the server has
accepted the stream, so a failure before that is certainly ``not_applied``; a request that was passed to gRPC is
unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, Final, Generic

import grpc

from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnavailableError,
)
from dledger.records import record
from dledger.sending.batch import Answer, ItemT, OutgoingBatch, ResultT

Metadata = tuple[tuple[str, str | bytes], ...]
LAST_WORD_S: Final = 1.0
"""How long gRPC has to report the end of a call. Rarely it never does: its wait for an ended call's metadata hangs."""


@record(frozen=True, slots=True)
class Request(Generic[ItemT, ResultT]):
    """A request without an answer yet."""

    batch: OutgoingBatch[ItemT, ResultT]
    size: int


@record(frozen=True, slots=True)
class Wire(Generic[ItemT, ResultT]):
    """A protocol's encoding."""

    encode: Callable[[OutgoingBatch[ItemT, ResultT], int], bytes]
    """Encodes the ``sent`` items of a batch as the request with that number."""
    decode: Callable[[bytes, str], tuple[int, Answer[ResultT]]]
    """Decodes an answer of the server at that address into the request's number and its answer. Raises
    ``DLedgerError`` if it is malformed.
    """
    failure_of: Callable[[grpc.RpcError, str, bool], DLedgerError]
    """Why the stream to an address broke; the flag says whether anything was sent on it."""
    bad_answer: Callable[[str], DLedgerError]
    """The error for an answer that matches no request."""
    too_large: Callable[[str], DLedgerError]
    """The error for a request that the server does not accept for its size."""
    unknown: Callable[[str], DLedgerError] = RequestTimeoutError
    concerns_all: Callable[[DLedgerError], bool] = lambda _error: False
    """Whether a failure of the stream itself determines the outcome of the requests on it."""
    server_memory: Callable[[Any], str] = lambda _metadata: ""
    """Identifies the server's memory, from its metadata on accepting the stream: see ``Window.connected``."""
    request_bytes_max: Callable[[Any], int | None] = lambda _metadata: None
    """The server's limit of a request's bytes, from the same metadata: a larger one would end the whole stream."""

    def encoded(
        self, batch: OutgoingBatch[ItemT, ResultT], number: int, address: str, bytes_max: int | None
    ) -> bytes | DLedgerError:
        """The request, or the error for an invalid item or a request that is too large."""
        try:
            request = self.encode(batch, number)
        except Exception as error:  # noqa: BLE001  # whatever it is, it concerns no other request
            return InvalidRequestError(f"cannot send it: {error}")
        if bytes_max is not None and len(request) > bytes_max:
            return self.too_large(f"the request has {len(request)} bytes, and {address} takes at most {bytes_max}")
        return request

    def outcomes_of(
        self, failure: DLedgerError, address: str, pending: Mapping[int, Request[ItemT, ResultT]], handed: int
    ) -> list[tuple[OutgoingBatch[ItemT, ResultT], DLedgerError]]:
        """The outcomes of the pending requests of a failed stream; gRPC had them up to number ``handed``."""
        if isinstance(failure, RequestTooLargeError):
            sizes = {number: request.size for number, request in pending.items() if number <= handed}
            # The request that the server refused is pending. So is the largest one, which is that one or came after it.
            largest = max(sizes, key=lambda number: sizes[number], default=handed + 1)
            failure.outcome, handed = "not_applied", largest - 1
        else:
            largest = 0
        return [
            (
                request.batch,
                self.too_large(str(failure))
                if number == largest
                else self._outcome_of(failure, address, number <= handed),
            )
            for number, request in pending.items()
        ]

    def _outcome_of(self, failure: DLedgerError, address: str, was_handed: bool) -> DLedgerError:
        """The outcome of one request; ``was_handed``: the server may have seen it."""
        if failure.outcome == "unknown" or self.concerns_all(failure):
            return failure
        if not was_handed:
            return UnavailableError(f"the stream to {address} ended: {failure}", leader=failure.leader)
        lost = self.unknown(f"the stream to {address} ended before the answer arrived: {failure}")
        lost.leader = failure.leader
        return lost


class Stream(Generic[ItemT, ResultT]):
    """``open`` it before submitting.

    ``on_answer`` is called once for each submitted batch, and ``on_end`` after the last of them: on the stream's
    thread, or by ``close`` while that thread still waits for gRPC to end the call. The callable returned by
    ``on_answer`` is called without a lock: it may run application code, which may call anything.
    """

    def __init__(
        self,
        open_call: Callable[[Iterator[bytes]], grpc.CallIterator[bytes]],
        address: str,
        wire: Wire[ItemT, ResultT],
        on_answer: Callable[
            [Stream[ItemT, ResultT], OutgoingBatch[ItemT, ResultT], Answer[ResultT]], Callable[[], object]
        ],
        on_end: Callable[[Stream[ItemT, ResultT]], None],
    ) -> None:
        self.address = address
        self.server_memory = ""
        self.request_bytes_max: int | None = None
        self._wire = wire
        self._on_answer = on_answer
        self._on_end = on_end
        self._lock = threading.Lock()  # guards the fields below
        self._pending: dict[int, Request[ItemT, ResultT]] = {}
        self._next_number = 0
        self._handed = 0  # the last request passed to gRPC
        self._broken: DLedgerError | None = None
        self._closed_because = ""
        self._telling = threading.Lock()  # held while outcomes are recorded, so that the end comes last
        self._has_ended = False
        self._established = threading.Event()  # or failed
        self._requests: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._call = open_call(self._outgoing())
        self._thread = threading.Thread(target=self._read, name=f"dledger-send-{address}", daemon=True)

    def open(self, timeout_s: float) -> None:
        """Wait for the server to accept the stream. Raises ``UnavailableError`` (not applied)."""
        self._thread.start()
        if (failure := self._why_refused(timeout_s)) is not None:
            self.close()
            raise failure

    @property
    def broken(self) -> DLedgerError | None:
        """Why nothing can be sent any more."""
        return self._broken

    def submit(self, batch: OutgoingBatch[ItemT, ResultT]) -> DLedgerError | None:
        """Send the ``sent`` items of a batch; returns why they were not sent (not applied), if they were not."""
        with self._lock:
            if self._broken is not None:
                return UnavailableError(f"the stream to {self.address} is closed: {self._broken}")
            number = self._next_number + 1
            request = self._wire.encoded(batch, number, self.address, self.request_bytes_max)
            if isinstance(request, DLedgerError):
                return request
            self._next_number = number
            self._pending[number] = Request(batch, len(request))
            self._requests.put((number, request))
            return None

    def close(self, why: str = "") -> None:
        """End the stream; every pending batch gets its outcome, with ``why``, before this returns."""
        with self._lock:
            why = self._closed_because = self._closed_because or why
        self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        self._requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_WORD_S)
        self._end(UnavailableError(why or f"the stream to {self.address} was closed"))

    def _why_refused(self, timeout_s: float) -> DLedgerError | None:
        """Wait until the server has accepted the stream; returns the reason if it did not."""
        if not self._call.add_callback(self._established.set):
            self._established.set()  # it is over
        if not self._established.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            return UnavailableError(f"{self.address} did not accept a stream within {timeout_s:g} s")
        if self._call.is_active():
            return None
        self._thread.join(LAST_WORD_S)
        return self.broken or UnavailableError(f"{self.address} ended the stream")

    def _outgoing(self) -> Iterator[bytes]:
        """Yield the requests, on gRPC's thread."""
        self._established.wait()
        while (item := self._requests.get()) is not None:
            number, request = item
            with self._lock:
                if self._broken is not None:
                    return
                self._handed = number
            yield request

    def _read(self) -> None:
        failure: DLedgerError = UnavailableError(f"{self.address} ended the stream")
        try:
            told = self._call.initial_metadata()  # returns on acceptance, or when the stream ends
            if self._call.is_active():
                self.server_memory = self._wire.server_memory(told)
                self.request_bytes_max = self._wire.request_bytes_max(told)
                self._established.set()
            for data in self._call:
                self._take(data)
        except grpc.RpcError as error:
            with self._lock:
                why = self._closed_because  # otherwise gRPC's wording for what we did ourselves
            failure = UnavailableError(why) if why else self._wire.failure_of(error, self.address, False)
        except DLedgerError as error:  # malformed
            failure, failure.outcome = error, "unknown"
        finally:
            self._end(failure)

    def _take(self, data: bytes) -> None:
        number, answer = self._wire.decode(data, self.address)
        with self._telling:
            with self._lock:
                request = self._pending.pop(number, None)
            if request is None:
                raise self._wire.bad_answer(f"{self.address} answered request {number}, which is not pending")
            tell = self._on_answer(self, request.batch, answer)
        tell()

    def _end(self, failure: DLedgerError) -> None:
        """Report the outcome of every unanswered request; once."""
        with self._telling:
            if self._has_ended:
                return
            self._has_ended = True
            with self._lock:
                self._broken = failure
                pending, self._pending = self._pending, {}
                handed = self._handed
            self._established.set()
            self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
            self._requests.put(None)
            news = [
                self._on_answer(self, batch, outcome)
                for batch, outcome in self._wire.outcomes_of(failure, self.address, pending, handed)
            ]
            self._on_end(self)
        for tell in news:
            tell()
