"""A cluster that grows: a second group of three brokers joins the first one behind a name server, all on this machine.

``python examples/growing_cluster.py DIRECTORY``. Elsewhere: ``dledger nameserver``, and ``dledger broker`` three times.
"""

import time
from argparse import ArgumentParser
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, Consumer, Message, NotFoundError, Producer, TopicInfo
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig

parser = ArgumentParser()
parser.add_argument("directory", type=Path, help="where the brokers store")
parser.add_argument("--count", type=int, default=200, help="messages to send, before and after")
given = parser.parse_args()
with ExitStack() as running:
    server = NameServer(NameServerConfig(listen_port=0, kv_config_path=given.directory / "kvConfig.json"))
    running.callback(server.stop)
    server.start()
    counts: Counter[str] = Counter()
    for title, name in (("one group: ", "broker-a"), ("two groups:", "broker-b")):
        three = LocalBrokers(given.directory / name, name=name, settings={"namesrvAddr": server.address})
        running.enter_context(three).master()
        while True:  # the name server soon knows the new brokers, and then that they have the topic
            with Admin(name_servers=server.address) as admin, suppress(NotFoundError):
                admin.put_topic(TopicInfo("orders", broker=name))
                if name in {one.broker for one in admin.topic("orders")}:
                    break
            time.sleep(0.1)
        with Producer(name_servers=server.address) as producer:
            counts.update(producer.send(Message("orders", b"%d" % number)).broker for number in range(given.count))
        print(title, ", ".join(f"{broker} {messages}" for broker, messages in sorted(counts.items())))
    with Consumer(name_servers=server.address, group="billing", topics="orders", start="first") as consumer:
        print("received", len({one.message_id for one in islice(consumer, 2 * given.count)}), "messages")
