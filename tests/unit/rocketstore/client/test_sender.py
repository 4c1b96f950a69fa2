"""The pipelining sender: batching, order, back-pressure, failures in the middle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import grpc
import pytest

from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.errors import MessageRefusedError, SendOutcomeUnknownError
from rocketstore.client.producer import Producer
from rocketstore.client.sends import SendFuture
from rocketstore.message.message import Message
from tests.support.fake_broker import Break, FakeBrokers, Refusal
from tests.support.overtaking import OvertakenLock
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


def bodies_of(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def test_many_messages_take_few_requests(producer: Producer, brokers: FakeBrokers) -> None:
    """Every future knows its own message."""
    bodies = bodies_of(5000)

    with producer.sender(batch_messages=500) as sender:
        futures = [sender.send(Message("orders", body), queue_id=1) for body in bodies]

    assert brokers.bodies("orders", 1) == bodies
    assert [future.result().queue_offset for future in futures] == list(range(5000))
    assert len(brokers.nodes[0].requests) <= 20
    assert sender.failed_messages == 0


def test_a_lone_message_is_sent_after_the_linger(producer: Producer) -> None:
    """Nothing waits for a batch to fill."""
    with producer.sender(linger_ms=5) as sender:
        future = sender.send(Message("orders", b"a"))

        assert future.result(5).queue_offset == 0
        assert future.done()
        assert future.exception() is None


def test_callbacks_are_called_once_whenever_added(producer: Producer, brokers: FakeBrokers) -> None:
    """Before or after the message is done."""
    called: list[SendFuture] = []
    node = brokers.nodes[0]
    node.gate.clear()
    with producer.sender() as sender:
        future = sender.send(Message("orders", b"a"))
        future.add_done_callback(called.append)
        wait_until(lambda: node.waiting == 1, "in flight")
        with pytest.raises(TimeoutError):
            future.result(0.01)
        node.gate.set()
        wait_until(lambda: called == [future], "the callback")
        future.add_done_callback(called.append)

    assert called == [future, future]


def test_sending_blocks_while_too_much_waits(producer: Producer, brokers: FakeBrokers) -> None:
    """Bounded memory: the next send waits for room."""
    node = brokers.nodes[0]
    node.gate.clear()
    with producer.sender(pending_bytes_max=2000, linger_ms=0) as sender:
        for _ in range(2):
            sender.send(Message("orders", bytes(1000)), queue_id=0)
        thread = threading.Thread(target=sender.send, args=(Message("orders", b"last"),))
        thread.start()
        wait_until(lambda: node.waiting == 1, "in flight")
        thread.join(0.05)
        assert thread.is_alive()
        node.gate.set()
        thread.join(5)
        assert not thread.is_alive()

    assert b"last" in brokers.bodies("orders")


def test_what_waits_in_vain_fails_in_time(brokers: FakeBrokers) -> None:
    """Also what was never in flight, and that is known not to be stored."""
    node = brokers.nodes[0]
    node.gate.clear()
    with Producer(brokers.addresses, timeout_s=3.0) as producer:
        with producer.sender(ordered=True, batch_messages=1) as sender:
            futures = [sender.send(Message("orders", b""), queue_id=0) for _ in range(3)]
        errors = [future.exception() for future in futures]
        node.gate.set()

    sent = len(node.requests)  # one; on a busy machine the next may be tried with what is left of its time
    assert [error.outcome if error else None for error in errors] == ["unknown"] * sent + ["not_applied"] * (3 - sent)
    assert 1 <= sent < 3


def test_an_ordered_sender_keeps_the_order_over_refusals(producer: Producer, brokers: FakeBrokers) -> None:
    """A batch behind a refused one is not yet on its way."""
    node = brokers.nodes[0]
    node.sends.extend([None, Refusal("OS_PAGECACHE_BUSY"), None, Refusal("SERVICE_NOT_AVAILABLE")])
    bodies = bodies_of(300)

    with producer.sender(ordered=True, batch_messages=20) as sender:
        for body in bodies:
            sender.send(Message("orders", body), key="one customer")

    assert brokers.bodies("orders") == bodies
    assert sender.failed_messages == 0


def test_an_ordered_sender_follows_a_new_master(producer: Producer, brokers: FakeBrokers) -> None:
    """In the middle, and it costs no message."""
    bodies = bodies_of(2000)

    with producer.sender(ordered=True, batch_messages=50) as sender:
        for number, body in enumerate(bodies):
            sender.send(Message("orders", body), queue_id=0)
            if number == 1000:
                sender.flush()
                brokers.elect(2)

    assert brokers.bodies("orders") == bodies
    assert brokers.nodes[2].requests


def test_an_overtaken_message_is_not_sent_again_when_ordered(unnumbered: Producer, brokers: FakeBrokers) -> None:
    """A later one of its queue is stored: sending it now would turn the order round. Those of other queues may go."""
    brokers.nodes[0].sends.append(Refusal("OS_PAGECACHE_BUSY", only=(0, 1)))

    with unnumbered.sender(ordered=True) as sender:
        overtaken = sender.send(Message("orders", b"a"), queue_id=0)
        other = sender.send(Message("orders", b"b"), queue_id=1)
        last = sender.send(Message("orders", b"c"), queue_id=0)

    assert overtaken.exception() is not None
    assert (other.result().queue_offset, last.result().queue_offset) == (0, 0)
    assert brokers.bodies("orders", 0) == [b"c"]


def test_only_what_was_refused_is_sent_again(unnumbered: Producer, brokers: FakeBrokers) -> None:
    """No duplicate of what the same request stored."""
    brokers.nodes[0].sends.append(Refusal("OS_PAGECACHE_BUSY", only=(0, 2)))
    bodies = bodies_of(4)

    with unnumbered.sender() as sender:
        futures = [sender.send(Message("orders", body), queue_id=0) for body in bodies]

    assert sorted(brokers.bodies("orders")) == bodies
    assert [future.result().queue_offset for future in futures] == [2, 0, 3, 1]


def test_a_refused_message_harms_no_other(producer: Producer, brokers: FakeBrokers) -> None:
    """It alone fails; the stream goes on."""
    brokers.nodes[0].sends.append(Refusal("MESSAGE_ILLEGAL", only=(1,)))

    with producer.sender() as sender:
        futures = [sender.send(Message("orders", body)) for body in bodies_of(3)]
        sender.flush()
        sender.send(Message("orders", b"next")).result()

    assert [type(future.exception()) for future in futures] == [type(None), MessageRefusedError, type(None)]
    assert sender.failed_messages == 1
    assert brokers.nodes[0].calls.count("Status") == 2, "found and opened once"


def test_a_broken_stream_leaves_unknown_only_what_was_sent(unnumbered: Producer, brokers: FakeBrokers) -> None:
    """What was in flight is unknown; what waited behind is stored once."""
    brokers.nodes[0].sends.append(Break())

    with unnumbered.sender(ordered=True, batch_messages=2) as sender:
        futures = [sender.send(Message("orders", body), queue_id=0) for body in bodies_of(6)]

    errors = [type(future.exception()) for future in futures]
    assert errors == [SendOutcomeUnknownError] * 2 + [type(None)] * 4
    assert brokers.bodies("orders") == bodies_of(6)[2:]


def test_a_stream_that_was_never_established_leaves_nothing_unknown(producer: Producer, brokers: FakeBrokers) -> None:
    """A broker that stops resets new streams without a word: what waited for them was not handed over."""
    broker = brokers.nodes[0]
    broker.fail_calls["SendStream"] = deque([(grpc.StatusCode.CANCELLED, "", {})] * 2)

    producer.send(Message("orders", b"once"), queue_id=0)

    assert brokers.bodies("orders") == [b"once"]
    assert not broker.fail_calls["SendStream"]


def test_a_silent_broker_is_given_up_at_the_deadline(brokers: FakeBrokers) -> None:
    """Its answer may still have come: unknown."""
    node = brokers.nodes[0]
    node.gate.clear()
    with Producer(brokers.addresses, timeout_s=0.3) as producer, producer.sender() as sender:
        with pytest.raises(SendOutcomeUnknownError):
            sender.send(Message("orders", b"a"), queue_id=0).result()
        node.gate.set()


def test_many_threads_may_send(producer: Producer, brokers: FakeBrokers) -> None:
    """Each thread's messages stay in order in their queue."""

    def send(queue_id: int) -> None:
        for body in bodies_of(500):
            sender.send(Message("orders", body), queue_id=queue_id)

    with producer.sender(ordered=True, batch_messages=64) as sender:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert all(brokers.bodies("orders", number) == bodies_of(500) for number in range(4))


