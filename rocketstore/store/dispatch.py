"""Dispatch: passes the log's records to the consume queues, the index and those waiting for messages.

One thread. It is woken when the log grows and scans about a megabyte at a time, so that the additional cost of a
message is a few list operations. Order: queues, then index, then the position moves, then the listeners are notified;
so anyone notified of a message can read it, and after a crash anywhere the same work is repeated, which the queues and
the index recognise.

**Waking costs a put almost nothing.** ``wake`` opens a gate only if the thread is waiting there. After several
messages, the thread first naps for a millisecond, sixteen after many messages, during which nobody needs to wake it: so
at high rates it runs sixty times a second, each time for many messages, and a single message after a pause is handled
at once. As long as nobody waits for messages, it naps longer after any.

**Bytes that are not a record stop it.** RocketMQ then skips to the end of the buffer, and the messages in between never
reach a consumer although their producers were told that they are stored. Here dispatch stops, the store accepts no more
messages, and its status contains the error with the position. A full disk is different: dispatch retries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Final, Protocol, TypeVar

from dledger.errors import CorruptLogError, DiskFullError, InvariantError
from dledger.runtime.threads import Gate
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MIB
from rocketstore.types import BrokerRole, RecordHead, ScannedRecords

SCAN_BYTES: Final = MIB
RECORD_BYTES_MAX: Final = 64 * MIB
"""More than any record: scanned if the next record alone is longer than ``SCAN_BYTES``."""
_NAPS_S: Final = ((64, 0.016), (1, 0.001))
"""How long to nap after more messages than that, because many at once cost little more than a few."""
CALM_NAP_S: Final = 0.01
"""How long to nap at least as long as nobody waits for messages."""
SLAVE_NAP_S: Final = 0.05
"""How long on a slave, where hardly anybody ever does."""
_SINGLE_NAP_S_MAX: Final = 0.005
"""How long at most after a single message: others may be far away, and who asks for the next one waits so long."""
DEFERRED_BYTES_MAX: Final = 1024 * MIB
"""How far dispatch may be behind a log that goes first: it takes twice as long as what the log itself needs."""
FULL_RETRY_S: Final = 1.0
"""How long dispatch waits before it retries on a full disk."""

_log = logging.getLogger("rocketstore")

_T = TypeVar("_T")
ArrivalListener = Callable[[Sequence[RecordHead]], None]


class RecordSink(Protocol):
    """The consume queues or the index: accepts records in log order, including repeated ones."""

    def append(self, heads: Sequence[RecordHead]) -> object:
        """Add records."""


class Pace:
    """How long dispatch may gather messages, and whether it may fall behind. Called on its thread."""

    def __init__(self, role: Callable[[], BrokerRole]) -> None:
        self._role = role
        self.is_awaited: Callable[[], bool] = lambda: True
        """Whether somebody waits for messages; otherwise many become readable together. Called after the listeners."""
        self.log_goes_first: Callable[[], bool] = lambda: False
        """Whether the log grows so fast that dispatch would hold it up."""

    def nap_s_min(self) -> float:
        """How long to gather messages now."""
        if self.is_awaited():
            return 0.0
        return SLAVE_NAP_S if self._role() is BrokerRole.SLAVE else CALM_NAP_S


class DispatchService:
    """Moves ``position`` along the log: the start of the next scan, before which everything is dispatched."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        log: CommitLog,
        sinks: Sequence[RecordSink],
        *,
        on_batch: Callable[[Sequence[RecordHead], int], None] = lambda _heads, _took_ms: None,
        on_failure: Callable[[BaseException], None] = lambda _error: None,
        on_jump: Callable[[], None] = lambda: None,
        nap_s_min: Callable[[], float] = lambda: 0.0,
        log_goes_first: Callable[[], bool] = lambda: False,
        name: str = "rocketstore-dispatch",
    ) -> None:
        """``on_batch`` gets what was dispatched and how long that took (ms), ``on_failure`` the error that ended
        dispatch.

        ``on_jump`` is called before skipping a part of the log that is gone without having been dispatched.
        ``nap_s_min``: how long it may gather messages at the moment, after any. ``log_goes_first``: whether the log
        needs the interpreter more than dispatch does, which then naps even if there is much to do.
        """
        self._nap_s_min = nap_s_min
        self._log_goes_first = log_goes_first
        self._on_jump = on_jump
        self._log = log
        self._sinks = tuple(sinks)
        self._on_batch = on_batch
        self._on_failure = on_failure
        self._batch_messages = 0
        self._listeners: tuple[ArrivalListener, ...] = ()
        self._turn = (
            threading.Lock()
        )  # held while waiting for the step lock, which a busy thread would otherwise reacquire at once
        self._step_lock = threading.Lock()  # one stepper at a time; guards position's changes
        self._moved = threading.Condition()  # position moved, or dispatch ended
        self._waiters = 0
        self._gate = Gate()
        self._asleep = False
        self._stopping = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name=name)
        self.position = 0
        self.last_store_ms = 0
        """Store timestamp of the last dispatched message."""
        self.failure: BaseException | None = None
        self.damage: CorruptLogError | None = None
        """The damage that the group must repair before dispatch continues."""

    def add_listener(self, listener: ArrivalListener) -> None:
        """Call ``listener`` with each batch of records from now on, on this thread; an exception ends dispatch."""
        self._listeners = (*self._listeners, listener)

    def begin_at(self, position: int) -> None:
        """Set the start position; before ``start``."""
        self.position = position

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """The log has grown. Cheap, from any thread."""
        if self._asleep:
            self._asleep = False
            self._gate.open()

    def stop(self, timeout_s: float) -> bool:
        """Dispatch the rest, for at most ``timeout_s``, then end the thread; False if something is left."""
        drained = self.wait_dispatched(timeout_s) if self._thread.is_alive() else self.behind_bytes() == 0
        self._stopping = True
        self._gate.open()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(timeout_s, FULL_RETRY_S))
        return drained and self.failure is None

    def behind_bytes(self) -> int:
        """How much of the log is not yet dispatched."""
        return max(0, self._log.max_offset - self.position)

    def wait_dispatched(self, timeout_s: float) -> bool:
        """Wait until everything now in the log is dispatched; False on timeout, or if dispatch has failed."""
        target = self._log.max_offset
        deadline = time.monotonic() + timeout_s
        with self._moved:
            self._waiters += 1
            self._gate.open()
            try:
                while self.position < target and self.failure is None:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or not self._moved.wait(left_s):
                        break
            finally:
                self._waiters -= 1
        return self.position >= target

    def catch_up(self, deadline: float | None = None) -> None:
        """Dispatch everything on the calling thread, without notifying listeners; for recovery, before ``start``.

        ``deadline`` is a ``time.monotonic`` value. Raises ``CorruptLogError``, ``DiskError``, ``DiskFullError``.
        """
        while self._step(notify=False) and (deadline is None or time.monotonic() < deadline):
            pass

    def standstill(self, look: Callable[[], _T]) -> _T:
        """Call ``look`` while nothing is being dispatched; it must be fast."""
        with self._turn, self._step_lock:
            return look()

    def _step(self, *, notify: bool) -> bool:
        with self._turn:
            pass
        with self._step_lock:
            start = max(self.position, self._log.min_offset)
            heads: Sequence[RecordHead] = ()
            if start > self.position:
                self._on_jump()
                self.position = start  # even if nothing follows yet; otherwise this would repeat without a pause
            elif start >= self._log.max_offset:
                return False
            else:
                heads = self._dispatch(start)
        if self._waiters:
            with self._moved:
                self._moved.notify_all()
        if notify and heads:
            for listener in self._listeners:
                listener(heads)
        return True

    def _dispatch(self, start: int) -> Sequence[RecordHead]:
        """Scan from ``start`` on, and pass the records to all sinks. Requires the step lock."""
        began = time.monotonic()
        scanned = self._scan(start)
        heads = scanned.heads
        if heads:
            for sink in self._sinks:
                sink.append(heads)
            self.last_store_ms = heads[-1].store_timestamp
        self.position = scanned.next_offset
        self._batch_messages = len(heads)
        if heads:
            self._on_batch(heads, int((time.monotonic() - began) * 1000))
        return heads

    def _scan(self, start: int) -> ScannedRecords:
        for bytes_max in (SCAN_BYTES, RECORD_BYTES_MAX):
            scanned = self._log.scan(start, bytes_max)
            if scanned.next_offset > start:
                return scanned
        raise InvariantError(f"the log ends at {self._log.max_offset} but cannot be read from {start}")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._rest(self._step_patiently())
        except BaseException as error:  # noqa: BLE001 - a thread that dies quietly would lose messages for consumers
            _log.critical("dispatch stops at offset %d: %s", self.position, error, exc_info=error)
            self.failure = error
            self._on_failure(error)
            with self._moved:
                self._moved.notify_all()

    def _step_patiently(self) -> float:
        """Run a step; returns how long to nap before the next one, 0 to sleep until woken."""
        try:
            moved = self._step(notify=True)
            self.damage = None
            if not moved:
                return 0.0
        except DiskFullError as error:
            _log.warning("dispatch waits: %s", error)
            return FULL_RETRY_S
        except CorruptLogError as error:
            if error.index is None:  # a group repairs only entries
                raise
            if self.damage is None:
                _log.error("dispatch is waiting until the log is repaired: %s", error)
            self.damage = error
            return FULL_RETRY_S
        nap_s = next((nap_s for messages, nap_s in _NAPS_S if self._batch_messages > messages), 0.0)
        least_s = self._nap_s_min()
        return max(nap_s, least_s if self._batch_messages > 1 else min(least_s, _SINGLE_NAP_S_MAX))

    def _has_much_to_do(self) -> bool:
        behind = self.behind_bytes()
        return behind >= SCAN_BYTES and not (behind < DEFERRED_BYTES_MAX and self._log_goes_first())

    def _rest(self, nap_s: float) -> None:
        if nap_s:
            # More than one scan's worth is waiting, or somebody waits for it: no nap.
            if nap_s < FULL_RETRY_S and (self._waiters or self._has_much_to_do()):
                return
            self._gate.wait(nap_s)
            return
        self._asleep = True
        # A put before the line above saw an awake thread and did not wake it: check again.
        if self.position < self._log.max_offset or self._stopping:
            self._asleep = False
            return
        self._gate.wait(None)
        self._asleep = False
