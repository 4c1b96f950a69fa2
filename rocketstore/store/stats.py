"""A store's counters: puts, gets, their durations, and rates over the last 10, 60 and 600 seconds.

Puts are counted when they are answered: everything but ``PUT_OK`` and soft time-outs is a failure, including a quorum
that did not respond (which RocketMQ counts as success, because the message was appended). Messages per topic are
counted at dispatch, in bulk, so also on slaves, and only those really in the log. Totals and rates leave out the
broker's hidden topics.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dledger.clock import Clock
from rocketstore.message.columns import sizes_of, topics_of
from rocketstore.types import HIDDEN_TOPICS, PutMessageStatus, PutResult, RecordHead

LATENCY_BOUNDS_MS: Final = (0, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
"""Upper bounds of the put latency histogram; one more bucket counts longer times."""
_BUCKET_NAMES: Final = (
    "[<=0ms]", "[0~10ms]", "[10~50ms]", "[50~100ms]", "[100~200ms]", "[200~500ms]", "[500ms~1s]", "[1~2s]", "[2~3s]",
    "[3~4s]", "[4~5s]", "[5~10s]", "[10s~]",
)  # fmt: skip
_WINDOWS_S: Final = (10, 60, 600)
_ALL_OK: Final = {PutMessageStatus.PUT_OK}
_SAMPLES_MAX: Final = _WINDOWS_S[-1] + 1
GROUPS_MAX: Final = 10_000
"""Pairs of group and topic that are counted separately: clients choose the group names."""
OTHERS: Final = "(others)"
"""Stands for all topics or groups beyond a limit; not a valid topic name."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at_ms: int
    arrived: int
    found: int
    missed: int
    transferred: int


_Value = Callable[[_Sample], int]
_Rate = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class TopicTotals:
    """Messages that arrived in a topic since the store started."""

    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """Messages of a topic delivered to a group since the store started."""

    messages: int
    size_bytes: int


