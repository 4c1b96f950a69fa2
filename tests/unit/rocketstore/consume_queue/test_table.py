"""All consume queues: grouping, directories, replays, removal."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from dledger.errors import DiskError, DiskFullError, InvalidRequestError
from rocketstore.consume_queue import table as table_module
from rocketstore.consume_queue.files import FILLER, QueueRecovery
from rocketstore.consume_queue.queue import FOREVER, ConsumeQueue
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.types import RecordHead
from tests.crash.crash_fs import IO_ERROR, FailingFs, OpeningFs
from tests.unit.rocketstore.heads import head

FILE_BYTES = 100


def opened(directory: Path, limit: int = FOREVER) -> ConsumeQueueTable:
    table = ConsumeQueueTable(directory, FILE_BYTES)
    table.load()
    table.recover(limit)
    return table


def log(count: int) -> list[RecordHead]:
    """Records of two topics with three queues each, in turn; every tenth is rolled back and has no place."""
    following: dict[tuple[str, int], int] = {}
    records = []
    for number in range(count):
        topic, queue_id = "AB"[number % 2], number % 3
        place = -1 if number % 10 == 9 else following.get((topic, queue_id), 0)
        if place >= 0:
            following[topic, queue_id] = place + 1
        records.append(head(place, number * 100, topic=topic, queue_id=queue_id))
    return records


def content(table: ConsumeQueueTable) -> dict[tuple[str, int], list[int]]:
    return {
        (queue.topic, queue.queue_id): [
            unit.offset
            for number in range(queue.min_offset, queue.max_offset)
            for unit in queue.units(number, 1)
            if unit != FILLER
        ]
        for queue in table.all()
    }


def model(records: list[RecordHead]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for record in records:
        if record.queue_offset >= 0:
            found.setdefault((record.topic, record.queue_id), []).append(record.offset)
    return found


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_records_go_to_their_queues(tmp_path: Path, batch: int) -> None:
    table = opened(tmp_path)
    records = log(100)
    for start in range(0, 100, batch):
        table.append(records[start : start + batch])
    assert content(table) == model(records)
    assert table.next_offsets() == {key: len(offsets) for key, offsets in model(records).items()}
    assert table.max_physical_offset == 9900


@pytest.mark.parametrize("start", [0, 13, 50, 99])
def test_a_replay_after_a_restart_changes_nothing(tmp_path: Path, start: int) -> None:
    records = log(100)
    opened(tmp_path).append(records)
    table = ConsumeQueueTable(tmp_path, FILE_BYTES)
    table.load()
    assert table.recover() == QueueRecovery(9900, None, ())
    table.append(records[start:])
    assert content(table) == model(records)


def test_an_empty_table(tmp_path: Path) -> None:
    table = opened(tmp_path / "new" / "consumequeue")
    assert (table.max_physical_offset, table.all()) == (-1, [])
    assert table.find("A", 0) is None
    table.append([])
    table.flush()


def test_the_file_size_is_rounded_up_to_whole_units(tmp_path: Path) -> None:
    assert ConsumeQueueTable(tmp_path, 6_000_001).file_bytes == 6_000_020


def test_a_queue_that_is_only_looked_up_leaves_no_trace(tmp_path: Path) -> None:
    table = opened(tmp_path)
    queue = table.find_or_create("A", 3)
    assert table.find("A", 3) is queue
    assert table.find_or_create("A", 3) is queue
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("topic", "queue_id"),
    [("..", 0), (".", 0), ("", 0), ("a/b", 0), ("/tmp/x", 0), ("a\0", 0), ("x" * 128, 0), ("A", -1), ("A", 1 << 31)],
)
def test_names_that_are_no_directory_are_refused(tmp_path: Path, topic: str, queue_id: int) -> None:
    table = opened(tmp_path / "q")
    with pytest.raises(InvalidRequestError):
        table.find_or_create(topic, queue_id)
    table.append([head(0, 0, topic=topic, queue_id=queue_id), head(0, 100, topic="Good")])
    table.append([head(1, 200, topic=topic, queue_id=queue_id)])
    assert content(table) == {("Good", 0): [100]}
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["q", "Good", "0"]


def test_what_is_no_queue_is_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).append([head(0, topic="%RETRY%g|x_-1")])
    for name in ("a.b", "A/x", "A/-1", "A/01", "A/99999999999"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "A" / "notes.txt").write_text("mine")
    table = opened(tmp_path)
    assert [(queue.topic, queue.queue_id) for queue in table.all()] == [("%RETRY%g|x_-1", 0)]
    assert (tmp_path / "A" / "01").is_dir()


def test_damage_says_from_where_to_replay(tmp_path: Path) -> None:
    records = log(100)
    opened(tmp_path).append(records)
    (tmp_path / "A" / "0" / f"{100:020d}").unlink()
    last = max((tmp_path / "B" / "1").iterdir())
    last.write_bytes(b"\xff" * FILE_BYTES)
    table = ConsumeQueueTable(tmp_path, FILE_BYTES)
    table.load()
    result = table.recover()
    assert result.max_physical_offset == 9900
    assert result.replay_from == model(records)["A", 0][4] + 100
    assert len(result.repairs) == 3  # two later files of one queue, the end of the other
    table.append([one for one in records if one.offset >= (result.replay_from or 0)])
    assert content(table) == model(records)


@pytest.mark.parametrize("limit", [0, 100, 5000, 9850, 9900, 10_000])
def test_a_cut_reaches_every_queue(tmp_path: Path, limit: int) -> None:
    records = log(100)
    opened(tmp_path).append(records)
    table = opened(tmp_path, limit)
    kept = model([one for one in records if one.offset + 100 <= limit])
    assert {key: offsets for key, offsets in content(table).items() if offsets} == kept
    table.append(records)
    assert content(table) == model(records)


def test_min_offsets_follow_the_log(tmp_path: Path) -> None:
    table = opened(tmp_path)
    records = log(100)
    table.append(records)
    table.correct_min_offsets(5000)
    assert content(table) == model([one for one in records if one.offset >= 5000] + []) | {
        key: [offset for offset in offsets if offset >= 5000] for key, offsets in model(records).items()
    }


def test_a_removal_that_cannot_be_made_durable_is_told_with_the_directory(tmp_path: Path) -> None:
    fs = FailingFs(lambda call, path: IO_ERROR if (call, path) == ("sync_dir", str(tmp_path)) else None)
    table = ConsumeQueueTable(tmp_path, FILE_BYTES)
    table.append(log(10))
    table.flush()
    table.close()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs=fs)
    table.load()
    table.recover(FOREVER)

    with pytest.raises(DiskError, match=f"cannot remove queues from {tmp_path}"):
        table.delete_topic("A")


def test_a_deleted_topic_is_gone_and_may_come_back(tmp_path: Path) -> None:
    table = opened(tmp_path)
    table.append(log(100))
    table.delete_topic("A")
    assert {queue.topic for queue in table.all()} == {"B"}
    assert [path.name for path in tmp_path.iterdir()] == ["B"]
    table.append([head(40, 20_000, topic="A")])
    assert content(table)["A", 0] == [20_000]
    for name in ("none", "A", "B"):
        table.delete_topic(name)
    assert not list(tmp_path.iterdir())


def test_a_queue_that_cannot_be_flushed_is_an_error(tmp_path: Path) -> None:
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append(log(30))
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None
    with pytest.raises(DiskError):
        table.flush(0)


def test_many_queues_are_small_on_disk(tmp_path: Path) -> None:
    table = ConsumeQueueTable(tmp_path, 6_000_000)
    table.load()
    table.append([head(0, number * 100, topic=f"T{number}") for number in range(50)])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.stat().st_size for path in files} == {6_000_000}
    assert sum(path.stat().st_blocks * 512 for path in files) <= 50 * 16_384
    table.close()


def test_readers_see_whole_units_while_the_queue_grows_and_shrinks(tmp_path: Path) -> None:
    table = opened(tmp_path)
    queue = table.find_or_create("T", 0)
    stop = threading.Event()
    problems: list[str] = []

    def read() -> None:
        while not stop.is_set():
            first, end = queue.min_offset, queue.max_offset
            for start in range(first, end, 3):
                units = queue.units(start, 3)
                problems.extend(f"{start}: {one}" for k, one in enumerate(units) if one != ((start + k) * 100, 100, 7))

    readers = [threading.Thread(target=read, name=f"reader{number}") for number in range(2)]
    for reader in readers:
        reader.start()
    for number in range(0, 600, 3):
        table.append([head(number + k) for k in range(3)])
        if number % 30 == 0:
            queue.delete_expired(number * 100 - 2000)
            queue.correct_min_offset(number * 100 - 2000)
    stop.set()
    for reader in readers:
        reader.join()
    assert problems == []


def test_a_topic_may_be_deleted_while_it_grows(tmp_path: Path) -> None:
    table = opened(tmp_path)
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            table.delete_topic("T")

    deleter = threading.Thread(target=delete, name="deleter")
    deleter.start()
    try:
        for number in range(300):
            table.append([head(number)])
    finally:
        done.set()
        deleter.join()
    table.append([head(300)])
    assert content(table)["T", 0][-1] == 30_000


def test_a_queue_that_cannot_be_flushed_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append(log(30))
    fs.fails = lambda call, path: IO_ERROR if call == "sync" and "/A/" in path else None
    fs.calls.clear()
    with pytest.raises(DiskError):
        table.flush(0)
    assert {path.split("/")[-2] for call, path in fs.calls if call == "sync" and "/B/" in path} == {"0", "1", "2"}


def test_directories_above_many_new_queues_are_synced_once(tmp_path: Path) -> None:
    """Not once per queue: a topic's, and that of all topics; and again for what is made later."""
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path / "queues", FILE_BYTES, fs)
    table.load()
    table.append([head(0, number * 100, topic="AB"[number % 2], queue_id=number) for number in range(20)])
    fs.calls.clear()

    table.flush()
    table.append([head(0, 2000, topic="A", queue_id=20)])
    table.flush()

    synced = [Path(path).relative_to(tmp_path) for call, path in fs.calls if call == "sync_dir"]
    above = [str(path) for path in synced if len(path.parts) < 3]
    assert sorted(above) == ["queues", "queues", "queues/A", "queues/A", "queues/B"]
    assert len(synced) - len(above) == 21


