"""Share the messages of a topic with other processes: start it several times, and each takes a part.

With brokers running (``dledger demo --brokers`` starts three and prints their addresses)::

    python examples/work_in_a_group.py 127.0.0.1:10911 --topic orders --group billing

Each message goes to one member of the group. A message whose handling fails comes again later, each time later, and is
found in ``%DLQ%billing`` after the last time. Ctrl-C ends it; the others take over what it had.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rocketstore.client import GroupConsumer, GroupDelivery


def bill(delivery: GroupDelivery) -> None:
    """Handle one order. Delivery is at least once, so this should do no harm if it is repeated."""
    order = delivery.body.decode()
    if "broken" in order:
        raise ValueError(f"cannot bill {order}")  # it comes again
    print(f"billed {order} (attempt {delivery.attempts + 1})\n", end="", flush=True)  # in one piece: threads share it


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Work as a member of a consumer group.")
    parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--group", default="billing")
    parser.add_argument("--in-order", action="store_true", help="a queue's orders one after the other")
    parser.add_argument("--seconds", type=float, default=None, help="end after so long; default: with Ctrl-C")
    arguments = parser.parse_args(words)
    consumer = GroupConsumer(
        arguments.addresses.split(","), group=arguments.group, ordered=arguments.in_order, start="first"
    )
    try:
        with consumer:  # commits what is done, and leaves the group
            consumer.subscribe(arguments.topic)
            consumer.start(bill, workers=4)
            print("joined", flush=True)
            while arguments.seconds is None:
                time.sleep(1)  # in pieces: if another thread gets the signal, this one does not wake up before its time
            time.sleep(arguments.seconds)
    except KeyboardInterrupt:
        print("left")


if __name__ == "__main__":
    main()
