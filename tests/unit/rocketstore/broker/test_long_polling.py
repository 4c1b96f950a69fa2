"""Pulls that wait: whom an arrival wakes, and what that costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger.rpc import loops
from dledger.rpc.loops import LoopBridge
from rocketstore.broker.pull import WaitingPulls
from rocketstore.broker.refusal import Refusal
from tests.unit.rocketstore.heads import head


class Bridge(LoopBridge):
    """Keeps what is posted until ``run_all``; no loop runs elsewhere."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []

    def post(self, callback: Callable[[], None]) -> None:
        self.posted.append(callback)

    def run_all(self) -> None:
        posted, self.posted = self.posted, []
        for callback in posted:
            callback()


def test_an_arrival_wakes_those_it_may_suit() -> None:
    """By queue and by the tags' codes; nobody else."""

    async def scenario() -> None:
        bridge = Bridge()
        pulls = WaitingPulls(bridge, waiting_max=10)
        everything = pulls.enter(("T", 0), None)
        wanted, other = pulls.enter(("T", 0), frozenset({7, 8})), pulls.enter(("T", 0), frozenset({9}))
        elsewhere = pulls.enter(("T", 1), None)

        pulls.arrived([head(0, tags_code=7), head(1, tags_code=5)])
        bridge.run_all()

        assert [one.woken for one in (everything, wanted, other, elsewhere)] == [True, True, False, False]

    loops.run(scenario())


def test_a_burst_is_told_to_the_loop_once() -> None:
    """However many pulls wait and however many batches come before the loop has time."""

    async def scenario() -> None:
        bridge = Bridge()
        pulls = WaitingPulls(bridge, waiting_max=5000)
        waiters = [pulls.enter(("T", 0), frozenset({number})) for number in range(5000)]

        for number in range(100):
            pulls.arrived([head(number, tags_code=number)])

        assert len(bridge.posted) == 1
        bridge.run_all()
        assert [one.woken for one in waiters] == [True] * 100 + [False] * 4900
        pulls.arrived([head(100, tags_code=100)])
        assert len(bridge.posted) == 1

    loops.run(scenario())


def test_who_leaves_is_forgotten_and_makes_room() -> None:
    """No more may wait than the limit says."""

    async def scenario() -> None:
        bridge = Bridge()
        pulls = WaitingPulls(bridge, waiting_max=2)
        first, second = pulls.enter(("T", 0), None), pulls.enter(("T", 0), None)
        with pytest.raises(Refusal, match="pulls_waiting_max"):
            pulls.enter(("T", 1), None)

        pulls.leave(first)
        pulls.arrived([head(0)])
        bridge.run_all()

        assert (first.woken, second.woken, len(pulls)) == (False, True, 1)
        pulls.leave(second)
        pulls.arrived([head(1)])
        assert not bridge.posted

    loops.run(scenario())
