"""Opening a damaged log that peers can complete: what is sound is kept, the rest put aside, the vote given up first."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dledger.errors import ConfigError, CorruptLogError, DiskFullError
from dledger.store.durable_state import read_hard_state
from dledger.store.file_store import FileStore
from dledger.store.fs import TMP_SUFFIX, FileSystem
from dledger.store.mmap_file import MappedFile
from dledger.store.quarantine import QUARANTINED_LOGS_MAX, QUARANTINED_MAX, make_quarantine_near
from dledger.types import HardState, LogIndex, NodeId, Standing, Term
from tests.unit.dledger.store.support import (
    SEGMENT_BYTES,
    FakeClock,
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
"""27 to a segment."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A voter's directory with six segments, stopped in order."""
    store = open_store(small_config(tmp_path))
    store.hard_state.save(HardState(Term(1), NodeId("n0"), Standing.FULL))
    fill(store, ENTRIES)
    store.flush()
    store.set_committed(LogIndex(140))
    store.close()
    return tmp_path / "dledger-n0"


def path_of(directory: Path, number: int) -> Path:
    """A segment's file."""
    return directory / "data" / f"{number * SEGMENT_BYTES:020d}"


def turn_bit(path: Path) -> None:
    """Damage the segment's sixth record."""
    content = bytearray(path.read_bytes())
    content[5 * 148 + 60] ^= 1
    path.write_bytes(bytes(content))


def mended(directory: Path, verify: int = 0, fs: FileSystem | None = None) -> FileStore:
    """Open it as a member of a group does; by default only what follows the mark is verified."""
    return FileStore.open(
        small_config(directory.parent, recovery_verify_bytes=verify),
        cluster_id="c",
        group="g",
        node_id="n0",
        clock=FakeClock(),
        fs=fs or UnsyncedFs(),
        mend=True,
    )


def ruin(path: Path, how: str) -> bytes:
    """Damage a file; gives what is left of it."""
    content = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
            return b""
        case "short":
            path.write_bytes(content[:1000])
        case "zeros":
            path.write_bytes(bytes(len(content)))
        case _:
            path.write_bytes(b"\xff" * 48 + content[48:])
    return path.read_bytes()


def test_what_a_repair_left_that_was_cut_keeps_no_member_from_starting(directory: Path) -> None:
    """The empty segment is made under the name of the left-over, which is then gone before it is removed.

    Whatever else is left over goes.
    """
    path = path_of(directory, 2)
    ruin(path, "head")
    for one in (path, path_of(directory, 7)):
        one.with_name(one.name + TMP_SUFFIX).write_bytes(b"half a segment")

    store = mended(directory)

    assert [one.path for one in store.damage_at_start] == [path]
    assert not list(path.parent.glob(f"*{TMP_SUFFIX}"))
    abandon(store)


@pytest.mark.parametrize("how", ["missing", "short", "head"])
@pytest.mark.parametrize("numbers", [(0,), (2,), (1, 2)], ids=str)
def test_a_damaged_segment_among_others_is_left_empty_and_everything_else_is_kept(
    directory: Path, how: str, numbers: tuple[int, ...]
) -> None:
    """The end, the vote and the standing are what they were; reads of the gap fail; it is told, at every start."""
    left = {number: ruin(path_of(directory, number), how) for number in numbers}

    for _ in range(2):
        store = mended(directory)
        assert store.last.index == ENTRIES - 1
        assert store.committed_index == 140
        assert store.hard_state.load().standing is Standing.FULL
        assert [one.path for one in store.damage_at_start] == [path_of(directory, number) for number in numbers]
        with pytest.raises(CorruptLogError):
            store.read(LogIndex(27 * numbers[0]))
        behind = LogIndex(27 * (numbers[-1] + 1) + 1)  # the second one: the first one's chain begins in the gap
        assert store.read(behind).index == behind
        assert len(path_of(directory, numbers[0]).read_bytes()) == SEGMENT_BYTES
        abandon(store)
    kept = {path.name: path.read_bytes() for path in directory.glob("damaged-*/data/*")}
    assert kept == {path_of(directory, number).name: content for number, content in left.items() if content}


