"""A broker's topics for RocketMQ's programs: stored ones, and those that every broker has."""

from __future__ import annotations

import threading

from dledger.remoting.codes import AnswerCode
from dledger.remoting.errors import RequestError
from rocketstore.broker.broker import Broker
from rocketstore.broker.system_topics import INHERIT, system_topics
from rocketstore.broker_config import BrokerConfig
from rocketstore.remoting.bodies.topics import DataVersion, TopicConfigData, TopicConfigTable
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HIDDEN_TOPICS


def topic_data(config: BrokerConfig) -> dict[str, TopicConfigData]:
    """The topics that every broker has."""
    found = system_topics(config).items()
    return {name: TopicConfigData(name, one.queues, one.queues, one.permission) for name, one in found}


def topic_table(config: BrokerConfig, stored: list[TopicConfig]) -> dict[str, TopicConfigData]:
    """All topics visible to others, by name, with permissions limited by ``brokerPermission``."""
    table = topic_data(config)
    for one in stored:
        if one.name not in HIDDEN_TOPICS:
            table[one.name] = _data_of(config, one)
    return dict(sorted(table.items()))


def find_topic(broker: Broker, name: str) -> TopicConfigData | None:
    """A topic visible to others, stored or not."""
    stored = broker.state.topic(name) if name not in HIDDEN_TOPICS else None
    return topic_data(broker.config).get(name) if stored is None else _data_of(broker.config, stored)


def known_topic(broker: Broker, name: str) -> TopicConfigData:
    """The same. Raises ``RequestError``."""
    topic = find_topic(broker, name)
    if topic is None:
        raise RequestError(f"topic[{name}] not exist", AnswerCode.TOPIC_NOT_EXIST)
    return topic


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
            table = topic_table(broker.config, broker.state.topics())
            if table != self._last.topic_config_table:  # others only compare versions for equality
                version = DataVersion(self._last.data_version.counter + 1, broker.loop.clock.wall_ms())
                self._last = TopicConfigTable(version, table)
            return self._last


def _data_of(config: BrokerConfig, one: TopicConfig) -> TopicConfigData:
    permission = one.permission & (config.broker_permission | INHERIT)
    return TopicConfigData(
        one.name, one.read_queues, one.write_queues, permission, topic_sys_flag=one.sys_flag, order=one.order
    )
