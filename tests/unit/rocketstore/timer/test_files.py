"""The files of timed messages: the same on every member and after every rebuild, whole after every crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError, DiskFullError
from rocketstore.timer import hours
from rocketstore.timer.files import TimerFiles
from rocketstore.timer.hours import (
    ENTRY,
    HOUR_MS,
    HOURS_FILE,
    Entries,
    HourCounts,
    HourExtent,
    HourMark,
    TimedEntry,
    TimedProgress,
    count_hour,
    decode_hours,
    encode_hours,
    hour_path,
    read_rest,
)
from rocketstore.types import TIMED_TOPIC, RecordHead
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs, RecordingFs, crash_states
from tests.unit.rocketstore.heads import STORE_MS, head

HOUR = STORE_MS // HOUR_MS


def timed(number: int, due_ms: int, **more: int) -> RecordHead:
    """Record ``number`` of the topic; ``origin`` or ``recall`` names another."""
    text = f"UNIQ_KEY\x01{number}\x02TIMER_OUT_MS\x01{due_ms}"
    text += "".join(f"\x02TIMER_{name.upper()}\x01{value}" for name, value in more.items())
    return head(number, topic=TIMED_TOPIC, properties=text.encode())


def heads(end: int) -> list[RecordHead]:
    """In three hours, with other topics' records in between."""
    found: list[RecordHead] = []
    for number in range(end):
        due_ms = STORE_MS + number % 3 * HOUR_MS + number * 1000
        found += [timed(number, due_ms), head(number, number * 100 + 50, size=50)]
    return found


def opened(directory: Path, cut: int = 1 << 62, *, has_messages: bool = False) -> TimerFiles:
    files = TimerFiles(directory)
    assert files.load(cut, has_messages=has_messages)
    return files


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != HOURS_FILE}


def offsets(files: TimerFiles) -> list[int]:
    return sorted(int(one) for hour in files.hours() for one in files.entries(hour)["queue_offset"])


def test_a_rebuild_gives_the_same_bytes_whatever_the_batches_were(tmp_path: Path) -> None:
    """T2: derived from the log alone."""
    records = heads(40)
    one, other = opened(tmp_path / "one"), opened(tmp_path / "other")
    one.append(records)
    for at in range(0, len(records), 7):
        other.append(records[at : at + 7])
        other.append(records[max(0, at - 10) : at + 3])  # replays skip what is there
    assert content(tmp_path / "one") == content(tmp_path / "other")
    assert [one.hours(), len(content(tmp_path / "one"))] == [[HOUR, HOUR + 1, HOUR + 2], 3]
    assert offsets(one) == list(range(40))