def test_only_queues_that_were_written_to_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten thousand queues a few dozen change between two checkpoints."""
    table = opened(tmp_path)
    table.append([head(0, number * 100, queue_id=number) for number in range(20)])
    table.flush()
    flushed: list[int] = []
    monkeypatch.setattr(ConsumeQueue, "flush", lambda queue, _pages: flushed.append(queue.queue_id))

    table.append([head(1, 2000, queue_id=7)])
    table.flush(2)
    table.flush()
    table.flush()

    assert flushed == [7, 7]


def test_many_queues_are_made_durable_together(tmp_path: Path) -> None:
    """One after the other ten thousand take a minute, most of which the disk is idle."""

    class TogetherFs(FailingFs):
        together = threading.Barrier(4)
        waits = False

        def sync(self, fd: int) -> None:
            if self.waits:
                self.together.wait(60)
            super().sync(fd)

    fs = TogetherFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(0, number * 100, queue_id=number) for number in range(64)])
    fs.waits = True
    table.flush()
    assert not fs.together.broken


@pytest.mark.parametrize("fails", [False, True])
def test_very_many_queues_are_made_durable_by_one_sync_or_else_by_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """If the file system's fails, each queue is synced, so that only the damaged one refuses more units, and so are the
    directories that hold them.
    """
    monkeypatch.setattr(table_module, "_FLUSHED_TOGETHER_MIN", 20)
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(0, number * 100, queue_id=number) for number in range(20)])
    damaged = str(tmp_path / "T" / "7" / f"{0:020d}")
    if fails:
        fs.fails = lambda call, path: errno.EIO if call == "sync_all" or (call, path) == ("sync", damaged) else None

    fs.calls.clear()
    with pytest.raises(DiskError) if fails else nullcontext():
        table.flush()

    synced = [Path(path).parent.name for call, path in fs.calls if call == "sync"]
    assert sorted(synced, key=int) == ([str(number) for number in range(20)] if fails else [])
    assert [call for call, _ in fs.calls if call != "sync" and "dir" not in call] == ["sync_all"]
    entered = {path for call, path in fs.calls if call == "sync_dir"}
    queues = {str(tmp_path / "T" / str(number)) for number in range(20) if number != 7}
    assert entered >= {*queues, str(tmp_path / "T"), str(tmp_path)} if fails else not entered
    fs.fails = lambda _call, _path: None
    fs.calls.clear()
    with pytest.raises(DiskError) if fails else nullcontext():
        table.flush()  # nothing is left but what failed
    assert fs.calls == []
    table.append([head(1, 5000, queue_id=8)])
    with pytest.raises(DiskError) if fails else nullcontext():
        table.append([head(1, 6000, queue_id=7)])


class TwoDisksFs(FailingFs):
    """Queue 1 is on another disk than the rest."""

    def device(self, path: Path) -> int:
        return int(path.name == "1")


def test_queues_on_another_disk_are_not_made_durable_by_the_sync_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then each is synced."""
    monkeypatch.setattr(table_module, "_FLUSHED_TOGETHER_MIN", 3)
    fs = TwoDisksFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(0, number * 100, queue_id=number) for number in range(3)])
    table.flush()
    assert {Path(path).parent.name for call, path in fs.calls if call == "sync"} == {"0", "1", "2"}


