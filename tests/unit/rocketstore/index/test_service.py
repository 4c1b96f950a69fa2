"""The key index as a whole: files in a row, replays, damage, removal."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.clock import Clock
from dledger.errors import DiskError, DiskFullError
from rocketstore.index.file import IndexShape
from rocketstore.index.service import IndexService
from rocketstore.types import RecordHead
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.unit.rocketstore.heads import STORE_MS, head, keyed

EVER = 1 << 62


class FixedClock(Clock):
    """Always the same time."""

    def __init__(self, wall_ms: int = STORE_MS) -> None:
        self.now_ms = wall_ms

    def monotonic_ms(self) -> int:
        return 0

    def wall_ms(self) -> int:
        return self.now_ms


def opened(
    directory: Path, entries: int = 5, *, fs: FailingFs | None = None, checkpoint_ms: int | None = None
) -> IndexService:
    service = IndexService(directory, 7, entries, fs, FixedClock())
    service.load(clean_stop=checkpoint_ms is None, index_timestamp_ms=checkpoint_ms or 0)
    return service


def found(service: IndexService, key: str, limit: int = 64, begin_ms: int = 0, end_ms: int = EVER) -> list[int]:
    return service.query("T", key, limit, begin_ms, end_ms).offsets


def entries(service: IndexService) -> list[int]:
    return [file.header.next_entry - 1 for file in service.files]


def record(number: int) -> RecordHead:
    """Record ``number``, found by its number and by its being odd or even, stored one second after the one before."""
    return keyed(number * 100, ("even", "odd")[number % 2], unique=str(number), store_ms=STORE_MS + number * 1000)


def test_records_are_found_newest_first_over_all_files(tmp_path: Path) -> None:
    service = opened(tmp_path)
    service.append([record(number) for number in range(9)])
    assert found(service, "odd") == [700, 500, 300, 100]
    assert found(service, "even", 2) == [800, 600]
    assert found(service, "4") == [400]
    assert found(service, "none") == []
    assert service.query("Other", "odd", 64, 0, EVER).offsets == []
    hits = service.query("T", "odd", 64, 0, EVER)
    assert (hits.last_update_ms, hits.last_offset) == (STORE_MS + 8000, 800)
    assert service.end_timestamp == STORE_MS + 8000


def test_an_empty_index_finds_nothing(tmp_path: Path) -> None:
    service = opened(tmp_path)
    assert service.query("T", "k", 10, 0, EVER) == ([], 0, 0)
    assert (service.indexed_to, service.end_timestamp, service.flush()) == (-1, 0, 0)


def test_at_most_64_are_given(tmp_path: Path) -> None:
    service = opened(tmp_path, 200)
    service.append([keyed(number, "k") for number in range(100)])
    assert found(service, "k", 1000) == list(range(99, 35, -1))


def test_only_the_time_asked_for_is_searched(tmp_path: Path) -> None:
    service = opened(tmp_path)
    service.append([record(number) for number in range(9)])
    assert found(service, "odd", begin_ms=STORE_MS + 3000, end_ms=STORE_MS + 5999) == [500, 300]
    assert found(service, "odd", begin_ms=STORE_MS + 60_000) == []
    assert found(service, "odd", end_ms=STORE_MS - 1) == []


def test_the_keys_of_a_record_lie_in_one_file(tmp_path: Path) -> None:
    service = opened(tmp_path, 6)
    service.append([keyed(0, "a", "b"), keyed(1, "a", "b", "c"), keyed(2, "a"), keyed(3, "a")])
    assert entries(service) == [5, 2]
    service.append([keyed(4, "a", "b", "c", "d", "e")])
    assert entries(service) == [5, 2, 5]
    service.append([keyed(5, *"abcdefgh")])
    assert entries(service) == [5, 2, 5, 5, 3]
    assert found(service, "a") == [5, 4, 3, 2, 1, 0]
    assert found(service, "h") == [5]


def test_file_names_are_times_and_never_fall_back(tmp_path: Path) -> None:
    clock = FixedClock()
    service = IndexService(tmp_path, 7, 3, clock=clock)
    service.load(clean_stop=True, index_timestamp_ms=0)
    service.append([record(0)])
    clock.now_ms -= 60_000
    service.append([record(1), record(2)])
    names = [file.path.name for file in service.files]
    assert all(len(name) == 17 for name in names)
    assert names == sorted(set(names))
    assert [int(name) - int(names[0]) for name in names] == [0, 1, 2]


@pytest.mark.parametrize("start", range(9))
def test_a_replay_changes_nothing(tmp_path: Path, start: int) -> None:
    service = opened(tmp_path)
    everything = [record(number) for number in range(9)]
    service.append(everything)
    before = [file.path.read_bytes() for file in service.files]
    service.append(everything[start:])
    again = opened(tmp_path)
    again.append(everything[start:])
    assert [file.path.read_bytes() for file in again.files] == before
    again.append([*everything[start:], record(9)])
    assert found(again, "odd") == [900, 700, 500, 300, 100]


def test_the_very_first_record_is_indexed_once(tmp_path: Path) -> None:
    service = opened(tmp_path)
    service.append([record(0)])
    service.append([record(0)])
    again = opened(tmp_path)
    again.append([record(0)])
    assert found(again, "0") == [0]
    assert entries(again) == [2]


def test_records_without_keys_make_no_file(tmp_path: Path) -> None:
    service = opened(tmp_path)
    service.append([])
    service.append([head(1), head(2, properties=b"TAGS\x01t")])
    assert not service.files
    assert service.indexed_to == -1


def test_after_a_clean_stop_everything_is_there(tmp_path: Path) -> None:
    opened(tmp_path).append([record(number) for number in range(9)])
    service = IndexService(tmp_path, 7, 5)
    assert service.load(clean_stop=True, index_timestamp_ms=0) == (800, None, ())
    assert found(service, "odd") == [700, 500, 300, 100]


def test_after_a_crash_files_newer_than_the_checkpoint_are_built_again(tmp_path: Path) -> None:
    opened(tmp_path).append([record(number) for number in range(9)])  # two records in a file
    service = IndexService(tmp_path, 7, 5)
    result = service.load(clean_stop=False, index_timestamp_ms=STORE_MS + 4000)
    assert (result.indexed_to, result.replay_from, len(result.removed)) == (300, 300, 3)
    assert not any(path.exists() for path in result.removed)
    service.append([record(number) for number in range(3, 9)])
    assert found(service, "odd") == [700, 500, 300, 100]
    assert found(service, "even") == [800, 600, 400, 200, 0]


def test_after_a_crash_without_a_checkpoint_all_is_built_again(tmp_path: Path) -> None:
    opened(tmp_path).append([record(0)])
    assert IndexService(tmp_path, 7, 5).load(clean_stop=False, index_timestamp_ms=0)[:2] == (-1, -1)
    assert IndexService(tmp_path, 7, 5).load(clean_stop=False, index_timestamp_ms=0) == (-1, None, ())


@pytest.mark.parametrize("damage", ["short", "long", "header", "order"])
def test_a_damaged_file_is_removed_with_all_after_it(tmp_path: Path, damage: str) -> None:
    service = opened(tmp_path)
    service.append([record(number) for number in range(9)])
    paths = [file.path for file in service.files]
    stored = bytearray(paths[2].read_bytes())
    if damage == "short":
        del stored[-1]
    elif damage == "long":
        stored += b"\0"
    elif damage == "header":
        stored[36:40] = b"\x7f\xff\xff\xff"
    else:
        stored[16:24] = bytes(8)
    paths[2].write_bytes(stored)
    again = IndexService(tmp_path, 7, 5)
    result = again.load(clean_stop=True, index_timestamp_ms=0)
    assert result == (300, 300, tuple(paths[2:]))
    again.append([record(number) for number in range(9)])
    assert found(again, "odd") == [700, 500, 300, 100]


def test_a_damaged_tail_is_noticed_after_a_crash(tmp_path: Path) -> None:
    service = opened(tmp_path, 50)
    service.append([record(number) for number in range(9)])
    path, at = service.files[0].path, service.shape.entries_at + 7 * 20
    stored = bytearray(path.read_bytes())
    stored[at : at + 20] = bytes(20)
    path.write_bytes(stored)
    again = IndexService(tmp_path, 7, 50)
    assert again.load(clean_stop=False, index_timestamp_ms=EVER) == (-1, -1, (path,))
    assert not path.exists()


@pytest.mark.parametrize("entries", [5, 50])
@pytest.mark.parametrize("durable", range(-1, 9))
def test_after_a_crash_the_index_ends_where_it_was_durable(tmp_path: Path, entries: int, durable: int) -> None:
    """And not at the beginning of a file that may hold millions of records: nothing from before is indexed again."""
    opened(tmp_path, entries).append([record(number) for number in range(9)])
    service = IndexService(tmp_path, 7, entries)

    result = service.load(clean_stop=False, index_timestamp_ms=0, durable_end=durable * 100 if durable >= 0 else -1)

    assert (result.indexed_to, result.replay_from) == (durable * 100 if durable >= 0 else -1, None)
    assert found(service, "odd") == [number * 100 for number in range(durable, -1, -1) if number % 2]
    service.append([record(number) for number in range(durable + 1, 9)])
    assert found(service, "odd") == [700, 500, 300, 100]
    assert found(service, "even") == [800, 600, 400, 200, 0]


@pytest.mark.parametrize(("file", "left"), [(0, -1), (2, 300), (4, 700)])
def test_what_was_durable_and_is_damaged_is_indexed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: int, left: int
) -> None:
    """From where the last whole file ends, and with a line in the log: never lost without notice."""
    service = opened(tmp_path)
    service.append([record(number) for number in range(9)])
    path, at = service.files[file].path, service.shape.entries_at + 20
    stored = bytearray(path.read_bytes())
    stored[16:24] = (1 << 60).to_bytes(8, "big")  # begins after it ends
    stored[at : at + 20] = b"\xff" * 20
    path.write_bytes(stored)

    again = IndexService(tmp_path, 7, 5)
    result = again.load(clean_stop=False, index_timestamp_ms=0, durable_end=800)

    assert (result.indexed_to, result.replay_from) == (left, left)
    assert str(path) in caplog.text
    again.append([record(number) for number in range(9)])
    assert found(again, "odd") == [700, 500, 300, 100]


def test_other_files_are_left_alone_and_left_overs_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "20231114221320123.tmp").write_bytes(b"half")
    opened(tmp_path).append([record(0)])
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "20231114221320123.tmp").exists()


def test_expired_files_go_but_never_the_last(tmp_path: Path) -> None:
    service = opened(tmp_path)
    service.append([record(number) for number in range(9)])  # the files end at 100, 300, 500, 700, 800
    assert service.delete_expired(300) == 1
    assert service.delete_expired(301) == 1
    assert found(service, "odd") == [700, 500]
    assert service.delete_expired(1 << 40) == 2
    assert [path.name for path in tmp_path.iterdir()] == [service.files[0].path.name]
    service.append([record(8), record(9)])
    assert found(service, "odd") == [900]


@pytest.mark.parametrize("limit", [0, 1, 100, 350, 700, 800, 801, 5000])
def test_a_truncated_log_is_indexed_anew(tmp_path: Path, limit: int) -> None:
    """Without a truncation, the new records at old offsets would be taken for indexed."""
    service = opened(tmp_path)
    service.append([record(number) for number in range(9)])
    service.truncate(limit)
    kept = [number * 100 for number in range(9) if number * 100 < limit]
    assert found(service, "odd") == [offset for offset in reversed(kept) if offset % 200]
    assert service.indexed_to == (kept[-1] if kept else -1)
    fresh = [keyed(offset, "new") for offset in range(limit, limit + 50, 10)]
    service.append(fresh)
    assert found(opened(tmp_path), "new") == [one.offset for one in reversed(fresh)]


def test_flush_tells_how_far_the_index_is_durable(tmp_path: Path) -> None:
    fs = FailingFs()
    service = opened(tmp_path, fs=fs)
    service.append([record(number) for number in range(3)])
    fs.calls.clear()
    assert service.flush() == STORE_MS + 2000
    synced = [path for call, path in fs.calls if call == "sync"]
    assert [path for path in synced if Path(path).parent == tmp_path] == [str(file.path) for file in service.files]
    count = len(fs.calls)
    assert service.flush() == STORE_MS + 2000
    assert len(fs.calls) == count
    assert found(service, "odd") == [100]


def test_after_a_failed_flush_nothing_is_called_durable(tmp_path: Path) -> None:
    fs = FailingFs()
    service = opened(tmp_path, fs=fs)
    service.append([record(0)])
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None
    with pytest.raises(DiskError):
        service.flush()
    fs.fails = lambda _call, _path: None
    with pytest.raises(DiskError):
        service.flush()


def test_a_full_disk_is_an_error_that_goes_away(tmp_path: Path) -> None:
    fs = FailingFs()
    service = opened(tmp_path, fs=fs)
    service.append([record(0)])
    for call in ("write", "allocate"):
        fs.fails = lambda asked, _path, call=call: NO_SPACE if asked == call else None  # type: ignore[misc]
        with pytest.raises(DiskFullError):
            service.append([record(number) for number in range(1, 9)])
        fs.fails = lambda _call, _path: None
    service.append([record(number) for number in range(9)])
    assert found(service, "odd") == [700, 500, 300, 100]
    assert found(service, "even") == [800, 600, 400, 200, 0]


def test_other_disk_errors_are_told_apart(tmp_path: Path) -> None:
    fs = FailingFs()
    service = opened(tmp_path, fs=fs)
    service.append([record(number) for number in range(3)])
    fs.fails = lambda call, _path: IO_ERROR if call in ("write", "unlink") else None
    for action in (
        lambda: service.append([record(3)]),
        lambda: service.delete_expired(200),
        lambda: service.truncate(0),
        lambda: service.truncate(100),
    ):
        with pytest.raises(DiskError):
            action()


def test_sums_that_the_disk_does_not_give_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed anew as it is, a file would be believed with whatever has rotted in it."""
    service = opened(tmp_path)
    service.append([record(0)])
    service.flush()

    def unreadable(path: Path) -> bytes:
        raise OSError(IO_ERROR, os.strerror(IO_ERROR), str(path))

    monkeypatch.setattr("rocketstore.index.service.read_whole", unreadable)

    with pytest.raises(DiskError, match="opening the index"):
        opened(tmp_path)


