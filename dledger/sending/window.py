"""Decides what is sent when and records the outcomes: a state machine without I/O, threads or a clock.

Items are added to the open batch. A batch is sealed when it is full or has lingered, waits in the backlog until the
window has room, is in flight until its answer arrives, and is then done. A driver sends the batches that
``next_to_send`` returns, reports their answers (``answered``), and does what ``step`` requests, until the time at which
``step`` is to be called again.

While batches wait in the backlog, a lingering one stays open for a tenth of its timeout. Otherwise a server that
answers more slowly than batches are sealed would get ever more and ever smaller ones, and the backlog of an outage
would never drain in time. Without a linger, an item is sent at once, and items added while no request may be sent go
together.

When an answer is overdue, the driver is asked to check whether another server leads: a frozen or partitioned one closes
no connection. Recovery, then and after any failure not caused by an item:

1. Nothing more goes to that stream; each request in flight is answered, refused, or unknown.
2. When nothing is in flight, the batches to repeat go back to the front of the backlog, in order, and are renumbered
   (``numbering``).
3. The driver connects to the current leader and sends a single batch; only its success reopens the window.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Final, Generic

from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.records import record
from dledger.sending.batch import (
    ITEM_OVERHEAD_BYTES,
    Answer,
    ItemT,
    OutgoingBatch,
    ProducerNumbering,
    ResultT,
    WindowRules,
    is_misplaced,
)
from dledger.values import Bytes, Positive, Range, Unit, out_of_range

LOOK_AFTER_MS: Final = 500.0
"""An answer that takes longer than this is overdue."""
LOOK_AGAIN_MS: Final = 150.0
"""The pause between two checks for another leader."""
RETRY_STEP_MS: Final = 20.0
"""A batch with less time left is not sent again."""
_RETRY_WAIT_MS_MIN: Final = 5.0
"""Half the first pause: a planned change of leaders takes some 20 ms."""
_RETRY_WAIT_MS_MAX: Final = 100.0
"""A longer pause would outlast the election it waits for."""
_HELD_OPEN_SHARE: Final = 0.1
"""The share of its timeout for which a batch may stay open while others wait before it."""
NEVER: Final = float("inf")

_ABOUT_NUMBERS: Final = (OutOfOrderSequenceError, UnknownProducerError, TooManyProducersError)
"""Refusals that say nothing about the server's health."""


@record(frozen=True, slots=True)
class WindowOptions:
    """The limits of a window."""

    linger_ms: Annotated[float, Range(0), Unit.MS] = 2.0
    batch_bytes: Bytes = 1 << 19
    batch_items: Positive = 1024
    pending_bytes_max: Bytes = 1 << 23
    inflight_requests_max: Positive = 32
    inflight_items_max: Positive = 4096
    timeout_ms: Annotated[float, Range(above=0), Unit.MS] = 5000.0

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if problems:
            raise ConfigError(problems)


@record(frozen=True, slots=True)
class WindowActions:
    """The driver's tasks besides sending, and when to call ``step`` again (``wake_at_ms``)."""

    wake_at_ms: float
    leave: str = ""
    """Why to end the stream, if set; requests in flight on it then come back as unknown."""
    look: bool = False
    """Find out who leads, then call ``looked``."""
    connect_until_ms: float | None = None
    """Find the leader and open a stream to it by then; then call ``connected`` or ``not_connected``."""


def connect_timeout_s(left_ms: float) -> float:
    """Leaves part of the remaining time, so that the reason for a failure is known before the deadline."""
    return max(left_ms * 0.9, 0.0) / 1000.0