def test_closing_the_producer_finishes_its_senders(brokers: FakeBrokers) -> None:
    """Nothing that was accepted is forgotten."""
    producer = Producer(brokers.addresses)
    senders = [producer.sender(linger_ms=10_000) for _ in range(2)]
    futures = [sender.send(Message("orders", b"a")) for sender in senders]

    producer.close()

    assert all(future.done() for future in futures)
    assert brokers.bodies("orders") == [b"a", b"a"]
    for sender in senders:
        with pytest.raises(UnavailableError):
            sender.send(Message("orders", b"b"), queue_id=0)


def test_threads_that_send_at_once_share_one_sender(producer: Producer) -> None:
    """Also the first two: what one of them sent with a sender of its own would not be finished by ``close``."""
    made: list[object] = []
    producer._lock = OvertakenLock(lambda: made.append(producer._direct_sender()))  # type: ignore[assignment]

    made.append(producer._direct_sender())

    assert made[0] is made[1]


def test_impossible_options_are_refused(producer: Producer) -> None:
    """All of them at once."""
    with pytest.raises(ConfigError) as caught:
        producer.sender(batch_bytes=0, batch_messages=-1, linger_ms=-1)

    assert len(caught.value.problems) == 3


def test_what_comes_while_it_waits_for_an_answer_goes_in_few_requests(producer: Producer, brokers: FakeBrokers) -> None:
    """A slow broker must not make every few messages a request of their own: they would never all be sent in time."""
    node = brokers.nodes[0]
    node.gate.clear()
    with producer.sender(ordered=True, linger_ms=0) as sender:
        sender.send(Message("orders", b"first"), queue_id=0)
        wait_until(lambda: node.waiting == 1, "in flight")
        for body in bodies_of(100):
            with pytest.raises(TimeoutError):
                sender.send(Message("orders", body), queue_id=0).result(0.001)
        node.gate.set()

    assert brokers.bodies("orders") == [b"first", *bodies_of(100)]
    assert len(node.requests) <= 10


