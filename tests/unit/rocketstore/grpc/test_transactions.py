"""Transactions over gRPC: a half message, its end, and the question to a producer that has not said anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rocketstore.broker_config import BrokerConfig
from rocketstore.message.record import decode_record
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.types import HALF_TOPIC
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness, message, producer_settings


@pytest.fixture
def broker() -> Iterator[GatewayHarness]:
    config = replace(BrokerConfig(), transaction_time_out=0, transaction_check_interval=100)
    with GatewayHarness(config) as harness:
        yield harness


def begin(client: GatewayClient, message_id: str = "half") -> str:
    answer = client.send(message(b"half", message_id=message_id, kind=pb.TRANSACTION))
    assert answer.status.code == pb.OK
    return answer.entries[0].transaction_id


def end(
    client: GatewayClient, transaction: str, resolution: pb.TransactionResolution, message_id: str = "half"
) -> pb.Status:
    request = pbs.EndTransactionRequest(
        topic=pb.Resource(name="T"), message_id=message_id, transaction_id=transaction, resolution=resolution
    )
    return client.call("EndTransaction", request, pbs.EndTransactionResponse).status


def committed(broker: GatewayHarness) -> list[bytes]:
    return [decode_record(one.record).body for one in broker.store.log.records if one.head.topic == "T"]


def test_a_message_is_seen_once_it_is_committed(broker: GatewayHarness, client: GatewayClient) -> None:
    """Until then it is in the topic of half messages; the producer's group is its topic."""
    wait_until(lambda: broker.broker.storage.transactions.is_ready, "it knows which are open")
    transaction = begin(client)
    (half,) = [decode_record(one.record) for one in broker.store.log.records if one.head.topic == HALF_TOPIC]
    assert half.properties["PGROUP"] == "T"
    assert committed(broker) == []
    assert end(client, transaction, pb.TRANSACTION_RESOLUTION_UNSPECIFIED).code == pb.OK
    assert committed(broker) == []
    assert end(client, transaction, pb.COMMIT).code == pb.OK
    assert committed(broker) == [b"half"]


def test_an_end_is_repeated_but_not_turned_around(broker: GatewayHarness, client: GatewayClient) -> None:
    """A client repeats an end whose answer it did not get, and must not be told that it failed; nobody is told that a
    message was committed which was rolled back.
    """
    wait_until(lambda: broker.broker.storage.transactions.is_ready, "it knows which are open")
    transaction = begin(client)
    assert end(client, transaction, pb.COMMIT).code == pb.OK
    assert end(client, transaction, pb.COMMIT).code == pb.OK
    assert end(client, transaction, pb.ROLLBACK).code == pb.INVALID_TRANSACTION_ID
    assert committed(broker) == [b"half"]
    other = begin(client, "other")
    assert end(client, other, pb.ROLLBACK, "other").code == pb.OK
    assert end(client, other, pb.ROLLBACK, "other").code == pb.OK
    assert end(client, other, pb.COMMIT, "other").code == pb.INVALID_TRANSACTION_ID
    assert committed(broker) == [b"half"]


@pytest.mark.parametrize("transaction", ["", "x", "1-", "1-2-3", "-1-2", "0" * 40 + "-1", "ffffffffffffffffff-0"])
def test_an_id_of_no_transaction_is_refused(client: GatewayClient, transaction: str) -> None:
    """With the code that clients know."""
    assert end(client, transaction, pb.COMMIT).code == pb.INVALID_TRANSACTION_ID


def test_a_producer_that_says_nothing_is_asked(broker: GatewayHarness, client: GatewayClient) -> None:
    """Also if its settings did not name the topic: it has sent there. The message in the question can be decoded: with
    encoding and digest.
    """
    stream = client.telemetry(producer_settings())
    stream.next()
    wait_until(lambda: broker.broker.storage.transactions.is_ready, "it knows which are open")
    transaction = begin(client)
    asked = stream.next().recover_orphaned_transaction_command
    assert asked.transaction_id == transaction
    assert (asked.message.topic.name, asked.message.body) == ("T", b"half")
    system = asked.message.system_properties
    assert (system.message_id, system.body_encoding, system.body_digest.type) == ("half", pb.IDENTITY, pb.MD5)
    assert end(client, asked.transaction_id, pb.COMMIT).code == pb.OK
    assert committed(broker) == [b"half"]


def test_another_producer_is_asked_if_the_first_one_has_no_stream(
    broker: GatewayHarness, client: GatewayClient
) -> None:
    """It is not known whether it died, which only silence tells; its transactions do not wait for that."""
    wait_until(lambda: broker.broker.storage.transactions.is_ready, "it knows which are open")
    with broker.dial("another") as another:
        stream = another.telemetry(producer_settings("T"))
        stream.next()
        transaction = begin(client)
        assert stream.next().recover_orphaned_transaction_command.transaction_id == transaction


def test_recovery_waits_as_long_as_the_message_says(broker: GatewayHarness, client: GatewayClient) -> None:
    """Seconds for which nobody asks are kept with the half message; an hour at most."""
    wait_until(lambda: broker.broker.storage.transactions.is_ready, "it knows which are open")
    given = message(kind=pb.TRANSACTION)
    given.system_properties.orphaned_transaction_recovery_duration.seconds = 60
    assert client.send(given).status.code == pb.OK
    half = next(one for one in broker.store.log.records if one.head.topic == HALF_TOPIC)
    assert decode_record(half.record).properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] == "60"
    given.system_properties.orphaned_transaction_recovery_duration.seconds = 3601
    given.system_properties.message_id = "later"
    assert client.send(given).status.code == pb.BAD_REQUEST
