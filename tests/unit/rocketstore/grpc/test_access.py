"""Signatures and permissions over gRPC: the accounts are the ones that remoting has."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import grpc
import pytest

from dledger.access.rules import parse_rules
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import (
    GatewayClient,
    GatewayHarness,
    consumer_settings,
    message,
    producer_settings,
)

RULES = """
accounts:
  - accessKey: alice
    secretKey: alice-secret
    defaultTopicPerm: DENY
    defaultGroupPerm: DENY
    topicPerms: [T=PUB]
    groupPerms: [G=SUB]
  - accessKey: root
    secretKey: root-secret
    admin: true
"""


@pytest.fixture
def broker() -> Iterator[GatewayHarness]:
    with GatewayHarness(rules=parse_rules(RULES)) as harness:
        yield harness


def signature(key: str, secret: str, date: str = "") -> dict[str, str]:
    date = date or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = hmac.new(secret.encode(), date.encode(), "sha1").hexdigest().upper()
    header = f"MQv2-HMAC-SHA1 Credential={key}, SignedHeaders=x-mq-date-time, Signature={signed}"
    return {"authorization": header, "x_mq_date_time": date}


def alice(broker: GatewayHarness, **changes: str) -> GatewayClient:
    return broker.dial(**signature("alice", "alice-secret") | changes)


def test_a_signed_call_may_do_what_its_account_may(broker: GatewayHarness) -> None:
    """By topic and by group."""
    with alice(broker) as client:
        assert client.send(message()).status.code == pb.OK
        assert client.send(message(topic="U")).status.code == pb.FORBIDDEN
        assert client.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
        assert client.heartbeat(pb.PUSH_CONSUMER, "H").code == pb.FORBIDDEN
        assert client.route("T").status.code == pb.OK


def test_nobody_takes_the_client_id_of_another_account(broker: GatewayHarness) -> None:
    """Its stream of commands would end, and its messages would be given to others."""
    with alice(broker) as client, broker.dial(**signature("root", "root-secret")) as other:
        stream = client.telemetry(producer_settings("T"))
        stream.next()
        assert other.heartbeat().code == pb.FORBIDDEN
        known = broker.gateway.registry.find("client-1")
        assert known is not None
        assert known.stream is not None
        assert other.send(message(topic="U")).status.code == pb.OK
        assert list(known.topics) == ["T"]
        assert client.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK


@pytest.mark.parametrize(
    "headers",
    [
        {},
        signature("alice", "other-secret"),
        signature("bob", "alice-secret"),
        signature("alice", "alice-secret", "yesterday"),
        signature("alice", "alice-secret", datetime.fromtimestamp(time.time() - 3600, UTC).strftime("%Y%m%dT%H%M%SZ")),
        signature("alice", "alice-secret") | {"authorization": "Basic YWxpY2U6YWxpY2Utc2VjcmV0"},
    ],
    ids=["none", "wrong secret", "wrong key", "no date", "old date", "other scheme"],
)
def test_everything_else_is_not_authenticated(broker: GatewayHarness, headers: dict[str, str]) -> None:
    """Also routes: who has no account learns nothing."""
    with broker.dial(**headers) as client:
        assert client.send(message()).status.code == pb.UNAUTHORIZED
        assert client.route("T").status.code == pb.UNAUTHORIZED
        stream = client.telemetry(producer_settings("T"))
        assert stream.next().status.code == pb.UNAUTHORIZED
        with pytest.raises(grpc.RpcError) as ended:
            stream.next()
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert broker.store.log.records == []


@pytest.mark.parametrize("form", ["{:%Y%m%dT%H%M%SZ}", "{:%Y-%m-%dT%H:%M:%S.123456789Z}", "{:%Y-%m-%dT%H:%M:%S+00:00}"])
def test_clients_write_the_date_in_more_than_one_way(broker: GatewayHarness, form: str) -> None:
    """ISO 8601: Rust's in full, with nanoseconds."""
    with broker.dial(**signature("alice", "alice-secret", form.format(datetime.now(UTC)))) as client:
        assert client.send(message()).status.code == pb.OK


