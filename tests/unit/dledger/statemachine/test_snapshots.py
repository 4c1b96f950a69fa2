"""Snapshots on disk: what counts after a crash at any write, what is kept, and that nothing damaged is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crc32c import crc32c

from dledger.errors import DamagedSnapshotError, SnapshotBusyError, SnapshotFormatError
from dledger.statemachine import snapshots
from dledger.statemachine.snapshots import (
    META_FILE,
    PRODUCERS_FILE,
    STATE_FILE,
    SnapshotFile,
    SnapshotMeta,
    SnapshotStore,
    decode_meta,
    encode_meta,
)
from dledger.store.fs import FileSystem
from dledger.types import NO_INDEX, Boundary, ClusterMember, Configuration, LogIndex, NodeId, Position, Term
from tests.crash.crash_fs import NO_SPACE, FailingFs, RecordingFs, crash_states
from tests.unit.dledger.store.support import UnsyncedFs

STATE = bytes(range(256)) * 40
PRODUCERS = b"who appended"


def meta_of(index: int, files: dict[str, SnapshotFile]) -> SnapshotMeta:
    member = ClusterMember(NodeId("n0"), "h", 20911, uid=1 << 63)
    configuration = Configuration((member,), LogIndex(index - 1), Term(2), 1, 77)
    boundary = Boundary(LogIndex(index), Term(3), Position(index * 100), 0xDEADBEEF)
    return SnapshotMeta(boundary, configuration, 1_700_000_000_000, 1, files)


def write(store: SnapshotStore, index: int, state: bytes = STATE) -> SnapshotMeta:
    with store.build(LogIndex(index)) as builder:
        for start in range(0, len(state), 4000):
            builder.write(STATE_FILE, state[start : start + 4000])
        builder.write(PRODUCERS_FILE, PRODUCERS)
        meta = meta_of(index, dict(builder.files()))
        builder.commit(meta)
    return meta


def damage(store: SnapshotStore, index: int, name: str = STATE_FILE) -> None:
    path = store.directory / f"{index:020d}" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_was_written_is_read_and_counts_after_a_restart(tmp_path: Path) -> None:
    """S6: the newest snapshot, with everything that a log must know to begin after it."""
    meta = write(SnapshotStore(UnsyncedFs(), tmp_path), 500)

    store = SnapshotStore(UnsyncedFs(), tmp_path)

    assert store.newest == meta
    assert store.newest_index == store.needed_from == 500
    store.verify(meta)
    with store.reader(meta) as reader:
        assert reader.read_all() == STATE
    with store.reader(meta, PRODUCERS_FILE) as reader:
        assert reader.read_all() == PRODUCERS
    assert decode_meta(encode_meta(meta)) == meta


def test_all_that_a_sync_makes_durable_was_on_its_way_to_the_disk(tmp_path: Path) -> None:
    """S6: what is only in memory delays the log's own syncs."""
    begun: list[int] = []

    class Disk(UnsyncedFs):
        def begin_sync(self, fd: int, offset: int, length: int) -> None:
            super().begin_sync(fd, offset, length)
            begun.append(length)

        def sync(self, fd: int) -> None:
            assert sum(begun) == written
            super().sync(fd)

    written = len(STATE) + len(PRODUCERS)
    write(SnapshotStore(Disk(), tmp_path), 500)
    assert sum(begun) == written


def test_a_node_without_snapshots_has_no_directory_of_them(tmp_path: Path) -> None:
    """No cost without a machine."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)

    assert (store.newest, store.newest_index, store.needed_from) == (None, NO_INDEX, NO_INDEX)
    assert list(tmp_path.iterdir()) == []


def test_after_a_power_cut_at_any_write_whole_snapshots_only_are_there(tmp_path: Path) -> None:
    """S6: a third snapshot is written and the first one removed; every disk that can result has whole ones, the newest
    that was reported included.
    """
    source, fs = tmp_path / "source", RecordingFs()
    source.mkdir()
    store = SnapshotStore(fs, source)
    reported: list[tuple[int, int]] = []
    for index in (100, 200, 300):
        write(store, index)
        reported.append((len(fs.changes), index))
        store.prune()
    seen: set[bytes] = set()
    found: set[tuple[int, ...]] = set()
    for at in range(len(fs.changes) + 1):
        for state in crash_states(fs.changes, at):
            if state.content in seen:
                continue
            seen.add(state.content)
            target = tmp_path / f"crash-{len(seen)}"
            target.mkdir()
            state.write_to(source, target)
            after = SnapshotStore(FileSystem(), target)
            for meta in after.snapshots:
                after.verify(meta)
            promised = max((index for count, index in reported if count <= at), default=-1)
            assert after.newest_index >= promised, f"crash before change {at}, lost {state.lost}"
            found.add(tuple(meta.index for meta in after.snapshots))
    assert found >= {(), (100,), (200, 100), (300, 200)}, "the sweep met each stage"
    assert len(seen) > 40


class KilledError(BaseException):
    """The process ends here."""


class KilledFs(RecordingFs):
    """A process that is killed before so many more changes."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1 << 30

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        self._count()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def sync_dir(self, path: Path) -> None:
        self._count()
        super().sync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


