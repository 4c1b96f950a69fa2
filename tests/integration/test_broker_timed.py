"""Timed messages of a group whose master is killed: on time, all of them, and at most a second's worth twice."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from rocketstore.client import Message, Producer
from rocketstore.client.blocking_consumer import Consumer
from tests.integration.broker_harness import BrokerGroup
from tests.support.waiting import wait_until

COUNT = 400
EVERY_MS = 20
TOPIC = "timed"


@pytest.mark.slow
def test_a_killed_master_repeats_at_most_a_second_of_deliveries(brokers: BrokerGroup) -> None:
    """T3, T4, T5: every message is delivered, none early, none that was recalled."""
    brokers.create_topic(TOPIC, 4)
    brokers.wait_topic(TOPIC)
    with Producer(brokers.addresses, timeout_s=60) as producer:
        first_ms = int(time.time() * 1000) + 4000
        sent = [
            producer.submit(Message(TOPIC, b"%d" % number, deliver_at=first_ms + number * EVERY_MS))
            for number in range(COUNT)
        ]
        handles = [one.result().recall_handle for one in sent]
        recalled = range(COUNT - 10, COUNT)
        for number in recalled:
            producer.recall(handles[number])
    found: dict[tuple[int, int], tuple[int, int]] = {}  # by place: number, how late
    with Consumer(brokers.addresses, group="g", topics=[TOPIC], start="first", timeout_s=60) as consumer:

        def complete() -> bool:
            for one in consumer.poll(1024, timeout_s=0.1):
                late_ms = one.store_timestamp - int(one.properties["TIMER_OUT_MS"])
                found[one.queue_id, one.queue_offset] = int(one.body), late_ms
            return len({number for number, _ in found.values()}) >= wanted

        wanted = COUNT // 3
        wait_until(complete, "a third is delivered")
        brokers.kill(brokers.master())
        wanted = COUNT - len(recalled)
        wait_until(complete, "the others are delivered by the next master")
    numbers = Counter(number for number, _ in found.values())
    assert set(numbers) == set(range(COUNT - len(recalled)))
    assert min(late_ms for _, late_ms in found.values()) >= 0
    assert sum(numbers.values()) - len(numbers) <= 1500 // EVERY_MS  # a second, and the note on its way
