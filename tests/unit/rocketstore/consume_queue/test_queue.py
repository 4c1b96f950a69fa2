"""One consume queue: RocketMQ's bytes, replays, gaps, searches, truncation, damage."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError, DiskFullError
from dledger.store.fs import FileSystem
from rocketstore.consume_queue.files import FILLER
from rocketstore.consume_queue.queue import FOREVER, ConsumeQueue, QueueContext, Repeated
from rocketstore.mapped.file import StoreFile
from rocketstore.types import QueueUnit, RecordHead
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.unit.rocketstore.heads import head, heads

UNITS = 5
FILE_BYTES = UNITS * 20
FILLER_BYTES = struct.pack(">qiq", 0, 0x7FFFFFFF, 0)


def opened(
    directory: Path,
    fs: FileSystem | None = None,
    limit: int = FOREVER,
    *,
    context: QueueContext | None = None,
) -> ConsumeQueue:
    (directory / "T").mkdir(exist_ok=True)
    directory = directory / "T" / "0"
    queue = ConsumeQueue("T", 0, directory, FILE_BYTES, fs or FileSystem(), context=context)
    queue.load()
    queue.recover(limit)
    return queue


def filled(directory: Path, end: int = 12) -> ConsumeQueue:
    """Units 0 to ``end``, each of a record of 100 bytes, one after the other."""
    queue = opened(directory)
    assert queue.append(heads(0, end))
    return queue


def stored(queue: ConsumeQueue) -> dict[int, bytes]:
    return {int(path.name): path.read_bytes() for path in sorted(queue.directory.iterdir())}


def content(queue: ConsumeQueue) -> dict[int, int]:
    """Queue offset to physical offset of every message."""
    return {
        number: unit.offset
        for number in range(queue.min_offset, queue.max_offset)
        if (unit := queue.unit(number)) is not None
    }


def unit_bytes(record: RecordHead) -> bytes:
    return struct.pack(">qiq", record.offset, record.size, record.tags_code)


def test_an_empty_queue_has_no_files_and_begins_and_ends_at_0(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 0, -1)
    assert queue.units(0, 10) == []
    assert queue.unit(0) is None
    assert not queue.directory.exists()
    assert queue.append([])
    assert not queue.directory.exists()


def test_units_are_20_bytes_in_files_of_full_length(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    records = [head(number, tags_code=-number - 1) for number in range(6)]
    queue.append(records)
    assert stored(queue) == {
        0: b"".join(map(unit_bytes, records[:5])),
        FILE_BYTES: unit_bytes(records[5]).ljust(FILE_BYTES, b"\0"),
    }
    assert [path.name for path in sorted(queue.directory.iterdir())] == ["0" * 20, "0" * 17 + "100"]
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 6, 600)
    assert queue.unit(5) == QueueUnit(500, 100, -6)


@pytest.mark.parametrize("first", [1, 4, 5, 7, 1234])
def test_a_queue_that_begins_inside_a_file_is_filled_up_as_rocketmq_does(tmp_path: Path, first: int) -> None:
    queue = opened(tmp_path)
    records = heads(first, first + 2)
    queue.append(records)
    base = first // UNITS * FILE_BYTES
    written = FILLER_BYTES * (first % UNITS) + b"".join(map(unit_bytes, records))
    assert b"".join(stored(queue).values()).rstrip(b"\0") == written.rstrip(b"\0")
    assert min(stored(queue)) == base
    assert (queue.min_offset, queue.max_offset) == (first, first + 2)
    assert queue.units(first - 1, 3) == []
    again = opened(tmp_path)
    assert (again.min_offset, again.max_offset, again.max_physical_offset) == (first, first + 2, first * 100 + 200)
    assert again.correct_min_offset(0) == first


def test_a_read_never_crosses_a_file(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    assert [unit.offset for unit in queue.units(3, 100)] == [300, 400]
    assert [unit.offset for unit in queue.units(5, 2)] == [500, 600]
    assert [unit.offset for unit in queue.units(10, 100)] == [1000, 1100]
    assert queue.units(12, 1) == []
    assert queue.units(-1, 1) == []
    assert [queue.next_file(number) for number in (0, 4, 5)] == [5, 5, 10]


@pytest.mark.parametrize("start", range(12))
def test_a_replay_changes_nothing(tmp_path: Path, start: int) -> None:
    queue = filled(tmp_path)
    before = stored(queue)
    queue.append(heads(start, 12))
    assert stored(queue) == before
    queue.append(heads(start, 14))
    assert content(queue) == {number: number * 100 for number in range(14)}


def test_a_queue_offset_that_comes_twice_keeps_its_first_record_and_raises_an_alarm(tmp_path: Path) -> None:
    """The others cannot have the place that their record names, and nobody drops a message in silence."""
    told: list[Repeated] = []
    queue = opened(tmp_path, context=QueueContext(repeated=told.append))
    queue.append(heads(0, 3))
    queue.append([head(2, 5000), head(3, 5100)])
    assert content(queue) == {0: 0, 1: 100, 2: 200, 3: 5100}
    queue.append([head(1, 6000)])
    assert queue.max_offset == 4
    assert told == [Repeated("T", 0, 2, 2, 3, 5100), Repeated("T", 0, 1, 1, 4, 6100)]
    assert [one.lost for one in told] == [1, 1]
    assert "queue 0 of topic T: 1 messages are unreadable" in str(told[0])


@pytest.mark.parametrize("first", [4, 7, 10, 5_000_000])
def test_a_queue_whose_messages_have_all_expired_goes_on_where_the_log_does(tmp_path: Path, first: int) -> None:
    """A member was down for longer than retention: what it missed is gone, however much, and is not filled up."""
    begin = [0]
    queue = opened(tmp_path, context=QueueContext(lambda: begin[0]))
    queue.append(heads(0, 3))
    begin[0] = 300

    queue.append([head(first, 5000), head(first + 1, 5100)])

    assert (queue.min_offset, queue.max_offset) == (first, first + 2)
    assert content(queue) == {first: 5000, first + 1: 5100}
    assert len(stored(queue)) == 1 + (first % UNITS == UNITS - 1)
    again = opened(tmp_path)
    assert (again.min_offset, content(again)) == (first, content(queue))


def test_a_jump_within_what_the_log_holds_is_damage(tmp_path: Path) -> None:
    """The records in between should be there."""
    queue = opened(tmp_path, context=QueueContext(lambda: 299))
    queue.append(heads(0, 3))
    with pytest.raises(CorruptLogError, match="after queue offset 2 comes 5000000"):
        queue.append([head(5_000_000, 5000)])


@pytest.mark.parametrize("known", [0, 3])
def test_a_raised_queue_goes_on_from_there_without_a_file(tmp_path: Path, known: int) -> None:
    """What was given out before has expired here, or never came: there is nothing to read, and nothing is reused."""
    queue = opened(tmp_path, context=QueueContext(lambda: 300))
    if known:
        queue.append(heads(0, known))

    queue.raise_to(7)

    assert (queue.min_offset, queue.max_offset, queue.stored_end) == (7, 7, 0)
    assert queue.units(0, 10) == queue.units(7, 10) == []
    assert queue.correct_min_offset(300) == 7
    queue.raise_to(6)
    assert queue.max_offset == 7
    queue.append(heads(7, 9))
    assert (queue.min_offset, queue.max_offset, content(queue)) == (7, 9, {7: 700, 8: 800})
    assert (again := opened(tmp_path)).min_offset == 7
    assert content(again) == {7: 700, 8: 800}


def test_a_message_below_what_a_queue_was_raised_to_raises_an_alarm(tmp_path: Path) -> None:
    """A master that counts from less gives out offsets a second time."""
    told: list[Repeated] = []
    queue = opened(tmp_path, context=QueueContext(repeated=told.append))
    queue.raise_to(7)

    queue.append(heads(5, 8))

    assert content(queue) == {7: 700}
    assert told == [Repeated("T", 0, 5, 3, 7, 600)]
    assert told[0].lost == 2


def test_a_queue_that_knows_as_much_is_not_raised(tmp_path: Path) -> None:
    """The usual case: every member has dispatched what the numbers count."""
    queue = filled(tmp_path, 3)
    queue.raise_to(3)
    assert (queue.min_offset, queue.max_offset, queue.stored_end) == (0, 3, 3)
    queue.append(heads(3, 5))
    assert len(content(queue)) == 5


def test_numbers_ahead_of_a_queue_with_messages_lose_none_of_them(tmp_path: Path) -> None:
    """It cannot be, but if it is: what is there stays readable, and the rest has its own offsets."""
    queue = filled(tmp_path, 3)
    queue.raise_to(6)
    assert (queue.min_offset, queue.max_offset, queue.units(4, 5)) == (0, 6, [])
    queue.append(heads(6, 8))
    assert content(queue) == {number: 100 * number for number in (0, 1, 2, 6, 7)}


@pytest.mark.parametrize("first", [4, 5, 6, 9, 10, 11, 40])
def test_a_gap_in_queue_offsets_shifts_nothing(tmp_path: Path, first: int) -> None:
    queue = filled(tmp_path, 3)
    queue.append(heads(first, first + 3))
    expected = {number: number * 100 for number in (0, 1, 2, first, first + 1, first + 2)}
    assert content(queue) == expected
    assert queue.units(3, 1) == [FILLER]
    assert queue.unit(3) is None
    again = opened(tmp_path)
    assert content(again) == expected
    assert again.max_physical_offset == first * 100 + 300


def test_a_gap_within_one_batch_shifts_nothing(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    queue.append([head(0), head(-1, 100), head(1, 200), head(4, 500), head(5, 600), head(-1, 700)])
    assert content(queue) == {0: 0, 1: 200, 4: 500, 5: 600}


def test_an_unbelievable_gap_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    before = stored(queue)
    with pytest.raises(CorruptLogError, match="queue offset 2"):
        queue.append([head(1 << 40, 300)])
    assert stored(queue) == before


def test_fillers_say_nothing_about_the_log(tmp_path: Path) -> None:
    """RocketMQ takes 2147483647 for dispatched when a queue's scanned files end with fillers."""
    queue = opened(tmp_path)
    queue.append([head(0)])
    queue.append([head(24)])
    queue = opened(tmp_path, limit=2400)
    assert (queue.max_offset, queue.max_physical_offset) == (24, 100)
    again = opened(tmp_path)
    assert (again.max_offset, again.max_physical_offset) == (24, 100)
    again.append(heads(24, 26))
    assert content(again) == {0: 0, 24: 2400, 25: 2500}


