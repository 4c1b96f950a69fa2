"""Damaged and missing segments of an open log are replaced by what a peer has, and only by what was there before."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError, DiskFullError, LackingError, WrongBytesError
from dledger.store import quarantine
from dledger.store.file_store import FileStore
from dledger.store.format import CHANNEL_OFFSET
from dledger.store.fs import FileSystem
from dledger.store.mmap_file import MappedFile
from dledger.store.quarantine import QUARANTINED_MAX
from dledger.store.repair import Repaired, Scrub
from dledger.types import Boundary, LogIndex, Position, Term
from tests.unit.dledger.store.support import (
    SEGMENT_BYTES,
    TwoDisksFs,
    UnsyncedFs,
    abandon,
    bodies_of,
    fill,
    open_store,
    small_config,
    spoil,
)

ENTRIES = 150
COMMITTED = 145


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """This member: six segments, the last one being written."""
    made = _filled(open_store(small_config(tmp_path / "a")))
    yield made
    made.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[FileStore]:
    """Another member with the same log."""
    made = _filled(open_store(small_config(tmp_path / "b")))
    yield made
    made.close()


def _filled(store: FileStore) -> FileStore:
    fill(store, ENTRIES)
    store.flush()
    store.set_committed(LogIndex(COMMITTED))
    return store


@dataclass
class Source:
    """A peer's store as a source; ``change`` alters what it sends, ``before`` is told each position."""

    store: FileStore
    change: Callable[[int, bytes], bytes] = lambda _position, data: data
    asked: list[int] = field(default_factory=list)

    def __call__(self, position: int, length: int) -> bytes | None:
        self.asked.append(position)
        data = self.store.copy_committed(position, length)
        return None if data is None else self.change(position, data)


def path_of(store: FileStore, number: int) -> Path:
    """A segment's file."""
    return store.directory / "data" / f"{number * SEGMENT_BYTES:020d}"


def flip(store: FileStore, number: int, offset: int) -> None:
    """Turn a bit of a running store's segment."""
    with path_of(store, number).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def found(store: FileStore) -> list[tuple[str, int]]:
    """What one pass of the scrubber finds: file and offset."""
    return [(one.path.name, one.offset) for one in scrubbed(store.scrub())]


def scrubbed(scrub: Scrub) -> list[CorruptLogError]:
    """One pass."""
    met: list[CorruptLogError] = []
    while not (step := scrub.step(512)).finished:
        if step.damage is not None:
            met.append(step.damage)
    return met


def repair(store: FileStore, peer: FileStore, number: int) -> Repaired:
    """Repair one segment."""
    return store.segment_repair().repair(number * SEGMENT_BYTES, Source(peer))


def test_a_sound_log_is_scrubbed_without_a_finding(store: FileStore) -> None:
    """Whatever the step; blanks, segments, up to what is committed and flushed; again and again."""
    for size in (64, 700, 1 << 20):
        scrub, read, finished = store.scrub(), 0, 0
        while finished < 2:
            step = scrub.step(size)
            assert step.damage is None
            read, finished = read + step.read_bytes, finished + step.finished
        assert read >= 2 * store.committed_position


@pytest.mark.parametrize("number", [0, 2, 5], ids=["first", "middle", "last"])
@pytest.mark.parametrize("offset", [4, 36, 60], ids=["size", "chain", "body"])
def test_a_damaged_segment_is_found_and_repaired_under_the_readers(
    store: FileStore, peer: FileStore, number: int, offset: int
) -> None:
    """First, middle, and the one being written; the damaged bytes are kept, the log is what it was."""
    sound = bodies_of(store)
    flip(store, number, offset)
    damaged = path_of(store, number).read_bytes()
    assert found(store) == [(path_of(store, number).name, 0)]
    with pytest.raises(CorruptLogError):
        bodies_of(store)

    done = repair(store, peer, number)

    assert done.bases == (number * SEGMENT_BYTES,)
    assert done.quarantine == store.directory / "damaged-1" / "data"
    kept = (done.quarantine / path_of(store, number).name).read_bytes()
    assert kept == damaged[: len(kept)]
    assert len(kept) > offset
    assert found(store) == []
    assert bodies_of(store) == sound
    assert path_of(store, number).read_bytes() == path_of(peer, number).read_bytes()
    fill(store, 20)
    assert len(bodies_of(store)) == ENTRIES + 20


