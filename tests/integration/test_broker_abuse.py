"""What no client should do to a broker: each is refused with a reason, and the broker goes on."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator

import grpc
import pytest

from cluster.local.group import HOST
from rocketstore.client.methods import Method
from rocketstore.client.topics import TopicInfo
from rocketstore.message.message import Message
from rocketstore.pb import broker_pb2 as pb
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import STEADY
from tests.support.broker_load import TOPIC
from tests.support.waiting import wait_until

SEND = Method("Send", pb.SendResponse)
ESCAPES = ("../escaped", "..", ".", "/tmp/escaped", "a/b", "a\\b", "a\0b", "", "x" * 128, "a b", "tópico", "~", "a:b")
FORBIDDEN = ("RMQ_SYS_BROKER_STATE", "RMQ_SYS_TERM_START", "RMQ_SYS_QUEUE_NUMBERS", "SCHEDULE_TOPIC_XXXX")


@pytest.fixture
def used(make_brokers: Callable[..., BrokerGroup]) -> Iterator[BrokerGroup]:
    """Brokers whose master stays the same, and that still serve when the test is over."""
    brokers = make_brokers(settings=STEADY)
    brokers.start_all()
    brokers.create_topic()
    yield brokers
    with brokers.producer() as producer, brokers.admin() as admin:
        receipt = producer.send(Message(TOPIC, b"still here"), queue_id=0)
        assert admin.message_by_id(receipt.message_id).body == b"still here"


def unary(channel: grpc.Channel, method: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
    """A method that takes and gives bytes."""
    return channel.unary_unary(
        f"/rocketstore.v1.BrokerService/{method}", request_serializer=None, response_deserializer=None
    )


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
    address = used.nodes[master].client_address
    with used.producer() as producer:
        producer.send(Message(TOPIC, b"so that all files are there"), queue_id=0)
    used.wait_dispatched()
    before = paths(used)

    with used.pinned(master) as connection:
        channel = connection.channels.channel(address)
        for name in (*ESCAPES, *FORBIDDEN):
            request = pb.SendRequest(messages=[pb.Message(topic=name, body=b"x", queue_id=0)])
            result = connection.ask(SEND, request, address, connection.deadline()).results[0]
            assert (name, result.status, result.outcome) == (name, "MESSAGE_ILLEGAL", "not_applied")
            for method, wire in (
                ("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name=name))),
                ("DeleteTopic", pb.DeleteTopicRequest(name=name)),
                ("Pull", pb.PullRequest(topic=name)),
                ("QueueRange", pb.QueueRequest(topic=name)),
                ("QueryByKey", pb.QueryByKeyRequest(topic=name, key="k")),
                *(
                    ("CommitOffsets", pb.CommitOffsetsRequest(group=group, offsets=[offset]))
                    for group, offset in (
                        (name, pb.ConsumerOffset(topic=TOPIC, queue_id=0, offset=1)),
                        ("people", pb.ConsumerOffset(topic=name, queue_id=0, offset=1)),
                    )
                    if name not in FORBIDDEN
                ),
            ):
                call = unary(channel, method)
                with pytest.raises(grpc.RpcError) as caught:
                    call(wire.SerializeToString(), timeout=5)
                allowed = {
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.PERMISSION_DENIED,
                }
                assert caught.value.code() in allowed, (name, method, caught.value)

    assert paths(used) == before


def test_garbage_on_the_port_harms_nobody(used: BrokerGroup) -> None:
    """Random bytes, half a preface, a request of another protocol, gRPC calls with bodies that are none."""
    master = used.master()
    node = used.nodes[master]
    chance = random.Random(3)
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n", *(chance.randbytes(200) for _ in range(20))):
        with socket.create_connection((HOST, node.client_port), timeout=5) as connection:
            connection.sendall(data)
    with used.pinned(master) as connection:
        channel = connection.channels.channel(node.client_address)
        for method in [one.name for one in pb.DESCRIPTOR.services_by_name["BrokerService"].methods]:
            if method.endswith("Stream"):
                continue
            call = unary(channel, method)
            for _ in range(5):
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"\xff" + chance.randbytes(40), timeout=5)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, caught.value)


def test_messages_that_are_too_large_are_refused_before_anything_is_stored(used: BrokerGroup) -> None:
    """The largest that is allowed is taken; one byte more, or properties of 32 KiB and more, are refused."""
    master = used.master()
    address = used.nodes[master].client_address
    limit = 4 << 20

    def send(*messages: pb.Message) -> list[tuple[str, str]]:
        with used.pinned(master, 15) as connection:
            answer = connection.ask(SEND, pb.SendRequest(messages=messages), address, connection.deadline())
        return [(one.status, one.outcome) for one in answer.results]

    too_large = pb.Message(topic=TOPIC, body=b"x" * (limit + 1), queue_id=0)
    too_many = pb.Message(topic=TOPIC, body=b"x", queue_id=0, properties={"a": "b" * 40_000})
    small = pb.Message(topic=TOPIC, body=b"small", queue_id=0)
    with used.admin() as admin:
        before = admin.queue_range(TOPIC, 0).max_offset
        refused = send(too_large), send(too_many), send(too_large, small, too_many), send(small)
        # An answered message is in its queue soon after; whatever had been stored before the last one is there with it.
        wait_until(lambda: admin.queue_range(TOPIC, 0).max_offset >= before + 2, "both small ones are in the queue")
        after = admin.queue_range(TOPIC, 0).max_offset

    assert refused[0] == [("MESSAGE_ILLEGAL", "not_applied")]
    assert refused[1] == [("MESSAGE_ILLEGAL", "not_applied")]
    assert [status for status, _ in refused[2]] == ["MESSAGE_ILLEGAL", "PUT_OK", "MESSAGE_ILLEGAL"]
    assert [status for status, _ in refused[3]] == ["PUT_OK"]
    assert after == before + 2


def test_topics_may_be_refused_but_not_lost(used: BrokerGroup) -> None:
    """A queue count without end is refused; the topic is as before."""
    with used.admin() as admin:
        for queues in (-1, 1 << 30):
            with pytest.raises(Exception, match=r"queue"):
                admin.put_topic(TopicInfo("many", queues, queues, 6))
        assert "many" not in [topic.name for topic in admin.topics()]
