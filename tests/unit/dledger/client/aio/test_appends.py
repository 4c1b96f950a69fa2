"""Many appends at once on a loop: what they share, what is repeated, and what becomes of those that are given up."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncGenerator, Collection

import pytest

from dledger.client import ReadMode
from dledger.client.aio import DLedgerClient
from dledger.client.aio.appending import INFLIGHT_REQUESTS_MAX
from dledger.client.aio.connections import Calls
from dledger.client.discovery import Directory, LeaderFinder, ServerReport
from dledger.client.shared import TimeLimit
from dledger.errors import DLedgerError, PendingFullError, RequestTimeoutError, TermChangedError, UnavailableError
from dledger.remoting.connection import RemotingConnection
from dledger.rpc.ports import NodeStatus
from dledger.sending import window
from dledger.sending.window import LOOK_AGAIN_MS
from tests.support.fake_group import FakeGroup
from tests.unit.dledger.client.aio.test_client import until, with_client


def test_appends_of_many_tasks_share_requests() -> None:
    """Each gets its own place."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        results = await asyncio.gather(*(client.append(b"x") for _ in range(200)))

        assert sorted(one.index for one in results) == list(range(200))
        assert len(group.nodes[0].batches) < 100

    with_client(test)


def test_what_is_under_way_when_it_is_closed_is_unknown() -> None:
    """And nothing can be asked any more."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        pending = asyncio.create_task(client.append(b"b"))
        await until(lambda: bool(group.nodes[0].held))
        await client.close()

        with pytest.raises(RequestTimeoutError) as caught:
            await pending
        assert caught.value.outcome == "unknown"
        with pytest.raises(UnavailableError, match="closed"):
            await client.append(b"c")

    with_client(test, timeout_s=30.0)


def test_after_a_close_that_was_cancelled_another_one_leaves_nothing_submitted_without_outcome() -> None:
    """Long before its time limit."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        group.nodes[0].hold = True
        sent = await client.submit(b"a")
        await until(lambda: bool(group.nodes[0].held))
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await client.abandon()

        with pytest.raises(RequestTimeoutError) as caught:
            async with asyncio.timeout(10):
                await sent
        assert caught.value.outcome == "unknown"

    with_client(test, timeout_s=60.0)


def test_an_append_is_repeated_if_its_connection_ends_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, over the next one: as an append whose connection ends later."""
    send = RemotingConnection.send

    def close(connection: RemotingConnection, *_: bytes) -> None:
        monkeypatch.setattr(RemotingConnection, "send", send)
        connection.close("too much is unsent")

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        monkeypatch.setattr(RemotingConnection, "send", close)

        assert (await client.append(b"b")).index == 1
        assert group.nodes[0].bodies() == [b"a", b"b"]

    with_client(test, timeout_s=60)


def test_appends_are_repeated_until_they_are_stored() -> None:
    """Lost answers, refusals and a new leader: each entry is there once, where its result says."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        bodies = [b"%d" % number for number in range(50)]
        await client.append(b"first")
        group.nodes[0].hold = True
        tasks = [asyncio.create_task(client.append(body)) for body in bodies]
        await until(lambda: len(group.nodes[0].held) == INFLIGHT_REQUESTS_MAX)
        group.elect(1)
        group.nodes[1].fail_appends = [TermChangedError("lost"), PendingFullError("full"), None, TermChangedError("x")]
        await asyncio.to_thread(group.kill, 0)
        places = [result.index for result in await asyncio.gather(*tasks)]

        stored = group.nodes[1].bodies()
        assert len(stored) == 51
        assert [stored[place] for place in places] == bodies

    with_client(test, timeout_s=60)


