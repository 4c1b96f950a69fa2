"""The threads of a node: one per part, which steps it, then sleeps until it is due or woken. No polling.

Fail-stop: a thread that dies must not leave a process that looks alive. Every thread of a node runs under one
supervisor. The first exception is kept and reported once; from then on the node acknowledges nothing, and the process
is expected to exit with ``EXIT_FATAL``.

``TaskThread`` is one thread for many tasks. A group has little to do by time, and several groups share a process: a
thread for each part of each group would cost memory and wake-ups. A task that takes its time delays the others of its
thread, so there is a thread for each kind of work, by what it may wait for.

``Flusher`` is the group commit: one flush makes everything durable that was written so far.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from dledger.clock import Clock
from dledger.config import FlushMode, ServerConfig
from dledger.core.ports import Log
from dledger.errors import ShutdownError
from dledger.log_output import speaking_group, speaks_for

EXIT_FATAL: Final = 70
"""Exit status of a node that stopped itself (EX_SOFTWARE)."""

_log = logging.getLogger("dledger")


class Supervisor:
    """Starts threads and calls ``on_fatal`` at the first exception in any of them."""

    def __init__(self, on_fatal: Callable[[BaseException], None], group: str = "") -> None:
        """``group``: whose log lines the threads write; empty: that of who makes it, or a process's."""
        self._on_fatal = on_fatal
        self._group = group or speaking_group()
        self._lock = threading.Lock()  # guards fatal
        self.fatal: BaseException | None = None

    def thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """A named, not yet started thread that runs ``target`` under supervision."""
        return threading.Thread(target=self.run, args=(target,), name=name)

    def run(self, target: Callable[[], None]) -> None:
        """Run ``target`` in the calling thread; an exception that escapes it is fatal for the node."""
        with speaks_for(self._group):
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - the one place that must see everything
                self.report(error)

    def report(self, error: BaseException) -> None:
        """Declare the node failed because of ``error``; only the first report counts."""
        with self._lock:
            if self.fatal is not None:
                return
            self.fatal = error
        where = threading.current_thread().name
        with speaks_for(self._group):
            _log.critical("stopping the node: %s failed in thread %s", error, where, exc_info=error)
        self._on_fatal(error)


class NodeFailedError(ShutdownError):
    """Raised to callers of a node that has stopped itself after a fatal error: another member may answer."""


JOIN_TIMEOUT_S: Final = 10.0
"""How long a stop waits for a thread's step in progress."""


class Gate:
    """A remembered wake-up: ``open`` before ``wait`` lets the next ``wait`` pass at once.

    A bare lock used as a binary semaphore: several times cheaper than ``threading.Condition``, which allocates one per
    wait, and this is on the path of every append.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let one waiter pass, now or when it comes."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # already open

    def wait(self, timeout_s: float | None) -> None:
        """Return when opened, or after ``timeout_s`` (None: no timeout)."""
        self._lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


class Worker:
    """A supervised thread that calls ``step`` until stopped; ``step`` returns its next due time (monotonic ms)."""

    def __init__(self, name: str, step: Callable[[], int | None], clock: Clock, supervisor: Supervisor) -> None:
        self._step = step
        self._clock = clock
        self._gate = Gate()
        self._stopping = False
        self._thread = supervisor.thread(name, self._run)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Make the thread step soon; cheap, from any thread."""
        self._gate.open()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has been started and has not ended."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping = True
        self._gate.open()

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end and wait for it; False if it did not in time."""
        self.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            due_ms = self._step()
            if due_ms is None:
                self._gate.wait(None)
                continue
            wait_ms = due_ms - self._clock.monotonic_ms()
            if wait_ms > 0:
                self._gate.wait(wait_ms / 1000)


class Task:
    """Calls ``step`` on its thread from ``start`` to ``stop``; ``step`` returns its next due time (monotonic ms).

    An exception that escapes ``step`` ends this task only, and fails what ``supervisor`` supervises.
    """

    def __init__(self, thread: TaskThread, step: Callable[[], int | None], supervisor: Supervisor) -> None:
        self._thread = thread
        self._step = step
        self._supervisor = supervisor
        self._stepping = threading.Lock()
        self._is_woken = False
        self._is_started = False
        self._has_ended = False
        self.due_ms: int | None = None
        """When it steps unless it is woken before; None: only when it is woken."""

    def start(self) -> None:
        """Step soon, and from then on when due or woken."""
        if not self._has_ended:
            self._is_started = True
            self._thread.add(self)
            self.wake()

    def wake(self) -> None:
        """Step soon; cheap, from any thread."""
        # Two threads may both see False: one step too many. None is lost: the flag is cleared before the step.
        if not self._is_woken:
            self._is_woken = True
            self._thread.hurry(self)

    def end(self) -> None:
        """Begin no more steps; does not wait for one in progress."""
        self._has_ended = True
        self._thread.remove(self)

    def stop(self, timeout_s: float) -> bool:
        """End it, and wait for a step in progress, unless that is the caller's; False if it did not end in time."""
        self.end()
        if self._thread.is_current:
            return True
        if ended := self._stepping.acquire(timeout=timeout_s):
            self._stepping.release()
        return ended

    @property
    def is_alive(self) -> bool:
        """Whether a step is in progress, or may yet begin."""
        return (self._is_started and not self._has_ended) or self._stepping.locked()

    def run(self) -> None:
        """Step once; by its thread only."""
        with self._stepping:
            self._is_woken = False
            if self._is_started and not self._has_ended:
                self.due_ms = None
                self._supervisor.run(self._take_step)
                if self._supervisor.fatal is not None:
                    self.end()

    def _take_step(self) -> None:
        self.due_ms = self._step()


