"""With several groups, a route also has the queues of the others, at their own addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress

import pytest

from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker.topics import SeenTopic
from rocketstore.grpc import routes
from rocketstore.grpc.routes import OtherGroups, OtherPlace, RouteCalls, endpoints_of
from rocketstore.pb import definition_pb2 as pb
from rocketstore.remoting.codes import MemberCode, RequestCode
from rocketstore.remoting.topics import BrokerData, QueueData, TopicRouteData
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness

ROUTE = TopicRouteData(
    (QueueData("own", 4, 4, 6), QueueData("other", 2, 3, 6), QueueData("java", 8, 8, 6)),
    (
        BrokerData("c", "own", {0: "o:1"}),
        BrokerData("c", "other", {0: "b0:1", 1: "b1:1"}),
        BrokerData("c", "java", {0: "j:1"}),
    ),
)
WHERE = {"b0:1": "10.0.0.2:8081", "b1:1": "10.0.0.1:8081", "j:1": ""}


class FakeClient(RemotingClient):
    """Answers from tables; ``asked`` are the addresses and codes."""

    def __init__(self) -> None:  # nothing of the real one is used
        self.asked: list[tuple[str, int]] = []
        self.route: TopicRouteData | None = ROUTE
        self.silent: set[str] = set()
        self.hanging = False

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        self.asked.append((address, request.code))
        assert timeout_s <= routes.ASK_S_MAX
        if self.hanging:
            await asyncio.Event().wait()
        if address in self.silent:
            raise UnreachableError(address)
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            if self.route is None:
                return request.answer(AnswerCode.TOPIC_NOT_EXIST)
            return request.answer(body=self.route.encode())
        assert request.code == MemberCode.GATEWAY_WHERE
        return request.answer(fields={"grpcAddress": WHERE[address]} if WHERE[address] else {})


def with_groups(act: Callable[[OtherGroups, FakeClient], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        client = FakeClient()
        groups = OtherGroups("own", ("ns1:9876", "ns2:9876"), client, client)
        try:
            await act(groups, client)
        finally:
            await groups.close()

    asyncio.run(run())


def test_the_queues_of_other_groups_are_where_those_serve_over_grpc() -> None:
    """Not the own ones, and not those of brokers without gRPC."""

    async def act(groups: OtherGroups, client: FakeClient) -> None:
        found = await groups.places("T")
        assert found == (OtherPlace(SeenTopic("T", 2, 3, 6), "other", ("10.0.0.1:8081", "10.0.0.2:8081")),)
        asked = len(client.asked)
        assert await groups.places("T") == found
        assert len(client.asked) == asked

    with_groups(act)


def test_a_name_server_that_is_down_is_passed_over_and_brokers_too() -> None:
    """A route without some of the queues is better than none."""

    async def act(groups: OtherGroups, client: FakeClient) -> None:
        client.silent |= {"ns1:9876", "b0:1"}
        (found,) = await groups.places("T")
        assert found.addresses == ("10.0.0.1:8081",)
        client.silent |= {"ns2:9876"}
        assert await groups.places("U") == ()

    with_groups(act)


def test_a_topic_that_nobody_knows_is_nowhere_else() -> None:
    """Then a send here creates it."""

    async def act(groups: OtherGroups, client: FakeClient) -> None:
        client.route = None
        assert await groups.places("T") == ()

    with_groups(act)


def test_a_caller_that_gives_up_leaves_the_question_to_others() -> None:
    """All that ask at once share one question."""

    async def act(groups: OtherGroups, client: FakeClient) -> None:
        first = asyncio.ensure_future(groups.places("T"))
        await asyncio.sleep(0)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert len(await groups.places("T")) == 1
        assert client.asked.count(("ns1:9876", RequestCode.GET_ROUTEINFO_BY_TOPIC)) == 1

    with_groups(act)


def test_no_more_topics_are_remembered_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes; whoever waits for it gets what there is here."""
    monkeypatch.setattr(routes, "TOPICS_MAX", 2)

    async def act(groups: OtherGroups, client: FakeClient) -> None:
        client.hanging = True
        waiting = asyncio.ensure_future(groups.places("T"))
        while not client.asked:
            await asyncio.sleep(0)
        client.hanging = False
        for name in ("U", "V", "W"):
            await groups.places(name)
        assert await waiting == ()
        assert len(groups._routes) == 2

    with_groups(act)


def test_a_route_has_the_queues_of_all_groups(broker: GatewayHarness, client: GatewayClient) -> None:
    """Those of each group with its name and addresses. A topic that only others have is not created here."""
    there = OtherPlace(SeenTopic("T", 1, 1, 6), "other", ("10.0.0.1:8081",))

    class Others(OtherGroups):
        async def places(self, topic: str) -> tuple[OtherPlace, ...]:
            return (there._replace(topic=there.topic._replace(name=topic)),)

    routes: RouteCalls = broker.gateway.routes
    routes._others = Others("own", (), broker.client, broker.client)
    found = client.route("T", "192.0.2.1:8081").message_queues
    assert [(one.broker.name, one.id) for one in found] == [
        *((broker.config.name, number) for number in range(4)),
        ("other", 0),
    ]
    assert found[-1].broker.endpoints.addresses[0].host == "10.0.0.1"
    assert [one.broker.name for one in client.route("elsewhere").message_queues] == ["other"]


def test_of_names_only_the_first_is_given() -> None:
    """Java's client refuses a second one."""
    assert [one.port for one in endpoints_of(["a.example:1", "b.example:2"]).addresses] == [1]
    assert endpoints_of(["a.example:1"]).scheme == pb.DOMAIN_NAME
    assert [one.port for one in endpoints_of(["10.0.0.1:1", "10.0.0.2:2", "a.example:3"]).addresses] == [1, 2]
    assert endpoints_of(["[::1]:1"]).scheme == pb.IPv6
    assert not endpoints_of([]).addresses
