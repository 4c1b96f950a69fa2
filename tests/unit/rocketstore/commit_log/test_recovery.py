"""Properties of opening a plain commit log after a stop, a crash, or damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from dledger.store.format import segment_name
from dledger.store.fs import FileSystem
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.recovery import LOG_END_FILE, Ending, judge
from rocketstore.mapped.file import write_stop_record
from rocketstore.message.record import BLANK, BLANK_MAGIC, decode_record
from rocketstore.types import RecordHead
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.commit_log.support import (
    FILE_BYTES,
    abandon,
    heads_of,
    message,
    open_log,
    put,
    small_config,
)

RECORD_BYTES = 192
PER_FILE = 5


def body(number: int) -> bytes:
    """A body whose record has ``RECORD_BYTES``."""
    return b"%0100d" % number


def bodies_of(log: PlainCommitLog) -> list[bytes]:
    """All bodies."""
    return [decode_record(log.read_record(head.offset) or b"").body for head in heads_of(log)]


def write_log(directory: Path, count: int, clock: ManualClock | None = None) -> list[bytes]:
    """A cleanly stopped log of ``count`` messages, ``PER_FILE`` to a file."""
    log = open_log(small_config(directory), clock=clock)
    for number in range(count):
        if clock is not None:
            clock.now_ms += 1000
        assert put(log, message(body(number)))[0].ok
    log.shutdown()
    return [body(number) for number in range(count)]


def segment(directory: Path, number: int) -> Path:
    """The path of a file of the log."""
    return directory / "commitlog" / segment_name(number * FILE_BYTES)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Damage a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("clean_stop", [True, False])
def test_what_was_written_is_there_again(tmp_path: Path, clean_stop: bool) -> None:
    """End and content are the same, everything counts as durable, and puts go on behind it."""
    bodies = write_log(tmp_path, 12)

    log = open_log(small_config(tmp_path), clean_stop=clean_stop)

    assert bodies_of(log) == bodies
    assert log.max_offset == 2 * FILE_BYTES + 2 * RECORD_BYTES == log.flushed_offset
    assert log.remaining_to_flush() == 0
    stored = put(log, message(b"next"))[0].stored
    assert stored is not None
    assert stored.offset == 2 * FILE_BYTES + 2 * RECORD_BYTES
    log.shutdown()


def is_read(log: PlainCommitLog) -> bool:
    """Whether the start has read the log's records."""
    assert log.recovery_report is not None
    return log.recovery_report.records > 0


def test_a_log_that_is_as_a_clean_stop_left_it_is_not_read(tmp_path: Path) -> None:
    """Its end, content and last store timestamp are known all the same, also after a second stop without puts."""
    clock = ManualClock()
    bodies = write_log(tmp_path, 12, clock)
    for _ in range(2):
        log = open_log(small_config(tmp_path), clock=clock)
        assert not is_read(log)
        assert (bodies_of(log), log.max_offset) == (bodies, 2 * FILE_BYTES + 2 * RECORD_BYTES)
        assert log.max_offset == log.flushed_offset
        log.shutdown()

    log = open_log(small_config(tmp_path), clock=clock)
    clock.now_ms -= 5000
    stored = put(log, message(b"next"))[0].stored
    assert stored is not None
    assert stored.store_timestamp >= clock.now_ms + 5000  # times do not fall
    log.shutdown()


