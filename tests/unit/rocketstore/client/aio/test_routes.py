"""Routes: who is asked, how often, and what stays in use while nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dledger.remoting.codes import ANNOUNCED, AnswerCode
from rocketstore.client.aio import errors, routes
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.routes import RouteCache, RoutedBroker, RouteServers, TopicQueues, TopicRoute, parts_of
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import BrokerData, ClusterInfo, MessageQueue, QueueData, TopicRouteData
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import ScriptedServer, Topics, scripted_server, silence

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


def data(*parts: tuple[str, int], masters: bool = True) -> TopicRouteData:
    """A route by broker name and number of queues."""
    return TopicRouteData(
        tuple(QueueData(name, count, count, 6) for name, count in parts),
        tuple(BrokerData("C", name, {0 if masters else 1: f"{name}:1"}) for name, _ in parts),
    )


class Source:
    """Answers with ``found``, an error as well; holds answers back while ``held``."""

    def __init__(self, found: TopicRouteData | errors.ClientError | None = None) -> None:
        self.found = found
        self.asked = 0
        self.distrusted = 0
        self.held: asyncio.Event | None = None

    async def route(self, _topic: str) -> TopicRouteData | None:
        self.asked += 1
        found = self.found
        if self.held is not None:
            await self.held.wait()
        if isinstance(found, errors.ClientError):
            raise found
        return found

    async def clusters(self) -> ClusterInfo:
        self.asked += 1
        if isinstance(self.found, errors.ClientError):
            raise self.found
        brokers = () if self.found is None else self.found.broker_datas
        return ClusterInfo({one.broker_name: one for one in brokers})

    def distrust(self) -> None:
        self.distrusted += 1


@asynccontextmanager
async def cached(source: Source) -> AsyncIterator[RouteCache]:
    cache = RouteCache(source)
    try:
        yield cache
    finally:
        cache.close()


@on_loop
async def test_a_route_is_looked_up_once_for_all_who_ask() -> None:
    source = Source(data(("a", 2)))
    async with cached(source) as cache:
        assert cache.at_once("T") is None
        found = await asyncio.gather(*(cache.find("T") for _ in range(50)))
        assert source.asked == 1
        assert all(one is found[0] for one in found)
        assert cache.at_once("T") is found[0]
        assert cache.broker("a") == RoutedBroker("C", "a", {0: "a:1"})


@on_loop
async def test_queues_are_spread_over_brokers_and_ordered_for_keys() -> None:
    """A key's queue must not depend on the order in which a server tells of the brokers."""
    source = Source(data(("b", 1), ("a", 2)))
    async with cached(source) as cache:
        route = await cache.find("T")
        assert route is not None
        first, second, third = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1), MessageQueue("T", "b", 0)
        assert route.writable == (first, second, third)
        assert route.in_turn == (first, third, second)
        assert route.readable == route.writable


@on_loop
async def test_what_may_only_be_read_or_written_is_left_out() -> None:
    found = TopicRouteData(
        (QueueData("a", 2, 3, 4), QueueData("b", 2, 3, 2), QueueData("c", 0, 0, 6)),
        tuple(BrokerData("C", name, {0: f"{name}:1"}) for name in "abc"),
    )
    async with cached(Source(found)) as cache:
        route = await cache.find("T")
        assert route is not None
        assert {one.broker_name for one in route.writable} == {"b"}
        assert len(route.writable) == 3
        assert [(one.broker_name, one.queue_id) for one in route.readable] == [("a", 0), ("a", 1)]


@on_loop
async def test_an_old_route_is_looked_up_again_while_it_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REFRESH_S", 0.0)
    source = Source(data(("a", 2)))
    async with cached(source) as cache:
        await cache.find("T")
        source.found, source.held = data(("a", 3)), asyncio.Event()
        before = cache.at_once("T")
        assert before is not None
        assert len(before.writable) == 2
        await until(lambda: source.asked == 2, "it is looked up")
        assert await cache.find("T") is before  # nobody waits for that
        source.held.set()
        source.held = None
        await until(lambda: (route := cache.at_once("T")) is not None and len(route.writable) == 3, "the new one")


@on_loop
async def test_an_unchanged_route_is_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who keeps something by route need not compare thousands of queues."""
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.0)
    async with cached(Source(data(("a", 2)))) as cache:
        assert await cache.find("T") is await cache.refresh("T")


@on_loop
async def test_a_topic_that_is_not_there_is_asked_for_twice_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(None)
    async with cached(source) as cache:
        assert [await cache.find("T") for _ in range(20)] == [None] * 20
        assert source.asked == 1
        monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.0)
        source.found = data(("a", 1))
        assert await cache.refresh("T") is not None


@on_loop
async def test_while_nobody_answers_the_old_route_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.0)
    source = Source(data(("a", 1)))
    async with cached(source) as cache:
        before = await cache.find("T")
        source.found = errors.BrokerUnreachableError("nobody answers")
        assert await cache.refresh("T") is before
        assert await cache.find("T") is before
        with pytest.raises(errors.BrokerUnreachableError, match="nobody answers"):
            await cache.find("U")


@on_loop
async def test_brokers_that_a_restarted_name_server_does_not_know_yet_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For half a minute: a key would change its queue meanwhile."""
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.0)
    source = Source(data(("a", 1), ("b", 1)))
    async with cached(source) as cache:
        before = await cache.find("T")
        for found in (data(("b", 1)), None):
            source.found = found
            assert await cache.refresh("T") == before
        assert cache.missing("T") == {"a", "b"}
        monkeypatch.setattr(routes, "MISSING_S", -1.0)
        source.found = data(("b", 1))
        assert await cache.refresh("T") == TopicRoute("T", (TopicQueues("b", 1, 1, 6),))
        assert cache.missing("T") == set()
        source.found = None
        assert await cache.refresh("T") is None


