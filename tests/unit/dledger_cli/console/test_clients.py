"""Members of a group whose topic is in several groups of brokers, and how far behind they are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dledger_cli.console.changes import ClientLists
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.client import (
    Admin,
    ClientError,
    Consumer,
    MessageQueue,
    NotFoundError,
    QueueProgress,
    QueueRange,
    TopicInfo,
)
from rocketstore.client.aio.admin_requests import GroupMembers
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.support import request
from tests.unit.dledger_cli.console.test_overview import FAST
from tests.unit.rocketstore.nameserver.wire import config_in, running
from tests.unit.rocketstore.test_server import plain

NAMES = ("a", "b")


def registered(admin: Admin, topic: str = "") -> int:
    """How many groups of brokers there are, or have a topic, as name servers know by now."""
    try:
        return len(admin.topic(topic)) if topic else len(admin.brokers())
    except ClientError:
        return 0


def test_queues_of_all_groups_of_brokers_are_divided(tmp_path: Path) -> None:
    """Each group's page shows its own queues at the members that have them, as the members themselves divide all."""
    with ExitStack() as stack:
        names = stack.enter_context(running(config_in(tmp_path)))
        for name in NAMES:
            config = plain(tmp_path / name, namesrvAddr=names.address, brokerName=name)
            stack.callback(BrokerServer(config).start().stop)
        admin = stack.enter_context(Admin(name_servers=names.address, timeout_s=60))
        wait_until(lambda: registered(admin) == 2, "both are registered")
        admin.put_topic(TopicInfo("T", 3, 3))
        wait_until(lambda: registered(admin, "T") == 2, "the topic is registered")
        members = [
            stack.enter_context(
                Consumer(name_servers=names.address, group="g", topics="T", start="first", timeout_s=60)
            )
            for _ in range(4)
        ]

        def own(one: Consumer) -> set[tuple[str, int]]:
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

    def members(self, group: str) -> GroupMembers:
        raise NotFoundError("nobody is online")

    def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        places = (2, 7, 0)
        return [QueueProgress(MessageQueue("T", "b", number), at, 9, 0) for number, at in enumerate(places)]

    def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
        assert list(topics) == ["%RETRY%g", "T"]
        return {"T": [QueueRange(MessageQueue("T", "b", number), 5, 9, 1) for number in range(3)]}


def test_removed_messages_are_nobodys_lag() -> None:
    """They cannot be consumed any more."""
    found: Any = ClientLists(Brokers()).members("g")

    assert [(one["queue"], one["committed"], one["lag"]) for one in found["rows"]] == [(0, 2, 4), (1, 7, 2), (2, 0, 4)]
