"""A broker's topics as RocketMQ's programs want them: those that are stored, and those that every broker has."""

from __future__ import annotations

from typing import Final

from rocketstore.broker_config import BrokerConfig
from rocketstore.message.delay import DelayLevels
from rocketstore.remoting.bodies.topics import TopicConfigData
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HIDDEN_TOPICS, SCHEDULE_TOPIC

DEFAULT_TOPIC: Final = "TBW102"
"""Producers ask for the route of this one when they do not know a topic: who has it creates topics."""
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT: Final = "OFFSET_MOVED_EVENT"
REPLY_TOPIC_SUFFIX: Final = "REPLY_TOPIC"
INHERIT: Final = 1
"""Bit of a permission: topics may be made from this one."""
_CLUSTER_QUEUES: Final = 16
_READ_WRITE: Final = 6


def system_topics(config: BrokerConfig) -> dict[str, TopicConfigData]:
    """Topics that are not stored; a stored one of the same name counts instead."""
    levels = DelayLevels.parse(config.store.message_delay_level).level_max
    found = [
        _topic(SELF_TEST_TOPIC, 1),
        _topic(config.cluster_name, _CLUSTER_QUEUES, _READ_WRITE | INHERIT),
        _topic(config.name, 1, _READ_WRITE | INHERIT),
        _topic(OFFSET_MOVED_EVENT, 1),
        _topic(SCHEDULE_TOPIC, levels),
        _topic(f"{config.cluster_name}_{REPLY_TOPIC_SUFFIX}", 1),
    ]
    if config.auto_create_topic_enable:
        found.append(_topic(DEFAULT_TOPIC, config.default_topic_queue_nums, _READ_WRITE | INHERIT))
    return {one.topic_name: one for one in found}


def topic_table(config: BrokerConfig, stored: list[TopicConfig]) -> dict[str, TopicConfigData]:
    """All topics that others may know of, by name; none may do more than ``brokerPermission`` allows."""
    table = system_topics(config)
    for one in stored:
        if one.name not in HIDDEN_TOPICS:
            permission = one.permission & (config.broker_permission | INHERIT)
            table[one.name] = TopicConfigData(one.name, one.read_queues, one.write_queues, permission)
    return dict(sorted(table.items()))


def _topic(name: str, queues: int, permission: int = _READ_WRITE) -> TopicConfigData:
    return TopicConfigData(name, queues, queues, permission)