@pytest.mark.parametrize("date", ["now", "2026-11-30T12:00:00", "20261330T120000Z"])
def test_a_date_that_is_none_or_has_no_zone_is_refused(broker: GatewayHarness, date: str) -> None:
    """Whatever is signed."""
    with broker.dial(**signature("alice", "alice-secret", date)) as client:
        answer = client.send(message())
    assert answer.status.code == pb.UNAUTHORIZED
    assert "20261130T120000Z" in answer.status.message


def test_a_date_that_was_changed_is_not_signed(broker: GatewayHarness) -> None:
    """The date is all that the signature covers."""
    with alice(broker, x_mq_date_time=datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + "z") as client:
        assert client.send(message()).status.code == pb.UNAUTHORIZED


def test_settings_ask_for_no_more_than_the_account_may(broker: GatewayHarness) -> None:
    """A client that may not use what it names learns that when it starts."""
    with alice(broker) as client:
        assert client.telemetry(producer_settings("U")).next().status.code == pb.FORBIDDEN
        assert client.telemetry(consumer_settings("H", "T")).next().status.code == pb.FORBIDDEN


def test_nobody_ends_the_transactions_of_topics_that_he_may_not_send_to(broker: GatewayHarness) -> None:
    """A producer's group is its topic, and the store compares it with the half message's."""
    request = pbs.EndTransactionRequest(topic=pb.Resource(name="U"), transaction_id="0-0", resolution=pb.COMMIT)
    with alice(broker) as client:
        assert client.call("EndTransaction", request, pbs.EndTransactionResponse).status.code == pb.FORBIDDEN


def test_a_stream_ends_with_its_key_and_with_its_permission(broker: GatewayHarness) -> None:
    """As the streams of every other protocol."""
    assert broker.guard is not None
    for rules in (RULES.replace("T=PUB", "T=DENY"), RULES.replace("alice-secret", "new-secret")):
        with alice(broker) as client:
            stream = client.telemetry(producer_settings("T"))
            assert stream.next().status.code == pb.OK
            changed = parse_rules(rules)
            broker.on_loop(lambda changed=changed: broker.guard.apply(changed))  # type: ignore[misc]
            assert stream.next().status.code == pb.FORBIDDEN
        broker.on_loop(lambda: broker.guard.apply(parse_rules(RULES)))  # type: ignore[union-attr]


def test_a_receive_that_waits_ends_with_its_key_and_with_its_permission(broker: GatewayHarness) -> None:
    """Otherwise it gets the next message, though its account may not read it any more."""
    guard, permitted = broker.guard, RULES.replace("T=PUB", "T=SUB")
    assert guard is not None
    queue = pb.MessageQueue(topic=pb.Resource(name="T"))
    request = pbs.ReceiveMessageRequest(group=pb.Resource(name="G"), message_queue=queue, batch_size=1)
    request.invisible_duration.seconds = 60
    request.long_polling_timeout.seconds = 20
    for rules in (permitted.replace("T=SUB", "T=DENY"), permitted.replace("alice-secret", "new-secret")):
        broker.on_loop(lambda: guard.apply(parse_rules(permitted)))
        with alice(broker) as client:
            answers = client.begin("ReceiveMessage", request)
            wait_until(lambda: broker.broker.popping.counters().waiting == 1, "the receive waits")
            changed = parse_rules(rules)
            broker.on_loop(lambda changed=changed: guard.apply(changed))  # type: ignore[misc]
            assert pbs.ReceiveMessageResponse.FromString(next(iter(answers))).status.code == pb.FORBIDDEN
        assert broker.broker.popping.counters().waiting == 0


def test_who_may_not_send_is_not_asked_about_transactions(broker: GatewayHarness) -> None:
    """A question holds the message."""
    with alice(broker) as client, broker.dial("client-2", **signature("root", "root-secret")) as root:
        assert client.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
        assert root.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
        registry = broker.gateway.registry
        mine, roots = registry.find("client-1"), registry.find("client-2")
        assert mine is not None
        assert roots is not None
        assert registry.may_send(mine, "T")
        assert not registry.may_send(mine, "U")
        assert registry.may_send(roots, "U")
