"""Log directories without Spark: their kinds, where reading stops, and that splits lose and repeat nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.store.durable_state import create_checkpoint, read_checkpoint
from dledger.store.fs import FileSystem
from dledger.types import LogIndex, Position
from dledger_spark.decode import DecodeContext, named_columns
from dledger_spark.directory import LogDirectory, SplitSizes, open_directory, plan_splits, range_of, read_split, runs
from dledger_spark.errors import BrokenRecordError, DataLossError, LogDirectoryError, OptionError
from dledger_spark.options import ReadOptions
from rocketstore.message.message import Message
from rocketstore.message.record import BLANK, BLANK_MAGIC, encode_record
from tests.support.log_bytes import DiskLog, write_disk_log
from tests.support.sweeps import fewer
from tests.unit.rocketstore.bench import fill, running, small_config
from tests.unit.rocketstore.store.test_message_store_replicated import master

NAMES = ("index", "position", "topic", "queueId", "body", "segment")


def some_messages(count: int, seed: int = 1, largest: int = 900) -> list[Message]:
    """Messages of uneven sizes, stored a millisecond apart."""
    rng = random.Random(seed)
    return [
        Message(f"topic-{rng.randrange(3)}", rng.randbytes(rng.randrange(largest)), number % 4, store_timestamp=number)
        for number in range(count)
    ]


def rows_of(
    log: LogDirectory, sizes: SplitSizes, bounds: tuple[int, int] | None = None, window_bytes: int = 1 << 28
) -> list[dict[str, object]]:
    """All rows, split by split."""
    begin, end = bounds or (log.begin, log.end)
    context = DecodeContext(content=log.content())
    columns = named_columns(NAMES, context)
    rows: list[dict[str, object]] = []
    for split in plan_splits(log, begin, end, sizes):
        for batch in read_split(split, columns, context, window_bytes):
            rows += batch.to_pylist()
    return rows


def wanted(log: DiskLog) -> list[dict[str, object]]:
    """The same rows, as the naive reader has them."""
    return [{name: row.get(name) for name in NAMES} for row in log.rows]


@pytest.fixture(scope="module")
def disk_log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """A node's directory of several segments, with NOOPs in between."""
    return write_disk_log(tmp_path_factory.mktemp("node"), some_messages(600), noop_every=64)


@settings(deadline=None, max_examples=fewer(20, 4))
@given(
    split_bytes=st.integers(1024, 1 << 20),
    max_records=st.integers(0, 50),
    min_partitions=st.integers(0, 40),
    window_bytes=st.integers(4096, 1 << 20),
    indexed=st.booleans(),
)
def test_however_a_log_is_split_every_record_is_read_once(
    disk_log: DiskLog, split_bytes: int, max_records: int, min_partitions: int, window_bytes: int, *, indexed: bool
) -> None:
    """Splits of any size, with the index and by walking, mapped in windows of any size."""
    log = open_directory(disk_log.directory)
    if not indexed:
        log = replace(log, index=None)
    sizes = SplitSizes(split_bytes, min_partitions, max_records)

    splits = plan_splits(log, log.begin, log.end, sizes)

    assert rows_of(log, sizes, window_bytes=window_bytes) == wanted(disk_log)
    assert len(splits) >= min_partitions
    assert all(one.segment_base <= one.begin < one.end <= one.segment_base + disk_log.segment_bytes for one in splits)
    assert all(0 < one.count <= max_records for one in splits if max_records and one.count)
    assert {one.is_rest for one in splits} <= ({False} if indexed else {False, True})


def test_splits_are_even_under_skew(tmp_path: Path) -> None:
    """A few large records among many small ones do not make a split larger than asked for by more than one record."""
    messages: list[bytes] = [b"x" * (8000 if number % 50 == 7 else 30) for number in range(1000)]
    log = open_directory(write_disk_log(tmp_path, messages, segment_bytes=1 << 20).directory)

    splits = plan_splits(log, log.begin, log.end, SplitSizes(32 * 1024))

    assert len(splits) > 4
    assert max(one.end - one.begin for one in splits) <= 32 * 1024 + 8048
    assert min(one.end - one.begin for one in splits[:-1]) >= 12 * 1024


def test_nothing_beyond_the_committed_index_is_read(tmp_path: Path) -> None:
    """The checkpoint's commit index ends the log, unless uncommitted entries are asked for."""
    disk_log = write_disk_log(tmp_path, some_messages(200), committed=120)

    committed = rows_of(open_directory(disk_log.directory), SplitSizes(8192))
    everything = rows_of(open_directory(disk_log.directory, allow_uncommitted=True), SplitSizes(8192))

    assert [row["index"] for row in committed] == list(range(121))
    assert [row["index"] for row in everything] == list(range(200))


