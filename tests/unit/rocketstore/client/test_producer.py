"""Single sends: finding the master, choosing the queue, and what is sent again."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from typing import cast

import grpc
import pytest

from cluster.local.group import free_ports
from dledger.errors import DLedgerError, InvalidRequestError, UnavailableError
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.errors import MessageRefusedError, NotFoundError, PartlySentError, SendOutcomeUnknownError
from rocketstore.client.outgoing import INSTEAD, queue_of_key
from rocketstore.client.producer import Producer
from rocketstore.client.sends import SendBatch, noting_refusals
from rocketstore.message.message import Message
from rocketstore.types import PutMessageStatus
from tests.support.fake_broker import Break, FakeBrokers, Garbage, Refusal
from tests.support.waiting import wait_until


@pytest.fixture
def producer(brokers: FakeBrokers) -> Iterator[Producer]:
    with Producer(brokers.addresses) as made:
        yield made


@pytest.fixture
def unnumbered(brokers: FakeBrokers) -> Iterator[Producer]:
    """A producer whose messages a broker cannot tell from their repetitions."""
    with Producer(brokers.addresses, enable_idempotence=False) as made:
        yield made


def order(body: bytes = b"one") -> Message:
    return Message("orders", body)


def test_a_receipt_says_where_the_message_is(producer: Producer, brokers: FakeBrokers) -> None:
    """Queue, offsets, both ids."""
    receipt = producer.send(order(), queue_id=2)
    again = producer.send(order(), queue_id=2)

    stored = brokers.queues["orders", 2].messages
    assert (receipt.topic, receipt.queue_id, receipt.queue_offset, again.queue_offset) == ("orders", 2, 0, 1)
    assert receipt.status is PutMessageStatus.PUT_OK
    assert receipt.unique_key == stored[0].unique_key != stored[1].unique_key
    assert receipt.store_timestamp == stored[0].store_timestamp
    assert stored[0].born_timestamp > 0
    assert again.offset == stored[1].offset > receipt.offset
    assert len(receipt.message_id) == 32


def test_a_message_that_is_sent_is_left_as_it_was(producer: Producer, brokers: FakeBrokers) -> None:
    """So sending it again sends another one, with a unique key of its own."""
    plain = order()

    assert producer.send(plain).unique_key != producer.send(plain).unique_key
    assert plain.properties == {}


def test_what_arguments_say_is_what_a_consumer_sees(producer: Producer, brokers: FakeBrokers) -> None:
    """Beside the application's own properties."""
    producer.send(Message("orders", b"x", properties={"a": "b"}, tags="new", keys=["k1", "k2"]), queue_id=0)

    (stored,) = brokers.queues["orders", 0].messages
    assert (stored.tags, stored.keys, stored.properties["a"]) == ("new", ["k1", "k2"], "b")


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_means_something_to_the_store_is_no_raw_property(producer: Producer, name: str) -> None:
    """The error names what to do instead; nothing is sent, alone or with others."""
    raw = Message("orders", b"x", properties={"a": "b", name: "true"})

    with pytest.raises(MessageRefusedError, match=re.escape(INSTEAD[name])):
        producer.send(raw)
    with pytest.raises(MessageRefusedError, match=name):
        producer.send_many([order(), raw])


def test_queues_take_turns(producer: Producer, brokers: FakeBrokers) -> None:
    """Without key or queue every queue gets the same share."""
    producer.send_many([order() for _ in range(40)])

    assert [brokers.queues["orders", number].end for number in range(4)] == [10, 10, 10, 10]


def test_producers_do_not_all_begin_with_the_same_queue(brokers: FakeBrokers) -> None:
    """Many that send one message each, as a command line does, spread it like one that sends many."""
    for _ in range(40):
        with Producer(brokers.addresses) as each:
            each.send(order())

    assert sum(queue.end > 0 for queue in brokers.queues.values()) > 1  # all in one: once in 4^39


def test_a_queue_named_by_the_message_alone_is_refused(producer: Producer) -> None:
    """It would be ignored: a message knows its queue once it is stored."""
    with pytest.raises(MessageRefusedError, match="queue_id=3"):
        producer.send(Message("orders", b"x", queue_id=3))

    assert producer.send(Message("orders", b"x", queue_id=3), queue_id=3).queue_id == 3