@on_loop
async def test_a_doubted_route_is_looked_up_soon_elsewhere_but_not_at_once() -> None:
    source = Source(data(("a", 1)))
    async with cached(source) as cache:
        await cache.find("T")
        for _ in range(10):
            cache.doubt("T")
        assert cache.at_once("T") is not None
        assert (source.asked, source.distrusted) == (1, 1)
        await until(lambda: cache.at_once("T") is not None and source.asked == 2, "looked up")


@on_loop
async def test_a_route_without_a_master_is_looked_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.0)
    source = Source(data(("a", 1), masters=False))
    async with cached(source) as cache:
        await cache.find("T")
        source.found = data(("a", 1))
        cache.at_once("T")
        await until(lambda: (one := cache.broker("a")) is not None and one.master == "a:1", "the master is known")


@on_loop
async def test_any_number_of_queues_may_have_been_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound brokers are used all the same."""
    monkeypatch.setattr(routes, "QUEUES_MAX", 10)
    async with cached(Source(data(("a", 4), ("b", 2_000_000_000), ("c", -1), ("d", 6)))) as cache:
        route = await cache.find("T")
        assert route is not None
        assert [one.broker for one in route.parts] == ["a", "d"]


@pytest.mark.parametrize(("read", "write"), [(5, 1), (1, 5), (5, 5)])
def test_queues_to_read_and_to_write_count_alike(monkeypatch: pytest.MonkeyPatch, read: int, write: int) -> None:
    """Each of these brokers has half of all queues, whichever kind it has so many of: there is room for two."""
    monkeypatch.setattr(routes, "QUEUES_MAX", 10)
    queues = tuple(QueueData(name, read, write, 6) for name in "abc")
    brokers = tuple(BrokerData("C", name, {0: f"{name}:1"}) for name in "abc")

    assert [one.broker for one in parts_of(TopicRouteData(queues, brokers))] == ["a", "b"]


@on_loop
async def test_brokers_that_were_just_found_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that asks them several things does not wait between them; after a failure they are, all the same."""
    source = Source(data(("a", 2)))
    async with cached(source) as cache:
        monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 3600.0)
        await cache.find_brokers()
        await cache.find_brokers()
        assert source.asked == 1
        monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.0)
        await cache.refresh_brokers()
        await cache.find_brokers()
        assert source.asked == 3