@pytest.mark.parametrize("sectors", [(0,), (3,), (7,), (0, 7)], ids=str)
@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_segment_with_unreadable_sectors_is_repaired(
    store: FileStore, peer: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, sectors: tuple[int, ...]
) -> None:
    """Wherever they are: at its head, in its middle, at its end. What is damaged is kept as a whole file."""
    sound = bodies_of(store)
    kept = path_of(store, number).read_bytes()
    for sector in sectors:
        spoil(monkeypatch, path_of(store, number), 512 * sector)
    assert [name for name, _ in found(store)] == [path_of(store, number).name]

    done = repair(store, peer, number)

    assert done.bases == (number * SEGMENT_BYTES,)
    assert done.quarantine is not None
    assert (done.quarantine / path_of(store, number).name).read_bytes() == kept
    assert found(store) == []
    assert bodies_of(store) == sound


def test_of_a_file_with_an_unreadable_sector_all_but_its_page_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is kept of damage is evidence: only what the disk does not give is missing in it."""
    path, size = tmp_path / "segment", 5 * 4096
    path.write_bytes(bytes(range(1, 256)) * 60 + bytes(size - 255 * 60))
    file = MappedFile(FileSystem(), path, 0, size, writable=True)
    spoil(monkeypatch, path, 4096 + 700)

    with (tmp_path / "kept").open("w+b") as kept:
        file.salvage(kept.fileno(), 3 * 4096)

    content = path.read_bytes()
    assert (tmp_path / "kept").read_bytes() == content[:4096] + bytes(4096) + content[8192 : 3 * 4096]
    assert not file.is_empty()


@pytest.mark.parametrize("number", [1, 3])
def test_an_unreadable_neighbour_keeps_no_segment_from_being_judged(
    store: FileStore, peer: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The head behind it proves a segment's end; where it cannot be read, the segment is judged by itself."""
    spoil(monkeypatch, path_of(store, number + 1), 0)
    assert store.segment_repair().find(number * SEGMENT_BYTES) is None
    flip(store, number, 60)

    done = repair(store, peer, number)

    assert done.bases == (number * SEGMENT_BYTES, (number + 1) * SEGMENT_BYTES)
    assert found(store) == []


def test_a_repaired_log_opens_again_as_it_was(store: FileStore, peer: FileStore, tmp_path: Path) -> None:
    """Nothing of the repair is only in memory."""
    sound = bodies_of(store)
    for number in (1, 3):
        flip(store, number, 100)
        repair(store, peer, number)
    store.close()

    again = open_store(small_config(tmp_path / "a", recovery_verify_bytes=1 << 30))

    assert bodies_of(again) == sound
    assert sorted(path.name for path in (tmp_path / "a" / "dledger-n0").glob("damaged-*")) == ["damaged-1", "damaged-2"]
    again.close()


def test_adjacent_damage_is_repaired_together(store: FileStore, peer: FileStore) -> None:
    """Neither end between them can be proven, but both outer ones can."""
    sound = bodies_of(store)
    for number in (1, 2, 3):
        flip(store, number, 36)

    done = repair(store, peer, 2)

    assert done.bases == (SEGMENT_BYTES, 2 * SEGMENT_BYTES, 3 * SEGMENT_BYTES)
    assert bodies_of(store) == sound


def test_adjacent_damage_on_two_disks_is_repaired_together(peer: FileStore, tmp_path: Path) -> None:
    """What is replaced is kept on the disk that it was on: nothing is renamed from one to another."""
    dirs = (tmp_path / "near", tmp_path / "far")
    store = _filled(open_store(small_config(tmp_path / "a", data_dirs=dirs), fs=TwoDisksFs("far")))
    sound = bodies_of(store)
    places = {path.name: path for one in dirs for path in one.glob("0*")}
    damaged = [places[f"{number * SEGMENT_BYTES:020d}"] for number in (1, 2, 5)]
    assert {path.parent for path in damaged[:2]} == set(dirs)
    for path in damaged:
        with path.open("r+b") as file:
            file.seek(36)
            file.write(b"\xff")

    done = repair(store, peer, 1)
    repair(store, peer, 5)

    assert done.bases == (SEGMENT_BYTES, 2 * SEGMENT_BYTES)
    assert bodies_of(store) == sound
    kept = {path.name: path for one in (store.directory, dirs[1]) for path in one.glob("damaged-*/data/0*")}
    assert {name: "far" in path.parts for name, path in kept.items()} == {
        path.name: "far" in path.parts for path in damaged
    }
    store.close()