def test_a_key_always_has_the_same_queue(producer: Producer) -> None:
    """RocketMQ's hash: the remainder of Java's hash code without its sign."""
    receipts = [producer.send(order(), key="polygenelubricants") for _ in range(3)]

    assert {receipt.queue_id for receipt in receipts} == {2147483648 % 4}
    assert queue_of_key("TagA", 7) == 2598919 % 7


def test_an_unknown_topic_is_the_brokers_business(producer: Producer, brokers: FakeBrokers) -> None:
    """The broker may create it; a key, which needs its queues, cannot wait for that."""
    with pytest.raises(MessageRefusedError):
        producer.send(Message("new", b""))
    with pytest.raises(NotFoundError, match="new"):
        producer.send(Message("new", b""), key="k")
    brokers.auto_create = 2

    assert producer.send(Message("new", b"")).queue_id in (0, 1)


def test_what_no_broker_takes_is_not_sent(producer: Producer, brokers: FakeBrokers) -> None:
    """Refused here, before it could end a stream that others use."""
    brokers.add_topic("read-only", permission=4)

    with pytest.raises(MessageRefusedError, match="bytes"):
        producer.send(order(bytes(4 * 1024 * 1024 + 1)))
    with pytest.raises(MessageRefusedError, match="characters"):
        producer.send(Message("", b""))
    with pytest.raises(MessageRefusedError, match="read-only"):
        producer.send(Message("read-only", b""))
    with (
        Producer(brokers.addresses, body_bytes_max=10) as brief,
        pytest.raises(MessageRefusedError, match="11 bytes, more than 10"),
    ):
        brief.send(order(bytes(11)), queue_id=0)
    assert not brokers.nodes[0].requests


def test_the_largest_message_is_sent(producer: Producer, brokers: FakeBrokers) -> None:
    """4 MiB of body, alone in its request."""
    producer.send(order(bytes(4 * 1024 * 1024)))

    assert len(brokers.bodies("orders")[0]) == 4 * 1024 * 1024


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_address_leads_to_the_master(brokers: FakeBrokers, given: int) -> None:
    """Slaves name the others."""
    brokers.elect(2)

    with Producer(brokers.addresses[given]) as producer:
        producer.send(order())

    assert len(brokers.nodes[2].requests) == 1


def test_a_refusal_by_a_former_master_is_followed(producer: Producer, brokers: FakeBrokers) -> None:
    """SERVICE_NOT_AVAILABLE is certainly not applied: sent again to the new one, once."""
    producer.send(order(b"before"))
    brokers.elect(1)

    producer.send(order(b"after"))

    assert sorted(brokers.bodies("orders")) == [b"after", b"before"]
    assert len(brokers.nodes[1].requests) == 1


def test_a_dead_master_is_replaced(producer: Producer, brokers: FakeBrokers) -> None:
    """The stream's end is noticed when nothing is in flight, and costs nothing."""
    producer.send(order(b"before"))
    brokers.nodes[0].stop()
    brokers.elect(1)
    wait_until(lambda: not any(one.name.startswith("dledger-send-") for one in threading.enumerate()), "its end")

    producer.send(order(b"after"))

    assert brokers.bodies("orders").count(b"after") == 1


def test_sending_waits_for_an_election(brokers: FakeBrokers) -> None:
    """No master at first; discovery is repeated until the deadline."""
    brokers.elect(None)
    node = brokers.nodes[1]
    with Producer(brokers.addresses, timeout_s=10) as producer, producer.sender() as sender:
        future = sender.send(order(), queue_id=0)
        wait_until(lambda: node.calls.count("Status") >= 3, "discovery")
        assert not future.done()
        brokers.elect(1)
        future.result()

    assert brokers.bodies("orders") == [b"one"]


