"""What people type of mqadmin 5.5 for topics, groups, offsets, pop and traces, with our group: ``make interop``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Producer
from rocketstore.message.message import Message
from tests.interop import java
from tests.interop.admin_session import AdminSession, admin_session
from tests.interop.official.clients import LANGUAGES, OfficialClient, running
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in
from tests.unit.rocketstore.nameserver.wire import running as name_server_running

pytestmark = pytest.mark.interop

CLUSTER: Final = "RaftCluster"
NAME: Final = "RaftNode00"
TOPIC: Final = "Orders"
GROUP: Final = "billing"
START_S: Final = 180
HELD_MS: Final = 60_000
"""The longest for which the offset waits."""
TRIES: Final = 6
LATE: Final = re.compile(r"Remoting(?:Timeout|Connect|SendRequest)Exception")
FAILED: Final = ("SubCommandException", "MQClientException: ", "MQBrokerException: ", "usage: mqadmin")


class Mqadmin:
    """Runs commands at the group's name server."""

    def __init__(self, session: AdminSession, name_server: str, brokers: LocalBrokers) -> None:
        self._session = session
        self.name_server = name_server
        self.brokers = brokers

    def __call__(self, command: str) -> str:
        """What it prints, its words separated by one blank. Raises ``AssertionError``: the command failed."""
        printed = self._printed(command)
        assert not any(one in printed for one in FAILED), f"{command}:\n{printed}"
        return printed

    def refusal(self, command: str) -> str:
        """Why it fails."""
        printed = self._printed(command)
        assert "DESC: " in printed, f"{command} did not fail:\n{printed}"
        return printed

    def _printed(self, command: str) -> str:
        """It gives up after 5 s, which an answer may take on a busy machine: then it is asked again."""
        for _ in range(TRIES):
            address = known.brokers(self.name_server)[NAME][0]
            words = command.format(master=address).split(" ")
            printed = self._session(*words, "-n", self.name_server)
            if LATE.search(printed) is None:
                break
        return re.sub(r"[ \t]+", " ", printed)


@pytest.fixture(scope="module")
def mqadmin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mqadmin]:
    java.build()
    directory = tmp_path_factory.mktemp("group")
    with ExitStack() as stack:
        names = stack.enter_context(name_server_running(config_in(directory)))
        settings = {"namesrvAddr": names.address, "mappedFileSizeCommitLog": "64m"}
        brokers = stack.enter_context(LocalBrokers(directory / "brokers", name=NAME, settings=settings))
        wait_until(lambda: 0 in known.brokers(names.address).get(NAME, {}), "the master is registered", START_S)
        session = stack.enter_context(admin_session(directory / "admin", "rocketmq5", "Admin5Main"))
        found = Mqadmin(session, names.address, brokers)
        assert f"{CLUSTER} {NAME} 0 " in found("clusterList")
        assert "success" in found(f"updateTopic -c {CLUSTER} -t {TOPIC} -r 4 -w 4 -a +message.type=NORMAL")
        assert "success" in found(f"updateSubGroup -c {CLUSTER} -g {GROUP}")
        with Producer(name_servers=names.address, group="senders", trace=True, timeout_s=60) as producer:
            for number in range(8):
                producer.send(Message(TOPIC, str(number).encode(), keys=f"k{number}", tags="new"))
        yield found


@pytest.fixture(scope="module")
def popping(mqadmin: Mqadmin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficialClient]:
    """RocketMQ 5's client for Python, with a simple consumer of the group: it has acknowledged 5 of 8, and holds 3."""
    language = LANGUAGES["python"]
    language.install()
    with mqadmin.brokers.admin(60.0) as admin:
        admin.reset_offsets(GROUP, TOPIC, "first")
    with running(language, tmp_path_factory.mktemp("python")) as client:
        endpoints = ";".join(one.grpc_address for one in mqadmin.brokers.nodes.values())
        client.ask("simple", name="c", endpoints=endpoints, group=GROUP, subscriptions={TOPIC: "*"}, await_s=5)
        got: list[int] = []

        def has_all() -> bool:
            got.extend(one["n"] for one in client.ask("receive", client="c", invisible_ms=HELD_MS)["messages"])
            return len(got) == 8

        wait_until(has_all, "the client has all", START_S)
        for number in got[:5]:
            client.ask("ack", client="c", message=number)
        yield client