def test_what_a_start_finds_after_a_kill_survives_a_power_cut(tmp_path: Path) -> None:
    """S6: a snapshot counts once it is found, and the log before it may go: a rename that is not durable yet is no
    snapshot.
    """
    found: set[int] = set()
    for kill in range(100):
        source, fs = tmp_path / f"source-{kill}", KilledFs()
        source.mkdir()
        write(SnapshotStore(fs, source), 100)
        store = SnapshotStore(fs, source)
        fs.left = kill
        try:
            write(store, 200)
        except KilledError:
            pass
        else:
            break
        fs.left = 1 << 30
        counted = SnapshotStore(fs, source).newest_index
        found.add(counted)
        for number, state in enumerate(crash_states(fs.changes, len(fs.changes), lost_max=8)):
            target = tmp_path / f"cut-{kill}-{number}"
            target.mkdir()
            state.write_to(source, target)
            assert SnapshotStore(FileSystem(), target).newest_index >= counted, f"killed before {kill}, {state.lost}"
    else:
        pytest.fail("the snapshot is never finished")
    assert found == {100, 200}


def test_a_snapshot_that_fails_to_be_written_leaves_no_trace(tmp_path: Path) -> None:
    """A full disk at any call: the older one still counts, and the next attempt succeeds."""
    failing = FailingFs()
    store = SnapshotStore(failing, tmp_path)
    write(store, 100)
    calls = 0
    while True:
        left = [calls]

        def fails(_call: str, _path: str, left: list[int] = left) -> int | None:
            left[0] -= 1
            return NO_SPACE if left[0] == -1 else None

        failing.fails = fails
        try:
            write(store, 200)
        except OSError:
            assert store.newest_index == 100
            assert SnapshotStore(UnsyncedFs(), tmp_path).newest_index == 100
        else:
            break
        calls += 1

    assert calls > 8
    assert store.newest_index == 200


def test_two_are_kept_and_one_being_read_as_well(tmp_path: Path) -> None:
    """S6, S7: a transfer that runs has its snapshot, and the entries after it, to the end."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    first = write(store, 100)
    with store.pinned() as pinned:
        for index in (200, 300, 400):
            write(store, index)
            store.prune()

        assert pinned == first
        assert [one.index for one in store.snapshots] == [400, 300, 100]
        assert store.needed_from == 100
        assert store.piece(first, STATE_FILE, 3, 5) == STATE[3:8]
    store.prune()

    assert [one.index for one in store.snapshots] == [400, 300]
    assert store.needed_from == 400
    assert len(list(store.directory.iterdir())) == 2


@pytest.mark.parametrize("name", [STATE_FILE, PRODUCERS_FILE])
@pytest.mark.parametrize("how", ["flipped", "short", "long", "gone"])
def test_no_damaged_file_is_read_to_its_end(tmp_path: Path, name: str, how: str) -> None:
    """Nothing unverified is served: the reader notices at the latest at the end."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    meta = write(store, 100)
    path = store.directory / f"{100:020d}" / name
    content = path.read_bytes()
    if how == "flipped":
        damage(store, 100, name)
    elif how == "short":
        path.write_bytes(content[:-1])
    elif how == "long":
        path.write_bytes(content + b"x")
    else:
        path.unlink()

    with pytest.raises(DamagedSnapshotError):
        store.verify(meta)


