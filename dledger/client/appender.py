"""Pipelined appending: thousands of cheap ``append`` calls become few requests, in order, also across leader changes.

``append`` adds to the open batch. A batch is sealed when it is full or has lingered, waits in the backlog until the
window has room, is in flight until its answer comes, and is then finished. One lock guards all of it; one thread seals
lingering batches, notices deadlines and recovers. Recovery, after any failure in flight:

1. Nothing more goes to that stream. What is in flight there was either refused (the node refuses ordered requests after
   a failed one), so that it is tried again, or is answered, or is unknown.
2. When nothing is in flight any more, what is to be tried again goes back to the front of the backlog, in order.
3. The thread connects to the present leader and sends a single batch; only its success opens the window again. So a
   batch never overtakes an earlier one that is still to be written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final

from dledger.client.pipe import AppendPipe, Outcome
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    AppendResult,
    Deadline,
    is_retried,
)
from dledger.config import MIB
from dledger.errors import DLedgerError, PendingFullError, RequestTimeoutError, UnavailableError
from dledger.types import LogIndex, Position

ENTRY_OVERHEAD_BYTES: Final = 64
"""What a waiting entry costs besides its body: without it, any number of empty ones could wait."""


@dataclass(frozen=True, slots=True)
class AppenderOptions:
    """See ``Appender``."""

    linger_s: float = 0.002
    batch_bytes: int = MIB // 2
    batch_entries: int = 1024
    pending_bytes_max: int = 8 * MIB
    inflight_entries_max: int = 4096
    timeout_s: float = 5.0
    retry_unknown: bool = False


class _Batch:
    """Entries that travel together. Its lock is the appender's."""

    __slots__ = ("bodies", "bytes", "callbacks", "deadline", "error", "finished", "linger_until", "number", "outcome")

    def __init__(self, number: int, linger_until: float, deadline: Deadline) -> None:
        self.number = number
        self.linger_until = linger_until
        self.deadline = deadline
        self.bodies: list[bytes] = []
        self.bytes = 0
        self.outcome: Outcome | None = None
        self.error: DLedgerError | None = None  # why it is tried again
        self.finished = threading.Event()
        self.callbacks: list[tuple[Callable[[AppendFuture], object], AppendFuture]] = []


class AppendFuture:
    """The result of one entry; shares its batch's state, so it costs next to nothing."""

    __slots__ = ("_batch", "_offset")

    def __init__(self, batch: _Batch, offset: int) -> None:
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


