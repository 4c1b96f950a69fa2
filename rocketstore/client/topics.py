"""Topics as reported by brokers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.pb import broker_pb2 as pb

PERMISSION_READ: Final = 4
PERMISSION_WRITE: Final = 2
QUEUES_MAX: Final = 65536


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic: its numbers of readable and writable queues, and RocketMQ's permission bits (4 read, 2 write)."""

    name: str
    read_queues: int = 4
    write_queues: int = 4
    permission: int = PERMISSION_READ | PERMISSION_WRITE


def topic_of(topic: pb.Topic) -> TopicInfo:
    """Raises ``BadAnswerError`` for an invalid topic."""
    if not (topic.name and 0 <= topic.read_queues <= QUEUES_MAX and 0 <= topic.write_queues <= QUEUES_MAX):
        raise BadAnswerError(f"a broker returned an invalid topic: {topic!r}")
    return TopicInfo(topic.name, topic.read_queues, topic.write_queues, topic.permission)
