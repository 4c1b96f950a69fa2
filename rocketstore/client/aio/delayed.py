"""The messages that wait at a broker's delay levels: a level's queue in ``SCHEDULE_TOPIC`` is its number less 1."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from dledger.remoting.frame import Frame
from rocketstore.client.aio.admin_answers import body_of, settings_of
from rocketstore.client.aio.admin_records import DelayLevelStatus
from rocketstore.message.delay import DelayLevels
from rocketstore.message.message import Message
from rocketstore.remoting.bodies.groups import DelayOffsetTable
from rocketstore.remoting.bodies.stats import TopicOffset, TopicStatsTable
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.headers import TopicHeader
from rocketstore.types import SCHEDULE_TOPIC

Pull = Callable[[int, int, int], Awaitable[list[Message]]]
"""Messages of a level, from an offset on, at most so many."""


class Ask(Protocol):
    """A request to the broker, and its successful answer."""

    def __call__(self, code: int, header: TopicHeader | None = None) -> Awaitable[Frame]: ...


async def read_levels(broker: str, ask: Ask, pull: Pull) -> list[DelayLevelStatus]:
    """Every level, with the time when its next message is due. Raises ``ClientError``."""
    settings, delivered, stats = await asyncio.gather(
        ask(Code.GET_BROKER_CONFIG),
        ask(Code.GET_ALL_DELAY_OFFSET),
        ask(Code.GET_TOPIC_STATS_INFO, TopicHeader(SCHEDULE_TOPIC)),
    )
    delays = DelayLevels.parse(settings_of(settings, broker)["messageDelayLevel"])
    offsets = body_of(DelayOffsetTable, delivered, broker).offset_table
    ends = {one.queue_id: of for one, of in body_of(TopicStatsTable, stats, broker).offset_table.items()}

    async def status(level: int) -> DelayLevelStatus:
        end = ends.get(level - 1, TopicOffset())
        following = min(max(offsets.get(level, 0), end.min_offset, 0), end.max_offset)
        waiting = await pull(level, following, 1) if following < end.max_offset else []
        due_ms = delays.due_ms(level, waiting[0].store_timestamp) if waiting else -1
        return DelayLevelStatus(level, delays.delay_ms(level), following, end.max_offset, due_ms)

    return await asyncio.gather(*map(status, range(1, delays.level_max + 1)))
