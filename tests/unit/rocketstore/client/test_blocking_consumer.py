"""The blocking ``Consumer``: iteration, handlers on threads, ends."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.aio.errors import ClientClosedError
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.test_server import plain, running

TOPIC = "orders"


class Sender:
    """A topic of one queue, and a producer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.producer = Producer(address)
        with Admin(address) as admin:
            admin.put_topic(TopicInfo(TOPIC, read_queues=1, write_queues=1))

    def send(self, *bodies: bytes) -> None:
        for one in bodies:
            self.producer.send(Message(TOPIC, one))

    def consumer(self, **settings: object) -> Consumer:
        return Consumer(self.address, group="g", topics=TOPIC, start="first", **settings)  # type: ignore[arg-type]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    with running(plain(tmp_path)) as server:
        yield server


@pytest.fixture
def sender(broker: BrokerServer) -> Iterator[Sender]:
    found = Sender(broker.address)
    with found.producer:
        yield found


def offset(broker: BrokerServer) -> int:
    return broker.state.offset("g", TOPIC, 0)


def test_an_iteration_that_is_left_goes_on_later(broker: BrokerServer, sender: Sender) -> None:
    """What was taken ahead comes again, in order, and the message at which it was left counts as done at the end."""
    sender.send(*(b"%d" % number for number in range(10)))
    with sender.consumer() as consumer:
        for one in consumer:
            if one.body == b"3":
                break
        seen: list[bytes] = []
        for one in consumer:
            seen.append(one.body)
            if one.body == b"5":
                break
    assert seen == [b"4", b"5"]
    assert offset(broker) == 6
    with sender.consumer() as consumer:
        assert [one.body for one in consumer.poll(timeout_s=10)] == [b"6", b"7", b"8", b"9"]


def test_an_exception_in_the_loop_commits_no_message_that_may_not_be_done(broker: BrokerServer, sender: Sender) -> None:
    """The one in hand comes again."""
    sender.send(b"0", b"1", b"2")

    def fail() -> None:
        with sender.consumer() as consumer:
            for one in consumer:
                if one.body == b"1":
                    consumer.commit()
                if one.body == b"2":
                    raise ValueError("in the application")

    with pytest.raises(ValueError, match="in the application"):
        fail()
    assert offset(broker) == 2


def test_handlers_run_on_threads_of_their_own_until_the_consumer_is_closed(
    broker: BrokerServer, sender: Sender
) -> None:
    """By another thread: ``run`` returns, with all messages handled and committed."""
    sender.send(*(b"%d" % number for number in range(20)))
    seen: Counter[bytes] = Counter()
    threads: set[str] = set()
    consumer = sender.consumer()

    def handle(message: ConsumedMessage) -> None:
        threads.add(threading.current_thread().name)
        if message.body == b"7" and message.attempts == 0:
            raise SystemExit("the worker goes on")
        seen[message.body] += 1

    run = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 3})
    run.start()
    wait_until(lambda: len(seen) == 20, "all messages are handled")
    consumer.close()
    run.join(30)
    assert not run.is_alive()
    assert set(seen.values()) == {1}
    assert all(name.startswith("rocketmq-handler") for name in threads)
    assert len(threads) <= 3
    assert offset(broker) == 20


def test_a_handler_that_would_never_run_is_refused_before_any_message(broker: BrokerServer, sender: Sender) -> None:
    """Of a coroutine function only the coroutine would be made: every message would be done, and not handled."""

    async def handler(_: object) -> None: ...

    sender.send(b"0")
    with sender.consumer() as consumer:
        for run in (consumer.run, consumer.run_batches):
            with pytest.raises(TypeError, match=r"coroutine functions are for rocketstore\.client\.aio"):
                run(handler)
            with pytest.raises(TypeError, match="a handler must be callable, not None"):
                run(None)  # type: ignore[arg-type]
        assert [one.body for one in consumer.poll(timeout_s=30)] == [b"0"]
    assert offset(broker) == 1


def test_a_handler_may_close_the_consumer(broker: BrokerServer, sender: Sender) -> None:
    """``close`` returns at once there, ``run`` returns, and the message counts as done."""
    sender.send(b"0", b"1")
    consumer = sender.consumer()
    consumer.run(lambda _: consumer.close(), workers=1)
    wait_until(lambda: offset(broker) == 1, "the consumer is closed")
    with pytest.raises(ClientClosedError):
        consumer.poll()


def test_an_interrupt_waits_for_the_handler_and_keeps_its_message_done(broker: BrokerServer, sender: Sender) -> None:
    """Ctrl-C in ``run``: the handler ends in peace, its message is committed, and no other begins."""
    sender.send(b"0", b"1")
    seen: list[bytes] = []

    def handle(message: ConsumedMessage) -> None:
        seen.append(message.body)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Event().wait(0.5)

    consumer = sender.consumer()
    with pytest.raises(KeyboardInterrupt):
        consumer.run(handle, workers=1)
    consumer.close()
    assert seen == [b"0"]
    assert offset(broker) == 1


def test_a_forked_child_may_leave_the_block_of_its_parents_consumer(sender: Sender) -> None:
    """It ends as it wants to, and what the parent has in hand is not touched."""
    sender.send(b"0", b"1")
    with sender.consumer() as consumer:
        one = next(iter(consumer))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                consumer.__exit__(SystemExit, SystemExit(0), None)
                consumer.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert one.body == b"0"
        assert [found.body for found in consumer.poll(timeout_s=10)] == [b"1"]


def test_a_forked_child_is_told_to_make_its_own(sender: Sender) -> None:
    """Every call fails at once; the parent's consumer goes on."""
    sender.send(b"0")
    with sender.consumer() as consumer:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                consumer.poll()
            except ClientClosedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        assert b"made in another process" in os.read(read, 1000)
        os.close(read)
        assert [one.body for one in consumer.poll(timeout_s=10)] == [b"0"]