def test_a_file_begun_after_a_sync_of_all_queues_is_synced_by_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the file before it was full and durable already."""
    monkeypatch.setattr(table_module, "_FLUSHED_TOGETHER_MIN", 1)
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(number, number * 100) for number in range(5)])
    table.flush()
    monkeypatch.undo()
    fs.calls.clear()
    table.append([head(5, 500)])
    table.flush()
    assert [Path(path).name for call, path in fs.calls if call == "sync"] == [f"{FILE_BYTES:020d}"]


class TellingOnceFs(FailingFs):
    """As ``syncfs``: a failed write is told to who had the file system open before, and to the first who opens it then.

    Another program had it open before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, int] = {}
        self.failed_writes = 0

    def open(self, path: Path, *, writable: bool = True) -> int:
        fd = super().open(path, writable=writable)
        self.told[fd] = self.failed_writes
        return fd

    def sync_all(self, fd: int) -> None:
        super().sync_all(fd)
        before, self.told[fd] = self.told[fd], self.failed_writes
        if before < self.failed_writes:
            raise OSError(IO_ERROR, os.strerror(IO_ERROR))


def test_a_write_that_failed_before_the_first_sync_of_all_queues_is_not_taken_for_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel had begun to write it, and another program has synced the same file system since."""
    monkeypatch.setattr(table_module, "_FLUSHED_TOGETHER_MIN", 3)
    fs = TellingOnceFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(0, number * 100, queue_id=number) for number in range(3)])
    fs.failed_writes += 1
    damaged = str(tmp_path / "T" / "1" / f"{0:020d}")
    fs.fails = lambda call, path: errno.EIO if (call, path) == ("sync", damaged) else None

    with pytest.raises(DiskError):
        table.flush()
    table.close()


def test_units_appended_while_all_queues_are_synced_at_once_are_synced_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That sync may have been too early for them, and for the directories of new queues."""
    monkeypatch.setattr(table_module, "_FLUSHED_TOGETHER_MIN", 3)
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(0, number * 100, queue_id=number) for number in range(3)])

    def overtaken(call: str, _path: str) -> None:
        if call == "sync_all":
            table.append([head(1, 1000, queue_id=1), head(0, 1100, topic="new")])

    fs.fails = overtaken
    table.flush()
    fs.calls.clear()
    table.flush()

    assert sorted(path.split("/")[-3:-1] for call, path in fs.calls if call == "sync") == [["T", "1"], ["new", "0"]]
    assert {path for call, path in fs.calls if call == "sync_dir"} >= {str(tmp_path), str(tmp_path / "new")}