@pytest.mark.parametrize("offsets", [(60, 60), (3000, 36), (36, 3000), (3000, 3000)])
def test_whatever_is_called_repaired_is(store: FileStore, peer: FileStore, offsets: tuple[int, int]) -> None:
    """Damage behind the first records of two segments: that the second one's head goes on says nothing of the rest."""
    for number, offset in zip((2, 3), offsets, strict=True):
        flip(store, number, offset % SEGMENT_BYTES)

    done = repair(store, peer, 3)

    assert 3 * SEGMENT_BYTES in done.bases
    assert found(store) == []


def test_the_first_record_of_the_next_segment_may_be_what_is_damaged(store: FileStore, peer: FileStore) -> None:
    """Its chain CRC is what proves the end of the segment before."""
    flip(store, 2, 60)
    flip(store, 3, 37)

    repair(store, peer, 2)

    assert found(store) == []


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_segment_that_contradicts_only_the_one_before_is_repaired(
    store: FileStore, peer: FileStore, number: int
) -> None:
    """Its first header's channel and term are covered by its own chain CRC alone: no record behind it shows them.

    What was damaged is kept, the sound neighbour is not: it stays as it is.
    """
    sound = bodies_of(store)
    flip(store, number, CHANNEL_OFFSET)
    assert found(store) == [(path_of(store, number).name, 0)]
    met = store.segment_repair().find(number * SEGMENT_BYTES)
    assert met is not None
    assert met.path == path_of(store, number)

    done = repair(store, peer, number)

    assert done.bases == (number * SEGMENT_BYTES,)
    assert done.quarantine is not None
    assert [path.name for path in done.quarantine.iterdir()] == [path_of(store, number).name]
    assert found(store) == []
    assert bodies_of(store) == sound
    assert path_of(store, number).read_bytes() == path_of(peer, number).read_bytes()


def test_what_a_peer_has_behind_its_last_record_is_not_taken_over(store: FileStore, peer: FileStore) -> None:
    """A blank's filler is under no checksum: a bit that turned in it would go from member to member."""
    sound = path_of(peer, 1).read_bytes()
    flip(peer, 1, SEGMENT_BYTES - 3)
    flip(store, 1, 60)

    repair(store, peer, 1)

    assert path_of(store, 1).read_bytes() == sound


def test_a_missing_segment_is_fetched(store: FileStore, peer: FileStore) -> None:
    """A file that somebody removed, or that a start found missing: nothing is put aside for it."""
    sound = bodies_of(store)
    path_of(store, 2).unlink()
    store._files.data._files.pop(2 * SEGMENT_BYTES)
    assert found(store) == [(path_of(store, 2).name, 0)]

    repair(store, peer, 2)

    assert bodies_of(store) == sound
    assert path_of(store, 2).read_bytes() == path_of(peer, 2).read_bytes()


def test_wrong_index_units_are_written_again_by_the_scrubber_and_by_a_repair(store: FileStore, peer: FileStore) -> None:
    """They are derived: nobody needs to be asked."""
    index = sorted((store.directory / "index").iterdir())[2]
    good = index.read_bytes()
    with index.open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 20)

    assert found(store) == []
    assert index.read_bytes() == good

    with index.open("r+b") as file:
        file.write(bytes(320))
    flip(store, 0, 60)
    repair(store, peer, 0)
    assert found(store) == []
    assert index.read_bytes() == good


@pytest.mark.parametrize("number", [1, 5])
def test_wrong_bytes_of_a_peer_change_nothing(store: FileStore, peer: FileStore, number: int) -> None:
    """A turned bit on its side, in the first header, too, its other history, too few bytes: none of it gets in."""
    flip(store, number, 60)
    before = {path: path.read_bytes() for path in (store.directory / "data").iterdir()}

    def turned(_position: int, data: bytes) -> bytes:
        return data[:200] + bytes([data[200] ^ 1]) + data[201:]

    def first_turned(position: int, data: bytes) -> bytes:
        """Only the entry before tells that this is wrong."""
        at = CHANNEL_OFFSET
        return data if position % SEGMENT_BYTES else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    for change in (turned, first_turned, lambda _position, data: data[:-1], lambda _position, data: bytes(len(data))):
        with pytest.raises(WrongBytesError):
            store.segment_repair().repair(number * SEGMENT_BYTES, Source(peer, change))

    assert {path: path.read_bytes() for path in (store.directory / "data").iterdir()} == before
    assert list(store.directory.glob("damaged-*")) == []