@pytest.mark.parametrize("limit", [0, 1, 100, 450, 499, 500, 501, 1000, 1199])
def test_a_log_that_lost_its_end_keeps_the_units_of_records_that_end_before(tmp_path: Path, limit: int) -> None:
    queue = filled(tmp_path)
    queue = opened(tmp_path, limit=limit)
    kept = limit // 100
    assert content(queue) == {number: number * 100 for number in range(kept)}
    assert queue.max_physical_offset == (kept * 100 or -1)
    assert b"".join(stored(queue).values()).rstrip(b"\0") == b"".join(map(unit_bytes, heads(0, kept))).rstrip(b"\0")
    assert content(opened(tmp_path)) == content(queue)
    queue.append([head(kept, 5000)])
    assert content(queue)[kept] == 5000


def test_a_limit_at_the_end_changes_nothing(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    before = stored(queue)
    queue = opened(tmp_path, limit=1200)
    assert stored(queue) == before


def test_a_queue_offset_is_not_given_out_again_when_all_units_are_cut(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    assert queue.delete_expired(600) == 1
    assert queue.delete_expired(1100) == 1
    queue = opened(tmp_path, limit=900)
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (10, 10, -1)
    again = opened(tmp_path)
    assert (again.min_offset, again.max_offset) == (10, 10)
    again.append([head(10, 900)])
    assert content(again) == {10: 900}


def test_a_cut_below_the_first_kept_message_leaves_room_for_new_ones(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    queue.correct_min_offset(1100)
    queue = opened(tmp_path, limit=700)
    queue.append([head(7, 700)])
    assert queue.unit(7) == QueueUnit(700, 100, 7)


def test_min_offset_follows_the_log(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    for physical, first in [(0, 0), (1, 1), (100, 1), (650, 7), (1100, 11), (1101, 12), (9999, 12), (300, 3)]:
        assert queue.correct_min_offset(physical) == first
        assert queue.min_offset == first
    assert queue.units(2, 1) == []
    assert len(queue.units(3, 1)) == 1


def test_expired_units_are_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, read, places = filled(tmp_path), StoreFile.read, list[int]()

    def noted(file: StoreFile, offset: int, size: int, *, cold: bool = False) -> bytes | None:
        places.extend(range((file.base + offset) // 20, (file.base + offset + size) // 20))
        return read(file, offset, size, cold=cold)

    monkeypatch.setattr(StoreFile, "read", noted)
    assert queue.correct_min_offset(600) == 6
    assert {0, 1, 2, 3, 4, 5} <= set(places)
    places.clear()
    assert queue.correct_min_offset(1100) == 11
    assert {6, 7, 8, 9, 10} <= set(places)
    assert min(places) == 6


def test_a_bad_sector_of_expired_units_does_not_stop_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, read = filled(tmp_path), StoreFile.read

    def failing(file: StoreFile, offset: int, size: int, *, cold: bool = False) -> bytes | None:
        if file.base + offset <= 20 < file.base + offset + size:
            raise DiskError("a bad sector")
        return read(file, offset, size, cold=cold)

    monkeypatch.setattr(StoreFile, "read", failing)
    assert queue.correct_min_offset(1100) == 11


def test_min_offset_passes_over_fillers(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    queue.append(heads(9, 12))
    assert queue.correct_min_offset(201) == 9
    assert queue.correct_min_offset(901) == 10
    assert queue.correct_min_offset(200) == 2


def test_expired_files_go_but_never_the_last(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    assert queue.delete_expired(400) == 0
    assert queue.delete_expired(401) == 1
    assert queue.min_offset == 5
    assert queue.delete_expired(1 << 40) == 1
    assert sorted(stored(queue)) == [2 * FILE_BYTES]
    assert queue.delete_expired(1 << 40) == 0
    assert content(queue) == {10: 1000, 11: 1100}


def test_a_file_stays_until_a_unit_after_it_is_durable(tmp_path: Path) -> None:
    """Else a crash leaves nothing that says where the queue was."""
    filled(tmp_path)
    durable = [599, 600, 1099, 1100]
    queue = opened(tmp_path, context=QueueContext(durable=lambda: durable.pop(0)))
    assert [queue.delete_expired(9999) for _ in range(4)] == [0, 1, 0, 1]


def test_a_file_that_ends_with_fillers_lives_as_long_as_its_messages(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    queue.append(heads(9, 12))
    assert queue.delete_expired(200) == 0
    assert queue.delete_expired(201) == 1


def test_a_deleted_file_stays_readable_for_nobody_and_harms_nobody(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    queue.delete_expired(600)
    assert queue.units(0, 5) == []
    assert queue.unit(4) is None


class Times:
    """Store times of records: record n (at n * 100) is stored at n * 10; records before ``kept`` are gone."""

    def __init__(self, kept: int = 0) -> None:
        self.kept = kept

    def __call__(self, offset: int, size: int) -> int:
        assert size == 100
        return offset // 10 if offset >= self.kept else -1


@pytest.mark.parametrize(
    ("time_ms", "expected"),
    [(0, 0), (-5, 0), (10, 1), (11, 2), (15, 2), (19, 2), (50, 5), (104, 11), (110, 11), (111, 12), (1 << 50, 12)],
)
def test_a_time_means_the_first_message_at_or_after_it(tmp_path: Path, time_ms: int, expected: int) -> None:
    """However near an older one is; the queue's end if every message is older."""
    assert filled(tmp_path).offset_by_time(time_ms, Times()) == expected


def test_of_messages_of_one_time_the_first_is_found(tmp_path: Path) -> None:
    assert filled(tmp_path).offset_by_time(1, lambda offset, _size: offset // 400) == 4


def test_a_search_by_time_passes_over_fillers_and_lost_records(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3)
    queue.append(heads(9, 12))
    assert queue.offset_by_time(20, Times()) == 2
    assert queue.offset_by_time(50, Times()) == 9
    assert queue.offset_by_time(56, Times()) == 9
    assert queue.offset_by_time(0, Times(kept=150)) == 2
    assert queue.offset_by_time(0, Times(kept=1000)) == 10
    assert queue.offset_by_time(0, Times(kept=1 << 40)) == 12
    assert opened(tmp_path / "T").offset_by_time(5, Times()) == 0


@pytest.mark.parametrize("jump", [-50, 50])
def test_a_search_by_time_finds_everything_newer_although_the_clock_jumped(tmp_path: Path, jump: int) -> None:
    """Messages 4 to 6 were stored while the clock was wrong: of those later than any time after that, none is left
    out."""
    queue = filled(tmp_path)

    def time_of(offset: int, _size: int) -> int:
        number = offset // 100
        return 100 + number * 10 + (jump if 4 <= number <= 6 else 0)

    for number in range(7, 12):
        assert queue.offset_by_time(100 + number * 10, time_of) <= number


@pytest.mark.parametrize(
    ("position", "expected"), [(-1, 0), (0, 0), (1, 1), (100, 1), (250, 9), (900, 9), (901, 10), (1101, 12), (9999, 12)]
)
def test_a_place_of_the_log_is_an_offset_of_the_queue(tmp_path: Path, position: int, expected: int) -> None:
    """That of the first message whose record begins there or later; fillers are none, the end is the end."""
    queue = filled(tmp_path, 3)
    queue.append(heads(9, 12))
    assert queue.offset_by_position(position) == expected
    assert opened(tmp_path / "T").offset_by_position(position) == 0


def test_a_full_disk_is_an_error_that_goes_away(tmp_path: Path) -> None:
    fs = FailingFs()
    queue = opened(tmp_path, fs)
    queue.append(heads(0, 3))
    fs.fails = lambda call, path: NO_SPACE if call == "write" and "0100" in path else None
    with pytest.raises(DiskFullError):
        queue.append(heads(3, 12))
    assert content(queue) == {number: number * 100 for number in range(5)}
    assert queue.max_physical_offset == 500
    fs.fails = lambda _call, _path: None
    queue.append(heads(3, 12))
    assert content(queue) == {number: number * 100 for number in range(12)}


def test_a_full_disk_at_the_very_beginning_is_no_harm(tmp_path: Path) -> None:
    fs = FailingFs(lambda call, path: NO_SPACE if call == "write" and not path.endswith(".tmp") else None)
    queue = opened(tmp_path, fs)
    with pytest.raises(DiskFullError):
        queue.append(heads(3, 5))
    assert (queue.min_offset, queue.max_offset) == (0, 0)
    fs.fails = lambda _call, _path: None
    queue.append(heads(3, 5))
    assert content(queue) == {3: 300, 4: 400}


def test_after_a_failed_write_the_queue_takes_no_more(tmp_path: Path) -> None:
    fs = FailingFs()
    queue = opened(tmp_path, fs)
    queue.append(heads(0, 3))
    fs.fails = lambda call, _path: IO_ERROR if call == "write" else None
    with pytest.raises(DiskError):
        queue.append(heads(3, 4))
    fs.fails = lambda _call, _path: None
    with pytest.raises(DiskError):
        queue.append(heads(3, 4))
    assert content(queue) == {0: 0, 1: 100, 2: 200}


def test_after_a_failed_flush_the_queue_takes_no_more(tmp_path: Path) -> None:
    fs = FailingFs()
    queue = opened(tmp_path, fs)
    queue.append(heads(0, 3))
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None
    with pytest.raises(DiskError):
        queue.flush(0)
    fs.fails = lambda _call, _path: None
    with pytest.raises(DiskError):
        queue.flush(0)
    with pytest.raises(DiskError):
        queue.append(heads(3, 4))


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    (tmp_path / "T").rmdir()
    (tmp_path / "T").write_text("a file")
    with pytest.raises(DiskError):
        queue.append(heads(0, 1))


def test_flush_makes_files_and_their_directories_durable(tmp_path: Path) -> None:
    fs = FailingFs()
    queue = opened(tmp_path, fs)
    assert queue.flush(0)
    queue.append(heads(0, 12))
    fs.calls.clear()
    assert queue.flush(2) is False  # full files, whatever the number of pages
    assert queue.flush(0) is False
    assert queue.flush(0)
    synced = {path for call, path in fs.calls if call.startswith("sync")}
    assert synced >= {str(queue.directory), str(queue.directory.parent), str(tmp_path)}
    assert sum(call == "sync" for call, _ in fs.calls) == 3


def test_after_a_start_only_what_was_cut_is_flushed(tmp_path: Path) -> None:
    """What is kept was durable before: a clean stop or a checkpoint says so, and thousands of queues start at once."""
    filled(tmp_path)
    fs = FailingFs()
    opened(tmp_path, fs).flush(0)
    assert not any(call == "sync" for call, _ in fs.calls)

    queue = ConsumeQueue("T", 0, tmp_path / "T" / "0", FILE_BYTES, fs)
    queue.load()
    queue.recover(700, whole=False)
    assert not any(call.startswith("sync") for call, _ in fs.calls)
    queue.flush(0)
    queue.flush(0)
    assert [call for call, _ in fs.calls if call.startswith("sync")] == ["sync", "sync_dir"]


def test_a_removed_queue_takes_nothing(tmp_path: Path) -> None:
    queue = filled(tmp_path)
    queue.destroy()
    assert not queue.append(heads(12, 13))
    assert not queue.directory.exists()
    assert queue.units(0, 1) == []


def test_a_long_gap_is_filled_piece_by_piece(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "T" / "0", 100_000 * 20, FileSystem())
    (tmp_path / "T").mkdir()
    queue.append([head(0), head(150_000)])
    assert content(queue) == {0: 0, 150_000: 15_000_000}
    assert queue.units(99_998, 10) == [FILLER, FILLER]
    assert queue.correct_min_offset(1) == 150_000
