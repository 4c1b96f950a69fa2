"""RocketMQ 5.5's client, mqadmin and stores with our broker and our name server: ``make interop``."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.client import Admin, Consumer, ConsumerOptions, NotFoundError, Producer
from rocketstore.client.aio.admin_requests import Traced
from rocketstore.message.message import PROPERTY_TIMER_OUT_MS, Message
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.upgrade.survey import survey
from tests.interop import java, rocketmq5
from tests.interop.rocketmq import broker_port
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in
from tests.unit.rocketstore.nameserver.wire import running as name_server_running

pytestmark = pytest.mark.interop

START_S = 120


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    with name_server_running(config_in(tmp_path)) as started:
        yield started


@contextmanager
def ours(directory: Path, **settings: str) -> Iterator[BrokerServer]:
    """Our broker on this store."""
    given = {
        "storePathRootDir": str(directory),
        "listenPort": str(broker_port()),
        "mappedFileSizeCommitLog": "8m",
        "brokerName": "ours",
        **settings,
    }
    started = BrokerServer(load_broker_settings(None, {}, given)[0]).start()
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def broker(tmp_path: Path, name_server: NameServer) -> Iterator[BrokerServer]:
    """Ours, plain, known to the name server."""
    with ours(tmp_path / "store", namesrvAddr=name_server.address) as started:
        yield started


def test_a_client_that_polls_gets_everything(tmp_path: Path, broker: BrokerServer, name_server: NameServer) -> None:
    """Its consumer pulls by LITE_PULL_MESSAGE."""
    address = name_server.address
    assert rocketmq5.client(tmp_path / "c", "produce", address, "Polled", "20") == ["SEND_OK"] * 20

    polled = rocketmq5.client(tmp_path / "c", "poll", address, "Polled", "20")

    assert sorted(map(int, polled)) == list(range(20))
    committed = [broker.state.offset("interop-pollers", "Polled", queue) for queue in range(4)]
    assert sum(committed) == 20


def test_a_push_consumer_pops(tmp_path: Path, broker: BrokerServer, name_server: NameServer) -> None:
    """Its broker tells it to; a message that it could not consume comes again, as one of its topic."""
    address = name_server.address
    assert rocketmq5.client(tmp_path / "c", "produce", address, "Popped", "20") == ["SEND_OK"] * 20

    popped = [one.split() for one in rocketmq5.client(tmp_path / "c", "pop", address, "Popped", "21", "7")]

    assert sorted(int(one[0]) for one in popped) == sorted([*range(20), 7])
    assert [one for one in popped if one[1] != "0"] == [["7", "1", "Popped"]]
    assert {one[2] for one in popped} == {"Popped"}
    group, retry = "interop-poppers", "%RETRY%interop-poppers_Popped"
    assert sum(broker.state.offset(group, "Popped", queue) for queue in range(4)) == 20
    assert broker.state.offset(group, retry, 0) == 1


def test_a_timed_message_is_delivered_when_it_is_due(
    tmp_path: Path, broker: BrokerServer, name_server: NameServer
) -> None:
    """T1: never before, in whichever of its three ways the client says when that is."""
    address, delay_s = name_server.address, 5
    assert rocketmq5.client(tmp_path / "c", "produce", address, "Timed", "1") == ["SEND_OK"]

    told = rocketmq5.client(tmp_path / "c", "timed", address, "Timed", str(delay_s))

    assert told == ["seconds SEND_OK", "milliseconds SEND_OK", "moment SEND_OK"]
    polled = rocketmq5.client(tmp_path / "c", "poll", address, "Timed", "4")
    assert sorted(polled) == ["0", "0", "1", "2"]
    with Admin(broker.address, timeout_s=30) as admin:
        queues = [one.queue for one in admin.queue_ranges("Timed")]
        stored = [one for queue in queues for one in admin.messages(queue, 0)[0]]
    timed = [one for one in stored if PROPERTY_TIMER_OUT_MS in one.properties]
    assert sorted(one.body for one in timed) == [b"0", b"1", b"2"]
    for one in timed:
        due_ms = int(one.properties[PROPERTY_TIMER_OUT_MS])
        is_moment = one.body == b"2"  # told before any of them was sent
        assert is_moment or due_ms >= one.born_timestamp + 1000 * delay_s
        assert one.store_timestamp >= due_ms


def test_mqadmin_gets_its_answers(tmp_path: Path, broker: BrokerServer, name_server: NameServer) -> None:
    """Commands that ask otherwise than those of RocketMQ 4."""
    here, address = f"127.0.0.1:{broker.port}", name_server.address

    def admin(*words: str) -> str:
        printed = rocketmq5.admin(tmp_path / "admin", *words)
        assert "Exception" not in printed, printed
        return printed

    topics = tmp_path / "topics.json"
    topics.write_text('[{"topicName":"A","readQueueNums":4,"writeQueueNums":4},{"topicName":"B","perm":4}]')
    assert "success" in admin("updateTopicList", "-n", address, "-b", here, "-f", str(topics))
    assert broker.state.topic("A") == TopicConfig("A", 4, 4)
    assert broker.state.topic("B") == TopicConfig("B", 16, 16, 4)
    groups = tmp_path / "groups.json"
    groups.write_text('[{"groupName":"g","retryMaxTimes":3},{"groupName":"h"}]')
    assert "success" in admin("updateSubGroupList", "-n", address, "-b", here, "-f", str(groups))
    assert broker.state.group("g") == GroupConfig("g", retry_times_max=3)
    with RemotingSocket(broker.port) as client:
        assert client.send("A").code == 0
    wait_until(lambda: broker.store.max_offset("A", 0) == 1, "the message is in its queue")
    status = admin("topicStatus", "-n", address, "-t", "A").splitlines()
    rows = [line.split()[1:4] for line in status if line.startswith("ours")]
    assert rows == [["0", "0", "1"], ["1", "0", "0"], ["2", "0", "0"], ["3", "0", "0"]]
    ha = admin("haStatus", "-n", address, "-b", here)
    assert f"#MasterAddr\t{here}" in ha
    assert "#SlaveNum\t0" in ha
    listed = next(line for line in admin("clusterList", "-n", address).splitlines() if here in line)
    assert listed.split()[-1] == "true"


def test_a_store_of_version_5_says_what_is_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Messages that wait for their time, and those of a topic of batches: nobody gets ten of them as one."""
    port = broker_port()
    where = f"127.0.0.1:{port}"
    with rocketmq5.name_server(tmp_path / "ns") as address:
        settings = {"listenPort": port, "namesrvAddr": address, "brokerName": "theirs"}
        with rocketmq5.broker(tmp_path / "b", settings) as process:
            wait_until(
                lambda: where in rocketmq5.admin(tmp_path / "a", "clusterList", "-n", address),
                "it is registered",
                timeout_s=START_S,
            )
            for topic, attributes in (("Batches", ["-a", "+queue.type=BatchCQ"]), ("Plain", [])):
                words = ["-n", address, "-b", where, "-t", topic, "-r", "1", "-w", "1", *attributes]
                assert "success" in rocketmq5.admin(tmp_path / "a", "updateTopic", *words)
            assert rocketmq5.client(tmp_path / "c", "batch", address, "Batches", "10") == ["SEND_OK"]
            assert rocketmq5.client(tmp_path / "c", "produce", address, "Plain", "5") == ["SEND_OK"] * 5
            timed = rocketmq5.client(tmp_path / "c", "timed", address, "Plain", "86400")
            assert timed == ["seconds SEND_OK", "milliseconds SEND_OK", "moment SEND_OK"]
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)
    store = tmp_path / "copy"
    shutil.copytree(tmp_path / "b" / "store", store, copy_function=shutil.copyfile)  # with new times, as `cp -r`

    found = survey(store)
    assert found.comes[0] == "messages (5) of topics (1), with their queue offsets; NOT those named below"
    assert [one.partition(":")[0] for one in found.stays] == ["timerwheel", "batchconsumequeue"]
    with ours(store) as broker, RemotingSocket(broker.port) as client:
        for said in ("up to 3 messages", "write here: Batches"):
            assert said in caplog.text
        for topic, code in (("Batches", AnswerCode.NO_PERMISSION), ("Plain", AnswerCode.SUCCESS)):
            client.subscribe("g", topic)
            assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", topic)).code == code
        assert client.send("Batches").code == AnswerCode.NO_PERMISSION


