"""Calls that wait in the middle, as events: what a thread does that writes files or talks to another member.

A fiber is a thread that runs only while whoever resumed it waits for it, so one thing happens at a time, in the order
of the events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from tests.sim.scheduler import Scheduler
from tests.sim_store.threads import EPOCH_MS, Killed

_STACK_BYTES: Final = 512 * 1024
_JOIN_TIMEOUT_S: Final = 60.0


class Fiber:
    """Runs one call after another; ``is_busy`` while one of them waits."""

    def __init__(self, fibers: Fibers, not_before_us: Callable[[], int]) -> None:
        """``not_before_us``: until when its process stands still."""
        self._fibers = fibers
        self.not_before_us: Final = not_before_us
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread: threading.Thread | None = None
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._killed = False

    @property
    def is_busy(self) -> bool:
        """Whether its call has not ended."""
        return self._call is not None

    def run(self, call: Callable[[], None]) -> None:
        """Begin ``call``; returns when it has ended or waits. Raises what it raises, then or when it is resumed."""
        if self._thread is None:
            before = threading.stack_size(_STACK_BYTES)
            self._thread = threading.Thread(target=self._run, name="fiber", daemon=True)
            self._thread.start()
            threading.stack_size(before)
        self._call = call
        self.resume()

    def resume(self) -> None:
        """Let it go on."""
        if self._call is None or self._killed:
            return
        before, self._fibers.current = self._fibers.current, self
        self._go.release()
        self._back.acquire()
        self._fibers.current = before
        error, self._error = self._error, None
        if error is not None:
            raise error

    def suspend(self) -> None:
        """On its own thread: wait until it is resumed. Raises ``Killed``."""
        if not self._killed:
            self._back.release()
            self._go.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """Its process is dead: what it does raises ``Killed`` where it waits, now or, from inside, at the next wait."""
        if self._killed or self._thread is None:
            self._killed = True
            return
        self._killed = True
        if self._fibers.current is not self:
            before, self._fibers.current = self._fibers.current, self
            self._go.release()
            self._thread.join(_JOIN_TIMEOUT_S)
            self._fibers.current = before

    def _run(self) -> None:
        self._go.acquire()
        while not self._killed:
            try:
                if self._call is not None:
                    self._call()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised again where the fiber was resumed
                self._error = error
            self._call = None
            self._back.release()
            if not self._killed:
                self._go.acquire()


class Fibers:
    """All fibers of a run, and which one runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.current: Fiber | None = None

    def sleep_us(self, delay_us: int) -> None:
        """Let time pass, in a fiber; nothing else waits."""
        if (fiber := self.current) is not None:
            self._scheduler.after(delay_us, self._resume, fiber)
            fiber.suspend()

    def _resume(self, fiber: Fiber) -> None:
        if (time_us := fiber.not_before_us()) > self._scheduler.now_us:
            self._scheduler.at(time_us, self._resume, fiber)
        else:
            fiber.resume()


class DiskTime:
    """The time of one disk: each call may let others go on (``tests.sim_store.disk`` asks for it).

    ``struck``: whether the machine's power fails before this call, which then never happens.
    """

    def __init__(
        self, fibers: Fibers, scheduler: Scheduler, step_us: Callable[[], int], struck: Callable[[], bool]
    ) -> None:
        self._fibers = fibers
        self._scheduler = scheduler
        self._step_us = step_us
        self._struck = struck

    @property
    def now_us(self) -> int:
        """Since the begin of the run."""
        return self._scheduler.now_us

    @property
    def now_ms(self) -> int:
        """The same."""
        return self._scheduler.now_us // 1000

    def point(self, _chance: float) -> None:
        """Before and after a call."""
        if self._fibers.current is None:
            return
        if self._struck():  # its end is the next event; whoever reads from there hears of it then
            self._fibers.sleep_us(10_000)
            raise Killed
        step_us = self._step_us()
        if step_us:
            self._fibers.sleep_us(step_us)

    def sleep_us(self, delay_us: int) -> None:
        """The disk is slow, or stands still."""
        self._fibers.sleep_us(delay_us)


class SimClock:
    """A member's clocks, in the place of ``dledger.clock.Clock``."""

    def __init__(self, monotonic_ms: Callable[[], int], ahead_ms: int) -> None:
        self._monotonic_ms = monotonic_ms
        self._ahead_ms = ahead_ms

    def monotonic_ms(self) -> int:
        """The member's own."""
        return self._monotonic_ms()

    def wall_ms(self) -> int:
        """The same, as Unix time: members do not agree."""
        return EPOCH_MS + self._ahead_ms + self._monotonic_ms()
