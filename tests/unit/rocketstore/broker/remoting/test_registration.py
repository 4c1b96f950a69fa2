"""Telling name servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.registration import NameServerRegistration
from rocketstore.broker_config import BrokerConfig
from rocketstore.remoting.bodies.topics import RegisterBrokerBody
from rocketstore.remoting.client import RemotingClient
from rocketstore.remoting.frame import Frame
from rocketstore.state.changes import TopicConfig
from tests.unit.rocketstore.broker.harness import Harness


class _NameServers:
    """In the place of a client: knows what it was told; one that is ``held`` never answers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, set[str]]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        topics = set(RegisterBrokerBody.decode(request.body).topics.topic_config_table)
        await asyncio.wait_for(self.answers.wait(), timeout_s)
        self.told.append((address, topics))
        return request.answer()


def _registering(test: Callable[[Harness, NameServerRegistration, _NameServers], Any]) -> None:
    with Harness(BrokerConfig(namesrv_addr="127.0.0.1:1;127.0.0.1:2")) as harness:

        async def run() -> None:
            servers = _NameServers()
            parts: BrokerParts = harness.service.parts
            registration = NameServerRegistration(parts, cast("RemotingClient", servers), "127.0.0.1:3", "127.0.0.1:4")
            registration.start()
            try:
                await asyncio.wait_for(test(harness, registration, servers), 30)
            finally:
                for one in asyncio.all_tasks() - {asyncio.current_task()}:
                    one.cancel()

        asyncio.run(run())


def test_an_announcement_is_over_when_all_name_servers_know() -> None:
    """A round that was under way before may have had the old topics."""

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.answers.clear()
        await asyncio.sleep(0)  # the first round begins
        harness.state.table["New"] = TopicConfig("New")
        announced = asyncio.create_task(registration.announce())
        await asyncio.sleep(0)
        servers.answers.set()
        await announced
        assert {address for address, topics in servers.told if "New" in topics} == {"127.0.0.1:1", "127.0.0.1:2"}

    _registering(test)


def test_an_announcement_does_not_wait_for_a_name_server_that_is_silent() -> None:
    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.answers.clear()
        await registration.announce()
        assert servers.told == []

    _registering(test)


def test_without_name_servers_there_is_nobody_to_wait_for() -> None:
    async def run(harness: Harness) -> None:
        client = cast("RemotingClient", _NameServers())
        registration = NameServerRegistration(harness.service.parts, client, "127.0.0.1:3", "127.0.0.1:4")
        registration.start()
        await asyncio.wait_for(registration.announce(), 30)

    with Harness() as harness:
        asyncio.run(run(harness))
