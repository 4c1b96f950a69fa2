"""The topics of all groups: how much a round may cost, and what is shown of very many."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from dledger_cli.console import overview
from dledger_cli.console.catalog import INTERVAL_S, SHOWN_S
from dledger_cli.console.fleet import Fleet
from dledger_cli.console.listing import Wanted
from dledger_cli.console.overview import ROUND_REQUESTS, FleetTopics
from rocketstore.client import BrokerUnreachableError
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import BrokerData, ClusterInfo, QueueData, TopicList, TopicRouteData

SERVER = "127.0.0.1:1"


class NameServerFrames(BrokerConnections):
    """A name server that knows some topics, each with four queues in one group."""

    def __init__(self, *topics: str) -> None:
        super().__init__([])
        self.topics = topics
        self.asked: list[str] = []
        self.is_there = True
        self.dialled: set[str] = set()

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        self._check(address)
        self.dialled.add(address)
        if not self.is_there:
            raise BrokerUnreachableError("cannot connect to 127.0.0.1:1: Connection refused")
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return request.answer(body=TopicList(self.topics).encode())
        self.asked.append(request.fields["topic"])
        if request.fields["topic"] not in self.topics:
            return request.answer(AnswerCode.TOPIC_NOT_EXIST, "no such topic")
        route = TopicRouteData((QueueData("g", 4, 4, 6),), (BrokerData("c", "g", {0: "h:1"}),))
        return request.answer(body=route.encode())


def watching(frames: NameServerFrames) -> tuple[FleetTopics, list[None]]:
    changes: list[None] = []
    clock = itertools.count(step=INTERVAL_S)  # each look is a round later
    topics = FleetTopics(Fleet([SERVER]), [SERVER], frames, lambda: changes.append(None), lambda: next(clock))
    return topics, changes


def listed(topics: FleetTopics, **wanted: Any) -> dict[str, Any]:  # noqa: ANN401  # by name
    found: dict[str, Any] = topics.topics(Wanted(**{"internal": True, **wanted}))
    return found


def rows(topics: FleetTopics) -> dict[str, Any]:
    return {one["name"]: one for one in listed(topics)["rows"]}


def test_a_round_has_a_budget_and_all_have_their_turn() -> None:
    """Each is asked for once before any is asked for again; how many each group has is known then."""
    names = [f"topic-{number:04}" for number in range(3 * ROUND_REQUESTS)]
    frames = NameServerFrames(*names)

    async def look() -> FleetTopics:
        topics, _ = watching(frames)
        for rounds in range(1, 4):
            await topics.look()
            assert len(frames.asked) == rounds * ROUND_REQUESTS
            assert topics.state()["unseen"] == (3 - rounds) * ROUND_REQUESTS
            assert topics.state()["counts"] == {"g": rounds * ROUND_REQUESTS}
        return topics

    topics = asyncio.run(look())
    assert set(frames.asked) == set(names)
    assert topics.state()["totals"] == {"topics": len(names)}
    assert rows(topics)["topic-0000"]["shares"] == (("g", 4, 4, 6),)


def test_what_a_page_shows_is_asked_for_first() -> None:
    """And what it shows is sorted and found here."""
    frames = NameServerFrames(*(f"topic-{number:04}" for number in range(10 * ROUND_REQUESTS)))

    async def look() -> list[str]:
        topics, _ = watching(frames)
        await topics.look()
        found = listed(topics, search="TOPIC-03", sort="queues", descending=True)
        assert found["matching"] == 20
        frames.asked.clear()
        await topics.look()
        return [one["name"] for one in found["rows"]]

    shown = asyncio.run(look())
    assert frames.asked[: ROUND_REQUESTS // 2] == shown[: ROUND_REQUESTS // 2]


def test_what_is_shown_no_longer_is_nobodys_first() -> None:
    """Also if no list is asked for any more, because every page shows something else."""
    frames = NameServerFrames(*(f"topic-{number:04}" for number in range(10 * ROUND_REQUESTS)))
    now = 0.0

    async def look() -> list[str]:
        nonlocal now
        topics = FleetTopics(Fleet([SERVER]), [SERVER], frames, lambda: None, lambda: now)
        await topics.look()
        shown = [one["name"] for one in listed(topics)["rows"]]
        now += SHOWN_S + 1
        frames.asked.clear()
        await topics.look()
        return shown

    shown = asyncio.run(look())
    assert not set(shown) & set(frames.asked)


def test_topics_named_after_brokers_are_internal_whenever_those_become_known() -> None:
    """A name server tells topics and brokers separately; internal topics count for no group."""
    frames = NameServerFrames("c", "g", "orders")

    async def look() -> list[tuple[dict[str, bool], object]]:
        fleet = Fleet([SERVER])
        clock = itertools.count(step=INTERVAL_S)
        topics = FleetTopics(fleet, [SERVER], frames, lambda: None, lambda: next(clock))
        found = []
        for _ in range(2):
            await topics.look()
            internal = {name: one["internal"] for name, one in rows(topics).items()}
            found.append((internal, topics.state()["counts"]))
            fleet.heard(SERVER, ClusterInfo({"g": BrokerData("c", "g", {0: "h:1"})}), 0)
        return found

    before, after = asyncio.run(look())
    assert before == ({"c": False, "g": False, "orders": False}, {"g": 3})
    assert after == ({"c": True, "g": True, "orders": False}, {"g": 1})


def test_no_broker_of_another_machine_is_asked_in_plaintext() -> None:
    """For a topic's queues: what a name server names may be anywhere."""
    frames = NameServerFrames("orders")

    async def look() -> Any:  # noqa: ANN401  # JSON
        topics, _ = watching(frames)
        return await topics.topic("orders")

    (group,) = asyncio.run(look())["groups"]
    assert "plaintext is for loopback addresses only, not for h:1:" in group["error"]
    assert frames.dialled == {SERVER}


def test_a_list_that_is_too_long_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes what is kept for all."""
    monkeypatch.setattr(overview, "LIST_MAX", 2)
    topics, _ = watching(NameServerFrames("a", "b", "c"))
    asyncio.run(topics.look())

    assert (listed(topics)["left_out"], topics.state()["totals"]) == (1, {"topics": 3})


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
    assert "Connection refused" in str(topics.state()["error"])
    assert {name: one["internal"] for name, one in rows(topics).items()} == {"orders": False, "%RETRY%billing": True}
    assert len(changes) == 3  # names, where they are, silence


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