def test_nothing_is_read_of_a_log_that_has_nothing_committed(tmp_path: Path) -> None:
    """A commit index of -1 is an empty log."""
    log = open_directory(write_disk_log(tmp_path, some_messages(20), committed=-1).directory)

    assert plan_splits(log, log.begin, log.end, SplitSizes(8192)) == []


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "other"])
def test_an_index_that_is_of_no_use_is_done_without(tmp_path: Path, damage: str) -> None:
    """Missing, emptied, cut short or another log's: the records are found by walking."""
    disk_log = write_disk_log(tmp_path / "log", some_messages(400))
    index = disk_log.directory / "index"
    if damage == "missing":
        shutil.rmtree(index)
    for path in sorted(index.iterdir()) if index.exists() else []:
        if damage == "other":
            path.write_bytes(path.read_bytes()[32:] + bytes(32))
        else:
            path.write_bytes(bytes(path.stat().st_size) if damage == "empty" else path.read_bytes()[: 32 * 150])

    log = open_directory(disk_log.directory)

    assert rows_of(log, SplitSizes(8192)) == wanted(disk_log)


def test_segments_that_lie_on_several_disks_are_read_through_links(disk_log: DiskLog, tmp_path: Path) -> None:
    """``data_dirs``: a directory whose ``data`` links to all segments, beside the node's index and checkpoint."""
    data = tmp_path / "one" / "data"
    data.mkdir(parents=True)
    for number, segment in enumerate(sorted((disk_log.directory / "data").iterdir())):
        disk = tmp_path / f"disk-{number % 2}"
        disk.mkdir(exist_ok=True)
        shutil.copy(segment, disk)
        (data / segment.name).symlink_to(disk / segment.name)
    for name in ("index", "checkpoint"):
        (tmp_path / "one" / name).symlink_to(disk_log.directory / name)

    log = open_directory(tmp_path / "one")

    assert rows_of(log, SplitSizes(8192)) == wanted(disk_log)
    assert log.committed == open_directory(disk_log.directory).committed


def test_a_directory_of_segments_alone_is_refused_unless_uncommitted_is_meant(
    disk_log: DiskLog, tmp_path: Path
) -> None:
    """Without a checkpoint nobody knows what is committed; the error says what to do."""
    shutil.copytree(disk_log.directory / "data", tmp_path / "copy")

    with pytest.raises(LogDirectoryError, match="allowUncommitted=true"):
        open_directory(tmp_path / "copy")

    assert rows_of(open_directory(tmp_path / "copy", allow_uncommitted=True), SplitSizes(8192)) == wanted(disk_log)


def test_a_nodes_data_directory_and_its_parents_name_the_same_log(disk_log: DiskLog) -> None:
    """``…/dledger-n0/data``, ``…/dledger-n0`` and the directory that holds it."""
    found = [
        open_directory(path) for path in (disk_log.directory / "data", disk_log.directory, disk_log.directory.parent)
    ]

    assert len({(one.begin, one.end, one.committed) for one in found}) == 1


def test_two_nodes_in_one_directory_are_not_guessed_between(disk_log: DiskLog, tmp_path: Path) -> None:
    """The copies of three nodes are no log of three times the length."""
    for name in ("dledger-n0", "dledger-n1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").symlink_to(disk_log.directory / "data")

    with pytest.raises(LogDirectoryError, match="dledger-n0, dledger-n1"):
        open_directory(tmp_path)


def test_javas_checkpoint_tells_what_is_committed(disk_log: DiskLog, tmp_path: Path) -> None:
    """A directory that a Java node has written: its checkpoint is a text."""
    shutil.copytree(disk_log.directory, tmp_path / "java")
    (tmp_path / "java" / "checkpoint").write_text("#Sat Nov 21\nendIndex=599\ncommittedIndex=99\n")

    rows = rows_of(open_directory(tmp_path / "java"), SplitSizes(8192))

    assert rows == [row for row in wanted(disk_log) if int(str(row["index"])) <= 99]


def test_a_trimmed_log_begins_where_its_checkpoint_says(tmp_path: Path) -> None:
    """Retention has removed the first segment: reading begins with the second, and what is gone is told."""
    disk_log = write_disk_log(tmp_path, some_messages(400))
    whole = open_directory(disk_log.directory)
    first, second = whole.segments[0], whole.segments[1]
    header = second.header(second.base)
    assert header is not None
    found = read_checkpoint(disk_log.directory / "checkpoint")
    begin = replace(found.begin, index=LogIndex(header.index - 1), position=Position(second.base))
    create_checkpoint(FileSystem(), disk_log.directory / "checkpoint", replace(found, begin=begin))
    first.path.unlink()

    log = open_directory(disk_log.directory)

    assert rows_of(log, SplitSizes(8192)) == [row for row in wanted(disk_log) if row["segment"] != first.name]
    with pytest.raises(DataLossError, match=f"entries 3 to {header.index - 1} are gone"):
        range_of(log, ReadOptions(path="x", starting=3))
    assert range_of(log, ReadOptions(path="x", starting=3, fail_on_data_loss=False))[0] == second.base