def test_mqadmin_reads_our_traces(tmp_path: Path, broker: BrokerServer, name_server: NameServer) -> None:
    """Those of a producer and of a consumer of ours, in the fields where it expects them."""
    with Producer(name_servers=name_server.address, group="senders", trace=True, timeout_s=30) as producer:
        sent = producer.send(Message("Traced", b"x", keys="k1", tags="new"))
    options = ConsumerOptions(start="first", trace=True)
    with Consumer(name_servers=name_server.address, group="readers", topics="Traced", options=options) as consumer:
        wait_until(lambda: bool(consumer.poll(1)), "it is consumed")
    with Admin(broker.address, timeout_s=30) as admin:
        wait_until(lambda: len(traces_of(admin, sent.message_id)) == 2, "both traces can be found")

    words = ["queryMsgTraceById", "-n", name_server.address, "-i", sent.message_id]
    printed = rocketmq5.admin_in_time(tmp_path / "admin", *words)

    assert "Exception" not in printed, printed
    (pub,) = [line.split() for line in printed.splitlines() if line.startswith("Pub")]
    (sub,) = [line.split() for line in printed.splitlines() if line.startswith("Sub ")]
    assert (pub[1], pub[-1], sub[1], sub[-1]) == ("senders", "success", "readers", "success"), printed


def traces_of(admin: Admin, message_id: str) -> list[Traced]:
    try:
        return admin.trace(message_id)
    except NotFoundError:
        return []
