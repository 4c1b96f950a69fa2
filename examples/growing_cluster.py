"""A cluster that grows: a second group of three brokers joins the first one behind a name server.

Everything runs on this machine, and is stopped at the end::

    python examples/growing_cluster.py /tmp/cluster --count 200

Clients know only the name server's address.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster.local.brokers import LocalBrokers
from rocketstore.client import ClusterAdmin, ClusterConsumer, ClusterProducer, Message, NotFoundError, TopicInfo
from rocketstore.nameserver.config import NameServerConfig
from rocketstore.nameserver.groups import BrokerGroup
from rocketstore.nameserver.server import NameServer

TOPIC = "orders"
QUEUES = 4
TIMEOUT_S = 60.0


@contextmanager
def name_server(directory: Path) -> Iterator[str]:
    """A name server at a free port; its address. On a machine of its own: ``dledger nameserver``."""
    server = NameServer(NameServerConfig(listen_port=0, kv_config_path=directory / "kvConfig.json"))
    server.start()
    try:
        yield server.address
    finally:
        server.stop()


def group(directory: Path, name: str, name_server: str) -> LocalBrokers:
    """Three brokers, of which one becomes the master. Elsewhere: three times ``dledger broker -c FILE``."""
    settings = {"namesrvAddr": name_server, "mappedFileSizeCommitLog": "16m"}
    return LocalBrokers(directory / name, name=name, settings=settings)


def extend_topic(name_server: str, brokers: LocalBrokers) -> None:
    """Give a group queues of the topic, once the name server knows its master; returns when clients can find them."""
    brokers.master()
    with ClusterAdmin(name_server) as admin:
        joined = wait_for(lambda: next(one for one in admin.groups() if one.name == brokers.name and one.has_master))
        admin.at(joined).put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
        wait_for(lambda: next(one for one in admin.groups_with(TOPIC) if one.name == brokers.name))


def wait_for(look: Callable[[], BrokerGroup]) -> BrokerGroup:
    """What ``look`` finds within a minute."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return look()
        except (NotFoundError, StopIteration):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.1)


def send(name_server: str, numbers: range) -> None:
    """Send a message for each number, to all the groups in turn."""
    with ClusterProducer(name_server) as producer, producer.sender() as sender:
        futures = [sender.send(Message(TOPIC, f"order {number}".encode())) for number in numbers]
        for future in futures:
            future.result()


def receive(name_server: str, count: int) -> set[str]:
    """Receive this many messages, from whichever group."""
    bodies: set[str] = set()
    give_up_at = time.monotonic() + TIMEOUT_S
    with ClusterConsumer(name_server, group="billing", topic=TOPIC, start="first") as consumer:
        while len(bodies) < count and time.monotonic() < give_up_at:
            bodies.update(one.body.decode() for one in consumer.poll())
    return bodies


def stored(name_server: str, count: int) -> str:
    """How many messages each group has, once that is ``count``: they come into their queues soon after the answer."""
    give_up_at = time.monotonic() + TIMEOUT_S
    with ClusterAdmin(name_server) as admin:
        while True:
            found = {
                one.name: sum(queue.max_offset for queue in admin.at(one).queue_ranges(TOPIC))
                for one in admin.groups_with(TOPIC)
            }
            if sum(found.values()) >= count or time.monotonic() > give_up_at:
                return ", ".join(f"{name} {messages}" for name, messages in found.items())
            time.sleep(0.1)


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="A cluster of one group of brokers, then of two.")
    parser.add_argument("directory", type=Path, help="where the brokers store")
    parser.add_argument("--count", type=int, default=200, help="how many messages to send, before and after")
    arguments = parser.parse_args(words)
    count: int = arguments.count
    with name_server(arguments.directory) as address, group(arguments.directory, "broker-a", address) as first:
        extend_topic(address, first)
        send(address, range(count))
        print(f"one group:  {stored(address, count)}")
        with group(arguments.directory, "broker-b", address) as second:
            extend_topic(address, second)
            send(address, range(count, 2 * count))
            print(f"two groups: {stored(address, 2 * count)}")
            print(f"received {len(receive(address, 2 * count))} of {2 * count} messages")


if __name__ == "__main__":
    main()
