"""From where queues and index are built again: every case of the table in ``rocketstore.store.derived``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rocketstore.consume_queue.files import QueueRecovery
from rocketstore.consume_queue.queue import FOREVER, ConsumeQueue
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexLoad, IndexService
from rocketstore.store.derived import QueueFindings, RecoveryFindings, RecoveryPlan, file_by_time, plan, recover
from rocketstore.store.directory import UNKNOWN, StoreCheckpoint
from tests.unit.rocketstore.fakes import FakeLog

OURS = StoreCheckpoint(1, 1, 1, replay_from=600, queue_units=10, index_end=500, index_entries=7)
JAVAS = StoreCheckpoint(10_000, 10_000, 10_000)


@dataclass
class Index(IndexService):
    """An index as recovery sees it."""

    indexed_to: int = 500
    replay_from: int | None = None
    truncated: list[int] = field(default_factory=list)
    loaded: list[tuple[bool, int, int | None, int]] = field(default_factory=list)

    def load(
        self, *, clean_stop: bool, index_timestamp_ms: int, durable_end: int | None = None, durable_entries: int = -1
    ) -> IndexLoad:
        self.loaded.append((clean_stop, index_timestamp_ms, durable_end, durable_entries))
        return self.load_facts

    @property
    def load_facts(self) -> IndexLoad:
        """What opening it found."""
        return IndexLoad(self.indexed_to, self.replay_from, ())

    def truncate(self, physical: int) -> None:
        self.truncated.append(physical)


@dataclass
class Queue(ConsumeQueue):
    """A consume queue that counts."""

    stored_end: int = 0


@dataclass
class Queues(ConsumeQueueTable):
    """Consume queues as recovery sees them."""

    units: list[int] = field(default_factory=list)
    max_physical_offset: int = -1
    recovered: list[tuple[int, bool]] = field(default_factory=list)

    def all(self) -> list[ConsumeQueue]:
        return [Queue(units) for units in self.units]

    def recover(self, limit: int = FOREVER, *, whole: bool = True) -> QueueRecovery:
        self.recovered.append((limit, whole))
        return QueueRecovery(-1, None, ())


def decide(
    *,
    clean: bool,
    checkpoint: StoreCheckpoint = OURS,
    begin: int = 0,
    end: int = 1000,
    units: int = 10,
    max_physical: int = 1000,
    index: Index | None = None,
    by_time: int = 0,
    index_safe: bool = True,
) -> RecoveryPlan:
    found = (index or Index()).load_facts
    findings = RecoveryFindings(clean, checkpoint, begin, end, QueueFindings(units, max_physical), found, by_time)
    return plan(findings, index_safe=index_safe)


def test_after_a_clean_stop_building_goes_on_where_it_was() -> None:
    found = decide(clean=True)

    assert (found.cut_queues, found.replay_from) == (1000, 600)


@pytest.mark.parametrize(("max_physical", "expected"), [(-1, 0), (400, 400), (900, 700)])
def test_after_javas_crash_no_gap_is_left_behind_what_the_queues_have(max_physical: int, expected: int) -> None:
    """Times say that building may begin at 700; but somebody may have removed the queues, or some of their files."""
    found = decide(clean=False, checkpoint=JAVAS, max_physical=max_physical, by_time=700)

    assert found.replay_from == expected


def test_after_a_crash_queues_are_cut_and_built_from_the_checkpoint() -> None:
    """rocketmq 1397, 7355: not from the queue that came furthest. What lies behind the checkpoint may be torn."""
    found = decide(clean=False, max_physical=900)

    assert (found.cut_queues, found.replay_from) == (600, 600)


def test_a_log_that_lost_its_tail_cuts_queues_and_index() -> None:
    """rocketmq 405."""
    found = decide(clean=False, end=550)

    assert (found.cut_queues, found.replay_from) == (550, 550)


def test_what_the_log_no_longer_has_is_not_asked_for() -> None:
    assert decide(clean=True, begin=800).replay_from == 800
    assert decide(clean=False, checkpoint=StoreCheckpoint(), begin=800).replay_from == 800


@pytest.mark.parametrize("clean", [True, False])
def test_missing_queues_are_built_from_the_beginning(*, clean: bool) -> None:
    found = decide(clean=clean, units=9)

    assert found.replay_from == 0
    assert "missing" in found.reason


@pytest.mark.parametrize("clean", [True, False])
def test_a_missing_index_is_built_from_where_it_ends(*, clean: bool) -> None:
    assert decide(clean=clean, index=Index(indexed_to=300)).replay_from == 300
    assert decide(clean=clean, index=Index(indexed_to=-1, replay_from=-1)).replay_from == 0


def test_what_the_index_lost_in_a_crash_is_indexed_again() -> None:
    """messageIndexSafe: RocketMQ's default leaves these keys out for good (issue 7477)."""
    lost = Index(indexed_to=200, replay_from=200)

    assert decide(clean=False, index=lost).replay_from == 200
    assert decide(clean=False, index=lost, index_safe=False).replay_from == 600
    assert decide(clean=False, index=lost).cut_queues == 600


