"""Members of a group whose topic is in several groups of brokers, and how far behind they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from cluster.broker_target import BrokerTarget
from cluster.connection import GroupTarget
from cluster.console.clients import ClientLists
from cluster.console.server import ConsoleServer, ListenAddress
from rocketstore.client.admin import Admin, BrokerStatus, QueueRange
from rocketstore.client.cluster_admin import ClusterAdmin
from rocketstore.client.errors import NotFoundError
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.group_options import GroupOptions
from rocketstore.client.topics import TopicInfo
from rocketstore.nameserver.groups import BrokerGroup
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.cluster.console.support import broker_status, request
from tests.unit.cluster.console.test_overview import FAST
from tests.unit.rocketstore.nameserver.wire import config_in, running
from tests.unit.rocketstore.test_server import plain

NAMES = ("a", "b")


def registered(admin: ClusterAdmin, topic: str = "") -> tuple[BrokerGroup, ...]:
    """The groups of brokers, or those that have a topic, as name servers know them by now."""
    try:
        return admin.groups_with(topic) if topic else admin.groups()
    except NotFoundError:
        return ()


def test_queues_of_all_groups_of_brokers_are_divided(tmp_path: Path) -> None:
    """Each group's page shows its own queues at the members that have them, as the members themselves divide all."""
    with ExitStack() as stack:
        names = stack.enter_context(running(config_in(tmp_path)))
        for name in NAMES:
            config = plain(tmp_path / name, namesrvAddr=names.address, brokerName=name)
            stack.callback(BrokerServer(config).start().stop)
        admin = stack.enter_context(ClusterAdmin([names.address], timeout_s=20))
        wait_until(lambda: len(registered(admin)) == 2, "both are registered")
        for place in registered(admin):
            admin.at(place).put_topic(TopicInfo("T", 3, 3))
        wait_until(lambda: len(registered(admin, "T")) == 2, "the topic is registered")
        options = GroupOptions(start="first", timeout_s=20)
        members = [GroupConsumer(name_servers=[names.address], group="g", options=options) for _ in range(4)]
        for one in members:
            stack.enter_context(one)
            one.subscribe("T")
            one.start()

        def own(one: GroupConsumer) -> set[tuple[str, int]]:
            return {(queue.broker_name, queue.queue_id) for queue in one.queues if queue.topic == "T"}

        wait_until(lambda: sorted(len(own(one)) for one in members) == [1, 1, 2, 2], "they share all queues")
        target = GroupTarget(("127.0.0.1:1",), "", 20.0)
        brokers = BrokerTarget(target.bootstrap, 20.0, name_servers=(names.address,))
        console = ConsoleServer(target, brokers, place=ListenAddress(port=0), fleet_pace=FAST)
        stack.enter_context(console)

        def rows(name: str) -> list[Any]:
            reply = request(f"{console.url}api/members?broker={name}&group=g")
            found: Any = reply.json()
            return [one for one in found["rows"] if one["topic"] == "T"] if reply.status == 200 else []

        wait_until(lambda: all(len(rows(name)) == 3 for name in NAMES), "the console knows both")
        shown: dict[str, set[tuple[str, int]]] = {one.client_id: set() for one in members}
        for name in NAMES:
            for row in rows(name):
                shown[row["member"]].add((name, row["queue"]))

        assert shown == {one.client_id: own(one) for one in members}


class Brokers(Admin):
    """A topic whose first messages were removed; a group stands before, one after them, and one has never begun."""

    def __init__(self) -> None:
        pass

    def status(self, address: str | None = None) -> BrokerStatus:
        return broker_status()

    def offsets(self, group: str, topic: str = "") -> dict[tuple[str, int], int]:
        return {("T", 0): 2, ("T", 1): 7}

    def topics(self) -> list[TopicInfo]:
        return [TopicInfo("T", 3, 3)]

    def topic_ranges(self, topics: Sequence[str]) -> dict[str, list[QueueRange]]:
        assert list(topics) == ["T"]
        return {"T": [QueueRange(queue, 5, 9, 1) for queue in range(3)]}


class Nobody(ClientLists):
    """Of a group without members."""

    def consumers(self, group: str, address: str = "") -> None:
        return None


def test_removed_messages_are_nobodys_lag() -> None:
    """They cannot be consumed any more."""
    with closing(Nobody(BrokerTarget(("127.0.0.1:1",), 1.0), Brokers())) as lists:
        found: Any = lists.members("g")

    assert [(one["queue"], one["committed"], one["lag"]) for one in found["rows"]] == [(0, 2, 4), (1, 7, 2), (2, -1, 4)]
