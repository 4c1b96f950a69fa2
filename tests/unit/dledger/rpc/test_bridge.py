"""What reaches the client service's loop from other threads: the commit index as followers of the log see it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from dledger.errors import InvariantError
from dledger.rpc import loops
from dledger.rpc.loops import EventHub, LoopBridge, LoopThread
from dledger.rpc.ports import CommitEvent
from dledger.types import LogIndex
from tests.support.fake_node import FakeNode


class _Overtaken(int):
    """An index that another thread tries to overtake at the very moment it is compared."""

    meanwhile: Callable[[], None]

    def __gt__(self, other: int) -> bool:
        self.meanwhile()
        return super().__gt__(other)


def test_a_commit_event_that_is_overtaken_does_not_take_the_commit_index_back() -> None:
    """The driver's threads tell commit indexes as they come; in an idle group nothing would correct a lower one."""

    async def overtake() -> LogIndex:
        node = FakeNode()
        hub = EventHub(node, LoopBridge())
        overtaking = threading.Thread(target=lambda: node.tell(CommitEvent(LogIndex(12))))

        def start_and_wait_a_little() -> None:
            overtaking.start()
            overtaking.join(0.2)  # it ends at once, unless it must wait for us

        slow = _Overtaken(10)
        slow.meanwhile = start_and_wait_a_little
        node.tell(CommitEvent(LogIndex(slow)))
        overtaking.join()
        return hub.committed_index

    assert loops.run(overtake()) == 12


def test_a_callback_that_fails_does_not_hold_up_those_behind_it() -> None:
    """What else was posted belongs to others, who wait for it: pushes, answers, appends."""

    async def post() -> list[str]:
        bridge, ran, failures = LoopBridge(), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context["exception"]))

        def fail() -> None:
            raise ValueError("a bug")

        poster = threading.Thread(target=lambda: [bridge.post(fail), bridge.post(lambda: ran.append("second"))])  # type: ignore[func-returns-value]
        poster.start()
        poster.join()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [*ran, *map(str, failures)]

    assert sorted(loops.run(post())) == ["a bug", "second"]


def test_a_callback_that_fails_on_the_loop_does_not_fail_what_posted_it() -> None:
    """Posted there it runs at once, in the middle of the node's own work, which goes on; the loop reports the error."""

    async def post() -> list[str]:
        bridge, failures = LoopBridge(), []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context["exception"]))

        def fail() -> None:
            raise ValueError("a bug")

        bridge.post(fail)
        return [*map(str, failures)]

    assert loops.run(post()) == ["a bug"]


def test_a_loop_that_ends_by_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread serves others: a node without it must not look alive."""
    failures: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    thread = LoopThread("a-loop", failures.append)

    async def break_down() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(thread, "_run", break_down)
    with pytest.raises(InvariantError):
        thread.start()

    assert [str(failure) for failure in failures] == ["a bug"]
