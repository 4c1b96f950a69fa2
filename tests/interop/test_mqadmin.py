"""RocketMQ's mqadmin and its consumer with our broker and our name server: ``make interop``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketstore.nameserver.server import NameServer
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.interop import java, rocketmq
from tests.interop.admin_session import AdminSession, admin_session
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

CLUSTER = "Ours"
BROKER = "ours-a"
TOPIC = "AdminTopic"
GROUP = "interop-consumers"
UNIQUE_ID = "7F00000100002A139A55333C3B4C0000"
PROPERTIES = f"KEYS\x01key1 key2\x02UNIQ_KEY\x01{UNIQUE_ID}\x02TAGS\x01A"
START_TIMEOUT_S = 120


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    with running(config_in(tmp_path, order_message_enable=True)) as started:
        yield started


@pytest.fixture
def broker(tmp_path: Path, name_server: NameServer) -> Iterator[BrokerServer]:
    """Ours, plain, known to the name server."""
    settings = {
        "storePathRootDir": str(tmp_path / "store"),
        "listenPort": str(rocketmq.broker_port()),
        "namesrvAddr": name_server.address,
        "brokerClusterName": CLUSTER,
        "brokerName": BROKER,
        "mappedFileSizeCommitLog": "8m",
        "maxHashSlotNum": "1000",
        "maxIndexNum": "4000",
    }
    started = BrokerServer(load_broker_settings(None, {}, settings)[0]).start()
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminSession]:
    """A process per command would take most of the time, and exceed mqadmin's limit of 5 s on a busy machine."""
    java.build()
    with admin_session(tmp_path_factory.mktemp("admin")) as started:
        yield started


@pytest.fixture
def admin(session: AdminSession, name_server: NameServer) -> _Admin:
    return _Admin(session, name_server.address)


class _Admin:
    """Runs commands; what they print, its words separated by one blank."""

    def __init__(self, session: AdminSession, name_server: str) -> None:
        self._session = session
        self._name_server = name_server

    def __call__(self, *arguments: str) -> str:
        printed = self._run(*arguments)
        assert "SubCommandException" not in printed, f"{' '.join(arguments)}:\n{printed}"
        return printed

    def failing(self, *arguments: str) -> str:
        """The reason."""
        printed = self._run(*arguments)
        assert "SubCommandException" in printed, f"{' '.join(arguments)} did not fail"
        return printed

    def _run(self, *arguments: str) -> str:
        return re.sub(r"[ \t]+", " ", self._session(*arguments, "-n", self._name_server))


def _prepare(admin: _Admin, broker: BrokerServer) -> str:
    """A topic with two messages, of which a group has consumed one; the first one's offset id."""
    assert "success" in admin("updateTopic", "-c", CLUSTER, "-t", TOPIC, "-r", "4", "-w", "4")
    with RemotingSocket(broker.port) as client:
        sent = client.send(TOPIC, b"hello", properties=PROPERTIES)
        client.send(TOPIC, b"again", queue_id=1)
        committed = client.ask(15, {"consumerGroup": "g", "topic": TOPIC, "queueId": 0, "commitOffset": 1})
        assert committed.code == 0
        client.subscribe("g", TOPIC)  # makes the topic for what comes back, which mqadmin asks for
    return sent.fields["msgId"]


def test_what_asks_of_brokers_topics_and_groups(broker: BrokerServer, admin: _Admin, tmp_path: Path) -> None:
    """Each command prints what is there; a value that it misses would be an exception."""
    _prepare(admin, broker)
    address = broker.address
    assert f"{CLUSTER} {BROKER} 0 {address} V4_9_8" in admin("clusterList")
    assert f"{CLUSTER} {BROKER} 0 0 " in admin("clusterList", "-m")
    assert "brokerVersionDesc : V4_9_8" in admin("brokerStatus", "-b", address)
    assert f"{BROKER} 0 0 1 20" in admin("topicStatus", "-t", TOPIC)
    assert f"{CLUSTER} {TOPIC} g" in admin("topicList", "-c")
    assert "retryMaxTimes=3" in admin("updateSubGroup", "-c", CLUSTER, "-g", "h", "-r", "3")
    assert f"{TOPIC} {BROKER} 0 1 1 0 20" in admin("consumerProgress", "-g", "g")
    assert "Diff Total: 1" in admin("brokerConsumeStats", "-b", address) + admin("consumerProgress", "-g", "g")
    assert f"{TOPIC} g 1 " in admin("statsAll")
    assert "physicSize" in admin("queryCq", "-t", TOPIC, "-q", "0", "-i", "0", "-c", "5", "-b", address)
    assert "brokerClusterName = Ours" in admin("getBrokerConfig", "-b", address)
    admin("exportMetadata", "-c", CLUSTER, "-f", str(tmp_path / "export"))
    admin("exportConfigs", "-c", CLUSTER, "-f", str(tmp_path / "export"))
    admin("exportMetrics", "-c", CLUSTER, "-f", str(tmp_path / "export"))
    metadata, configs, metrics = (
        json.loads((tmp_path / "export" / f"{name}.json").read_text()) for name in ("metadata", "configs", "metrics")
    )
    assert TOPIC in metadata["topicConfigTable"]
    assert configs["brokerConfigs"][BROKER]["brokerRole"] == "ASYNC_MASTER"
    assert BROKER in json.dumps(metrics)
    admin("clusterAclConfigVersion", "-b", address)


