"""Threads under a seed: one runs at a time, and who is next is decided wherever a thread waits or touches a lock.

The product's modules get these classes in place of ``threading``'s (``substitute``), so its threads, locks, gates and
time-outs are what they are in production; only their order and the clock are ours. Time passes when nobody can run,
and a little at every decision. Real threads carry the tasks, because a stack must be kept for each: a task hands the
baton on and waits until it gets it back.

A group is what dies together: a process. Whatever a task of a dead group does next ends it.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Final

import dledger.clock

_STEP_US: Final = 40
"""A decision takes up to so long."""
_TURNS_MAX: Final = 500
"""A thread that waits for nobody gives way after so many locks, as it does in production after a while."""
EPOCH_MS: Final = 1_700_000_000_000
_STACK_BYTES: Final = 512 * 1024


class Killed(BaseException):
    """Ends a task whose process is dead."""


class DeadlockError(Exception):
    """Raised when nobody can run and nothing is waited for by time."""


class Group:
    """A process: its tasks end with it."""

    def __init__(self, name: str, boot_id: str = "", fs: Any = None) -> None:  # noqa: ANN401  # ``disk`` needs this module
        self.name = name
        self.fs = fs
        """What its processes see of their disk."""
        self.boot_id = boot_id
        self.dead = False
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        """What escaped from one of its tasks."""


class Task:
    """One thread."""

    def __init__(self, scheduler: Scheduler, name: str, group: Group | None) -> None:
        self.name = name
        self.group = group
        self.done = False
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ended: list[Waiter] = []
        self.heir: Task | None = None
        """Who goes on when it ends; None: whoever is next."""
        self.scheduler = scheduler


class Waiter:
    """A task that waits to be woken, or for a time."""

    __slots__ = ("over", "task", "woken")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.over = False
        self.woken = False
        """Rather than timed out."""


class Scheduler:
    """Virtual time, the tasks, and whose turn it is. The thread that makes it is its first task."""

    def __init__(self, random: Random, *, preempt: float = 0.05) -> None:
        self.now_us = 0
        self.random = random
        self.preempt = preempt
        self.switches = 0
        self.points = 0
        self.points_max = 0
        """After so many decisions the run is cut off; 0: never."""
        self.current = Task(self, "driver", None)
        self._ready: list[Task] = []
        self._timers: list[tuple[int, int, Waiter]] = []
        self._sequence = 0
        self._turns = 0
        """How often it might have been somebody else's turn since it last was."""

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """Monotonic."""
        return self.now_us // 1000

    def sleep_us(self, delay_us: int) -> None:
        """Let others run for that long."""
        self.block(Waiter(self.current), delay_us)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def spawn(self, name: str, target: Callable[[], None], group: Group | None) -> Task:
        """A task that is ready to run."""
        task = Task(self, name, group)
        if group is not None:
            group.tasks.append(task)

        def run() -> None:
            task.baton.acquire()
            self.current = task
            try:
                if not _is_dead(task):
                    target()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - told by who looks at the group
                if group is not None and group.failure is None and not group.dead:
                    group.failure = error
            self._end(task)

        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name=f"sim-{name}", daemon=True).start()
        finally:
            threading.stack_size(before)
        self._ready.append(task)
        return task

    def _end(self, task: Task) -> None:
        task.done = True
        if task.group is not None:
            task.group.tasks.remove(task)
        for waiter in task.ended:
            self.wake(waiter)
        heir = task.heir or self._next()
        self.current = heir
        heir.baton.release()

    def kill(self, group: Group) -> None:
        """End all tasks of a group, here and now; not from one of them."""
        group.dead = True
        me = self.current
        for task in list(group.tasks):
            if task in self._ready:
                self._ready.remove(task)
            task.heir = me
            self.current = task
            task.baton.release()
            me.baton.acquire()
        self._ready = [task for task in self._ready if not _is_dead(task)]
        if group.fs is not None:
            group.fs.let_go()

    # -- decisions -----------------------------------------------------------------------------------------------

    def point(self, chance: float) -> None:
        """Somebody else may run here."""
        me = self.current
        if _is_dead(me):
            raise Killed
        self._turns += 1
        if self.random.random() < chance or self._turns > _TURNS_MAX:
            self._ready.append(me)
            self._switch(me)

    def block(self, waiter: Waiter, timeout_us: int | None) -> bool:
        """Wait until woken, or for so long; whether woken."""
        me = self.current
        if _is_dead(me):
            raise Killed
        if timeout_us is not None:
            self._sequence += 1
            heapq.heappush(self._timers, (self.now_us + max(timeout_us, 0), self._sequence, waiter))
        self._switch(me)
        return waiter.woken

    def wake(self, waiter: Waiter) -> bool:
        """Let a waiter go on; False if it does not wait any more."""
        if waiter.over or waiter.task.done:
            return False
        waiter.over = waiter.woken = True
        if not _is_dead(waiter.task):
            self._ready.append(waiter.task)
        return True

    def _switch(self, me: Task) -> None:
        following = self._next()
        self._turns = 0
        if following is not me:
            self.switches += 1
            self.current = following
            following.baton.release()
            me.baton.acquire()
        if _is_dead(me):
            raise Killed

    def _next(self) -> Task:
        """Whose turn it is. It is taken out of those that are ready."""
        self.points += 1
        self.now_us += 1 + int(self.random.random() * _STEP_US)
        timers, ready = self._timers, self._ready
        while True:
            while timers and (timers[0][0] <= self.now_us or timers[0][2].over):
                self._time_out(heapq.heappop(timers)[2])
            if ready:
                return ready.pop(int(self.random.random() * len(ready)))
            if not timers:
                raise DeadlockError("nobody can run")
            self.now_us = max(self.now_us, timers[0][0])

    def _time_out(self, waiter: Waiter) -> None:
        if not waiter.over and not waiter.task.done:
            waiter.over = True
            if not _is_dead(waiter.task):
                self._ready.append(waiter.task)