def test_a_missing_segment_is_named(disk_log: DiskLog, tmp_path: Path) -> None:
    """A hole in the middle is never skipped in silence."""
    shutil.copytree(disk_log.directory, tmp_path / "log")
    sorted((tmp_path / "log" / "data").iterdir())[1].unlink()

    with pytest.raises(LogDirectoryError, match="a segment is missing"):
        open_directory(tmp_path / "log")


def plain_files(directory: Path, messages: Sequence[Message], base: int = 0, file_bytes: int = 16 * 1024) -> int:
    """A plain broker's files; returns where the last record ends."""
    directory.mkdir(parents=True)
    at, data = base, bytearray()
    for message in messages:
        record = encode_record(message, physical_offset=at)
        room = file_bytes - at % file_bytes
        if len(record) + 8 > room:
            data += BLANK.pack(room, BLANK_MAGIC) + bytes(room - 8)
            at += room
            record = encode_record(message, physical_offset=at)
        data += record
        at += len(record)
    data += bytes(-len(data) % file_bytes)
    for start in range(0, len(data), file_bytes):
        (directory / f"{base + start:020d}").write_bytes(data[start : start + file_bytes])
    (directory / f"{base + len(data):020d}").write_bytes(bytes(file_bytes))  # made ahead, empty
    return at


@pytest.mark.parametrize("split_bytes", [1024, 1 << 20])
def test_a_plain_commit_log_is_read_to_its_last_good_record(tmp_path: Path, split_bytes: int) -> None:
    """Files of messages without entry headers; what was torn at the end does not count."""
    messages = some_messages(120, largest=600)
    end = plain_files(tmp_path / "commitlog", messages)
    last = tmp_path / "commitlog" / f"{end - end % (16 * 1024):020d}"
    torn = encode_record(Message("torn", b"x" * 300), physical_offset=end)
    with last.open("r+b") as file:
        file.seek(end % (16 * 1024))
        file.write(torn[:200] + bytes(len(torn) - 200))

    rows = rows_of(open_directory(tmp_path), SplitSizes(split_bytes))

    assert [row["body"] for row in rows] == [one.body for one in messages]
    assert all(row["index"] is None for row in rows)


def test_a_broker_that_was_upgraded_is_one_log(tmp_path: Path) -> None:
    """Plain files first, entries from the next file on, one sequence of positions."""
    size = 64 * 1024
    old = some_messages(100, largest=500)
    end = plain_files(tmp_path / "commitlog", old, file_bytes=size)
    with (tmp_path / "commitlog" / f"{end - end % size:020d}").open("r+b") as file:
        file.seek(end % size)
        file.write(BLANK.pack(size - end % size, BLANK_MAGIC))
    divided = end - end % size + size
    write_disk_log(tmp_path, some_messages(300, seed=2), segment_bytes=size, begin=divided)

    log = open_directory(tmp_path)
    rows = rows_of(log, SplitSizes(8192))

    assert [row["body"] for row in rows] == [one.body for one in (*old, *some_messages(300, seed=2))]
    assert [row["index"] for row in rows] == [None] * 100 + list(range(300))
    assert {one.framing for one in log.segments} == {"plain", "entry"}


def test_a_broker_that_begins_a_new_log_in_dledger_mode_has_two(tmp_path: Path) -> None:
    """It does not go on from its plain log: both begin at 0, are told apart, and are read each by its name."""
    config = small_config(tmp_path)
    with running(config) as store:
        fill(store, 40)
    with master(replace(config, enable_dledger_commit_log=True)) as store:
        fill(store, 4, first=40)

    with pytest.raises(LogDirectoryError, match="belong to different logs: name the directory of one of them"):
        open_directory(tmp_path)

    old, new = (rows_of(open_directory(tmp_path / name), SplitSizes(8192)) for name in ("commitlog", "dledger-n0"))
    assert [row["body"] for row in old] == [str(number).encode().ljust(100, b".") for number in range(40)]
    assert len([row for row in new if row["topic"] == "T"]) == 4


def test_a_range_is_cut_at_indexes_and_times(disk_log: DiskLog) -> None:
    """Offsets are log indexes, the end exclusive; times are store times."""
    log = open_directory(disk_log.directory)

    by_index = rows_of(log, SplitSizes(4096), range_of(log, ReadOptions(path="x", starting=100, ending=300)))
    by_time = rows_of(log, SplitSizes(4096), range_of(log, ReadOptions(path="x", starting_ms=77, ending_ms=401)))

    assert by_index == [row for row in wanted(disk_log) if 100 <= int(str(row["index"])) < 300]
    assert by_time == wanted(disk_log)[77:401]


