"""The window in which messages that are sent again are recognized: by owner, for a while, and no more than so many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rocketstore.grpc.sends import KEPT_S, DuplicateWindow
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace

STORED = PutResult(PutMessageStatus.PUT_OK, StoredPlace(0, 100, 1, 7, 0))


class Clock:
    """Its time is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def on_a_loop(act: Callable[[DuplicateWindow, Clock], Coroutine[Any, Any, None]], kept_max: int = 100) -> None:
    async def run() -> None:
        clock = Clock()
        await act(DuplicateWindow(clock, 50, kept_max), clock)

    asyncio.run(run())


def test_a_repetition_gets_the_first_result_as_soon_as_it_is_there() -> None:
    """By owner, topic and id together; nobody sees another's."""

    async def act(window: DuplicateWindow, _: Clock) -> None:
        begun = window.begin("a", "T", "1")
        known = window.find("a", "T", "1")
        assert known is begun
        assert window.find("b", "T", "1") is None
        assert window.find("a", "U", "1") is None
        assert window.find("a", "T", "2") is None
        window.settle("a", "T", "1", begun, STORED)
        assert await begun == STORED
        assert window.find("a", "T", "1") is begun
        assert window.recognized == 2

    on_a_loop(act)


@pytest.mark.parametrize(
    "result",
    [
        PutResult(PutMessageStatus.FLOW_CONTROL, outcome="not_applied"),
        PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown"),
        PutResult(PutMessageStatus.FLUSH_SLAVE_TIMEOUT, STORED.stored, outcome="unknown"),
    ],
)
def test_what_is_not_stored_for_sure_is_forgotten(result: PutResult) -> None:
    """Whoever was refused, and sends again, is stored: the refusal must not stick."""

    async def act(window: DuplicateWindow, _: Clock) -> None:
        begun = window.begin("a", "T", "1")
        window.settle("a", "T", "1", begun, result)
        assert await begun == result
        assert window.find("a", "T", "1") is None
        assert len(window) == 0

    on_a_loop(act)


def test_a_message_is_remembered_for_a_while() -> None:
    """Then an id is new again."""

    async def act(window: DuplicateWindow, clock: Clock) -> None:
        begun = window.begin("a", "T", "1")
        window.settle("a", "T", "1", begun, STORED)
        clock.now += KEPT_S
        assert window.find("a", "T", "1") is begun
        clock.now += 0.1
        assert window.find("a", "T", "1") is None
        assert window.begin("a", "T", "1") is not begun
        assert len(window) == 1

    on_a_loop(act)


def test_one_owner_cannot_push_out_anothers_messages() -> None:
    """Its own oldest ones go, from its share on; of all together, the oldest of whoever has most."""

    async def act(window: DuplicateWindow, _: Clock) -> None:
        window.begin("b", "T", "kept")
        for number in range(20):
            window.begin("a", "T", str(number))
        assert window.find("b", "T", "kept") is not None
        assert window.find("a", "T", "14") is None
        assert window.find("a", "T", "15") is not None
        assert len(window) == 6
        for owner in "cdefgh":
            for number in range(3):
                window.begin(owner, "T", str(number))
        assert len(window) == 10
        assert window.find("b", "T", "kept") is not None

    on_a_loop(act, kept_max=10)


def test_a_late_result_of_a_forgotten_message_reaches_who_waits_for_it() -> None:
    """It was pushed out while it was being stored, and its repetition waits."""

    async def act(window: DuplicateWindow, _: Clock) -> None:
        begun = window.begin("a", "T", "first")
        for number in range(10):
            window.begin("a", "T", str(number))
        assert window.find("a", "T", "first") is None
        window.settle("a", "T", "first", begun, STORED)
        assert begun.result() == STORED

    on_a_loop(act, kept_max=10)