def test_another_history_of_a_peer_does_not_get_in(store: FileStore, tmp_path: Path) -> None:
    """It checks out by itself, but what follows here does not continue it."""
    other = open_store(small_config(tmp_path / "other"))
    fill(other, 30)
    other.append_as_leader(Term(1), [b"x" * 100])
    fill(other, ENTRIES)
    other.flush()
    other.set_committed(other.last.index)
    flip(store, 1, 60)

    with pytest.raises(WrongBytesError):
        store.segment_repair().repair(SEGMENT_BYTES, Source(other))
    other.close()


def test_another_end_of_a_peers_history_does_not_get_in(store: FileStore, tmp_path: Path) -> None:
    """Nothing follows the last segment here: it must end with the very entry that is committed, not just at it."""
    other = open_store(small_config(tmp_path / "other"))
    fill(other, 140)
    other.append_as_leader(Term(1), [b"x" * 100] * 10)
    other.flush()
    other.set_committed(LogIndex(COMMITTED))
    flip(store, 5, 60)
    before = path_of(store, 5).read_bytes()

    with pytest.raises(WrongBytesError, match="does not end with entry 145"):
        repair(store, other, 5)

    assert path_of(store, 5).read_bytes() == before
    other.close()


def test_a_peer_that_lacks_the_segment_says_so(store: FileStore, tmp_path: Path) -> None:
    """Retention there has removed it: the damage stays, and so does everything else."""
    later = open_store(small_config(tmp_path / "later"))
    later.reset(Boundary(LogIndex(120), Term(1), Position(5 * SEGMENT_BYTES), 1))
    flip(store, 1, 60)

    with pytest.raises(LackingError):
        store.segment_repair().repair(SEGMENT_BYTES, Source(later))

    assert found(store) == [(path_of(store, 1).name, 0)]
    later.close()


def test_a_full_disk_ends_a_repair_and_harms_nothing(peer: FileStore, tmp_path: Path) -> None:
    """The store goes on; the repair may be tried again."""

    class Full(UnsyncedFs):
        full = False

        def allocate(self, fd: int, length: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "no space")
            super().allocate(fd, length)

    fs = Full()
    store = _filled(open_store(small_config(tmp_path / "c"), fs))
    flip(store, 1, 60)
    fs.full = True

    with pytest.raises(DiskFullError):
        repair(store, peer, 1)

    assert not list((store.directory / "data").glob("*.tmp"))
    fs.full = False
    repair(store, peer, 1)
    assert found(store) == []
    store.close()


class _Crashing(UnsyncedFs):
    """Does so many changes and then no more."""

    left = 1 << 30

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "crash")

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        self._count()
        super().write(fd, data, offset)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


@pytest.mark.parametrize("number", [1, 5], ids=["cold", "being written"])
def test_a_crash_at_any_step_of_a_repair_leaves_the_damage_or_less(
    peer: FileStore, tmp_path: Path, number: int
) -> None:
    """The next attempt succeeds; a segment that is missing between two renames is for the next start to repair."""
    for steps in range(100):
        fs = _Crashing()
        store = _filled(open_store(small_config(tmp_path / f"crash-{steps}"), fs))
        sound = bodies_of(store)
        flip(store, number, 60)
        fs.left = steps
        with suppress(DiskError):
            repair(store, peer, number)
            fs.left += 1 << 30
        survived, fs.left = fs.left < 1 << 29, 1 << 30
        if path_of(store, number).exists():
            repair(store, peer, number)
            assert bodies_of(store) == sound
        else:
            assert number == 1
        abandon(store)
        if not survived:
            assert steps > 3
            return
    pytest.fail("it takes fewer steps")