def test_topics(mqadmin: Mqadmin) -> None:
    made = mqadmin(f"updateTopic -c {CLUSTER} -t Fifo -r 2 -w 2 -a +message.type=FIFO")
    assert "message.type=FIFO" in made
    assert "Fifo" in mqadmin("topicList").split()
    assert f"{CLUSTER} Fifo" in mqadmin("topicList -c")
    assert '"writeQueueNums":8' in mqadmin(f"updateTopic -c {CLUSTER} -t Fifo -r 8 -w 8") + mqadmin(
        "topicRoute -t Fifo"
    )
    assert f"{NAME} 7 0 0" in mqadmin("topicStatus -t Fifo")
    assert CLUSTER in mqadmin("topicClusterList -t Fifo")
    assert "success" in mqadmin("updateTopicPerm -t Fifo -p 4 -b {master}")
    assert '"perm":4' in mqadmin("topicRoute -t Fifo")
    assert "success" in mqadmin(f"deleteTopic -c {CLUSTER} -t Fifo")
    assert "Fifo" not in mqadmin("topicList").split()
    refused = mqadmin.refusal("updateTopic -b {master} -t Odd -a +message.type=SOMETHING")
    assert "SOMETHING" in refused


def test_groups(mqadmin: Mqadmin) -> None:
    made = mqadmin(f"updateSubGroup -c {CLUSTER} -g shipping -o true -r 3")
    assert "consumeMessageOrderly=true" in made
    shown = mqadmin("getConsumerConfig -g shipping")
    assert re.search(r"consumeMessageOrderly = true", shown)
    assert re.search(r"retryMaxTimes = 3", shown)
    assert "success" in mqadmin(f"deleteSubGroup -c {CLUSTER} -g shipping -r true")
    assert "shipping" not in mqadmin("consumerProgress")


def test_offsets(mqadmin: Mqadmin) -> None:
    with mqadmin.brokers.consumer("audit", TOPIC) as consumer:
        wait_until(lambda: bool(consumer.poll()), "it consumes", START_S)
    assert NAME in mqadmin(f"resetOffsetByTime -g audit -t {TOPIC} -s 0")
    assert "Diff Total: 8" in mqadmin("consumerProgress -g audit")
    assert NAME in mqadmin(f"skipAccumulatedMessage -g audit -t {TOPIC}")
    assert "Diff Total: 0" in mqadmin("consumerProgress -g audit")
    assert "success" in mqadmin(f"cloneGroupOffset -s audit -d audit2 -t {TOPIC} -o true")
    assert f"{TOPIC} audit2" in mqadmin("brokerConsumeStats -b {master}")
    assert "success" in mqadmin(f"deleteSubGroup -c {CLUSTER} -g audit2 -r true")
    assert TOPIC in mqadmin(f"statsAll -t {TOPIC}")


def test_messages(mqadmin: Mqadmin) -> None:
    found = mqadmin(f"queryMsgByKey -t {TOPIC} -k k3")
    unique = re.findall(r"^([0-9A-F]{32}) (\d) (\d)", found, re.MULTILINE)[0]
    assert "Keys: [k3]" in mqadmin(f"queryMsgByUniqueKey -t {TOPIC} -i {unique[0]}")
    assert "Keys: [k3]" in mqadmin(f"queryMsgByOffset -t {TOPIC} -b {NAME} -i {unique[1]} -o {unique[2]}")
    assert "BODY: 3" in mqadmin(f"printMsg -t {TOPIC} -d true")
    assert "success" in mqadmin(f"updateTopic -c {CLUSTER} -t Typed -r 1 -w 1")
    assert "SEND_OK" in mqadmin(f"sendMessage -t Typed -p more -b {NAME} -i 0")
    assert "Consume ok" in mqadmin(f"consumeMessage -t {TOPIC} -b {NAME} -i 0 -o 0 -c 1")


def test_traces(mqadmin: Mqadmin) -> None:
    found = mqadmin(f"queryMsgByKey -t {TOPIC} -k k1")
    (unique,) = re.findall(r"^([0-9A-F]{32}) ", found, re.MULTILINE)

    def is_traced() -> bool:
        return re.search(r"^Pub senders", mqadmin(f"queryMsgTraceById -i {unique}"), re.MULTILINE) is not None

    wait_until(is_traced, "the trace is found", START_S)


def test_groups_that_pop(mqadmin: Mqadmin, popping: OfficialClient) -> None:
    """Its lag is of what was not given out, as everywhere; what it holds is in flight."""
    progress = mqadmin(f"consumerProgress -g {GROUP}")
    assert "Diff Total: 3" in progress
    assert "Inflight Total: 3" in progress
    assert GROUP in mqadmin("consumerProgress")
    assert f"{TOPIC} *" in mqadmin(f"consumerConnection -g {GROUP}")


def test_who_shares_the_queues_out(mqadmin: Mqadmin) -> None:
    """Clients that leave it to the broker pop, or pull if that is set."""
    for mode in ("PULL", "POP"):
        assert "success" in mqadmin(f"setConsumeMode -b {{master}} -t {TOPIC} -g {GROUP} -m {mode} -q 2")


def test_the_cluster(mqadmin: Mqadmin) -> None:
    assert "brokerVersionDesc" in mqadmin("brokerStatus -b {master}")
    assert "within its group" in mqadmin.refusal("haStatus -b {master}")
    assert f"brokerName = {NAME}" in mqadmin("getBrokerConfig -b {master}")
