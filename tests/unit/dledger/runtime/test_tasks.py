"""Tasks of one thread step when due or woken, and fail alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dledger.clock import Clock
from dledger.runtime.threads import Supervisor, Task, TaskThread
from tests.support.waiting import wait_until


def _unfailing() -> Supervisor:
    return Supervisor(lambda error: pytest.fail(str(error)))


@pytest.fixture
def thread() -> Iterator[TaskThread]:
    """A started thread without tasks, stopped at the end."""
    made = TaskThread("tasks", Clock(), _unfailing())
    made.start()
    yield made
    assert made.stop(60)


class Stepped:
    """Counts the steps of a task that is due when ``due_ms`` says so."""

    def __init__(self, due_ms: int | None = None) -> None:
        self.count = 0
        self.due_ms = due_ms

    def step(self) -> int | None:
        self.count += 1
        return self.due_ms


def test_a_task_without_a_due_time_steps_only_when_woken(thread: TaskThread) -> None:
    """No polling: an idle group costs nothing, whatever the others of its thread do."""
    idle, busy = Stepped(), Stepped(due_ms=0)
    task = Task(thread, idle.step, _unfailing())
    task.start()
    other = Task(thread, busy.step, _unfailing())
    other.start()
    wait_until(lambda: busy.count > 20, "the other one steps again and again")
    assert idle.count == 1

    task.wake()
    wait_until(lambda: idle.count == 2, "it steps when woken")
    assert other.stop(60)
    assert task.stop(60)


def test_a_task_steps_when_it_is_due_and_not_before() -> None:
    """Each at its own time, although they share a thread."""
    clock, due = Clock(), dict[str, int]()
    stepped: dict[str, int] = {}
    thread = TaskThread("tasks", clock, _unfailing())

    def step(name: str, after_ms: int) -> int | None:
        now_ms = clock.monotonic_ms()
        if name in due:
            stepped[name] = now_ms
            return None
        due[name] = now_ms + after_ms
        return due[name]

    tasks = [
        Task(thread, lambda: step("late", 60), _unfailing()),
        Task(thread, lambda: step("early", 20), _unfailing()),
    ]
    for task in tasks:
        task.start()
    thread.start()
    wait_until(lambda: len(stepped) == 2, "both step again")
    assert thread.stop(60)

    assert all(stepped[name] >= due[name] for name in due)
    assert stepped["early"] <= stepped["late"]


@pytest.mark.parametrize(("apart_ms", "together"), [(60, True), (140, False)])
def test_tasks_that_are_due_almost_together_step_together(apart_ms: int, together: bool) -> None:
    """One wake-up for several groups' heartbeats; none waits longer than the slack."""

    class Frozen(Clock):
        """A clock that a test sets."""

        now_ms = 1_000

        def monotonic_ms(self) -> int:
            return self.now_ms

    clock = Frozen()
    thread = TaskThread("tasks", clock, _unfailing(), slack_ms=100)
    for due_ms in (1_020, 1_020 + apart_ms):
        task = Task(thread, lambda: None, _unfailing())
        task.due_ms = due_ms
        thread.add(task)

    assert thread._pause_s() == (20 + apart_ms if together else 20) / 1000
    clock.now_ms = 5_000
    assert thread._pause_s() == 0


def test_a_wake_up_during_a_step_leads_to_another_step(thread: TaskThread) -> None:
    """What came after the step looked must not wait for ever."""
    stepping, go_on = threading.Event(), threading.Event()
    steps: list[None] = []

    def step() -> None:
        steps.append(None)
        stepping.set()
        assert go_on.wait(60)

    task = Task(thread, step, _unfailing())
    task.start()
    assert stepping.wait(60)

    task.wake()
    go_on.set()

    wait_until(lambda: len(steps) == 2, "it steps again")
    assert task.stop(60)


def test_a_task_that_fails_ends_alone(thread: TaskThread) -> None:
    """A group's failure stops that group: the thread is the others' too (N1)."""
    failures: list[BaseException] = []
    failing, other = Supervisor(failures.append), Stepped(due_ms=0)

    def fail() -> int:
        raise ValueError("broken")

    sibling = Stepped(due_ms=0)
    first = Task(thread, fail, failing)
    first.start()
    wait_until(lambda: len(failures) == 1, "the failure is reported")
    after = Task(thread, other.step, _unfailing())
    after.start()
    wait_until(lambda: other.count > 5, "the others step on")

    assert [str(one) for one in failures] == ["broken"]
    assert not first.is_alive
    of_the_same = Task(thread, sibling.step, failing)
    of_the_same.start()
    wait_until(lambda: not of_the_same.is_alive, "what failed with it steps no more")
    assert after.stop(60)


def test_stop_waits_for_the_step_in_progress(thread: TaskThread) -> None:
    """What the task uses may be closed afterwards."""
    stepping, go_on = threading.Event(), threading.Event()
    done: list[None] = []

    def step() -> None:
        stepping.set()
        assert go_on.wait(60)
        done.append(None)

    task = Task(thread, step, _unfailing())
    task.start()
    assert stepping.wait(60)
    assert not task.stop(0.01)
    assert task.is_alive

    go_on.set()

    assert task.stop(60)
    assert done == [None]
    assert not task.is_alive


def test_a_task_may_stop_itself(thread: TaskThread) -> None:
    """A callback of a node may stop the node."""
    told: list[bool] = []

    def step() -> None:
        told.append(task.stop(60))

    task = Task(thread, step, _unfailing())
    task.start()
    wait_until(lambda: bool(told), "it has stopped itself")

    assert told == [True]


def test_a_task_steps_neither_before_its_start_nor_after_its_end(thread: TaskThread) -> None:
    """Wake-ups of a node that is being wired, or stopped, come too early or too late."""
    stepped, other = Stepped(), Stepped(due_ms=0)
    task = Task(thread, stepped.step, _unfailing())
    task.wake()
    marker = Task(thread, other.step, _unfailing())
    marker.start()
    wait_until(lambda: other.count > 5, "the thread has looked")
    assert stepped.count == 0

    task.end()
    task.start()
    task.wake()
    seen = other.count
    wait_until(lambda: other.count > seen + 5, "the thread has looked again")

    assert stepped.count == 0
    assert marker.stop(60)
