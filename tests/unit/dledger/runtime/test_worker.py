"""Workers step when due or woken, never in between, and end when told to."""

from __future__ import annotations

import threading

import pytest

from dledger.clock import Clock
from dledger.runtime.threads import Gate, Supervisor, Worker
from tests.support.waiting import wait_until


def _supervisor() -> Supervisor:
    return Supervisor(lambda error: pytest.fail(str(error)))


def test_gate_remembers_a_wake_up_that_came_before_the_wait() -> None:
    """A wake-up between a step and the wait after it must not get lost."""
    gate = Gate()
    gate.open()
    gate.open()

    waiter = threading.Thread(target=gate.wait, args=(None,))
    waiter.start()
    waiter.join(60)

    assert not waiter.is_alive()


def test_a_gate_may_be_waited_at_for_longer_than_the_machine_can_count() -> None:
    """A setting of thousands of years is one of never."""
    gate = Gate()
    gate.open()

    gate.wait(1e15)


def test_gate_wait_ends_by_time() -> None:
    """A closed gate holds a waiter only as long as it said."""
    gate = Gate()

    waiter = threading.Thread(target=gate.wait, args=(0.001,))
    waiter.start()
    waiter.join(60)

    assert not waiter.is_alive()


def test_worker_without_a_due_time_steps_only_when_woken() -> None:
    """No polling: an idle part costs nothing."""
    steps: list[int] = []
    stepped = threading.Event()

    def step() -> None:
        steps.append(len(steps))
        stepped.set()

    worker = Worker("idle", step, Clock(), _supervisor())
    worker.start()
    assert stepped.wait(60)
    stepped.clear()
    assert not stepped.wait(0.05)

    worker.wake()
    assert stepped.wait(60)

    assert worker.stop(60)
    assert len(steps) <= 3  # started, woken, and perhaps once more while stopping


def test_worker_steps_again_when_due() -> None:
    """A part that names a due time is stepped then, without being woken."""
    clock = Clock()
    steps: list[int] = []

    def step() -> int:
        steps.append(1)
        return clock.monotonic_ms() + 1

    worker = Worker("due", step, clock, _supervisor())
    worker.start()
    wait_until(lambda: len(steps) > 3, "several due steps")

    assert worker.stop(60)


def test_stop_before_start_and_twice_is_harmless() -> None:
    """Stopping is idempotent, also for a node that never came up."""
    worker = Worker("never", lambda: None, Clock(), _supervisor())

    assert worker.stop(60)
    assert worker.stop(60)