def test_a_queue_whose_flush_failed_is_flushed_again(tmp_path: Path) -> None:
    fs = OpeningFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append(log(30))
    fs.fails = lambda call, path: errno.EMFILE if call == "open" and "/A/" in path else None
    table.descriptors._shrink(0)
    with pytest.raises(DiskFullError):
        table.flush(0)
    fs.fails = lambda _call, _path: None
    fs.calls.clear()
    table.flush(0)
    assert {path.split("/")[-3] for call, path in fs.calls if call == "sync"} == {"A"}


def test_a_queue_that_is_written_to_while_another_is_flushed_is_flushed_next(tmp_path: Path) -> None:
    """The checkpoint that comes next tells of it."""
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    table.append([head(0, topic="A")])

    def overtaken(call: str, _path: str) -> None:
        if call == "sync" and table.find("B", 0) is None:
            table.append([head(0, 100, topic="B")])

    fs.fails = overtaken
    table.flush()
    fs.calls.clear()
    table.flush()

    assert {path.split("/")[-3] for call, path in fs.calls if call == "sync"} == {"B"}


def test_a_directory_above_queues_that_could_not_be_synced_is_synced_with_the_next_flush(tmp_path: Path) -> None:
    """No descriptor was left for it. The units in it are durable by then, and without it they are gone all the same."""
    fs = FailingFs()
    table = ConsumeQueueTable(tmp_path / "queues", FILE_BYTES, fs)
    table.load()
    table.append(log(30))
    above = ("sync_dir", str(tmp_path / "queues" / "A"))
    fs.fails = lambda call, path: errno.EMFILE if (call, path) == above else None
    with pytest.raises(DiskFullError):
        table.flush()
    fs.fails = lambda _call, _path: None
    fs.calls.clear()

    table.flush()

    assert above in fs.calls


