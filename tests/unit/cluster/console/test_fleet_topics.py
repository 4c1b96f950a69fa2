"""The topics of all groups: how much a round may cost, and what is shown of very many."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.console.catalog import ROUND_REQUESTS_MAX, TOPICS_MAX
from cluster.console.fleet import Fleet
from cluster.console.fleet_topics import FleetTopics
from dledger.client.security import ClientSecurity
from rocketstore.remoting.bodies.routes import BrokerData, QueueData, TopicList, TopicRouteData
from rocketstore.remoting.client import RemotingClient, UnreachableError
from rocketstore.remoting.codes import AnswerCode, RequestCode
from rocketstore.remoting.frame import Frame

SERVER = "s:1"


class NameServerFrames(RemotingClient):
    """A name server that knows some topics, each with four queues in one group."""

    def __init__(self, *topics: str) -> None:
        super().__init__()
        self.topics = topics
        self.asked: list[str] = []
        self.is_there = True

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        if not self.is_there:
            raise UnreachableError("cannot connect to s:1: Connection refused")
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return request.answer(body=TopicList(self.topics).encode())
        self.asked.append(request.fields["topic"])
        if request.fields["topic"] not in self.topics:
            return request.answer(AnswerCode.TOPIC_NOT_EXIST, "no such topic")
        route = TopicRouteData((QueueData("g", 4, 4, 6),), (BrokerData("c", "g", {0: "h:1"}),))
        return request.answer(body=route.encode())


def watching(frames: NameServerFrames) -> tuple[FleetTopics, list[None]]:
    changes: list[None] = []
    topics = FleetTopics(Fleet([SERVER]), [SERVER], frames, ClientSecurity(), lambda: changes.append(None))
    return topics, changes


def rows(topics: FleetTopics) -> dict[str, Any]:
    found: Any = topics.snapshot()["topics"]
    return {one["name"]: one for one in found}


def test_a_round_has_a_budget_and_all_have_their_turn() -> None:
    """Each is asked for once before any is asked for again; a list that is cut says of how many."""
    names = [f"topic-{number:04}" for number in range(TOPICS_MAX + 7)]
    frames = NameServerFrames(*names)

    async def look() -> FleetTopics:
        topics, _ = watching(frames)
        for rounds in range(1, -(-TOPICS_MAX // ROUND_REQUESTS_MAX) + 1):
            await topics.look()
            assert len(frames.asked) == rounds * ROUND_REQUESTS_MAX
        return topics

    topics = asyncio.run(look())
    assert set(frames.asked) == set(names[:TOPICS_MAX])
    assert len(rows(topics)) == TOPICS_MAX
    assert topics.snapshot()["total"] == TOPICS_MAX + 7
    assert rows(topics)["topic-0000"]["shares"] == (("g", 4, 4, 6),)


def test_a_name_server_that_falls_silent_leaves_what_it_said() -> None:
    """With the reason why it may be old; a page is told once."""
    frames = NameServerFrames("orders", "%RETRY%billing")

    async def look() -> tuple[FleetTopics, list[None]]:
        topics, changes = watching(frames)
        await topics.look()
        await topics.look()
        frames.is_there = False
        await topics.look()
        await topics.look()
        return topics, changes

    topics, changes = asyncio.run(look())
    assert "Connection refused" in str(topics.snapshot()["error"])
    assert {name: one["system"] for name, one in rows(topics).items()} == {"orders": False, "%RETRY%billing": True}
    assert len(changes) == 2


def test_a_topic_that_was_deleted_goes() -> None:
    """With the next round."""
    frames = NameServerFrames("orders", "invoices")

    async def look() -> FleetTopics:
        topics, _ = watching(frames)
        await topics.look()
        frames.topics = ("orders",)
        await topics.look()
        return topics

    assert list(rows(asyncio.run(look()))) == ["orders"]