class Appender:
    """Use as a context manager; made by ``DLedgerClient.appender``.

    Entries are stored in the order of the ``append`` calls, batch by batch (a batch is all or nothing). A batch that
    was certainly not applied is tried again until ``timeout_s`` after it was begun. One whose outcome is unknown fails
    with ``outcome="unknown"``, or with ``retry_unknown`` is sent again, so that its entries may be in the log twice
    (at-least-once). ``append`` blocks while ``pending_bytes_max`` bytes wait, at most ``timeout_s``; besides its
    body each entry counts ``ENTRY_OVERHEAD_BYTES``.

    Leaving the context (or ``close``) waits for everything; errors are told by the futures only, and counted in
    ``failed_entries``.
    """

    def __init__(
        self,
        connect: Callable[[Deadline], AppendPipe],
        note_failure: Callable[[str, DLedgerError], None],
        options: AppenderOptions,
    ) -> None:
        self.failed_entries = 0
        """How many entries have failed so far."""
        self._connect = connect
        self._note_failure = note_failure
        self._options = options
        self._lock = threading.Lock()  # guards all fields below
        self._work = threading.Condition(self._lock)  # for the thread
        self._room = threading.Condition(self._lock)  # for blocked appends
        self._open: _Batch | None = None
        self._backlog: deque[_Batch] = deque()
        self._inflight: deque[_Batch] = deque()
        self._again: list[_Batch] = []
        self._pending_bytes = 0
        self._inflight_entries = 0
        self._batches = 0
        self._pipe: AppendPipe | None = None  # None: recovering, or not yet connected
        self._old_pipe: AppendPipe | None = None  # its last answers are awaited
        self._single = True  # one batch in flight at a time, until one has succeeded
        self._failures = 0  # in a row
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dledger-appender", daemon=True)
        self._thread.start()

    def __enter__(self) -> Appender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def full(self) -> bool:
        """Whether ``append`` would block now."""
        return self._pending_bytes >= self._options.pending_bytes_max

    def append(self, body: bytes) -> AppendFuture:
        """Queue one entry. Raises ``PendingFullError`` if too much waits for too long (nothing was queued)."""
        with self._lock:
            batch = self._open
            if batch is None or self._pending_bytes >= self._options.pending_bytes_max:
                batch = self._open_batch()
            bodies = batch.bodies
            offset = len(bodies)
            bodies.append(body)
            cost = len(body) + ENTRY_OVERHEAD_BYTES
            size = batch.bytes = batch.bytes + cost
            self._pending_bytes += cost
            if size >= self._options.batch_bytes or offset + 1 >= self._options.batch_entries:
                self._seal()
        return AppendFuture(batch, offset)

    def flush(self) -> None:
        """Return when everything appended so far is finished, well or badly."""
        with self._lock:
            self._seal()
            waiting = [*self._inflight, *self._again, *self._backlog]
        for batch in waiting:
            batch.finished.wait()

    def close(self) -> None:
        """Flush, then end the thread and the stream. Idempotent."""
        self.flush()
        with self._lock:
            self._closed = True
            self._seal()
            self._work.notify()
            self._room.notify_all()
        self._thread.join()

    # --- on the caller's thread, under the lock ---------------------------------------------------------------------

    def _open_batch(self) -> _Batch:
        if self._pending_bytes >= self._options.pending_bytes_max:
            deadline = Deadline(self._options.timeout_s)
            while self._pending_bytes >= self._options.pending_bytes_max and not self._closed:
                if not self._room.wait(deadline.remaining_s) and deadline.expired:
                    raise PendingFullError(
                        f"{self._pending_bytes} bytes wait to be appended (pending_bytes_max="
                        f"{self._options.pending_bytes_max}) and none was finished within {deadline.timeout_s} s"
                    )
        if self._closed:
            raise UnavailableError("the appender is closed")
        if self._open is None:
            self._batches += 1
            linger_until = time.monotonic() + self._options.linger_s
            self._open = _Batch(self._batches, linger_until, Deadline(self._options.timeout_s))
            self._work.notify()
        return self._open

    def _seal(self) -> None:
        if self._open is not None:
            self._backlog.append(self._open)
            self._open = None
            self._pump()

    # --- on any thread, under the lock ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send from the backlog what the window has room for."""
        while self._backlog and self._pipe is not None and self._has_room(self._backlog[0]):
            batch = self._backlog.popleft()
            self._inflight.append(batch)
            self._inflight_entries += len(batch.bodies)
            try:
                self._pipe.submit(batch.bodies, partial(self._on_done, batch), ordered=True)
            except DLedgerError as error:
                self._land(batch)
                batch.error = error
                self._again.append(batch)
                self._leave_pipe()
        if self._backlog and self._pipe is None:
            self._work.notify()

    def _has_room(self, batch: _Batch) -> bool:
        if not self._inflight:
            return True
        return not self._single and self._inflight_entries + len(batch.bodies) <= self._options.inflight_entries_max

    def _land(self, batch: _Batch) -> None:
        self._inflight.remove(batch)  # the first one, nearly always
        self._inflight_entries -= len(batch.bodies)

    def _leave_pipe(self) -> None:
        if self._pipe is not None:
            self._old_pipe, self._pipe = self._pipe, None
        self._single = True
        self._work.notify()

    def _finish(self, batch: _Batch, outcome: Outcome) -> None:
        self._pending_bytes -= batch.bytes
        if isinstance(outcome, DLedgerError):
            self.failed_entries += len(batch.bodies)
        batch.outcome = outcome
        batch.bodies = []  # futures may live long; what they wrote need not
        self._room.notify_all()

    # --- on the pipe's thread ---------------------------------------------------------------------------------------

    def _on_done(self, batch: _Batch, outcome: Outcome) -> None:
        finished = True
        with self._lock:
            self._land(batch)
            if not isinstance(outcome, DLedgerError):
                self._failures = 0
                if self._pipe is not None:
                    self._single = False
                self._finish(batch, outcome)
            else:
                pipe = self._pipe or self._old_pipe
                if pipe is not None:
                    self._note_failure(pipe.address, outcome)
                if self._is_tried_again(outcome):
                    batch.error = outcome
                    self._again.append(batch)
                    finished = False
                else:
                    self._finish(batch, outcome)
                self._leave_pipe()
            if not self._inflight and (self._pipe is None or self._closed):
                self._work.notify()
            self._pump()
        if finished:
            _announce(batch)

    def _is_tried_again(self, error: DLedgerError) -> bool:
        return is_retried(error) or (self._options.retry_unknown and error.outcome == "unknown")

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        finally:
            # Reached early only through a bug: whoever waits for a batch must hear of it, not wait for ever.
            self._fail_all(UnavailableError("the appender's thread has ended"))
            for pipe in (self._old_pipe, self._pipe):
                if pipe is not None:
                    pipe.close()

    def _fail_all(self, error: DLedgerError) -> None:
        with self._lock:
            self._closed = True
            if self._open is not None:
                self._backlog.append(self._open)
                self._open = None
            failed = [*self._again, *self._backlog]
            self._again.clear()
            self._backlog.clear()
            for batch in failed:
                self._finish(batch, error)
            if self._inflight:  # becomes unknown when its pipe is closed
                self._leave_pipe()
        for batch in failed:
            _announce(batch)

    def _drive(self) -> None:
        while True:
            with self._lock:
                while (wait_s := self._wait_s()) > 0:
                    self._work.wait(wait_s if wait_s < float("inf") else None)
                if self._closed and not (self._inflight or self._backlog or self._again):
                    break
                if self._open is not None and time.monotonic() >= self._open.linger_until:
                    self._seal()
                expired = self._take_expired()
                stuck = self._stuck_pipe()
                reconnect = self._gather() if stuck is None else None
            for batch in expired:
                _announce(batch)
            if stuck is not None:
                stuck.close()  # what is in flight becomes unknown, through _on_done
            if reconnect is not None:
                self._reconnect(reconnect)

    def _wait_s(self) -> float:
        """How long the thread has nothing to do."""
        waiting = bool(self._backlog or self._again)
        if self._pipe is None and not self._inflight and waiting:
            return 0
        if self._closed and not (waiting or self._inflight):
            return 0
        due = [batch.deadline.remaining_s for batch in (*self._again, *self._oldest())]
        if self._open is not None:
            due.append(self._open.linger_until - time.monotonic())
        return min(due, default=float("inf"))

    def _oldest(self) -> list[_Batch]:
        return [queue[0] for queue in (self._inflight, self._backlog) if queue]

    def _take_expired(self) -> list[_Batch]:
        """Give up what has waited for its turn too long; nothing of it is in flight."""
        expired = [batch for batch in (*self._again, *self._backlog) if batch.deadline.expired]
        for batch in expired:
            (self._again if batch in self._again else self._backlog).remove(batch)
            self._finish(batch, _expired(batch))
        return expired

    def _stuck_pipe(self) -> AppendPipe | None:
        if not (self._inflight and self._inflight[0].deadline.expired):
            return None
        self._leave_pipe()
        return self._old_pipe

    def _gather(self) -> Deadline | None:
        """Put what is tried again before the rest, once nothing is in flight; the deadline for a new connection."""
        if self._pipe is not None or self._inflight:
            return None
        self._backlog.extendleft(sorted(self._again, key=lambda batch: -batch.number))
        self._again.clear()
        return self._backlog[0].deadline if self._backlog else None

    def _reconnect(self, deadline: Deadline) -> None:
        old, self._old_pipe = self._old_pipe, None
        if old is not None:
            old.close()
        if self._failures:
            backoff = min(RETRY_WAIT_S_MIN * 2 ** min(self._failures, 10), RETRY_WAIT_S_MAX)
            threading.Event().wait(min(backoff, deadline.remaining_s))
        self._failures += 1
        try:
            pipe = self._connect(deadline)
        except DLedgerError as error:
            self._on_no_leader(error)
            return
        with self._lock:
            self._pipe = pipe
            self._pump()

    def _on_no_leader(self, error: DLedgerError) -> None:
        hopeless = not is_retried(error)
        with self._lock:
            for batch in self._backlog:
                if batch.error is None or batch.error.outcome == "not_applied":
                    batch.error = error
            # Nothing helps against a wrong group or a peer port: tell it at once instead of at the deadline.
            failed = list(self._backlog) if hopeless else []
            for batch in failed:
                self._backlog.remove(batch)
                self._finish(batch, batch.error or error)
        for batch in failed:
            _announce(batch)


def _expired(batch: _Batch) -> DLedgerError:
    why = batch.error or UnavailableError("earlier appends were still under way")
    message = f"not appended within {batch.deadline.timeout_s} s: {why}"
    if why.outcome == "unknown":
        return RequestTimeoutError(message)
    return UnavailableError(message)


def _announce(batch: _Batch) -> None:
    """Wake whoever waits for a finished batch; outside the lock."""
    batch.finished.set()
    while batch.callbacks:
        try:
            callback, future = batch.callbacks.pop(0)
        except IndexError:  # taken back by add_done_callback
            return
        callback(future)
