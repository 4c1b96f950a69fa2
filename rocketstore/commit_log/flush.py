"""Makes the plain commit log durable: with a group flush for all waiting puts, or periodically.

A put makes no system call for this: it calls ``noted`` (ASYNC_FLUSH) or submits a request (SYNC_FLUSH), which wakes the
flushing thread only if that is asleep. Nothing polls; with nothing to flush, the thread sleeps indefinitely.

A request is answered exactly once, by the thread that takes its callback: the flushing thread, or the thread that
watches deadlines, because a hanging disk also blocks the flushing thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dledger.clock import Clock
from dledger.errors import DiskError
from dledger.runtime.threads import Gate, Supervisor
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.queue import MappedFileQueue
from rocketstore.types import PutMessageStatus

FlushDone = Callable[[PutMessageStatus, str], None]
"""Called once, with a reason for people: ``PUT_OK``, ``FLUSH_DISK_TIMEOUT``, or ``UNKNOWN_ERROR`` if the flush failed.
"""
STOP_WAIT_S: Final = 10.0


class FlushRequest:
    """A request to wait until the log is durable up to ``end``. Deadlines are monotonic milliseconds."""

    __slots__ = ("_done", "deadline_ms", "end")

    def __init__(self, end: int, deadline_ms: int, done: FlushDone) -> None:
        self.end = end
        self.deadline_ms = deadline_ms
        self._done: list[FlushDone] = [done]

    @property
    def answered(self) -> bool:
        """Whether a thread has taken the callback."""
        return not self._done

    def answer(self, status: PutMessageStatus, reason: str = "") -> None:
        """Answer, unless already answered."""
        try:
            done = self._done.pop()  # atomic: only one thread gets it
        except IndexError:
            return
        done(status, reason)


class DeadlineWatcher:
    """Answers requests with ``FLUSH_DISK_TIMEOUT`` once their deadline has passed. They are added in order of
    deadlines.
    """

    def __init__(self, clock: Clock, supervisor: Supervisor) -> None:
        self._clock = clock
        self._requests: deque[FlushRequest] = deque()
        self._gate = Gate()
        self._sleeping = False
        self._stopping = False
        self._thread = supervisor.thread("rocketstore-flush-deadlines", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; unanswered requests are left to the flushing thread."""
        self._stopping = True
        self._gate.open()
        if self._thread.ident is not None:
            self._thread.join(STOP_WAIT_S)

    def watch(self, request: FlushRequest) -> None:
        """Watch a request; wakes the thread only if it watches none."""
        self._requests.append(request)
        if self._sleeping:
            self._gate.open()

    @property
    def watched(self) -> int:
        """The number of requests held, including answered ones."""
        return len(self._requests)

    def expire(self) -> float | None:
        """Answer expired requests; returns the seconds until the next deadline, None if there is none."""
        now_ms = self._clock.monotonic_ms()
        while self._requests:
            first = self._requests[0]
            if not first.answered:
                if first.deadline_ms > now_ms:
                    return (first.deadline_ms - now_ms) / 1000
                first.answer(PutMessageStatus.FLUSH_DISK_TIMEOUT, "the flush timed out")
            self._requests.popleft()
        return None

    def _run(self) -> None:
        while not self._stopping:
            wait_s = self.expire()
            if wait_s is None:
                self._sleeping = True  # set before checking again: an append after that check opens the gate
                if not self._requests and not self._stopping:
                    self._gate.wait(None)
                self._sleeping = False
            else:
                self._gate.wait(wait_s)


def flush_all(queue: MappedFileQueue, least_pages: int = 0) -> bool:
    """Flush everything readable now, file by file; returns whether the durable end moved. Raises ``DiskError``.

    Later appends are left to the next flush, because under steady load this would never end.
    """
    moved, target = False, queue.max_offset
    while not queue.flush(least_pages):
        moved = True
        if queue.flushed_where >= target:
            break
    return moved


def commit_all(queue: MappedFileQueue, least_pages: int = 0) -> bool:
    """Commit everything written now, file by file; returns whether anything moved. Raises ``DiskError``."""
    moved, target = False, queue.max_wrote
    while not queue.commit(least_pages):
        moved = True
        if queue.committed_where >= target:
            break
    return moved


