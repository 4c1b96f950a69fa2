"""Share the messages of a topic with other processes: start it several times, and each takes a part.

``python examples/work_in_a_group.py 127.0.0.1:10911`` (``dledger demo --brokers`` starts three). A message whose
handling fails comes again, each time later, and is found in ``%DLQ%billing`` after the last time. Ctrl-C ends it.
"""

import argparse

from rocketstore.client import ConsumedMessage, Consumer


def bill(message: ConsumedMessage) -> None:
    """Handle one order. Delivery is at least once, so this should do no harm if it is repeated."""
    order = message.body.decode()
    if "broken" in order:
        raise ValueError(f"cannot bill {order}")  # it comes again
    print(f"billed {order} (attempt {message.attempts + 1})\n", end="", flush=True)  # in one piece: threads share it


parser = argparse.ArgumentParser(description="Work as a member of a consumer group.")
parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
parser.add_argument("--topic", default="orders")
parser.add_argument("--group", default="billing")
parser.add_argument("--in-order", action="store_true", help="a queue's orders one after the other")
given = parser.parse_args()
try:
    consumer = Consumer(given.addresses, group=given.group, topics=given.topic, ordered=given.in_order, start="first")
    with consumer:  # commits what is done, and leaves the group
        print("joined", flush=True)
        consumer.run(bill, workers=4)
except KeyboardInterrupt:
    print("left")
