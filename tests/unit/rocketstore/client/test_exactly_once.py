"""Numbered messages: what is unknown is sent again, nothing is stored twice, and no hole stops what follows."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from dledger.errors import (
    ConfigError,
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
)
from rocketstore.client.errors import MessageRefusedError, SendOutcomeUnknownError
from rocketstore.client.producer import Producer
from rocketstore.client.sends import SendFuture
from rocketstore.message.message import Message
from tests.support.fake_broker import Break, FakeBrokers, Refusal, Script
from tests.support.waiting import wait_until


@pytest.fixture
def producer(brokers: FakeBrokers) -> Iterator[Producer]:
    with Producer(brokers.addresses) as made:
        yield made


def bodies_of(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def order(body: bytes) -> Message:
    return Message("orders", body)


# --- numbers that the client gives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_unknown_is_sent_again_and_stored_once(
    producer: Producer, brokers: FakeBrokers, *, stored: bool
) -> None:
    """Whether the request was stored before its stream broke or not; the receipt says where the message is."""
    brokers.nodes[0].sends.append(Break(stored=stored))

    receipts = producer.send_many([order(b"one"), order(b"two")], queue_id=0)

    assert brokers.bodies("orders") == [b"one", b"two"]
    assert [one.queue_offset for one in receipts] == [0, 1]
    assert len(brokers.nodes[0].requests) == 2


def test_requests_under_way_are_numbered_in_the_order_they_are_sent(producer: Producer, brokers: FakeBrokers) -> None:
    """One name for a sender, and no number left out or given twice, whoever sends."""

    def send(queue_id: int) -> None:
        for body in bodies_of(300):
            sender.send(order(body), queue_id=queue_id)

    with producer.sender(batch_messages=50, linger_ms=0) as sender:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    requests = brokers.nodes[0].requests
    assert len({one.producer for one in requests}) == 1
    expected = 0
    for request in requests:
        assert request.sequence == expected
        expected += len(request.messages)
    assert all(brokers.bodies("orders", number) == bodies_of(300) for number in range(4))


def scripts(randomness: random.Random) -> list[Script]:
    """What a bad day of a broker looks like: it leaves requests unanswered, or refuses some messages for good."""
    possible: list[Script] = [Refusal("OS_PAGECACHE_BUSY"), Refusal("SERVICE_NOT_AVAILABLE")]
    if randomness.random() < 0.6:
        possible += [Break(stored=True), Break(stored=False), Refusal("UNKNOWN_ERROR", "unknown")]
    else:
        possible.append(Refusal("MESSAGE_ILLEGAL", only=(1,)))
    return [randomness.choice(possible) if randomness.random() < 0.3 else None for _ in range(60)]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_each_message_is_stored_once_in_order(brokers: FakeBrokers, seed: int) -> None:
    """Where its receipt says, and the refused ones are not; a change of the master included."""
    randomness = random.Random(seed)
    brokers.nodes[0].sends = brokers.nodes[1].sends = brokers.nodes[2].sends = deque(scripts(randomness))
    bodies = bodies_of(400)
    elect_at = randomness.randrange(400)

    with (
        Producer(brokers.addresses, timeout_s=60) as producer,
        producer.sender(batch_messages=randomness.choice([5, 17]), ordered=randomness.random() < 0.5) as sender,
    ):
        futures: list[SendFuture] = []
        for number, body in enumerate(bodies):
            futures.append(sender.send(order(body), queue_id=number % 2))
            if number == elect_at:
                brokers.elect(randomness.randrange(3))

    errors = [future.exception() for future in futures]
    assert {type(error) for error in errors} <= {type(None), MessageRefusedError}
    for queue in range(2):
        stored = brokers.bodies("orders", queue)
        assert stored == sorted(set(stored)), "none twice, none overtaken"
        for number in range(queue, len(bodies), 2):
            if errors[number] is None:
                assert stored[futures[number].result().queue_offset] == bodies[number]
            else:
                assert bodies[number] not in stored


def test_a_refused_message_stops_none_behind_it(producer: Producer, brokers: FakeBrokers) -> None:
    """Those behind it get its number: the name stays, and the stream, too."""
    brokers.nodes[0].sends.extend([None, Refusal("MESSAGE_ILLEGAL", only=(1,))])

    with producer.sender(batch_messages=3) as sender:
        futures = [sender.send(order(body), queue_id=0) for body in bodies_of(12)]

    assert [place for place, future in enumerate(futures) if future.exception()] == [4]
    assert brokers.bodies("orders") == [body for body in bodies_of(12) if body != b"000004"]
    assert len({one.producer for one in brokers.nodes[0].requests}) == 1
    assert brokers.nodes[0].calls.count("Status") == 2, "found and opened once"


def test_what_stays_unknown_does_not_stop_what_follows(brokers: FakeBrokers) -> None:
    """Nobody answers until the time is over: the message may be stored. The next ones have another name."""
    node = brokers.nodes[0]
    node.gate.clear()
    with Producer(brokers.addresses, timeout_s=0.8) as producer, producer.sender(linger_ms=0) as sender:
        lost = sender.send(order(b"lost"), queue_id=0)
        assert isinstance(lost.exception(5), SendOutcomeUnknownError)
        node.gate.set()
        wait_until(lambda: node.waiting == 0, "the broker answers again")
        assert sender.send(order(b"next"), queue_id=0).result(5)

    names = [one.producer for one in node.requests]
    assert names[0] != names[-1]
    assert node.requests[-1].sequence == 0
    assert brokers.bodies("orders").count(b"next") == 1


def test_a_producer_that_is_forgotten_begins_anew(producer: Producer, brokers: FakeBrokers) -> None:
    """It was idle for too long; nothing it sends now was ever stored."""
    producer.send(order(b"one"), queue_id=0)
    brokers.producers.clear()

    producer.send(order(b"two"), queue_id=0)

    assert brokers.bodies("orders") == [b"one", b"two"]
    assert len({one.producer for one in brokers.nodes[0].requests}) == 2


def test_what_a_forgetful_broker_may_have_stored_is_unknown(producer: Producer, brokers: FakeBrokers) -> None:
    """A broker on its own that was restarted cannot tell; sending it again might duplicate it."""
    producer.send(order(b"one"), queue_id=0)
    brokers.nodes[0].sends.append(Break(stored=True, forgets=True))

    with pytest.raises(SendOutcomeUnknownError):
        producer.send(order(b"two"), queue_id=0)
    producer.send(order(b"three"), queue_id=0)

    assert brokers.bodies("orders") == [b"one", b"two", b"three"]


def test_the_first_of_a_producer_is_unknown_after_a_restart_too(producer: Producer, brokers: FakeBrokers) -> None:
    """Its number is 0, so to a broker that has forgotten everything it looks like that of a new producer."""
    brokers.memory = 1
    brokers.nodes[0].sends.append(Break(stored=True, forgets=True))

    with pytest.raises(SendOutcomeUnknownError):
        producer.send(order(b"one"), queue_id=0)
    brokers.nodes[0].sends.append(Break(stored=True))
    producer.send(order(b"two"), queue_id=0)

    assert brokers.bodies("orders") == [b"one", b"two"]


def test_without_room_for_a_producer_messages_are_not_numbered(producer: Producer, brokers: FakeBrokers) -> None:
    """They are stored; what is unknown then is told, not sent again."""
    brokers.producers_max = 0

    producer.send(order(b"one"), queue_id=0)
    brokers.nodes[0].sends.append(Break(stored=True))
    with pytest.raises(SendOutcomeUnknownError):
        producer.send(order(b"two"), queue_id=0)

    assert brokers.bodies("orders") == [b"one", b"two"]
    assert [bool(one.producer) for one in brokers.nodes[0].requests] == [True, False, False]


def test_a_place_that_is_not_remembered_is_no_place(producer: Producer, brokers: FakeBrokers) -> None:
    """Stored all the same: an empty id, numbers of -1."""
    brokers.nodes[0].sends.append(Break(stored=True))
    brokers.remembers_places = False

    receipt = producer.send(order(b"one"), queue_id=0)

    assert (receipt.message_id, receipt.offset, receipt.queue_id, receipt.queue_offset) == ("", -1, -1, -1)
    assert receipt.status == "PUT_OK"


# --- numbers that the application gives -----------------------------------------------------------------------------


def test_an_application_goes_on_where_it_was(brokers: FakeBrokers) -> None:
    """Another process asks what is stored, and sends from there on, or from earlier on: each is stored once."""
    with Producer(brokers.addresses, producer_name="writer/7") as first:
        assert first.next_sequence() == 0
        first.send_many([order(body) for body in bodies_of(10)], queue_id=0, sequence=0)
    with Producer(brokers.addresses) as second:
        assert second.next_sequence("writer/7") == 10
        with second.sender(producer_name="writer/7", batch_messages=4) as sender:
            futures = [
                sender.send(order(body), queue_id=0, sequence=number)
                for number, body in list(enumerate(bodies_of(30)))[5:]
            ]

    assert brokers.bodies("orders") == bodies_of(30)
    assert [one.result().queue_offset for one in futures] == list(range(5, 30))


def test_given_numbers_survive_failures(brokers: FakeBrokers) -> None:
    """They stay as they are, whatever became of the requests before."""
    brokers.nodes[0].sends.extend([None, Break(stored=True), Refusal("OS_PAGECACHE_BUSY"), None, Break()])

    with (
        Producer(brokers.addresses, producer_name="w", timeout_s=30) as producer,
        producer.sender(batch_messages=7) as sender,
    ):
        for number, body in enumerate(bodies_of(200)):
            sender.send(order(body), queue_id=0, sequence=number)

    assert brokers.bodies("orders") == bodies_of(200)
    assert sender.failed_messages == 0


def test_behind_a_refused_message_given_numbers_fail(brokers: FakeBrokers) -> None:
    """Those before it are stored. After ``next_sequence`` it goes on, with another message of that number."""
    brokers.nodes[0].sends.extend([None, Refusal("MESSAGE_ILLEGAL", only=(1,))])
    with Producer(brokers.addresses, producer_name="w") as producer, producer.sender(batch_messages=3) as sender:
        futures = [sender.send(order(body), queue_id=0, sequence=at) for at, body in enumerate(bodies_of(9))]
        errors = [future.exception() for future in futures]

        assert [type(error) for error in errors] == [type(None)] * 4 + [MessageRefusedError] + [
            OutOfOrderSequenceError
        ] * 4
        assert {error.outcome for error in errors if error} == {"not_applied"}
        assert producer.next_sequence() == 4
        sender.send(order(b"instead"), queue_id=0, sequence=4).result(5)

    assert brokers.bodies("orders") == [*bodies_of(4), b"instead"]


def test_given_numbers_that_leave_something_out_fail(brokers: FakeBrokers) -> None:
    """At the sender if it knows, else at the broker; nothing is stored."""
    with Producer(brokers.addresses, producer_name="w") as producer:
        with pytest.raises(DLedgerError, match="UNKNOWN_PRODUCER"):
            producer.send(order(b"5"), queue_id=0, sequence=5)
        producer.send(order(b"0"), queue_id=0, sequence=0)
        with pytest.raises(OutOfOrderSequenceError, match="next is 1"):
            producer.send(order(b"2"), queue_id=0, sequence=2)
        producer.send(order(b"1"), queue_id=0, sequence=1)

    assert brokers.bodies("orders") == [b"0", b"1"]


def test_a_sender_of_a_named_producer_may_have_no_name(brokers: FakeBrokers) -> None:
    """An empty one: its messages are numbered by itself, and leave the producer's numbers alone."""
    with Producer(brokers.addresses, producer_name="w") as producer:
        with producer.sender(producer_name="") as sender:
            sender.send(order(b"other"), queue_id=0).result(30)
        assert producer.next_sequence() == 0

    assert brokers.bodies("orders") == [b"other"]


def test_names_and_numbers_belong_together(brokers: FakeBrokers, producer: Producer) -> None:
    """A number without a name, a name without numbers, and names that are none."""
    with pytest.raises(InvalidRequestError, match="producer_name"):
        producer.send(order(b""), queue_id=0, sequence=0)
    with Producer(brokers.addresses, producer_name="w") as named:
        with pytest.raises(InvalidRequestError, match="next_sequence"):
            named.send(order(b""), queue_id=0)
        with pytest.raises(InvalidRequestError, match="next_sequence"):
            named.send(order(b""), queue_id=0, sequence=-1)
    for name in ("with space", "n" * 129, "ü"):
        with pytest.raises(InvalidRequestError, match="128 characters"):
            Producer(brokers.addresses, producer_name=name)
        with pytest.raises(InvalidRequestError, match="128 characters"):
            producer.next_sequence(name)
    with pytest.raises(ConfigError, match="enable_idempotence"):
        Producer(brokers.addresses, producer_name="w", enable_idempotence=False)
    with Producer(brokers.addresses, enable_idempotence=False) as plain, pytest.raises(InvalidRequestError):
        plain.send(order(b""), queue_id=0, sequence=0)
    assert brokers.bodies("orders") == []
