"""What a crash or damage leaves of a queue is cut to what is good, and replaying the log makes it whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.store.fs import FileSystem
from rocketstore.consume_queue.files import UNIT_BYTES, QueueRecovery
from rocketstore.consume_queue.queue import ConsumeQueue
from tests.crash.crash_fs import RecordingFs, crash_states
from tests.unit.rocketstore.heads import heads

FILE_BYTES = 100
COUNT = 17


def made(directory: Path) -> list[Path]:
    queue = ConsumeQueue("T", 0, directory, FILE_BYTES, FileSystem())
    queue.append(heads(0, COUNT))
    return sorted(directory.iterdir())


def recovered(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[ConsumeQueue, QueueRecovery]:
    queue = ConsumeQueue("T", 0, directory, file_bytes, FileSystem())
    queue.load()
    return queue, queue.recover()


def offsets(queue: ConsumeQueue) -> list[int]:
    return [unit.offset for number in range(queue.min_offset, queue.max_offset) if (unit := queue.unit(number))]


def test_whole_files_need_no_repair(tmp_path: Path) -> None:
    made(tmp_path / "q")
    queue, result = recovered(tmp_path / "q")
    assert result == QueueRecovery(COUNT * 100, None, ())
    assert offsets(queue) == [number * 100 for number in range(COUNT)]


def test_an_empty_directory_is_an_empty_queue(tmp_path: Path) -> None:
    _, result = recovered(tmp_path)
    assert result == QueueRecovery(-1, None, ())
    _, result = recovered(tmp_path / "none")
    assert result == QueueRecovery(-1, None, ())


def test_a_blank_last_file_was_about_to_be_used(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / f"{400:020d}").write_bytes(bytes(FILE_BYTES))
    queue, result = recovered(tmp_path)
    assert result == QueueRecovery(COUNT * 100, None, ())
    queue.append(heads(COUNT, 30))
    assert offsets(queue) == [number * 100 for number in range(30)]


def test_a_unit_that_leads_back_is_cut(tmp_path: Path) -> None:
    """Each record lies behind the one before: of two units that contradict each other neither is believed."""
    last = made(tmp_path)[-1]
    content = last.read_bytes()
    last.write_bytes(content[:UNIT_BYTES] * 2 + content[2 * UNIT_BYTES :])

    queue, result = recovered(tmp_path)

    assert queue.max_offset == COUNT - 2
    assert result.replay_from == (COUNT - 2) * 100
    queue.append(heads(COUNT - 2, COUNT))
    assert offsets(queue) == [number * 100 for number in range(COUNT)]


@pytest.mark.parametrize("length", range(0, FILE_BYTES + 1, 7))
def test_a_short_last_file_is_cut_to_whole_units(tmp_path: Path, length: int) -> None:
    last = made(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:length])
    queue, result = recovered(tmp_path)
    kept = 15 + min(length // 20, 2)
    assert offsets(queue) == [number * 100 for number in range(kept)]
    assert result.max_physical_offset == kept * 100
    queue.append(heads(0, 30))
    assert offsets(queue) == [number * 100 for number in range(30)]
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {FILE_BYTES}


def shorten(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:47])


def lengthen(paths: list[Path]) -> None:
    paths[2].write_bytes(paths[2].read_bytes() + b"\0")


def remove(paths: list[Path]) -> None:
    paths[2].unlink()


def misplace(paths: list[Path]) -> None:
    paths[2].rename(paths[2].with_name(f"{210:020d}"))


def zero_unit(paths: list[Path]) -> None:
    data = paths[2].read_bytes()
    paths[2].write_bytes(data[:20] + bytes(20) + data[40:])


def turn_back(paths: list[Path]) -> None:
    data = paths[2].read_bytes()
    paths[2].write_bytes(data[:40] + paths[0].read_bytes()[40:60] + data[60:])


def negative(paths: list[Path]) -> None:
    data = paths[1].read_bytes()
    paths[1].write_bytes(b"\xff" + data[1:])


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(shorten, 7), (lengthen, 10), (remove, 10), (misplace, 10), (zero_unit, 11), (turn_back, 11), (negative, 5)],
)
def test_damage_is_cut_and_the_log_is_to_be_replayed_from_there(
    tmp_path: Path, damage: Callable[[list[Path]], None], kept: int
) -> None:
    damage(made(tmp_path))
    queue, result = recovered(tmp_path)
    assert (result.max_physical_offset, result.replay_from) == (kept * 100, kept * 100)
    assert result.repairs
    assert offsets(queue) == [number * 100 for number in range(kept)]
    assert recovered(tmp_path)[1] == QueueRecovery(kept * 100, None, ())
    queue.append(heads(kept, COUNT))
    assert offsets(queue) == [number * 100 for number in range(COUNT)]


def test_after_a_clean_stop_a_unit_behind_the_log_s_end_is_damage(tmp_path: Path) -> None:
    """One turned bit makes it so: cut without a replay, its offset and the later ones would be given out again."""
    paths = made(tmp_path)
    data = bytearray(paths[1].read_bytes())
    data[2] ^= 1  # of the first unit's physical offset
    paths[1].write_bytes(data)
    queue = ConsumeQueue("T", 0, tmp_path, FILE_BYTES, FileSystem())
    queue.load()

    result = queue.recover(COUNT * 100, whole=True)

    assert (result.max_physical_offset, result.replay_from) == (500, 500)
    queue.append(heads(0, COUNT))
    assert offsets(queue) == [number * 100 for number in range(COUNT)]


def test_a_first_file_of_garbage_leaves_an_empty_queue_to_be_built_again(tmp_path: Path) -> None:
    made(tmp_path)[0].write_bytes(b"\xff" * FILE_BYTES)
    for path in sorted(tmp_path.iterdir())[1:]:
        path.unlink()
    queue, result = recovered(tmp_path)
    assert (result.max_physical_offset, result.replay_from) == (-1, -1)
    queue.append(heads(0, COUNT))
    assert offsets(queue) == [number * 100 for number in range(COUNT)]


@pytest.mark.parametrize("file_bytes", [60, 80, 200, 300])
def test_another_file_size_keeps_what_it_can(tmp_path: Path, file_bytes: int) -> None:
    made(tmp_path)
    queue, result = recovered(tmp_path, file_bytes)
    kept = result.max_physical_offset // 100 if result.max_physical_offset > 0 else 0
    assert offsets(queue) == [number * 100 for number in range(kept)]
    assert result.replay_from == result.max_physical_offset
    queue.append(heads(0, COUNT))
    assert offsets(queue) == [number * 100 for number in range(COUNT)]


def test_only_the_last_three_files_are_read(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "q", FILE_BYTES, FileSystem())
    queue.append(heads(0, 50))
    first = min((tmp_path / "q").iterdir())
    first.write_bytes(b"\xff" * FILE_BYTES)
    assert recovered(tmp_path / "q")[1] == QueueRecovery(5000, None, ())


def crashed(directory: Path, limit: int) -> ConsumeQueue:
    """The queue after a power cut, of which what belongs to records that end by ``limit`` was flushed."""
    queue = ConsumeQueue("T", 0, directory, FILE_BYTES, FileSystem())
    queue.load()
    assert queue.recover(limit, whole=False) == QueueRecovery(limit or -1, None, ())
    return queue


def test_after_any_crash_a_queue_is_what_was_flushed(tmp_path: Path) -> None:
    """A power cut after each change, with unsynced changes kept, lost, or lost one by one."""
    fs = RecordingFs()
    source = tmp_path / "source"
    source.mkdir()
    (source / "T").mkdir()
    queue = ConsumeQueue("T", 0, source / "T" / "0", FILE_BYTES, fs)
    flushed: dict[int, int] = {0: 0}
    for end in (3, 4, 9, 16, 17, 22):
        queue.append(heads(0, end))
        if end % 2 == 0:
            queue.flush(0)
            while not queue.flush(0):
                pass
            flushed[len(fs.changes)] = end
    count = 0
    for at in range(1, len(fs.changes) + 1):
        durable = max(end for when, end in flushed.items() if when <= at)
        for state in crash_states(fs.changes, at):
            count += 1
            target = tmp_path / f"crash{count}"
            target.mkdir()
            state.write_to(source, target)
            after = crashed(target / "T" / "0", durable * 100)
            assert offsets(after) == [number * 100 for number in range(durable)]
            after.append(heads(0, 25))
            assert offsets(after) == [number * 100 for number in range(25)]
    assert count > 100


@pytest.mark.parametrize("durable", range(COUNT + 1))
def test_any_pages_behind_what_was_flushed_may_be_lost(tmp_path: Path, durable: int) -> None:
    """Of files of 5 units each the first may be zeros and the last whole: halving would take it for the queue's end."""
    for number in range(16):
        directory = tmp_path / str(number)
        for file, path in enumerate(made(directory)):
            data, kept = path.read_bytes(), max(0, durable - file * 5) * 20
            if number & (1 << file):
                path.write_bytes(data[:kept] + bytes(len(data[kept:])))

        queue = crashed(directory, durable * 100)

        assert offsets(queue) == [number * 100 for number in range(durable)]
        queue.append(heads(0, COUNT))
        assert offsets(queue) == [number * 100 for number in range(COUNT)]