def test_a_frozen_leader_is_left_when_another_one_leads() -> None:
    """It answers nothing and ends no connection; the deadline is far away."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        task = asyncio.create_task(client.append(b"b", timeout_s=60))
        await until(lambda: bool(group.nodes[0].held))
        group.elect(1)

        assert (await task).index == 1

    with_client(test)


def test_reads_at_once_look_for_the_leader_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question for each of them would keep a busy group from answering any."""
    asked: list[str] = []
    status = Calls.status

    async def counted(calls: Calls, address: str, deadline: TimeLimit) -> NodeStatus:
        asked.append(address)
        return await status(calls, address, deadline)

    monkeypatch.setattr(Calls, "status", counted)

    async def test(_group: FakeGroup, client: DLedgerClient) -> None:
        await asyncio.gather(*(client.read(0, mode=ReadMode.LINEARIZABLE) for _ in range(100)))

        assert len(asked) < 100 / 5, "a round or two: a busy machine may not answer the first one in time"

    with_client(test)


def test_overdue_appends_ask_together_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are overdue: one question every now and then."""
    monkeypatch.setattr(window, "LOOK_AFTER_MS", 50.0)
    looks: list[float] = []

    async def look(seeker: LeaderFinder[NodeStatus]) -> str | None:
        looks.append(time.monotonic())
        return seeker._directory.leader

    monkeypatch.setattr(LeaderFinder, "look", look)

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"first")
        group.nodes[0].hold = True
        appends = [asyncio.create_task(client.append(b"x")) for _ in range(200)]
        await until(lambda: len(looks) >= 3 and len(group.nodes[0].held) == INFLIGHT_REQUESTS_MAX)
        group.nodes[0].hold = False
        group.nodes[0].release()
        await asyncio.gather(*appends)

        assert min(after - before for before, after in itertools.pairwise(looks)) >= LOOK_AGAIN_MS / 1000 * 0.9

    with_client(test, timeout_s=30.0)


def test_appends_behind_a_broken_connection_go_together() -> None:
    """One request for each of thousands, one after the other, would take minutes; each is stored once, in order."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"000")
        group.nodes[0].hold = True
        bodies = [b"%03d" % number for number in range(1, 200)]
        appends = [asyncio.create_task(client.append(body)) for body in bodies]
        await until(lambda: len(group.nodes[0].held) == INFLIGHT_REQUESTS_MAX)
        group.elect(1)
        await asyncio.to_thread(group.kill, 0)
        places = [one.index for one in await asyncio.gather(*appends)]

        assert group.nodes[1].bodies() == [b"000", *bodies]
        assert places == list(range(1, 200))

    with_client(test, timeout_s=30.0)


def test_a_cancelled_append_does_not_hold_up_others() -> None:
    """Whoever gives up waiting does not take it back; what comes later is stored behind it."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        task = asyncio.create_task(client.append(b"b"))
        await until(lambda: bool(group.nodes[0].held))
        task.cancel()
        await asyncio.wait([task])
        group.nodes[0].hold = False

        assert (await client.append(b"c")).index == 2
        assert group.nodes[0].bodies() == [b"a", b"b", b"c"]

    with_client(test, timeout_s=30.0)


def test_a_cancelled_append_as_ends_before_its_deadline() -> None:
    """Whoever is cancelled waits for nothing."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        group.nodes[0].hold = True
        task = asyncio.create_task(client.append_as("job", 0, [b"a"], timeout_s=600.0))
        await until(lambda: bool(group.nodes[0].held))
        task.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait([task])
        assert task.cancelled()

    with_client(test)


def test_a_search_that_nobody_waits_for_any_more_fails_in_silence() -> None:
    """The loop would log an error that the application can do nothing about."""
    complaints: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        given_up = asyncio.Event()

        async def ask_all(
            addresses: Collection[str], _deadline: TimeLimit
        ) -> AsyncGenerator[tuple[str, ServerReport | DLedgerError], None]:
            await given_up.wait()
            for address in addresses:
                yield address, UnavailableError("gone")

        seeker = LeaderFinder(Directory(("n0:1",)), ask_all, lambda report: report)
        with pytest.raises(UnavailableError, match="no leader found within 0 s"):
            await seeker.leader(TimeLimit(0))
        search = seeker._seeking
        assert search is not None
        given_up.set()
        await asyncio.wait([search])

    asyncio.run(main())
    gc.collect()
    assert complaints == []
