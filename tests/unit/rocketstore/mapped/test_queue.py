"""Properties of a queue of mapped files: RocketMQ's MappedFileQueueTest and MultiPathMappedFileQueueTest, and more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError, DiskFullError, InvalidRequestError
from dledger.store.format import segment_name
from dledger.store.mmap_file import Placement
from rocketstore.mapped.queue import DELETED_MAX, ForcedFileRemoval, MappedFileQueue
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs

SIZE = 1024


def open_queue(*paths: Path, fs: FailingFs | None = None, read_only: tuple[Path, ...] = ()) -> MappedFileQueue:
    """A queue of 1 KiB files whose syncs are not real."""
    return MappedFileQueue(fs or FailingFs(), Placement(paths, read_only), SIZE)


def filled(path: Path, files: int, fs: FailingFs | None = None) -> MappedFileQueue:
    """A queue of ``files`` full files."""
    queue = open_queue(path, fs=fs)
    for number in range(files):
        queue.append(number.to_bytes(8, "big") * (SIZE // 8))
    return queue


def test_appends_of_16_bytes_fill_one_file_after_the_other(tmp_path: Path) -> None:
    """Offsets are consecutive over file borders, and every append can be read back."""
    queue = open_queue(tmp_path)

    offsets = [queue.append(b"%016d" % number) for number in range(200)]

    assert offsets == [16 * number for number in range(200)]
    assert [file.base for file in queue.files()] == [0, 1024, 2048, 3072]
    assert queue.read(1024, 16) == b"%016d" % 64
    assert (queue.min_offset, queue.max_offset) == (0, 3200)


def test_a_read_never_crosses_a_file_or_the_end(tmp_path: Path) -> None:
    """What is not wholly readable in one file is not given."""
    queue = open_queue(tmp_path)
    queue.append(b"x" * SIZE)
    queue.append(b"y" * 10)

    assert queue.read(SIZE - 1, 1) == b"x"
    assert queue.read(SIZE - 1, 2) is None
    assert queue.read(SIZE, 11) is None
    assert queue.read(5 * SIZE, 1) is None
    assert queue.read(SIZE, 10, cold=True) == b"y" * 10


def test_find_by_offset_works_when_the_queue_does_not_start_at_0(tmp_path: Path) -> None:
    """The first file may begin anywhere; outside there is nothing, or the first one if asked for."""
    queue = open_queue(tmp_path)
    queue.last_file(51_300)
    for _ in range(5):
        queue.append(b"x" * SIZE)

    bases = [file.base for file in queue.files()]

    assert bases == [51_200 + SIZE * number for number in range(5)]
    assert [getattr(queue.find(base + 100), "base", None) for base in bases] == bases
    assert queue.find(0) is None
    assert queue.find(51_200 + 5 * SIZE) is None
    found = queue.find(0, first_if_missing=True)
    assert found is not None
    assert found.base == 51_200


def test_an_empty_queue_has_no_offsets(tmp_path: Path) -> None:
    """-1 and 0, as RocketMQ has it."""
    queue = open_queue(tmp_path)

    assert (queue.min_offset, queue.max_offset) == (-1, 0)
    assert queue.last_file(create=False) is None
    assert queue.find(0, first_if_missing=True) is None
    assert queue.flush(0)
    assert queue.commit(0)


def test_a_flush_advances_one_file_per_call(tmp_path: Path) -> None:
    """False while something moves, so that callers go on."""
    queue = filled(tmp_path, 4)

    reached = []
    while not queue.flush(0):
        reached.append(queue.flushed_where)

    assert reached == [1024, 2048, 3072, 4096]


def test_a_flush_waits_for_enough_pages(tmp_path: Path) -> None:
    """Least pages 2: nothing is synced before the second page is begun to the end."""
    fs = FailingFs()
    queue = MappedFileQueue(fs, Placement((tmp_path,)), 16 * 4096)
    queue.append(b"x" * 8191)

    assert queue.flush(2)
    assert queue.flushed_where == 0

    queue.append(b"x")

    assert not queue.flush(2)
    assert queue.flushed_where == 8192


def test_a_failed_flush_moves_nothing_and_ends_all_writing(tmp_path: Path) -> None:
    """RocketMQ logs it and takes the bytes as durable (issue 2706); the kernel may have dropped them."""
    fs = FailingFs()
    queue = open_queue(tmp_path, fs=fs)
    queue.append(b"x" * 100)
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None

    with pytest.raises(DiskError, match="flushing"):
        queue.flush(0)
    fs.fails = lambda _call, _path: None

    assert queue.flushed_where == 0
    with pytest.raises(DiskError, match="until a restart"):
        queue.flush(0)
    with pytest.raises(DiskError, match="until a restart"):
        queue.append(b"y")
    assert queue.read(0, 100) == b"x" * 100


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The append is refused, bytes that were written in part are wiped, and with room it works again."""
    fs = FailingFs()
    queue = open_queue(tmp_path, fs=fs)
    queue.append(b"x" * 100)
    file = queue.files()[0]
    original = fs.write

    def write_in_part(fd: int, data: bytes | bytearray, offset: int) -> None:
        if data.strip(b"\0"):
            original(fd, data[:20], offset)
            raise OSError(NO_SPACE, "No space left")
        original(fd, data, offset)

    fs.write = write_in_part  # type: ignore[method-assign]
    fs.calls.clear()
    with pytest.raises(DiskFullError):
        queue.append(b"y" * 50)
    assert [call for call, _ in fs.calls if call in ("write", "sync")][-1] == "sync", "a power cut brings nothing back"
    fs.write = original  # type: ignore[method-assign]

    assert file.is_blank(100)
    assert queue.append(b"z" * 10) == 100


