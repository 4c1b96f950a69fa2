"""Dispatch: what the log holds reaches the consume queues, the index and whoever waits for messages.

One thread. It is woken when the log grows and scans about a megabyte at a time, so that what one message costs beside
the others is a few list operations. Order: queues, then index, then the position moves, then the listeners hear of it;
so whoever is told of a message can read it, and a crash anywhere leads to the same work being done again, which the
queues and the index recognise.

**Waking costs a put nearly nothing.** ``wake`` opens a gate only if the thread sleeps in it. After work the thread
first takes a nap of a millisecond, eight after many messages and sixteen after very many, in which nobody needs to wake
it: at high rates it so runs a hundred times a second, each time for many messages; one that comes alone after a pause
goes on at once.

**Bytes that are no record stop it.** RocketMQ skips to the end of the buffer then, and the messages in between never
reach a consumer although their producers were told that they are stored. Here dispatch stops, the store takes no more
messages, and the error that names the place is in its status. A full disk is no such case: it is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from dledger.errors import CorruptLogError, DiskFullError, InvariantError
from dledger.runtime.worker import Gate
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MIB
from rocketstore.types import RecordHead, ScannedRecords

SCAN_BYTES: Final = MIB
RECORD_BYTES_MAX: Final = 64 * MIB
"""More than any record: what is scanned if the record at hand alone is longer than ``SCAN_BYTES``."""
NAPS_S: Final = ((256, 0.016), (64, 0.008), (0, 0.001))
"""How long to nap after more messages than that: what many at once cost beside few is mostly the same."""
FULL_RETRY_S: Final = 1.0
"""How long dispatch waits before it tries again on a full disk."""

_log = logging.getLogger("rocketstore")

_T = TypeVar("_T")
ArrivalListener = Callable[[Sequence[RecordHead]], None]


class RecordSink(Protocol):
    """The consume queues or the index: takes records in log order, and again those that it has already."""

    def append(self, heads: Sequence[RecordHead]) -> object:
        """Take records."""


class DispatchService:
    """Moves ``position`` along the log. ``position`` is where the next scan begins; all before it is dispatched."""

    def __init__(
        self,
        log: CommitLog,
        sinks: Sequence[RecordSink],
        *,
        on_batch: Callable[[Sequence[RecordHead], int], None] = lambda _heads, _took_ms: None,
        on_failure: Callable[[BaseException], None] = lambda _error: None,
        on_jump: Callable[[], None] = lambda: None,
        name: str = "rocketstore-dispatch",
    ) -> None:
        """``on_batch`` gets what was dispatched and how long it took (ms), ``on_failure`` the error that ended it.

        ``on_jump`` is called before a part of the log is left out that is gone without having been dispatched.
        """
        self._on_jump = on_jump
        self._log = log
        self._sinks = tuple(sinks)
        self._on_batch = on_batch
        self._on_failure = on_failure
        self._batch_messages = 0
        self._listeners: tuple[ArrivalListener, ...] = ()
        self._turn = (
            threading.Lock()
        )  # held by who waits for the step lock: a busy thread would take that again at once
        self._step_lock = threading.Lock()  # one stepper at a time; guards position's changes
        self._moved = threading.Condition()  # position moved, or dispatch ended
        self._waiters = 0
        self._gate = Gate()
        self._asleep = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name)
        self.position = 0
        self.last_store_ms = 0
        """Store timestamp of the last dispatched message."""
        self.failure: BaseException | None = None
        self.damage: CorruptLogError | None = None
        """What it waits for the group to repair."""

    def add_listener(self, listener: ArrivalListener) -> None:
        """Call ``listener`` with each batch of records from now on, on this thread; an exception ends dispatch."""
        self._listeners = (*self._listeners, listener)

    def begin_at(self, position: int) -> None:
        """Set where to begin; before ``start``."""
        self.position = position

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """The log has grown. Cheap, from any thread."""
        if self._asleep:
            self._asleep = False
            self._gate.open()

    def stop(self, timeout_s: float) -> bool:
        """Dispatch what is there, for at most ``timeout_s``, then end the thread; False if something is left."""
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
        """Wait until all that the log holds now is dispatched; False if not in time, or if dispatch has failed."""
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
        """Dispatch all there is on the calling thread, without telling listeners; for recovery, before ``start``.

        ``deadline`` is of ``time.monotonic``. Raises ``CorruptLogError``, ``DiskError``, ``DiskFullError``.
        """
        while self._step(notify=False) and (deadline is None or time.monotonic() < deadline):
            pass

    def standstill(self, look: Callable[[], _T]) -> _T:
        """What ``look`` gives while nothing is being dispatched; it must be fast."""
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
                self.position = start  # also where nothing follows yet, or it would be looked for without a pause
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
        """Scan from ``start`` on, and take what is there to all sinks. Under the step lock."""
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
        """Step; gives how long to nap before the next one, 0 to sleep until woken."""
        try:
            moved = self._step(notify=True)
            self.damage = None
            if not moved:
                return 0.0
        except DiskFullError as error:
            _log.warning("dispatch waits: %s", error)
            return FULL_RETRY_S
        except CorruptLogError as error:
            if error.index is None:  # only entries are repaired by a group
                raise
            if self.damage is None:
                _log.error("dispatch is waiting until the log is repaired: %s", error)
            self.damage = error
            return FULL_RETRY_S
        return next((nap_s for messages, nap_s in NAPS_S if self._batch_messages > messages), NAPS_S[-1][1])

    def _rest(self, nap_s: float) -> None:
        if nap_s:
            # More than one scan's worth is waiting, or somebody waits for it: no nap.
            if nap_s < FULL_RETRY_S and (self._waiters or self.behind_bytes() >= SCAN_BYTES):
                return
            self._gate.wait(nap_s)
            return
        self._asleep = True
        # A put that came before the line above saw a thread awake and did not wake it: look again.
        if self.position < self._log.max_offset or self._stopping:
            self._asleep = False
            return
        self._gate.wait(None)
        self._asleep = False
