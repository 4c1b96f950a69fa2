"""Asking the master: found again after each change, repeated only where that can do no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

import pytest

from dledger.client.shared import ClientSecurity
from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.client.aio import cluster as clusters
from rocketstore.client.aio import errors, routes
from rocketstore.client.aio.cluster import Cluster, parse_given
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import QueueHeader
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import ScriptedServer, Topics, scripted_server, silence

CODE = RequestCode.GET_MAX_OFFSET


@asynccontextmanager
async def pair(timeout_s: float = 20.0) -> AsyncIterator[tuple[Cluster, Topics, list[ScriptedServer]]]:
    """A client of a master and a slave; both tell the same routes."""
    async with scripted_server() as master, scripted_server() as slave:
        topics = Topics({"a": {0: master.address, 1: slave.address}}, {"T": {"a": 4}})
        topics.serve(master)
        topics.serve(slave)
        for one in (master, slave):
            one.scripts[CODE] = lambda frame: frame.answer(fields={"offset": "1"})
        cluster = Cluster([master.address, slave.address], None, timeout_s=timeout_s)
        yield cluster, topics, [master, slave]
        await cluster.close()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.02)


@on_loop
async def test_a_new_master_is_found_when_the_old_one_is_gone() -> None:
    async with pair() as (cluster, topics, (master, slave)):
        await cluster.ask_master("a", CODE, QueueHeader("T", 0), deadline=cluster.deadline())
        await master.stop()
        topics.brokers["a"] = {0: slave.address}
        await cluster.ask_master("a", CODE, QueueHeader("T", 0), deadline=cluster.deadline())
        assert (len(master.of(CODE)), len(slave.of(CODE))) == (1, 1)


@on_loop
async def test_a_broker_that_is_no_longer_the_master_sends_the_client_on() -> None:
    async with pair() as (cluster, topics, (master, slave)):
        await cluster.brokers(cluster.deadline())

        def refused(frame: object) -> object:
            topics.brokers["a"] = {0: slave.address, 1: master.address}
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, "a slave")  # type: ignore[attr-defined]  # a frame

        master.scripts[CODE] = refused  # type: ignore[assignment]  # it is a script
        await cluster.ask_master("", CODE, deadline=cluster.deadline())
        assert (len(master.of(CODE)), len(slave.of(CODE))) == (1, 1)


@on_loop
async def test_while_there_is_no_master_the_client_waits_for_one() -> None:
    async with pair() as (cluster, topics, (master, slave)):
        topics.brokers["a"] = {1: master.address, 2: slave.address}
        asked = asyncio.create_task(cluster.ask_master("a", CODE, deadline=cluster.deadline()))
        await until(lambda: len(master.requests) + len(slave.requests) > 3, "it has looked several times")
        topics.brokers["a"] = {0: slave.address, 1: master.address}
        await asked
        assert not master.of(CODE)


@on_loop
async def test_without_a_master_by_the_deadline_nothing_was_done() -> None:
    async with pair(timeout_s=2.0) as (cluster, topics, (master, slave)):
        topics.brokers["a"] = {1: master.address, 2: slave.address}
        with pytest.raises(errors.BrokerUnreachableError, match="brokers a have no master now") as caught:
            await cluster.ask_master("a", CODE, deadline=cluster.deadline())
        assert caught.value.outcome == "not_applied"


@on_loop
async def test_a_request_of_unknown_outcome_is_repeated_only_if_that_is_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "ATTEMPT_S_MAX", 0.5)
    async with pair() as (cluster, _, (master, slave)):
        master.scripts[CODE] = lambda frame: None if len(master.of(CODE)) < 3 else frame.answer()
        with pytest.raises(errors.TimedOutError):
            await cluster.ask_master("a", CODE, deadline=cluster.deadline(), harmless=False)
        assert len(master.of(CODE)) == 1
        await cluster.ask_master("a", CODE, deadline=cluster.deadline())
        assert len(master.of(CODE)) == 3
        assert not slave.of(CODE)


@on_loop
async def test_a_refusal_after_an_answer_that_was_lost_does_not_say_that_nothing_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request may have been carried out; the second one was not."""
    monkeypatch.setattr(clusters, "ATTEMPT_S_MAX", 0.5)
    async with pair() as (cluster, _, (master, _slave)):
        denied = (AnswerCode.NO_PERMISSION, "read only now")
        master.scripts[CODE] = lambda frame: None if len(master.of(CODE)) < 2 else frame.answer(*denied)
        with pytest.raises(errors.ForbiddenError) as caught:
            await cluster.ask_master("a", CODE, deadline=cluster.deadline())
        assert (len(master.of(CODE)), caught.value.outcome) == (2, "unknown")


