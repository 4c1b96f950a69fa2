"""RocketMQ's slave at a master of ours fetches all but the log, again and again: ``make interop``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from dledger.remoting.fastjson import loads
from dledger.types import NodeId
from dledger.values import parse_address
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.interop import java, rocketmq
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

pytestmark = pytest.mark.interop

CLUSTER: Final = "Followed"
NAME: Final = "followed"
TOPIC: Final = "Followed-Topic"
GROUP: Final = "readers"
SLAVE_ID: Final = "9"
"""Not that of a member of ours."""
TIMEOUT_S: Final = 180
DELAYED_1S: Final = "DELAY\x011"


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    java.build()
    with running(config_in(tmp_path)) as started:
        yield started


@dataclass(frozen=True)
class _State:
    """What a slave fetches."""

    queues: int
    retries: int
    offset: int
    """Of the group, and of the delay: as many messages as times that a state was made."""


@dataclass(frozen=True)
class _Slave:
    directory: Path
    name_server: NameServer
    port: int

    def addresses(self) -> dict[str, str]:
        """Of all brokers of the name, by id."""
        with calling(self.name_server) as caller:
            table = caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]
        return dict(table.get(NAME, {"brokerAddrs": {}})["brokerAddrs"])

    def make(self, state: _State) -> None:
        """At the master."""
        to = ("-c", CLUSTER, "-n", self.name_server.address)
        words = ("-t", TOPIC, "-r", str(state.queues), "-w", str(state.queues))
        assert "success" in rocketmq.admin(self.directory, "updateTopic", *words, *to)
        assert "success" in rocketmq.admin(self.directory, "updateSubGroup", "-g", GROUP, "-r", str(state.retries), *to)
        with RemotingSocket(parse_address(self.addresses()["0"])[1]) as client:
            assert client.send(TOPIC, b"x", queue_id=1).code == 0
            assert client.send(TOPIC, b"later", properties=DELAYED_1S).code == 0
            fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": 1, "commitOffset": state.offset}
            assert client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields).code == 0

    def has(self, state: _State) -> bool:
        """In its files."""
        topic = self._read("topics").get("topicConfigTable", {}).get(TOPIC, {})
        group = self._read("subscriptionGroup").get("subscriptionGroupTable", {}).get(GROUP, {})
        offsets = self._read("consumerOffset").get("offsetTable", {}).get(f"{TOPIC}@{GROUP}", {})
        delays = self._read("delayOffset").get("offsetTable", {})
        queues = (topic.get("readQueueNums"), topic.get("writeQueueNums"), topic.get("perm"))
        return (
            (*queues, group.get("retryMaxTimes")) == (state.queues, state.queues, 6, state.retries)
            and _by_number(offsets).get(1) == state.offset
            and _by_number(delays).get(1) == state.offset
        )

    def topics(self) -> set[str]:
        """In its file."""
        return set(self._read("topics")["topicConfigTable"])

    def _read(self, name: str) -> Any:  # noqa: ANN401  # whatever JSON holds
        try:
            return loads((self.directory / "store" / "config" / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError):  # not there yet, or half written
            return {}


def _by_number(table: dict[str, int]) -> dict[int, int]:
    return {int(number): value for number, value in table.items()}


@contextmanager
def _slave(directory: Path, name_server: NameServer) -> Iterator[_Slave]:
    """RocketMQ's meanwhile, at a master that has the first state."""
    port = rocketmq.broker_port()
    slave = _Slave(directory, name_server, port)
    wait_until(lambda: "0" in slave.addresses(), "the master is registered", TIMEOUT_S, poll_s=0.1)
    slave.make(FIRST)
    settings = {
        "brokerClusterName": CLUSTER,
        "brokerName": NAME,
        "brokerId": SLAVE_ID,
        "brokerRole": "SLAVE",
        "listenPort": port,
        "namesrvAddr": name_server.address,
    }
    with rocketmq.broker(directory, settings):
        registered = f"127.0.0.1:{port}"
        wait_until(lambda: slave.addresses().get(SLAVE_ID) == registered, "it is registered", TIMEOUT_S, poll_s=0.1)
        wait_until(lambda: slave.has(FIRST), "it has fetched all", TIMEOUT_S, poll_s=0.1)
        yield slave


FIRST: Final = _State(queues=4, retries=3, offset=1)
SECOND: Final = _State(queues=6, retries=5, offset=2)


def test_a_slave_keeps_up(tmp_path: Path, name_server: NameServer) -> None:
    """Topics, groups, offsets and progress of delays, as they are and as they change. The log is another matter."""
    settings = {
        "brokerClusterName": CLUSTER,
        "brokerName": NAME,
        "storePathRootDir": str(tmp_path / "master"),
        "listenPort": str(rocketmq.broker_port()),  # slaves ask for topics at the port two below
        "namesrvAddr": name_server.address,
    }
    master = BrokerServer(load_broker_settings(None, {}, settings)[0]).start()
    try:
        with _slave(tmp_path / "slave", name_server) as slave:
            slave.make(SECOND)
            wait_until(lambda: slave.has(SECOND), "it has fetched what has changed", TIMEOUT_S, poll_s=0.1)
            assert not {name for name in slave.topics() if name.startswith("RMQ_SYS_BROKER")}
    finally:
        master.stop()


class _WithSecondPorts(LocalBrokers):
    """A group that slaves can ask for topics."""

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        return {name: text for name, text in super().conf_lines(node).items() if name != "vipPort"}


def test_a_slave_follows_the_next_master(tmp_path: Path, name_server: NameServer) -> None:
    """Of a group of three, whose first one dies: the name server tells it of the next."""
    settings = {"brokerClusterName": CLUSTER, "namesrvAddr": name_server.address}
    with (
        _WithSecondPorts(tmp_path / "group", name=NAME, settings=settings) as group,
        _slave(tmp_path / "slave", name_server) as slave,
    ):
        killed = group.master()
        group.kill(killed)
        master = group.nodes[group.master(other_than=killed)].client_address
        wait_until(lambda: slave.addresses().get("0") == master, "the next one is registered", TIMEOUT_S, poll_s=0.1)
        slave.make(SECOND)
        wait_until(lambda: slave.has(SECOND), "it has fetched what has changed", TIMEOUT_S, poll_s=0.1)
