"""How much came and went per minute, hour and day: sampled from the store's totals, so that no message costs more.

Bounded as metrics are: the first ``metrics_topics_max`` topics and pairs of group and topic are told by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from dledger.clock import Clock
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.measurements import first_groups, first_topics
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.retries import Retries
from rocketstore.store.message_store import MessageStore

SAMPLE_S: Final = 10.0
STEPS_MS: Final = (10_000, 600_000, 3_600_000)
"""How far apart samples are that are kept for the minute, the hour and the day."""
KEPT: Final = (7, 7, 25)
"""How many of each, so that they span a minute, an hour and a day."""
_SLACK_MS: Final = 5_000
"""A timer that is early by less counts as in time."""


class Total(NamedTuple):
    """A total since the start, in the unit of the statistic and in messages."""

    amount: int
    messages: int


class Sample(NamedTuple):
    """All totals at one moment, by name of the statistic and key."""

    at_ms: int
    totals: Mapping[tuple[str, str], Total]


class BrokerTotals(NamedTuple):
    """Messages that arrived, also on a slave, and were given out, since the start; without the broker's own state."""

    puts: int
    gets: int


class StatsSpan(NamedTuple):
    """The count of a span of time."""

    amount: int
    per_s: float
    per_message: float


class Statistic(NamedTuple):
    """Of one name and key: in the last minute, hour and day."""

    minute: StatsSpan
    hour: StatsSpan
    day: StatsSpan


class Statistics:
    """On the loop; ``start`` and ``close`` it."""

    def __init__(
        self, live: LiveConfig, store: MessageStore, retries: Retries, readers: ReadThreads, clock: Clock
    ) -> None:
        self._live = live
        self._store = store
        self._retries = retries
        self._readers = readers
        self._clock = clock
        self._kept: tuple[deque[Sample], ...] = tuple(deque(maxlen=count) for count in KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._day: tuple[int, ...] = ()
        nothing = BrokerTotals(0, 0)
        self.this_morning = nothing
        """At midnight, local time; at the start if that is later."""
        self.yesterday_morning = nothing

    def start(self) -> None:
        """Begin to count."""
        self.take(self._sample())
        self._timer = asyncio.get_running_loop().call_later(SAMPLE_S, self._begin)

    def close(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._sampling is not None:
            self._sampling.cancel()

    def now(self) -> BrokerTotals:
        """Of the whole broker."""
        stats = self._store.stats
        return BrokerTotals(stats.arrived, stats.transferred)

    def of(self, name: str, key: str) -> Statistic | None:
        """One statistic; None if nothing was counted."""
        newest = self._kept[0][-1]
        if (name, key) not in newest.totals:
            return None
        return Statistic(*(_between(kept[0], newest, (name, key)) for kept in self._kept))

    def get_tps(self, group: str, topic: str) -> float:
        """Messages per second that a group got of a topic, over the last minute."""
        found = self.of("GROUP_GET_NUMS", f"{topic}@{group}")
        return 0.0 if found is None else found.minute.per_s

    # -- inside --------------------------------------------------------------------------------------------------------

    def take(self, sample: Sample) -> None:
        """Keep a sample wherever the last one is old enough."""
        for kept, step_ms in zip(self._kept, STEPS_MS, strict=True):
            if not kept or sample.at_ms - kept[-1].at_ms >= step_ms - _SLACK_MS:
                kept.append(sample)
        day = time.localtime(self._clock.wall_ms() / 1000)[:3]
        if day != self._day:
            self._day = day
            self.yesterday_morning, self.this_morning = self.this_morning, self.now()

    def _begin(self) -> None:
        self._sampling = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        self.take(await self._readers.run(self._sample))
        self._timer = asyncio.get_running_loop().call_later(SAMPLE_S, self._begin)

    def _sample(self) -> Sample:
        """On any thread."""
        config, totals = self._live.now, dict[tuple[str, str], Total]()
        limit, stats = config.metrics_topics_max, self._store.stats
        for topic, one in first_topics(stats.topics(), limit).items():
            totals["TOPIC_PUT_NUMS", topic] = Total(one.messages, one.messages)
            totals["TOPIC_PUT_SIZE", topic] = Total(one.size_bytes, one.messages)
        for (group, topic), got in first_groups(stats.groups(), limit).items():
            totals["GROUP_GET_NUMS", f"{topic}@{group}"] = Total(got.messages, got.messages)
            totals["GROUP_GET_SIZE", f"{topic}@{group}"] = Total(got.size_bytes, got.messages)
        for (group, topic), count in self._retries.sent_back.copy().items():
            totals["SNDBCK_PUT_NUMS", f"{topic}@{group}"] = Total(count, count)
        puts, gets = self.now()
        totals["BROKER_PUT_NUMS", config.cluster_name] = Total(puts, puts)
        totals["BROKER_GET_NUMS", config.cluster_name] = Total(gets, gets)
        return Sample(self._clock.monotonic_ms(), totals)


def _between(first: Sample, last: Sample, key: tuple[str, str]) -> StatsSpan:
    before = first.totals.get(key, Total(0, 0))
    after = last.totals[key]
    took_ms, amount = last.at_ms - first.at_ms, after.amount - before.amount
    messages = after.messages - before.messages
    return StatsSpan(
        amount,
        amount * 1000 / took_ms if took_ms > 0 else 0.0,
        amount / messages if messages else 0.0,
    )
