"""Room for answers: who waits, and who is next."""

from __future__ import annotations

import asyncio

import pytest

from dledger.access.quota import Limits, Quotas, TooManyWaitsError
from dledger.rpc import loops
from dledger.rpc.clients.connections import AnswerRoom, Connection, Leases


class Clients:
    """Connections of owners of their own, which share room for 1,000 bytes."""

    def __init__(self) -> None:
        self.room = AnswerRoom()
        self._quotas = Quotas(Limits(1, 1, 1, 1, 1000), owner_percent=50)

    def leases(self, name: str, connection: Connection | None = None) -> Leases:
        return Leases(self.room, self._quotas.of(name, name, name), connection)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_answer_waits_for_room_of_its_connection() -> None:
    """Until the one before is taken; others are not held up by it."""

    async def check() -> None:
        clients = Clients()
        first, second, other = clients.leases("a"), clients.leases("a"), clients.leases("b")
        await first.take(400)
        waiting = asyncio.create_task(second.take(400))
        await other.take(400)
        await settle()
        assert not waiting.done()

        first.end()
        await waiting
        second.resize(10)
        with pytest.raises(TooManyWaitsError, match="answer_bytes_max"):
            clients.leases("a").take_now(500)
        clients.leases("a").take_now(400)

    loops.run(check())


def test_connections_that_wait_take_turns() -> None:
    """A connection with a hundred requests does not come before one with a single one."""

    async def check() -> list[str]:
        clients, served = Clients(), list[str]()

        async def read(name: str) -> None:
            with clients.leases(name) as leases:
                await leases.take(430)
                served.append(name)
                await settle()

        greedy = [asyncio.create_task(read("a")) for _ in range(4)]
        others = [asyncio.create_task(read(name)) for name in ("b", "c")]
        await asyncio.gather(*greedy, *others)
        return served

    assert sorted(loops.run(check())[:4]) == ["a", "a", "b", "c"]


def test_who_gives_up_leaves_nothing_behind() -> None:
    """Cancelled while it waits, or just when it got its room: the next one gets it."""

    async def check() -> None:
        clients = Clients()
        first = clients.leases("a")
        await first.take(400)
        waiting = [asyncio.create_task(clients.leases("a").take(400)) for _ in range(3)]
        await settle()
        waiting[0].cancel()
        await settle()
        first.end()
        waiting[1].cancel()  # it has its room, and does not know yet
        await settle()

        assert waiting[2].done()
        assert not waiting[2].cancelled()

    loops.run(check())


def test_room_that_a_lost_connections_calls_give_back_goes_to_others() -> None:
    """Its calls end one by one: each would hand its room to the next, and the log be read for nobody."""

    async def check() -> None:
        clients, connection = Clients(), Connection("ipv4:127.0.0.1:1")
        lost = [clients.leases("a", connection) for _ in range(4)]
        await lost[0].take(400)
        waiting = [asyncio.create_task(one.take(400)) for one in lost[1:]]
        await settle()

        connection.hung_up = True
        lost[0].end()
        results = await asyncio.gather(*waiting, return_exceptions=True)

        assert all(isinstance(one, TooManyWaitsError) for one in results)
        await clients.leases("a").take(500)

    loops.run(check())


def test_room_at_once_is_there_or_not() -> None:
    """Never before those that wait; it may be handed on."""

    async def check() -> None:
        clients = Clients()
        first, second, third = clients.leases("a"), clients.leases("a"), clients.leases("a")
        assert first.take_at_once(300)
        assert not second.take_at_once(300)
        second.end()
        waiting = asyncio.create_task(second.take(300))
        await settle()
        assert not third.take_at_once(10), "another one waits"

        with first:
            moved = first.move()
        await settle()
        assert not waiting.done(), "it is still taken"
        moved.end()
        await waiting

    loops.run(check())