def test_what_finds_messages(broker: BrokerServer, admin: _Admin) -> None:
    message_id = _prepare(admin, broker)
    wait_until(lambda: broker.store.index_end().offset > 0, "the index")
    assert f"{UNIQUE_ID} 0 0" in admin("queryMsgByKey", "-t", TOPIC, "-k", "key1")
    for found in (
        admin("queryMsgById", "-i", message_id),
        admin("queryMsgByUniqueKey", "-t", TOPIC, "-i", UNIQUE_ID),
        admin("queryMsgByOffset", "-t", TOPIC, "-b", BROKER, "-i", "0", "-o", "0"),
    ):
        assert f"Topic: {TOPIC}" in found
        assert "Keys: [key1 key2]" in found
    assert "BODY: again" in admin("printMsg", "-t", TOPIC)


def test_what_changes_a_broker(broker: BrokerServer, admin: _Admin) -> None:
    _prepare(admin, broker)
    address = broker.address
    assert "success" in admin("updateBrokerConfig", "-b", address, "-k", "autoCreateTopicEnable", "-v", "false")
    assert "autoCreateTopicEnable = false" in admin("getBrokerConfig", "-b", address)
    refused = admin.failing("updateBrokerConfig", "-b", address, "-k", "fileReservedTime", "-v", "6")
    assert "CODE: 16" in refused
    for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert "success" in admin(command, "-b", address)
    assert "success" in admin("cloneGroupOffset", "-s", "g", "-d", "h", "-t", TOPIC, "-o", "true")
    assert broker.state.offset("h", TOPIC, 0) == 1
    assert f"{BROKER} 1 1 0 1 1" in admin("resetOffsetByTime", "-g", "h", "-t", TOPIC, "-s", "-1")
    assert broker.state.offset("h", TOPIC, 1) == 1
    assert "success" in admin("deleteSubGroup", "-c", CLUSTER, "-g", "h", "-r", "true")
    assert not broker.state.has_group("h")
    assert "success" in admin("deleteTopic", "-c", CLUSTER, "-t", TOPIC)
    assert broker.state.topic(TOPIC) is None


def test_what_asks_a_client(broker: BrokerServer, admin: _Admin, name_server: NameServer, tmp_path: Path) -> None:
    """RocketMQ's consumer answers through our broker."""
    assert "success" in admin("updateTopic", "-c", CLUSTER, "-t", TOPIC, "-r", "2", "-w", "2")
    with RemotingSocket(broker.port) as client:
        message_id = client.send(TOPIC, b"1", properties="UNIQ_KEY\x01" + UNIQUE_ID).fields["msgId"]
    with rocketmq.waiting_consumer(tmp_path / "consumer", name_server.address, TOPIC):
        wait_until(lambda: broker.state.offset(GROUP, TOPIC, 0) == 1, "the consumer has consumed", START_TIMEOUT_S)
        connected = admin("consumerConnection", "-g", GROUP)
        assert f"{TOPIC} *" in connected
        client_id = re.findall(r"^(\S+@\S+) ", connected, re.MULTILINE)[0]
        assert "JAVA" in connected
        info = admin("consumerStatus", "-g", GROUP, "-i", client_id)
        assert "PROP_CONSUMER_START_TIMESTAMP" in info
        consumed = admin("queryMsgById", "-g", GROUP, "-d", client_id, "-i", message_id)
        assert "CR_SUCCESS" in consumed
        assert "CONSUMED" in admin("queryMsgById", "-i", message_id)
        reset = admin("resetOffsetByTime", "-g", GROUP, "-t", TOPIC, "-s", "-1")
        assert BROKER in reset
        assert f"{GROUP} 1 V4_9_8 PUSH CLUSTERING" in admin("consumerProgress")