class Window(Generic[ItemT, ResultT]):
    """See above. Not thread-safe: its driver's lock guards it. The driver takes and announces what is in ``done``."""

    def __init__(
        self, options: WindowOptions, rules: WindowRules[ItemT, ResultT], numbering: ProducerNumbering | None = None
    ) -> None:
        self.options = options
        self.open: OutgoingBatch[ItemT, ResultT] | None = None
        self.pending_bytes = 0
        self.closed = False
        self.done: list[OutgoingBatch[ItemT, ResultT]] = []
        self._rules = rules
        self._numbering = numbering
        self._backlog: deque[OutgoingBatch[ItemT, ResultT]] = deque()
        self._inflight: deque[OutgoingBatch[ItemT, ResultT]] = deque()
        self._again: list[OutgoingBatch[ItemT, ResultT]] = []
        self._inflight_items = 0
        self._batches = 0
        self.is_connected = False
        """Whether there is a stream that accepts batches."""
        self._is_connecting = False
        self._connect_at_ms = 0.0
        self._server_memory = ""
        self._end_stream = ""  # why the driver must end the stream
        self._expiry_ms = NEVER  # no waiting batch expires earlier
        self._abandoned: DLedgerError | None = None  # why nothing is sent any more
        self._draining = False  # nothing is sent until nothing is in flight
        self._single = True  # one batch in flight at a time, until one has succeeded
        self._failures = 0  # in a row
        self._trouble: DLedgerError | None = None  # why, of the last of them, if it is the server's
        self._is_looking = False
        self._looked_at_ms = -NEVER

    # --- adding -----------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the pending bytes have reached their limit, so that callers should wait before adding more."""
        return self.pending_bytes >= self.options.pending_bytes_max

    @property
    def is_numbered_outside(self) -> bool:
        """Whether the application assigns the numbers."""
        return self._numbering is not None and self._numbering.are_given

    @property
    def pending_items(self) -> int:
        """How many items were added and are not done."""
        unfinished = self.waiting() + ([self.open] if self.open is not None else [])
        return sum(len(one.payloads) for one in unfinished)

    def waiting(self) -> list[OutgoingBatch[ItemT, ResultT]]:
        """All sealed batches that are not done."""
        return [*self._inflight, *self._again, *self._backlog]

    def check_number(self, sequence: int | None) -> None:
        """Validate the number of the next item, before ``add``; see ``ProducerNumbering.check``."""
        if self._numbering is not None:
            self._numbering.check(sequence)
        elif sequence is not None:
            raise InvalidRequestError("sequence numbers require enable_idempotence")

    def add(
        self,
        payload: bytes,
        now_ms: float,
        *,
        item: ItemT | None = None,
        sequence: int | None = None,
        timeout_ms: float | None = None,
    ) -> tuple[OutgoingBatch[ItemT, ResultT], int]:
        """Add an item; returns its batch and its place in it. Raises ``UnavailableError`` after closing."""
        cost = len(payload) + ITEM_OVERHEAD_BYTES
        batch = self.open
        if batch is None or (timeout_ms is not None and timeout_ms != batch.timeout_ms):
            batch = self._begin(now_ms, sequence, timeout_ms)
        if item is not None:
            batch.items.append(item)
        place = len(batch.payloads)
        batch.payloads.append(payload)
        if sequence is not None:
            self._follow(sequence + 1)
        self._count(batch, cost)
        return batch, place

    def add_some(
        self,
        payloads: Sequence[bytes],
        start: int,
        now_ms: float,
        *,
        items: Sequence[ItemT] = (),
        sequence: int | None = None,
    ) -> tuple[OutgoingBatch[ItemT, ResultT], int, int]:
        """Add as many of ``payloads`` from ``start`` on as fit a batch; returns it, the first place and the count.

        ``sequence`` is the number of ``payloads[start]`` if the application assigns numbers; see ``check_number``.
        """
        options = self.options
        place, size = (0, 0) if self.open is None else (len(self.open.payloads), self.open.size)
        chunk = payloads[start : start + options.batch_items - place]
        sizes = list(accumulate(len(payload) + ITEM_OVERHEAD_BYTES for payload in chunk))
        count = min(bisect_left(sizes, options.batch_bytes - size) + 1, len(chunk))
        batch = self.open or self._begin(now_ms, sequence, None)
        batch.payloads += chunk[:count]
        batch.items += items[start : start + count]
        if sequence is not None:
            self._follow(sequence + count)  # only those taken: others may come before the rest
        self._count(batch, sizes[count - 1])
        return batch, place, count

    def _follow(self, sequence: int) -> None:
        if self._numbering is not None:
            self._numbering.follow(sequence)

    def _count(self, batch: OutgoingBatch[ItemT, ResultT], cost: int) -> None:
        self.pending_bytes += cost
        batch.size += cost
        if batch.size >= self.options.batch_bytes or len(batch.payloads) >= self.options.batch_items:
            self.seal()

    def add_whole(
        self,
        payloads: list[bytes],
        now_ms: float,
        *,
        sequence: int | None = None,
        timeout_ms: float | None = None,
    ) -> OutgoingBatch[ItemT, ResultT]:
        """Add payloads that go alone in one request, however large."""
        size = sum(map(len, payloads)) + len(payloads) * ITEM_OVERHEAD_BYTES
        batch = self._begin(now_ms, sequence, timeout_ms)
        batch.payloads = payloads
        batch.is_whole = True
        batch.size = size
        if sequence is not None:
            self._follow(sequence + len(payloads))
        self.pending_bytes += batch.size
        self.seal()
        return batch

    def _begin(self, now_ms: float, sequence: int | None, timeout_ms: float | None) -> OutgoingBatch[ItemT, ResultT]:
        if self.closed:
            raise UnavailableError("closed: nothing more can be sent")
        self.seal()
        options = self.options
        timeout_ms = options.timeout_ms if timeout_ms is None else timeout_ms
        self._batches += 1
        batch = self.open = OutgoingBatch(self._batches, now_ms + options.linger_ms, now_ms + timeout_ms, timeout_ms)
        if self._numbering is not None:
            self._numbering.begin(batch, sequence)
        return batch

    def seal(self) -> None:
        """Close the open batch to further items."""
        batch = self.open
        if batch is not None:
            batch.complete()
            self._backlog.append(batch)
            self._expiry_ms = min(self._expiry_ms, batch.give_up_at_ms)
            self.open = None

    def next_to_send(self, now_ms: float) -> OutgoingBatch[ItemT, ResultT] | None:
        """The next batch for the stream, now in flight; None if there is none, or no room.

        The driver sends the payloads at the places in ``sent``, under ``producer``, numbered from ``sequence``.
        """
        if self._draining or not self.is_connected:
            return None
        if not self._backlog:
            if self.open is None or now_ms < self.open.linger_until_ms or not self._has_room(0):
                return None
            self.seal()
        batch = self._backlog[0]
        if not self._has_room(len(batch.left)):
            return None
        if batch.error is not None and batch.give_up_at_ms - now_ms < RETRY_STEP_MS:
            return None  # without time for an answer, a certain "not stored" would become unknown
        if self._numbering is not None:
            self._numbering.assign(batch, now_ms)
        if self._inflight and self._inflight[-1].producer != batch.producer:
            return None  # a refusal under one name must not block items under another
        self._backlog.popleft()
        batch.begin(now_ms, is_first=not self._inflight)
        self._inflight.append(batch)
        self._inflight_items += len(batch.sent)
        return batch

    def _has_room(self, items: int) -> bool:
        if not self._inflight:
            return True
        options = self.options
        if self._single or len(self._inflight) >= options.inflight_requests_max:
            return False
        return self._inflight_items + items <= options.inflight_items_max

    # --- answers ----------------------------------------------------------------------------------------------------

    def answered(
        self, batch: OutgoingBatch[ItemT, ResultT], answer: Answer[ResultT], now_ms: float
    ) -> DLedgerError | None:
        """Record the answer to a batch in flight, or why there will be none.

        Returns an error that speaks against the server: the driver may have to switch to another one.
        """
        self._inflight.remove(batch)  # the first one, nearly always
        self._inflight_items -= len(batch.sent)
        was_draining = self._draining
        trouble = self._take_late(batch, answer) if batch.done else self._take(batch, answer)
        blamed: DLedgerError | None = None
        if trouble is None or self._is_of_items(batch, trouble):
            self._failures, self._trouble = 0, None
            self._single = not self.is_connected
        elif not (was_draining and isinstance(trouble, OutOfOrderSequenceError)):
            if batch.doubtful or not isinstance(trouble, _ABOUT_NUMBERS):
                blamed = trouble
            self._trouble = trouble if self._is_of_server(trouble) else None
            self._leave(now_ms)
        if self._draining and not self._inflight:
            self._regroup(now_ms)
        return blamed

    def _take(self, batch: OutgoingBatch[ItemT, ResultT], answer: Answer[ResultT]) -> DLedgerError | None:
        numbering = self._numbering
        first = batch.sequence
        given = numbering is not None and numbering.are_given
        trouble = batch.take(answer, self._rules, given=given)
        if numbering is not None and batch.producer and batch.sequence > first:
            numbering.stored(batch)
        if numbering is not None and batch.lost:
            numbering.failed(batch)
            batch.forget()
        if batch.left and trouble is not None and numbering is not None and numbering.is_orphan(batch, trouble):
            batch.fail(trouble)
        if batch.left and self._abandoned is not None:
            batch.fail(self._abandoned)
        if batch.left:
            batch.error = trouble
            self._again.append(batch)
            self._draining = True
        else:
            self._finish(batch)
        return trouble

    def _take_late(self, batch: OutgoingBatch[ItemT, ResultT], answer: Answer[ResultT]) -> DLedgerError | None:
        """Record an answer after the batch was reported as unknown; its numbers matter to the batches behind it."""
        numbering = self._numbering
        first = batch.sequence
        is_stored = batch.take_late(answer)
        if numbering is not None and batch.producer:
            if batch.sequence > first:
                numbering.stored(batch)
            if not is_stored:
                self._note_failed(numbering, batch)
        return answer if isinstance(answer, DLedgerError) else None

    def _is_of_items(self, batch: OutgoingBatch[ItemT, ResultT], trouble: DLedgerError) -> bool:
        """Whether only items are to blame."""
        if trouble.outcome == "unknown":
            return False
        kinds = (InvalidRequestError, AccessDeniedError) if batch.producer else InvalidRequestError
        return isinstance(trouble, kinds)

    def _is_of_server(self, trouble: DLedgerError) -> bool:
        """Whether it says of the items behind, too, why they were not sent."""
        return trouble.outcome == "unknown" or self._rules.is_retried(trouble)

    def _leave(self, now_ms: float) -> None:
        """Send nothing more to this stream."""
        if self.is_connected:
            self.is_connected = False
            self._connect_at_ms = now_ms + self._backoff_ms()
        self._draining = self._single = True

    def _backoff_ms(self) -> float:
        """The pause before connecting again, by failures in a row: 0, 10, 20, 40, 80, then 100 ms."""
        if not self._failures:
            return 0.0
        return min(_RETRY_WAIT_MS_MIN * (1 << min(self._failures, 10)), _RETRY_WAIT_MS_MAX)

    def _finish(self, batch: OutgoingBatch[ItemT, ResultT]) -> None:
        self.pending_bytes -= batch.size
        failed = batch.failed
        numbering = self._numbering
        if failed and numbering is not None and batch.producer and (numbering.are_given or not batch.sent):
            self._note_failed(numbering, batch)
        batch.payloads = []  # futures may live long and need no payload
        batch.done = True
        self.done.append(batch)

    def _note_failed(self, numbering: ProducerNumbering, batch: OutgoingBatch[ItemT, ResultT]) -> None:
        numbering.failed(batch)
        self._draining = True  # the numbers of the batches behind it are now wrong

    def _regroup(self, now_ms: float) -> None:
        """With nothing in flight, put the batches to repeat before the rest."""
        self._backlog.extendleft(sorted(self._again, key=lambda batch: -batch.number))
        self._again.clear()
        numbering = self._numbering
        if numbering is not None:
            waiting = list(self._backlog)
            numbering.regroup(waiting, now_ms)
            if numbering.is_broken(waiting):
                self._give_up_all(numbering)
        self._draining = False

    def _give_up_all(self, numbering: ProducerNumbering) -> None:
        """Fail all waiting batches: their numbers presuppose an earlier item that was not stored."""
        self.seal()
        broken = list(self._backlog)
        error = numbering.mend()
        self._backlog.clear()
        for place, batch in enumerate(broken):
            misplaced = batch.error if not place and is_misplaced(batch) else None
            batch.fail(misplaced or error)
            self._finish(batch)
        numbering.mend()  # the failures above change nothing more

    # --- the stream -------------------------------------------------------------------------------------------------

    def connected(self, server_memory: str = "") -> None:
        """A stream to the leader is open.

        ``server_memory`` identifies the memory of a server that forgets its producers when it restarts: a server that
        has forgotten could store a doubtful batch a second time.
        """
        self._is_connecting = False
        if self._server_memory and server_memory and server_memory != self._server_memory:
            error = self._rules.unknown("the server was restarted: what it stored is unknown")
            self._fail([batch for batch in self._backlog if batch.doubtful], error)
        self._server_memory = server_memory or self._server_memory
        self.is_connected = True

    def not_connected(self, error: DLedgerError, now_ms: float) -> None:
        """No leader was found, or it accepted no stream."""
        self._is_connecting = False
        self._connect_at_ms = now_ms + self._backoff_ms()
        self._trouble = error
        for batch in self._backlog:
            if batch.error is None or batch.error.outcome == "not_applied":
                batch.error = error
        if not self._rules.is_retried(error):
            # Retrying cannot help against an address of another kind of server: report it at once.
            self._fail(list(self._backlog), error)

    def _fail(self, batches: list[OutgoingBatch[ItemT, ResultT]], error: DLedgerError) -> None:
        """Fail these batches of the backlog."""
        for batch in batches:
            self._backlog.remove(batch)
            batch.fail(error)
            self._finish(batch)

    def fail_all(self, error: DLedgerError, now_ms: float) -> None:
        """Close the window: waiting batches fail; those in flight get their outcome when the stream ends."""
        self.closed = True
        self._abandoned = error
        self.seal()
        self._backlog.extendleft(sorted(self._again, key=lambda batch: -batch.number))
        self._again.clear()
        self._fail(list(self._backlog), error)
        self._leave(now_ms)

    def broken(self, now_ms: float) -> None:
        """The stream has ended, after ``answered`` for every batch in flight on it."""
        self._leave(now_ms)

    def looked(self, now_ms: float, *, is_led_by_another: bool) -> None:
        """Take the result of a check for another leader; ``step`` acts on it."""
        self._is_looking = False
        self._looked_at_ms = now_ms
        if is_led_by_another and self._inflight and now_ms >= self._inflight[0].sent_at_ms + LOOK_AFTER_MS:
            self._leave(now_ms)
            self._end_stream = f"no answer for {LOOK_AFTER_MS:g} ms, and another server leads now"

    # --- time -------------------------------------------------------------------------------------------------------

    def step(self, now_ms: float) -> WindowActions:
        """Do what is due. The driver calls it after every event, and at the time it last returned."""
        if self.open is not None and now_ms >= self._seal_at_ms(self.open):
            self.seal()
        self._expire(now_ms)
        if self._draining and not self._inflight:
            self._regroup(now_ms)
        connect_until_ms: float | None = None
        if self._wants_stream() and now_ms >= self._connect_at_ms:
            self._is_connecting = True
            self._failures += 1
            connect_until_ms = self._expiry_ms
        look = now_ms >= self._look_at_ms()
        self._is_looking = self._is_looking or look
        leave, self._end_stream = self._end_stream, ""
        return WindowActions(self._wake_at_ms(), leave, look, connect_until_ms)

    def _expire(self, now_ms: float) -> None:
        """Fail the batches whose deadline has passed."""
        if now_ms >= self._expiry_ms:
            connected = self.is_connected or self._inflight
            idle = "earlier requests were still in flight" if connected else "no connection to a leader was open yet"
            waited_for = self._trouble or idle
            for queue in (self._inflight, self._again, self._backlog):
                for batch in [one for one in queue if now_ms >= one.give_up_at_ms and not one.done]:
                    if not batch.sent:
                        queue.remove(batch)
                    batch.expire(self._rules, waited_for)
                    self._finish(batch)
            waiting = [batch.give_up_at_ms for batch in self.waiting() if not batch.done]
            self._expiry_ms = min(waiting, default=NEVER)
        first = self._inflight[0] if self._inflight else None
        if first is not None and first.done and now_ms >= first.sent_at_ms + LOOK_AFTER_MS:
            self._leave(now_ms)
            self._end_stream = "no answer in time"

    def _wants_stream(self) -> bool:
        ready = not (self.is_connected or self._is_connecting or self._inflight)
        return ready and bool(self._backlog)

    def _seal_at_ms(self, batch: OutgoingBatch[ItemT, ResultT]) -> float:
        """When the open batch is sealed at the latest."""
        held_ms = _HELD_OPEN_SHARE * batch.timeout_ms if self._backlog else 0.0
        return min(batch.linger_until_ms + held_ms, batch.give_up_at_ms)

    def _look_at_ms(self) -> float:
        """When to check for another leader; repeatedly while no answer arrives."""
        if self._is_looking or not self._inflight:
            return NEVER
        return max(self._inflight[0].sent_at_ms + LOOK_AFTER_MS, self._looked_at_ms + LOOK_AGAIN_MS)

    def _wake_at_ms(self) -> float:
        due = [self._look_at_ms(), self._expiry_ms]
        if self.open is not None:
            due.append(self._seal_at_ms(self.open))
        if self._wants_stream():
            due.append(self._connect_at_ms)
        return min(due)
