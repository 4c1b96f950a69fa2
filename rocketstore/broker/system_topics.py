"""Topics that every broker has without storing them; a stored one of the same name takes precedence."""

from __future__ import annotations

from typing import Final, NamedTuple

from rocketstore.broker_config import BrokerConfig
from rocketstore.message.checks import check_client_topic
from rocketstore.message.delay import DelayLevels
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HALF_TOPIC, SCHEDULE_TOPIC

DEFAULT_TOPIC: Final = "TBW102"
"""Producers look up the route of this topic if theirs is unknown: brokers that have it create topics."""
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT: Final = "OFFSET_MOVED_EVENT"
REPLY_TOPIC_SUFFIX: Final = "REPLY_TOPIC"
INHERIT: Final = 1
"""Permission bit: topics may be created from this one."""
_CLUSTER_QUEUES: Final = 16
_READ_WRITE: Final = 6


class SystemTopic(NamedTuple):
    """How many queues it has, and RocketMQ's bits of its permission. Its name may be none that a client may use."""

    queues: int
    permission: int = _READ_WRITE


def system_topics(config: BrokerConfig) -> dict[str, SystemTopic]:
    """By name."""
    levels = DelayLevels.parse(config.store.message_delay_level).level_max
    found = {
        SELF_TEST_TOPIC: SystemTopic(1),
        config.cluster_name: SystemTopic(_CLUSTER_QUEUES, _READ_WRITE | INHERIT),
        config.name: SystemTopic(1, _READ_WRITE | INHERIT),
        OFFSET_MOVED_EVENT: SystemTopic(1),
        SCHEDULE_TOPIC: SystemTopic(levels),
        HALF_TOPIC: SystemTopic(1),
        f"{config.cluster_name}_{REPLY_TOPIC_SUFFIX}": SystemTopic(1),
    }
    if config.auto_create_topic_enable:
        found[DEFAULT_TOPIC] = SystemTopic(config.default_topic_queue_nums, _READ_WRITE | INHERIT)
    return found


def sendable_system_topic(config: BrokerConfig, name: str) -> TopicConfig | None:
    """Such a topic as it is stored once a message is sent to it; None if it is none, or not for clients."""
    one = None if check_client_topic(name) else system_topics(config).get(name)
    return None if one is None else TopicConfig(name, one.queues, one.queues, one.permission)
