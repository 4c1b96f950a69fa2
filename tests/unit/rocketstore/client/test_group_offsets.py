"""How a group's offsets get to a broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketstore.client.connection import BrokerConnection
from rocketstore.client.group_offsets import Beginnings, BrokerOffsets
from rocketstore.client.shares import QueueName
from rocketstore.state.changes import OFFSETS_MAX
from tests.support.fake_broker import FakeBrokers

NAMES = [QueueName(topic, queue_id, "") for topic in ("a", "b", "c") for queue_id in range(600)]


@pytest.fixture
def brokers() -> Iterator[FakeBrokers]:
    one = FakeBrokers()
    for topic in ("a", "b", "c"):
        one.add_topic(topic, 600)
    yield one
    one.stop()


def test_a_group_of_many_queues_begins_and_commits(brokers: FakeBrokers) -> None:
    """A broker takes so many offsets in one request: a member of more could never begin, or store what it has done.

    Those of one topic get there together: a member that ends in between must leave no topic begun by half.
    """
    connection = BrokerConnection(brokers.addresses, timeout_s=10.0)
    store = BrokerOffsets(connection, "g", "")
    beginnings = Beginnings(connection, store, "")
    beginnings.begin(dict.fromkeys(NAMES, 0))
    assert beginnings.of(NAMES).offsets == dict.fromkeys(NAMES, 0)
    store.commit(dict.fromkeys(reversed(NAMES), 7), 0)
    store.commit(dict.fromkeys(NAMES, 3), 0, rewind=True)
    assert store.fetch(["a", "b", "c"]).offsets == dict.fromkeys(NAMES, 3)
    assert all(len(one.offsets) <= OFFSETS_MAX for one in brokers.commits)
    topics = [topic for one in brokers.commits for topic in {offset.topic for offset in one.offsets}]
    assert len(topics) == 3 * 3
    connection.close()
