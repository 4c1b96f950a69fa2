"""Counting."""

from __future__ import annotations

import threading

import pytest

from rocketstore.store.stats import StoreStats, bytes_text
from rocketstore.types import BROKER_STATE_TOPIC, TERM_START_TOPIC, PutMessageStatus, PutResult
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.fakes import head

OK = PutResult(PutMessageStatus.PUT_OK)


@pytest.mark.parametrize(
    ("status", "failed"),
    [
        (PutMessageStatus.PUT_OK, False),
        (PutMessageStatus.FLUSH_DISK_TIMEOUT, False),
        (PutMessageStatus.SLAVE_NOT_AVAILABLE, False),
        (PutMessageStatus.OS_PAGECACHE_BUSY, True),
        (PutMessageStatus.UNKNOWN_ERROR, True),
        (PutMessageStatus.MESSAGE_ILLEGAL, True),
    ],
)
def test_what_a_producer_must_take_as_failed_counts_as_failed(status: PutMessageStatus, *, failed: bool) -> None:
    """RocketMQ counts a quorum that did not answer (OS_PAGECACHE_BUSY) as success: the message was appended."""
    stats = StoreStats(ManualClock(0))

    stats.put_done([PutResult(status)], 0.001)

    assert (stats.puts, stats.failed_puts) == ((0, 1) if failed else (1, 0))


def test_rates_are_of_the_last_seconds() -> None:
    clock = ManualClock(0)
    stats = StoreStats(clock)
    for second in range(60):
        stats.dispatched([head(number) for number in range(100 if second >= 50 else 10)], 0)
        stats.got(second % 2, 1)
        clock.now_ms += 1000
        stats.sample()

    assert stats.put_tps(10) == 100
    assert stats.put_tps(60) == 25
    assert stats.put_tps(600) == 25
    assert stats.get_tps() == 1
    assert (stats.found_tps(), stats.missed_tps(), stats.transferred_tps()) == (0.5, 0.5, 0.5)


def test_samples_are_kept_for_ten_minutes_only() -> None:
    clock = ManualClock(0)
    stats = StoreStats(clock)
    for _ in range(700):
        clock.now_ms += 1000
        stats.dispatched([head(0)], 0)
        stats.sample()

    assert stats.put_tps(600) == 1
    assert len(stats._samples) == 601


def test_latencies_fall_into_rocketmqs_buckets() -> None:
    stats = StoreStats(ManualClock(0))
    for took_ms in (0, 1, 10, 11, 100, 500, 999, 5000, 10_001, 10_000):
        stats.put_done([OK], took_ms / 1000)

    assert stats.latency() == (1, 2, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1)
    assert stats.put_ms_max == 10_001
    assert stats.latency_text().startswith("[<=0ms]:1 [0~10ms]:2 ")


def test_topics_count_what_arrived_in_the_log() -> None:
    stats = StoreStats(ManualClock(0))
    stats.dispatched([head(0, topic="A"), head(100, topic="B", size=50), head(150, topic="A")], 3)
    stats.dispatched([head(250, topic="B")], 1)

    topics = stats.topics()
    assert (topics["A"].messages, topics["A"].size_bytes) == (2, 200)
    assert (topics["B"].messages, topics["B"].size_bytes) == (2, 150)
    assert stats.dispatch_ms_max == 3


def test_the_brokers_hidden_topics_are_in_no_total() -> None:
    """Users are told of messages that they know of, by master and slaves alike: these count what arrives."""
    clock = ManualClock(0)
    stats = StoreStats(clock)
    stats.dispatched([head(0, topic=BROKER_STATE_TOPIC), head(100, size=50), head(150, topic=TERM_START_TOPIC)], 1)
    stats.got(2, 1, size_bytes=200, topic=BROKER_STATE_TOPIC)
    stats.got(1, 1, size_bytes=50, group="g", topic="T")
    clock.now_ms += 1000
    stats.sample()

    info = stats.runtime_info()
    assert (stats.arrived, stats.transferred, stats.gets_found) == (1, 1, 1)
    assert (info["putMessageTimesTotal"], info["putMessageSizeTotal"]) == ("1", "50")
    assert (info["putMessageAverageSize"], info["putTps"]) == ("50.0", "1.00 1.00 1.00")
    assert stats.groups().keys() == {("g", "T")}


def test_runtime_info_has_rocketmqs_keys() -> None:
    """store.md 6.5."""
    clock = ManualClock(0)
    stats = StoreStats(clock)
    stats.dispatched([head(0)], 1)
    clock.now_ms += 90_061_000

    info = stats.runtime_info()

    assert info["putTps"] == "0.00 0.00 0.00"
    assert info["putMessageAverageSize"] == "100.0"
    assert info["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert {"getFoundTps", "getMissTps", "getTotalTps", "getTransferedTps", "putMessageDistributeTime"} <= set(info)
    assert info["getTransferredTps"] == info["getTransferedTps"]  # as RocketMQ 5 and 4 spell it
    assert {"putMessageTimesTotal", "putMessageSizeTotal", "dispatchMaxBuffer", "bootTimestamp"} <= set(info)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (1 << 62, "4.0 EiB")],
)
def test_bytes_are_told_as_rocketmq_does(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_threads_lose_no_count() -> None:
    """StoreStatsServiceTest: concurrent counters."""
    stats = StoreStats(ManualClock(0))

    def count() -> None:
        for _ in range(2000):
            stats.note_put(0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert stats.puts == 8000


def test_messages_of_before_the_start_are_not_put_now() -> None:
    """A crash has their queues built anew; a member that was away gets them late. Neither is traffic."""
    clock = ManualClock(1000)
    stats = StoreStats(clock)
    stats.sample()
    stats.dispatched([head(0, store_ms=400), head(1, store_ms=999), head(2, store_ms=1000), head(3, store_ms=1001)], 0)
    stats.dispatched([head(4, store_ms=5)], 0)
    clock.now_ms += 1000
    stats.sample()

    assert stats.arrived == 2
    assert stats.put_tps(10) == 2
