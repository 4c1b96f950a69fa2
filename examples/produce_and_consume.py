"""Send messages to a group of brokers and consume them, as one member of a group of consumers.

With brokers running (``dledger demo --brokers`` starts three and prints their addresses)::

    python examples/produce_and_consume.py 127.0.0.1:10911 --topic orders --count 100

It ends when it has received all that it sent. Started again, it goes on behind what it had received.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rocketstore.client import Admin, Consumer, DLedgerError, Message, Producer, TopicInfo


def produce(addresses: list[str], topic: str, count: int) -> set[str]:
    """Send ``count`` orders of three customers; the unique keys of those that are stored."""
    stored: set[str] = set()
    with Producer(addresses) as producer, producer.sender(ordered=True) as sender:
        futures = []
        for number in range(count):
            message = Message(topic, f"order {number}".encode(), tags="new", keys=f"order-{number}")
            futures.append(sender.send(message, key=f"customer-{number % 3}"))  # a customer's orders stay in order
        for future in futures:
            try:
                stored.add(future.result().unique_key)
            except DLedgerError as error:
                # Nothing is stored twice by the client's own retries. What is left is either certainly not stored,
                # and may be sent again, or nobody knows: then look for its key before you send it again.
                print(f"failed ({error.outcome}): {error}")
    return stored


def consume(addresses: list[str], topic: str, group: str, wanted: set[str], timeout_s: float) -> list[str]:
    """Receive until all wanted messages have come, or ``timeout_s`` is over; the bodies, in order per queue."""
    bodies: list[str] = []
    missing = set(wanted)
    give_up_at = time.monotonic() + timeout_s
    with Consumer(addresses, group=group, topic=topic, start="first") as consumer:
        while missing and time.monotonic() < give_up_at:
            for received in consumer.poll(timeout_s=1.0):  # the next poll commits these: delivery is at least once
                missing.discard(received.unique_key)
                bodies.append(received.body.decode())
    return bodies


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Send messages, and consume them.")
    parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--group", default="billing", help="the group of consumers, which remembers how far it is")
    parser.add_argument("--count", type=int, default=100, help="how many messages to send")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for all of them")
    arguments = parser.parse_args(words)
    addresses = arguments.addresses.split(",")
    with Admin(addresses) as admin:
        admin.put_topic(TopicInfo(arguments.topic, read_queues=4, write_queues=4))
    stored = produce(addresses, arguments.topic, arguments.count)
    print(f"sent {len(stored)} messages")
    bodies = consume(addresses, arguments.topic, arguments.group, stored, arguments.timeout)
    print(f"received {len(bodies)} messages, the last one: {bodies[-1] if bodies else '-'}")


if __name__ == "__main__":
    main()
