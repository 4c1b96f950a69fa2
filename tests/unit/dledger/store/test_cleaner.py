"""Retention: the plan, case by case, and its execution on disk."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.config import StoreConfig
from dledger.errors import DiskFullError, IndexBeforeBeginError
from dledger.store.cleaner import CleaningInput, ClosedSegment, Room, local_hour, plan, protected
from dledger.store.fs import DiskUsage
from dledger.types import LogIndex
from dledger.values import MIB
from tests.crash.crash_fs import FailingFs
from tests.unit.dledger.store.support import FakeClock, UnsyncedFs, abandon, bodies_of, fill, open_store, small_config

_HOUR = 3_600_000
_SEGMENTS = tuple(
    ClosedSegment(Path(str(k)), k * 100, (k + 1) * 100, last_index=k * 10 + 9, modified_ms=k * _HOUR) for k in range(4)
)
_FACTS = CleaningInput(
    segments=_SEGMENTS,
    end=450,
    safe_index=1000,
    protected_index=1000,
    now_ms=int(74.5 * _HOUR),
    local_hour=4,
    usage_ratio=0.5,
    available_bytes=5000,
    ran_out_of_space=False,
    bytes_wanted=1000,
)


@pytest.mark.parametrize(
    ("changes", "removed"),
    [
        pytest.param({}, 3, id="expired at the hour"),
        pytest.param({"local_hour": 5}, 0, id="expired at another hour"),
        pytest.param({"local_hour": 5, "usage_ratio": 0.71}, 3, id="expired above the check ratio"),
        pytest.param({"now_ms": 0}, 0, id="nothing expired"),
        pytest.param({"usage_ratio": 0.99}, 3, id="expired, however full the disk"),
        pytest.param({"safe_index": 18}, 1, id="not committed"),
        pytest.param({"safe_index": 19}, 1, id="the safe entry ends a segment: it is what others are compared with"),
        pytest.param({"safe_index": 20}, 2, id="the safe entry begins the next segment"),
        pytest.param({"now_ms": 0, "usage_ratio": 0.99}, 0, id="not expired, however full the disk"),
        pytest.param({"protected_index": 18}, 1, id="a live follower needs it"),
        pytest.param({"protected_index": -1, "end": 100 + 301}, 1, id="a follower too far behind is not waited for"),
        pytest.param({"segments": ()}, 0, id="only the last segment"),
    ],
)
def test_plan(changes: dict[str, int | float | tuple[ClosedSegment, ...]], removed: int) -> None:
    """Oldest first, stopping at the first that stays."""
    config = StoreConfig(follower_keep_bytes=300)

    decision = plan(replace(_FACTS, **changes), config)  # type: ignore[arg-type]  # one field at a time

    assert decision.remove == _SEGMENTS[:removed]


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, False),
        ({"usage_ratio": 0.91}, True),
        ({"ran_out_of_space": True}, False),
        ({"ran_out_of_space": True, "available_bytes": 999}, True),
        ({"available_bytes": 0}, False),
    ],
)
def test_disk_full(changes: dict[str, float], full: bool) -> None:
    """By ratio, or because an append found no room and there still is none."""
    assert plan(replace(_FACTS, **changes), StoreConfig()).disk_full is full  # type: ignore[arg-type]  # see above


@pytest.mark.parametrize(
    ("changes", "removed", "forced"),
    [
        pytest.param({"now_ms": 0}, 1, True, id="one at a time"),
        pytest.param({}, 3, False, id="expired ones are not forced"),
        pytest.param({"now_ms": 0, "usage_ratio": 0.85}, 0, False, id="not above the ratio"),
        pytest.param({"now_ms": 0, "usage_ratio": 0.99, "safe_index": 8}, 0, False, id="never uncommitted"),
    ],
)
def test_unexpired_segments_go_only_if_that_is_asked_for(
    changes: dict[str, int | float], removed: int, forced: bool
) -> None:
    """``force_clean``: the plan says which one had not expired."""
    decision = plan(replace(_FACTS, **{"usage_ratio": 0.86, **changes}), StoreConfig(force_clean=True))  # type: ignore[arg-type]  # see above

    assert decision.remove == _SEGMENTS[:removed]
    assert decision.forced == (_SEGMENTS[0] if forced else None)


def test_protected_is_the_lowest_of_all() -> None:
    """The commit index bounds it when all followers are ahead."""
    assert protected(LogIndex(9), [LogIndex(12), LogIndex(7)]) == 7
    assert protected(LogIndex(9), []) == 9


def test_local_hour_is_an_hour() -> None:
    """Hours go round within a day."""
    assert (local_hour(_HOUR * 25) - local_hour(0)) % 24 == 1


def test_clean_removes_whole_segments_and_moves_the_begin(tmp_path: Path) -> None:
    """The begin describes the last entry that went; it survives a kill; what went is refused, not crashed upon."""
    config = small_config(tmp_path, disk_check_ratio=1e-9, retention_hours=1)
    clock = FakeClock()
    store = open_store(config, clock=clock)
    bodies = fill(store, 100)
    store.flush()
    store.set_committed(LogIndex(70))
    assert store.clean(store.committed_index) == ()
    clock.now_ms = 4_000_000_000_000
    before = store.chain_crc_at(LogIndex(53)), store.read(LogIndex(54)).position

    removed = store.clean(LogIndex(60))

    assert sorted(path.name for path in removed if path.parent.name == "data") == ["0" * 20, "00000000000000004096"]
    assert len([path for path in removed if path.parent.name == "index"]) == 5
    assert not any(path.exists() for path in removed)
    assert (store.begin.index, store.begin.term) == (53, 1)
    assert (store.begin.chain_crc, store.begin.position) == before
    with pytest.raises(IndexBeforeBeginError):
        store.read(LogIndex(53))
    abandon(store)
    store = open_store(config, clock=clock)
    assert (store.begin.index, store.begin.position, store.begin.chain_crc) == (53, before[1], before[0])
    assert bodies_of(store) == bodies[54:]
    assert store.recovery_report.cut_at is None
    bodies += fill(store, 30)
    store.truncate(LogIndex(100))
    assert bodies_of(store) == bodies[54:100]
    store.close()


def test_segments_behind_one_that_stays_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look costs reads under the node's lock, once a second; a log may have thousands of segments."""
    store = open_store(small_config(tmp_path))
    fill(store, 300)
    store.flush()
    store.set_committed(store.last.index)
    looked: list[LogIndex] = []
    chain_crc_at = store.chain_crc_at

    def look(index: LogIndex) -> int:
        looked.append(index)
        return chain_crc_at(index)

    monkeypatch.setattr(store, "chain_crc_at", look)

    store.clean(store.last.index)

    assert len(list(tmp_path.rglob("data/*"))) > 3
    assert len(looked) <= 1
    store.close()