def restarted(table: ConsumeQueueTable, fs: OpeningFs, limit: int = FOREVER) -> ConsumeQueueTable:
    """After a clean stop."""
    table.flush()
    ends = table.at_rest()
    table.close()
    again = ConsumeQueueTable(table.directory, FILE_BYTES, fs)
    fs.calls.clear()
    again.load(ends)
    again.recover(limit)
    return again


def reads(fs: OpeningFs) -> list[str]:
    return [path for call, path in fs.calls if call == "open"]


def last_files(table: ConsumeQueueTable) -> list[str]:
    return sorted(str(max(queue.directory.iterdir())) for queue in table.all())


def test_after_a_clean_stop_only_the_last_file_of_a_queue_is_opened(tmp_path: Path) -> None:
    """For its last unit: reading ten thousand queues is most of what a start takes."""
    fs, records = OpeningFs(), log(100)
    table = opened(tmp_path)
    table.append(records)
    table.correct_min_offsets(3000)

    again = restarted(table, fs)

    again.correct_min_offsets(3000)
    assert (sorted(reads(fs)), again.next_offsets()) == (last_files(again), table_ends(records))
    assert content(again) == {key: [at for at in offsets if at >= 3000] for key, offsets in model(records).items()}
    assert again.max_physical_offset == 9900
    again.append(records)
    again.append([head(again.next_offsets()["A", 0], 10_000, topic="A")])
    again.flush()
    found = opened(tmp_path)
    assert content(found)["A", 0] == [*model(records)["A", 0], 10_000]


def table_ends(records: list[RecordHead]) -> dict[tuple[str, int], int]:
    return {key: len(offsets) for key, offsets in model(records).items()}


@pytest.mark.parametrize("change", ["written", "removed", "added", "cut", "all removed"])
def test_a_queue_whose_files_were_changed_since_is_read(tmp_path: Path, change: str) -> None:
    fs, records = OpeningFs(), log(100)
    table = opened(tmp_path)
    table.append(records)
    table.flush()
    files = sorted((tmp_path / "A" / "0").iterdir())
    ends = table.at_rest()
    table.close()
    if change == "written":
        files[-1].write_bytes(files[-1].read_bytes())
    elif change == "removed":
        files[-1].unlink()
    elif change == "added":
        (tmp_path / "A" / "0" / f"{1000:020d}").write_bytes(bytes(FILE_BYTES))
    elif change == "cut":
        os.truncate(files[-1], 40)
    else:
        shutil.rmtree(tmp_path / "A" / "0")

    again = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    again.load(ends)
    again.recover()
    again.append(records)

    assert {Path(path).parent for path in reads(fs)} >= {tmp_path / "A" / "0"} or change == "all removed"
    others = [path for path in reads(fs) if "/B/" in path]
    assert sorted(others) == [path for path in last_files(again) if "/B/" in path]
    if change != "cut":
        expected = model(records)
        if change in ("removed", "all removed"):
            assert content(again)["A", 1] == expected["A", 1]
        else:
            assert content(again) == expected


def test_a_log_that_lost_its_end_has_the_queues_read_and_cut(tmp_path: Path) -> None:
    """What a clean stop left counts only as far as the log goes."""
    table = opened(tmp_path)
    table.append(log(100))
    again = restarted(table, OpeningFs(), limit=5000)
    assert content(again) == model(log(50))
