"""One index file: RocketMQ's bytes, chains, truncation and what a crash leaves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem
from rocketstore.index.file import IndexFile, IndexShape, NewEntry
from rocketstore.index.format import IndexHeader, key_hash
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.unit.rocketstore.heads import STORE_MS

SHAPE = IndexShape(5, 10)
EVER = 1 << 62
GOLDEN = (
    "0000018BCFE5687B 0000018BCFE56BE8 0000000000000400 0000000000000BB8 00000002 00000005"
    "00000002 00000000 00000000 00000000 00000004"
    "00000000 0000000000000000 00000000 00000000"
    "0029E6A8 0000000000000400 00000000 00000000"
    "0029E6A9 0000000000000400 00000000 00000000"
    "0029E6A8 0000000000000800 00000005 00000001"
    "019A9582 0000000000000BB8 00000000 00000003"
)
GOLDEN_PUTS = [("k1", 1024, 123), ("k2", 1024, 123), ("k1", 2048, 5999), ("polygenelubricants", 3000, 1000)]


def create(directory: Path, shape: IndexShape = SHAPE, before: IndexHeader | None = None) -> IndexFile:
    return IndexFile.create(FileSystem(), directory / "20231114221320123", shape, before)


def reopen(file: IndexFile) -> IndexFile:
    return IndexFile(FileSystem(), file.path, file.shape)


def fill(file: IndexFile, rows: Sequence[tuple[int, int, int]]) -> None:
    """Put (hash, offset, store ms) all at once."""
    keys, offsets, times = (np.array(column) for column in zip(*rows, strict=True))
    file.put_all(keys.astype(np.int32), offsets.astype(np.int64), times.astype(np.int64))


def golden_file(directory: Path) -> IndexFile:
    file = create(directory)
    for key, offset, milliseconds in GOLDEN_PUTS:
        assert file.put(key_hash("TopicTest", key), offset, STORE_MS + milliseconds)
    return file


def test_the_bytes_are_those_of_rocketmq(tmp_path: Path) -> None:
    file = golden_file(tmp_path)
    stored = file.path.read_bytes()
    assert stored[: len(bytes.fromhex(GOLDEN))] == bytes.fromhex(GOLDEN)
    assert len(stored) == SHAPE.file_bytes == 40 + 5 * 4 + 10 * 20


def test_puts_of_a_batch_give_the_same_bytes_as_one_by_one(tmp_path: Path) -> None:
    one_by_one = golden_file(tmp_path).path.read_bytes()
    (tmp_path / "batch").mkdir()
    batch = create(tmp_path / "batch")
    fill(batch, [(key_hash("TopicTest", key), offset, STORE_MS + ms) for key, offset, ms in GOLDEN_PUTS])
    assert batch.path.read_bytes() == one_by_one


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, (1 << 31) - 1), st.integers(0, 3), st.integers(-2000, 2000)), min_size=1, max_size=40
    ),
    few=st.integers(1, 8),
    slots=st.sampled_from([1, 3, 2000]),
)
def test_a_few_entries_at_a_time_give_the_same_bytes_and_sums(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], few: int, slots: int
) -> None:
    """Also where several of them share a slot."""
    directory, shape = tmp_path_factory.mktemp("index"), IndexShape(slots, 100)
    ends = itertools.accumulate((step for _, step, _ in rows), initial=1024)
    entries = [NewEntry(key, end, STORE_MS + ms) for (key, _, ms), end in zip(rows, ends, strict=False)]
    (directory / "together").mkdir()
    together, by_few = create(directory / "together", shape), create(directory, shape)
    fill(together, entries)
    for first in range(0, len(entries), few):
        by_few.put_few(entries[first : first + few])

    assert by_few.path.read_bytes() == together.path.read_bytes()
    assert by_few.header == together.header
    kept, expected = by_few.sums, together.sums
    assert kept is not None
    assert expected is not None
    assert kept.encode() == expected.encode()


def test_a_file_of_rocketmq_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "20231114221320123"
    path.write_bytes(bytes.fromhex(GOLDEN).ljust(SHAPE.file_bytes, b"\0"))
    file = IndexFile(FileSystem(), path, SHAPE)
    k1 = key_hash("TopicTest", "k1")
    assert file.header == IndexHeader(STORE_MS + 123, STORE_MS + 1000, 1024, 3000, 2, 5)
    assert file.select(k1, 10, 0, EVER) == [2048, 1024]
    assert file.put(k1, 4000, STORE_MS + 9000)
    assert file.select(k1, 10, 0, EVER) == [4000, 2048, 1024]


def test_a_file_of_400_entries_takes_399(tmp_path: Path) -> None:
    file = create(tmp_path, IndexShape(100, 400))
    for number in range(399):
        assert file.put(key_hash("T", str(number)), number, STORE_MS)
    assert not file.put(key_hash("T", "400"), 400, STORE_MS)
    assert file.select(key_hash("T", "60"), 10, 0, EVER) == [60]
    assert reopen(file).select(key_hash("T", "60"), 10, 0, EVER) == [60]


def test_an_empty_file_finds_nothing_and_follows_the_one_before(tmp_path: Path) -> None:
    before = IndexHeader(1, STORE_MS, 2, 500, 3, 4)
    file = create(tmp_path, before=before)
    assert file.header == IndexHeader(STORE_MS, STORE_MS, 500, 500, 0, 1)
    assert file.select(1, 10, 0, EVER) == []
    assert file.put(1, 600, STORE_MS + 7_200_000)
    # RocketMQ would count this entry's time from the end of the file before, two hours too late.
    assert file.header.begin_ms == STORE_MS + 7_200_000
    assert file.select(1, 10, STORE_MS + 7_200_000, STORE_MS + 7_200_999) == [600]


def test_times_are_whole_seconds_and_find_rather_too_much(tmp_path: Path) -> None:
    file = create(tmp_path)
    fill(file, [(3, 100, STORE_MS), (3, 200, STORE_MS + 1999), (3, 300, STORE_MS + 5000)])
    assert file.select(3, 10, STORE_MS + 1999, STORE_MS + 1999) == [200]
    assert file.select(3, 10, STORE_MS + 2000, EVER) == [300]
    assert file.select(3, 10, 0, STORE_MS + 4999) == [200, 100]
    assert file.select(3, 2, 0, EVER) == [300, 200]


def test_a_clock_that_goes_back_gives_no_negative_times(tmp_path: Path) -> None:
    file = create(tmp_path)
    fill(file, [(3, 100, STORE_MS), (3, 200, STORE_MS - 50_000)])
    assert file.select(3, 10, 0, EVER) == [200, 100]


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    create(tmp_path).put(1, 1, STORE_MS)
    full = False
    fs = FailingFs(lambda call, _path: NO_SPACE if full and call == "write" else None)
    file = IndexFile(fs, tmp_path / "20231114221320123", SHAPE)
    full = True
    before = file.header
    with pytest.raises(OSError, match="space"):
        file.put(1, 2, STORE_MS)
    full = False
    assert file.header == before
    assert file.select(1, 10, 0, EVER) == [1]
    assert file.put(1, 3, STORE_MS)
    assert file.select(1, 10, 0, EVER) == [3, 1]


def test_a_failed_sync_leaves_the_file_dirty(tmp_path: Path) -> None:
    create(tmp_path)
    file = IndexFile(
        FailingFs(lambda call, _path: IO_ERROR if call == "sync" else None), tmp_path / "20231114221320123", SHAPE
    )
    file.put(1, 1, STORE_MS)
    with pytest.raises(OSError, match="error"):
        file.sync()
    assert file.dirty


@pytest.mark.parametrize(("at", "value"), [(36, 11), (16, 1 << 40)])
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, at: int, value: int) -> None:
    file = golden_file(tmp_path)
    stored = bytearray(file.path.read_bytes())
    length = 4 if at == 36 else 8
    stored[at : at + length] = value.to_bytes(length, "big")
    file.path.write_bytes(stored)
    with pytest.raises(CorruptLogError):
        reopen(file)


def test_slots_that_a_crash_left_behind_are_mended(tmp_path: Path) -> None:
    file = golden_file(tmp_path)
    whole = file.path.read_bytes()
    for lost in (whole[40:60], bytes(20)):
        del file
        stored = bytearray(whole)
        stored[40:60] = bytes(20) if lost == bytes(20) else bytes.fromhex("00000001") + lost[4:]
        (tmp_path / "20231114221320123").write_bytes(stored)
        file = IndexFile(FileSystem(), tmp_path / "20231114221320123", SHAPE)
        assert file.recover()
        assert file.path.read_bytes() == whole


@pytest.mark.parametrize("entry", [1, 3, 4])
def test_entries_that_a_crash_lost_are_noticed(tmp_path: Path, entry: int) -> None:
    file = golden_file(tmp_path)
    stored = bytearray(file.path.read_bytes())
    at = SHAPE.entries_at + entry * 20
    stored[at : at + 20] = bytes(20)
    file.path.write_bytes(stored)
    assert not reopen(file).recover()


def crashed_file(path: Path, durable: bytes, now: bytes, lost: list[int]) -> IndexFile:
    """``now`` on the disk, but for those 4-byte words that differ and are ``lost``; reopened."""
    words = [at for at in range(0, len(now), 4) if now[at : at + 4] != durable[at : at + 4]]
    content = bytearray(now)
    for number, at in enumerate(words):
        if number in lost:
            content[at : at + 4] = durable[at : at + 4]
    content[:40] = durable[:40] if len(lost) % 2 else now[:40]  # a header lies in one sector: all of it or nothing
    path.write_bytes(content)
    return IndexFile(FileSystem(), path, IndexShape(4, 100))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=12),
    more=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), min_size=1, max_size=12),
    lost=st.lists(st.integers(0, 80), unique=True),
    first=st.sampled_from([0, 1, 1 << 32]),
)
def test_a_power_cut_takes_back_what_is_newer_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int]],
    more: list[tuple[int, int]],
    lost: list[int],
    first: int,
) -> None:
    """Slots, header and entries may each be older or newer: a slot ahead of the header would hide its whole chain."""
    file = create(tmp_path_factory.mktemp("index"), IndexShape(4, 100))
    model = [(rows[0][0], first, 0), *placed([(key, step, 0) for key, step in rows], first, 0)]
    fill(file, [(key, offset, STORE_MS) for key, offset, _ in model])
    durable, end = file.path.read_bytes(), model[-1][1]
    newer = placed([(key, step, 0) for key, step in more], end, 0)
    fill(file, [(key, offset, STORE_MS) for key, offset, _ in newer])

    file = crashed_file(file.path, durable, file.path.read_bytes(), lost)

    assert file.recover(end, len(model))
    check(file, model)
    fill(file, [(key, offset, STORE_MS) for key, offset, _ in newer])
    check(file, model + newer)
    check(reopen(file), model + newer)


def test_what_a_flush_overtakes_is_flushed_again(tmp_path: Path) -> None:
    """A sync may run between the announcement of a change and the change itself."""
    create(tmp_path)
    fs = FailingFs()
    file = IndexFile(fs, tmp_path / "20231114221320123", SHAPE)
    fs.fails = lambda call, _path: file.sync() if call == "write" else None

    file.put(1, 1, STORE_MS)

    assert file.dirty


def test_slots_that_were_mended_are_flushed(tmp_path: Path) -> None:
    """The next checkpoint relies on them."""
    file = golden_file(tmp_path)
    stored = bytearray(file.path.read_bytes())
    stored[40:60] = bytes(20)
    file.path.write_bytes(stored)
    file = reopen(file)

    assert file.recover()

    assert file.dirty


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 4000)), min_size=1, max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=ROWS, cuts=st.lists(st.integers(1, 30), max_size=4), limit=st.integers(0, 40), again=ROWS)
def test_a_file_is_a_list_of_entries(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int, int]],
    cuts: list[int],
    limit: int,
    again: list[tuple[int, int, int]],
) -> None:
    """Whatever the batches: every key finds its records, newest first; also after a truncation, and reopened."""
    file = create(tmp_path_factory.mktemp("index"), IndexShape(4, 100))
    model = placed(rows, 0, 0)
    edges = sorted({0, len(model), *(cut for cut in cuts if cut < len(model))})
    for start, end in itertools.pairwise(edges):
        fill(file, [(key, offset, STORE_MS + ms) for key, offset, ms in model[start:end]])
    check(file, model)
    file.truncate(limit)
    model = [row for row in model if row[1] < limit]
    check(file, model)
    more = placed(again, limit, model[-1][2] if model else 0)
    fill(file, [(key, offset, STORE_MS + ms) for key, offset, ms in more])
    check(file, model + more)
    assert reopen(file).recover()
    check(reopen(file), model + more)


def placed(rows: list[tuple[int, int, int]], offset: int, ms: int) -> list[tuple[int, int, int]]:
    """Steps between offsets and times turned into offsets and times."""
    model = []
    for key, step, step_ms in rows:
        offset, ms = offset + step, ms + step_ms
        model.append((key, offset, ms))
    return model


def check(file: IndexFile, model: list[tuple[int, int, int]]) -> None:
    assert file.header.next_entry == len(model) + 1
    assert file.header.used_slots == len({key % 4 for key, _, _ in model})
    assert file.header.end_offset == (model[-1][1] if model else 0)
    for key in range(13):
        assert file.select(key, 100, 0, EVER) == [offset for one, offset, _ in reversed(model) if one == key]
    if model:
        begin, middle = model[0][2], model[len(model) // 2][2]
        for key in range(13):
            assert file.select(key, 100, STORE_MS + middle, EVER) == [
                offset
                for one, offset, ms in reversed(model)
                if one == key and begin + (ms - begin) // 1000 * 1000 + 999 >= middle
            ]
