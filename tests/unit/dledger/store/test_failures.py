"""Failing disks: what poisons the store for ever and what it recovers from without a restart."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dledger.config import StoreConfig
from dledger.errors import CorruptLogError, DiskError, DiskFullError, IndexBeforeBeginError, IndexOutOfRangeError
from dledger.store import reader
from dledger.store.durable_state import FileHardState, create_hard_state
from dledger.store.file_store import FileStore
from dledger.store.fs import DiskUsage, FileSystem
from dledger.store.inspect import BlankItem, RecordItem, inspect_data, segment_paths
from dledger.types import Boundary, HardState, LogIndex, NodeId, Position, Standing, Term
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.support.lacking import lacks, need_root
from tests.unit.dledger.store.support import UnsyncedFs, abandon, bodies_of, fill, open_store, small_config


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return small_config(tmp_path)


def test_a_failed_flush_poisons_and_is_never_retried(config: StoreConfig) -> None:
    """After one failed fdatasync pages may be marked clean without being written (ATC'20): nothing is acknowledged."""
    fs = FailingFs()
    store = open_store(config, fs)
    bodies = fill(store, 5)
    store.flush()
    fill(store, 5)
    fs.fails = lambda call, path: IO_ERROR if call == "sync" and "/data/" in path else None

    with pytest.raises(DiskError, match="flushing the log failed"):
        store.flush()
    fs.fails = lambda _call, _path: None
    fs.calls.clear()
    for _ in range(2):
        with pytest.raises(DiskError):
            store.flush()
        with pytest.raises(DiskError):
            store.append_as_leader(Term(1), [b"x"])
        with pytest.raises(DiskError):
            store.truncate(LogIndex(6))
        with pytest.raises(DiskError):
            store.sync_checkpoint()

    assert store.flushed.index == 4
    assert not fs.calls
    assert not store.warm()
    assert bodies_of(store)[:5] == bodies
    store.close()
    assert "sync" not in [call for call, _ in fs.calls]


@pytest.mark.parametrize("call", ["sync", "sync_dir", "write", "rename", "allocate", "unlink"])
def test_every_failing_call_is_reported_and_nothing_flushed_is_lost(config: StoreConfig, call: str) -> None:
    """Fail the k-th call of each kind for every k: the operation raises, and a restart has all that was flushed."""
    for nth in range(60):
        base = config.base_dir / f"{call}{nth}"
        fs = FailingFs()
        store = open_store(small_config(base), fs)
        left = [nth]

        def fails(name: str, _path: str, left: list[int] = left) -> int | None:
            left[0] -= name == call
            return IO_ERROR if name == call and left[0] == -1 else None

        fs.fails = fails
        flushed: list[bytes] = []
        try:
            for round_number in range(3):
                fill(store, 30)
                store.flush()
                flushed = bodies_of(store)
                store.sync_checkpoint()
                if round_number == 1:
                    flushed = flushed[:40]
                    store.truncate(LogIndex(40))
                store.warm()
            failed = False
        except DiskError:
            failed = True
        abandon(store)

        again = open_store(small_config(base))
        assert bodies_of(again)[: len(flushed)] == flushed
        again.close()
        if not failed:
            assert left[0] >= 0
            return
    raise AssertionError("the calls never ended")


def test_a_full_disk_refuses_appends_until_there_is_room(config: StoreConfig) -> None:
    """ENOSPC while creating a segment: DiskFullError, nothing written, reads go on, no restart needed (trap 10)."""
    fs = FailingFs()
    store = open_store(config, fs)
    bodies = fill(store, 20)
    full = [True]
    fs.fails = lambda call, _path: NO_SPACE if call == "allocate" and full[0] else None
    fs.disk = DiskUsage(100_000, 100, 99_900)

    with pytest.raises(DiskFullError, match="no space left"):
        store.append_as_leader(Term(1), [b"x" * 1000] * 3)
    with pytest.raises(DiskFullError):
        store.append_as_leader(Term(1), [b"small"])
    assert bodies_of(store) == bodies
    assert store.flush().index == 19
    store.clean(LogIndex(-1))
    assert _says_full(store)
    full[0] = False
    fs.disk = DiskUsage(100_000, 50_000, 50_000)
    store.clean(LogIndex(-1))
    assert not _says_full(store)
    bodies += fill(store, 30)
    store.close()

    store = open_store(config)
    assert bodies_of(store) == bodies
    store.close()


def test_a_batch_that_fails_half_way_leaves_nothing(config: StoreConfig) -> None:
    """ENOSPC in the second segment's write: what the first got is wiped, in memory and after a restart."""
    fs = FailingFs()
    store = open_store(config, fs)
    bodies = fill(store, 20)
    writes = [0]

    def fails(call: str, path: str) -> int | None:
        writes[0] += call == "write" and path.endswith("0004096")
        return NO_SPACE if call == "write" and path.endswith("0004096") and writes[0] == 1 else None

    fs.fails = fails
    with pytest.raises(DiskFullError):
        store.append_as_leader(Term(1), [b"y" * 500] * 4)
    assert (store.last.index, store.write_sequence) == (19, 4)
    store.flush()
    store.clean(LogIndex(-1))
    bodies += fill(store, 3)
    abandon(store)

    store = open_store(config)
    assert bodies_of(store) == bodies
    assert store.recovery_report.cut_at is None
    store.close()


def test_what_was_refused_for_want_of_room_does_not_come_back_after_a_power_cut(config: StoreConfig) -> None:
    """The zeros over what was written in part are durable before anybody is told that nothing was appended."""
    fs = FailingFs()
    store = open_store(config, fs)
    fill(store, 20)
    store.flush()
    fs.fails = lambda call, path: NO_SPACE if call == "write" and path.endswith("0004096") else None
    fs.calls.clear()

    with pytest.raises(DiskFullError) as refused:
        store.append_as_leader(Term(1), [b"y" * 500] * 4)

    assert refused.value.outcome == "unknown", "the zeros cannot be written either"
    fs.fails = lambda _call, _path: None
    store.clean(LogIndex(-1))
    fill(store, 1)
    fs.calls.clear()
    failed = [True]

    def once(call: str, path: str) -> int | None:
        strikes = failed[0] and call == "write" and path.endswith("0004096")
        failed[0] = failed[0] and not strikes
        return NO_SPACE if strikes else None

    fs.fails = once
    with pytest.raises(DiskFullError) as refused:
        store.append_as_leader(Term(1), [b"y" * 500] * 4)

    assert refused.value.outcome == "not_applied"
    wiped = {path for call, path in fs.calls if call == "write" and "/data/" in path}
    for path in wiped:
        changes = [call for call, at in fs.calls if at == path and call in ("write", "sync")]
        assert changes[-1] == "sync", path
    assert len(wiped) == 2
    abandon(store)


def test_a_thin_volume_that_is_full_is_a_full_disk_until_it_has_room(config: StoreConfig) -> None:
    """ENOSPC where room is reserved, for the zeros too: nothing is appended, and nothing of it comes back later."""
    fs = FailingFs()
    store = open_store(config, fs)
    bodies = fill(store, 20)
    store.flush()
    writes = [0]

    def fails(call: str, path: str) -> int | None:
        writes[0] += call == "write" and "/data/" in path
        return NO_SPACE if call == "write" and "/data/" in path and writes[0] > 1 else None

    fs.fails = fails
    with pytest.raises(DiskFullError, match="no space left") as left:
        store.append_as_leader(Term(1), [b"y" * 500] * 4)
    assert left.value.outcome == "unknown", "a crash now would bring back what the first segment got"
    store.clean(LogIndex(-1))  # the file system says that there is room
    with pytest.raises(DiskFullError, match="zeroing") as refused:
        fill(store, 1)
    assert refused.value.outcome == "not_applied"
    assert bodies_of(store) == bodies
    fs.fails = lambda _call, _path: None
    store.clean(LogIndex(-1))
    bodies += fill(store, 3)
    abandon(store)

    store = open_store(config)
    assert bodies_of(store) == bodies
    assert store.recovery_report.cut_at is None
    store.close()


def _write_in_part(store: FileStore, fs: FailingFs) -> None:
    """Have a batch refused of which the first segment's share lies behind the end: there is no room even for zeros."""
    writes = [0]

    def fails(call: str, path: str) -> int | None:
        writes[0] += call == "write" and "/data/" in path
        return NO_SPACE if call == "write" and "/data/" in path and writes[0] > 1 else None

    fs.fails = fails
    with pytest.raises(DiskFullError):
        store.append_as_leader(Term(1), [b"y" * 500] * 4)
    fs.fails = lambda _call, _path: None


def test_a_stop_with_something_left_to_wipe_is_not_a_clean_one(config: StoreConfig) -> None:
    """The next start looks at what is there: whatever it does not take for appended is gone from the files."""
    fs = FailingFs()
    store = open_store(config, fs)
    fill(store, 20)
    _write_in_part(store, fs)
    store.close()

    store = open_store(config)
    assert not store.recovery_report.clean_stop
    last = store.last.index
    store.close()
    items = list(inspect_data(segment_paths(store.directory / "data")))
    assert [item.header.index for item in items if isinstance(item, RecordItem)] == list(range(last + 1))


def test_a_reset_leaves_nothing_to_wipe(config: StoreConfig) -> None:
    """What was written in part went with its files: zeros over it would take the new log's first blank."""
    fs = FailingFs()
    store = open_store(config, fs)
    fill(store, 20)
    _write_in_part(store, fs)
    store.reset(Boundary(LogIndex(40), Term(1), Position(4096 + 3000), 7))
    store.clean(LogIndex(-1))
    bodies = fill(store, 3)
    store.close()

    items = list(inspect_data(segment_paths(store.directory / "data")))
    assert [(item.offset, item.length) for item in items if isinstance(item, BlankItem)] == [(0, 3000)]
    store = open_store(config)
    assert store.recovery_report.clean_stop
    assert bodies_of(store) == bodies
    store.close()


def test_a_flush_without_room_on_a_thin_volume_says_what_is_full(config: StoreConfig) -> None:
    """It stays final, as every failed flush, but tells that a restart without room will not help."""
    fs = FailingFs()
    store = open_store(config, fs)
    fill(store, 3)
    fs.fails = lambda call, path: NO_SPACE if call == "sync" and "/data/" in path else None

    with pytest.raises(DiskError, match=r"thin or copy-on-write volume underneath is full.*free space there"):
        store.flush()
    abandon(store)


def test_high_usage_refuses_appends_before_the_disk_is_full(config: StoreConfig) -> None:
    """Above disk_full_ratio the store says DISK_FULL; below it appends go on."""
    fs = FailingFs()
    store = open_store(small_config(config.base_dir, disk_full_ratio=0.9, disk_check_ratio=0.7), fs)
    fs.disk = DiskUsage(1000, 50, 950)
    store.clean(LogIndex(-1))
    with pytest.raises(DiskFullError):
        fill(store, 1)
    fs.disk = DiskUsage(1000, 500, 500)
    store.clean(LogIndex(-1))
    fill(store, 1)
    store.close()


def test_a_full_disk_takes_runs_that_need_no_new_file(tmp_path: Path) -> None:
    """A follower above disk_full_ratio stores what fits into its files, such as a new leader's first entry, no more."""
    leader = open_store(small_config(tmp_path / "leader"))
    bodies = fill(leader, 40)
    fs = FailingFs()
    follower = open_store(small_config(tmp_path / "follower", disk_full_ratio=0.9), fs)

    def replicate(index: int) -> None:
        run = leader.read_run(LogIndex(index), LogIndex(index))
        follower.append_run(follower.check_run(run), LogIndex(index))

    replicate(0)
    fs.disk = DiskUsage(1000, 50, 950)
    follower.clean(LogIndex(-1))
    assert _says_full(follower)
    fs.calls.clear()

    with suppress(DiskFullError):
        for index in range(1, 40):
            replicate(index)

    stored = bodies_of(follower)
    assert 1 < len(stored) < 40
    with pytest.raises(DiskFullError, match="appends resume once there is room"):
        replicate(len(stored))
    assert stored == bodies[: len(stored)]
    assert not [call for call, _path in fs.calls if call == "allocate"]
    with pytest.raises(DiskFullError):
        fill(follower, 1)
    leader.close()
    follower.close()


def test_no_room_is_taken_for_a_file_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserving more than the disk has left fails before it uses up the rest, for everybody on that disk."""
    fs = FileSystem()
    fd = fs.create(tmp_path / "file")
    fs.allocate(fd, 8192)
    reserved: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", lambda _fd, _offset, length: reserved.append(length))
    left = os.fstatvfs(fd)
    few = os.statvfs_result((*left[:1], 4096, left[2], 2, 2, *left[5:]))
    monkeypatch.setattr("os.fstatvfs", lambda _fd: few)

    with pytest.raises(OSError, match="No space left"):
        fs.allocate(fd, 8192 + 3 * 4096)
    assert not reserved
    fs.allocate(fd, 8192 + 2 * 4096)
    assert reserved == [16384]
    fs.close(fd)


def _says_full(store: FileStore) -> bool:
    return store.disk_full  # asked through a function, because a type checker thinks that it cannot change


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    need_root()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        lacks("mounting of file systems", done.stderr.decode())
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_really_full_disk(tiny_disk: Path) -> None:
    """On a real file system: DISK_FULL instead of SIGBUS, then on without a restart (trap 9, 10)."""
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(100 * 1024))
    store = open_store(small_config(tiny_disk, segment_bytes=16384, index_segment_bytes=1024), FileSystem())
    bodies: list[bytes] = []

    def fill_up() -> None:
        for _ in range(1000):
            bodies.extend(fill(store, 5))

    with pytest.raises(DiskFullError):
        fill_up()
    assert len(bodies) > 100
    assert bodies_of(store) == bodies
    store.flush()
    store.clean(LogIndex(-1))
    assert store.disk_full
    ballast.unlink()
    store.clean(LogIndex(-1))
    bodies += fill(store, 100)
    store.close()
    store = open_store(small_config(tiny_disk, segment_bytes=16384, index_segment_bytes=1024), FileSystem())
    assert bodies_of(store) == bodies
    store.close()


def test_a_failed_vote_is_never_spoken(tmp_path: Path) -> None:
    """A save that fails raises and goes on raising; the old state is what is loaded (trap 3)."""
    fs = FailingFs()
    create_hard_state(fs, tmp_path, HardState())
    saved = FileHardState(fs, tmp_path)
    saved.save(HardState(Term(1), NodeId("n1"), standing=Standing.FULL))
    fs.fails = lambda call, path: IO_ERROR if call == "sync" and path.endswith("hard_state") else None

    with pytest.raises(DiskError):
        saved.save(HardState(Term(2), None, standing=Standing.FULL))
    fs.fails = lambda _call, _path: None
    with pytest.raises(DiskError):
        saved.save(HardState(Term(2), None, standing=Standing.FULL))

    assert saved.load() == HardState(Term(1), NodeId("n1"), standing=Standing.FULL)
    saved.close()


def test_a_full_disk_does_not_stop_votes(tmp_path: Path) -> None:
    """Slots are preallocated; only the readable mirror is given up."""
    fs = FailingFs()
    create_hard_state(fs, tmp_path, HardState())
    saved = FileHardState(fs, tmp_path)
    fs.fails = lambda _call, path: NO_SPACE if "currterm" in path else None

    saved.save(HardState(Term(1), NodeId("n1"), standing=Standing.FULL))

    saved.close()
    again = FileHardState(UnsyncedFs(), tmp_path)
    assert again.load().term == 1
    again.close()


def test_a_rotten_record_is_found_when_read(config: StoreConfig) -> None:
    """Both CRCs are verified on every read; the error names file and offset."""
    store = open_store(config)
    fill(store, 40)
    path = config.base_dir / "dledger-n0" / "data" / "00000000000000004096"
    with path.open("r+b") as file:
        file.seek(148 * 2 + 100)
        file.write(b"!")

    with pytest.raises(CorruptLogError) as caught:
        store.read(LogIndex(29))
    assert (caught.value.path, caught.value.offset) == (path, 148 * 2)
    assert len(store.read_range(LogIndex(0), LogIndex(28), 1 << 20)) == 29
    store.close()


def test_readers_beside_writers_see_whole_entries_only(config: StoreConfig) -> None:
    """Lock-free reads while the tail is truncated and rewritten and old segments go: right bytes or a plain refusal."""
    store = open_store(small_config(config.base_dir, disk_check_ratio=1e-9, retention_hours=-1e6))
    fill(store, 200)
    wrong: list[tuple[int, bytes]] = []
    finished: list[bool] = []
    stop = threading.Event()

    def read_all() -> None:
        for index in range(store.begin.index + 1, store.last.index + 1):
            with suppress(IndexOutOfRangeError, IndexBeforeBeginError):
                body = store.read(LogIndex(index)).body
                if body.split(b"-")[0].split(b"/")[1] != b"%d" % index:
                    wrong.append((index, body))

    def read() -> None:
        while not stop.is_set():
            read_all()
            store.flush()
        finished.append(True)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for term in range(2, 60):
            store.truncate(LogIndex(store.last.index - 20))
            fill(store, 30, size=60 + term, term=term)
            store.warm()
            if term % 10 == 0:
                store.flush()
                store.set_committed(LogIndex(store.last.index - 100))
                store.clean(store.committed_index)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert finished == [True, True]
    assert store.begin.index > 0
    store.close()


def test_an_unreadable_sector_is_damage_that_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 5: old entries are read by ``pread``; through the mapping the process would end by SIGBUS."""
    store = open_store(small_config(tmp_path))
    bodies = fill(store, 60)
    position = store.read(LogIndex(3)).position
    fill(store, 1)

    def fail(_fd: int, _length: int, _offset: int) -> bytes:
        raise OSError(errno.EIO, "a bad sector")

    monkeypatch.setattr(os, "pread", fail)
    assert store.read(LogIndex(3)).body == bodies[3], "what is hot is read through the mapping"
    monkeypatch.setattr(reader, "HOT_BYTES", 4096)
    reads: list[Callable[[], object]] = [
        lambda: store.read(LogIndex(3)),
        lambda: store.read_at(position),
        lambda: store.read_run(LogIndex(1), LogIndex(3)),
        lambda: store.read_range(LogIndex(1), LogIndex(3), 1000),
        lambda: store.chain_crc_at(LogIndex(3)),
    ]

    for read in reads:
        with pytest.raises(CorruptLogError, match=f"{0:020}.*a bad sector"):
            read()

    assert store.read(LogIndex(59)).body == bodies[59]
    store.close()


def test_a_bad_sector_at_a_start_is_an_error_that_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the index leads to it or the whole log is read: a mapping is asked only for what was readable before."""
    store = open_store(small_config(tmp_path))
    fill(store, 60)
    bad = store._files.data.files()[-1].path
    abandon(store)
    read = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == str(bad):
            raise OSError(errno.EIO, "a bad sector")
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)

    with pytest.raises(DiskError, match=f"{bad}.*a bad sector"):
        open_store(small_config(tmp_path))


def test_a_cold_read_that_comes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pread`` may give less than it was asked for."""
    store = open_store(small_config(tmp_path))
    bodies = fill(store, 30)
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: plain(fd, min(length, 7), offset))
    monkeypatch.setattr(reader, "HOT_BYTES", 0)

    assert bodies_of(store) == bodies
    store.close()
