"""Drives a window with threads: callers send on their own threads; one more thread handles timers and recovery."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from dledger.errors import DLedgerError, InvalidRequestError, PendingFullError, UnavailableError
from dledger.forks import REASON, LostLock, mind_forks
from dledger.records import record
from dledger.sending.batch import Answer, ItemT, OutgoingBatch, ResultT, partly_added
from dledger.sending.futures import wait_for
from dledger.sending.stream import Stream
from dledger.sending.window import LOOK_AFTER_MS, NEVER, Window, Wish, connect_timeout_s

OnAnswer: TypeAlias = Callable[
    [Stream[ItemT, ResultT], OutgoingBatch[ItemT, ResultT], Answer[ResultT]], Callable[[], object]
]
OnEnd: TypeAlias = Callable[[Stream[ItemT, ResultT]], None]
SelfT = TypeVar("SelfT", bound="Sender[Any, Any]")
_log = logging.getLogger(__name__)


@record(frozen=True, slots=True)
class Links(Generic[ItemT, ResultT]):
    """What a sender needs from its client."""

    connect: Callable[[float, OnAnswer[ItemT, ResultT], OnEnd[ItemT, ResultT]], Stream[ItemT, ResultT]]
    """Find the leader and open a stream to it within so many seconds. Raises ``DLedgerError``."""
    find_leader: Callable[[], str | None]
    """Ask all servers who leads; returns the leader's address as known then."""
    note_failure: Callable[[str, DLedgerError], None]
    """Record that the server at an address failed."""


def _now_ms() -> float:
    return time.monotonic() * 1000.0