def test_no_room_for_a_new_file_is_told_and_harms_nothing(tmp_path: Path) -> None:
    """The next append tries again."""
    fs = FailingFs(lambda call, _path: NO_SPACE if call == "write" else None)
    queue = open_queue(tmp_path, fs=fs)

    with pytest.raises(DiskFullError, match="create"):
        queue.append(b"x")
    fs.fails = lambda _call, _path: None

    assert list(tmp_path.iterdir()) == []
    assert queue.append(b"x") == 0


def test_what_does_not_fit_is_the_callers_business(tmp_path: Path) -> None:
    """To roll is the caller's decision: nothing is written."""
    queue = open_queue(tmp_path)
    queue.append(b"x" * 1000)

    with pytest.raises(InvalidRequestError):
        queue.append(b"x" * 25)

    assert queue.max_offset == 1000


def test_load_takes_files_as_full_and_truncate_sets_the_end(tmp_path: Path) -> None:
    """Truncated bytes are zero on disk: they cannot come back (issue 10666)."""
    filled(tmp_path, 4).close()
    queue = open_queue(tmp_path)
    queue.load()
    loaded = (queue.max_offset, queue.flushed_where, queue.committed_where)

    queue.truncate(1500)

    assert loaded == (4096, 4096, 4096)
    assert (queue.max_offset, queue.flushed_where, queue.committed_where) == (1500, 1500, 1500)
    assert sorted(os.listdir(tmp_path)) == [segment_name(0), segment_name(1024)]
    assert (tmp_path / segment_name(1024)).read_bytes()[476:] == bytes(548)
    assert queue.append(b"x") == 1500


def test_truncating_at_a_files_start_removes_it(tmp_path: Path) -> None:
    """Nothing of it is left, and the next append creates it anew."""
    queue = filled(tmp_path, 3)

    queue.truncate(2048)

    assert [file.base for file in queue.files()] == [0, 1024]
    assert queue.append(b"x") == 2048


@pytest.mark.parametrize("size", [0, 300])
def test_a_short_blank_file_at_the_end_is_removed(tmp_path: Path, size: int) -> None:
    """A crash at creation leaves it; RocketMQ refuses to start (issue 6904)."""
    filled(tmp_path, 2).close()
    (tmp_path / segment_name(2048)).write_bytes(bytes(size))
    (tmp_path / (segment_name(3072) + ".tmp")).write_bytes(b"")
    queue = open_queue(tmp_path)

    queue.load()

    assert queue.max_offset == 2048
    assert len(list(tmp_path.iterdir())) == 2