@on_loop
async def test_a_new_master_is_looked_for_at_once_and_then_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there in a tenth of a second, as a rule; one that does not come must not cost more than two lookups a
    second.
    """
    now_s, pauses = 1000.0, list[float]()

    async def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        pauses[-1] += pause_s

    async def look(cache: RouteCache) -> None:
        pauses.append(0.0)
        await cache.refresh_brokers()

    monkeypatch.setattr(routes, "_now", lambda: now_s)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with cached(Source(data(("a", 2)))) as cache:
        for _ in range(7):
            await look(cache)
        now_s += 2.0
        await look(cache)
        await look(cache)

    assert pauses == pytest.approx([0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.5, 0.0, 0.025])


@on_loop
async def test_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ROUTES_MAX", 2)
    monkeypatch.setattr(routes, "BROKERS_MAX", 2)
    source = Source()
    async with cached(source) as cache:
        for name in "abc":
            source.found = data((name, 1))
            await cache.find(name)
        assert [cache.at_once(name) is None for name in "abc"] == [True, False, False]
        assert [one.name for one in cache.brokers] == ["b", "c"]


# -- the servers that are asked ----------------------------------------------------------------------------------------


@asynccontextmanager
async def two_servers(*, are_name_servers: bool = True) -> AsyncIterator[tuple[RouteServers, list[ScriptedServer]]]:
    async with scripted_server() as first, scripted_server() as second:
        addresses = [first.address, second.address]
        connections = BrokerConnections(addresses)
        servers = RouteServers(connections, addresses, are_name_servers=are_name_servers, timeout_s=60)
        yield servers, [first, second]
        await connections.close()


@on_loop
async def test_the_server_that_answered_last_is_asked_first() -> None:
    topics = Topics({"a": {0: "127.0.0.1:9"}}, {"T": {"a": 4}})
    async with two_servers() as (servers, (first, second)):
        topics.serve(second)
        first.scripts[ROUTE] = lambda frame: frame.answer(AnswerCode.SYSTEM_ERROR, "broken")
        for _ in range(3):
            assert await servers.route("T") is not None
        assert (len(first.requests), len(second.requests)) == (1, 3)
        servers.distrust()
        await servers.route("T")
        assert (len(first.requests), len(second.requests)) == (2, 4)


@pytest.mark.parametrize("asks", ["clusters", "route"])
@on_loop
async def test_who_knows_of_no_master_is_not_asked_first_again(asks: str) -> None:
    """A master that hears nobody any more is deposed, and the last to know who was elected instead."""
    alone, elected = ({number: "127.0.0.1:9"} for number in (1, 0))
    async with two_servers() as (servers, both):
        for server, addresses in zip(both, (alone, elected), strict=True):
            Topics({"a": addresses}, {"T": {"a": 4}}).serve(server)
        for addresses in (alone, elected):
            if asks == "clusters":
                told = [*(await servers.clusters()).broker_addr_table.values()]
            else:
                route = await servers.route("T")
                told = [] if route is None else [*route.broker_datas]
            assert [dict(one.broker_addrs) for one in told] == [addresses]


@on_loop
async def test_a_name_server_that_was_restarted_is_not_believed_that_a_topic_is_gone() -> None:
    """It is empty until the brokers have registered again: another one may know."""
    async with two_servers() as (servers, (first, second)):
        Topics({}, {}).serve(first)
        Topics({"a": {0: "127.0.0.1:9"}}, {"T": {"a": 4}}).serve(second)
        assert await servers.route("T") is not None
        assert await servers.route("U") is None


@on_loop
async def test_a_silent_server_costs_half_a_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "HEDGE_S", 0.02)
    async with two_servers() as (servers, (first, second)):
        first.scripts[ROUTE] = silence
        Topics({"a": {0: "127.0.0.1:9"}}, {"T": {"a": 4}}).serve(second)
        assert await servers.route("T") is not None
        assert await servers.route("T") is not None
        assert (len(first.requests), len(second.requests)) == (1, 2)


@on_loop
async def test_if_nobody_answers_the_error_names_everybody() -> None:
    async with two_servers() as (servers, (first, second)):
        await first.stop()
        await second.stop()
        with pytest.raises(errors.BrokerUnreachableError, match="no name server answered") as caught:
            await servers.route("T")
        assert first.address in str(caught.value)
        assert second.address in str(caught.value)


@on_loop
async def test_a_server_that_says_no_is_more_telling_than_one_that_is_not_there() -> None:
    async with two_servers(are_name_servers=False) as (servers, (first, second)):
        await first.stop()
        second.scripts[ROUTE] = lambda frame: frame.answer(AnswerCode.NO_PERMISSION, "wrong key")
        with pytest.raises(errors.ForbiddenError, match="wrong key"):
            await servers.route("T")


@on_loop
async def test_apaches_brokers_do_not_tell_routes_so_name_servers_must_be_given() -> None:
    async with two_servers(are_name_servers=False) as (servers, _):
        with pytest.raises(errors.RequestNotKnownError, match="give the addresses of name servers"):
            await servers.route("T")
        with pytest.raises(errors.RequestNotKnownError, match="give the addresses of name servers"):
            await servers.clusters()


@on_loop
async def test_a_node_of_a_bare_log_is_not_taken_for_one_of_apaches_brokers() -> None:
    """It announces this project's requests, and knows none about topics; name servers would not help."""
    async with two_servers(are_name_servers=False) as (servers, (first, second)):
        for one in (first, second):
            for code in (ROUTE, RequestCode.GET_BROKER_CLUSTER_INFO):
                one.scripts[code] = lambda frame: frame.answer(
                    AnswerCode.REQUEST_CODE_NOT_SUPPORTED, "request type not supported", ANNOUNCED
                )
        for ask in (lambda: servers.route("T"), servers.clusters):
            with pytest.raises(errors.RequestNotKnownError, match=r"a node of a bare log .* start brokers"):
                await ask()


@on_loop
async def test_garbage_instead_of_a_route_is_an_error() -> None:
    async with two_servers() as (servers, (first, _)):
        first.scripts[ROUTE] = lambda frame: frame.answer(body=b'{"queueDatas": 7}')
        with pytest.raises(errors.BadAnswerError, match="route of topic T"):
            await servers.route("T")


@on_loop
async def test_a_groups_other_brokers_are_asked_once_they_are_known() -> None:
    """One address is enough to find a new master after that broker is gone."""
    async with scripted_server() as given, scripted_server() as other:
        topics = Topics({"a": {0: given.address, 1: other.address}}, {"T": {"a": 4}})
        topics.serve(given)
        topics.serve(other)
        connections = BrokerConnections([given.address])
        servers = RouteServers(connections, [given.address], are_name_servers=False, timeout_s=60)
        await servers.route("T")
        await given.stop()
        topics.brokers["a"] = {0: other.address}
        found = await servers.clusters()
        assert found.broker_addr_table["a"].broker_addrs == {0: other.address}
        await connections.close()
