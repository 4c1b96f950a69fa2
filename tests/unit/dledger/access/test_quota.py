"""What one connection, one owner and all clients together may have."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from dledger.access.quota import Limits, Quota, Quotas, TooManyWaitsError


def quotas(*, streams: int = 16, answers: int = 800, percent: int = 75) -> Quotas:
    return Quotas(Limits(80, 800, streams, 16, answers), owner_percent=percent)


def at(quotas: Quotas, owner: str, peer: str) -> Quota:
    return quotas.of(owner, owner, peer)


def open_streams(quota: Quota, held: ExitStack) -> int:
    """As many as there may be."""
    for number in range(100):
        try:
            held.enter_context(quota.stream("watch", "streams_max"))
        except TooManyWaitsError:
            return number
    return 100


def test_a_connection_has_half_and_an_owner_its_share() -> None:
    """Of streams: so many connections of one owner leave the rest to others."""
    all_of_them = quotas()
    with ExitStack() as held:
        taken = [open_streams(at(all_of_them, "greedy", peer), held) for peer in ("1", "2", "3", "4")]

        # 16 in all: half of them for one connection, 12 for its owner, of which an eighth is for those with none.
        assert taken == [8, 3, 1, 0]
        held.enter_context(at(all_of_them, "other", "5").stream("watch", "streams_max"))


def test_kinds_of_streams_do_not_take_each_others_places() -> None:
    """Whoever watches, or consumes, leaves room for those who append."""
    all_of_them = quotas(streams=1)
    one = at(all_of_them, "a", "1")
    with (
        one.stream("watch", "streams_max"),
        one.stream("append", "streams_max"),
        pytest.raises(TooManyWaitsError, match=r"a connection of a has 1 open watch streams, .* \(streams_max"),
        one.stream("watch", "streams_max"),
    ):
        pass


def test_the_last_part_is_for_connections_with_little() -> None:
    """Also at an address that others have filled: a newcomer gets something."""
    all_of_them = quotas()
    first, second = at(all_of_them, "shared", "1"), at(all_of_them, "shared", "2")
    first.take(35, 0)
    second.take(20, 0)

    assert first.is_full
    assert second.is_full
    assert not at(all_of_them, "shared", "3").is_full
    at(all_of_them, "shared", "3").take(5, 0)
    assert at(all_of_them, "shared", "4").is_full  # 60 of 80: all of the owner's share
    assert not at(all_of_them, "other", "5").is_full
    first.give(35, 0)
    second.give(20, 0)
    assert not second.is_full


def test_answers_have_room_in_every_respect_or_wait() -> None:
    """And what is larger than all of it is taken alone, once nothing else of that connection is on its way."""
    all_of_them = quotas()
    one, other = at(all_of_them, "a", "1"), at(all_of_them, "b", "2")

    assert one.try_answer(350)
    assert not one.try_answer(51)
    assert other.try_answer(340)
    assert not at(all_of_them, "c", "3").try_answer(200)
    one.change_answer(-350)
    assert one.idle
    other.change_answer(-340)
    assert one.try_answer(5000)
    assert not one.try_answer(1)


def test_what_is_idle_is_forgotten() -> None:
    """Millions of connections that came and went leave nothing behind; what is in use stays the same object."""
    all_of_them = quotas()
    busy = at(all_of_them, "a", "busy")
    busy.take(1, 1)
    for number in range(5000):
        at(all_of_them, f"owner-{number}", f"peer-{number}")

    assert at(all_of_them, "a", "busy") is busy
    all_of_them.forget_idle()
    assert len(all_of_them) == 1


def test_whoever_waits_hears_of_room_where_it_was_lacking() -> None:
    """A connection that has nothing itself waits for what others of its owner, or of all, give back."""

    async def waits(all_of_them: Quotas, greedy: Quota, entries: int) -> bool:
        waiting, room = at(all_of_them, "shared", "9"), asyncio.Event()
        greedy.take(entries, 0)
        assert waiting.is_full
        task = asyncio.ensure_future(waiting.wait_room(room))
        await asyncio.sleep(0)
        assert not task.done()
        greedy.give(1, 0)
        await asyncio.wait_for(task, 10)
        assert all_of_them.root.entries == entries - 1
        return not waiting.is_full

    for owner, entries in (("shared", 60), ("other", 80)):
        all_of_them = quotas()
        assert asyncio.run(waits(all_of_them, at(all_of_them, owner, "1"), entries))


def test_a_connection_is_remembered_as_long_as_it_has_anything() -> None:
    """One that has a stream only, too: forgotten, it could open as many again."""
    all_of_them = quotas()
    one = at(all_of_them, "a", "1")
    with one.stream("watch", "streams_max"):
        all_of_them.forget_idle()
        assert at(all_of_them, "a", "1") is one
    one.take(1, 0)
    all_of_them.forget_idle()
    assert at(all_of_them, "a", "1") is one
    one.change_answer(1)
    one.give(1, 0)
    all_of_them.forget_idle()
    assert at(all_of_them, "a", "1") is one
    one.change_answer(-1)

    all_of_them.forget_idle()

    assert at(all_of_them, "a", "1") is not one