@on_loop
async def test_a_refusal_that_would_be_the_same_again_is_not_repeated() -> None:
    async with pair() as (cluster, _, (master, _slave)):
        master.scripts[CODE] = lambda frame: frame.answer(AnswerCode.NO_PERMISSION, "wrong key")
        with pytest.raises(errors.ForbiddenError):
            await cluster.ask_master("a", CODE, deadline=cluster.deadline())
        assert len(master.of(CODE)) == 1


@on_loop
async def test_reads_are_answered_by_a_copy_while_the_master_is_gone() -> None:
    async with pair() as (cluster, _, (master, slave)):
        await cluster.ask_reader("a", CODE, deadline=cluster.deadline())
        await master.stop()
        await cluster.ask_reader("a", CODE, deadline=cluster.deadline())
        assert (len(master.of(CODE)), len(slave.of(CODE))) == (1, 1)


@on_loop
async def test_a_frozen_master_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs up on nobody: reads go to a copy, changes to the next master, long before the time for one answer."""
    monkeypatch.setattr(clusters, "SLOW_S", 600.0)
    monkeypatch.setattr(clusters, "ATTEMPT_S_MAX", 600.0)
    async with pair(600.0) as (cluster, topics, (master, slave)), asyncio.timeout(120):
        await cluster.ask_reader("a", CODE, deadline=cluster.deadline())
        monkeypatch.setattr(clusters, "SLOW_S", 0.05)
        master.scripts[CODE] = silence
        await cluster.ask_reader("a", CODE, deadline=cluster.deadline())
        assert len(slave.of(CODE)) == 1
        changing = asyncio.ensure_future(cluster.ask_master("a", CODE, deadline=cluster.deadline()))
        await until(lambda: len(master.of(CODE)) >= 3, "the frozen one is asked")
        assert not changing.done()
        topics.brokers["a"] = {0: slave.address}
        await changing
        assert len(slave.of(CODE)) == 2


@on_loop
async def test_a_change_that_must_not_happen_twice_waits_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has it may yet carry it out."""
    monkeypatch.setattr(clusters, "SLOW_S", 0.01)
    async with pair() as (cluster, topics, (master, slave)):
        await cluster.brokers(cluster.deadline())
        master.scripts[CODE] = silence
        topics.brokers["a"] = {0: slave.address}
        with pytest.raises(errors.TimedOutError):
            await cluster.ask_master("a", CODE, deadline=cluster.deadline(1.0), harmless=False)
        assert (len(master.of(CODE)), len(slave.of(CODE))) == (1, 0)


@on_loop
async def test_a_name_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    async with pair() as (cluster, topics, (master, _)):
        with pytest.raises(errors.NotFoundError, match=r"no brokers are named b \(there are a\)"):
            await cluster.broker("b", cluster.deadline())
        topics.brokers["b"] = {0: master.address}
        await cluster.routes.refresh_brokers()
        with pytest.raises(errors.NotFoundError, match=r"there are several brokers: name one \(there are a, b\)"):
            await cluster.broker("", cluster.deadline())
        assert (await cluster.broker("b", cluster.deadline())).master == master.address


@on_loop
async def test_a_topic_without_a_route_is_not_found_and_a_silent_server_is_not_waited_for() -> None:
    async with pair() as (cluster, _, servers):
        with pytest.raises(errors.NotFoundError, match="topic U does not exist"):
            await cluster.route("U", cluster.deadline())
        for one in servers:
            one.scripts[RequestCode.GET_ROUTEINFO_BY_TOPIC] = silence
        with pytest.raises(errors.TimedOutError, match="the route of topic V was not found within") as caught:
            await cluster.route("V", cluster.deadline(0.05))
        assert caught.value.outcome == "not_applied"


