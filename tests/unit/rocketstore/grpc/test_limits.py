"""What one client, or any number of them, can make the gateway keep, unpack or send."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from rocketstore.grpc.registry import COMMANDS_BYTES_MAX, LATE_TIMES, CommandStream
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.changes import TopicConfig
from tests.support.on_loop import on_loop, until
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import (
    GatewayClient,
    GatewayHarness,
    consumer_settings,
    message,
    producer_settings,
)


@pytest.mark.parametrize("settings", [None, producer_settings()], ids=["without settings", "without topics"])
def test_a_stream_of_nobody_leaves_nothing_behind(broker: GatewayHarness, settings: pb.Settings | None) -> None:
    """A client that is in no group sends no heartbeat that could be missed: its end is that of its stream."""
    for number in range(3):
        with broker.dial(f"c{number}") as client:
            stream = client.telemetry(settings)
            wait_until(lambda: broker.gateway.registry.streams == 1, "the stream is open")
            if settings is not None:
                assert stream.next().status.code == pb.OK
        wait_until(lambda: broker.gateway.registry.streams == 0, "the stream has ended")
    wait_until(lambda: len(broker.gateway.registry) == 0, "nobody is known")


def test_heartbeats_of_nobody_leave_nothing_behind(broker: GatewayHarness) -> None:
    """A client id costs nothing: without this, calls with ever new ones keep everybody else out for good."""
    for number in range(3):
        with broker.dial(f"c{number}") as client:
            assert client.heartbeat().code == pb.OK
    assert len(broker.gateway.registry) == 0


def test_an_owner_has_its_share_of_clients(broker: GatewayHarness) -> None:
    """The clients of others find room, and who says that it ends makes some."""
    broker.gateway.registry._share = 1
    with broker.dial("c1") as one, broker.dial("c2") as two:
        assert one.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
        refused = two.heartbeat(pb.PUSH_CONSUMER, "G")
        assert refused.code == pb.TOO_MANY_REQUESTS
        assert "account_share_percent" in refused.message
        ended = pbs.NotifyClientTerminationRequest(), pbs.NotifyClientTerminationResponse
        assert one.call("NotifyClientTermination", *ended).status.code == pb.OK
        assert two.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK


def test_settings_of_an_owner_are_bounded_together(broker: GatewayHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of clients could name a megabyte of topics, which is kept until it has been silent for long."""
    monkeypatch.setattr("rocketstore.grpc.registry.SETTINGS_BYTES_MAX", 2600)
    long = consumer_settings("G", "T")
    long.subscription.subscriptions[0].expression.expression = "x" * 1200
    with broker.dial("c1") as one, broker.dial("c2") as two:
        stream = one.telemetry(long)
        assert stream.next().status.code == pb.OK
        stream.send(pbs.TelemetryCommand(settings=long))
        assert stream.next().status.code == pb.OK
        assert two.telemetry(long).next().status.code == pb.TOO_MANY_REQUESTS
        answer = one.call(
            "NotifyClientTermination", pbs.NotifyClientTerminationRequest(), pbs.NotifyClientTerminationResponse
        )
        assert answer.status.code == pb.OK
        assert two.telemetry(long).next().status.code == pb.OK


def test_commands_that_are_not_read_have_a_size() -> None:
    """A question about a transaction holds a message, and a client that reads nothing is asked on and on."""
    commands: list[bytes] = []

    async def write(command: bytes) -> None:
        commands.append(command)

    async def asked() -> None:
        stream = CommandStream(lambda _reason: None)
        large, small = bytes(COMMANDS_BYTES_MAX * 2 // 3), b"small"
        assert [stream.put(one) for one in (large, large, small)] == [True, False, True]
        writer = asyncio.ensure_future(stream.write_all(write))
        while len(commands) < 2:
            await asyncio.sleep(0)
        assert stream.put(large)
        stream.finish()
        await writer
        assert commands == [large, small, large]

    asyncio.run(asked())


@on_loop
async def test_of_many_commands_for_a_client_that_may_not_listen_yet_the_newest_is_kept() -> None:
    """One that asks on and on would have each of its settings, of up to a megabyte, kept for a while."""
    commands: list[bytes] = []

    async def write(command: bytes) -> None:
        commands.append(command)

    stream = CommandStream(lambda _reason: None)
    writer = asyncio.ensure_future(stream.write_all(write))
    for number in range(1000):
        stream.put_late(b"%d" % number)
    await until(lambda: len(commands) == LATE_TIMES, "it is told, and told again")
    stream.finish()
    await writer
    assert commands == [b"999"] * LATE_TIMES


def test_a_request_is_not_unpacked_to_many_times_its_size(broker: GatewayHarness, client: GatewayClient) -> None:
    """A thousand bodies, each of 4 KB that become 4 MB, are one request: nothing of it is stored."""
    bomb = gzip.compress(bytes(4 * 1024 * 1024))
    given = [message(bomb, message_id=str(number), body_encoding=pb.GZIP) for number in range(4)]
    assert client.send(given[0]).status.code == pb.OK
    assert client.send(*given[1:]).status.code == pb.MESSAGE_BODY_TOO_LARGE
    assert len(broker.store.log.records) == 1


@pytest.mark.parametrize("context", ["a\x02UNIQ_KEY\x01other", "a\x01b", "\x00"])
def test_a_trace_context_is_no_way_to_write_other_properties(
    broker: GatewayHarness, client: GatewayClient, context: str
) -> None:
    """It is stored among them."""
    answer = client.send(message(trace_context=context))
    assert answer.status.code == pb.ILLEGAL_MESSAGE_PROPERTY_KEY
    assert not broker.store.log.records


def test_a_trace_context_counts_as_a_property(client: GatewayClient) -> None:
    """Its length does."""
    assert client.send(message(trace_context="x" * 17_000)).status.code == pb.MESSAGE_PROPERTIES_TOO_LARGE


def test_a_route_does_not_repeat_long_hosts_for_each_queue() -> None:
    """A client's access point comes back once for every queue of a topic."""
    with GatewayHarness(None, TopicConfig("T", 64, 64)) as broker, broker.dial() as client:
        assert client.route("T", f"{'h' * 255}:1").status.code == pb.OK
        answer = client.route("T", f"{'h' * 256}:1")
        assert answer.status.code == pb.ILLEGAL_ACCESS_POINT
        assert not answer.message_queues
        request = pbs.QueryAssignmentRequest(topic=pb.Resource(name="T"), group=pb.Resource(name="G"))
        request.endpoints.addresses.add(host="h" * 256, port=1)
        assigned = client.call("QueryAssignment", request, pbs.QueryAssignmentResponse)
        assert assigned.status.code == pb.ILLEGAL_ACCESS_POINT