@pytest.mark.parametrize("numbered", [False, True])
def test_a_silent_master_is_left_once_another_one_is_found(brokers: FakeBrokers, *, numbered: bool) -> None:
    """It may be frozen or cut off, with its connections open: that is noticed long before the deadline."""
    old, new = brokers.nodes[0], brokers.nodes[2]
    old.gate.clear()
    with (
        Producer(brokers.addresses, timeout_s=60, enable_idempotence=numbered) as producer,
        producer.sender(ordered=True) as sender,
    ):
        silent = sender.send(Message("orders", b"to the old one"), queue_id=0)
        wait_until(lambda: old.waiting == 1, "in flight")
        brokers.elect(2)
        error = silent.exception(20)
        sender.send(Message("orders", b"to the new one"), queue_id=0).result(20)

    assert (error.outcome if error is not None else None) == (None if numbered else "unknown")
    assert [len(old.requests), len(new.requests)] == [1, 1 + numbered]
    assert brokers.bodies("orders") == [b"to the old one", b"to the new one"][not numbered :]


def test_a_slow_master_is_not_left(brokers: FakeBrokers) -> None:
    """Nobody else is the master: its answer is waited for."""
    node = brokers.nodes[0]
    node.gate.clear()
    with Producer(brokers.addresses, timeout_s=60) as producer, producer.sender() as sender:
        slow = sender.send(Message("orders", b"slow"), queue_id=0)
        wait_until(lambda: node.waiting == 1, "in flight")
        asked = node.calls.count("Status")
        wait_until(lambda: node.calls.count("Status") > asked, "the sender looks around")
        node.gate.set()

        assert slow.result(5).queue_offset == 0


def test_failed_attempts_are_told_of_also_if_they_are_repeated(brokers: FakeBrokers) -> None:
    """Whoever watches a producer sees the trouble that its callers do not."""
    told: list[tuple[str, str]] = []
    brokers.nodes[0].sends.append(Refusal("OS_PAGECACHE_BUSY"))

    def watch(address: str, error: DLedgerError) -> None:
        told.append((address, str(error)))
        raise RuntimeError("a bug of the one who watches")

    with Producer(brokers.addresses, on_failure=watch) as producer:
        producer.send(Message("orders", b"a"), queue_id=0)

    assert [address for address, _ in told] == [brokers.nodes[0].address]
    assert "OS_PAGECACHE_BUSY" in told[0][1]
    assert brokers.bodies("orders") == [b"a"]


def test_a_producer_forgets_the_senders_that_are_closed(producer: Producer) -> None:
    """One that lives long may have had any number of them."""
    for _ in range(5):
        producer.sender().close()

    assert len(producer._senders) == 1