def test_what_is_not_committed_yet_cannot_be_asked_for(disk_log: DiskLog) -> None:
    """``endingOffsets`` beyond the committed end is told, or cut when data loss is to be borne."""
    log = open_directory(disk_log.directory)

    with pytest.raises(DataLossError, match="entry 99999 was requested"):
        range_of(log, ReadOptions(path="x", ending=99999))

    assert range_of(log, ReadOptions(path="x", ending=99999, fail_on_data_loss=False)) == (log.begin, log.end)
    with pytest.raises(OptionError, match="latest is for streams"):
        range_of(log, ReadOptions(path="x", starting=-1))


def test_a_record_that_cannot_be_stepped_over_is_told_with_its_offset(tmp_path: Path) -> None:
    """Without an index, nothing behind a broken length can be found: an error, not a short log."""
    disk_log = write_disk_log(tmp_path, some_messages(100))
    shutil.rmtree(disk_log.directory / "index")
    place = int(str(disk_log.rows[20]["position"]))
    with (disk_log.directory / "data" / f"{0:020d}").open("r+b") as file:
        file.seek(place + 4)
        file.write(b"\x7f")

    with pytest.raises(BrokenRecordError, match=f"segment {0:020d}, offset {place}: a record extends beyond"):
        rows_of(open_directory(disk_log.directory), SplitSizes(1 << 20))


def test_a_segment_that_is_gone_when_a_task_reads_it_is_told(tmp_path: Path) -> None:
    """Retention beside a query: the error says that the log was trimmed."""
    log = open_directory(write_disk_log(tmp_path, some_messages(50)).directory)
    context = DecodeContext()
    splits = plan_splits(log, log.begin, log.end, SplitSizes(8192))
    log.segments[0].path.unlink()

    with pytest.raises(DataLossError, match="trimmed"):
        list(read_split(splits[0], named_columns(("index",), context), context))


@settings(deadline=None, max_examples=fewer(20, 4))
@given(run_bytes=st.integers(1, 1 << 16), window_bytes=st.integers(1, 1 << 17), indexed=st.booleans())
def test_runs_are_no_longer_than_asked_for(
    disk_log: DiskLog, run_bytes: int, window_bytes: int, *, indexed: bool
) -> None:
    """They follow one another without a gap, and only a single record is longer."""
    log = open_directory(disk_log.directory)
    if not indexed:
        log = replace(log, index=None)

    for split in plan_splits(log, log.begin, log.end, SplitSizes(1 << 18)):
        at = split.begin
        for run in runs(split, window_bytes, run_bytes):
            assert run.base + int(run.starts[0]) == at
            assert run.end - at <= run_bytes or len(run.starts) == 1
            at = run.end
        assert at == split.end or split.is_rest


def test_a_segment_that_is_cut_short_while_it_is_read_is_told(tmp_path: Path) -> None:
    """An error that names the place, not a signal that ends the worker, when it happens between two batches."""
    log = open_directory(write_disk_log(tmp_path, some_messages(400), segment_bytes=1 << 20).directory)
    found = runs(plan_splits(log, log.begin, log.end, SplitSizes(1 << 20))[0], run_bytes=32 * 1024)
    first = next(found)

    with log.segments[0].path.open("r+b") as file:
        file.truncate(64 * 1024)

    with pytest.raises(BrokenRecordError, match=r"segment 0+, from offset \d+: the file was shortened"):
        list(found)
    assert len(first.starts) > 10


def test_only_the_split_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's memory is bounded by its split: no mapping is longer than that and a page."""
    import mmap

    lengths: list[int] = []
    real = mmap.mmap

    def noting(fd: int, length: int, **options: int) -> mmap.mmap:
        lengths.append(length)
        return real(fd, length, **options)

    log = open_directory(write_disk_log(tmp_path, some_messages(400), segment_bytes=256 * 1024).directory)
    context = DecodeContext()
    splits = plan_splits(log, log.begin, log.end, SplitSizes(32 * 1024))
    monkeypatch.setattr("dledger_spark.directory.splits.mmap.mmap", noting)

    batches = [batch for one in splits for batch in read_split(one, named_columns(NAMES, context), context)]

    assert sum(one.num_rows for one in batches) == 400
    assert len(lengths) == len(splits) > 5
    assert max(lengths) <= 32 * 1024 + 1000 + mmap.ALLOCATIONGRANULARITY
    assert isinstance(batches[0], pa.RecordBatch)
