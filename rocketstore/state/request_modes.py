"""Whether a group's consumers shall pull a topic or pop it, if the broker divides the queues for them (RocketMQ 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger.errors import InvalidRequestError
from rocketstore.message.checks import check_group_name, check_topic
from rocketstore.types import RequestMode

REQUEST_MODES_MAX: Final = 16_384
"""Pairs of topic and group that have one."""
_SHARE_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TopicRequestMode:
    """The mode of one topic for one group.

    ``share_queues`` (RocketMQ's ``popShareQueueNum``): anyone who pops shares its queues with so many of the consumers
    that follow it; 0 and below: everyone pops from all queues.
    """

    topic: str
    group: str
    mode: RequestMode
    share_queues: int = 0

    def __post_init__(self) -> None:
        if problem := check_topic(self.topic) or check_group_name(self.group):
            raise InvalidRequestError(problem)
        if type(self.share_queues) is not int or not -1 <= self.share_queues <= _SHARE_MAX:
            raise InvalidRequestError(f"popShareQueueNum {self.share_queues!r:.64}: a whole number, -1 or more")


def mode_json(one: TopicRequestMode) -> dict[str, object]:
    """Its fields in a state message."""
    return {"topic": one.topic, "group": one.group, "mode": one.mode.name, "share": one.share_queues}


def mode_from_json(fields: Mapping[str, Any]) -> TopicRequestMode:
    """The same the other way round. Raises ``InvalidRequestError``."""
    name = fields["mode"]
    if not isinstance(name, str) or name not in RequestMode.__members__:
        raise InvalidRequestError(f"request mode {name!r:.64}: use PULL or POP")
    return TopicRequestMode(fields["topic"], fields["group"], RequestMode[name], fields["share"])