class TaskThread:
    """A thread that steps tasks, from ``start`` to ``stop``."""

    def __init__(self, name: str, clock: Clock, supervisor: Supervisor, slack_ms: int = 0) -> None:
        """``supervisor`` fails if the thread itself does. ``slack_ms``: how long a task may wait for another one.

        Tasks that are due almost together are stepped together, and mostly stay together: several groups' heartbeats
        then cost one wake-up. One that is alone never waits.
        """
        self._slack_ms = slack_ms
        self._clock = clock
        self._gate: Final = Gate()
        self._lock = threading.Lock()  # guards the replacement of _tasks
        self._tasks: tuple[Task, ...] = ()
        self._woken: deque[Task] = deque()  # each at most twice: see Task.wake
        self._stopping = False
        self._thread = supervisor.thread(name, self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and wait for it; False if it did not end in time. Idempotent."""
        self._stopping = True
        self._gate.open()
        if self._thread.ident is not None and not self.is_current:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._thread is threading.current_thread()

    def add(self, task: Task) -> None:
        """Look after a task."""
        with self._lock:
            if task not in self._tasks:
                self._tasks = (*self._tasks, task)

    def remove(self, task: Task) -> None:
        with self._lock:
            self._tasks = tuple(one for one in self._tasks if one is not task)

    def hurry(self, task: Task) -> None:
        """Step a task as soon as possible."""
        self._woken.append(task)
        self._gate.open()

    def _run(self) -> None:
        while not self._stopping:
            for _ in range(len(self._woken)):  # not those that wake meanwhile: others may be due
                self._woken.popleft().run()
            now_ms = self._clock.monotonic_ms()
            for task in self._tasks:
                if task.due_ms is not None and task.due_ms <= now_ms and not self._stopping:
                    task.run()
            if not self._woken:
                self._gate.wait(self._pause_s())

    def _pause_s(self) -> float | None:
        """How long until a task is due; None: until one is woken."""
        dues = [due_ms for task in self._tasks if (due_ms := task.due_ms) is not None]
        if not dues:
            return None
        latest_ms = min(dues) + self._slack_ms
        together_ms = max(due_ms for due_ms in dues if due_ms <= latest_ms)
        return max(0, together_ms - self._clock.monotonic_ms()) / 1000


class Housekeeping:
    """The threads of a process that do what its groups' members do by time, one for each kind of work.

    From ``start`` to ``stop``. ``name``: of the process, for the threads' names.
    """

    def __init__(self, name: str, clock: Clock, supervisor: Supervisor) -> None:
        def thread(work: str, slack_ms: int = 0) -> TaskThread:
            return TaskThread(f"{work}-{name}", clock, supervisor, slack_ms)

        self.timers: Final = thread("dledger-timers", slack_ms=20)
        """Elections, heartbeats, time-outs of appends: may wait for a node's lock and its hard state's sync."""
        self.checkpoint: Final = thread("dledger-checkpoint", slack_ms=20)
        """May wait for the sync of data and small files."""
        self.warm: Final = thread("dledger-warm", slack_ms=10)
        """May wait for space to be reserved and zeros to be written."""
        self.clean: Final = thread("dledger-clean", slack_ms=100)
        """May wait for a node's lock and the removal of files."""
        self.scrub: Final = thread("dledger-scrub", slack_ms=100)
        """May wait for reads, and for peers."""
        self._threads = (self.timers, self.checkpoint, self.warm, self.clean, self.scrub)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, each after its step in progress. Idempotent."""
        for thread in self._threads:
            thread.stop(JOIN_TIMEOUT_S)


class Flusher:
    """The flushes of one node, on its own thread or, for one that cannot gather anything, on the caller's."""

    def __init__(
        self, config: ServerConfig, log: Log, clock: Clock, supervisor: Supervisor, tell: Callable[[], None]
    ) -> None:
        """``tell`` notifies the node that the log became more durable."""
        self._log = log
        self._clock = clock
        self._tell = tell
        self.at_once: Final = config.store.flush_mode is FlushMode.SYNC
        """Whether a write is followed by a flush as soon as possible."""
        self._interval_ms = config.store.flush_interval_ms
        self._told = log.flushed.sequence  # what the node knows; threads that race report it twice at worst
        self._planned = False  # with flush_mode=async: it will wake by itself
        self._due_ms = 0
        flush = self.flush if self.at_once else self.flush_in_time
        self.worker: Final = Worker(f"dledger-flush-{config.node_id}", flush, clock, supervisor)

    def wake(self) -> None:
        """Something was written."""
        if not self._planned:
            self._planned = not self.at_once
            self.worker.wake()

    def flush_in_time(self) -> int | None:
        """``flush_mode=async``: flush at once after a pause, then once per period while anything is written."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._due_ms:
            return self._due_ms
        if not self._is_wanted():
            self._planned = False  # from here on a write wakes this thread
            if not self._is_wanted():
                return None
            self._planned = True
        self.flush()
        self._due_ms = now_ms + self._interval_ms
        return self._due_ms

    def _is_wanted(self) -> bool:
        flushed = self._log.flushed.sequence
        return self._log.write_sequence > flushed or flushed != self._told

    def flush(self) -> None:
        """One round.

        An application that owns the log may have flushed it itself. The node must be notified all the same, or it would
        wait for ever to count what is already durable.
        """
        if self._log.write_sequence > self._log.flushed.sequence:
            self._log.flush()
        flushed = self._log.flushed.sequence
        if flushed != self._told:
            self._told = flushed
            self._tell()
