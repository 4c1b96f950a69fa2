"""Send messages to brokers and consume them, as a member of a group: ends when it has received all that it sent.

``python examples/produce_and_consume.py 127.0.0.1:10911`` (``dledger demo --brokers`` starts three). Started again, it
goes on behind what it had received.
"""

import argparse

from rocketstore.client import Admin, ClientError, Consumer, Message, Producer, TopicInfo

parser = argparse.ArgumentParser(description="Send messages, and consume them.")
parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
parser.add_argument("--topic", default="orders")
parser.add_argument("--group", default="billing", help="the group of consumers, which remembers how far it is")
parser.add_argument("--count", type=int, default=100, help="how many messages to send")
given = parser.parse_args()

with Admin(given.addresses) as admin:
    admin.put_topic(TopicInfo(given.topic, read_queues=4, write_queues=4))
missing = set()
with Producer(given.addresses) as producer:
    orders = [Message(given.topic, b"order %d" % number, tags="new") for number in range(given.count)]
    futures = [producer.submit(order, key=f"customer-{n % 3}") for n, order in enumerate(orders)]  # in order for each
    for future in futures:
        try:
            missing.add(future.result().message_id)
        except ClientError as error:  # "not_applied": may be sent again; "unknown": nobody knows, look for it first
            print(f"failed ({error.outcome}): {error}")
print(f"sent {len(missing)} messages")
bodies = []
with Consumer(given.addresses, group=given.group, topics=given.topic, start="first") as consumer:
    while missing:
        for message in consumer.poll():  # the next poll commits these: delivery is at least once
            missing.discard(message.message_id)
            bodies.append(message.body.decode())
print(f"received {len(bodies)} messages, the last one: {bodies[-1] if bodies else '-'}")
