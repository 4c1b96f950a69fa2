"""Pipelined appending: thousands of cheap ``append`` calls become few requests, in order, also across leader changes.

``append`` adds to the open batch. A batch is sealed when it is full or has lingered, waits in the backlog until the
window has room, is in flight until its answer comes, and is then finished. One lock guards all of it; one thread seals
lingering batches, notices deadlines and recovers. Recovery, after any failure in flight:

1. Nothing more goes to that stream. What is in flight there was either refused (the node refuses ordered requests after
   a failed one), so that it is tried again, or is answered, or is unknown.
2. When nothing is in flight any more, what is to be tried again goes back to the front of the backlog, in order.
3. The thread connects to the present leader and sends a single batch; only its success opens the window again. So a
   batch never overtakes an earlier one that is still to be written.

When an answer is overdue, somebody looks whether another node leads by now: one that is frozen or cut off ends no
connection. Entries are numbered under a name of the appender's (``dledger.client.numbering``), so that what has an
unknown outcome is sent again, too, and stored once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final

from dledger.client.append_batch import (
    ENTRY_OVERHEAD_BYTES,
    AppendBatch,
    AppenderOptions,
    AppendFuture,
    announce,
    expired_error,
)
from dledger.client.numbering import Numbering
from dledger.client.pipe import AppendPipe, Outcome
from dledger.client.shared import (
    LOOK_AFTER_S,
    LOOK_AGAIN_S,
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    Deadline,
    is_retried,
)
from dledger.errors import DLedgerError, PendingFullError, UnavailableError

INFLIGHT_REQUESTS_MAX: Final = 32
"""Requests under way at once: a leader remembers the places of as many, for the case that they come again."""


class Appender:
    """Use as a context manager; made by ``DLedgerClient.appender``.

    Entries are stored in the order of the ``append`` calls, batch by batch (a batch is all or nothing), and once. A
    batch is tried again until ``timeout_s`` after it was begun; if it was not certainly refused every time, it then
    fails with ``outcome="unknown"``. Without idempotence one whose outcome is unknown fails at once, or with
    ``retry_unknown`` is sent again, so that its entries may be in the log twice (at-least-once). ``append`` blocks
    while ``pending_bytes_max`` bytes wait, at most ``timeout_s``; besides its body each entry counts
    ``ENTRY_OVERHEAD_BYTES``.

    Leaving the context (or ``close``) waits for everything; errors are told by the futures only, and counted in
    ``failed_entries``.
    """

    def __init__(
        self,
        connect: Callable[[Deadline], AppendPipe],
        note_failure: Callable[[str, DLedgerError], None],
        options: AppenderOptions,
        is_led_by_another: Callable[[str], bool] = lambda _address: False,
    ) -> None:
        self.failed_entries = 0
        """How many entries have failed so far."""
        self._connect = connect
        self._note_failure = note_failure
        self._is_led_by_another = is_led_by_another  # asks all nodes
        self._options = options
        self._lock = threading.Lock()  # guards all fields below
        self._work = threading.Condition(self._lock)  # for the thread
        self._room = threading.Condition(self._lock)  # for blocked appends
        self._open: AppendBatch | None = None
        self._backlog: deque[AppendBatch] = deque()
        self._inflight: deque[AppendBatch] = deque()
        self._again: list[AppendBatch] = []
        self._pending_bytes = 0
        self._inflight_entries = 0
        self._batches = 0
        self._pipe: AppendPipe | None = None  # None: recovering, or not yet connected
        self._old_pipe: AppendPipe | None = None  # its last answers are awaited
        self._single = True  # one batch in flight at a time, until one has succeeded
        self._failures = 0  # in a row
        self._numbering = Numbering() if options.idempotent else None
        self._looking: threading.Thread | None = None
        self._looked_at = float("-inf")
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
        looking = self._looking
        if looking is not None:
            looking.join()

    # --- on the caller's thread, under the lock ---------------------------------------------------------------------

    def _open_batch(self) -> AppendBatch:
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
            self._open = AppendBatch(self._batches, linger_until, Deadline(self._options.timeout_s))
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
            batch.sent_at, batch.sent_alone = time.monotonic(), self._single
            self._inflight.append(batch)
            self._inflight_entries += len(batch.bodies)
            if self._numbering is not None:
                self._numbering.number(batch)
            try:
                self._pipe.submit(batch.bodies, partial(self._on_done, batch), ordered=True, producer=batch.producer)
            except DLedgerError as error:
                self._land(batch)
                batch.error = error
                self._again.append(batch)
                self._leave_pipe()
        if self._backlog and self._pipe is None:
            self._work.notify()

    def _has_room(self, batch: AppendBatch) -> bool:
        if not self._inflight:
            return True
        if self._single or len(self._inflight) >= INFLIGHT_REQUESTS_MAX:
            return False
        return self._inflight_entries + len(batch.bodies) <= self._options.inflight_entries_max

    def _land(self, batch: AppendBatch) -> None:
        self._inflight.remove(batch)  # the first one, nearly always
        self._inflight_entries -= len(batch.bodies)

    def _leave_pipe(self) -> None:
        if self._pipe is not None:
            self._old_pipe, self._pipe = self._pipe, None
        self._single = True
        self._work.notify()

    def _finish(self, batch: AppendBatch, outcome: Outcome) -> None:
        self._pending_bytes -= batch.bytes
        if self._numbering is not None:
            self._numbering.finish(batch, stored=not isinstance(outcome, DLedgerError))
        if isinstance(outcome, DLedgerError):
            self.failed_entries += len(batch.bodies)
        batch.outcome = outcome
        batch.bodies = []  # futures may live long; what they wrote need not
        self._room.notify_all()

    # --- on the pipe's thread ---------------------------------------------------------------------------------------

    def _on_done(self, batch: AppendBatch, outcome: Outcome) -> None:
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
                final = self._judge(batch, outcome)
                if final is None:
                    batch.error = outcome
                    self._again.append(batch)
                    finished = False
                else:
                    self._finish(batch, final)
                self._leave_pipe()
            if not self._inflight and (self._pipe is None or self._closed):
                self._work.notify()
            self._pump()
        if finished:
            announce(batch)

    def _judge(self, batch: AppendBatch, error: DLedgerError) -> DLedgerError | None:
        """What a batch ends with after a failed attempt; None: it is tried again."""
        if self._numbering is not None:
            return self._numbering.judge(batch, error)
        if is_retried(error) or (self._options.retry_unknown and error.outcome == "unknown"):
            return None
        return error

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
            announce(batch)

    def _drive(self) -> None:
        while True:
            with self._lock:
                while (wait_s := self._wait_s()) > 0:
                    self._work.wait(wait_s if wait_s < float("inf") else None)
                if self._closed and not (self._inflight or self._backlog or self._again):
                    break
                if self._open is not None and time.monotonic() >= self._open.linger_until:
                    self._seal()
                if self._look_at() <= time.monotonic():
                    self._looking = threading.Thread(target=self._look, name="dledger-appender-look", daemon=True)
                    self._looking.start()
                expired = self._take_expired()
                stuck = self._stuck_pipe()
                reconnect = self._gather() if stuck is None else None
            for batch in expired:
                announce(batch)
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
        due.append(self._look_at() - time.monotonic())
        return min(due)

    def _oldest(self) -> list[AppendBatch]:
        return [queue[0] for queue in (self._inflight, self._backlog) if queue]

    def _take_expired(self) -> list[AppendBatch]:
        """Give up what has waited for its turn too long; nothing of it is in flight."""
        expired = [batch for batch in (*self._again, *self._backlog) if batch.deadline.expired]
        for batch in expired:
            (self._again if batch in self._again else self._backlog).remove(batch)
            self._finish(batch, expired_error(batch))
        return expired

    def _stuck_pipe(self) -> AppendPipe | None:
        if not (self._inflight and self._inflight[0].deadline.expired):
            return None
        self._leave_pipe()
        return self._old_pipe

    def _look_at(self) -> float:
        """When to look whether another node leads; again and again while nothing is answered."""
        if self._looking is not None or self._pipe is None or not self._inflight:
            return float("inf")
        return max(self._inflight[0].sent_at + LOOK_AFTER_S, self._looked_at + LOOK_AGAIN_S)

    def _look(self) -> None:
        """On a thread of its own, since asking takes a while: leave a silent node if another one leads."""
        pipe = self._pipe
        try:
            if pipe is None or not self._is_led_by_another(pipe.address):
                return
            with self._lock:
                overdue = self._inflight and time.monotonic() >= self._inflight[0].sent_at + LOOK_AFTER_S
                if self._pipe is not pipe or not overdue:
                    return
                self._leave_pipe()
            pipe.close()  # what is in flight becomes unknown, through _on_done
        finally:
            with self._lock:
                self._looking = None
                self._looked_at = time.monotonic()
                self._work.notify()

    def _gather(self) -> Deadline | None:
        """Put what is tried again before the rest, once nothing is in flight; the deadline for a new connection."""
        if self._pipe is not None or self._inflight:
            return None
        self._backlog.extendleft(sorted(self._again, key=lambda batch: -batch.number))
        self._again.clear()
        if self._numbering is not None:
            self._numbering.close_gaps(self._backlog)
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
            announce(batch)