@pytest.mark.parametrize("number", [1, 4, 5])
def test_damage_in_the_verified_end_cuts_the_log_before_it_and_takes_the_standing(directory: Path, number: int) -> None:
    """What is before it stays, what is from there on is put aside, whole; the member is as one with a new disk.

    It remembers that it is not, and why.
    """
    sound = {path: path.read_bytes() for path in (directory / "data").iterdir()}
    content = bytearray(path_of(directory, number).read_bytes())
    content[5 * 148 + 60] ^= 1
    path_of(directory, number).write_bytes(bytes(content))

    store = mended(directory, verify=1 << 30)

    expected = 27 * number + 4
    assert store.last.index == expected
    assert store.committed_index == min(140, expected)
    assert len(bodies_of(store)) == expected + 1
    state = read_hard_state(directory)
    assert (state.standing, state.lost, state.vote) == (Standing.BLANK, True, "n0")
    assert "its log was damaged" in state.doubt
    assert store.damage_at_start == ()
    kept = {path.name: path.read_bytes() for path in directory.glob("damaged-1/data/*")}
    assert set(kept) == {path_of(directory, one).name for one in range(number, 6)}
    assert (
        kept[path_of(directory, number).name]
        == bytes(content).rstrip(b"\0")[: len(kept[path_of(directory, number).name])]
    )
    for one in range(number + 1, 6):
        assert kept[path_of(directory, one).name] == sound[path_of(directory, one)]
    fill(store, 10)
    store.close()
    assert mended(directory, verify=1 << 30).last.index == expected + 10


def test_what_was_cut_off_is_for_a_person_to_remove(directory: Path) -> None:
    """It may have been acknowledged, and nothing proves that others hold it: no later repair takes it away."""
    content = bytearray(path_of(directory, 2).read_bytes())
    content[5 * 148 + 60] ^= 1
    path_of(directory, 2).write_bytes(bytes(content))
    mended(directory, verify=1 << 30).close()
    kept = sorted(directory.glob("damaged-1/**/*"))

    for _ in range(QUARANTINED_MAX + 1):
        make_quarantine_near(FileSystem(), directory, directory / "data")

    assert sorted(directory.glob("damaged-1/**/*")) == kept
    assert "its log was damaged" in (directory / "damaged-1" / "reason.txt").read_text()
    assert not (directory / "damaged-2").exists()


class _Crash(BaseException):
    """The process dies."""


class _Crashing(UnsyncedFs):
    """Dies before the given change of a name, counted from 1."""

    def __init__(self, at: int) -> None:
        self.left = at

    def rename(self, source: Path, target: Path) -> None:
        self.left -= 1
        if self.left == 0:
            raise _Crash
        super().rename(source, target)


@pytest.mark.parametrize("at", range(1, 5))
def test_a_crash_at_any_step_of_a_cut_leaves_what_was_cut_off_for_a_person(directory: Path, at: int) -> None:
    """Why it was cut off stands there before anything is moved: the next start finds nothing to tell it by."""
    turn_bit(path_of(directory, 2))
    sound = {path_of(directory, number).name: path_of(directory, number).read_bytes() for number in (3, 4, 5)}

    with pytest.raises(_Crash):
        mended(directory, verify=1 << 30, fs=_Crashing(at))
    mended(directory, verify=1 << 30).close()
    for _ in range(QUARANTINED_MAX + 1):
        make_quarantine_near(FileSystem(), directory, directory / "data")

    kept = {path.name: path.read_bytes() for path in directory.glob("damaged-*/data/*")}
    assert kept.items() >= sound.items()


