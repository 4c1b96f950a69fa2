"""The encoding and error rules of the log's ``AppendStream``, for ``dledger.sending``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, overload

import grpc

from dledger.client.shared import AppendResult, is_retried, results_of, rpc_failure
from dledger.errors import DLedgerError, EntryTooLargeError, InvalidRequestError
from dledger.records import record
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger.sending.batch import AllStored, Answer, OutgoingBatch, WindowRules
from dledger.sending.stream import Wire
from dledger.sending.window import WindowOptions
from dledger.types import AppendedBatch, LogIndex, Position, ProducerBatch
from dledger.values import MIB

AppendBatch = OutgoingBatch[None, AppendResult]
INFLIGHT_REQUESTS_MAX: Final = 32
"""Requests in flight at once: a leader remembers the places of as many, in case they are repeated."""
DIRECT: Final = WindowOptions(
    linger_ms=0.0, batch_bytes=MIB, pending_bytes_max=64 * MIB, inflight_requests_max=INFLIGHT_REQUESTS_MAX
)
"""For the calls that append and wait. Concurrent appends of many threads share a request."""


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


RULES: Final[WindowRules[None, AppendResult]] = WindowRules(
    is_retried=is_retried,
    bad_answer=InvalidRequestError,
    is_final=lambda error: isinstance(error, InvalidRequestError),
)


@record(frozen=True, slots=True)
class _Words:
    group: str

    def encode(self, batch: AppendBatch, number: int) -> bytes:
        payloads = batch.payloads
        bodies = payloads if len(batch.sent) == len(payloads) else [payloads[place] for place in batch.sent]
        producer = ProducerBatch(batch.producer, batch.sequence, len(bodies)) if batch.producer else None
        # For unnumbered requests, the node itself refuses to store one that follows a refused one.
        return codec.encode_append(codec.Append(self.group, bodies, number, ordered=not producer, producer=producer))

    def decode(self, data: bytes, _address: str) -> tuple[int, Answer[AppendResult]]:
        number, outcome = codec.decode_appended(data)
        if isinstance(outcome, DLedgerError):
            return number, outcome
        return number, AllStored(results_of(outcome) if outcome.duplicates else AppendedResults(outcome))


def wire_of(group: str) -> Wire[None, AppendResult]:
    """The encoding of appends to a group's log."""
    words = _Words(group)
    return Wire(
        words.encode,
        words.decode,
        _failure_of,
        InvalidRequestError,
        too_large,
        request_bytes_max=options.stated_limit,
    )


def too_large(why: str) -> EntryTooLargeError:
    """The error for a batch too large for one request."""
    return EntryTooLargeError(f"{why}: append smaller entries, or raise max_entry_bytes on every node")


def _failure_of(error: grpc.RpcError, address: str, sent: bool) -> DLedgerError:
    return rpc_failure(error, address, sent=sent)