def test_after_a_clean_stop_nothing_is_dispatched_again(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.append(heads(9))
    files.flush()
    again = opened(tmp_path, has_messages=True)
    assert (offsets(again), again.seen) == (list(range(9)), 9)
    again.append(heads(12))
    assert offsets(again) == list(range(12))


@pytest.mark.parametrize("harm", ["missing", "shorter", "changed", "no hours", "hours changed"])
def test_damage_has_everything_built_again(tmp_path: Path, harm: str) -> None:
    """T2: like consume queues: a file that is not what was durable is not believed, and no other one either."""
    files = opened(tmp_path)
    files.append(heads(9))
    files.flush()
    whole, path = content(tmp_path), hour_path(tmp_path, HOUR + 1)
    if harm == "missing":
        path.unlink()
    elif harm == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "changed":
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    elif harm == "no hours":
        (tmp_path / HOURS_FILE).unlink()
    else:
        (tmp_path / HOURS_FILE).write_bytes((tmp_path / HOURS_FILE).read_bytes()[:-2])
    again = TimerFiles(tmp_path)
    assert not again.load(1 << 62, has_messages=True)
    assert (again.hours(), again.seen) == ([], 0)
    again.append(heads(9))
    assert content(tmp_path) == whole


def test_what_is_none_of_ours_stays(tmp_path: Path) -> None:
    """A directory (as ``lost+found``) or file of somebody else stops no broker; of ours only what counts stays."""
    files = opened(tmp_path)
    files.append(heads(9))
    files.flush()
    (tmp_path / "lost+found").mkdir()
    for name in ("notes.txt", "0000000001", f"{HOUR:010d}.tmp"):
        (tmp_path / name).write_bytes(b"?")
    assert offsets(opened(tmp_path, has_messages=True)) == list(range(9))
    assert {"lost+found", "notes.txt"} < {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 6


def test_a_new_store_needs_no_rebuild(tmp_path: Path) -> None:
    assert TimerFiles(tmp_path).load(0, has_messages=False)


def test_a_file_that_changes_under_a_running_broker_is_not_served(tmp_path: Path) -> None:
    """Nothing unverified is served."""
    files = opened(tmp_path)
    files.append(heads(9))
    path = hour_path(tmp_path, HOUR)
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CorruptLogError, match="built again"):
        files.entries(HOUR)


def test_after_any_crash_the_files_and_a_replay_make_a_whole(tmp_path: Path) -> None:
    """T2: whatever of the unsynced changes a crash leaves, cut at the checkpoint and replayed from there."""
    fs, source = RecordingFs(), tmp_path / "source"
    files = TimerFiles(source, fs)
    files.load(0, has_messages=False)
    durable: list[tuple[int, int]] = [(0, 0)]  # after so many changes, the log is needed from this position on
    records = heads(12)
    for at in range(0, len(records), 6):
        files.append(records[at : at + 6])
        position = records[at + 5].offset + records[at + 5].size
        files.flush()
        durable.append((len(fs.changes), position))
    files.append(heads(14))
    files.delete_settled(TimedProgress((HOUR + 1) * HOUR_MS, 13))
    seen: set[bytes] = set()
    for at in range(len(fs.changes) + 1):
        position = max(place for changes, place in durable if changes <= at)
        for state in crash_states(fs.changes, at, subsets=2):
            if state.content in seen and position == 0:
                continue
            seen.add(state.content)
            target = tmp_path / f"crash-{len(seen)}-{position}"
            target.mkdir(exist_ok=True)
            state.write_to(source, target)
            again = TimerFiles(target)
            assert again.load(position, has_messages=position > 0), (at, state.lost)
            again.append([one for one in heads(14) if one.offset >= position])
            later = {number for number in range(14) if number % 3}
            assert later <= set(offsets(again)) <= set(range(14)), (at, state.lost)
            if at < durable[-1][0]:
                assert offsets(again) == list(range(14)), (at, state.lost)


def test_what_a_power_cut_took_from_the_log_is_not_in_the_files_any_more(tmp_path: Path) -> None:
    """T2: other messages have these queue offsets now."""
    files = opened(tmp_path)
    files.append(heads(9))
    files.flush()
    again = opened(tmp_path, 600, has_messages=True)
    assert offsets(again) == [0, 1, 2, 3, 4, 5]
    again.append([timed(6, STORE_MS + 2 * HOUR_MS + 1), timed(7, STORE_MS + 1)])
    assert [one.tolist() for one in (again.entries(HOUR + hour)["queue_offset"] for hour in range(3))] == [
        [0, 3, 7],
        [1, 4],
        [2, 5, 6],
    ]


def test_settled_hours_are_removed_and_what_comes_too_late_makes_a_new_file(tmp_path: Path) -> None:
    """T4: only what is durable counts as settled; an hour is kept while one of its messages came after the progress."""
    files = opened(tmp_path)
    files.append(heads(9))
    files.flush()
    assert files.needed_from(900) == 0
    assert files.delete_settled(TimedProgress((HOUR + 1) * HOUR_MS, 6)) == 0  # number 6 may not be delivered
    assert files.delete_settled(TimedProgress((HOUR + 1) * HOUR_MS, 7)) == 1
    assert (files.hours(), files.needed_from(900)) == ([HOUR + 1, HOUR + 2], 100)
    late = timed(9, STORE_MS + 500)
    files.append([late])
    assert files.hours()[0] == HOUR
    files.flush()
    assert offsets(opened(tmp_path, has_messages=True)) == [1, 2, 4, 5, 7, 8, 9]


def test_the_numbers_are_those_of_messages_that_wait(tmp_path: Path) -> None:
    """T5, T6, T7: recalls and copies are no messages; what a copy replaces is needed no more."""
    files = opened(tmp_path)
    files.append([timed(0, STORE_MS + 1000), timed(1, STORE_MS + 1001), timed(2, STORE_MS + HOUR_MS)])
    assert files.open_count(STORE_MS) == (3, 300)
    assert (files.due_in(STORE_MS + 1999), files.due_in(STORE_MS + 2000)) == (2, 0)
    assert files.next_due_ms(STORE_MS + 1000) == (STORE_MS + HOUR_MS) // 1000 * 1000
    files.append([timed(3, STORE_MS + 1000, recall=0), timed(4, STORE_MS + HOUR_MS, origin=2)])
    assert files.open_count(STORE_MS) == (2, 200)
    assert files.needed_from(999) == 0
    files.flush()
    assert files.needed_from(999) == 100
    files.append([timed(5, STORE_MS + 1001, recall=1)])
    files.flush()
    assert files.open_count(STORE_MS)[0] == 1
    assert opened(tmp_path, has_messages=True).open_count(STORE_MS) == files.open_count(STORE_MS)
    assert files.old_hours(STORE_MS + 1, STORE_MS) == [HOUR + 1]


def test_a_message_in_an_hour_whose_others_were_recalled_keeps_its_record(tmp_path: Path) -> None:
    """T6: or it would expire before it is due, and be lost."""
    files = opened(tmp_path)
    files.append([timed(0, STORE_MS + 1000), timed(1, STORE_MS + 1000, recall=0)])
    files.flush()
    assert files.needed_from(999) == 999
    files.append([timed(2, STORE_MS + 2000), timed(3, STORE_MS + 2000)])
    files.flush()
    assert files.needed_from(999) == 200
    assert files.old_hours(STORE_MS + 1000, HOUR * HOUR_MS) == [HOUR]


def test_numbers_are_counted_again_while_others_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T6: an hour with a million entries takes a while; dispatch does not wait, and what it adds is not forgotten."""
    files = opened(tmp_path)
    files.append([timed(0, STORE_MS + 1000), timed(1, STORE_MS + 1000), timed(2, STORE_MS + 1000, recall=0)])

    def counted_late(entries: Entries) -> HourCounts:
        monkeypatch.undo()
        files.append([timed(3, STORE_MS + 3000)])
        return count_hour(entries)

    monkeypatch.setattr("rocketstore.timer.files.count_hour", counted_late)
    files.flush()
    assert (files.needed_from(999), files.open_count(STORE_MS)) == (100, (2, 200))
    files.append([timed(4, STORE_MS + 1000, recall=1)])
    files.flush()
    assert (files.needed_from(999), files.open_count(STORE_MS)) == (300, (1, 100))


def test_one_message_is_found_in_its_hour_unless_it_was_recalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5: read piece by piece; the newest copy counts, and nothing is believed of a damaged file."""
    monkeypatch.setattr(hours, "PIECE_BYTES", 3 * ENTRY.size)
    files = opened(tmp_path / "files")
    files.append([timed(number, STORE_MS + number) for number in range(7)])
    files.append([timed(7, STORE_MS + 3, origin=3), timed(8, STORE_MS + 4, recall=4), timed(9, STORE_MS, origin=0)])
    found = [files.find(HOUR, origin) for origin in (0, 3, 4, 5, 8, 77)]
    assert [one and one.queue_offset for one in found] == [9, 7, None, 5, None, None]
    assert files.find(HOUR + 1, 5) is None
    for again in (files, opened(tmp_path / "none")):
        assert [again.is_recalled(HOUR, origin) for origin in (3, 4)] == [False, again is files]
    files.flush()
    assert opened(tmp_path / "files", has_messages=True).is_recalled(HOUR, 4)
    path = hour_path(tmp_path / "files", HOUR)
    for damaged in (path.read_bytes()[: -ENTRY.size], path.read_bytes()[:-1], b"\x7f" + path.read_bytes()[1:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptLogError):
            files.find(HOUR, 5)


def test_an_hour_that_is_removed_while_it_is_read_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T4: it is settled; that is no damage."""
    files = opened(tmp_path)
    files.append(heads(9))

    def read_late(extent: HourExtent) -> bytes:
        files.delete_settled(TimedProgress((HOUR + 1) * HOUR_MS, 9))
        return read_rest(extent)

    monkeypatch.setattr("rocketstore.timer.files.read_rest", read_late)
    assert len(files.entries(HOUR)) == 0


def test_a_follower_of_hours_hears_of_each_entry_once(tmp_path: Path) -> None:
    """T3: those in the files when it came, and those that come afterwards, up to the end of the hours."""
    files, heard = opened(tmp_path), list[TimedEntry]()
    files.append(heads(4))
    known = files.follow(0, (HOUR + 2) * HOUR_MS, heard.extend)
    files.append(heads(9))
    assert sorted(int(one) for part in known.entries for one in part["queue_offset"]) == [0, 1, 3]
    assert [one.queue_offset for one in heard] == [4, 6, 7]
    taken: list[int] = []
    assert (files.seen_with(lambda: taken.append(1)), taken) == (9, [1])
    files.unfollow()
    files.append(heads(11))
    assert len(heard) == 3


def test_what_is_added_while_a_follower_reads_the_files_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T3: dispatch does not wait for the reading of a million entries."""
    files, heard = opened(tmp_path), list[TimedEntry]()
    files.append(heads(4))

    def read_late(extent: HourExtent, size: int = 0, crc: int = 0) -> bytes:
        data = read_rest(extent, size, crc)
        if not size:
            files.append(heads(9))
        return data

    monkeypatch.setattr("rocketstore.timer.files.read_rest", read_late)
    known = files.follow(0, (HOUR + 2) * HOUR_MS, heard.extend)
    assert sorted(int(one) for part in known.entries for one in part["queue_offset"]) == [0, 1, 3, 4, 6, 7]
    assert heard == []
    files.append(heads(12))
    assert [one.queue_offset for one in heard] == [9, 10]


def test_a_follower_gets_the_hours_before_a_damaged_one(tmp_path: Path) -> None:
    """T3: and hears of what is added to them; if the first one is damaged, of nothing more than before."""
    files, heard = opened(tmp_path), list[TimedEntry]()
    files.append(heads(9))
    hour_path(tmp_path, HOUR + 1).unlink()
    known = files.follow(0, (HOUR + 3) * HOUR_MS, heard.extend)
    assert known.end_ms == (HOUR + 1) * HOUR_MS
    assert [int(one) for part in known.entries for one in part["queue_offset"]] == [0, 3, 6]
    assert files.damaged() == [HOUR + 1]
    assert files.follow(known.end_ms, (HOUR + 3) * HOUR_MS, lambda _: None).end_ms == known.end_ms
    files.append(heads(12))
    assert [one.queue_offset for one in heard] == [9]


def test_forty_days_of_hours_hold_no_files_open(tmp_path: Path) -> None:
    """T7: each has its numbers in memory, 15 KiB, and no descriptor."""
    files = opened(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    files.append([timed(number, STORE_MS + number * HOUR_MS) for number in range(960)])
    files.flush()
    assert len(files.hours()) == 960
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert sum(file.at_second.nbytes for file in files._hours.values()) <= 960 * 15 * 1024


def test_records_without_a_time_are_counted_and_left_out(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.append([head(0, topic=TIMED_TOPIC), timed(1, STORE_MS)])
    assert (offsets(files), files.malformed) == ([1], 1)


def test_a_full_disk_may_be_tried_again_and_a_failed_flush_may_not(tmp_path: Path) -> None:
    fs = FailingFs()
    files = TimerFiles(tmp_path, fs)
    files.load(0, has_messages=False)
    fs.fails = lambda call, _path: NO_SPACE if call == "write" else None
    with pytest.raises(DiskFullError):
        files.append(heads(3))
    fs.fails = lambda _call, _path: None
    files.append(heads(3))
    assert offsets(files) == [0, 1, 2]
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None
    for _ in range(2):
        with pytest.raises(DiskError):
            files.flush()


def test_the_list_of_hours_is_believed_only_whole() -> None:
    marks = [HourMark(1, 2, 3), HourMark(4, 5, 1 << 31)]
    whole = encode_hours(marks)
    assert decode_hours(whole) == marks
    for at in range(len(whole)):
        assert decode_hours(whole[:at]) is None
        assert decode_hours(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]) is None