def test_nobody_answers_in_time(brokers: FakeBrokers) -> None:
    """The error says that nothing was sent, and to whom it was tried."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Producer(address, timeout_s=2) as producer, pytest.raises(UnavailableError, match=address) as caught:
        producer.send(order(), queue_id=0)

    assert caught.value.outcome == "not_applied"


@pytest.mark.parametrize("stored", [False, True])
def test_an_unknown_outcome_is_told(unnumbered: Producer, brokers: FakeBrokers, *, stored: bool) -> None:
    """The connection broke before the answer: only the broker knows, so nothing is sent again."""
    brokers.nodes[0].sends.append(Break(stored=stored))

    with pytest.raises(SendOutcomeUnknownError) as caught:
        unnumbered.send(order())

    assert caught.value.outcome == "unknown"
    assert len(brokers.bodies("orders")) == stored
    assert len(brokers.nodes[0].requests) == 1


def test_an_unknown_outcome_is_sent_again_if_duplicates_are_allowed(brokers: FakeBrokers) -> None:
    """At least once; both copies have the same unique key."""
    brokers.nodes[0].sends.append(Break(stored=True))

    with Producer(brokers.addresses, enable_idempotence=False, allow_duplicates=True) as producer:
        receipt = producer.send(order(), queue_id=0)

    assert [message.unique_key for message in brokers.queues["orders", 0].messages] == [receipt.unique_key] * 2


@pytest.mark.parametrize("numbered", [False, True])
def test_an_unknown_attempt_stays_unknown_after_a_refusal(brokers: FakeBrokers, *, numbered: bool) -> None:
    """The last attempt's refusal does not undo an earlier one."""
    brokers.nodes[0].sends.extend([Refusal("UNKNOWN_ERROR", "unknown"), Refusal("MESSAGE_ILLEGAL")])

    with (
        Producer(brokers.addresses, enable_idempotence=numbered, allow_duplicates=True) as producer,
        pytest.raises(SendOutcomeUnknownError),
    ):
        producer.send(order())


@pytest.mark.parametrize(
    ("refusal", "kind", "outcome"),
    [
        (Refusal("MESSAGE_ILLEGAL"), MessageRefusedError, "not_applied"),
        (Refusal("PROPERTIES_SIZE_EXCEEDED"), MessageRefusedError, "not_applied"),
        (Refusal("UNKNOWN_ERROR", "unknown"), SendOutcomeUnknownError, "unknown"),
        (Refusal("OS_PAGECACHE_BUSY", "unknown"), SendOutcomeUnknownError, "unknown"),
        (Refusal("NO_SUCH_STATUS"), BadAnswerError, "unknown"),
        (Refusal("UNKNOWN_ERROR", "stored"), BadAnswerError, "unknown"),
    ],
)
def test_what_is_not_sent_again(
    unnumbered: Producer, brokers: FakeBrokers, refusal: Refusal, kind: type[DLedgerError], outcome: str
) -> None:
    """One request, one typed error that says what became of it."""
    brokers.nodes[0].sends.append(refusal)

    with pytest.raises(kind) as caught:
        unnumbered.send(order())

    assert caught.value.outcome == outcome
    assert len(brokers.nodes[0].requests) == 1


@pytest.mark.parametrize("status", ["OS_PAGECACHE_BUSY", "SERVICE_NOT_AVAILABLE", "CREATE_MAPEDFILE_FAILED"])
def test_what_is_sent_again(producer: Producer, brokers: FakeBrokers, status: str) -> None:
    """A refusal that may pass, and certainly stored nothing."""
    brokers.nodes[0].sends.append(Refusal(status))

    producer.send(order())

    assert brokers.bodies("orders") == [b"one"]


@pytest.mark.parametrize("status", ["FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"])
def test_a_soft_timeout_is_a_receipt(producer: Producer, brokers: FakeBrokers, status: str) -> None:
    """RocketMQ's view: stored and will be consumed; the status tells."""
    brokers.nodes[0].sends.append(Refusal(status, "unknown"))

    assert producer.send(order()).status == status


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"", b"\x10\x63"])
def test_garbage_is_no_answer(producer: Producer, brokers: FakeBrokers, data: bytes) -> None:
    """Bytes that are no answer, or one to nobody's request: a typed error with unknown outcome."""
    brokers.nodes[0].sends.append(Garbage(data))

    with pytest.raises(BadAnswerError) as caught:
        producer.send(order())

    assert caught.value.outcome == "unknown"