def test_a_disk_that_fills_up_refuses_appends_and_keeps_every_acknowledged_entry(tmp_path: Path) -> None:
    """By default nothing goes before ``retention_hours``, whatever the ratio; room makes appends possible again."""
    fs = FailingFs()
    store = open_store(replace(StoreConfig(base_dir=tmp_path), segment_bytes=4096, index_segment_bytes=512), fs)
    bodies = fill(store, 100)
    store.flush()
    store.set_committed(store.last.index)

    for percent in (86, 89, 91, 100):
        fs.disk = DiskUsage(100, 100 - percent, percent)
        assert store.clean(store.committed_index) == ()

    assert store.disk_full
    with pytest.raises(DiskFullError):
        fill(store, 1)
    assert bodies_of(store) == bodies
    assert store.forced_segments == 0
    fs.disk = DiskUsage(100, 50, 50)
    store.clean(store.committed_index)
    bodies += fill(store, 1)
    assert bodies_of(store) == bodies
    store.close()


def test_force_clean_says_of_each_segment_what_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One segment per pass, the newest never: each with a warning that has its entries and their age, and counted."""
    fs, clock = FailingFs(), FakeClock()
    config = small_config(tmp_path, force_clean=True, disk_clean_ratio=0.85, disk_check_ratio=0.7)
    store = open_store(config, fs, clock)
    fill(store, 100)
    store.flush()
    store.set_committed(store.last.index)
    fs.disk = DiskUsage(1000, 100, 900)

    begins = []
    for _ in range(5):
        store.clean(store.committed_index)
        begins.append(store.begin.index)

    assert begins == [26, 53, 80, 80, 80]
    told = [one for one in caplog.records if getattr(one, "event", "") == "forced_removal"]
    assert [(one.levelname, one.__dict__["first_index"], one.__dict__["last_index"]) for one in told] == [
        ("WARNING", 0, 26),
        ("WARNING", 27, 53),
        ("WARNING", 54, 80),
    ]
    assert "removed entries 27 to 53 (" in told[1].getMessage()
    assert re.search(r"the last written \d+ s ago and not expired", told[1].getMessage())
    assert store.forced_segments == 3
    store.close()


@pytest.mark.parametrize("whole_segments", [0, 1, 2])
def test_nothing_goes_that_the_application_needs(tmp_path: Path, whole_segments: int) -> None:
    """From a position on that it names; the segment in which that lies stays, too."""
    clock = FakeClock()
    config = small_config(tmp_path, disk_check_ratio=1e-9, retention_hours=1)
    store = open_store(config, clock=clock)
    fill(store, 100)
    store.flush()
    store.set_committed(LogIndex(99))
    clock.now_ms = 4_000_000_000_000
    keep_from = whole_segments * config.segment_bytes + 1

    retired = store.retire(LogIndex(99), store.measure_room(), keep_from=keep_from)

    assert len({path.name for path in retired if path.parent.name == "data"}) == whole_segments
    assert store.begin.position == whole_segments * config.segment_bytes
    assert store.retire(LogIndex(99), store.measure_room(), keep_from=None)
    store.close()


def test_files_are_removed_after_the_begin_is_durable_and_apart_from_the_decision(tmp_path: Path) -> None:
    """Unlinking a gigabyte takes long: under the node's lock it would stop votes. A crash meanwhile loses nothing."""
    clock, fs = FakeClock(), _Removals()
    store = open_store(small_config(tmp_path, disk_check_ratio=1e-9, retention_hours=1), fs, clock)
    bodies = fill(store, 100)
    store.flush()
    store.set_committed(LogIndex(70))
    store.sync_checkpoint()
    clock.now_ms = 4_000_000_000_000
    room = store.measure_room()
    fs.calls.clear()

    retired = store.retire(LogIndex(60), room)

    assert fs.calls == []
    assert store.begin.index == 53
    assert all(path.exists() for path in retired)
    with pytest.raises(IndexBeforeBeginError):
        store.read(LogIndex(53))

    store.remove_retired()

    assert fs.calls[0] == "sync"
    assert fs.calls.count("unlink") == len(retired)
    assert fs.calls.count("sync_dir") == 2
    assert fs.calls[-1] == "sync_dir"
    assert not any(path.exists() for path in retired)
    store.remove_retired()
    assert bodies_of(store) == bodies[54:]
    store.close()


