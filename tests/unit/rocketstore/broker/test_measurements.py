"""What metrics may show of a broker with more topics and groups than anybody wants series of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dledger.errors import CorruptLogError
from rocketstore.broker.statistics import GroupLag, QueueLag, ServiceCounters, first_groups, first_topics, measure
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.store.stats import GROUPS_MAX, OTHERS, GroupTotals, StoreStats, TopicTotals
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC, BrokerRole
from tests.support.waiting import ManualClock


@dataclass
class FakeStore(MessageStore):
    """A store whose queues all end at 100, and its log."""

    role: BrokerRole = BrokerRole.SYNC_MASTER
    dispatch_behind_bytes: int = 5
    dispatch_position: int = 95
    forced_files: int = 0

    def __post_init__(self) -> None:
        self.stats = StoreStats(ManualClock())  # type: ignore[misc]
        self.log = FakeLog()  # type: ignore[misc]  # in the place of what the constructor sets

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The same for all."""
        return 100

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Of topic ``late`` something has expired."""
        return 95 if topic == "late" else 0

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """One message per second; that of topic ``bad`` is damaged."""
        if topic == "bad":
            raise CorruptLogError(Path("0"), 0, "damaged", "")
        return 1000 * offset

    def disk_used_ratio(self) -> float:
        """Half full."""
        return 0.5

    def earliest_message_time(self) -> int:
        """Nothing kept."""
        return -1


@dataclass
class FakeLog(PlainCommitLog):
    """From 10 to 110, 100 readable, 7 not flushed."""

    min_offset: int = 10
    max_offset: int = 100
    end_offset: int = 110

    def remaining_to_flush(self) -> int:
        """Some."""
        return 7


@dataclass
class FakeState(BrokerState):
    """Groups and how far they are, by queue."""

    noted: dict[str, list[QueueOffset]]

    def topic_count(self) -> int:
        """Some."""
        return 3

    def groups(self) -> list[str]:
        """All of them."""
        return list(self.noted)

    def begin_offset(self, topic: str, queue_id: int) -> int:
        """Of topic ``short`` something is past its retention."""
        return 90 if topic == "short" else 0

    def offsets(self, group: str, topic: str = "") -> list[QueueOffset]:
        """One's."""
        return self.noted[group]


def test_lag_is_what_a_group_has_not_consumed_over_all_queues() -> None:
    """Per topic; an offset beyond the queue's end (a log that lost its tail) is no negative lag."""
    offsets = [QueueOffset("a", 0, 90), QueueOffset("a", 1, 70), QueueOffset("b", 0, 120)]

    found = measure(FakeStore(), FakeState({"g": offsets}), ServiceCounters(), topics_max=10, now_ms=100_000)

    assert found.lags == (GroupLag("g", "a", 40, 30_000), GroupLag("g", "b", 0))
    assert found.queue_lags == (QueueLag("g", "a", 0, 10, 10_000), QueueLag("g", "a", 1, 30, 30_000))
    assert found.lags_left_out == 0
    assert (found.topic_count, found.group_count, found.flush_behind_bytes) == (3, 1, 7)


def test_lags_are_bounded_and_say_what_they_leave_out() -> None:
    """Neither many groups nor a group of many topics makes more series than allowed."""
    many = {f"g{number}": [QueueOffset(f"t{topic}", 0, 0) for topic in range(3)] for number in range(5)}

    found = measure(FakeStore(), FakeState(many), ServiceCounters(), topics_max=4, now_ms=0)

    assert len(found.lags) == len(found.queue_lags) == 4
    assert found.lags_left_out == 8 + 1  # of the four groups looked at, and one group not looked at


def test_what_can_be_read_no_more_is_no_lag() -> None:
    """Neither what the log has removed, nor what is past its topic's retention; a damaged message has no age."""
    offsets = [QueueOffset("late", 0, 10), QueueOffset("short", 0, 10), QueueOffset("bad", 0, 99)]

    found = measure(FakeStore(), FakeState({"g": offsets}), ServiceCounters(), topics_max=10, now_ms=100_000)

    late, short, bad = found.lags
    assert (late, short) == (GroupLag("g", "late", 5, 5000), GroupLag("g", "short", 10, 10_000))
    assert bad == GroupLag("g", "bad", 1, None)


def test_the_first_topics_stay_the_first() -> None:
    """No counter ever goes back, whatever arrives later; the rest is one; the broker's own topics are none."""
    totals = {name: TopicTotals(number, 10 * number) for number, name in enumerate(("a", BROKER_STATE_TOPIC, "b"))}
    before = first_topics(totals, 2)
    totals |= {name: TopicTotals(9, 90) for name in ("c", SCHEDULE_TOPIC, "d")}

    assert before == {"a": TopicTotals(0, 0), "b": TopicTotals(2, 20)}
    assert first_topics(totals, 2) == {**before, OTHERS: TopicTotals(18, 180)}


def test_the_first_pairs_stay_the_first() -> None:
    """As with topics."""
    totals = {("g", topic): GroupTotals(1, 10) for topic in ("a", SCHEDULE_TOPIC, "b", "c")}

    assert first_groups(totals, 1) == {
        ("g", "a"): GroupTotals(1, 10),
        (OTHERS, OTHERS): GroupTotals(2, 20),
    }


def test_a_client_that_makes_up_groups_fills_no_memory() -> None:
    """Any name may be said in a pull: beyond the limit they are counted together."""
    stats = StoreStats(ManualClock())
    for number in range(GROUPS_MAX + 50):
        stats.got(1, 0, size_bytes=10, group=f"g{number}", topic="t")

    groups = stats.groups()

    assert len(groups) == GROUPS_MAX + 1
    assert groups[OTHERS, OTHERS] == GroupTotals(50, 500)
