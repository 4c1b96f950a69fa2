"""A broker's topics for RocketMQ's programs: stored ones, and those that every broker has."""

from __future__ import annotations

import threading
from typing import Final

from dledger.remoting.codes import AnswerCode
from dledger.remoting.errors import RequestError
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.checks import check_client_topic
from rocketstore.message.delay import DelayLevels
from rocketstore.remoting.bodies.topics import DataVersion, TopicConfigData, TopicConfigTable
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, SCHEDULE_TOPIC

DEFAULT_TOPIC: Final = "TBW102"
"""Producers look up the route of this topic if theirs is unknown: brokers that have it create topics."""
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT: Final = "OFFSET_MOVED_EVENT"
REPLY_TOPIC_SUFFIX: Final = "REPLY_TOPIC"
INHERIT: Final = 1
"""Permission bit: topics may be created from this one."""
_CLUSTER_QUEUES: Final = 16
_READ_WRITE: Final = 6


def system_topics(config: BrokerConfig) -> dict[str, TopicConfigData]:
    """Topics that are not stored; a stored one of the same name takes precedence."""
    levels = DelayLevels.parse(config.store.message_delay_level).level_max
    found = [
        _topic(SELF_TEST_TOPIC, 1),
        _topic(config.cluster_name, _CLUSTER_QUEUES, _READ_WRITE | INHERIT),
        _topic(config.name, 1, _READ_WRITE | INHERIT),
        _topic(OFFSET_MOVED_EVENT, 1),
        _topic(SCHEDULE_TOPIC, levels),
        _topic(HALF_TOPIC, 1),
        _topic(f"{config.cluster_name}_{REPLY_TOPIC_SUFFIX}", 1),
    ]
    if config.auto_create_topic_enable:
        found.append(_topic(DEFAULT_TOPIC, config.default_topic_queue_nums, _READ_WRITE | INHERIT))
    return {one.topic_name: one for one in found}


def sendable_system_topic(config: BrokerConfig, name: str) -> TopicConfig | None:
    """Such a topic as it is stored once a message is sent to it; None if it is none, or not for clients."""
    one = None if check_client_topic(name) else system_topics(config).get(name)
    return None if one is None else TopicConfig(name, one.read_queue_nums, one.write_queue_nums, one.perm)


def topic_table(config: BrokerConfig, stored: list[TopicConfig]) -> dict[str, TopicConfigData]:
    """All topics visible to others, by name, with permissions limited by ``brokerPermission``."""
    table = system_topics(config)
    for one in stored:
        if one.name not in HIDDEN_TOPICS:
            table[one.name] = _data_of(config, one)
    return dict(sorted(table.items()))


def find_topic(parts: BrokerParts, name: str) -> TopicConfigData | None:
    """A topic visible to others, stored or not."""
    stored = parts.state.topic(name) if name not in HIDDEN_TOPICS else None
    return system_topics(parts.config).get(name) if stored is None else _data_of(parts.config, stored)


def known_topic(parts: BrokerParts, name: str) -> TopicConfigData:
    """The same. Raises ``RequestError``."""
    topic = find_topic(parts, name)
    if topic is None:
        raise RequestError(f"topic[{name}] not exist", AnswerCode.TOPIC_NOT_EXIST)
    return topic


class TopicTable:
    """All topics visible to others, with a version that changes whenever they do."""

    def __init__(self, parts: BrokerParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()  # guards the last result
        self._last = TopicConfigTable()

    def now(self) -> TopicConfigTable:
        """The current table. Callable from any thread."""
        parts = self._parts
        with self._lock:
            table = topic_table(parts.config, parts.state.topics())
            if table != self._last.topic_config_table:  # others only compare versions for equality
                version = DataVersion(self._last.data_version.counter + 1, parts.clock.wall_ms())
                self._last = TopicConfigTable(version, table)
            return self._last


def _data_of(config: BrokerConfig, one: TopicConfig) -> TopicConfigData:
    permission = one.permission & (config.broker_permission | INHERIT)
    return TopicConfigData(
        one.name, one.read_queues, one.write_queues, permission, topic_sys_flag=one.sys_flag, order=one.order
    )


def _topic(name: str, queues: int, permission: int = _READ_WRITE) -> TopicConfigData:
    return TopicConfigData(name, queues, queues, permission)