def test_starts_that_find_no_room_for_a_cut_remove_nothing_and_do_not_count_as_logs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortened last segment is moved first; then there is no room for a copy of the damaged one, at each start."""
    turn_bit(path_of(directory, 3))
    left = ruin(path_of(directory, 5), "short")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(MappedFile, "salvage", full)
        for _ in range(QUARANTINED_MAX + 2):
            with pytest.raises(DiskFullError):
                mended(directory, verify=1 << 30)
    mended(directory, verify=1 << 30).close()

    assert [path.read_bytes() for path in directory.glob(f"damaged-*/data/{path_of(directory, 5).name}")] == [left]


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, Path]:
    """Data directories on two disks, of which ``TwoDisksFs("far")`` knows."""
    return tmp_path / "near", tmp_path / "far"


def mended_of(base: Path, *data_dirs: Path) -> FileStore:
    """Open a log that lies in ``data_dirs``, verified as a whole, as a member of a group does."""
    config = small_config(base, recovery_verify_bytes=1 << 30, data_dirs=data_dirs)
    clock, fs = FakeClock(), TwoDisksFs("far")
    return FileStore.open(config, cluster_id="c", group="g", node_id="n0", clock=clock, fs=fs, mend=True)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_cut_off_on_two_disks_is_put_aside_on_each(
    tmp_path: Path, dirs: tuple[Path, Path], number: int
) -> None:
    """Nothing is renamed from one disk to another; on both it is for a person to remove."""
    store = mended_of(tmp_path, *dirs)
    store.hard_state.save(HardState(Term(1), NodeId("n0"), Standing.FULL))
    fill(store, ENTRIES)
    store.close()
    places = {path.name: path for one in dirs for path in one.glob("0*")}
    assert {path.parent for path in places.values()} == set(dirs)
    sound = {f"{one * SEGMENT_BYTES:020d}" for one in range(number + 1, 6)}
    contents = {name: places[name].read_bytes() for name in sound}
    turn_bit(places[f"{number * SEGMENT_BYTES:020d}"])

    store = mended_of(tmp_path, *dirs)

    assert store.last.index == 27 * number + 4
    kept = {path.name: path for path in tmp_path.glob("*/damaged-1/data/0*")}
    assert {name: kept[name].read_bytes() for name in sound} == contents
    assert all(("far" in path.parts) == ("far" in places[name].parts) for name, path in kept.items())
    assert all((path.parents[1] / "reason.txt").exists() for path in kept.values())
    store.close()


def test_no_more_logs_are_put_aside_on_another_disk_than_people_have_looked_at(tmp_path: Path) -> None:
    """Each may hold what nobody else has any more: beyond a number the start is refused, and nothing is changed."""
    far = tmp_path / "far"
    for number in range(QUARANTINED_LOGS_MAX + 1):
        store = mended_of(tmp_path, far)
        assert len(list(far.glob("damaged-*"))) == number
        store.hard_state.save(HardState(Term(1), NodeId("n0"), Standing.FULL))
        fill(store, 60)
        store.flush()
        store.close()
        turn_bit(sorted(far.glob("0*"))[-2])
    before = {path: path.read_bytes() for path in far.rglob("0*")}

    with pytest.raises(ConfigError, match=r"far holds 8 logs set aside earlier"):
        mended_of(tmp_path, far)

    assert {path: path.read_bytes() for path in far.rglob("0*")} == before
    assert read_hard_state(tmp_path / "dledger-n0").standing is Standing.FULL


@pytest.mark.parametrize("sector", [0, 3, 7])
@pytest.mark.parametrize("how", ["head", ""])
def test_a_damaged_segment_with_an_unreadable_sector_is_left_empty(
    directory: Path, monkeypatch: pytest.MonkeyPatch, sector: int, how: str
) -> None:
    """What cannot be read is no reason not to start: a peer has it. An unreadable head alone is damage, too."""
    path = path_of(directory, 2)
    content = ruin(path, how) if how else path.read_bytes()
    spoil(monkeypatch, path, 512 * sector)

    store = mended(directory)

    assert store.last.index == ENTRIES - 1
    assert [one.path for one in store.damage_at_start] == [path] * (bool(how) or not sector)
    abandon(store)
    if how or not sector:
        assert [kept.read_bytes() for kept in directory.glob("damaged-1/data/*")] == [content]


@pytest.mark.parametrize("sector", [1, 7])
def test_an_unreadable_sector_in_what_is_cut_off_is_put_aside_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, sector: int
) -> None:
    """A whole segment behind the damage is moved, not read."""
    content = bytearray(path_of(directory, 3).read_bytes())
    content[5 * 148 + 60] ^= 1
    path_of(directory, 3).write_bytes(bytes(content))
    behind = path_of(directory, 4).read_bytes()
    spoil(monkeypatch, path_of(directory, 4), 512 * sector)

    store = mended(directory, verify=1 << 30)

    assert store.last.index == 27 * 3 + 4
    assert (directory / "damaged-1" / "data" / path_of(directory, 4).name).read_bytes() == behind
    store.close()


@pytest.mark.parametrize("how", ["missing", "short", "zeros", "head"])
def test_a_ruined_last_segment_is_cut_off(directory: Path, how: str) -> None:
    """The log ends with the segment before."""
    ruin(path_of(directory, 5), how)

    store = mended(directory, verify=1 << 30)

    assert store.last.index == 27 * 5 - 1
    assert store.hard_state.load().standing is Standing.BLANK
    store.close()


def test_unreadable_term_and_vote_leave_a_member_in_doubt_with_its_log(directory: Path) -> None:
    """The log is sound: nothing of it needs to be fetched."""
    (directory / "hard_state").write_bytes(bytes(8192))

    store = mended(directory)

    assert store.last.index == ENTRIES - 1
    assert store.hard_state.load().standing is Standing.DOUBTFUL
    assert (directory / "damaged-1" / "data" / "hard_state").exists()
    store.close()


def test_without_mend_it_is_refused_with_file_offset_and_advice(directory: Path) -> None:
    """A group of one, or who has switched it off: nothing is changed."""
    ruin(path_of(directory, 2), "missing")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}

    with pytest.raises(CorruptLogError, match=r"missing.*--repair"):
        open_store(small_config(directory.parent))

    assert {path: path.read_bytes() for path in before} == before


def test_a_log_that_lacks_the_entry_at_the_mark_is_refused(directory: Path, tmp_path: Path) -> None:
    """It checks out by itself, and is not the one that was flushed here: nothing of it may be kept as committed."""
    (tmp_path / "other").mkdir()
    other = open_store(small_config(tmp_path / "other"))
    fill(other, ENTRIES - 10)
    other.append_as_leader(Term(1), [b"x" * 100] * 10)
    other.close()
    for name in ("data", "index"):
        for path in (tmp_path / "other" / "dledger-n0" / name).iterdir():
            (directory / name / path.name).write_bytes(path.read_bytes())

    with pytest.raises(CorruptLogError, match="entry 149 is not the one that was flushed"):
        mended(directory)


def test_the_segment_of_the_mark_is_never_left_empty(directory: Path) -> None:
    """Its head is damaged and its end, which was flushed, is sound: neither a gap nor a cut may take that."""
    left = ruin(path_of(directory, 5), "head")

    with pytest.raises(CorruptLogError, match="does not start with a valid record"):
        mended(directory)

    assert path_of(directory, 5).read_bytes() == left


def test_what_nothing_proves_is_refused(directory: Path) -> None:
    """Without a checkpoint nobody knows what was durable: the caller may set all of it aside."""
    (directory / "checkpoint").write_bytes(bytes(100))

    with pytest.raises(CorruptLogError, match="checkpoint"):
        mended(directory)