class StoreStats:
    """Counters of one store. Thread-safe. The store's housekeeping calls ``sample`` once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all counters
        self._started_ms = clock.monotonic_ms()
        self.boot_ms: Final = clock.wall_ms()
        self._fresh: deque[float] = deque()
        """Durations (s) of single puts since they were last counted: appending needs no lock."""
        self.note_put: Final = self._fresh.append
        """Count one stored message that took so many seconds; for the put path, where microseconds matter."""
        self._puts = 0
        self._failed_puts = 0
        self._put_ms_max = 0
        self.gets_found = 0
        """Gets that returned messages."""
        self.gets_missed = 0
        self.transferred = 0
        """Messages returned by gets."""
        self.arrived = 0
        """Messages that arrived in the log."""
        self._arrived_bytes = 0
        self.get_ms_max = 0
        self.dispatch_ms_max = 0
        self._latency = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self._latency_sum_s = 0.0
        self._topic_messages: Counter[str] = Counter()
        self._topic_bytes: Counter[str] = Counter()
        self._group_messages: Counter[tuple[str, str]] = Counter()
        self._group_bytes: Counter[tuple[str, str]] = Counter()
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES_MAX)
        self.sample()

    @property
    def puts(self) -> int:
        """Messages stored."""
        with self._lock:
            self._take_fresh()
            return self._puts

    @property
    def failed_puts(self) -> int:
        """Messages whose producers must treat them as not sent."""
        return self._failed_puts

    @property
    def put_ms_max(self) -> int:
        """The longest put."""
        with self._lock:
            self._take_fresh()
            return self._put_ms_max

    def put_done(self, results: Sequence[PutResult], took_s: float) -> int:
        """Count an answered put; returns how many of its messages are not stored."""
        count = len(results)
        # Fields by number instead of name, and by kind: this runs for every result.
        failed = 0 if {result[0] for result in results} == _ALL_OK else sum(not result.ok for result in results)
        with self._lock:
            self._puts += count - failed
            self._failed_puts += failed
            self._note_latency(took_s, count)
        return failed

    def _take_fresh(self) -> None:
        """Count what was passed to ``note_put``. Requires the lock."""
        fresh = self._fresh
        for _ in range(len(fresh)):
            self._puts += 1
            self._note_latency(fresh.popleft(), 1)

    def _note_latency(self, took_s: float, count: int) -> None:
        took_ms = int(took_s * 1000)
        self._latency[bisect_left(LATENCY_BOUNDS_MS, took_ms)] += count
        self._latency_sum_s += took_s * count
        if took_ms > self._put_ms_max:
            self._put_ms_max = took_ms

    def got(self, messages: int, took_ms: int, *, size_bytes: int = 0, group: str = "", topic: str = "") -> None:
        """Count a get of ``group`` that returned ``messages``."""
        if topic in HIDDEN_TOPICS:
            return
        with self._lock:
            if messages:
                self.gets_found += 1
                self.transferred += messages
                pair = (group, topic)
                if pair not in self._group_messages and len(self._group_messages) >= GROUPS_MAX:
                    pair = (OTHERS, OTHERS)
                self._group_messages[pair] += messages
                self._group_bytes[pair] += size_bytes
            else:
                self.gets_missed += 1
            self.get_ms_max = max(self.get_ms_max, took_ms)

    def dispatched(self, heads: Sequence[RecordHead], took_ms: int) -> None:
        """Count messages that arrived in the log, but not those that were stored before this broker started.

        Their queues are built anew after a crash, and a member that was away receives them late: nobody puts them now.
        """
        if heads and heads[0].store_timestamp < self.boot_ms:
            heads = [one for one in heads if one.store_timestamp >= self.boot_ms]
        if not heads:
            return
        topics = topics_of(heads)
        messages = Counter(topics)
        sizes: Counter[str] = Counter()
        if len(messages) == 1:
            sizes[heads[0].topic] = sum(sizes_of(heads))
        else:
            for topic, size in zip(topics, sizes_of(heads), strict=True):
                sizes[topic] += size
        with self._lock:
            self._topic_messages.update(messages)
            self._topic_bytes.update(sizes)
            self.arrived += messages.total()
            self._arrived_bytes += sizes.total()
            for topic in HIDDEN_TOPICS & messages.keys():
                self.arrived -= messages[topic]
                self._arrived_bytes -= sizes[topic]
            self.dispatch_ms_max = max(self.dispatch_ms_max, took_ms)

    def sample(self) -> None:
        """Record the counters, for the rates."""
        with self._lock:
            self._take_fresh()
            self._samples.append(
                _Sample(self._clock.monotonic_ms(), self.arrived, self.gets_found, self.gets_missed, self.transferred)
            )

    def topics(self) -> dict[str, TopicTotals]:
        """Messages that arrived, by topic."""
        with self._lock:
            return {
                topic: TopicTotals(count, self._topic_bytes[topic]) for topic, count in self._topic_messages.items()
            }

    def groups(self) -> dict[tuple[str, str], GroupTotals]:
        """Messages delivered, by group and topic."""
        with self._lock:
            return {pair: GroupTotals(count, self._group_bytes[pair]) for pair, count in self._group_messages.items()}

    def put_tps(self, window_s: int = 10) -> float:
        """Messages that arrived per second over about the last ``window_s`` seconds."""
        return self._rate(window_s, lambda sample: sample.arrived)

    def get_tps(self, window_s: int = 10) -> float:
        """Gets per second, successful or not."""
        return self._rate(window_s, lambda sample: sample.found + sample.missed)

    def found_tps(self, window_s: int = 10) -> float:
        """Gets per second that returned messages."""
        return self._rate(window_s, lambda sample: sample.found)

    def missed_tps(self, window_s: int = 10) -> float:
        """Gets per second that returned none."""
        return self._rate(window_s, lambda sample: sample.missed)

    def transferred_tps(self, window_s: int = 10) -> float:
        """Messages returned by gets per second."""
        return self._rate(window_s, lambda sample: sample.transferred)

    def latency_text(self) -> str:
        """The put latency histogram as RocketMQ prints it."""
        counts = self.latency()
        return " ".join(f"{name}:{count}" for name, count in zip(_BUCKET_NAMES, counts, strict=True))

    def latency(self) -> tuple[int, ...]:
        """The put latency histogram: counts per bucket of ``LATENCY_BOUNDS_MS``, and of longer times."""
        with self._lock:
            self._take_fresh()
            return tuple(self._latency)

    def latency_sum_s(self) -> float:
        """The total duration of all puts."""
        with self._lock:
            self._take_fresh()
            return self._latency_sum_s

    def runtime_info(self) -> dict[str, str]:
        """RocketMQ's keys and its formats."""
        with self._lock:
            size, arrived = self._arrived_bytes, self.arrived
        return {
            "bootTimestamp": str(self.boot_ms),
            "runtime": _duration(self._clock.monotonic_ms() - self._started_ms),
            "putMessageEntireTimeMax": str(self.put_ms_max),
            "putMessageTimesTotal": str(arrived),
            "putMessageFailedTimes": str(self.failed_puts),
            "putMessageSizeTotal": str(size),
            "putMessageDistributeTime": self.latency_text(),
            "putMessageAverageSize": str(size / arrived if arrived else 0.0),
            "dispatchMaxBuffer": str(self.dispatch_ms_max),
            "getMessageEntireTimeMax": str(self.get_ms_max),
            "putTps": self._rates(self.put_tps),
            "getFoundTps": self._rates(self.found_tps),
            "getMissTps": self._rates(self.missed_tps),
            "getTotalTps": self._rates(self.get_tps),
            "getTransferedTps": self._rates(self.transferred_tps),
            "getTransferredTps": self._rates(self.transferred_tps),  # RocketMQ 5's name
        }

    def _rates(self, rate: _Rate) -> str:
        return " ".join(f"{rate(window_s):.2f}" for window_s in _WINDOWS_S)

    def _rate(self, window_s: int, value: _Value) -> float:
        with self._lock:
            newest = self._samples[-1]
            oldest = self._samples[max(0, len(self._samples) - 1 - window_s)]
        took_ms = newest.at_ms - oldest.at_ms
        return (value(newest) - value(oldest)) * 1000 / took_ms if took_ms > 0 else 0.0


def bytes_text(count: int) -> str:
    """A number of bytes as RocketMQ prints it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    power = max(0, count.bit_length() - 1) // 10
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {units[power]}"


def _duration(ms: int) -> str:
    seconds = ms // 1000
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]"
