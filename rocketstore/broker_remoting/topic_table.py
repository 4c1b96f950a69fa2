"""A broker's topics for RocketMQ's programs: stored ones, and those that every broker has."""

from __future__ import annotations

import dataclasses
import threading

from rocketstore.broker.broker import Broker
from rocketstore.broker.topics import SeenTopic
from rocketstore.remoting.bodies.topics import DataVersion, TopicConfigData, TopicConfigTable


def topic_data(topic: SeenTopic) -> TopicConfigData:
    """As brokers and tools exchange it."""
    name, read_queues, write_queues, permission, order, sys_flag, attributes = topic
    found = TopicConfigData(name, read_queues, write_queues, permission, topic_sys_flag=sys_flag, order=order)
    return dataclasses.replace(found, attributes=attributes.texts())


class TopicTable:
    """All topics visible to others, with a version that changes whenever they do."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()  # guards the last result
        self._last = TopicConfigTable()

    def now(self) -> TopicConfigTable:
        """The current table. Callable from any thread."""
        broker = self._broker
        with self._lock:
            table = {name: topic_data(one) for name, one in broker.topics.all_seen().items()}
            if table != self._last.topic_config_table:  # others only compare versions for equality
                version = DataVersion(self._last.data_version.counter + 1, broker.loop.clock.wall_ms())
                self._last = TopicConfigTable(version, table)
            return self._last
