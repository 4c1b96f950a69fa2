"""The rules by which ``dledger.sending`` appends to the log, and the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, overload

from dledger.client.shared import AppendResult, is_retried, results_of
from dledger.errors import EntryTooLargeError, InvalidRequestError
from dledger.sending.batch import OutgoingBatch, WindowRules
from dledger.sending.window import WindowOptions
from dledger.types import AppendedBatch, LogIndex, Position
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


def too_large(why: str) -> EntryTooLargeError:
    """The error for a batch too large for one request."""
    return EntryTooLargeError(f"{why}: append smaller entries, or raise max_entry_bytes on every node")
