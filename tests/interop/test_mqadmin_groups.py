"""RocketMQ's mqadmin with brokers of several groups in one process: ``make interop``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from dledger_cli.local.brokers import SeveralBrokers
from rocketstore.client import Admin, Message, Producer
from tests.interop import java
from tests.interop.admin_session import AdminSession, admin_session
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

CLUSTER: Final = "RaftCluster"
GROUPS: Final = ("a", "b", "c")
TOPIC: Final = "Spread"
START_S: Final = 120
LATE: Final = re.compile(r"Remoting(?:Timeout|Connect|SendRequest)Exception")


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[str]:
    """It knows the three brokers of the process, each of them a master."""
    java.build()
    with ExitStack() as stack:
        server = stack.enter_context(running(config_in(tmp_path)))
        settings = {"mappedFileSizeCommitLog": "8m", "index_segment_bytes": "1m", "namesrvAddr": server.address}
        stack.enter_context(SeveralBrokers(tmp_path / "brokers", GROUPS, size=1, settings=settings))
        wait_until(lambda: {*known.brokers(server.address)} == {*GROUPS}, "all have registered", START_S)
        yield server.address


@pytest.fixture
def session(tmp_path: Path, name_server: str) -> Iterator[AdminSession]:
    """After the programs were compiled."""
    del name_server
    with admin_session(tmp_path / "admin") as started:
        yield started


def test_a_topic_of_the_cluster_is_in_every_group(session: AdminSession, name_server: str) -> None:
    """``updateTopic -c`` asks each master; routes name all of them, and producers use them all."""

    def mqadmin(*words: str) -> str:
        """It gives up after 5 s, which an answer may take on a busy machine: then it is asked again."""
        printed = ""
        for _ in range(6):
            printed = session(*words, "-n", name_server)
            if LATE.search(printed) is None:
                break
        return printed

    assert mqadmin("updateTopic", "-c", CLUSTER, "-t", TOPIC, "-r", "2", "-w", "2").count("success") == len(GROUPS)

    route = mqadmin("topicRoute", "-t", TOPIC)
    assert [route.count(f'"brokerName":"{group}"') for group in GROUPS] == [2, 2, 2], route  # an address, its queues
    listed = mqadmin("clusterList")
    assert [len(re.findall(rf"^{CLUSTER}\s+{group}\s+0\s", listed, re.MULTILINE)) for group in GROUPS] == [1, 1, 1]
    with Producer(name_servers=name_server) as producer:
        places = [producer.send(Message(TOPIC, b"%d" % number)).broker for number in range(6)]
    assert sorted(places) == ["a", "a", "b", "b", "c", "c"]
    with Admin(name_servers=name_server) as admin:
        assert {(one.broker, one.write_queues) for one in admin.topic(TOPIC)} == {(group, 2) for group in GROUPS}
