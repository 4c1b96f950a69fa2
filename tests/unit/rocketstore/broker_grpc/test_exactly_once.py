"""Numbered requests at the broker: stored wholly or not at all, once, and under names that are each account's own."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from dledger.access.guard import Caller
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.codec import ResultEncoder
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import LOOPBACK
from rocketstore.message.producer_names import PRODUCER_CHARS_MAX, check_producer_name
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult
from tests.support.grpc_client import open_channel
from tests.unit.rocketstore.broker.harness import Harness, failing
from tests.unit.rocketstore.broker_grpc.test_access import ALICE, ROOT, harness


@pytest.fixture
def broker() -> Iterator[Harness]:
    """A broker with a topic T of 4 queues."""
    with Harness() as made:
        yield made


@pytest.fixture
def guarded() -> Iterator[Harness]:
    """Alice's channel to a broker with access rules: she may send to T, and not to the topic hidden."""
    with harness() as made:
        yield made


def messages(*bodies: bytes, topic: str = "T", queue_id: int = 0) -> list[pb.Message]:
    return [pb.Message(topic=topic, body=body, queue_id=queue_id) for body in bodies]


def send(broker: Harness, sequence: int, sent: list[pb.Message], *, name: str = "p") -> list[pb.SendResult]:
    request = pb.SendRequest(messages=sent, producer=name, sequence=sequence)
    return list(broker.call("Send", request, pb.SendResponse).results)


def next_of(broker: Harness, name: str = "p") -> int:
    return broker.call("Producer", pb.ProducerRequest(producer=name), pb.ProducerResponse).next_sequence


def bodies(broker: Harness) -> int:
    return len(broker.store.log.records)


def test_a_repeated_request_is_answered_as_before(broker: Harness) -> None:
    """Also where the broker chooses the queue: it does not choose again."""
    first = send(broker, 0, messages(b"1", b"2", queue_id=-1))

    assert send(broker, 0, messages(b"1", b"2", queue_id=-1)) == first
    assert (bodies(broker), next_of(broker), next_of(broker, "other")) == (2, 2, 0)


def test_requests_without_a_producer_are_all_stored(broker: Harness) -> None:
    """As ever."""
    broker.send(*messages(b"1"))
    broker.send(*messages(b"1"))

    assert bodies(broker) == 2


@pytest.mark.parametrize("by_store", [False, True])
def test_a_refused_message_keeps_the_others_of_its_request_out(*, by_store: bool) -> None:
    """Refused before the store sees it or by the store; the others may come again, with the same numbers."""
    with Harness(BrokerConfig(store=MessageStoreConfig(max_message_size=100))) as broker:
        bad = pb.Message(topic="T", body=bytes(101), queue_id=0 if by_store else 9)
        if by_store:  # it refuses all that it is given
            refusal = PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason="too large")
            broker.store.refusals.append(refusal)

        results = send(broker, 0, [*messages(b"1"), bad, *messages(b"2")])

        assert [one.status for one in results] == ["OUT_OF_ORDER_SEQUENCE", "MESSAGE_ILLEGAL", "OUT_OF_ORDER_SEQUENCE"]
        assert {one.outcome for one in results} == {"not_applied"}
        assert (bodies(broker), next_of(broker)) == (0, 0)
        assert [one.status for one in send(broker, 0, messages(b"1", b"2"))] == ["PUT_OK", "PUT_OK"]


@pytest.mark.parametrize(("name", "sequence"), [("with space", 0), ("n" * 129, 0), ("p", -1), ("p", (1 << 63) - 1)])
def test_names_and_numbers_that_cannot_be_meant_are_refused(broker: Harness, name: str, sequence: int) -> None:
    """With what is allowed."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT):
        send(broker, sequence, messages(b"1"), name=name)
    assert bodies(broker) == 0


def test_who_does_not_lead_does_not_count(broker: Harness) -> None:
    """It may not have heard of the last messages; it says who leads."""
    broker.become(BrokerRole.SLAVE)

    with failing(grpc.StatusCode.UNAVAILABLE, "slave") as told:
        next_of(broker)

    assert told["outcome"] == "not_applied"
    assert told["leader"] == "host:1"


@pytest.mark.parametrize("name", ["", "with space", "n" * 129])
def test_nobody_is_called_like_that(broker: Harness, name: str) -> None:
    """Also where only the number is asked for."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "128 characters"):
        next_of(broker, name)


def test_producers_of_two_accounts_have_nothing_to_do_with_each_other(guarded: Harness) -> None:
    """Neither can use up the other's numbers, or see them, by calling itself the same or like the other's real name."""
    send(guarded, 0, messages(b"alice 0", b"alice 1"))
    (real,) = guarded.store.log.producers

    with open_channel(guarded.address, ROOT) as root:
        request = pb.SendRequest(messages=messages(b"root"), producer="p", sequence=0)
        root.unary_unary("/rocketstore.v1.BrokerService/Send", None, None)(request.SerializeToString())
        for name, expected in (("p", 1), (real, 0)):
            answer = root.unary_unary("/rocketstore.v1.BrokerService/Producer", None, None)(
                pb.ProducerRequest(producer=name).SerializeToString()
            )
            assert pb.ProducerResponse.FromString(answer).next_sequence == expected

    assert next_of(guarded) == 2
    assert bodies(guarded) == 3


def test_an_accounts_names_stay_different_and_short_enough(guarded: Harness) -> None:
    """However long they are: the log takes 128 characters."""
    access = guarded.service._access
    assert access is not None
    assert guarded.guard is not None
    accounts = {one.access_key: one for one in guarded.guard.rules.accounts.values()}
    names = ["p", "p/1", "n" * PRODUCER_CHARS_MAX, "n" * (PRODUCER_CHARS_MAX - 1), "n" * 111, "n" * 112]

    own = [
        access.own_producer(Caller(accounts[who.access_key], "", None, signed=True), name)  # type: ignore[arg-type]
        for who in (ALICE, ROOT)
        for name in names
    ]

    assert len(set(own)) == len(own)
    for name in own:
        check_producer_name(name)


def test_a_denied_topic_keeps_the_whole_request_out(guarded: Harness) -> None:
    """A numbered one: its other messages may come again without that one."""
    results = send(guarded, 0, [*messages(b"1"), *messages(b"2", topic="hidden")])

    assert [one.status for one in results] == ["OUT_OF_ORDER_SEQUENCE", "NO_PERMISSION"]
    assert bodies(guarded) == 0


def test_a_place_that_is_not_remembered_is_never_packed() -> None:
    """There is no number for it; the long answer has -1 and no id."""
    encoder = ResultEncoder(LOOPBACK)

    response = pb.SendResponse.FromString(encoder.encode(1, [PutResult(PutMessageStatus.PUT_OK)], packed=True))

    (result,) = response.results
    assert (result.status, result.outcome, result.message_id) == ("PUT_OK", "stored", "")
    assert {result.offset, result.queue_id, result.queue_offset, result.store_timestamp_ms} == {-1}
