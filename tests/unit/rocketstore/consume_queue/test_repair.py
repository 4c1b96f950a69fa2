"""What a crash or damage leaves of a queue is cut to what is good, and replaying the log makes it whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.store.fs import RealFileSystem
from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.consume_queue.repair import QueueRecovery
from tests.store.crash_fs import RecordingFs, crash_states
from tests.unit.rocketstore.heads import heads

FILE_BYTES = 100
COUNT = 17


def made(directory: Path) -> list[Path]:
    queue = ConsumeQueue("T", 0, directory, FILE_BYTES, RealFileSystem())
    queue.append(heads(0, COUNT))
    return sorted(directory.iterdir())


def recovered(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[ConsumeQueue, QueueRecovery]:
    queue = ConsumeQueue("T", 0, directory, file_bytes, RealFileSystem())
    queue.load()
    return queue, queue.recover()


def offsets(queue: ConsumeQueue) -> list[int]:
    return [unit.offset for number in range(queue.max_offset) if (unit := queue.unit(number))]


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
    [(shorten, 7), (lengthen, 10), (remove, 10), (misplace, 10), (zero_unit, 11), (turn_back, 12), (negative, 5)],
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
    queue = ConsumeQueue("T", 0, tmp_path / "q", FILE_BYTES, RealFileSystem())
    queue.append(heads(0, 50))
    first = min((tmp_path / "q").iterdir())
    first.write_bytes(b"\xff" * FILE_BYTES)
    assert recovered(tmp_path / "q")[1] == QueueRecovery(5000, None, ())


def test_after_any_crash_a_queue_is_a_beginning_with_all_that_was_flushed(tmp_path: Path) -> None:
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
            after, result = recovered(target / "T" / "0")
            found = offsets(after)
            assert found == [number * 100 for number in range(len(found))]
            assert len(found) >= durable
            assert result.max_physical_offset == (len(found) * 100 or -1)
            after.append(heads(0, 25))
            assert offsets(after) == [number * 100 for number in range(25)]
    assert count > 100


def test_after_any_crash_truncated_units_stay_away(tmp_path: Path) -> None:
    fs = RecordingFs()
    source = tmp_path / "source"
    (source / "T").mkdir(parents=True)
    queue = ConsumeQueue("T", 0, source / "T" / "0", FILE_BYTES, fs)
    queue.append(heads(0, 14))
    queue.flush(0)
    queue.truncate(700)
    truncated = len(fs.changes)
    fresh = [one._replace(offset=one.offset + 50) for one in heads(7, 16)]
    queue.append(fresh)
    expected = [number * 100 for number in range(7)] + [one.offset for one in fresh]
    count = 0
    for at in range(truncated, len(fs.changes) + 1):
        for state in crash_states(fs.changes, at):
            count += 1
            target = tmp_path / f"crash{count}"
            target.mkdir()
            state.write_to(source, target)
            found = offsets(recovered(target / "T" / "0")[0])
            assert found == expected[: len(found)]
            assert len(found) >= 7
    assert count > 10
