"""What tests of the consumer share: messages for it, one of a group, what it read and committed."""

from __future__ import annotations

from rocketstore.client.consumer import Consumer, ConsumerOptions
from rocketstore.message.message import Message
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until


def put(brokers: FakeBrokers, count: int, queue_id: int = 0, *, tags: str = "", start: int = 0, at_ms: int = 0) -> None:
    """Numbered messages; stored a second apart from ``at_ms`` on."""
    for number in range(start, start + count):
        properties = {"TAGS": tags} if tags else {}
        stored = at_ms + 1000 * number if at_ms else 0
        brokers.put(Message("orders", b"%d-%d" % (queue_id, number), queue_id, properties, store_timestamp=stored))


def consumer(brokers: FakeBrokers, **settings: object) -> Consumer:
    """Of group ``billing``, from the first message on, unless ``settings`` say otherwise."""
    options = ConsumerOptions(**{"start": "first", **settings})  # type: ignore[arg-type]  # as each test says
    return Consumer(brokers.addresses, group="billing", topic="orders", options=options)


def drain(source: Consumer, count: int) -> list[bytes]:
    """The bodies of the next messages, exactly as many."""
    bodies: list[bytes] = []

    def enough() -> bool:
        bodies.extend(message.body for message in source.poll(count - len(bodies), 0.05))
        return len(bodies) >= count

    wait_until(enough, f"{count} messages")
    return bodies


def committed(brokers: FakeBrokers) -> dict[int, int]:
    return {queue_id: offset for (_, _, queue_id), offset in brokers.offsets.items()}
