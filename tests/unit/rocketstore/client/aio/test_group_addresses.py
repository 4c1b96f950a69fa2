"""Brokers behind published ports: a given address is used for whoever answers there, whatever he calls himself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.client.aio import connections
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.routes import RouteServers
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import own_table
from rocketstore.remoting.topics import KVTable
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import ScriptedServer, Topics, scripted_server, silence

RUNTIME = RequestCode.GET_BROKER_RUNTIME_INFO
TOLD = {f"n{number}": f"n{number}:109{number}1" for number in range(1, 4)}
"""What each member calls itself, which nobody outside knows."""


def is_member(server: ScriptedServer, node: str, members: Mapping[str, str] = TOLD) -> None:
    """Let a server say who it is."""
    table = own_table("1.0", node, "FOLLOWER", 3, members, ())
    server.scripts[RUNTIME] = lambda frame: frame.answer(body=KVTable(table).encode())


@asynccontextmanager
async def published(*, given: int = 3) -> AsyncIterator[SimpleNamespace]:
    """A group of three behind other ports, n1 its master; the client was given the first ``given`` of them."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted_server()) for _ in TOLD]
        topics = Topics({"a": dict(enumerate(TOLD.values()))}, {"T": {"a": 4}})
        for server, node in zip(servers, TOLD, strict=True):
            topics.serve(server)
            is_member(server, node)
        addresses = [one.address for one in servers[:given]]
        connections = BrokerConnections(addresses)
        routes = RouteServers(connections, addresses, are_name_servers=False, timeout_s=60)
        yield SimpleNamespace(servers=servers, topics=topics, routes=routes, connections=connections)
        await connections.close()


async def used(routes: RouteServers) -> dict[int, str]:
    """The addresses of a route, by broker id."""
    route = await routes.route("T")
    assert route is not None
    return dict(route.broker_datas[0].broker_addrs)


@on_loop
async def test_each_broker_is_used_where_it_answers() -> None:
    """In routes and in lists of brokers; asked once, not for every route."""
    async with published() as group:
        wanted = {number: one.address for number, one in enumerate(group.servers)}
        assert await used(group.routes) == wanted
        clusters = await group.routes.clusters()
        assert dict(clusters.broker_addr_table["a"].broker_addrs) == wanted
        assert [len(one.of(RUNTIME)) for one in group.servers] == [1, 1, 1]


@on_loop
async def test_a_new_master_is_the_one_at_the_given_address() -> None:
    """Without another question."""
    async with published() as group:
        await used(group.routes)
        group.topics.brokers["a"] = {0: TOLD["n3"], 1: TOLD["n1"]}
        assert await used(group.routes) == {0: group.servers[2].address, 1: group.servers[0].address}
        assert len(group.servers[2].of(RUNTIME)) == 1


@on_loop
async def test_after_a_new_connection_it_is_asked_again() -> None:
    """Behind one address may be others in turn."""
    async with published() as group:
        await used(group.routes)
        is_member(group.servers[1], "n3")
        is_member(group.servers[2], "n2")
        for one in group.servers[1:]:
            one.hang_up()
        first, second, third = (one.address for one in group.servers)

        async def swapped() -> bool:
            return await used(group.routes) == {0: first, 1: third, 2: second}

        async with asyncio.timeout(10):
            while not await swapped():
                await asyncio.sleep(0)


@on_loop
async def test_a_broker_that_is_not_there_keeps_the_address_at_which_it_was() -> None:
    """It may come back there."""
    async with published() as group:
        before = await used(group.routes)
        await group.servers[2].stop()
        assert await used(group.routes) == before


