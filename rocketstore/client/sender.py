"""Pipelined sending: thousands of cheap ``send`` calls become few requests; one thread, no lock per message but one.

``send`` adds to the open batch. A batch is sealed when it is full or has lingered, waits in the backlog until the
window has room, is in flight until its answer comes, and is then finished. One lock guards all of it; one thread seals
lingering batches, notices deadlines and recovers.

While batches wait in the backlog, a lingering one stays open for a tenth of its time: else a broker that answers more
slowly than batches are sealed would get ever more and ever smaller ones, and after an outage the backlog would never be
worked off in time.

When an answer is overdue, somebody looks whether another broker is the master by now: one that is frozen or cut off
ends no connection. Recovery, then and after any failure that is not a message's own:

1. Nothing more goes to that stream; what is in flight there is answered, refused, or unknown.
2. When nothing is in flight any more, what is to be sent again goes back to the front of the backlog, in order.
3. The thread looks for the master and sends a single batch; only its success opens the window again.

Messages are numbered (``numbers``), so that a broker stores each once, however often it is sent, and none before those
sent earlier. After a failure nothing more is sent until all that is in flight is answered, because the numbers of what
follows may change.

Without numbers a broker does not know which request follows which, so a request after a refused one may be stored. That
is why *ordered* senders have one request in flight then, and send a refused message again only if nothing later of its
queue is stored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final

from dledger.client.shared import RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN, Deadline
from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    PendingFullError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from rocketstore.client.batch import MESSAGE_OVERHEAD_BYTES, Encoded, SendBatch, SendFuture, SendOptions
from rocketstore.client.errors import BadAnswerError, MessageRefusedError, SendOutcomeUnknownError, is_retried
from rocketstore.client.numbers import Numbers
from rocketstore.client.pipe import Answer, SendPipe

LOOK_AFTER_S: Final = 0.5
"""An answer that takes longer is overdue."""
LOOK_AGAIN_S: Final = 0.25
"""The pause between two looks around for another master."""
LOOK_TIMEOUT_S: Final = 0.5
"""How long one look waits for silent brokers."""
HELD_OPEN_SHARE: Final = 0.1
"""Of a batch's time: so long it may wait for more messages while others wait before it."""


_ABOUT_NUMBERS: Final = (OutOfOrderSequenceError, UnknownProducerError, TooManyProducersError)
"""Refusals that say nothing about the broker."""