@pytest.mark.parametrize("first", [0, 3, 5, 10, 12])
def test_a_queue_whose_first_files_were_lost_begins_with_what_comes(tmp_path: Path, first: int) -> None:
    """Names that no directory sync made durable may be lost in any order; what is left says nothing about the begin."""
    for path in made(tmp_path)[:2]:
        path.unlink()

    queue = crashed(tmp_path, 0)
    queue.append(heads(first, COUNT))

    assert (queue.min_offset, offsets(queue)) == (first, [number * 100 for number in range(first, COUNT)])


def test_a_queue_of_which_a_unit_is_durable_keeps_its_numbers(tmp_path: Path) -> None:
    """Whatever came before has expired: no file is removed before a unit after it is durable."""
    for path in made(tmp_path)[:2]:
        path.unlink()

    queue = crashed(tmp_path, 1100)

    assert (queue.min_offset, queue.max_offset) == (10, 11)


def test_after_any_crash_units_that_were_cut_stay_away(tmp_path: Path) -> None:
    """The log lost its end, and other records came there: until a flush the next start cuts at the same place again."""
    fs = RecordingFs()
    source = tmp_path / "source"
    (source / "T").mkdir(parents=True)
    before = ConsumeQueue("T", 0, source / "T" / "0", FILE_BYTES, fs)
    before.append(heads(0, 14))
    before.flush(0)
    queue = ConsumeQueue("T", 0, source / "T" / "0", FILE_BYTES, fs)
    queue.load()
    queue.recover(700, whole=False)
    cut = len(fs.changes)
    fresh = [one._replace(offset=one.offset + 50) for one in heads(7, 9)]
    queue.append(fresh)
    expected = [number * 100 for number in range(7)] + [one.offset for one in fresh]
    queue.flush(0)
    flushed = len(fs.changes)
    count = 0
    for at in range(cut, flushed + 1):
        for state in crash_states(fs.changes, at):
            count += 1
            target = tmp_path / f"crash{count}"
            target.mkdir()
            state.write_to(source, target)
            if at < flushed:
                assert offsets(crashed(target / "T" / "0", 700)) == expected[:7]
            else:
                assert offsets(recovered(target / "T" / "0")[0]) == expected
    assert count > 10


def test_a_queue_that_lost_its_only_file_to_a_cut_loses_it_for_good(tmp_path: Path) -> None:
    """The file's name is removed durably by the next flush, although there is no file to flush any more."""
    fs = RecordingFs()
    directory = tmp_path / "source" / "0"
    directory.mkdir(parents=True)
    before = ConsumeQueue("T", 0, directory, FILE_BYTES, fs)
    before.append(heads(0, 3))
    before.flush(0)
    queue = ConsumeQueue("T", 0, directory, FILE_BYTES, fs)
    queue.load()
    queue.recover(0, whole=False)

    queue.flush(0)

    assert all(not state.files for state in crash_states(fs.changes, len(fs.changes)))