def test_a_short_last_file_with_content_is_completed(tmp_path: Path) -> None:
    """What it holds is for recovery to judge."""
    filled(tmp_path, 2).close()
    path = tmp_path / segment_name(2048)
    path.write_bytes(b"abc")
    queue = open_queue(tmp_path)

    queue.load()

    assert path.read_bytes() == b"abc" + bytes(SIZE - 3)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_file_of_the_wrong_size_before_the_end_is_refused(tmp_path: Path, size: int) -> None:
    """The error names the file, and nothing is changed."""
    filled(tmp_path, 3).close()
    path = tmp_path / segment_name(1024)
    path.write_bytes(bytes(size))

    with pytest.raises(CorruptLogError) as caught:
        open_queue(tmp_path).load()

    assert caught.value.path == path
    assert path.stat().st_size == size


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A gap cannot be read across."""
    filled(tmp_path, 3).close()
    (tmp_path / segment_name(1024)).unlink()

    with pytest.raises(CorruptLogError, match="missing"):
        open_queue(tmp_path).load()


def test_files_that_are_not_ours_do_not_stop_loading(tmp_path: Path) -> None:
    """RocketMQ fails on any stray file (issue 3257)."""
    filled(tmp_path, 1).close()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / segment_name(77)).write_bytes(b"not a multiple")
    queue = open_queue(tmp_path)

    queue.load()

    assert queue.max_offset == SIZE


def test_deleting_by_time_stops_at_the_first_young_file(tmp_path: Path) -> None:
    """5 old ones, a young one, more old ones: 45 of 50 stay."""
    queue = filled(tmp_path, 50)
    for number, file in enumerate(queue.files()):
        age_s = 0 if number == 5 else 3600
        os.utime(file.path, (1_000_000 - age_s, 1_000_000 - age_s))

    deleted = queue.delete_expired_by_time(60_000, now_ms=1_000_000_000)

    assert (deleted, len(queue.files())) == (5, 45)
    assert queue.min_offset == 5 * SIZE
    assert queue.read(0, 1) is None


def test_deleting_at_once_takes_ten_files_and_never_the_last(tmp_path: Path) -> None:
    """Whatever their age; a deleted file can still be read by whoever holds it."""
    queue = filled(tmp_path, 13)
    first = queue.files()[0]

    deleted = [queue.delete_expired_by_time(1 << 40, now_ms=0, immediately=True) for _ in range(3)]

    assert deleted == [DELETED_MAX, 2, 0]
    assert first.read(0, 8) == bytes(8)
    assert not first.path.exists()
    assert first.last_modified_ms == 0


def test_only_what_had_not_expired_is_told_as_removed_early(tmp_path: Path) -> None:
    """Of the files that one round takes at once, those old enough would have gone anyway: no warning about them."""
    queue = filled(tmp_path, 5)
    now_s = 1_000_000
    for file, age_s in zip(queue.files(), (120, 60, 59, 1, 0), strict=True):
        os.utime(file.path, (now_s - age_s, now_s - age_s))
    told: list[ForcedFileRemoval] = []

    deleted = queue.delete_expired_by_time(60_000, now_ms=now_s * 1000, immediately=True, on_forced=told.append)

    assert deleted == 4
    assert [(one.base, one.end, one.age_ms) for one in told] == [
        (2 * SIZE, 3 * SIZE, 59_000),
        (3 * SIZE, 4 * SIZE, 1000),
    ]


@pytest.mark.parametrize(("keep_from", "deleted"), [(0, 0), (2 * SIZE - 1, 1), (2 * SIZE, 2), (2 * SIZE + 1, 2)])
def test_deleting_leaves_the_file_that_is_needed_from_somewhere_inside(
    tmp_path: Path, keep_from: int, deleted: int
) -> None:
    """A single needed byte at its end keeps it."""
    queue = filled(tmp_path, 5)

    assert queue.delete_expired_by_time(0, now_ms=0, immediately=True, keep_from=keep_from) == deleted


def test_a_file_that_cannot_be_deleted_stays_and_is_tried_again(tmp_path: Path) -> None:
    """It stops the round; ``retry_delete_first`` takes it up."""
    fs = FailingFs()
    queue = filled(tmp_path, 4, fs)
    fs.fails = lambda call, path: IO_ERROR if call == "unlink" and path.endswith(segment_name(0)) else None

    assert not queue.retry_delete_first()
    assert queue.delete_expired_by_time(0, now_ms=1 << 50) == 0
    assert len(queue.files()) == 4
    assert not queue.retry_delete_first()
    fs.fails = lambda _call, _path: None

    assert queue.retry_delete_first()
    assert queue.min_offset == SIZE


def test_flushing_goes_on_after_unflushed_files_were_deleted(tmp_path: Path) -> None:
    """The mark does not stay behind in a file that is gone."""
    queue = filled(tmp_path, 3)
    queue.delete_expired_by_time(0, now_ms=1 << 50)

    while not queue.flush(0):
        pass

    assert queue.flushed_where == 3 * SIZE


def test_destroy_leaves_nothing(tmp_path: Path) -> None:
    """All files are deleted; the queue is empty and starts at 0 again."""
    queue = filled(tmp_path, 3)
    queue.flush(0)

    queue.destroy()

    assert list(tmp_path.iterdir()) == []
    assert queue.append(b"x") == 0


def make_dirs(base: Path, *names: str) -> tuple[Path, ...]:
    """Directories below ``base``."""
    paths = tuple(base / name for name in names)
    for path in paths:
        path.mkdir()
    return paths


def test_new_files_go_round_the_paths(tmp_path: Path) -> None:
    """File number k goes to path k modulo their number, in sorted order."""
    paths = make_dirs(tmp_path, "c", "a", "b")
    queue = open_queue(*paths)

    for _ in range(6):
        queue.append(b"x" * SIZE)

    assert [file.path.parent.name for file in queue.files()] == ["a", "b", "c", "a", "b", "c"]
    again = open_queue(*paths)
    again.load()
    assert again.max_offset == 6 * SIZE
    assert [file.base for file in again.files()] == [number * SIZE for number in range(6)]


def test_read_only_paths_are_loaded_and_never_written(tmp_path: Path) -> None:
    """New files go elsewhere, and expired ones there are only forgotten."""
    old, new = make_dirs(tmp_path, "old", "new")
    filled(old, 2).close()
    queue = open_queue(new, read_only=(old,))
    queue.load()

    queue.append(b"x" * 10)
    queue.delete_expired_by_time(0, now_ms=1 << 50)

    assert queue.files()[-1].path.parent == new
    assert queue.min_offset == 2 * SIZE
    assert len(list(old.iterdir())) == 2


def test_paths_can_be_changed_while_the_queue_is_open(tmp_path: Path) -> None:
    """The next file already goes by the new rule."""
    one, two = make_dirs(tmp_path, "one", "two")
    queue = open_queue(one)
    queue.append(b"x" * SIZE)

    queue.placement = Placement((two,), (one,))
    queue.append(b"x" * SIZE)

    assert [file.path.parent for file in queue.files()] == [one, two]


def test_a_full_path_is_skipped_unless_all_are(tmp_path: Path) -> None:
    """With all full, the flags are ignored: the disk itself will refuse."""
    paths = make_dirs(tmp_path, "a", "b")
    full = {paths[0]}
    queue = MappedFileQueue(FailingFs(), Placement(paths, is_full=lambda path: path in full), SIZE)

    queue.append(b"x" * SIZE)
    full.add(paths[1])
    queue.append(b"x" * SIZE)
    queue.append(b"x" * SIZE)

    assert [file.path.parent.name for file in queue.files()] == ["b", "b", "a"]