class _Watching(UnsyncedFs):
    """Knows which files and names a power cut would take."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.unsynced: set[Path] = set()

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.paths[fd] = path
        return fd

    def open(self, path: Path, *, writable: bool = True) -> int:
        fd = super().open(path, writable=writable)
        self.paths[fd] = path
        return fd

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        super().write(fd, data, offset)
        self.unsynced.add(self.paths[fd])

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced.discard(self.paths[fd])

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self.unsynced.discard(path)

    def rename(self, source: Path, target: Path) -> None:
        assert source not in self.unsynced, "a file takes its place whole, or not at all"
        super().rename(source, target)
        self.unsynced |= {source.parent, target.parent}


@pytest.mark.parametrize("number", [1, 5], ids=["cold", "being written"])
def test_a_repair_that_has_ended_is_on_the_disk(peer: FileStore, tmp_path: Path, number: int) -> None:
    """What is mended counts as flushed: a power cut must not take it, nor leave a file that is mended in part."""
    fs = _Watching()
    store = _filled(open_store(small_config(tmp_path / "watched"), fs))
    flip(store, number, 60)
    fs.unsynced.clear()

    repair(store, peer, number)

    assert fs.unsynced == set()
    store.close()


def test_reads_go_on_while_a_segment_is_exchanged(store: FileStore, peer: FileStore) -> None:
    """Of the other segments all the time, and of this one from the moment it is there."""
    sound = bodies_of(store)
    flip(store, 1, 60)
    seen: list[int] = []

    def reading(_position: int, data: bytes) -> bytes:
        seen.append(len(store.read_range(LogIndex(60), LogIndex(120), 1 << 20)))
        return data

    store.segment_repair().repair(SEGMENT_BYTES, Source(peer, reading))

    assert seen
    assert set(seen) == {61}
    assert bodies_of(store) == sound


def test_nothing_is_done_to_a_sound_segment(store: FileStore, peer: FileStore) -> None:
    """A report that came late, after the repair."""
    source = Source(peer)

    assert store.segment_repair().repair(SEGMENT_BYTES, source) == Repaired((), None)
    assert source.asked == []


def test_what_is_kept_of_damage_is_bounded(store: FileStore, peer: FileStore, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that damages again and again does not fill itself with copies: the oldest go, and a line says so."""
    for _ in range(QUARANTINED_MAX + 3):
        flip(store, 1, 60)
        repair(store, peer, 1)

    kept = sorted(int(path.name.removeprefix("damaged-")) for path in store.directory.glob("damaged-*"))
    assert kept == list(range(4, QUARANTINED_MAX + 4))
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"removed {store.directory / f'damaged-{number}'}" for number in (1, 2, 3)
    ]
    assert found(store) == []


def test_large_evidence_makes_room_earlier_but_never_the_newest_nor_a_whole_log(
    store: FileStore, peer: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that a person set aside may hold what nobody else has any more."""
    monkeypatch.setattr(quarantine, "QUARANTINED_BYTES_MAX", 1)
    whole = store.directory / "damaged-1"
    for name in ("data", "index"):
        (whole / name).mkdir(parents=True)
    for _ in range(4):
        flip(store, 1, 60)
        repair(store, peer, 1)

    assert sorted(path.name for path in store.directory.glob("damaged-*")) == ["damaged-1", "damaged-4", "damaged-5"]


def test_a_log_that_begins_inside_a_segment_is_repaired_from_its_begin_on(tmp_path: Path) -> None:
    """As after INSTALL: what is before the begin is a blank."""
    stores = []
    for name in ("a", "b"):
        store = open_store(small_config(tmp_path / name))
        store.reset(Boundary(LogIndex(9), Term(1), Position(1480), 0x1234))
        stores.append(_filled(store))
    store, peer = stores
    flip(store, 0, 1480 + 60)

    repair(store, peer, 0)

    assert path_of(store, 0).read_bytes() == path_of(peer, 0).read_bytes()
    assert found(store) == []
    for one in stores:
        one.close()


def test_retention_goes_around_damage_that_nobody_can_repair(store: FileStore, tmp_path: Path) -> None:
    """The damaged segment goes with the next one, whose last entry proves where the log begins then."""
    flip(store, 1, 60)
    flip(store, 1, 26 * 148 + 36)  # of its last entry
    for number in range(6):
        path_of(store, number).touch()

    removable = [one.base for one in store._removable()]

    assert SEGMENT_BYTES not in removable
    assert 0 in removable
    assert 2 * SEGMENT_BYTES in removable