def _is_dead(task: Task) -> bool:
    return task.group is not None and task.group.dead


_running: list[Scheduler] = []


def running() -> Scheduler:
    """The scheduler whose turn it is: the innermost that was begun."""
    return _running[-1]


def begin(scheduler: Scheduler) -> None:
    """From now on new locks and threads are this scheduler's."""
    _running.append(scheduler)


def end(scheduler: Scheduler) -> None:
    """Undo ``begin``."""
    _running.remove(scheduler)


def _us(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else int(timeout_s * 1_000_000)


class Lock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._scheduler = running()
        self._held = False
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As the real one."""
        scheduler = self._scheduler
        scheduler.point(scheduler.preempt)
        if not self.locked():
            self._held = True
            return True
        if not blocking:
            return False
        deadline_us = None if timeout < 0 else scheduler.now_us + int(timeout * 1_000_000)
        while self.locked():
            left_us = None if deadline_us is None else deadline_us - scheduler.now_us
            if left_us is not None and left_us <= 0:
                return False
            waiter = Waiter(scheduler.current)
            self._waiters.append(waiter)
            scheduler.block(waiter, left_us)
        self._held = True
        return True

    def release(self) -> None:
        """As the real one."""
        if not self._held:
            if _is_dead(self._scheduler.current):
                return
            raise RuntimeError("release unlocked lock")
        self._held = False
        while self._waiters and not self._scheduler.wake(self._waiters.popleft()):
            pass

    def locked(self) -> bool:
        """As the real one."""
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """``threading.RLock``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As the real one."""
        me = running().current
        if self._owner is not me:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        """As the real one."""
        self._count -= 1
        if self._count <= 0:
            self._count, self._owner = 0, None
            self._lock.release()

    def give_up(self) -> int:
        """Release it however often it was taken; how often that was."""
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def take_back(self, count: int) -> None:
        """Undo ``give_up``."""
        self._lock.acquire()
        self._count, self._owner = count, running().current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """``threading.Condition``."""

    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._scheduler = running()
        self._lock = lock or RLock()
        self._waiters: deque[Waiter] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """As the real one."""
        waiter = Waiter(self._scheduler.current)
        self._waiters.append(waiter)
        lock = self._lock
        count = 0
        if isinstance(lock, RLock):
            count = lock.give_up()
        else:
            lock.release()
        woken = self._scheduler.block(waiter, _us(timeout))
        if isinstance(lock, RLock):
            lock.take_back(count)
        else:
            lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:  # noqa: ANN401  # as the real
        """As the real one."""
        deadline_us = None if timeout is None else self._scheduler.now_us + int(timeout * 1_000_000)
        while not (result := predicate()):
            left_s = None if deadline_us is None else (deadline_us - self._scheduler.now_us) / 1_000_000
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, count: int = 1) -> None:
        """As the real one."""
        while count and self._waiters:
            count -= self._scheduler.wake(self._waiters.popleft())

    def notify_all(self) -> None:
        """As the real one."""
        self.notify(len(self._waiters))


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._scheduler = running()
        self._set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        """As the real one."""
        return self._set

    def set(self) -> None:
        """As the real one."""
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._scheduler.wake(waiter)

    def clear(self) -> None:
        """As the real one."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """As the real one."""
        if not self._set:
            waiter = Waiter(self._scheduler.current)
            self._waiters.append(waiter)
            self._scheduler.block(waiter, _us(timeout))
        return self._set


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition(Lock())

    def put(self, item: Any) -> None:  # noqa: ANN401  # anything
        """As the real one."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def qsize(self) -> int:
        """As the real one."""
        return len(self._items)

    def get(self) -> Any:  # noqa: ANN401  # anything
        """As the real one."""
        with self._changed:
            while not self._items:
                self._changed.wait()
            return self._items.popleft()


class Thread:
    """``threading.Thread``; it belongs to the process of whoever starts it."""

    def __init__(
        self,
        group: None = None,  # as the real one
        target: Callable[..., None] = lambda: None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        *,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = running()
        self._target = target
        self._args = args
        self._task: Task | None = None
        self.name = name
        self.daemon = bool(daemon)

    @property
    def ident(self) -> int | None:
        """As the real one."""
        return None if self._task is None else id(self._task)

    def start(self) -> None:
        """As the real one."""
        scheduler = self._scheduler
        scheduler.point(scheduler.preempt)
        self._task = scheduler.spawn(self.name, lambda: self._target(*self._args), scheduler.current.group)
        _threads[self._task] = self

    def is_alive(self) -> bool:
        """As the real one."""
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        """As the real one."""
        task = self._task
        if task is not None and not task.done:
            waiter = Waiter(self._scheduler.current)
            task.ended.append(waiter)
            self._scheduler.block(waiter, _us(timeout))


class ThreadPoolExecutor:
    """``concurrent.futures.ThreadPoolExecutor``, as far as it is used."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._count = max_workers
        self._name = thread_name_prefix

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody works any more once ``map`` has returned."""

    def shutdown(self, wait: bool = True) -> None:
        """Of the threads of a loop's ``run_in_executor``, which end by themselves."""

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """As the real one, but that everything is done when it returns."""
        left = deque(enumerate(items))
        results: dict[int, Any] = {}

        def run() -> None:
            while left:
                number, item = left.popleft()
                results[number] = work(item)

        threads = [Thread(target=run, name=f"{self._name}-{number}") for number in range(min(self._count, len(left)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[number] for number in sorted(results)]


_threads: dict[Task, Thread] = {}


class _Outside:
    """The current thread where it is none of ``Thread``."""

    name = "driver"


def current_thread() -> Thread | _Outside:
    """As the real one."""
    return _threads.get(running().current) or _OUTSIDE


_OUTSIDE: Final = _Outside()


def forget_threads() -> None:
    """After a run."""
    _threads.clear()


class Clock(dledger.clock.Clock):
    """All processes of a run share it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic_ms(self) -> int:
        """Milliseconds since the run began."""
        return self._scheduler.now_us // 1000

    def wall_ms(self) -> int:
        """The same from some day on."""
        return EPOCH_MS + self._scheduler.now_us // 1000
