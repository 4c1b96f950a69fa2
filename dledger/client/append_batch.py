"""What an appender sends at once, the futures of its entries, and the appender's settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from dledger.client.pipe import Outcome
from dledger.client.shared import AppendResult, Deadline, results_of
from dledger.config import MIB
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.records import record
from dledger.types import LogIndex, Position, ProducerBatch

ENTRY_OVERHEAD_BYTES: Final = 64
"""What a waiting entry costs besides its body: without it, any number of empty ones could wait."""


@record(frozen=True, slots=True)
class AppenderOptions:
    """See ``Appender``."""

    linger_s: float = 0.002
    batch_bytes: int = MIB // 2
    batch_entries: int = 1024
    pending_bytes_max: int = 8 * MIB
    inflight_entries_max: int = 4096
    timeout_s: float = 5.0
    retry_unknown: bool = False
    idempotent: bool = True


class AppendBatch:
    """Entries that travel together. Its lock is the appender's."""

    __slots__ = (
        "bodies",
        "bytes",
        "callbacks",
        "deadline",
        "error",
        "finished",
        "linger_until",
        "number",
        "outcome",
        "producer",
        "sent_alone",
        "sent_at",
        "uncertain",
    )

    def __init__(self, number: int, linger_until: float, deadline: Deadline) -> None:
        self.number = number
        self.linger_until = linger_until
        self.deadline = deadline
        self.bodies: list[bytes] = []
        self.bytes = 0
        self.outcome: Outcome | None = None
        self.error: DLedgerError | None = None  # why it is tried again
        self.producer: ProducerBatch | None = None  # what it was sent as, and is sent as again
        self.uncertain = False  # whether it may be stored, as far as anybody said
        self.sent_at = 0.0
        self.sent_alone = False
        self.finished = threading.Event()
        self.callbacks: list[tuple[Callable[[AppendFuture], object], AppendFuture]] = []


class AppendFuture:
    """The result of one entry; shares its batch's state, so it costs next to nothing."""

    __slots__ = ("_batch", "_offset")

    def __init__(self, batch: AppendBatch, offset: int) -> None:
        self._batch = batch
        self._offset = offset

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._batch.outcome is not None

    def result(self, timeout: float | None = None) -> AppendResult:
        """Where the entry is; raises its error, or ``TimeoutError`` if there is neither within ``timeout`` seconds.

        Without ``timeout`` it ends all the same: every batch has a deadline.
        """
        batch = self._batch
        if batch.outcome is None:
            batch.finished.wait(timeout)
        outcome = batch.outcome
        if outcome is None:
            raise TimeoutError(f"the append is not finished after {timeout} s")
        if isinstance(outcome, DLedgerError):
            raise outcome
        offset = self._offset
        if outcome.duplicates:
            return results_of(outcome)[offset]
        return AppendResult(LogIndex(outcome.first_index + offset), outcome.term, Position(outcome.positions[offset]))

    def exception(self, timeout: float | None = None) -> DLedgerError | None:
        """The entry's error, or None; waits as ``result`` does."""
        try:
            self.result(timeout)
        except DLedgerError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[AppendFuture], object]) -> None:
        """Call ``callback(self)`` when done, on the client's thread (or here and now); it must not block."""
        batch = self._batch
        if not self.done():
            # list.append is atomic, and the finishing thread reads the list only after it has set the outcome: either
            # it still finds this callback, or we see the outcome below and take it back (whoever removes it calls it).
            item = (callback, self)
            batch.callbacks.append(item)
            if not self.done():
                return
            try:
                batch.callbacks.remove(item)
            except ValueError:
                return
        callback(self)


def expired_error(batch: AppendBatch) -> DLedgerError:
    """What a batch ends with whose time is over."""
    why = batch.error or UnavailableError("earlier appends were still under way")
    message = f"not appended within {batch.deadline.timeout_s} s: {why}"
    if why.outcome == "unknown" or batch.uncertain:
        return RequestTimeoutError(message)
    return UnavailableError(message)


def announce(batch: AppendBatch) -> None:
    """Wake whoever waits for a finished batch; outside the lock."""
    batch.finished.set()
    while batch.callbacks:
        try:
            callback, future = batch.callbacks.pop(0)
        except IndexError:  # taken back by add_done_callback
            return
        callback(future)
