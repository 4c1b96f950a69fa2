"""What no client should do to a broker: each is refused with a reason, and the broker goes on."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator

import pytest

from dledger.remoting.codes import AnswerCode
from dledger_cli.local.group import HOST
from rocketstore.client import Message, TopicInfo
from rocketstore.remoting.codes import OwnCode, RequestCode
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import STEADY
from tests.support.broker_load import TOPIC
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until

ESCAPES = ("../escaped", "..", ".", "/tmp/escaped", "a/b", "a\\b", "a\0b", "", "x" * 128, "a b", "tópico", "~", "a:b")
WITHOUT_BODY = frozenset({OwnCode.LIST_TIMED})
"""Questions whose header says everything: nobody looks at a body."""
FORBIDDEN = ("RMQ_SYS_BROKER_STATE", "RMQ_SYS_TERM_START", "RMQ_SYS_QUEUE_NUMBERS", "SCHEDULE_TOPIC_XXXX")


@pytest.fixture
def used(make_brokers: Callable[..., BrokerGroup]) -> Iterator[BrokerGroup]:
    """Brokers whose master stays the same, and that still serve when the test is over."""
    brokers = make_brokers(settings=STEADY)
    brokers.start_all()
    brokers.create_topic()
    yield brokers
    with brokers.producer() as producer, brokers.admin() as admin:
        result = producer.send(Message(TOPIC, b"still here"), queue=0)
        assert admin.message_by_id(result.offset_id).body == b"still here"


def paths(brokers: BrokerGroup) -> set[str]:
    """Every file and directory of all brokers that tells of a topic, and their neighbours."""
    return {
        str(path.relative_to(brokers.directory.parent))
        for path in brokers.directory.parent.rglob("*")
        if "dledger-" not in str(path.relative_to(brokers.directory.parent)) and "/index/" not in str(path)
    }


def test_names_that_try_to_escape_are_refused_and_create_nothing(used: BrokerGroup) -> None:
    """As topics to send to, to make, to pull, to delete; as groups."""
    master = used.master()
    with used.producer() as producer:
        producer.send(Message(TOPIC, b"so that all files are there"), queue=0)
    used.wait_dispatched()
    before = paths(used)

    made: dict[str, object] = {"defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", "order": "false"}
    made |= dict.fromkeys(("readQueueNums", "writeQueueNums", "perm"), "6")
    with RemotingSocket(used.nodes[master].client_port) as client:
        for name in (*ESCAPES, *FORBIDDEN):
            assert client.send(name, b"x").code in (AnswerCode.MESSAGE_ILLEGAL, AnswerCode.TOPIC_NOT_EXIST), name
            requests: list[tuple[int, dict[str, object]]] = [
                (RequestCode.UPDATE_AND_CREATE_TOPIC, made | {"topic": name}),
                (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name}),
                (RequestCode.PULL_MESSAGE, pull_fields("people", name)),
            ]
            if name not in FORBIDDEN:
                commit = {"consumerGroup": "people", "topic": TOPIC, "queueId": 0, "commitOffset": 1}
                requests.append((RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": name}))
                requests.append((RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"topic": name}))
            for code, fields in requests:
                answer = client.ask(code, fields)
                assert answer.code != AnswerCode.SUCCESS, (name, code, answer)

    assert paths(used) == before


def test_garbage_on_the_port_harms_nobody(used: BrokerGroup) -> None:
    """Random bytes, half a preface, requests of another protocol, and our own requests with bodies that are none."""
    node = used.nodes[used.master()]
    chance = random.Random(3)
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n", *(chance.randbytes(200) for _ in range(20))):
        with socket.create_connection((HOST, node.client_port), timeout=60) as connection:
            connection.sendall(data)
    with RemotingSocket(node.client_port) as client:
        for code in OwnCode:
            for _ in range(5):
                answer = client.ask(code, {}, b"\xff" + chance.randbytes(40))
                assert (answer.code == AnswerCode.SUCCESS) == (code in WITHOUT_BODY), (code, answer)


def test_messages_that_are_too_large_are_refused_before_anything_is_stored(used: BrokerGroup) -> None:
    """A body of more than 4 MiB, and properties of 32 KiB and more; the connection goes on."""
    limit = 4 << 20
    with used.admin() as admin, RemotingSocket(used.nodes[used.master()].client_port) as client:
        before = admin.queue_ranges(TOPIC)[0].max_offset
        refused = [
            client.send(TOPIC, b"x" * (limit + 1)).code,
            client.send(TOPIC, b"x", properties="a\x01" + "b" * 40_000).code,
        ]
        stored = [client.send(TOPIC, b"small").code, client.send(TOPIC, b"small").code]
        # An answered message is in its queue soon after; whatever had been stored before the last one is there with it.
        wait_until(lambda: admin.queue_ranges(TOPIC)[0].max_offset >= before + 2, "both are in the queue")
        after = admin.queue_ranges(TOPIC)[0].max_offset

    assert refused == [AnswerCode.MESSAGE_ILLEGAL] * 2
    assert stored == [AnswerCode.SUCCESS] * 2
    assert after == before + 2


def test_topics_may_be_refused_but_not_lost(used: BrokerGroup) -> None:
    """A queue count without end is refused; the topic is as before."""
    with used.admin() as admin:
        for queues in (-1, 1 << 30):
            with pytest.raises(Exception, match=r"queue"):
                admin.put_topic(TopicInfo("many", queues, queues, 6))
        assert "many" not in [topic.name for topic in admin.topics()]
