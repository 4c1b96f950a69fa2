"""However much arrives at once, a turn of the loop is short, and everybody has a turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from dledger.remoting import server as module
from dledger.remoting.server import Turns
from dledger.rpc import loops


class _Work:
    """Requests that occupy the loop for a while, and how many of them started together."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.names: list[str] = []
        self.by_turn: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_run = True

    def add(self, host: str, connection: object, name: str, took: Callable[[], None] = lambda: None) -> None:
        self.turns.add(host, connection, partial(self._start, name, took))

    def _start(self, name: str, took: Callable[[], None]) -> None:
        if self._has_run:
            self.by_turn.append(0)
            self._has_run = False
        self.by_turn[-1] += 1
        task = asyncio.get_running_loop().create_task(self._run(name, took))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, took: Callable[[], None]) -> None:
        took()
        self._has_run = True
        self.names.append(name)

    async def finish(self) -> None:
        while len(self.turns) or self._tasks:
            await asyncio.sleep(0)


def _on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loops.run(asyncio.wait_for(test(), 30))


def test_requests_that_take_long_start_one_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thousand heartbeats with a thousand subscriptions would be one turn of seconds."""
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])

    def slow() -> None:
        clock[0] += 5 * module.TURN_S

    async def test() -> None:
        work = _Work()
        for number in range(500):
            work.add("a", number % 7, str(number), slow)
        await work.finish()
        assert work.by_turn == [1] * 500

    _on_a_loop(test)


def test_requests_that_take_no_time_start_many_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also again after some that did."""
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])

    def slow() -> None:
        clock[0] += 5 * module.TURN_S

    async def test() -> None:
        work = _Work()
        work.add("a", 1, "slow", slow)
        for number in range(20 * module.STARTS_MAX):
            work.add("a", 1, str(number))
        await work.finish()
        assert max(work.by_turn) == module.STARTS_MAX
        assert len(work.by_turn) < 100

    _on_a_loop(test)


def test_hosts_and_their_connections_take_turns() -> None:
    """Whoever asks for little need not wait for all that somebody else has asked for before."""

    async def test() -> None:
        work = _Work()
        work.add("greedy", 0, "first")
        for number in range(100):
            work.add("greedy", 1, f"g{number}")
        work.add("greedy", 2, "beside")
        for number in range(3):
            work.add("modest", 3, f"m{number}")
        await work.finish()
        assert work.names[:8] == ["first", "g0", "m0", "beside", "m1", "g1", "m2", "g2"]
        assert [one for one in work.names if one.startswith("g")] == [f"g{number}" for number in range(100)]

    _on_a_loop(test)


def test_nothing_starts_that_was_dropped() -> None:
    """A server that stops has hung up on who asked."""

    async def test() -> None:
        work = _Work()
        for number in range(100):
            work.add("a", 1, str(number))
        work.turns.drop()
        assert len(work.turns) == 0
        await work.finish()
        assert work.names == ["0"]
        work.add("a", 1, "later")
        await work.finish()
        assert work.names == ["0", "later"]

    _on_a_loop(test)