@on_loop
async def test_a_closed_client_says_so_and_ends_what_is_waiting() -> None:
    async with pair() as (cluster, topics, (master, slave)):
        topics.brokers["a"] = {1: master.address, 2: slave.address}
        asked = asyncio.create_task(cluster.ask_master("a", CODE, deadline=cluster.deadline()))
        await until(lambda: master.requests, "it is looking")
        await cluster.close()
        with pytest.raises((errors.ClientClosedError, asyncio.CancelledError)):
            await asked
        with pytest.raises(errors.ClientClosedError):
            cluster.check()


@on_loop
async def test_a_client_of_another_loop_or_process_says_what_to_do() -> None:
    async with pair() as (cluster, _, _servers):
        cluster.check()

        async def elsewhere() -> None:
            cluster.check()

        def on_another_loop() -> None:
            with pytest.raises(errors.ClientClosedError, match="make one for each loop"):
                asyncio.run(elsewhere())

        await asyncio.to_thread(on_another_loop)
        cluster._process += 1  # as in a forked child
        with pytest.raises(errors.ClientClosedError, match="made in another process: make one after the fork"):
            cluster.check()
        cluster._process -= 1


@pytest.mark.parametrize(
    ("addresses", "name_servers", "found"),
    [
        ("127.0.0.1:1;127.0.0.1:2, 127.0.0.1:1", None, ("127.0.0.1:1", "127.0.0.1:2")),
        (None, ["127.0.0.1:9876"], ("127.0.0.1:9876",)),
    ],
)
def test_addresses_are_one_text_or_several(
    addresses: str | None, name_servers: Sequence[str] | None, found: tuple[str, ...]
) -> None:
    assert parse_given(addresses, name_servers) == found


@pytest.mark.parametrize(
    ("addresses", "name_servers", "problem"),
    [
        (None, None, "give either"),
        ("127.0.0.1:1", "127.0.0.1:1", "give either"),
        ("", None, "no address given"),
        (None, [], "no address given"),
        ("localhost", None, "invalid address 'localhost'"),
    ],
)
def test_addresses_that_are_none_are_refused_at_once(
    addresses: str | None, name_servers: Sequence[str] | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_given(addresses, name_servers)


@on_loop
async def test_signatures_are_not_given_to_whoever_registered() -> None:
    """They never expire, and anybody can register an address at a name server."""
    account = ClientSecurity(access_key="a", secret_key="s")
    with pytest.raises(ConfigError, match="an access key with name_servers needs TLS"):
        Cluster(None, "127.0.0.1:9876", timeout_s=5, security=account)
    trusting = ClientSecurity(access_key="a", secret_key="s", trust_name_servers=True)
    await Cluster(None, "127.0.0.1:9876", timeout_s=5, security=trusting).close()
    await Cluster("127.0.0.1:10911", None, timeout_s=5, security=account).close()


@on_loop
async def test_a_call_that_ran_out_of_time_says_what_kept_failing() -> None:
    """And not that the last look for a master took too long."""
    async with pair(timeout_s=2.0) as (cluster, _, servers):

        def slow(frame: Frame) -> Frame:
            for one in servers:
                one.scripts[RequestCode.GET_BROKER_CLUSTER_INFO] = silence
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, "starting")

        servers[0].scripts[CODE] = slow
        with pytest.raises(errors.NotMasterError, match="starting"):
            await cluster.ask_master("", CODE, QueueHeader("T", 0), deadline=cluster.deadline())


@on_loop
async def test_work_that_is_cancelled_before_its_turn_is_never_made() -> None:
    """A coroutine that was made and is never awaited is a warning of Python, and an error in tests."""
    made: list[int] = []

    def work(number: int) -> Awaitable[None]:
        made.append(number)
        return asyncio.sleep(3600)

    task = asyncio.create_task(clusters.at_once(map(work, range(3 * clusters.ASKED_AT_ONCE))))
    await until(lambda: made, "it begins")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(made) <= clusters.ASKED_AT_ONCE


@on_loop
async def test_of_much_work_a_limited_part_is_in_progress_and_all_is_done_in_order() -> None:
    in_progress = 0

    async def work(number: int) -> int:
        nonlocal in_progress
        in_progress += 1
        assert in_progress <= clusters.ASKED_AT_ONCE
        await asyncio.sleep(0)
        in_progress -= 1
        return number

    numbers = range(3 * clusters.ASKED_AT_ONCE)
    assert await clusters.at_once(map(work, numbers)) == list(numbers)
