"""Retention: when files go, that queues and index follow, and the disk-full mark."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dledger.errors import DiskError
from dledger.store.fs import DiskUsage
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.queue import OnForced, untold
from rocketstore.store.rounds import MANUAL_ROUNDS, CleanDecision, Cleaner, decide, delete_hours, used_percent
from tests.crash.crash_fs import FailingFs
from tests.support.waiting import ManualClock

CONFIG = MessageStoreConfig(delete_when="04;16")


@dataclass
class Log(PlainCommitLog):
    """A log with files to delete."""

    root: Path
    min_offset: int = 0
    calls: list[bool] = field(default_factory=list)
    held_back: bool = False

    def is_held_back(self, *, now_ms: int, immediately: bool) -> bool:
        return self.held_back

    def delete_expired(self, *, now_ms: int, immediately: bool, on_forced: OnForced = untold) -> int:
        self.calls.append(immediately)
        self.min_offset += 100
        return 1

    def directories(self) -> list[str]:
        return [str(self.root)]


@dataclass
class Follower:
    """Queues or index."""

    seen: list[int] = field(default_factory=list)
    error: DiskError | None = None

    def delete_expired(self, min_physical_offset: int, /) -> int:
        if self.error is not None:
            raise self.error
        self.seen.append(min_physical_offset)
        return 0


@pytest.mark.parametrize(
    ("ratio", "hour", "manual", "expected"),
    [
        (50, 3, False, CleanDecision(False, False, False)),
        (50, 4, False, CleanDecision(True, False, False)),
        (50, 16, False, CleanDecision(True, False, False)),
        (50, 3, True, CleanDecision(True, False, False)),
        (75, 3, False, CleanDecision(False, False, False)),
        (76, 3, False, CleanDecision(True, False, False)),
        (85, 3, False, CleanDecision(True, False, False)),
        (86, 3, False, CleanDecision(True, False, False)),
        (90, 3, False, CleanDecision(True, False, False)),
        (91, 3, False, CleanDecision(True, False, True)),
        (-1, 3, False, CleanDecision(True, False, False)),
    ],
)
def test_rules(ratio: int, hour: int, *, manual: bool, expected: CleanDecision) -> None:
    """store.md 6.3, but nothing unexpired goes unless that is asked for."""
    assert decide(ratio, hour, CONFIG, manual=manual) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (85, CleanDecision(True, False, False)),
        (86, CleanDecision(True, True, False)),
        (91, CleanDecision(True, True, True)),
    ],
)
def test_unexpired_files_go_only_if_that_is_asked_for(ratio: int, expected: CleanDecision) -> None:
    """RocketMQ's forced deletion, store.md 6.3; the disk is full all the same."""
    assert decide(ratio, 3, replace(CONFIG, clean_file_forcibly_enable=True), manual=False) == expected


@pytest.mark.parametrize(
    ("text", "hours"), [("04", {4}), ("4;16", {4, 16}), ("04, 16", {4, 16}), ("", set()), ("x;5", {5})]
)
def test_hours(text: str, hours: set[int]) -> None:
    assert delete_hours(text) == hours


def test_ratio_is_rounded_up_and_unknown_without_a_path(tmp_path: Path) -> None:
    fs = FailingFs()
    fs.disk = DiskUsage(1000, 899, 101)
    assert used_percent(fs, tmp_path) == 11

    class Missing(FailingFs):
        def usage(self, path: Path) -> DiskUsage:
            raise FileNotFoundError(path)

    assert used_percent(Missing(), tmp_path) == -1


class Bench:
    """A cleaner with everything it works on; the disk is half empty and the hour none of ``delete_when``."""

    def __init__(self, tmp_path: Path) -> None:
        self.log = Log(tmp_path)
        self.queues, self.index = Follower(), Follower()
        self.fs = FailingFs()
        self.full: list[bool] = []
        self.may_delete = True
        self.held_back_at: list[int] = []
        """After how many deletions it was told that the log must not lose something."""
        config = MessageStoreConfig(store_path_root_dir=tmp_path, delete_when="")
        self.cleaner = Cleaner(
            self.log,
            [self.queues, self.index],
            config,
            self.fs,
            ManualClock(),
            may_delete=lambda: self.may_delete,
            on_held_back=lambda: self.held_back_at.append(len(self.log.calls)),
            on_disk_full=self.full.append,
        )

    def use(self, percent: int) -> None:
        self.fs.disk = DiskUsage(100, 100 - percent, percent)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_nothing_goes_without_a_reason(bench: Bench) -> None:
    assert bench.cleaner.clean() == 0
    assert bench.log.calls == []


def test_what_the_log_must_not_lose_is_written_down_before_it_goes(bench: Bench) -> None:
    """In the same round, and only then: the numbering of the queues would go with the files."""
    bench.use(80)
    bench.cleaner.clean()
    bench.log.held_back = True
    bench.cleaner.clean()
    bench.use(50)
    bench.cleaner.clean()

    assert (bench.held_back_at, bench.log.calls) == ([1], [False, False])


def test_queues_and_index_follow_the_log(bench: Bench) -> None:
    """DefaultMessageStoreCleanFilesTest."""
    bench.use(80)

    assert bench.cleaner.clean() == 1

    assert bench.queues.seen == bench.index.seen == [100]
    assert bench.log.calls == [False]


def test_followers_are_not_bothered_while_the_log_keeps_everything(bench: Bench) -> None:
    bench.cleaner.clean()
    bench.cleaner.clean()

    assert bench.queues.seen == [0]


def test_a_failing_part_does_not_keep_the_other_from_following(bench: Bench) -> None:
    bench.use(80)
    bench.queues.error = DiskError("no")

    with pytest.raises(DiskError):
        bench.cleaner.clean()
    bench.queues.error = None
    bench.use(10)
    bench.cleaner.clean()

    assert bench.index.seen == [100, 100]
    assert bench.queues.seen == [100]


def test_the_disk_full_mark_comes_and_goes(bench: Bench) -> None:
    for percent in (50, 95, 50):
        bench.use(percent)
        bench.cleaner.clean()

    assert bench.full == [False, True, False]
    assert bench.log.calls == [False]


def test_a_request_deletes_for_some_rounds(bench: Bench) -> None:
    """store.md 6.3: a manual request counts for the next 20 rounds."""
    bench.cleaner.request()
    for _ in range(MANUAL_ROUNDS + 5):
        bench.cleaner.clean()

    assert len(bench.log.calls) == MANUAL_ROUNDS


def test_what_is_not_dispatched_is_not_deleted(bench: Bench) -> None:
    bench.use(95)
    bench.may_delete = False

    assert bench.cleaner.clean() == 0
    assert bench.full == [True]


def test_ratios_count_the_emptiest_log_directory(bench: Bench) -> None:
    bench.use(42)

    ratios = bench.cleaner.ratios()

    assert (ratios.log, ratios.queues, ratios.worst) == (42, 42, 42)
