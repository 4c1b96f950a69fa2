"""Role changes reach handlers in order, on one thread, between startup and shutdown."""

from __future__ import annotations

import sys
import threading

import pytest

from dledger.core.messages import RoleChange
from dledger.runtime.events import RoleChangeNotifier
from dledger.runtime.threads import Supervisor
from dledger.types import NodeId, Role, Term
from tests.support.waiting import wait_until


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[object] = []
        self.threads: set[str] = set()

    def _note(self, call: object) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def startup(self) -> None:
        self._note("startup")

    def role_changed(self, change: RoleChange) -> None:
        self._note(change)

    def shutdown(self) -> None:
        self._note("shutdown")


def test_handlers_see_startup_changes_in_order_and_shutdown_on_one_thread() -> None:
    """The broker's master switch depends on this order (DLedger's role-change handlers, spec §3.5)."""
    recorder = _Recorder()
    notifier = RoleChangeNotifier("n0", Supervisor(lambda error: pytest.fail(str(error))))
    notifier.add_handler(recorder)
    changes = [RoleChange(Role.CANDIDATE, Term(t), None) for t in range(50)]

    notifier.start()
    for change in changes:
        notifier.publish(change)
    notifier.stop()

    assert recorder.calls == ["startup", *changes, "shutdown"]
    assert recorder.threads == {"dledger-role-change-n0"}


def test_a_cancelled_listener_hears_nothing_more() -> None:
    """A client that stops watching costs nothing any more."""
    notifier = RoleChangeNotifier("n0", Supervisor(lambda error: pytest.fail(str(error))))
    heard: list[RoleChange] = []
    kept: list[RoleChange] = []
    cancel = notifier.listen(heard.append)
    notifier.listen(kept.append)
    cancel()

    notifier.start()
    change = RoleChange(Role.LEADER, Term(1), NodeId("n0"))
    notifier.publish(change)
    notifier.stop()

    assert heard == []
    assert kept == [change]


def test_a_cancellation_loses_no_other_listener() -> None:
    """Watchers come and go on different threads; one that is registered meanwhile must not be forgotten."""
    notifier = RoleChangeNotifier("n0", Supervisor(lambda error: pytest.fail(str(error))))
    heard: list[int] = []
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            notifier.listen(lambda _change: None)()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=come_and_go)
    other.start()
    for number in range(300):
        notifier.listen(lambda _change, number=number: heard.append(number))  # type: ignore[misc]  # bound early
    done.set()
    other.join()
    sys.setswitchinterval(interval)

    notifier.start()
    notifier.publish(RoleChange(Role.LEADER, Term(1), NodeId("n0")))
    notifier.stop()

    assert heard == list(range(300))


def test_a_handler_may_stop_the_notifier() -> None:
    """A broker that cannot become master stops its node, on the very thread that told it."""

    class Stopping(_Recorder):
        def role_changed(self, change: RoleChange) -> None:
            super().role_changed(change)
            notifier.stop()

    recorder = Stopping()
    notifier = RoleChangeNotifier("n0", Supervisor(lambda error: pytest.fail(str(error))))
    notifier.add_handler(recorder)
    change = RoleChange(Role.LEADER, Term(1), NodeId("n0"))

    notifier.start()
    notifier.publish(change)
    wait_until(lambda: len(recorder.calls) == 3, "the handler's shutdown")
    notifier.stop()

    assert recorder.calls == ["startup", change, "shutdown"]


def test_a_failing_handler_stops_the_node(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that cannot become master must not leave a leader that looks healthy."""

    class Failing(_Recorder):
        def role_changed(self, change: RoleChange) -> None:
            raise ValueError(f"cannot take {change.role}")

    failures: list[BaseException] = []
    notifier = RoleChangeNotifier("n0", Supervisor(failures.append))
    notifier.add_handler(Failing())

    notifier.start()
    notifier.publish(RoleChange(Role.LEADER, Term(1), NodeId("n0")))
    notifier.stop()

    assert [str(failure) for failure in failures] == ["cannot take LEADER"]
    assert "cannot take LEADER" in caplog.text
