"""Properties of putting into and reading from the plain commit log (RocketMQ's AppendCallbackTest among them)."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.errors import ConfigError, CorruptLogError, DiskError
from dledger.store.format import segment_name
from dledger.store.fs import DiskUsage
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import (
    PROPERTY_DELAY,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_PREPARED,
    SYS_FLAG_ROLLED_BACK,
    SYS_FLAG_STORE_HOST_V6,
    HostAddress,
)
from rocketstore.message.record import BLANK, BLANK_MAGIC, decode_record
from rocketstore.types import SCHEDULE_TOPIC, FlushDiskType, PutMessageStatus, PutResult, StoredPlace
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.support.waiting import ManualClock, wait_until
from tests.unit.rocketstore.commit_log.support import (
    FILE_BYTES,
    abandon,
    heads_of,
    message,
    open_log,
    put,
    small_config,
)

Status = PutMessageStatus
RECORD_BYTES = 97
"""Of ``message()``: 91, a topic of 1 and a body of 5 bytes."""


def stored(result: PutResult) -> StoredPlace:
    """Where a message went."""
    assert result.stored is not None, result
    return result.stored


def log_path(directory: Path, number: int) -> Path:
    """A file of the log."""
    return directory / "commitlog" / segment_name(number * FILE_BYTES)


def test_it_is_a_commit_log(tmp_path: Path) -> None:
    """The port is implemented."""
    log: CommitLog = open_log(small_config(tmp_path))

    assert not log.is_replicated
    assert log.directories() == [str(tmp_path / "commitlog")]
    assert log.put_lock_ms == 0
    log.shutdown()
    log.shutdown()


def test_a_put_tells_where_the_message_is(tmp_path: Path) -> None:
    """Result, message and record agree."""
    clock = ManualClock()
    log = open_log(small_config(tmp_path), clock=clock)
    log.set_queue_offsets({("t", 3): 41})
    one = message(queue_id=3, properties={"TAGS": "a"})

    results = put(log, message(), one)

    assert [result.status for result in results] == [Status.PUT_OK] * 2
    assert stored(results[1]) == StoredPlace(RECORD_BYTES, RECORD_BYTES + 6, 3, 41, clock.now_ms)
    assert (one.offset, one.size, one.queue_offset, one.store_timestamp) == (97, 103, 41, clock.now_ms)
    assert decode_record(log.read_record(97) or b"") == one
    assert log.queue_offsets == {("t", 0): 1, ("t", 3): 42}
    assert (log.min_offset, log.max_offset, log.earliest_message_time()) == (0, 200, clock.now_ms)
    log.shutdown()


def test_store_time_never_goes_back(tmp_path: Path) -> None:
    """Whatever the clock does: time look-ups rely on it."""
    clock = ManualClock(1000)
    log = open_log(small_config(tmp_path), clock=clock)

    times = []
    for now_ms in (1000, 900, 1100, 50):
        clock.now_ms = now_ms
        times.append(stored(put(log, message())[0]).store_timestamp)
        times.append(stored(put(log, message(), message())[1]).store_timestamp)

    assert times == [1000, 1000, 1000, 1000, 1100, 1100, 1100, 1100]
    log.shutdown()


@pytest.mark.parametrize("together", [True, False])
def test_transactional_messages_that_are_not_committed_take_no_queue_offset(tmp_path: Path, together: bool) -> None:
    """Prepared and rolled-back ones get 0, and the next ordinary one goes on counting."""
    log = open_log(small_config(tmp_path))
    flags = (0, SYS_FLAG_PREPARED, SYS_FLAG_ROLLED_BACK, 0)
    messages = [message(sys_flag=flag) for flag in flags]

    results = put(log, *messages) if together else [put(log, one)[0] for one in messages]

    assert [stored(result).queue_offset for result in results] == [0, 0, 0, 1]
    assert [head.queue_offset for head in heads_of(log)] == [0, -1, -1, 1]
    log.shutdown()


def test_delayed_messages_go_to_the_schedule_topic(tmp_path: Path) -> None:
    """With the time they are due as tags code."""
    clock = ManualClock()
    log = open_log(small_config(tmp_path), clock=clock)

    put(log, message(queue_id=5, properties={PROPERTY_DELAY: "2"}))

    head = heads_of(log)[0]
    assert (head.topic, head.queue_id, head.tags_code) == (SCHEDULE_TOPIC, 1, clock.now_ms + 5000)
    assert log.queue_offsets == {(SCHEDULE_TOPIC, 1): 1}
    log.shutdown()


def test_ipv6_hosts_are_flagged_and_their_store_time_is_in_place(tmp_path: Path) -> None:
    """Records with IPv6 hosts are longer; the time is patched where it really is."""
    clock = ManualClock()
    log = open_log(small_config(tmp_path), clock=clock)
    host = HostAddress(bytes(15) + b"\x01", 10911)
    messages = [
        message(born_host=host, store_host=host),
        message(born_host=host),
        message(store_host=host),
    ]

    results = put(log, *messages)

    assert [stored(one).size for one in results] == [121, 109, 109]
    both = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
    flags = [both, SYS_FLAG_BORN_HOST_V6, SYS_FLAG_STORE_HOST_V6]
    assert [head.sys_flag for head in heads_of(log)] == flags
    assert [head.store_timestamp for head in heads_of(log)] == [clock.now_ms] * 3
    log.shutdown()


def test_the_rest_of_a_file_becomes_a_blank(tmp_path: Path) -> None:
    """Only 8 bytes of it are written, and the next record begins the next file."""
    log = open_log(small_config(tmp_path))
    put(log, message(b"x" * 800))

    result = put(log, message(b"y" * 100))[0]

    assert stored(result).offset == FILE_BYTES
    assert stored(result).queue_offset == 1
    assert log_path(tmp_path, 0).read_bytes()[892:] == BLANK.pack(132, BLANK_MAGIC) + bytes(124)
    assert [head.offset for head in heads_of(log)] == [0, FILE_BYTES]
    assert log.next_file_offset(5) == FILE_BYTES == log.next_file_offset(FILE_BYTES - 1)
    log.shutdown()


@pytest.mark.parametrize(("left_over", "offset"), [(8, 600), (7, FILE_BYTES)])
def test_every_file_keeps_room_for_a_blank(tmp_path: Path, left_over: int, offset: int) -> None:
    """8 bytes; with less left the record goes to the next file."""
    log = open_log(small_config(tmp_path))
    put(log, message(b"x" * (600 - 92)))

    result = put(log, message(b"y" * (FILE_BYTES - 600 - 92 - left_over)))[0]

    assert stored(result).offset == offset
    log.shutdown()


def test_a_batch_is_spread_over_files_with_one_write_for_each(tmp_path: Path) -> None:
    """Queue offsets are consecutive all the same."""
    fs = FailingFs()
    log = open_log(small_config(tmp_path), fs)
    fs.calls.clear()

    results = put(log, *(message() for _ in range(25)))

    assert [stored(result).queue_offset for result in results] == list(range(25))
    assert [stored(result).offset for result in results] == [
        FILE_BYTES * (number // 10) + RECORD_BYTES * (number % 10) for number in range(25)
    ]
    writes = [path for call, path in fs.calls if call == "write"]
    assert len(writes) == 3 + 2  # a piece for each file, and two blanks
    assert len(heads_of(log)) == 25
    log.shutdown()


def test_a_record_larger_than_a_file_is_refused(tmp_path: Path) -> None:
    """RocketMQ reports it stored. Others of the batch are stored, and no file is given up for it."""
    log = open_log(small_config(tmp_path))
    largest = FILE_BYTES - 8 - 92

    results = put(log, message(), message(b"x" * (largest + 1)), message())
    alone = put(log, message(b"x" * (largest + 1)))[0]

    assert [result.status for result in results] == [Status.PUT_OK, Status.MESSAGE_ILLEGAL, Status.PUT_OK]
    assert (alone.status, alone.outcome, alone.ok) == (Status.MESSAGE_ILLEGAL, "not_applied", False)
    assert [stored(results[number]).queue_offset for number in (0, 2)] == [0, 1]
    assert log.max_offset == 2 * RECORD_BYTES
    assert put(log, message(b"x" * largest))[0].ok
    log.shutdown()


def test_what_no_record_can_hold_is_illegal(tmp_path: Path) -> None:
    """And uses no queue offset up."""
    log = open_log(small_config(tmp_path))

    results = put(log, message(topic="x" * 128), message())

    assert [result.status for result in results] == [Status.MESSAGE_ILLEGAL, Status.PUT_OK]
    assert log.queue_offsets == {("t", 0): 1}
    log.shutdown()


def test_a_full_disk_refuses_a_message_and_keeps_the_file(tmp_path: Path) -> None:
    """No blank is written before the next file is there, and with room it goes on where it was."""
    fs = FailingFs()
    log = open_log(small_config(tmp_path), fs)
    put(log, message(b"x" * 800))
    wait_until(lambda: bool(log._allocation._ready), "the next file")
    put(log, message(b"x" * 800))
    wait_until(lambda: bool(log._allocation._ready), "the file after it")  # else one that is being made would be taken
    log._allocation.forget()
    fs.fails = lambda call, _path: NO_SPACE if call == "allocate" else None
    end = log.max_offset

    results = put(log, message(), message(b"x" * 500), message())

    assert [result.status for result in results] == [
        Status.PUT_OK,
        Status.SERVICE_NOT_AVAILABLE,
        Status.SERVICE_NOT_AVAILABLE,
    ]
    assert [result.outcome for result in results] == ["stored", "not_applied", "not_applied"]
    assert "no space" in results[1].reason
    assert log.max_offset == end + RECORD_BYTES
    assert log.queue_offsets == {("t", 0): 3}

    fs.fails = lambda _call, _path: None
    assert [result.ok for result in put(log, message(b"x" * 500), message())] == [True, True]
    assert [head.queue_offset for head in heads_of(log)] == list(range(5))
    log.shutdown()


def test_a_file_that_cannot_be_created_refuses_the_message(tmp_path: Path) -> None:
    """The log itself is as good as before."""
    fs = FailingFs(lambda call, _path: IO_ERROR if call == "allocate" else None)
    log = open_log(small_config(tmp_path), fs)

    result = put(log, message())[0]
    fs.fails = lambda _call, _path: None

    assert (result.status, result.outcome) == (Status.CREATE_MAPEDFILE_FAILED, "not_applied")
    assert put(log, message())[0].ok
    log.shutdown()


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_write_ends_all_writing_and_uses_no_queue_offset(tmp_path: Path, count: int) -> None:
    """Its bytes may be there after a restart, so the outcome is unknown; later ones are certainly not stored."""
    fs = FailingFs()
    log = open_log(small_config(tmp_path), fs)
    put(log, message())
    fs.fails = lambda call, _path: IO_ERROR if call == "write" else None

    failed = put(log, *[message()] * count)
    fs.fails = lambda _call, _path: None
    later = put(log, message())[0]

    assert [(one.status, one.outcome) for one in failed] == [(Status.UNKNOWN_ERROR, "unknown")] * count
    assert (later.status, later.outcome) == (Status.SERVICE_NOT_AVAILABLE, "not_applied")
    assert log.queue_offsets == {("t", 0): 1}
    assert log.poison
    assert log.max_offset == RECORD_BYTES
    log.shutdown()


def test_before_the_start_and_after_the_end_nothing_is_taken(tmp_path: Path) -> None:
    """Refused, not lost."""
    log = PlainCommitLog(small_config(tmp_path), clock=ManualClock(), fs=FailingFs())
    log.load(clean_stop=True)

    before = put(log, message())[0]
    log.start()
    log.start()
    log.shutdown()
    after = put(log, message(), message())

    assert {one.status for one in (before, *after)} == {Status.SERVICE_NOT_AVAILABLE}


def test_sync_flush_answers_when_the_message_is_durable(tmp_path: Path) -> None:
    """And without waiting, at once."""
    log = open_log(small_config(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH))

    results = put(log, *(message() for _ in range(30)))

    assert {result.status for result in results} == {Status.PUT_OK}
    assert log.flushed_offset == log.max_offset
    assert put(log, message(), wait=False)[0].ok
    wait_until(lambda: log.remaining_to_flush() == 0, "a flush that nobody waits for")
    log.shutdown()


def test_a_slow_flush_is_told_as_a_timeout_with_an_unknown_outcome(tmp_path: Path) -> None:
    """The message is stored and can be read; messages that were refused keep their own status."""
    goes_on = threading.Event()
    fs = FailingFs()
    log = open_log(small_config(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH, sync_flush_timeout=30), fs)
    put(log, message())
    fs.fails = lambda call, _path: None if call != "sync" or goes_on.wait(60) else IO_ERROR

    results = put(log, message(), message(topic="x" * 128))

    assert [result.status for result in results] == [Status.FLUSH_DISK_TIMEOUT, Status.MESSAGE_ILLEGAL]
    assert (results[0].outcome, results[0].ok, results[1].ok) == ("unknown", True, False)
    assert log.read_record(stored(results[0]).offset) is not None
    goes_on.set()
    log.shutdown()


def test_a_batch_across_two_files_is_durable_when_both_are(tmp_path: Path) -> None:
    """The second file's flush hangs: what is in the first alone is no answer for the batch."""
    goes_on = threading.Event()
    fs = FailingFs()
    log = open_log(small_config(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH, sync_flush_timeout=50), fs)
    second = str(log_path(tmp_path, 1))
    hangs = threading.Event()

    def fails(call: str, path: str) -> int | None:
        if call == "sync" and path == second:
            hangs.set()
            goes_on.wait(60)
        return None

    fs.fails = fails
    try:
        results = put(log, *(message() for _ in range(FILE_BYTES // RECORD_BYTES + 2)))

        assert {result.status for result in results} == {Status.FLUSH_DISK_TIMEOUT}
        assert stored(results[-1]).offset >= FILE_BYTES
        wait_until(hangs.is_set, "the first file is flushed, the second one under way")
        assert log.flushed_offset <= FILE_BYTES
    finally:
        goes_on.set()
        log.shutdown()


def test_a_failed_flush_is_not_told_as_sent(tmp_path: Path) -> None:
    """Nothing counts as durable then, and nothing more is taken (issue 2706)."""
    fs = FailingFs()
    log = open_log(small_config(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH), fs)
    put(log, message())
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None

    failed = put(log, message())[0]
    fs.fails = lambda _call, _path: None
    later = put(log, message())[0]

    assert (failed.status, failed.ok, failed.outcome) == (Status.UNKNOWN_ERROR, False, "unknown")
    assert log.flushed_offset == RECORD_BYTES
    assert not later.ok
    with pytest.raises(DiskError):
        log.flush()
    log.shutdown()


def test_async_flush_flushes_by_itself(tmp_path: Path) -> None:
    """After the interval, everything once the thorough one has passed."""
    config = small_config(tmp_path, flush_interval_commit_log=1, flush_commit_log_thorough_interval=0)
    log = open_log(config)

    put(log, message())

    wait_until(lambda: log.remaining_to_flush() == 0, "a flush")
    log.shutdown()


def test_a_bad_sector_at_a_start_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a mapping it would be SIGBUS, the end of the process without a word."""
    config = small_config(tmp_path)
    log = open_log(config)
    put(log, *(message() for _ in range(25)))
    log.shutdown()
    read, bad = os.pread, log_path(tmp_path, 1)
    os.utime(bad)  # not as the clean stop left it, so that it is read

    def pread(fd: int, length: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == str(bad) and offset <= 600 < offset + length:
            raise OSError(IO_ERROR, "a bad sector")
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)

    with pytest.raises(DiskError, match=rf"offset 0 of {bad}.*a bad sector"):
        open_log(config)


def test_a_bad_sector_is_damage_of_the_messages_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed delivery, for one, goes by a damaged message; any other error of the disk would end the broker."""
    log = open_log(small_config(tmp_path))
    put(log, *(message() for _ in range(3)))
    monkeypatch.setattr(log, "_hot_bytes", -1)
    read = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        if offset <= RECORD_BYTES < offset + length:
            raise OSError(IO_ERROR, "a bad sector")
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)

    assert log.read_record(2 * RECORD_BYTES) is not None
    with pytest.raises(CorruptLogError, match="a bad sector"):
        log.read_record(RECORD_BYTES)
    log.shutdown()


def test_stopping_makes_everything_durable(tmp_path: Path) -> None:
    """However long the interval is."""
    fs = FailingFs()
    log = open_log(small_config(tmp_path, flush_interval_commit_log=3_600_000), fs)
    put(log, *(message() for _ in range(25)))
    fs.calls.clear()

    log.shutdown()

    synced = {Path(path).name for call, path in fs.calls if call == "sync"}
    assert synced >= {segment_name(number * FILE_BYTES) for number in (1, 2)}


def test_a_disk_that_hangs_does_not_hang_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told instead, so that nobody takes it for a clean stop."""
    monkeypatch.setattr("rocketstore.commit_log.flush.STOP_WAIT_S", 0.05)
    goes_on = threading.Event()
    fs = FailingFs()
    log = open_log(small_config(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH), fs)
    put(log, message())
    monkeypatch.setattr(log._allocation, "_wait_s", 0.05)
    fs.fails = lambda call, _path: None if call != "sync" or goes_on.wait(60) else IO_ERROR
    put(log, message(), wait=False)

    with pytest.raises(DiskError, match="hangs"):
        log.shutdown()

    goes_on.set()
    log.shutdown()


def test_with_the_pool_messages_are_readable_once_committed(tmp_path: Path) -> None:
    """``flush`` commits too; the queue offset is taken at once."""
    config = small_config(tmp_path, transient_store_pool_enable=True, commit_interval_commit_log=3_600_000)
    log = open_log(config)

    put(log, message())
    before = (log.max_offset, log.read(0, RECORD_BYTES), log.remaining_to_flush(), dict(log.queue_offsets))
    flushed = log.flush()

    assert before == (0, None, RECORD_BYTES, {("t", 0): 1})
    assert flushed == RECORD_BYTES == log.max_offset
    assert log.read_record(0) is not None
    log.shutdown()


def test_with_the_pool_everything_is_committed_and_flushed_in_time(tmp_path: Path) -> None:
    """Over more files than there are buffers: the rest go without."""
    config = small_config(
        tmp_path,
        transient_store_pool_enable=True,
        transient_store_pool_size=2,
        commit_interval_commit_log=1,
        flush_interval_commit_log=1,
        flush_commit_log_thorough_interval=1,
    )
    log = open_log(config)

    for _ in range(60):
        assert put(log, message())[0].ok

    wait_until(lambda: log.remaining_to_flush() == 0, "commit and flush")
    assert len(heads_of(log)) == 60
    log.shutdown()


def pooled_config(directory: Path, buffers: int, interval_ms: int) -> MessageStoreConfig:
    """A transient pool, committed and flushed every so often."""
    return small_config(
        directory,
        transient_store_pool_enable=True,
        transient_store_pool_size=buffers,
        commit_interval_commit_log=interval_ms,
        flush_interval_commit_log=interval_ms,
        commit_commit_log_thorough_interval=interval_ms,
        flush_commit_log_thorough_interval=interval_ms,
    )


def everything_is_told_readable_and_flushed(log: PlainCommitLog, told: list[int]) -> bool:
    """Whether nothing waits, and whoever follows the log was told of its end."""
    return log.remaining_to_flush() == 0 and bool(told) and told[-1] == log.max_offset


def test_with_the_pool_a_file_without_a_buffer_is_told_readable_and_flushed_too(tmp_path: Path) -> None:
    """Also when all threads were asleep before the put: nobody but the committing thread says so."""
    told: list[int] = []
    log = PlainCommitLog(pooled_config(tmp_path, 1, 1), clock=Clock(), fs=FailingFs())
    log.listen(lambda: told.append(log.max_offset))
    log.load(clean_stop=True)
    log.start()
    put(log, message(b"x" * 800))
    put(log, message(b"x" * 500))  # the next file, while the only buffer is in use

    for _ in range(3):
        wait_until(lambda: everything_is_told_readable_and_flushed(log, told), "commit and flush")
        wait_until(lambda: all(service._sleeping for service in log._flusher._paced), "the threads to sleep")
        put(log, message(b"x"))

    wait_until(lambda: everything_is_told_readable_and_flushed(log, told), "commit and flush")
    assert not log._queue.files()[-1].buffered
    log.shutdown()


def test_with_the_pool_what_follows_a_restart_is_told_readable_and_flushed(tmp_path: Path) -> None:
    """The last file of before has no buffer."""
    log = open_log(pooled_config(tmp_path, 2, 1))
    put(log, message())
    log.shutdown()
    told: list[int] = []
    again = PlainCommitLog(pooled_config(tmp_path, 2, 1), clock=Clock(), fs=FailingFs())
    again.listen(lambda: told.append(again.max_offset))
    again.load(clean_stop=True)
    again.start()

    put(again, message())

    wait_until(lambda: everything_is_told_readable_and_flushed(again, told), "commit and flush")
    assert again.flushed_offset == 2 * RECORD_BYTES
    again.shutdown()


def test_with_the_pool_a_kill_leaves_no_gap_before_a_file_without_a_buffer(tmp_path: Path) -> None:
    """What is in a buffer goes into its file before anything is written behind it."""
    log = open_log(pooled_config(tmp_path, 1, 3_600_000))
    put(log, message(b"x" * 800))
    put(log, message(b"y" * 800))
    abandon(log)

    again = open_log(small_config(tmp_path), clean_stop=False)

    assert [head.offset for head in heads_of(again)] == [0, FILE_BYTES]
    again.shutdown()


def test_with_the_pool_the_log_ends_where_the_first_thing_is_not_committed(tmp_path: Path) -> None:
    """Not at the begin of the last file while the one before it is still in its buffer."""
    log = open_log(pooled_config(tmp_path, 2, 3_600_000))
    put(log, message(b"x" * 800))
    put(log, message(b"y" * 800))
    assert (log.max_offset, log.remaining_to_flush()) == (0, FILE_BYTES + 892)

    log.flush()

    assert (log.max_offset, log.remaining_to_flush()) == (FILE_BYTES + 892, 0)
    log.shutdown()


def test_failing_fast_without_a_buffer(tmp_path: Path) -> None:
    """``fastFailIfNoBufferInStorePool``: refused as long as the only buffer is in use, and taken afterwards."""
    config = small_config(
        tmp_path,
        transient_store_pool_enable=True,
        transient_store_pool_size=1,
        fast_fail_if_no_buffer_in_store_pool=True,
        commit_interval_commit_log=3_600_000,
    )
    log = open_log(config)
    put(log, message(b"x" * 800))

    result = put(log, message(b"x" * 800))[0]

    assert (result.status, result.outcome) == (Status.CREATE_MAPEDFILE_FAILED, "not_applied")
    log.shutdown()


@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_many_threads_put_without_mixing_anything_up(tmp_path: Path, flush: FlushDiskType) -> None:
    """Every result points at its own message, and each thread's messages are in its order."""
    log = open_log(small_config(tmp_path, flush_disk_type=flush, mapped_file_size_commit_log=8192))
    results: dict[bytes, PutResult] = {}

    def work(name: int) -> None:
        for number in range(50):
            body = b"%d/%d" % (name, number)
            results[body] = put(log, message(body, queue_id=name % 2))[0]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    heads = {head.offset: head for head in heads_of(log)}
    assert len(heads) == 200
    for body, result in results.items():
        place = stored(result)
        assert decode_record(log.read_record(place.offset) or b"").body == body
        assert heads[place.offset].queue_offset == place.queue_offset
    for queue_id in (0, 1):
        offsets = [head.queue_offset for head in heads_of(log) if head.queue_id == queue_id]
        assert offsets == list(range(100))
    log.shutdown()


def test_a_read_gives_a_record_only_where_one_begins(tmp_path: Path) -> None:
    """An offset from nowhere yields nothing (RocketMQ: garbage); nor does a record inside of another one's body."""
    log = open_log(small_config(tmp_path))
    put(log, message())
    whole = log.read_record(0) or b""
    put(log, message(whole))

    assert log.read_record(RECORD_BYTES) is not None
    assert [log.read_record(offset) for offset in (1, 50, RECORD_BYTES + 88, 10_000, -1)] == [None] * 5
    assert log.read(0, RECORD_BYTES) == whole
    assert log.read(0, 10_000) is None
    log.shutdown()


def test_a_scan_step_smaller_than_a_record_still_gets_on(tmp_path: Path) -> None:
    """It takes one record then; below the first kept one it begins there."""
    log = open_log(small_config(tmp_path))
    put(log, *(message() for _ in range(25)))

    assert [head.offset for head in heads_of(log, 1)] == [head.offset for head in heads_of(log, 100_000)]
    assert log.scan(-5, 100).heads[0].offset == 0
    assert log.scan(log.max_offset, 100).next_offset == log.max_offset
    log.shutdown()


def test_a_scan_that_meets_damage_says_where(tmp_path: Path) -> None:
    """After giving what comes before it."""
    log = open_log(small_config(tmp_path))
    put(log, message(), message())
    with log_path(tmp_path, 0).open("r+b") as file:
        file.seek(RECORD_BYTES + 4)
        file.write(b"????")

    found = log.scan(0, 1000)

    assert (len(found.heads), found.next_offset) == (1, RECORD_BYTES)
    with pytest.raises(CorruptLogError, match="offset 97"):
        log.scan(RECORD_BYTES, 1000)
    log.shutdown()


def test_the_lock_time_is_that_of_the_put_under_way(tmp_path: Path) -> None:
    """For the page-cache-busy check."""
    clock = ManualClock()
    fs = FailingFs()
    log = open_log(small_config(tmp_path), fs, clock)
    put(log, message())
    seen: list[int] = []

    def slow(call: str, _path: str) -> None:
        if call == "write":
            clock.now_ms += 1500
            seen.append(log.put_lock_ms)

    fs.fails = slow
    put(log, message())

    assert seen == [1500]
    assert log.put_lock_ms == 0
    log.shutdown()


def test_expired_files_are_removed(tmp_path: Path) -> None:
    """By age; the oldest ones at once if asked; never the last; what is gone is neither read nor scanned."""
    log = open_log(small_config(tmp_path, file_reserved_time=1))
    put(log, *(message() for _ in range(45)))
    now_ms = 10_000_000_000
    for number in range(5):
        age_s = 7200 if number < 2 else 60
        os.utime(log_path(tmp_path, number), (now_ms / 1000 - age_s,) * 2)

    by_age = log.delete_expired(now_ms=now_ms, immediately=False)
    min_offset = log.min_offset
    at_once = log.delete_expired(now_ms=now_ms, immediately=True)

    assert (by_age, min_offset, at_once) == (2, 2 * FILE_BYTES, 2)
    assert log.read_record(0) is None
    assert log.scan(0, 100).heads[0].offset == 4 * FILE_BYTES
    log.shutdown()


def test_a_file_that_could_not_be_deleted_is_deleted_next_time(tmp_path: Path) -> None:
    """However young the next ones are."""
    fs = FailingFs()
    log = open_log(small_config(tmp_path), fs)
    put(log, *(message() for _ in range(25)))
    fs.fails = lambda call, _path: IO_ERROR if call == "unlink" else None
    assert log.delete_expired(now_ms=0, immediately=True) == 0
    fs.fails = lambda _call, _path: None

    assert log.delete_expired(now_ms=0, immediately=False) == 1
    assert log.min_offset == FILE_BYTES
    log.shutdown()


def paths(directory: Path, names: Sequence[str]) -> str:
    """Directories as the configuration has them."""
    return ",".join(str(directory / name) for name in names)


def test_files_are_spread_over_several_paths(tmp_path: Path) -> None:
    """And found again; a path given as read-only keeps its files and gets no new ones."""
    log = open_log(small_config(tmp_path, store_path_commit_log=paths(tmp_path, ["a", "b"])))
    put(log, *(message() for _ in range(35)))
    log.shutdown()
    found = {name: sorted(os.listdir(tmp_path / name)) for name in "ab"}

    config = small_config(
        tmp_path,
        store_path_commit_log=paths(tmp_path, ["b", "c"]),
        read_only_commit_log_store_paths=paths(tmp_path, ["a"]),
    )
    again = open_log(config)
    put(again, *(message() for _ in range(20)))

    assert found == {
        "a": [segment_name(0), segment_name(2 * FILE_BYTES)],
        "b": [segment_name(FILE_BYTES), segment_name(3 * FILE_BYTES)],
    }
    assert len(heads_of(again)) == 55
    again.shutdown()
    assert sorted(os.listdir(tmp_path / "a")) == found["a"]


def test_a_full_path_gets_no_new_file(tmp_path: Path) -> None:
    """Beyond ``diskSpaceWarningLevelRatio``, while another has room."""

    class FullA(FailingFs):
        def usage(self, path: Path) -> DiskUsage:
            return DiskUsage(100, 5, 95) if path.name == "a" else DiskUsage(100, 50, 50)

    log = open_log(small_config(tmp_path, store_path_commit_log=paths(tmp_path, ["a", "b"])), FullA())

    put(log, *(message() for _ in range(35)))
    log.shutdown()

    assert len(os.listdir(tmp_path / "b")) == 4
    assert os.listdir(tmp_path / "a") == []


def test_paths_that_cannot_work_are_configuration_errors(tmp_path: Path) -> None:
    """None writable, or a read-only one that is not there or still to be written."""
    log = open_log(small_config(tmp_path, store_path_commit_log=paths(tmp_path, ["old"])))
    put(log, message())
    log.shutdown()
    old = paths(tmp_path, ["old"])
    a = paths(tmp_path, ["a"])
    for config in (
        small_config(tmp_path, store_path_commit_log=a, read_only_commit_log_store_paths=a),
        small_config(tmp_path, read_only_commit_log_store_paths=a),
        small_config(tmp_path, read_only_commit_log_store_paths=old),
    ):
        with pytest.raises(ConfigError, match="CommitLog"):
            open_log(config)


def test_a_thread_that_dies_ends_all_writing(tmp_path: Path) -> None:
    """A log that can no longer flush must not take messages."""
    log = open_log(small_config(tmp_path))

    log._thread_died(RuntimeError("bug"))

    result = put(log, message())[0]
    assert (result.status, "bug" in result.reason) == (Status.SERVICE_NOT_AVAILABLE, True)
    log.shutdown()