def test_a_kill_between_decision_and_removal_keeps_or_removes_whole_segments(tmp_path: Path) -> None:
    """The begin was not durable yet, so the log still begins where it did."""
    clock = FakeClock()
    config = small_config(tmp_path, disk_check_ratio=1e-9, retention_hours=1)
    store = open_store(config, clock=clock)
    bodies = fill(store, 100)
    store.flush()
    store.set_committed(LogIndex(70))
    clock.now_ms = 4_000_000_000_000
    assert store.retire(LogIndex(60), store.measure_room())

    abandon(store)
    store = open_store(config, clock=clock)

    assert bodies_of(store) == bodies
    store.close()


class _Removals(UnsyncedFs):
    """Notes what is synced and removed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sync(self, fd: int) -> None:
        self.calls.append("sync")

    def sync_dir(self, path: Path) -> None:
        self.calls.append("sync_dir")

    def unlink(self, path: Path) -> None:
        self.calls.append("unlink")
        super().unlink(path)

    def usage(self, path: Path) -> DiskUsage:
        self.calls.append("usage")
        return super().usage(path)


def test_a_segment_that_does_not_fit_is_not_called_a_full_disk() -> None:
    """A small disk is hardly used when the next segment, reserved in full length, has no room on it.

    The advice works for the directory there is, whose ``segment_bytes`` is fixed.
    """
    config = StoreConfig(segment_bytes=1024 * MIB, index_segment_bytes=160 * MIB)

    assert Room(0.004, 96 * MIB).refusal(config) == (
        "appends are refused: the next segment needs 1,184 MiB and the disk has 96 MiB left (0% used): free space, or "
        "enlarge the disk"
    )
    assert Room(0.95, 4096 * MIB).refusal(config) == "appends are refused: the disk is full (95% used)"