class Sender:
    """Use as a context manager; made by ``Producer.sender``. See ``SendOptions`` for what it promises.

    Leaving the context (or ``close``) waits for everything; errors are told by the futures only, and counted in
    ``failed_messages``.
    """

    def __init__(
        self,
        connect: Callable[[Deadline], SendPipe],
        note_failure: Callable[[str, DLedgerError], None],
        find_master: Callable[[], str | None],
        options: SendOptions,
    ) -> None:
        self.failed_messages = 0
        """How many messages have failed so far."""
        self._connect = connect
        self._note_failure = note_failure
        self._find_master = find_master  # asks every broker; the address of the master as far as is known then
        self._options = options
        self._numbers = Numbers(options.producer_name) if options.idempotent else None
        self._memory = ""  # of the last broker that told of one; on the thread only
        self._lock = threading.Lock()  # guards all fields below, and the numbers
        self._work = threading.Condition(self._lock)  # for the thread
        self._room = threading.Condition(self._lock)  # for blocked sends
        self._open: SendBatch | None = None
        self._backlog: deque[SendBatch] = deque()
        self._inflight: deque[SendBatch] = deque()
        self._again: list[SendBatch] = []
        self._pending_bytes = 0
        self._batches = 0
        self._pipe: SendPipe | None = None  # None: recovering, or not yet connected
        self._old_pipe: SendPipe | None = None  # its last answers are awaited
        self._draining = False  # nothing is sent until nothing is in flight
        self._single = True  # one batch in flight at a time, until one has succeeded
        self._failures = 0  # in a row
        self._looking: threading.Thread | None = None
        self._looked_at = float("-inf")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rocketstore-sender", daemon=True)
        self._thread.start()

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, message: Encoded, sequence: int | None = None) -> SendFuture:
        """Queue one message; ``sequence`` is its number, if the application numbers its messages.

        Raises ``PendingFullError`` if too much waits for too long, ``InvalidRequestError`` for a number where there
        should be none or the other way round, ``OutOfOrderSequenceError`` for one that does not follow. Nothing was
        queued then.
        """
        options = self._options
        with self._lock:
            if self._pending_bytes >= options.pending_bytes_max:
                self._wait_for_room()
            if sequence is not None or options.producer_name:
                self._check_number(sequence)
            batch = self._open or self._open_batch(sequence)
            place = len(batch.messages)
            data, sent = message
            batch.data.append(data)
            batch.messages.append(sent)
            cost = len(data) + MESSAGE_OVERHEAD_BYTES
            size = batch.bytes = batch.bytes + cost
            self._pending_bytes += cost
            if size >= options.batch_bytes or place + 1 >= options.batch_messages:
                self._seal()
        return SendFuture(batch, place)

    def seal(self) -> None:
        """Send what was added so far without waiting for more."""
        with self._lock:
            self._seal()

    def flush(self) -> None:
        """Return when everything added so far is finished, well or badly."""
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

    def _wait_for_room(self) -> None:
        limit = self._options.pending_bytes_max
        deadline = Deadline(self._options.timeout_s)
        while self._pending_bytes >= limit and not self._closed:
            if not self._room.wait(deadline.remaining_s) and deadline.expired:
                raise PendingFullError(
                    f"{self._pending_bytes} bytes wait to be sent (pending_bytes_max={limit}) "
                    f"and none was finished within {deadline.timeout_s:g} s"
                )

    def _check_number(self, sequence: int | None) -> None:
        if self._numbers is None:
            raise InvalidRequestError("messages have numbers only with enable_idempotence")
        if self._closed:
            raise UnavailableError("the producer is closed")
        self._numbers.check(sequence)

    def _open_batch(self, sequence: int | None) -> SendBatch:
        if self._closed:
            raise UnavailableError("the producer is closed")
        self._batches += 1
        linger_until = time.monotonic() + self._options.linger_s
        batch = self._open = SendBatch(self._batches, linger_until, Deadline(self._options.timeout_s))
        if self._numbers is not None:
            self._numbers.begin(batch, sequence)
        self._work.notify()
        return batch

    def _seal(self) -> None:
        batch = self._open
        if batch is not None:
            batch.begin()
            self._backlog.append(batch)
            self._open = None
            self._pump()

    # --- on any thread, under the lock ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send from the backlog what the window has room for, and after it the open batch if that has lingered."""
        while self._pipe is not None and self._has_room():
            if not self._backlog:
                if self._open is None:
                    break
                if time.monotonic() < self._open.linger_until:
                    self._work.notify()  # the thread counts on the backlog
                    break
                self._open.begin()
                self._backlog.append(self._open)
                self._open = None
            batch = self._backlog[0]
            if self._numbers is not None:
                self._numbers.assign(batch)
            if self._inflight and self._inflight[-1].producer != batch.producer:
                break  # what is refused under one name does not keep another one's messages from being stored
            self._backlog.popleft()
            batch.sent_at = time.monotonic()
            self._inflight.append(batch)
            try:
                self._pipe.submit(
                    [batch.data[place] for place in batch.left],
                    partial(self._on_done, batch),
                    producer=batch.producer,
                    sequence=batch.sequence,
                )
            except DLedgerError as error:
                self._inflight.remove(batch)
                batch.error = error
                self._again.append(batch)
                self._leave_pipe()
        if self._backlog and self._pipe is None:
            self._work.notify()

    def _has_room(self) -> bool:
        if self._draining:
            return False
        if not self._inflight:
            return True
        ordered = self._options.ordered and (self._numbers is None or self._numbers.are_off)
        return not (self._single or ordered) and len(self._inflight) < self._options.inflight_requests_max

    def _leave_pipe(self) -> None:
        if self._pipe is not None:
            self._old_pipe, self._pipe = self._pipe, None
        self._draining = self._single = True
        self._work.notify()

    def _finish(self, batch: SendBatch) -> None:
        self._pending_bytes -= batch.bytes
        failed = batch.end()
        self.failed_messages += failed
        if failed and self._numbers is not None and batch.producer:
            self._numbers.failed(batch)
            self._draining = True  # the numbers of those behind it are no longer right
        self._room.notify_all()

    def _regroup(self) -> list[SendBatch]:
        """Nothing is in flight: put what is sent again before the rest. Gives what cannot be sent any more."""
        self._backlog.extendleft(sorted(self._again, key=lambda batch: -batch.number))
        self._again.clear()
        numbers, failed = self._numbers, []
        if numbers is not None:
            waiting = list(self._backlog)
            numbers.regroup(waiting)
            if numbers.is_broken(waiting):
                failed = self._give_up(numbers)
        self._draining = False
        return failed

    def _give_up(self, numbers: Numbers) -> list[SendBatch]:
        """Fail all that waits: it is numbered as if something before it was stored that is not."""
        if self._open is not None:
            self._open.begin()
            self._backlog.append(self._open)
            self._open = None
        broken, error = list(self._backlog), numbers.mend()
        self._backlog.clear()
        for batch in broken:
            batch.fail(error)
            self._finish(batch)
        numbers.mend()  # those that have just failed are no news
        return broken

    # --- on the pipe's thread ---------------------------------------------------------------------------------------

    def _on_done(self, batch: SendBatch, answer: Answer) -> None:
        with self._lock:
            self._inflight.remove(batch)  # the first one, nearly always
            pipe = self._pipe or self._old_pipe
            address = pipe.address if pipe is not None else ""
            trouble = self._take(batch, answer, address)
            finished = [] if batch.left else [batch]
            if not batch.left:
                self._finish(batch)
            else:
                batch.error = trouble
                self._again.append(batch)
            if trouble is None or _is_of_messages(batch, trouble):
                self._failures = 0
                self._single = self._pipe is None
                self._draining = self._draining or (trouble is not None and bool(batch.producer))
            elif not (self._draining and isinstance(trouble, OutOfOrderSequenceError)):
                if batch.doubtful or not isinstance(trouble, _ABOUT_NUMBERS):
                    self._note_failure(address, trouble)
                self._leave_pipe()
            if self._draining and not self._inflight and self._pipe is not None:
                finished += self._regroup()
            if not self._inflight and (self._pipe is None or self._closed):
                self._work.notify()
            self._pump()
        for one in finished:
            one.announce()

    def _take(self, batch: SendBatch, answer: Answer, address: str) -> DLedgerError | None:
        numbers = self._numbers
        if numbers is None or not batch.producer:
            return batch.take(answer, address, self._is_sent_again, ordered=self._options.ordered)
        again = partial(_is_numbered_sent_again, doubtful=batch.doubtful)
        first = batch.sequence
        trouble = batch.take(answer, address, again, ordered=False, given=numbers.are_given)
        if batch.sequence > first:
            numbers.stored(batch)
        return trouble

    def _is_sent_again(self, error: DLedgerError) -> bool:
        repeats = self._options.allow_duplicates and not self._options.idempotent
        return is_retried(error) or (repeats and error.outcome == "unknown")

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        finally:
            # Reached early only through a bug: whoever waits for a batch must hear of it, not wait for ever.
            self._fail_all(UnavailableError("the sender's thread has ended"))
            for pipe in (self._old_pipe, self._pipe):
                if pipe is not None:
                    pipe.close()

    def _fail_all(self, error: DLedgerError) -> None:
        with self._lock:
            self._closed = True
            if self._open is not None:
                self._open.begin()
                self._backlog.append(self._open)
                self._open = None
            failed = [*self._again, *self._backlog]
            self._again.clear()
            self._backlog.clear()
            for batch in failed:
                batch.fail(error)
                self._finish(batch)
            if self._inflight:  # becomes unknown when its pipe is closed
                self._leave_pipe()
        for batch in failed:
            batch.announce()

    def _drive(self) -> None:
        while True:
            with self._lock:
                while (wait_s := self._wait_s()) > 0:
                    self._work.wait(wait_s if wait_s < float("inf") else None)
                if self._closed and not (self._inflight or self._backlog or self._again):
                    break
                if self._open is not None and time.monotonic() >= self._seal_at(self._open):
                    self._seal()
                if self._look_at() <= time.monotonic():
                    self._looking = threading.Thread(target=self._look, name="rocketstore-sender-look", daemon=True)
                    self._looking.start()
                finished = self._take_expired()
                stuck = self._stuck_pipe()
                if self._draining and not self._inflight:
                    finished += self._regroup()
                    self._pump()
                idle = stuck is None and self._pipe is None and not self._inflight and self._backlog
                reconnect = self._backlog[0].deadline if idle else None
            for batch in finished:
                batch.announce()
            if stuck is not None:
                stuck.close("it gave none in time")  # what is in flight becomes unknown, through _on_done
            if reconnect is not None:
                self._reconnect(reconnect)

    def _wait_s(self) -> float:
        """How long the thread has nothing to do."""
        waiting = bool(self._backlog or self._again)
        if self._draining and not self._inflight:
            return 0
        if self._pipe is None and not self._inflight and waiting:
            return 0
        if self._closed and not (waiting or self._inflight):
            return 0
        oldest = [queue[0] for queue in (self._inflight, self._backlog) if queue]
        due = [batch.deadline.remaining_s for batch in (*self._again, *oldest)]
        now = time.monotonic()
        if self._open is not None:
            due.append(self._seal_at(self._open) - now)
        return min([*due, self._look_at() - now])

    def _seal_at(self, batch: SendBatch) -> float:
        """When the open batch waits for more no longer."""
        if not self._backlog:
            return batch.linger_until
        return batch.linger_until + HELD_OPEN_SHARE * self._options.timeout_s

    def _look_at(self) -> float:
        """When to look whether another broker is the master; again and again while nothing is answered."""
        if self._looking is not None or self._pipe is None or not self._inflight:
            return float("inf")
        return max(self._inflight[0].sent_at + LOOK_AFTER_S, self._looked_at + LOOK_AGAIN_S)

    def _take_expired(self) -> list[SendBatch]:
        """Give up what has waited for its turn too long; nothing of it is in flight."""
        expired = [batch for batch in (*self._again, *self._backlog) if batch.deadline.expired]
        for batch in expired:
            (self._again if batch in self._again else self._backlog).remove(batch)
            batch.expire()
            self._finish(batch)
        return expired

    def _stuck_pipe(self) -> SendPipe | None:
        if not (self._inflight and self._inflight[0].deadline.expired):
            return None
        self._leave_pipe()
        return self._old_pipe

    def _look(self) -> None:
        """On a thread of its own, since asking takes a while: leave a silent broker if another one is the master."""
        try:
            master = self._find_master()
            with self._lock:
                pipe = self._pipe if self._is_overdue() else None
                if pipe is not None and master not in (None, pipe.address):
                    self._leave_pipe()
                else:
                    pipe = None
            if pipe is not None:
                # What is in flight becomes unknown, through _on_done.
                pipe.close(f"it gave none for {LOOK_AFTER_S:g} s, and {master} is the master now")
        finally:
            with self._lock:
                self._looking = None
                self._looked_at = time.monotonic()
                self._work.notify()

    def _is_overdue(self) -> bool:
        return bool(self._inflight) and time.monotonic() >= self._inflight[0].sent_at + LOOK_AFTER_S

    def _reconnect(self, deadline: Deadline) -> None:
        old, self._old_pipe = self._old_pipe, None
        if old is not None:
            self._memory = old.memory or self._memory
            old.close()
        if self._failures:
            backoff = min(RETRY_WAIT_S_MIN * 2 ** min(self._failures, 10), RETRY_WAIT_S_MAX)
            threading.Event().wait(min(backoff, deadline.remaining_s))
        self._failures += 1
        try:
            pipe = self._connect(deadline)
        except DLedgerError as error:
            self._on_no_master(error)
            return
        with self._lock:
            doubtful = [batch for batch in self._backlog if batch.doubtful]
        patience_s = min(deadline.remaining_s, LOOK_AFTER_S + LOOK_TIMEOUT_S)  # it may be frozen: then look again
        if doubtful and not pipe.is_told(Deadline(patience_s)):
            pipe.close()
            self._on_no_master(UnavailableError(f"{pipe.address} did not accept a stream in time"))
            return
        if not self._memory or pipe.memory in ("", self._memory):
            doubtful = []
        with self._lock:
            for batch in doubtful:  # what it began could be stored a second time, as that of a new producer
                self._backlog.remove(batch)
                batch.fail(SendOutcomeUnknownError(f"{pipe.address} was restarted: nobody knows what it has stored"))
                self._finish(batch)
            self._pipe = pipe
            self._pump()
        for batch in doubtful:
            batch.announce()

    def _on_no_master(self, error: DLedgerError) -> None:
        hopeless = not is_retried(error)
        with self._lock:
            for batch in self._backlog:
                if batch.error is None or batch.error.outcome == "not_applied":
                    batch.error = error
            # Nothing helps against an address that is no broker: tell it at once instead of at the deadline.
            failed = list(self._backlog) if hopeless else []
            for batch in failed:
                self._backlog.remove(batch)
                batch.fail(error)
                self._finish(batch)
        for batch in failed:
            batch.announce()


def _is_of_messages(batch: SendBatch, trouble: DLedgerError) -> bool:
    """Whether nothing is wrong but with messages."""
    if batch.producer and isinstance(trouble, AccessDeniedError):
        return True
    return isinstance(trouble, MessageRefusedError)


def _is_numbered_sent_again(error: DLedgerError, *, doubtful: bool) -> bool:
    """Whether to send a numbered message again; ``doubtful``: an earlier attempt may have been stored."""
    if isinstance(error, UnknownProducerError):
        return not doubtful  # the broker cannot tell any more
    if isinstance(error, BadAnswerError):
        return False  # it would answer the next one likewise
    return (
        error.outcome == "unknown"
        or is_retried(error)
        or isinstance(error, OutOfOrderSequenceError | TooManyProducersError)
    )
