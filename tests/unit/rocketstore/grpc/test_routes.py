"""QueryRoute: a client gets its own addresses back, and every queue of the topic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocketstore.broker_config import BrokerConfig
from rocketstore.grpc.routes import ALL_TYPES
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.changes import TopicConfig
from rocketstore.types import MessageType
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness, message


def test_a_route_has_all_queues_at_the_clients_own_addresses(client: GatewayClient) -> None:
    """G3: endpoints are a client's identity of a connection, so they are its own, in its order; the broker's id is 0,
    or producers find no queue to send to.
    """
    answer = client.route("T", "10.0.0.2:8081", "10.0.0.1:8081")
    assert answer.status.code == pb.OK
    assert [one.id for one in answer.message_queues] == [0, 1, 2, 3]
    for queue in answer.message_queues:
        assert (queue.topic.name, queue.permission, queue.broker.id) == ("T", pb.READ_WRITE, 0)
        assert [one.host for one in queue.broker.endpoints.addresses] == ["10.0.0.2", "10.0.0.1"]
        assert tuple(queue.accept_message_types) == ALL_TYPES


def test_a_topic_that_sending_would_create_has_a_route(broker: GatewayHarness, client: GatewayClient) -> None:
    """Otherwise a producer of a new topic could not send its first message; nothing is created by asking."""
    answer = client.route("new")
    assert (answer.status.code, len(answer.message_queues)) == (pb.OK, BrokerConfig().default_topic_queue_nums)
    assert broker.state.topic("new") is None


def test_without_creation_by_sending_an_unknown_topic_is_not_found() -> None:
    """The code that clients take for a missing topic, with what to do about it."""
    config = replace(BrokerConfig(), auto_create_topic_enable=False)
    with GatewayHarness(config) as broker, broker.dial() as client:
        assert client.route("new").status.code == pb.TOPIC_NOT_FOUND
        assert "create it first" in client.route("new").status.message


@pytest.mark.parametrize("topic", ["", "a b", "x" * 128, "RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX"])
def test_names_that_no_topic_has_are_refused(client: GatewayClient, topic: str) -> None:
    """In the answer's status, which is where clients look."""
    found = client.route(topic).status.code
    assert found == pb.ILLEGAL_TOPIC


def test_queues_only_for_reading_are_not_written_to() -> None:
    """A topic with fewer queues for writing: the others are only read."""
    with GatewayHarness(None, TopicConfig("T", 3, 2), TopicConfig("R", 1, 1, 4)) as broker, broker.dial() as client:
        assert [one.permission for one in client.route("T").message_queues] == [pb.READ_WRITE, pb.READ_WRITE, pb.READ]
        assert [one.permission for one in client.route("R").message_queues] == [pb.READ]


def test_a_call_without_a_client_id_is_refused(broker: GatewayHarness) -> None:
    """Everything that is kept of clients is kept by their ids."""
    with broker.dial("") as client:
        assert client.route("T").status.code == pb.CLIENT_ID_REQUIRED


def test_namespaces_are_refused_in_words(client: GatewayClient) -> None:
    """They are not served: a topic of the same name must not be taken for it."""
    request = pbs.QueryRouteRequest(topic=pb.Resource(name="T", resource_namespace="n"))
    status = client.call("QueryRoute", request, pbs.QueryRouteResponse).status
    assert (status.code, "namespace" in status.message) == (pb.NOT_IMPLEMENTED, True)


def test_garbage_is_a_bad_request(client: GatewayClient) -> None:
    """An answer in the protocol, not an error of gRPC's."""
    assert client.call("QueryRoute", b"\xff\xff", pbs.QueryRouteResponse).status.code == pb.BAD_REQUEST


def test_a_topic_of_one_type_says_which() -> None:
    """Clients compare it with what they send, before they do."""
    topic = TopicConfig("D", 1, 1, message_type=MessageType.DELAY)
    with GatewayHarness(None, topic) as broker, broker.dial() as other:
        assert list(other.route("D").message_queues[0].accept_message_types) == [pb.DELAY]
        status = other.send(message(topic="D")).status
    assert status.code == pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    assert "DELAY" in status.message
    assert "NORMAL" in status.message