@on_loop
async def test_a_broker_that_is_frozen_delays_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said once who it is: nothing is sent anywhere until the route is there."""
    monkeypatch.setattr(connections, "WAIT_S", 600.0)
    monkeypatch.setattr(connections, "ATTEMPT_S_MAX", 600.0)
    async with published() as group, asyncio.timeout(30):
        before = await used(group.routes)
        group.servers[2].scripts[RUNTIME] = silence
        group.servers[2].hang_up()
        await until(lambda: not group.connections.is_open(group.servers[2].address), "it has hung up")
        assert await used(group.routes) == before


@on_loop
async def test_a_broker_behind_no_given_address_is_used_at_its_own() -> None:
    async with published(given=2) as group:
        first, second, _ = (one.address for one in group.servers)
        assert await used(group.routes) == {0: first, 1: second, 2: TOLD["n3"]}


@on_loop
async def test_addresses_that_brokers_tell_are_used_without_a_question() -> None:
    """The usual group costs nothing: as many brokers are told as are given, or more."""
    async with published() as group:
        group.topics.brokers["a"] = {0: "192.0.2.1:1"} | {
            number: one.address for number, one in enumerate(group.servers, 1)
        }
        assert await used(group.routes) == group.topics.brokers["a"]
        assert not any(one.of(RUNTIME) for one in group.servers)


@on_loop
async def test_a_broker_that_does_not_say_who_it_is_delays_a_route_a_little_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what it says later counts then."""
    monkeypatch.setattr(connections, "WAIT_S", 0.01)
    async with published() as group:
        said = group.servers[1].scripts[RUNTIME]
        answer = asyncio.Event()

        async def late(frame: Frame) -> Frame:
            await answer.wait()
            found = said(frame)
            assert isinstance(found, Frame)
            return found

        group.servers[0].scripts[RUNTIME] = silence
        group.servers[1].scripts[RUNTIME] = late
        assert (await used(group.routes))[1] == TOLD["n2"]
        answer.set()
        async with asyncio.timeout(10):
            while (await used(group.routes))[1] != group.servers[1].address:
                await asyncio.sleep(0)
        assert len(group.servers[1].of(RUNTIME)) == 1


@on_loop
async def test_nobody_waits_for_a_given_address_that_no_route_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a broker that left the group, or is frozen."""
    monkeypatch.setattr(connections, "WAIT_S", 60.0)
    async with published() as group:
        group.servers[2].scripts[RUNTIME] = silence
        group.topics.brokers["a"] = {0: TOLD["n1"], 1: TOLD["n2"]}
        async with asyncio.timeout(10):
            assert await used(group.routes) == {0: group.servers[0].address, 1: group.servers[1].address}


@on_loop
async def test_a_broker_alone_is_used_at_the_address_that_was_given() -> None:
    """It may be in a container, and take another address for its own; as long as no other is known."""
    async with published(given=1) as group:
        group.topics.brokers["a"] = {0: "192.0.2.9:10911"}
        assert await used(group.routes) == {0: group.servers[0].address}
        assert not group.servers[0].of(RUNTIME)
        group.topics.brokers["a"] = {0: "192.0.2.9:10911", 1: "192.0.2.10:10911"}
        assert await used(group.routes) == group.topics.brokers["a"]
        group.topics.brokers["a"] = {0: "192.0.2.10:10911"}  # of one that was cut off
        assert await used(group.routes) == group.topics.brokers["a"]


@on_loop
async def test_brokers_without_a_group_are_told_apart_by_their_ports() -> None:
    """A master and its slave do not say which member they are."""
    async with published() as group:
        table = own_table("1.0", "0", "", 0, {}, ())
        for one in group.servers:
            one.scripts[RUNTIME] = lambda frame: frame.answer(body=KVTable(table).encode())
        first, second, _ = (one.address.rpartition(":")[2] for one in group.servers)
        group.topics.brokers["a"] = {0: f"master:{first}", 1: f"slave:{second}"}
        assert await used(group.routes) == {0: group.servers[0].address, 1: group.servers[1].address}
        group.topics.brokers["a"] = {0: f"master:{first}", 1: f"slave:{first}"}
        assert await used(group.routes) == group.topics.brokers["a"]


@on_loop
async def test_brokers_that_refuse_the_question_are_used_at_their_own_addresses() -> None:
    async with published() as group:
        for one in group.servers:
            one.scripts[RUNTIME] = lambda frame: frame.answer(AnswerCode.NO_PERMISSION, "no")
        assert await used(group.routes) == group.topics.brokers["a"]