def test_a_file_is_small_on_disk_until_it_is_filled(tmp_path: Path) -> None:
    service = IndexService(tmp_path, 1000, 1_000_000)
    service.load(clean_stop=True, index_timestamp_ms=0)
    service.append([record(0)])
    stat = service.files[0].path.stat()
    assert stat.st_size == IndexShape(1000, 1_000_000).file_bytes == 20_004_040
    assert stat.st_blocks * 512 < 100_000


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 24)),
        st.tuples(st.just("replay"), st.integers(0, 12)),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("expire"), st.integers(0, 40)),
        st.tuples(st.sampled_from(["reopen", "crash", "flush"]), st.integers(0, 40)),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(steps=STEPS, size=st.integers(3, 12))
def test_the_index_is_a_list_of_records(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], size: int
) -> None:
    """Whatever happens, every key finds exactly the records of the log that carry it; expired ones may be missing."""
    directory = tmp_path_factory.mktemp("index")
    service = opened(directory, size)
    log: list[RecordHead] = []
    expired = 0
    for step, number in steps:
        if step == "append":
            log += [record(len(log) + one) for one in range(number)]
            service.append(log[len(log) - number :])
        elif step == "replay":
            service.append(log[number:])
        elif step == "truncate":
            log = log[:number]
            service.truncate(number * 100)
        elif step == "expire":
            service.delete_expired(number * 100)
            expired = max(expired, number)
        elif step == "reopen":
            service = opened(directory, size)
        elif step == "crash":
            service = IndexService(directory, 7, size, clock=FixedClock())
            start = service.load(clean_stop=False, index_timestamp_ms=STORE_MS + number * 1000).replay_from
            service.append(log if start is None else [one for one in log if one.offset >= start])
        else:
            service.flush()
        for key, parity in (("even", 0), ("odd", 1)):
            offsets = found(service, key)
            assert offsets == [one.offset for one in reversed(log) if one.offset // 100 % 2 == parity][: len(offsets)]
            assert set(offsets) >= {one.offset for one in log[expired:] if one.offset // 100 % 2 == parity}


def test_queries_see_every_indexed_record_while_the_index_grows(tmp_path: Path) -> None:
    service = IndexService(tmp_path, 50, 400)
    service.load(clean_stop=True, index_timestamp_ms=0)
    stop = threading.Event()
    problems: list[str] = []

    def read() -> None:
        while not stop.is_set():
            least = service.indexed_to
            offsets = found(service, "k")
            if offsets != list(range(offsets[0] if offsets else -1, -1, -1))[:64] or (offsets or [-1])[0] < least:
                problems.append(f"{least}: {offsets}")

    readers = [threading.Thread(target=read, name=f"reader{number}") for number in range(2)]
    for reader in readers:
        reader.start()
    for number in range(0, 900, 3):
        service.append([keyed(number + one, "k", unique=str(number + one)) for one in range(3)])
        if number % 90 == 0:
            service.flush()
    stop.set()
    for reader in readers:
        reader.join()
    assert problems == []