def test_too_few_results_are_no_answer(producer: Producer, brokers: FakeBrokers) -> None:
    """Whose results are missing cannot be known."""
    brokers.nodes[0].sends.append(Garbage(b"\x10\x01"))

    with pytest.raises(BadAnswerError, match="0 results"):
        producer.send(order())


def test_an_address_of_something_else_is_told_at_once(brokers: FakeBrokers) -> None:
    """A port that serves another protocol's methods never becomes a broker."""
    node = brokers.nodes[0]
    node.fail_calls["Status"] = deque([(grpc.StatusCode.UNIMPLEMENTED, "no", {})] * 9)

    with Producer(node.address, timeout_s=5) as producer, pytest.raises(InvalidRequestError, match="listenPort"):
        producer.send(order(), queue_id=0)


def test_send_many_tells_every_outcome(producer: Producer, brokers: FakeBrokers) -> None:
    """Some stored, some not: ``results`` has one per message."""
    brokers.nodes[0].sends.append(Refusal("MESSAGE_ILLEGAL", only=(1,)))

    with pytest.raises(PartlySentError, match="2 of 3") as caught:
        producer.send_many([order(), order(), order()])

    kinds = [isinstance(result, DLedgerError) for result in caught.value.results]
    assert kinds == [False, True, False]
    assert caught.value.outcome == "unknown"


def test_send_many_that_stored_nothing_raises_the_reason(producer: Producer, brokers: FakeBrokers) -> None:
    """Then repeating it is safe."""
    brokers.nodes[0].sends.append(Refusal("MESSAGE_ILLEGAL"))

    with pytest.raises(MessageRefusedError):
        producer.send_many([order(), order()])
    assert producer.send_many([]) == []


def test_a_closed_producer_says_so(brokers: FakeBrokers) -> None:
    """At once; closing twice is no error."""
    producer = Producer(brokers.addresses)
    producer.send(order())
    producer.close()
    producer.close()

    with pytest.raises(UnavailableError, match="the producer is closed"):
        producer.send(order(), queue_id=0)
    with pytest.raises(UnavailableError, match="the producer is closed"):
        producer.sender()


def test_closing_finishes_what_other_threads_send_beside_a_sender(brokers: FakeBrokers) -> None:
    """Directly, and by the sender: both are answered before the connections are closed."""
    node = brokers.nodes[0]
    producer = Producer(brokers.addresses, timeout_s=60)
    sender = producer.sender()
    sender.send(order(b"by the sender"), queue_id=0).result(30)
    node.gate.clear()
    failures: list[DLedgerError] = []

    def send() -> None:
        try:
            producer.send(order(b"directly"), queue_id=0)
        except DLedgerError as error:
            failures.append(error)

    sending, closing = threading.Thread(target=send), threading.Thread(target=producer.close)
    sending.start()
    wait_until(lambda: node.waiting == 1, "in flight")
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    node.gate.set()
    for thread in (closing, sending):
        thread.join(60)

    assert not failures
    assert brokers.bodies("orders") == [b"by the sender", b"directly"]


def test_a_topic_with_fewer_queues_refuses_no_more_than_what_was_under_way(
    producer: Producer, brokers: FakeBrokers
) -> None:
    """Whoever shrinks a topic must not make its producers fail for as long as they remember its queues."""
    producer.send(order())
    brokers.add_topic("orders", 1)
    assert brokers.master is not None
    brokers.master.sends.append(Refusal("MESSAGE_ILLEGAL", reason="there is no queue 3"))

    with pytest.raises(MessageRefusedError, match="no queue 3"):
        producer.send(order())

    assert {producer.send(order()).queue_id for _ in range(8)} == {0}


def test_a_refusal_is_noted_before_anybody_is_told_of_it() -> None:
    """Whoever sends the next message at once must not choose from the old queues."""
    told: list[str] = []
    take = noting_refusals(lambda *_: told.append("answered"), lambda: told.append("noted"))
    batch = cast("SendBatch", None)

    take(None, batch, [MessageRefusedError("there is no queue 3")])
    take(None, batch, UnavailableError("gone"))

    assert told == ["noted", "answered", "answered"]