class GroupFlushService:
    """SYNC_FLUSH: the first flush that covers a request answers it, and so serves all that are waiting by then."""

    def __init__(
        self,
        queue: MappedFileQueue,
        timeout_ms: int,
        clock: Clock,
        supervisor: Supervisor,
        *,
        on_flushed: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._on_flushed = on_flushed
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._watcher = DeadlineWatcher(clock, supervisor)
        self._requests: deque[FlushRequest] = deque()
        self._group: list[FlushRequest] = []
        """Requests taken by the flushing thread and not yet answered."""
        self._gate = Gate()
        self._sleeping = False
        self._stopping = False
        self._thread = supervisor.thread("rocketstore-group-flush", self._run)

    def start(self) -> None:
        self._watcher.start()
        self._thread.start()

    def stop(self) -> bool:
        """Flush for all waiting requests, and end; False if the disk hangs, and the thread with it."""
        self._stopping = True
        self._gate.open()
        if self._thread.ident is not None:
            self._thread.join(STOP_WAIT_S)
        self._watcher.stop()
        return not self._thread.is_alive()

    def wait_for(self, end: int, done: FlushDone) -> None:
        """Call ``done`` once everything before ``end`` is durable, or the timeout has passed."""
        request = FlushRequest(end, self._clock.monotonic_ms() + self._timeout_ms, done)
        self._watcher.watch(request)
        self._requests.append(request)
        self.noted()

    def noted(self) -> None:
        """Something was written that nobody waits for."""
        if self._sleeping:
            self._gate.open()

    def _run(self) -> None:
        while True:
            if not self.serve():
                if self._stopping:
                    return
                self._sleeping = True
                if not self._due() and not self._stopping:
                    self._gate.wait(None)
                self._sleeping = False

    def _due(self) -> bool:
        waiting = self._group or self._requests
        return bool(waiting) or (not self._queue.poison and self._queue.flushed_where < self._queue.max_offset)

    def serve(self) -> bool:
        """Flush everything written now, file by file, answering after each; returns whether there was something to do.

        A request submitted meanwhile is answered here, too, if one of these flushes covered its message, otherwise by
        the next call: continuous load must not keep anybody waiting.
        """
        queue = self._queue
        if not self._due():
            return False
        self._take()
        count, target, problem = len(self._group), queue.max_offset, ""
        count -= self._answer(count)
        try:
            while queue.flushed_where < target and not queue.flush(0):
                count -= self._answer(count)
        except DiskError as error:
            problem = str(error)
        failed, self._group = self._group[:count], self._group[count:]
        for request in failed:
            request.answer(PutMessageStatus.UNKNOWN_ERROR, problem or "the flush did not reach the message")
        return True

    def _take(self) -> None:
        requests = self._requests
        self._group += [requests.popleft() for _ in range(len(requests))]

    def _answer(self, count: int) -> int:
        """Answer the requests covered by the durable end; returns how many of the first ``count`` these were."""
        self._on_flushed()
        self._take()
        durable, group = self._queue.flushed_where, self._group
        self._group = [request for request in group if request.end > durable]
        for request in group:
            if request.end <= durable:
                request.answer(PutMessageStatus.PUT_OK)
        return sum(request.end <= durable for request in group[:count])


@dataclass(frozen=True, slots=True)
class FlushPace:
    """A pace: every ``interval_ms`` if ``least_pages`` are waiting, everything every ``thorough_ms``.

    ``timed``: at every interval even if work arrives earlier; otherwise as soon as there is work.
    """

    interval_ms: int
    least_pages: int
    thorough_ms: int
    timed: bool = True

    @classmethod
    def of_flush(cls, config: MessageStoreConfig) -> FlushPace:
        """The pace of ASYNC_FLUSH."""
        return cls(
            config.flush_interval_commit_log,
            config.flush_commit_log_least_pages,
            config.flush_commit_log_thorough_interval,
            config.flush_commit_log_timed,
        )

    @classmethod
    def of_commit(cls, config: MessageStoreConfig) -> FlushPace:
        """The pace at which buffers of the transient pool are copied to files."""
        return cls(
            config.commit_interval_commit_log,
            config.commit_commit_log_least_pages,
            config.commit_commit_log_thorough_interval,
        )


class PacedService:
    """ASYNC_FLUSH: calls ``work(least_pages)`` at a pace while ``waiting()`` is true.

    If ``work`` raises ``DiskError``, the queue is poisoned: nothing waits any more, and puts are refused.
    """

    def __init__(
        self,
        name: str,
        pace: FlushPace,
        work: Callable[[int], bool],
        waiting: Callable[[], bool],
        clock: Clock,
        supervisor: Supervisor,
    ) -> None:
        self._pace = pace
        self._work = work
        self._waiting = waiting
        self._clock = clock
        self._gate = Gate()
        self._sleeping = False
        self._stopping = False
        self._thorough_at_ms = clock.monotonic_ms()
        self._thread = supervisor.thread(name, self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Do the remaining work, and end; False if the disk hangs, and the thread with it."""
        self._stopping = True
        self._gate.open()
        if self._thread.ident is not None:
            self._thread.join(STOP_WAIT_S)
        return not self._thread.is_alive()

    def noted(self) -> None:
        """There is work; wakes the thread only if it sleeps indefinitely (or always, if not ``timed``)."""
        if self._sleeping:
            self._gate.open()

    def step(self) -> None:
        """One round, when it is due."""
        now_ms = self._clock.monotonic_ms()
        thorough = self._stopping or now_ms - self._thorough_at_ms >= self._pace.thorough_ms
        try:
            self._work(0 if thorough else self._pace.least_pages)
        except DiskError:
            return  # the queue is poisoned and reports the reason to every caller
        if thorough:
            self._thorough_at_ms = now_ms

    def _run(self) -> None:
        while not self._stopping:
            if self._waiting():
                self._pause()
                self.step()
                continue
            self._sleeping = True  # set before checking again: work added after that check opens the gate
            if not self._waiting() and not self._stopping:
                self._gate.wait(None)
            self._sleeping = False
        if self._waiting():
            self.step()

    def _pause(self) -> None:
        """Wait until the interval has passed or, if not ``timed``, for more work."""
        if not self._pace.timed:
            self._sleeping = True
            self._gate.wait(self._pace.interval_ms / 1000)
            self._sleeping = False
            return
        due_ms = self._clock.monotonic_ms() + self._pace.interval_ms
        while not self._stopping and (left_ms := due_ms - self._clock.monotonic_ms()) > 0:
            self._gate.wait(left_ms / 1000)


class CommitLogFlusher:
    """The flush services that a commit log needs for its settings."""

    def __init__(
        self,
        config: MessageStoreConfig,
        queue: MappedFileQueue,
        clock: Clock,
        supervisor: Supervisor,
        *,
        on_readable: Callable[[], None],
        pooled: bool,
    ) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        """Held by ``flush``, so that callers do not compete."""
        self.readable_at_once = not pooled and config.flush_disk_type != "SYNC_FLUSH"
        """Whether written data are readable at once; otherwise ``on_readable`` is called when they become so."""
        self._on_readable = on_readable
        self.group: GroupFlushService | None = None
        """Only with SYNC_FLUSH."""
        self.first: GroupFlushService | PacedService
        """The service that puts notify (``noted``)."""
        self._paced: list[PacedService] = []
        if config.flush_disk_type == "SYNC_FLUSH":
            self.first = self.group = GroupFlushService(
                queue, config.sync_flush_timeout, clock, supervisor, on_flushed=on_readable
            )
            return
        flushing = PacedService(
            "rocketstore-flush", FlushPace.of_flush(config), self._flush, self._flush_waits, clock, supervisor
        )
        self._paced = [flushing]
        if pooled:
            committing = PacedService(
                "rocketstore-commit", FlushPace.of_commit(config), self._commit, self._commit_waits, clock, supervisor
            )
            self._paced.insert(0, committing)
        self.first = self._paced[0]

    def start(self) -> None:
        for service in self._paced:
            service.start()
        if self.group is not None:
            self.group.start()

    def stop(self) -> bool:
        """Make everything durable and end; False if the disk hangs."""
        hanging = [service for service in self._paced if not service.stop()]
        return not hanging and (self.group is None or self.group.stop())

    def flush(self) -> int:
        """Commit and flush everything now; returns the durable end. Raises ``DiskError``."""
        with self._lock:
            moved = commit_all(self._queue)
            moved = flush_all(self._queue) or moved  # the flushing thread may flush what was committed here
        if moved and not self.readable_at_once:
            self._on_readable()
        return self._queue.flushed_where

    def _flush(self, least_pages: int) -> bool:
        return flush_all(self._queue, least_pages)

    def _flush_waits(self) -> bool:
        return not self._queue.poison and self._queue.flushed_where < self._queue.max_offset

    def _commit(self, least_pages: int) -> bool:
        moved = commit_all(self._queue, least_pages)
        if moved:
            self._paced[-1].noted()
            self._on_readable()
        return moved

    def _commit_waits(self) -> bool:
        # Includes data written directly to a file because no buffer was free: nothing else announces those as readable.
        return not self._queue.poison and self._queue.committed_where < self._queue.max_wrote