def test_a_damaged_one_is_moved_aside_and_the_previous_one_counts(tmp_path: Path) -> None:
    """S6; people find the files of the last two such in the directory."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    metas = {index: write(store, index) for index in (100, 200, 300, 400)}
    for index in (200, 300, 400):
        store.set_aside(metas[index], "a test")

    assert store.newest_index == SnapshotStore(UnsyncedFs(), tmp_path).newest_index == 100
    names = {path.name for path in store.directory.iterdir()}
    assert names == {f"{100:020d}", f"damaged-{300:020d}", f"damaged-{400:020d}"}
    assert (store.directory / f"damaged-{400:020d}" / STATE_FILE).read_bytes() == STATE


def test_a_damaged_description_is_moved_aside_at_the_start(tmp_path: Path) -> None:
    """What verifies a snapshot is verified first."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    write(store, 100)
    write(store, 200)
    damage(store, 200, META_FILE)

    again = SnapshotStore(UnsyncedFs(), tmp_path)

    assert again.newest_index == 100
    assert (again.directory / f"damaged-{200:020d}" / META_FILE).exists()


def test_a_snapshot_in_the_directory_of_another_one_does_not_count(tmp_path: Path) -> None:
    """Whatever has moved it: entries after the index in its name would be applied to another state."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    write(store, 100)
    (store.directory / f"{100:020d}").rename(store.directory / f"{200:020d}")

    again = SnapshotStore(UnsyncedFs(), tmp_path)

    assert again.newest is None
    assert (again.directory / f"damaged-{200:020d}" / META_FILE).exists()


def test_what_was_left_unfinished_is_removed_at_the_start(tmp_path: Path) -> None:
    """A killed process leaves no gigabytes behind."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    store.build(LogIndex(100)).write(STATE_FILE, STATE)

    again = SnapshotStore(UnsyncedFs(), tmp_path)

    assert again.newest is None
    assert list(again.directory.iterdir()) == []


def test_a_fetched_snapshot_counts_only_if_it_is_what_its_sender_has(tmp_path: Path) -> None:
    """S8: a transfer goes on where it broke off, and what arrived is checked before it counts."""
    meta = write(SnapshotStore(UnsyncedFs(), tmp_path / "sender"), 100)
    store = SnapshotStore(UnsyncedFs(), tmp_path / "receiver")
    builder = store.build(LogIndex(100))
    builder.write(STATE_FILE, STATE[:1000])
    assert builder.length(STATE_FILE) == 1000
    builder.write(STATE_FILE, STATE[1000:-1] + b"!")
    builder.write(PRODUCERS_FILE, PRODUCERS)
    with pytest.raises(DamagedSnapshotError):
        builder.commit(meta)
    assert store.newest is None

    write(store, 100)

    assert store.newest == meta


def test_one_at_a_time_and_only_newer_ones(tmp_path: Path) -> None:
    """The order of snapshots is that of their entries."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    write(store, 100)
    with pytest.raises(SnapshotBusyError):
        store.build(LogIndex(100))
    builder = store.build(LogIndex(200))
    with pytest.raises(SnapshotBusyError):
        store.build(LogIndex(300))
    builder.abort()
    builder.abort()

    assert write(store, 300).index == store.newest_index


def test_a_later_versions_snapshot_is_refused_by_name(tmp_path: Path) -> None:
    """S12: it is not damaged, so it must not be moved aside; the error says what to do."""
    store = SnapshotStore(UnsyncedFs(), tmp_path)
    meta = write(store, 100)
    found = json.loads(encode_meta(meta).partition(b"\n")[2])
    text = json.dumps({**found, "version": snapshots.META_FORMAT + 1}).encode()
    (store.directory / f"{100:020d}" / META_FILE).write_bytes(b"%08x\n" % crc32c(text) + text)

    with pytest.raises(SnapshotFormatError, match="run that version"):
        SnapshotStore(UnsyncedFs(), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1},
        {"files": {}},
        {"files": {STATE_FILE: {"length": -1, "crc32c": 0}}},
        {"position": "x"},
        {"term": None},
    ],
)
def test_a_malformed_description_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """It also comes over the wire, from a member that may be wrong."""
    meta = write(SnapshotStore(UnsyncedFs(), tmp_path), 100)
    found = json.loads(encode_meta(meta).partition(b"\n")[2])
    text = json.dumps({**found, **change}).encode()

    with pytest.raises(DamagedSnapshotError):
        decode_meta(b"%08x\n" % crc32c(text) + text)
