"""Settings over Telemetry, heartbeats, and the end of clients."""

from __future__ import annotations

import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rocketstore.grpc.registry import FIRST_LATE_S
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.attributes import ExponentialRetryDelays, FixedRetryDelays
from rocketstore.state.changes import GroupConfig
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import (
    GatewayClient,
    GatewayHarness,
    consumer_settings,
    message,
    producer_settings,
)


def test_a_producer_gets_its_settings_with_what_the_server_decides(client: GatewayClient) -> None:
    """A status and settings in one command: with either missing, clients do not start. The largest body stays below
    4 MiB with room for properties, for clients that receive no more than that at once.
    """
    command = client.telemetry(producer_settings("T")).next()
    assert command.status.code == pb.OK
    settings = command.settings
    assert 0 < settings.publishing.max_body_size < 4 * 1024 * 1024
    assert [one.name for one in settings.publishing.topics] == ["T"]
    assert settings.backoff_policy.max_attempts == 3
    assert settings.backoff_policy.HasField("exponential_backoff")
    assert not settings.metric.on


@pytest.mark.parametrize(
    ("language", "strategy"), [(pb.PYTHON, "customized_backoff"), (pb.NODE_JS, "exponential_backoff")]
)
def test_consumers_get_the_backoff_that_their_language_understands(
    client: GatewayClient, language: pb.Language, strategy: str
) -> None:
    """With the other kind, Python would repeat each second, and Node at once and only one time."""
    command = client.telemetry(consumer_settings("G", "T", language=language)).next()
    policy = command.settings.backoff_policy
    assert policy.WhichOneof("strategy") == strategy
    assert policy.max_attempts == 17
    assert command.settings.subscription.long_polling_timeout.seconds >= 1
    assert command.settings.subscription.long_polling_timeout.nanos == 0
    assert command.settings.subscription.receive_batch_size == 32


def test_a_groups_own_settings_reach_its_consumers(broker: GatewayHarness, client: GatewayClient) -> None:
    """Whether it is ordered, how often and after which pauses a message is tried again: from the group's replicated
    settings.
    """
    delays = FixedRetryDelays((2000, 3500))
    broker.state.configs["G"] = GroupConfig("G", retry_times_max=4, ordered=True, retry_policy=delays)
    broker.state.configs["E"] = GroupConfig("E", retry_times_max=3, retry_policy=ExponentialRetryDelays(1000, 3000, 2))
    settings = client.telemetry(consumer_settings("G", "T")).next().settings
    assert settings.subscription.fifo
    assert settings.backoff_policy.max_attempts == 5
    assert [_ms(one) for one in settings.backoff_policy.customized_backoff.next] == [2000, 3500]
    settings = client.telemetry(consumer_settings("E", "T")).next().settings
    assert not settings.subscription.fifo
    assert [_ms(one) for one in settings.backoff_policy.customized_backoff.next] == [1000, 2000, 3000]
    node = client.telemetry(consumer_settings("E", "T", language=pb.NODE_JS)).next().settings
    assert _ms(node.backoff_policy.exponential_backoff.max) == 3000


def _ms(duration: Duration) -> int:
    return duration.seconds * 1000 + duration.nanos // 1_000_000


def test_node_hears_its_settings_late_and_twice(client: GatewayClient) -> None:
    """G4: with several topics its client asks before it listens, and would wait for ever."""
    began = time.monotonic()
    stream = client.telemetry(producer_settings("T", language=pb.NODE_JS))
    first = stream.next()
    assert time.monotonic() - began >= FIRST_LATE_S * 0.9
    assert stream.next() == first


def test_a_client_is_a_member_of_its_groups_until_it_ends(broker: GatewayHarness, client: GatewayClient) -> None:
    """Administrators see it; a producer's group is its topic, by which it is asked about transactions."""
    stream = client.telemetry(producer_settings("T"))
    stream.next()
    clients = broker.groups.clients
    assert [one.client_id for one in clients.producers("T")] == ["client-1"]
    answer = client.call(
        "NotifyClientTermination", pbs.NotifyClientTerminationRequest(), pbs.NotifyClientTerminationResponse
    )
    assert answer.status.code == pb.OK
    assert list(clients.producers("T")) == []
    assert broker.gateway.registry.find("client-1") is None
    with pytest.raises(StopIteration):  # no error: a process of Node.js would end at one
        stream.next()


def test_heartbeats_do_without_settings(broker: GatewayHarness, client: GatewayClient) -> None:
    """G2: some clients do not open their stream again for minutes after a connection was lost."""
    assert client.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
    group = broker.groups.clients.consumers("G")
    assert group is not None
    assert group.ids == ("client-1",)


def test_a_new_stream_takes_the_place_of_the_old_one(broker: GatewayHarness, client: GatewayClient) -> None:
    """A client that has lost its connection opens another one before the server notices."""
    old = client.telemetry(producer_settings("T"))
    old.next()
    new = client.telemetry(producer_settings("T"))
    assert new.next().status.code == pb.OK
    assert old.next().status.code == pb.FORBIDDEN
    with pytest.raises(grpc.RpcError):
        old.next()
    assert broker.gateway.registry.tell("client-1", pbs.TelemetryCommand().SerializeToString())
    assert new.next() == pbs.TelemetryCommand()


def test_a_stream_that_ends_leaves_the_client_known(broker: GatewayHarness, client: GatewayClient) -> None:
    """Its calls go on at another connection, or at another member."""
    stream = client.telemetry(producer_settings("T"))
    stream.next()
    stream.close()
    wait_until(lambda: broker.gateway.registry.streams == 0, "the stream has ended")
    found = broker.gateway.registry.find("client-1")
    assert found is not None
    assert found.stream is None


def test_a_client_of_no_known_kind_is_told_so(client: GatewayClient) -> None:
    """Clients look at the status of gRPC here: it ends the stream."""
    stream = client.telemetry(pb.Settings(client_type=pb.PULL_CONSUMER))
    assert stream.next().status.code == pb.UNRECOGNIZED_CLIENT_TYPE
    with pytest.raises(grpc.RpcError) as ended:
        stream.next()
    assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_java_clients_are_told_to_reconnect_before_a_member_stops(
    broker: GatewayHarness, client: GatewayClient
) -> None:
    """They obey; clients of other languages may stumble over the command, and are told nothing."""
    with broker.dial("client-2") as other:
        java = client.telemetry(producer_settings("T", language=pb.JAVA))
        python = other.telemetry(producer_settings("T"))
        assert java.next().HasField("settings")
        assert python.next().HasField("settings")
        broker.on_loop(broker.gateway.announce_end)
        assert java.next().HasField("reconnect_endpoints_command")
        assert broker.gateway.registry.tell("client-2", b"")
        assert python.next() == pbs.TelemetryCommand()


def test_what_is_counted(broker: GatewayHarness, client: GatewayClient) -> None:
    """For metrics: clients, calls, refusals and repetitions."""
    client.telemetry(producer_settings("T")).next()
    assert client.send(message()).status.code == pb.OK
    assert client.send(message()).status.code == pb.OK
    assert client.send(message(b"")).status.code == pb.MESSAGE_BODY_EMPTY
    found = broker.gateway.counted(broker.broker.counters())
    assert (found.grpc_clients, found.grpc_calls, found.grpc_refused, found.grpc_repeated) == (1, 4, 1, 1)
    assert found.grpc_passed_on == 0
