"""The simulated world itself: its threads, its disk, and whether its checks notice anything."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from random import Random
from weakref import ReferenceType, ref

import pytest

from rocketstore.state.broker_state import BrokerState
from tests.sim_store import threads
from tests.sim_store.__main__ import run_one
from tests.sim_store.disk import Disk, Inode, SimFs
from tests.sim_store.options import Options
from tests.sim_store.simulation import Simulation
from tests.sim_store.substitutes import substitute
from tests.sim_store.threads import DeadlockError, Group, Lock, Scheduler
from tests.support.waiting import PATIENCE_S


def new_disk(root: Path, seed: int) -> tuple[Disk, SimFs]:
    """A disk, and a process's view of it."""
    disk = Disk(root / str(seed), Scheduler(Random(seed)), Random(seed))
    return disk, SimFs(disk, lambda: False)


def test_a_power_cut_keeps_what_was_synced_and_any_part_of_the_rest(tmp_path: Path) -> None:
    """A name is durable with its directory, bytes with their file; each sector of the rest is old or new."""
    found: set[bytes | None] = set()
    for seed in range(60):
        disk, fs = new_disk(tmp_path, seed)
        kept, late = disk.root / "kept", disk.root / "late"
        fd = fs.create(kept)
        fs.write(fd, b"a" * 1024, 0)
        fs.sync(fd)
        fs.sync_dir(disk.root)
        fs.write(fd, b"b" * 1024, 0)
        fs.close(fs.create(late))
        fs.close(fd)

        disk.cut_power()

        assert kept.read_bytes()[:512] in (b"a" * 512, b"b" * 512)
        found |= {kept.read_bytes(), late.read_bytes() if late.exists() else None}

    assert {b"a" * 1024, b"b" * 1024, b"a" * 512 + b"b" * 512, b"b" * 512 + b"a" * 512, b"", None} == found


def test_a_killed_process_loses_nothing_yet(tmp_path: Path) -> None:
    """What it had not synced is in the page cache, and goes with the next power cut."""
    left: set[bool] = set()
    for seed in range(20):
        disk, fs = new_disk(tmp_path, seed)
        path = disk.root / "late"
        fd = fs.create(path)
        fs.write(fd, b"x", 0)
        fs.close(fd)

        disk.kill()
        assert path.read_bytes() == b"x"
        disk.cut_power()

        left.add(path.exists() and path.read_bytes() == b"x")

    assert left == {False, True}


def test_a_failed_sync_may_forget_for_good(tmp_path: Path) -> None:
    """The kernel marks pages clean that it could not write: a later sync says yes, and the disk has nothing."""
    lost = 0
    for seed in range(20):
        disk, fs = new_disk(tmp_path, seed)
        path = disk.root / "file"
        fd = fs.create(path)
        fs.sync_dir(disk.root)
        fs.write(fd, b"x", 0)
        disk.fail_sync = 1.0
        with pytest.raises(OSError, match="input/output"):
            fs.sync(fd)
        disk.fail_sync = 0.0
        fs.sync(fd)
        fs.close(fd)

        disk.cut_power()

        lost += path.read_bytes() != b"x"

    assert 0 < lost < 20


def test_a_dead_groups_tasks_end_and_leave_their_locks() -> None:
    """Wherever they are."""
    scheduler = Scheduler(Random(1))
    with substitute(scheduler):
        lock, group, entered = Lock(), Group("process"), list[int]()

        def hold() -> None:
            with lock:
                entered.append(1)
                scheduler.sleep_us(10**9)
                entered.append(2)

        scheduler.spawn("holder", hold, group)
        scheduler.sleep_us(1000)
        assert lock.locked()

        scheduler.kill(group)

        assert entered == [1]
        assert group.tasks == []
        assert not lock.locked()


def test_a_dead_groups_files_are_closed_once(tmp_path: Path) -> None:
    """Thousands of worlds run in one process; what is left of a dead one closes nobody else's files."""
    disk, fs = new_disk(tmp_path, 1)
    group = Group("process", fs=fs)
    fd = fs.create(disk.root / "file")

    disk.scheduler.kill(group)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    again = os.open(disk.root / "file", os.O_RDONLY)
    assert again == fd
    fs.close(fd)
    os.close(again)


def test_a_world_that_is_over_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its memory and its descriptors: each had hundreds, and some dozens of worlds later none was left."""
    worlds: list[ReferenceType[Simulation]] = []
    begin, before = Simulation.__init__, set(threading.enumerate())

    def noted(self: Simulation, options: Options, root: Path, *, trace: bool = False) -> None:
        worlds.append(ref(self))
        begin(self, options, root, trace=trace)

    monkeypatch.setattr(Simulation, "__init__", noted)
    run_one(("plain", 3))
    for carrier in set(threading.enumerate()) - before:  # of its tasks, which have handed on, and are about to return
        carrier.join(PATIENCE_S)
    gc.collect()

    assert [world() for world in worlds] == [None]


def test_nobody_who_can_run_is_told() -> None:
    """Rather than to wait for ever."""
    scheduler = Scheduler(Random(1))
    with substitute(scheduler):
        lock = Lock()
        lock.acquire()

        with pytest.raises(DeadlockError):
            lock.acquire()


def test_it_notices_that_offsets_beyond_a_queue_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: what a careless change could do."""
    monkeypatch.setattr(BrokerState, "_check_places", lambda _self, _change: None)

    _, result = run_one(("plain", 0))

    assert "beyond" in (result.failure or "")


def test_it_notices_a_disk_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is durable, whatever the disk says: some crash must show it."""

    def lie(_disk: Disk, _path: Path, _inode: Inode) -> None:
        return

    monkeypatch.setattr(Disk, "sync", lie)

    failures = [run_one(("plain", seed))[1].failure for seed in (1, 2)]

    assert any(failures)
    assert threads._running == []