class Sender(Generic[ItemT, ResultT]):
    """Use as a context manager: leaving it (or ``close``) waits for everything added. Thread-safe."""

    def __init__(self, links: Links[ItemT, ResultT], window: Window[ItemT, ResultT], name: str) -> None:
        self._links = links
        self._window = window
        self._name: Final = name
        self._lock = threading.Lock()  # guards the window and the fields below
        self._work = threading.Condition(self._lock)  # for the thread
        self._room = threading.Condition(self._lock)  # for callers waiting until less is pending
        self._wake_at_ms = 0.0  # when the thread next acts by itself
        self._stream: Stream[ItemT, ResultT] | None = None
        self._blamed: list[tuple[str, DLedgerError]] = []  # failures of servers, to be noted without the lock
        self._helpers: set[threading.Thread] = set()  # threads for slow work
        self._tellers: set[int] = set()  # threads that run the application's callbacks
        self._has_ended = False
        self._is_left_behind = False
        mind_forks(self)
        _living.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failed_items(self) -> int:
        """How many items have failed so far."""
        return self._window.failed_items

    @property
    def is_full(self) -> bool:
        """Whether ``add`` would block now."""
        return self._window.is_full

    def add(
        self,
        payload: bytes,
        *,
        item: ItemT | None = None,
        sequence: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[OutgoingBatch[ItemT, ResultT], int]:
        """Queue an item; returns its batch and its place in it.

        Raises ``PendingFullError`` if too much is pending for too long (in a callback: at once), ``UnavailableError``
        after ``close``, and what ``ProducerNumbering.check`` raises; nothing was queued then.
        """
        window = self._window
        with self._lock:
            now_ms = _now_ms()
            if window.is_full:
                self._wait_for_room(timeout_s)
            if sequence is not None or window.is_numbered_outside:
                window.check_number(sequence)
            timeout_ms = None if timeout_s is None else timeout_s * 1000.0
            batch, place = window.add(payload, now_ms, item=item, sequence=sequence, timeout_ms=timeout_ms)
            if window.open is not batch or not place:
                self._go_on()
        return batch, place

    def put(self, payload: bytes) -> tuple[OutgoingBatch[ItemT, ResultT], int]:
        """``add`` made cheap, for payloads without item data, sequence number or a timeout of their own."""
        window = self._window
        with self._lock:
            batch, place = window.open, window.put(payload)
            if batch is not None and place >= 0:
                if window.open is None:
                    self._go_on()
                return batch, place
        return self.add(payload)

    def add_many(
        self, payloads: Sequence[bytes], *, items: Sequence[ItemT] = (), sequence: int | None = None
    ) -> list[tuple[OutgoingBatch[ItemT, ResultT], int, int]]:
        """Queue items in order; returns their batches, with the first place and the count in each.

        Raises like ``add``; with ``outcome="unknown"`` if some of them were queued.
        """
        window = self._window
        spans: list[tuple[OutgoingBatch[ItemT, ResultT], int, int]] = []
        at = 0
        with self._lock:
            try:
                while at < len(payloads):
                    if window.is_full:
                        self._wait_for_room(None)
                    number = None if sequence is None else sequence + at
                    if number is not None or window.is_numbered_outside:
                        window.check_number(number)
                    span = window.add_some(payloads, at, _now_ms(), items=items, sequence=number)
                    spans.append(span)
                    at += span[2]
                    self._go_on()
            except DLedgerError as error:
                raise partly_added(error, at) from None
        return spans

    def add_whole(
        self, payloads: list[bytes], *, sequence: int | None = None, timeout_s: float | None = None
    ) -> OutgoingBatch[ItemT, ResultT]:
        """Queue payloads that are stored together or not at all. Raises like ``add``."""
        window = self._window
        with self._lock:
            now_ms = _now_ms()
            if window.is_full:
                self._wait_for_room(timeout_s)
            if sequence is not None or window.is_numbered_outside:
                window.check_number(sequence)
            timeout_ms = None if timeout_s is None else timeout_s * 1000.0
            batch = window.add_whole(payloads, now_ms, sequence=sequence, timeout_ms=timeout_ms)
            self._go_on()
        return batch

    def flush(self) -> None:
        """Return when everything added so far has succeeded or failed.

        Raises ``InvalidRequestError`` in a callback, which would wait for itself.
        """
        if self._is_telling:
            raise InvalidRequestError("a callback must not wait for everything to finish: that would deadlock")
        with self._lock:
            self._window.seal()
            waiting = self._window.waiting()
            self._go_on()
        for batch in waiting:
            wait_for(batch, None)

    def close(self) -> None:
        """Flush, then end the threads and the stream. Idempotent. In a callback it does not wait."""
        if self._is_left_behind:  # the parent sends what it has added
            return
        if not self._is_telling:
            self.flush()
        with self._lock:
            self._window.seal()
            self._window.closed = True
            self._work.notify()
            self._room.notify_all()
            helpers = tuple(self._helpers)
        if not self._is_telling:
            self._thread.join()
            for helper in helpers:
                helper.join()

    def abandon(self, error: DLedgerError) -> None:
        """End without waiting: items in flight become unknown, the rest fails with ``error``."""
        if self._is_left_behind:
            return
        with self._lock:
            self._window.fail_all(error, _now_ms())
            stream = self._stream
            self._work.notify()
            self._room.notify_all()
        if stream is not None:
            stream.close(str(error))
        if not self._is_telling:
            self._thread.join()

    def leave_behind(self) -> None:
        """In a forked child: everything fails at once. What is pending is the parent's; it goes on there."""
        self._is_left_behind = True
        self._lock = cast(threading.Lock, LostLock())  # the old one may be held by a thread that is not here
        lost = UnavailableError(REASON)
        lost.outcome = "unknown"
        with suppress(RuntimeError):  # changed by another thread at the moment of the fork
            for batch in self._window.unfinished():
                batch.callbacks.clear()  # they are called in the parent
                batch.complete()
                batch.fail(lost)
                batch.done = True

    def finish_at_exit(self) -> None:
        """The program ends without having closed it: what was added is sent all the same, and that is said."""
        with self._lock:
            left, failed = self._window.pending_items, self._window.failed_items
        if not left:
            return
        self.flush()
        failed = self.failed_items - failed
        _log.warning(
            "%d items were still in %s when the program ended, and were sent then%s: close it, or use it in a with "
            "statement",
            left,
            self._name,
            f"; {failed} of them failed" if failed else "",
        )

    @property
    def _is_telling(self) -> bool:
        return threading.get_ident() in self._tellers

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _wait_for_room(self, timeout_s: float | None) -> None:
        window = self._window
        timeout_s = window.options.timeout_ms / 1000.0 if timeout_s is None else timeout_s
        patience_s = 0.0 if self._is_telling else min(timeout_s, threading.TIMEOUT_MAX)
        if not self._room.wait_for(lambda: not window.is_full or window.closed, patience_s):
            raise PendingFullError(
                f"{window.pending_bytes} bytes are waiting to be sent "
                f"(pending_bytes_max={window.options.pending_bytes_max}), and nothing completed within "
                f"{timeout_s:g} s"
            )

    def _go_on(self) -> None:
        """After an addition: send what may be sent, and make the thread wake in time for the next timer."""
        now_ms = _now_ms()
        self._send(now_ms)
        window = self._window
        due_ms = window.open.linger_until_ms if window.open is not None else NEVER
        due_ms = min(due_ms, now_ms + LOOK_AFTER_MS, window.expiry_ms)
        if self._wake_at_ms > due_ms or not window.is_connected or window.done:
            self._work.notify()

    def _send(self, now_ms: float) -> bool:
        """Pass to the stream what may be sent; returns whether there was anything."""
        window, stream = self._window, self._stream
        sent = False
        while stream is not None and (batch := window.next_to_send(now_ms)) is not None:
            sent = True
            refusal = stream.submit(batch)
            if refusal is not None:
                self._answered(stream, batch, refusal, now_ms)
        return sent

    def _answered(
        self,
        stream: Stream[ItemT, ResultT],
        batch: OutgoingBatch[ItemT, ResultT],
        answer: Answer[ResultT],
        now_ms: float,
    ) -> None:
        blamed = self._window.answered(batch, answer, now_ms)
        if blamed is not None:
            self._blamed.append((stream.address, blamed))

    def _take_news(self) -> tuple[list[OutgoingBatch[ItemT, ResultT]], list[tuple[str, DLedgerError]]]:
        """Take what has to be announced without the lock."""
        done, self._window.done = self._window.done, []
        blamed, self._blamed = self._blamed, []
        if done:
            self._room.notify_all()
        return done, blamed

    def _tell(self, done: list[OutgoingBatch[ItemT, ResultT]], blamed: list[tuple[str, DLedgerError]]) -> None:
        me = threading.get_ident()
        is_outermost = me not in self._tellers
        self._tellers.add(me)
        try:
            for address, error in blamed:
                self._links.note_failure(address, error)
            for batch in done:
                batch.announce()
        finally:
            if is_outermost:
                self._tellers.discard(me)

    # --- on the stream's thread -------------------------------------------------------------------------------------

    def _on_answer(
        self, stream: Stream[ItemT, ResultT], batch: OutgoingBatch[ItemT, ResultT], answer: Answer[ResultT]
    ) -> Callable[[], object]:
        with self._lock:
            now_ms = _now_ms()
            self._answered(stream, batch, answer, now_ms)
            self._send(now_ms)
            news = self._take_news()
            if not self._window.is_connected or self._window.closed:
                self._work.notify()
        return partial(self._tell, *news)

    def _on_end(self, stream: Stream[ItemT, ResultT]) -> None:
        with self._lock:
            if self._stream is stream:
                self._stream = None
                self._window.broken(_now_ms())
                self._work.notify()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        finally:
            # Reached early only through a bug: waiting callers must get an error, not wait for ever.
            with self._lock:
                self._has_ended = True
                self._window.fail_all(UnavailableError(f"the thread {self._name} has ended"), _now_ms())
                stream, self._stream = self._stream, None
            if stream is not None:
                stream.close()
            with self._lock:
                news = self._take_news()
            self._tell(*news)

    def _drive(self) -> None:
        window = self._window
        while True:
            with self._lock:
                wish = window.step(_now_ms())
                if not self._send(_now_ms()) and _is_idle(wish) and not window.done and not self._blamed:
                    if window.closed and window.is_idle:
                        return
                    self._wait(wish.wake_at_ms)
                news = self._take_news()
                stream = self._stream
            self._tell(*news)
            if wish.leave and stream is not None:
                stream.close(wish.leave)
            if wish.look:
                self._begin("look", self._look)
            if wish.connect_until_ms is not None:
                self._begin("connect", partial(self._connect, wish.connect_until_ms))

    def _begin(self, what: str, work: Callable[[], None]) -> None:
        """Run it on its own thread, because timers must be served meanwhile."""
        helper = threading.Thread(target=work, name=f"{self._name}-{what}", daemon=True)
        with self._lock:
            self._helpers.add(helper)
        helper.start()

    def _wait(self, wake_at_ms: float) -> None:
        wait_ms = wake_at_ms - _now_ms()
        if wait_ms > 0:
            self._wake_at_ms = wake_at_ms
            self._work.wait(None if wake_at_ms == NEVER else min(wait_ms / 1000.0, threading.TIMEOUT_MAX))
            self._wake_at_ms = 0.0

    # --- on threads of their own ------------------------------------------------------------------------------------

    def _look(self) -> None:
        leader: str | None = None
        try:
            leader = self._links.find_leader()
        except DLedgerError:  # the client is closed
            pass
        except Exception:  # noqa: BLE001  # such as gRPC's for a channel closed meanwhile
            _log.exception("cannot find the leader")
        with self._lock:
            present = None if self._stream is None else self._stream.address
            self._window.looked(_now_ms(), is_led_by_another=leader not in (None, present))
            self._ends()

    def _connect(self, until_ms: float) -> None:
        with self._lock:
            old, self._stream = self._stream, None
        if old is not None:
            old.close()
        stream: Stream[ItemT, ResultT] | None = None
        failure: DLedgerError = UnavailableError("connecting failed")
        try:
            stream = self._links.connect(connect_timeout_s(until_ms - _now_ms()), self._on_answer, self._on_end)
        except DLedgerError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  # as above
            _log.exception("connecting failed")
            failure = UnavailableError(f"connecting failed: {error!r}")
        with self._lock:
            is_wanted = not self._has_ended
            if stream is None:
                self._window.not_connected(failure, _now_ms())
            elif is_wanted:
                self._stream = stream
                self._window.connected(stream.server_memory)
                if stream.broken is not None:  # it broke before it became the current stream
                    self._window.broken(_now_ms())
            self._ends()
        if stream is not None and not is_wanted:
            stream.close()

    def _ends(self) -> None:
        """Remove the current thread from the helpers."""
        self._helpers.discard(threading.current_thread())
        self._work.notify()


_living: Final[weakref.WeakSet[Sender[Any, Any]]] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Threads of senders are still there: they end after this."""
    for sender in list(_living):
        if not sender._is_left_behind:  # of this module
            sender.finish_at_exit()


def _is_idle(wish: Wish) -> bool:
    return not wish.leave and not wish.look and wish.connect_until_ms is None