@pytest.mark.parametrize(
    "change", ["time", "end", "continued", "removed", "added", "record", "no files", "crash", "checkpoint"]
)
def test_a_log_that_may_have_changed_since_a_clean_stop_is_read(tmp_path: Path, change: str) -> None:
    """Another time of a file, another end, another set of files, a damaged record of the end, a crash, or a checkpoint
    that knows more.
    """
    write_log(tmp_path, 12)
    config, files = small_config(tmp_path), [segment(tmp_path, number) for number in range(4)]
    record = config.config_dir / LOG_END_FILE
    before = files[2].stat()
    if change == "time":
        os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns - 1))
    elif change == "end":  # the last record is not what it was, though no time shows it
        overwrite(files[2], RECORD_BYTES, b"\7")
        os.utime(files[2], ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "continued":  # by another program, and a power cut took the time that was not durable
        overwrite(files[2], 2 * RECORD_BYTES, files[2].read_bytes()[RECORD_BYTES : 2 * RECORD_BYTES])
        os.utime(files[2], ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "removed":
        files[2].unlink()
    elif change == "added":
        files[3].write_bytes(bytes(FILE_BYTES))
    elif change == "record":
        overwrite(record, 12, b"9")
    elif change == "no files":
        write_stop_record(FileSystem(), record, [[], 0, 0, 0])

    durable = 2 * FILE_BYTES + 3 * RECORD_BYTES if change == "checkpoint" else None
    if change == "checkpoint":
        with pytest.raises(CorruptLogError, match="was durable"):
            open_log(config, durable_offset=durable)
    else:
        log = open_log(config, clean_stop=change != "crash")
        assert is_read(log)
        log.shutdown()


def test_a_log_that_could_not_be_opened_leaves_no_record_of_its_end(tmp_path: Path) -> None:
    """It has found none."""
    write_log(tmp_path, 12)
    overwrite(segment(tmp_path, 1), 0, b"\0\0\0\7")
    config = small_config(tmp_path)
    (config.config_dir / LOG_END_FILE).unlink()
    log = PlainCommitLog(config, clock=ManualClock())
    with pytest.raises(CorruptLogError):
        log.load(clean_stop=True)
    log.shutdown()
    assert not (config.config_dir / LOG_END_FILE).exists()


def test_an_empty_log_opens(tmp_path: Path) -> None:
    """Also a second time, with nothing put meanwhile."""
    for clean_stop in (True, False):
        log = open_log(small_config(tmp_path), clean_stop=clean_stop)
        assert (log.min_offset, log.max_offset, heads_of(log)) == (0, 0, [])
        log.shutdown()


@pytest.mark.parametrize("clean_stop", [True, False])
def test_a_last_record_cut_at_any_byte_is_dropped(tmp_path: Path, clean_stop: bool) -> None:
    """What is left of it becomes zero, what came before stays."""
    bodies = write_log(tmp_path, 2)
    path = segment(tmp_path, 0)
    record = path.read_bytes()[RECORD_BYTES : 2 * RECORD_BYTES]
    last_matters = len(record.rstrip(b"\0"))

    for length in range(last_matters):
        overwrite(path, RECORD_BYTES, record[:length] + bytes(RECORD_BYTES - length))
        log = open_log(small_config(tmp_path), clean_stop=clean_stop)
        assert bodies_of(log) == bodies[:1]
        assert log.recovery_report is not None
        assert bool(log.recovery_report.cut_reason) == bool(record[:length].strip(b"\0"))
        abandon(log)
        assert path.read_bytes()[RECORD_BYTES:] == bytes(FILE_BYTES - RECORD_BYTES)


def test_records_behind_a_cut_never_come_back(tmp_path: Path) -> None:
    """Not even when exactly what was lost is put again (issue 10666)."""
    write_log(tmp_path, 3)
    overwrite(segment(tmp_path, 0), RECORD_BYTES, bytes(RECORD_BYTES))

    log = open_log(small_config(tmp_path), clean_stop=False)
    assert put(log, message(body(7)))[0].ok
    abandon(log)

    again = open_log(small_config(tmp_path), clean_stop=False)
    assert bodies_of(again) == [body(0), body(7)]
    abandon(again)


@pytest.mark.parametrize("at", [0, 4, 9, 33, 95, 187, 190])
def test_a_damaged_byte_in_the_last_record_is_noticed(tmp_path: Path, at: int) -> None:
    """Size, magic, CRC, offset, body, topic's length, properties' length; without a durable mark the record is cut."""
    bodies = write_log(tmp_path, 3)
    path = segment(tmp_path, 0)
    offset = 2 * RECORD_BYTES + at
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x41]))

    log = open_log(small_config(tmp_path))

    assert bodies_of(log) == bodies[:2]
    abandon(log)


def test_damage_below_the_durable_mark_is_refused(tmp_path: Path) -> None:
    """The error names file and offset, and not a byte is changed."""
    write_log(tmp_path, 7)
    path = segment(tmp_path, 1)
    overwrite(path, RECORD_BYTES + 100, b"?")
    before = path.read_bytes()

    with pytest.raises(CorruptLogError, match="was durable") as caught:
        open_log(small_config(tmp_path), clean_stop=False, durable_offset=FILE_BYTES + 2 * RECORD_BYTES)

    assert (caught.value.path, caught.value.offset) == (path, RECORD_BYTES)
    assert path.read_bytes() == before


def test_damage_with_records_in_later_files_is_refused(tmp_path: Path) -> None:
    """RocketMQ cuts everything behind it."""
    write_log(tmp_path, 12)
    overwrite(segment(tmp_path, 1), 0, bytes(8))
    before = [segment(tmp_path, number).read_bytes() for number in range(3)]

    with pytest.raises(CorruptLogError, match="holds records"):
        open_log(small_config(tmp_path))

    assert [segment(tmp_path, number).read_bytes() for number in range(3)] == before


@pytest.mark.parametrize(
    ("bad", "later", "durable", "refused"),
    [
        (100, (), None, False),
        (100, (), 100, False),
        (99, (), 100, True),
        (100, (1024,), None, True),
        (100, (1024,), 0, False),
        (100, (1024,), 100, False),
        (100, (1024,), 101, True),
        (100, (1024, 2048), 0, True),
        (100, (2048,), 100, True),
        (1023, (1024,), 0, False),
        (1024, (2048,), 1024, False),
        (1024, (3072,), 1024, True),
    ],
)
def test_what_may_be_cut(bad: int, later: tuple[int, ...], durable: int | None, refused: bool) -> None:
    """Not below the durable mark, not two files before other records, and without a mark not before any."""
    ending = Ending(bad, "bad record", blank_behind=False, records_behind=later)

    assert bool(judge(ending, file_bytes=1024, durable_offset=durable)) is refused