def test_after_rocketmqs_clean_stop_building_goes_on_at_the_furthest_queue() -> None:
    assert decide(clean=True, checkpoint=JAVAS, max_physical=950).replay_from == 950


def test_after_rocketmqs_crash_building_begins_at_the_file_that_its_times_name() -> None:
    found = decide(clean=False, checkpoint=JAVAS, by_time=400, max_physical=950)

    assert (found.cut_queues, found.replay_from) == (400, 400)


def test_without_queues_and_checkpoint_all_is_built() -> None:
    """Also after a clean stop: the queues' directory and the checkpoint were deleted."""
    found = decide(clean=True, checkpoint=StoreCheckpoint(), units=0, max_physical=-1)

    assert found.replay_from == 0


def test_an_empty_log_empties_the_queues() -> None:
    """DLedgerCommitlogTest.testTruncateCQ: all log files deleted."""
    found = decide(clean=False, end=0)

    assert (found.cut_queues, found.replay_from) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"begin": 0, "units": 0}, True),
        ({"begin": 500}, True),
        ({"begin": 601}, False),
        ({"begin": 500, "units": OURS.queue_units - 1}, False),
        ({"begin": 500, "checkpoint": JAVAS}, True),
        ({"begin": 500, "checkpoint": StoreCheckpoint(), "units": 0}, False),
    ],
)
def test_queues_are_whole_if_they_missed_nothing_that_the_log_has_lost(changes: Any, whole: bool) -> None:  # noqa: ANN401
    """Else their next offsets may be too low, unless the log says more."""
    assert decide(clean=True, **changes).queues_are_whole is whole


def test_the_newest_file_with_old_messages_is_found() -> None:
    log = FakeLog(max_offset=3500, times={0: 10, 1000: 20, 2000: 30, 3000: 40})

    assert [file_by_time(log, ms) for ms in (5, 10, 29, 30, 99)] == [0, 0, 1000, 2000, 3000]


def test_recover_carries_the_plan_out() -> None:
    log = FakeLog(max_offset=800, end_offset=900)
    queues, index = Queues([4, 6], 600), Index(indexed_to=950)

    found = recover(log, queues, index, OURS, clean_stop=False, index_safe=True)

    assert found.replay_from == 600
    assert (queues.recovered, index.truncated) == ([(600, False)], [900])
    assert index.loaded == [(False, OURS.index_ms, OURS.index_end, OURS.index_entries)]


def test_what_is_behind_the_cut_does_not_hide_that_a_queue_is_missing() -> None:
    """One queue's directory is gone; another has got as many messages since the checkpoint."""

    class Cut(Queues):
        def recover(self, limit: int = FOREVER, *, whole: bool = True) -> QueueRecovery:
            self.units = [6]
            return super().recover(limit, whole=whole)

    found = recover(
        FakeLog(max_offset=1000, end_offset=1000), Cut([10], 1000), None, OURS, clean_stop=False, index_safe=True
    )

    assert found.replay_from == 0


def test_queues_are_not_cut_at_the_commit_position() -> None:
    """broker-ha.md 1.6: a restarted member may have forgotten it; what its queues know was committed."""
    log = FakeLog(max_offset=100, end_offset=1000)
    queues = Queues([10], 900)

    found = recover(log, queues, None, OURS, clean_stop=True, index_safe=True)

    assert queues.recovered == [(1000, True)]
    assert found.replay_from == 600


def test_rocketmqs_times_are_used_only_where_there_is_nothing_better() -> None:
    log = FakeLog(max_offset=3500, end_offset=3500, times={0: 10, 1000: 20, 2000: 10_001, 3000: 40_000})

    found = recover(log, Queues([35], 3500), None, JAVAS, clean_stop=False, index_safe=True)

    assert found.replay_from == 1000
    assert StoreCheckpoint().replay_from == UNKNOWN
