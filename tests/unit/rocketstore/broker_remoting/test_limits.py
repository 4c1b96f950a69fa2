"""What requests leave behind once they are answered: nothing."""

from __future__ import annotations

import asyncio

from dledger.remoting.frame import Frame, encode
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


def test_what_was_answered_no_longer_counts(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Also not less than nothing: a client could then occupy more."""
    client.subscribe("g", "T")
    for _ in range(3):
        assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("T"), b"x").code == 0
        assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"), bytes(100)).code == 0
    wait_until(lambda: not broker.remoting.server.requests_under_way, "every request has ended")
    (connection,) = broker.remoting.server._connections
    wait_until(lambda: connection.under_way <= 0, "nothing is under way")
    assert connection.under_way == 0
    assert broker.remoting.server._room.is_empty


def test_a_heartbeat_of_a_closed_connection_makes_no_member(broker: RemotingHarness) -> None:
    """It would stay for ever, and the other consumers of the group would leave queues to it."""

    async def beat() -> list[str]:
        connection = broker.remoting.server.protocol()
        data = HeartbeatData("ghost", (), (ConsumerData("g"),))
        connection.data_received(encode(Frame(RequestCode.HEART_BEAT, 1, body=data.encode())))
        connection.connection_lost(None)  # in the same turn of the loop
        while broker.remoting.server.requests_under_way:
            await asyncio.sleep(0)
        return broker.groups.clients.consumer_groups()

    assert broker.bridge.run(beat()) == []


def test_a_pull_of_a_closed_connection_does_not_wait(broker: RemotingHarness) -> None:
    """It would keep its place among the waiting pulls from others, for nobody."""

    async def pull() -> int:
        connection = broker.remoting.server.protocol()
        fields = pull_fields("g", "T", sysFlag=6, subscription="*", suspendTimeoutMillis=20_000)
        texts = {name: str(value) for name, value in fields.items()}
        connection.data_received(encode(Frame(RequestCode.PULL_MESSAGE, 1, texts)))
        assert broker.remoting.server.requests_under_way == 1
        connection.connection_lost(None)  # in the same turn of the loop
        for _ in range(10):
            await asyncio.sleep(0)
        return len(broker.broker.pulling.waiting)

    assert broker.bridge.run(pull()) == 0


def test_a_refusal_that_does_not_fit_into_a_frame_is_still_one_answer(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    fields = send_fields("T") | {"b": '"' * 100_000}
    answer = client.ask(RequestCode.SEND_MESSAGE_V2, fields, b"x")
    assert answer.code != 0
    assert client.send().code == 0
    (connection,) = broker.remoting.server._connections
    assert connection.under_way == 0