def test_blank_files_at_the_end_are_normal(tmp_path: Path) -> None:
    """They were made ahead, or begun just before a crash."""
    bodies = write_log(tmp_path, 5)
    for number in (1, 2):
        segment(tmp_path, number).write_bytes(bytes(FILE_BYTES))

    log = open_log(small_config(tmp_path), clean_stop=False)

    assert bodies_of(log) == bodies
    assert log.max_offset == PER_FILE * RECORD_BYTES
    assert put(log, message(body(5)))[0].ok
    assert [head.offset for head in heads_of(log)][-1] == FILE_BYTES
    log.shutdown()


def test_a_log_whose_only_file_is_blank_keeps_its_place(tmp_path: Path) -> None:
    """Offsets never start again at 0 once they were higher."""
    (tmp_path / "commitlog").mkdir()
    segment(tmp_path, 7).write_bytes(bytes(FILE_BYTES))

    log = open_log(small_config(tmp_path), clean_stop=False)

    assert (log.min_offset, log.max_offset) == (7 * FILE_BYTES, 7 * FILE_BYTES)
    log.shutdown()


@pytest.mark.parametrize("length", [0, 7, 2000])
def test_a_blank_of_the_wrong_length_is_damage(tmp_path: Path, length: int) -> None:
    """A blank fills its file exactly."""
    bodies = write_log(tmp_path, 3)
    overwrite(segment(tmp_path, 0), 3 * RECORD_BYTES, BLANK.pack(length, BLANK_MAGIC))

    log = open_log(small_config(tmp_path))

    assert bodies_of(log) == bodies
    assert log.max_offset == 3 * RECORD_BYTES
    log.shutdown()


def test_after_a_clean_stop_the_last_three_files_are_read(tmp_path: Path) -> None:
    """Blank ones do not count."""
    write_log(tmp_path, 22)
    segment(tmp_path, 5).write_bytes(bytes(FILE_BYTES))
    heads: list[RecordHead] = []

    log = open_log(small_config(tmp_path), on_heads=heads.extend)

    assert [head.offset // FILE_BYTES for head in heads] == [2] * 5 + [3] * 5 + [4] * 2
    log.shutdown()


@pytest.mark.parametrize(("age_s", "first_file"), [(None, 0), (0, 0), (1, 0), (6, 1), (15, 2), (1000, 4)])
def test_after_a_crash_reading_begins_where_all_before_was_dispatched(
    tmp_path: Path, age_s: int | None, first_file: int
) -> None:
    """In the newest file that begins with a message stored by then; in the oldest if there is none."""
    clock = ManualClock()
    started_ms = clock.now_ms
    write_log(tmp_path, 22, clock)
    heads: list[RecordHead] = []
    timestamp = None if age_s is None else started_ms + age_s * 1000

    log = open_log(small_config(tmp_path), clean_stop=False, from_timestamp_ms=timestamp, on_heads=heads.extend)

    assert heads[0].offset == first_file * FILE_BYTES
    assert len(heads) == 22 - PER_FILE * first_file
    assert log.recovery_report is not None
    assert log.recovery_report.last_timestamp == started_ms + 22_000
    log.shutdown()


def test_store_time_does_not_go_back_over_a_restart(tmp_path: Path) -> None:
    """Although the clock does."""
    clock = ManualClock(5_000_000)
    write_log(tmp_path, 1, clock)
    clock.now_ms = 1_000_000

    log = open_log(small_config(tmp_path), clock=clock)
    result = put(log, message())[0]

    assert result.stored is not None
    assert result.stored.store_timestamp == 5_001_000
    log.shutdown()


def test_crcs_are_not_checked_if_that_is_switched_off(tmp_path: Path) -> None:
    """``checkCRCOnRecover``."""
    write_log(tmp_path, 2)
    overwrite(segment(tmp_path, 0), RECORD_BYTES + 100, b"?")

    log = open_log(small_config(tmp_path, check_crc_on_recover=False))

    assert len(heads_of(log)) == 2
    log.shutdown()


def test_recovery_makes_durable_what_a_killed_process_left(tmp_path: Path) -> None:
    """Its writes are in the page cache only, and later flushes would not cover older files."""
    write_log(tmp_path, 12)
    log = open_log(small_config(tmp_path), clean_stop=False)

    synced = {Path(path).name for call, path in log._fs.calls if call == "sync"}  # type: ignore[attr-defined]

    assert synced >= {segment_name(number * FILE_BYTES) for number in range(3)}
    log.shutdown()
