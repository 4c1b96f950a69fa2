"""The search for the leader, which all who wait for it share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dledger.client.discovery import Directory, LeaderFinder, ServerReport
from dledger.client.shared import TimeLimit
from dledger.errors import DLedgerError, UnavailableError

LEADER = ServerReport("n0", True, 1, None, {})
Answers = AsyncGenerator[tuple[str, ServerReport | DLedgerError], None]


def test_async_look_does_not_end_with_the_word_of_the_present_leader() -> None:
    """It is what is in doubt: another one may have been elected without it."""
    directory = Directory(("n0:1", "n1:1"))
    directory.set_leader("n0:1")

    async def ask(_addresses: object, _: TimeLimit) -> Answers:
        yield "n0:1", LEADER
        yield "n1:1", ServerReport("n1", True, 2, None, {})

    assert asyncio.run(LeaderFinder(directory, ask, lambda report: report).look()) == "n1:1"


@pytest.mark.parametrize("elected", [False, True])
def test_a_look_does_not_wait_for_the_leader_that_is_silent(elected: bool) -> None:
    """All others have answered: whoever is elected next is found by the next look, which must not be late."""

    async def test() -> None:
        directory = Directory(("n0:1", "n1:1", "n2:1"))
        directory.set_leader("n0:1")

        async def ask(_addresses: object, _: TimeLimit) -> Answers:
            yield "n1:1", ServerReport("n1", False, 2, None, {})
            yield "n2:1", ServerReport("n2", elected, 2, None, {})
            await asyncio.Event().wait()

        looking = LeaderFinder(directory, ask, lambda report: report).look()
        assert await asyncio.wait_for(looking, 10.0) == ("n2:1" if elected else "n0:1")

    asyncio.run(test())


def test_whoever_gives_up_waiting_for_a_search_does_not_end_it_for_the_others() -> None:
    """Its time is over, not theirs."""

    async def test() -> None:
        answer = asyncio.Event()

        async def ask(_addresses: object, _: TimeLimit) -> Answers:
            await answer.wait()
            yield "n0:1", LEADER

        seeker = LeaderFinder(Directory(("n0:1",)), ask, lambda report: report)
        patient = asyncio.create_task(seeker.leader(TimeLimit(30)))
        with pytest.raises(UnavailableError, match="no leader found within"):
            await seeker.leader(TimeLimit(0.01))
        answer.set()
        assert await patient == "n0:1"

    asyncio.run(test())


def test_whoever_has_no_time_left_for_a_search_is_told_why_the_last_one_failed() -> None:
    """An append that is given up says what was wrong all the time, not that its last attempt was short."""

    async def test() -> None:
        answers = [UnavailableError("n0:1 is unreachable: Connection refused")]
        never = asyncio.Event()

        async def ask(_addresses: object, _: TimeLimit) -> Answers:
            if not answers:
                await never.wait()
            yield "n0:1", answers.pop()

        seeker = LeaderFinder(Directory(("n0:1",)), ask, lambda report: report)
        with pytest.raises(UnavailableError, match="no leader found: n0:1 is unreachable"):
            await seeker.leader(TimeLimit(30))
        with pytest.raises(UnavailableError, match=r"within 0\.01 s: n0:1 is unreachable: Connection refused"):
            await seeker.leader(TimeLimit(0.01))
        seeker.close()

    asyncio.run(test())
