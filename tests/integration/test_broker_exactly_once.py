"""Numbered messages under SIGKILL, of brokers and of the application: each is stored once, and all are acknowledged."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from rocketstore.client.aio.errors import NO_OFFSET, ClientError, SendResult
from rocketstore.client.aio.outgoing import PipelineLimits
from rocketstore.client.aio.producer import ProducerOptions
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from tests.integration.broker_harness import QUEUES, BrokerGroup
from tests.support.broker_load import TOPIC
from tests.support.waiting import wait_until

KILLS = 3
KILLS_MAX = 15
"""Until one of them has hit a request under way."""
MESSAGES_PER_KILL = 4_000
DONE_BEFORE_KILL = 1_000
TIMEOUT_S = 120.0
NUMBERED = 8_000
APPLICATION = """
import sys
from rocketstore.client import Message, Producer

*addresses, name, topic, count = sys.argv[1:]
with Producer(addresses, timeout_s=30) as producer, producer.numbered(name) as numbered:
    for number in range(numbered.next_number(), int(count)):
        future = numbered.submit(Message(topic, b"%d" % number), number, queue=number % 4)
        future.add_done_callback(lambda done, number=number: print(number, flush=True) if done.result() else None)
"""


@contextmanager
def in_background(work: Callable[[], None]) -> Iterator[None]:
    """Around what happens meanwhile; the work's error is raised at the end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(2 * TIMEOUT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.mark.slow
def test_every_message_is_stored_once_while_masters_are_killed(brokers: BrokerGroup) -> None:
    """Pipelined, by a producer as anybody makes it: nothing fails, nothing is stored twice, each queue is in order."""
    failures: list[ClientError] = []
    futures: list[Future[SendResult]] = []
    numbers = itertools.count()

    def was_hit() -> bool:
        return "unknown" in {one.outcome for one in failures}

    def send() -> None:
        for number in itertools.islice(numbers, MESSAGES_PER_KILL):
            future = producer.submit(Message(TOPIC, b"%d" % number), queue=number % QUEUES)
            futures.append(future)

    limits = PipelineLimits(batch_messages_max=100)  # so that many requests are under way
    options = ProducerOptions(limits=limits, on_failure=lambda _, error: failures.append(error))
    with Producer(brokers.addresses, timeout_s=TIMEOUT_S, options=options) as producer:
        for kill in itertools.takewhile(lambda kill: kill < KILLS or not was_hit(), range(KILLS_MAX)):
            wanted = kill * MESSAGES_PER_KILL + DONE_BEFORE_KILL
            with in_background(send):
                wait_until(lambda: len(futures) > wanted and futures[wanted].done(), "some are stored", TIMEOUT_S)  # noqa: B023
                master = brokers.master()
                brokers.kill(master)
                brokers.master(other_than=master)
                brokers.start(master)
        producer.flush()

    bodies = brokers.verified_bodies()
    assert [future.exception() for future in futures if future.exception()] == []
    for queue, stored in bodies.items():
        assert stored == [b"%d" % number for number in range(queue, len(futures), QUEUES)]
    for number, result in enumerate(future.result() for future in futures):
        assert result.queue == number % QUEUES
        assert result.offset in (NO_OFFSET, number // QUEUES)
    assert was_hit(), "no kill hit a request under way"


@pytest.mark.slow
def test_an_application_goes_on_with_its_numbers_after_it_was_killed(brokers: BrokerGroup) -> None:
    """It asks what is stored of its messages, and sends the rest: also when the master dies at the same time."""

    def start() -> subprocess.Popen[str]:
        arguments = [*brokers.addresses, "writer/0", TOPIC, str(NUMBERED)]
        return subprocess.Popen([sys.executable, "-c", APPLICATION, *arguments], stdout=subprocess.PIPE, text=True)

    acknowledged: set[int] = set()
    for kill_master in (False, True):
        with start() as application:
            assert application.stdout is not None
            acknowledged |= {int(line) for line in itertools.islice(application.stdout, 3000)}
            if kill_master:
                master = brokers.master()
                brokers.kill(master)
            application.kill()
            acknowledged |= {int(line) for line in application.stdout if line.endswith("\n")}
    brokers.start(master)
    with Producer(brokers.addresses, timeout_s=TIMEOUT_S) as producer:
        assert producer.numbered("writer/0").next_number() > max(acknowledged)
    with start() as application:
        application.communicate(timeout=TIMEOUT_S)
        assert application.returncode == 0

    bodies = brokers.verified_bodies()
    for queue, stored in bodies.items():
        assert stored == [b"%d" % number for number in range(queue, NUMBERED, QUEUES)]
