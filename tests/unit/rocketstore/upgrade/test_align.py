"""Properties of bringing the logs of a group's future members to the end of the master's."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import DiskError, DiskFullError
from dledger.store.fs import FileSystem
from rocketstore.state.rocketmq_files import CONSUMER_OFFSETS
from rocketstore.store.directory import (
    ABORT_FILE,
    CHECKPOINT_FILE,
    StoreCheckpoint,
    StoreCheckpointFile,
    StoreDirectory,
)
from rocketstore.upgrade.align import Alignment, align, plan, room_problems
from rocketstore.upgrade.compare import LogStanding, OldMember, compare, find_members
from tests.crash.crash_fs import NO_SPACE, FailingFs
from tests.support.sweeps import thin
from tests.unit.rocketstore.bench import bodies, fill, running, small_config, with_key
from tests.unit.rocketstore.upgrade.support import copied, cut, old_log, overwrite, record_offsets

COUNT = 250
FILE_BYTES = 16 * 1024


@pytest.fixture
def master(tmp_path: Path) -> Path:
    """A stopped broker with three log files and two queues."""
    with running(small_config(tmp_path / "a")) as store:
        fill(store, COUNT)
    return tmp_path / "a"


@pytest.fixture
def slave(master: Path, tmp_path: Path) -> Path:
    """One that stopped when it had the first hundred messages."""
    with running(small_config(tmp_path / "b")) as store:
        fill(store, 100)
    for path in sorted((tmp_path / "b" / "commitlog").iterdir()):
        size = old_log(tmp_path / "b").digest.files[int(path.name) // FILE_BYTES].length
        whole = (master / "commitlog" / path.name).read_bytes()
        path.write_bytes(whole[:size] + path.read_bytes()[size:])  # the master's times of storing
    return tmp_path / "b"


class Killed(BaseException):
    """The process ends here."""


class KillingFs(FileSystem):
    """Ends the process at one of its calls; a write is half done then."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _call(self) -> bool:
        self.left -= 1
        return self.left == 0

    def create(self, path: Path) -> int:
        if self._call():
            raise Killed
        return super().create(path)

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        if self._call():
            super().write(fd, data[: len(data) // 2], offset)
            raise Killed
        super().write(fd, data, offset)

    def rename(self, source: Path, target: Path) -> None:
        if self._call():
            raise Killed
        super().rename(source, target)

    def sync(self, _fd: int) -> None:
        if self._call():
            raise Killed

    def sync_dir(self, _path: Path) -> None:
        if self._call():
            raise Killed


def planned(roots: Sequence[Path], give_up: Collection[str] = ()) -> tuple[list[Alignment], list[str]]:
    """What is to be done to bring all to the first one's log."""
    logs = [old_log(root) for root in roots]
    return plan(find_members(roots, ()), compare(logs, logs[0]), logs[0], give_up)


def aligned(roots: Sequence[Path], give_up: Collection[str] = (), fs: FileSystem | None = None) -> list[Path]:
    """Do it; what was renamed."""
    steps, refused = planned(roots, give_up)
    assert refused == []
    fs, reference = fs or FileSystem(), old_log(roots[0])
    renamed = []
    for step in steps:
        directory = StoreDirectory(step.member.root, fs)
        try:
            renamed += align(step, directory, member(roots[0]), reference, fs)
        finally:
            directory.release()
    return renamed


def member(root: Path) -> OldMember:
    """A directory as a member."""
    return find_members([root], ())[0]


def standing(master: Path, other: Path) -> LogStanding:
    """How another log stands to the master's."""
    return compare([old_log(other)], old_log(master))[0].standing


def assert_serves_everything(root: Path) -> None:
    """Opened as a broker, all messages are in their queues and found by key, and new ones continue the queues."""
    with running(small_config(root)) as store:
        assert store.wait_dispatched(60)
        assert [bodies(store, queue) for queue in range(2)] == [list(range(queue, COUNT, 2)) for queue in range(2)]
        assert [with_key(store, number) for number in (0, 99, 100, COUNT - 1)] == [[0], [99], [100], [COUNT - 1]]
        fill(store, 2, first=COUNT)
        assert bodies(store, 0)[-1] == COUNT


def test_a_lagging_log_gets_the_missing_end(master: Path, slave: Path) -> None:
    """Afterwards the logs are equal byte for byte, and the member serves everything."""
    assert standing(master, slave) is LogStanding.BEHIND

    assert aligned([master, slave]) == []

    for path in (master / "commitlog").iterdir():
        assert (slave / "commitlog" / path.name).read_bytes() == path.read_bytes()
    assert (slave / ABORT_FILE).exists()
    assert_serves_everything(slave)


@pytest.mark.parametrize("left", [1, 67, 68, 69, 70, 71, 72, 73, 74, 150, COUNT - 1])
def test_wherever_it_ends(master: Path, left: int) -> None:
    """Within a file, at its last record, without a blank behind it, or after the first record of a file."""
    other = copied(master, "b")
    cut(other, record_offsets(master)[left], FILE_BYTES)

    aligned([master, other])

    assert standing(master, other) is LogStanding.EQUAL
    assert_serves_everything(other)


def test_what_was_torn_behind_the_end_is_overwritten(master: Path) -> None:
    """Half a record, and what a later file holds."""
    other = copied(master, "b")
    offset = record_offsets(master)[40]
    overwrite(other, offset + 120, b"\xff" * 3000, FILE_BYTES)
    for path in sorted((other / "commitlog").iterdir())[1:]:
        path.write_bytes(bytes(FILE_BYTES))
    (other / ABORT_FILE).touch()
    assert standing(master, other) is LogStanding.BEHIND

    aligned([master, other])

    for path in (master / "commitlog").iterdir():
        assert (other / "commitlog" / path.name).read_bytes() == path.read_bytes()
    assert_serves_everything(other)


def test_what_was_torn_behind_the_masters_end_goes(master: Path) -> None:
    """Also where nothing is written over it."""
    other = copied(master, "b")
    offsets = record_offsets(master)
    cut(other, offsets[-3], FILE_BYTES)
    overwrite(other, offsets[-1] + 1000, b"\xff" * 50, FILE_BYTES)
    (other / ABORT_FILE).touch()

    aligned([master, other])

    for path in (master / "commitlog").iterdir():
        assert (other / "commitlog" / path.name).read_bytes() == path.read_bytes()


def test_queues_that_know_of_more_than_the_log_had_are_built_anew(master: Path, slave: Path) -> None:
    """A log that lost its end, whose queues and checkpoint did not: nothing of what they held then remains."""
    with running(small_config(slave)) as store:
        fill(store, 30, first=1000, queues=1)
    cut(slave, record_offsets(master)[90], FILE_BYTES)

    aligned([master, slave])

    assert_serves_everything(slave)


def test_an_empty_member_gets_everything(master: Path, tmp_path: Path) -> None:
    """Log, queues, index, state, and how the master stopped; but not its number as master."""
    (tmp_path / "c").mkdir()
    (master / "config").mkdir(exist_ok=True)
    for name in ("haEpoch.json", "haMaster.json"):
        (master / "config" / name).write_text("{}")
    (master / "config" / "topics.json").write_text("{}")

    assert aligned([master, tmp_path / "c"]) == []

    names = sorted(path.relative_to(tmp_path / "c") for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert names == sorted(
        path.relative_to(master) for path in master.rglob("*") if path.is_file() and not path.name.startswith("ha")
    )
    assert not (tmp_path / "c" / ABORT_FILE).exists()
    (tmp_path / "c" / "config" / "topics.json").unlink()
    assert_serves_everything(tmp_path / "c")


def test_a_copy_of_what_was_not_cleanly_stopped_counts_as_such(master: Path, tmp_path: Path) -> None:
    """Its queues and index may lack what the log has: the first start looks, as it would at the master."""
    (tmp_path / "c").mkdir()
    (master / ABORT_FILE).touch()
    for path in (master / "consumequeue" / "T" / "1").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    StoreCheckpointFile(FileSystem(), master / CHECKPOINT_FILE).write(StoreCheckpoint())

    aligned([master, tmp_path / "c"])

    assert (tmp_path / "c" / ABORT_FILE).exists()
    assert_serves_everything(tmp_path / "c")


def test_a_member_with_nothing_left_of_idle_queues_continues_them(master: Path, tmp_path: Path) -> None:
    """Queues of which the log has nothing any more come along as files: their offsets do not begin again at 0."""
    (master / "commitlog" / f"{0:020d}").unlink()
    (tmp_path / "c").mkdir()

    aligned([master, tmp_path / "c"])

    with running(small_config(tmp_path / "c")) as store:
        assert store.max_offset("T", 0) == COUNT // 2


def test_a_discarded_log_is_kept_beside(master: Path, slave: Path) -> None:
    """Renamed, with its queues and checkpoint; a second time under another name."""
    overwrite(slave, record_offsets(slave)[5] + 150, b"!", FILE_BYTES)
    before = (slave / "commitlog" / f"{0:020d}").read_bytes()
    steps, refused = planned([master, slave])
    assert steps == []
    assert refused == [f"b: its log is damaged: to replace it by a's, name it with --discard {slave}"]

    renamed = aligned([master, slave], ["b"])

    assert {path.name for path in renamed} >= {"commitlog.discarded-1", "consumequeue.discarded-1"}
    assert (slave / "commitlog.discarded-1" / f"{0:020d}").read_bytes() == before
    overwrite(slave, record_offsets(slave)[5] + 150, b"!", FILE_BYTES)
    assert slave / "commitlog.discarded-2" in aligned([master, slave], ["b"])
    assert_serves_everything(slave)


def test_the_log_to_copy_from_cannot_be_discarded(master: Path, slave: Path) -> None:
    """It would be renamed, and nothing would be left to copy."""
    steps, refused = planned([master, slave], give_up={"a"})

    assert [step.member.name for step in steps] == ["b"]
    (said,) = refused
    assert said.startswith("a: ")
    assert "--master" in said


def test_a_log_that_shares_a_directory_with_another_cannot_be_discarded(
    master: Path, slave: Path, tmp_path: Path
) -> None:
    """Old files that several only read are the others', too: renaming them takes them from all."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (master / "commitlog" / f"{0:020d}").rename(shared / f"{0:020d}")
    members = [replace(one, log_dirs=(*one.log_dirs, shared)) for one in find_members([master, slave], ())]
    logs = [old_log(root) for root in (master, slave)]

    _, refused = plan(members, compare(logs, logs[0]), logs[0], {"b"})

    assert [f"{shared} holds files of a" in one for one in refused] == [True]


def test_a_log_that_differs_or_has_more_is_not_touched(master: Path, slave: Path, tmp_path: Path) -> None:
    """Unless it is named; the master is not continued from a slave either."""
    with running(small_config(tmp_path / "d")) as store:
        fill(store, 10, first=7)

    steps, refused = planned([slave, master, tmp_path / "d"])

    assert steps == []
    assert "a: has 150 messages that b lacks" in refused[0]
    assert "d: its log is not the begin of b's" in refused[1]
    assert [one.whole for one in planned([slave, master, tmp_path / "d"], ["a", "d"])[0]] == [True, True]


def test_a_log_that_ends_before_the_masters_begin_is_not_continued(master: Path, slave: Path) -> None:
    """There would be a gap."""
    cut(slave, record_offsets(master)[10], FILE_BYTES)
    (master / "commitlog" / f"{0:020d}").unlink()

    steps, refused = planned([master, slave])

    assert steps == []
    assert "what is between has expired" in refused[0]


def test_a_member_of_a_group_is_not_touched(master: Path, slave: Path) -> None:
    """Its new log's offsets follow from the old one's end."""
    (slave / "dledger-n1" / "data").mkdir(parents=True)
    (slave / "dledger-n1" / "data" / f"{FILE_BYTES:020d}").write_bytes(b"an entry")

    steps, refused = planned([master, slave], ["b"])

    assert steps == []
    assert "has begun as a member of a group" in refused[0]


@pytest.mark.parametrize("late", ["slave", "master", "empty"])
def test_older_messages_that_only_some_have_are_copied(master: Path, slave: Path, tmp_path: Path, late: str) -> None:
    """A member that begins later would not serve them; also to the master, and to an empty member from another."""
    if late == "empty":
        (tmp_path / "c").mkdir()
    roots = [master, slave] + ([tmp_path / "c"] if late == "empty" else [])
    shorter = slave if late == "slave" else master
    with running(small_config(shorter)):
        pass
    (shorter / "commitlog" / f"{0:020d}").unlink()
    steps, refused = planned(roots)
    assert refused == []
    assert [step.member.name for step in steps if step.older is not None] == {
        "slave": ["b"],
        "master": ["a"],
        "empty": ["a", "c"],
    }[late]

    aligned(roots)

    for root in roots:
        assert old_log(root).digest.min_offset == 0
        assert standing(master, root) is LogStanding.EQUAL
    for root in roots:
        assert_serves_everything(root)


def test_of_a_master_that_a_group_continues_only_the_old_log_is_copied(master: Path, tmp_path: Path) -> None:
    """Its queues and state know of the group's messages, which the new member does not have yet."""
    (tmp_path / "c").mkdir()
    (master / "dledger-n0" / "data").mkdir(parents=True)
    (master / "dledger-n0" / "data" / f"{1 << 20:020d}").write_bytes(b"an entry")

    aligned([master, tmp_path / "c"])

    assert {path.name for path in (tmp_path / "c").iterdir()} == {"commitlog", ABORT_FILE, "lock"}
    assert standing(master, tmp_path / "c") is LogStanding.EQUAL
    assert_serves_everything(tmp_path / "c")


def test_state_files_come_along_and_keep_a_backup(master: Path, slave: Path) -> None:
    """What the member had is the backup that RocketMQ and we read if the file is unreadable."""
    for root, offset in ((master, 9), (slave, 4)):
        (root / "config").mkdir(exist_ok=True)
        (root / "config" / CONSUMER_OFFSETS).write_text(f'{{"offsetTable":{{"T@g":{{0:{offset}}}}}}}')
    before = (slave / "config" / CONSUMER_OFFSETS).read_bytes()

    aligned([master, slave])

    assert (slave / "config" / CONSUMER_OFFSETS).read_bytes() == (master / "config" / CONSUMER_OFFSETS).read_bytes()
    assert (slave / "config" / f"{CONSUMER_OFFSETS}.bak").read_bytes() == before


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["behind", "empty", "late"])
def test_killed_at_any_call_it_can_be_repeated(master: Path, slave: Path, tmp_path: Path, kind: str) -> None:
    """What is there then is a part of the master's log without a gap; the repetition ends with all of it."""
    if kind != "behind":
        shutil.rmtree(slave)
        slave.mkdir()
    if kind == "late":  # what comes before the last file is copied
        aligned([master, slave])
        for path in sorted((slave / "commitlog").iterdir())[:-1]:
            path.unlink()
    at = 1
    while True:
        other = copied(slave, "c")
        try:
            aligned([master, other], fs=KillingFs(at))
        except Killed:
            at += 5 if thin() else 1
        else:
            break
        assert standing(master, other) in (LogStanding.BEHIND, LogStanding.EQUAL)
        assert old_log(other).digest.problems == ()
        aligned([master, other])
        assert standing(master, other) is LogStanding.EQUAL
        assert old_log(other).digest.min_offset == 0
        if at % 7 == 0:
            assert_serves_everything(other)
        shutil.rmtree(other)
    assert at > 10


def test_a_full_disk_is_an_error_and_leaves_the_begin(master: Path, slave: Path) -> None:
    """What was there is still there; a copy that is not what was copied is an error, too."""
    full = FailingFs(lambda call, path: NO_SPACE if call == "allocate" and "commitlog" in path else None)
    with pytest.raises(DiskFullError, match="make room and repeat it"):
        aligned([master, slave], fs=full)
    assert standing(master, slave) is LogStanding.BEHIND

    class Forgetful(FailingFs):
        def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
            super().write(fd, data if len(data) <= 8 else bytes(len(data)), offset)

    with pytest.raises(DiskError, match="does not contain what was copied"):
        aligned([master, slave], fs=Forgetful())


def test_room_is_looked_for_first(master: Path, slave: Path) -> None:
    """For whole files, and for what belongs to a whole log."""
    steps, _ = planned([master, slave])
    needed = FILE_BYTES * (len(list((master / "commitlog").iterdir())) - 1) + 64 * 1024 * 1024
    fs = FailingFs()
    assert room_problems(steps, member(master), old_log(master), fs) == [
        f"the disk of {slave / 'commitlog'} has 900,000 bytes left, and {needed:,} are needed"
    ]
    fs.disk = replace(fs.disk, available_bytes=1 << 40)
    assert room_problems(steps, member(master), old_log(master), fs) == []


def test_members_on_one_disk_need_room_together(master: Path, slave: Path, tmp_path: Path) -> None:
    """There is room for either of them, and not for both."""
    (tmp_path / "c").mkdir()
    steps, _ = planned([master, slave, tmp_path / "c"])
    fs, spare = FailingFs(), 64 * 1024 * 1024

    def needed(some: Sequence[Alignment]) -> int:
        fs.disk = replace(fs.disk, available_bytes=0)
        (said,) = room_problems(some, member(master), old_log(master), fs)
        return int(said.split(" and ")[-1].split()[0].replace(",", ""))

    alone = [needed([one]) for one in steps]
    assert len(alone) == 2
    assert needed(steps) == sum(alone) - spare
    fs.disk = replace(fs.disk, available_bytes=max(alone))
    assert [room_problems([one], member(master), old_log(master), fs) for one in steps] == [[], []]
    assert len(room_problems(steps, member(master), old_log(master), fs)) == 1
