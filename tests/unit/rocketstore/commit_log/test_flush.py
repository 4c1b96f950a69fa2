"""Properties of flushing: group commit, deadlines, and the pace of ASYNC_FLUSH."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.runtime.threads import Supervisor
from dledger.store.mmap_file import Placement
from rocketstore.commit_log.flush import (
    CommitLogFlusher,
    DeadlineWatcher,
    FlushPace,
    FlushRequest,
    GroupFlushService,
    PacedService,
    commit_all,
    flush_all,
)
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.allocation import AllocationService, TransientStorePool
from rocketstore.mapped.queue import MappedFileQueue
from rocketstore.types import FlushDiskType, PutMessageStatus
from tests.crash.crash_fs import IO_ERROR, FailingFs
from tests.support.waiting import ManualClock, wait_until

SIZE = 1024
OK = PutMessageStatus.PUT_OK
TIMEOUT = PutMessageStatus.FLUSH_DISK_TIMEOUT


class Answers:
    """Collects statuses."""

    def __init__(self) -> None:
        self.statuses: list[PutMessageStatus] = []
        self.reasons: list[str] = []

    def __call__(self, status: PutMessageStatus, reason: str) -> None:
        self.statuses.append(status)
        self.reasons.append(reason)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """Fails the test if a thread dies."""
    fatal: list[BaseException] = []
    yield Supervisor(fatal.append)
    assert fatal == []


@pytest.fixture
def fs() -> FailingFs:
    """Counts and fails."""
    return FailingFs()


@pytest.fixture
def queue(tmp_path: Path, fs: FailingFs) -> MappedFileQueue:
    """A queue of 1 KiB files."""
    return MappedFileQueue(fs, Placement((tmp_path,)), SIZE)


def syncs(fs: FailingFs) -> int:
    """How many syncs of files there were."""
    return sum(call == "sync" for call, _ in fs.calls)


def test_a_request_is_answered_once() -> None:
    """Whoever comes second is ignored."""
    answers = Answers()
    request = FlushRequest(10, 0, answers)

    request.answer(TIMEOUT, "late")
    request.answer(OK)

    assert answers.statuses == [TIMEOUT]
    assert request.answered


def test_the_watcher_answers_what_is_due_and_nothing_else(supervisor: Supervisor) -> None:
    """It says how long to sleep until the next one; answered ones are dropped."""
    clock = ManualClock(1000)
    watcher = DeadlineWatcher(clock, supervisor)
    answers = [Answers() for _ in range(3)]
    requests = [FlushRequest(1, 1000 + 500 * number, answers[number]) for number in range(3)]
    for request in requests:
        watcher.watch(request)

    first = watcher.expire()
    requests[1].answer(OK)
    clock.now_ms = 1900
    second = watcher.expire()
    clock.now_ms = 2000
    third = watcher.expire()

    assert (first, second, third) == (0.5, 0.1, None)
    assert [one.statuses for one in answers] == [[TIMEOUT], [OK], [TIMEOUT]]
    assert watcher.watched == 0


def test_a_hanging_disk_is_answered_with_a_timeout(
    queue: MappedFileQueue, fs: FailingFs, supervisor: Supervisor
) -> None:
    """Although the flushing thread hangs with it (RocketMQ's FlushDiskWatcherTest)."""
    goes_on = threading.Event()

    def hang(call: str, _path: str) -> None:
        if call == "sync":
            goes_on.wait(60)

    fs.fails = hang
    service = GroupFlushService(queue, 30, Clock(), supervisor)
    service.start()
    answers = Answers()
    queue.append(b"x" * 10)
    service.wait_for(10, answers)

    wait_until(lambda: bool(answers.statuses), "an answer")
    goes_on.set()
    service.stop()

    assert answers.statuses == [TIMEOUT]
    assert queue.flushed_where == 10


def test_one_flush_serves_all_who_wait(queue: MappedFileQueue, fs: FailingFs, supervisor: Supervisor) -> None:
    """Group commit: as many syncs as files, however many requests."""
    service = GroupFlushService(queue, 5000, Clock(), supervisor)
    answers = Answers()
    for _ in range(24):
        queue.append(b"x" * 128)
        service.wait_for(queue.max_offset, answers)
    before = syncs(fs)

    assert service.serve()
    assert not service.serve()

    assert answers.statuses == [OK] * 24
    assert syncs(fs) - before == 3


def test_a_put_is_answered_by_the_first_flush_that_covers_it(
    queue: MappedFileQueue, fs: FailingFs, supervisor: Supervisor
) -> None:
    """However fast others go on writing: under a load without pauses nobody would ever be answered otherwise."""
    service = GroupFlushService(queue, 5000, Clock(), supervisor)
    answered_after: list[tuple[int, int]] = []
    ends: list[int] = []

    def hand_in() -> None:
        queue.append(b"x" * 10)
        ends.append(queue.max_offset)
        number = len(ends)
        service.wait_for(ends[-1], lambda _status, _reason: answered_after.append((number, syncs(fs))))

    def write_meanwhile(call: str, _path: str) -> None:
        if call == "sync" and len(ends) < 20:
            hand_in()

    hand_in()
    fs.fails = write_meanwhile
    served = [service.serve() for _ in range(3)]

    assert served == [True] * 3
    assert answered_after == [(number, number) for number in (1, 2, 3)]


def test_who_is_answered_may_read_what_he_put(queue: MappedFileQueue, supervisor: Supervisor) -> None:
    """What is flushed is said to be readable before its put is answered: who knows of it looks at once."""
    readable: list[int] = []
    service = GroupFlushService(
        queue, 5000, Clock(), supervisor, on_flushed=lambda: readable.append(queue.flushed_where)
    )
    answered: list[int] = []
    queue.append(b"x" * 10)
    service.wait_for(10, lambda _status, _reason: answered.append(readable[-1]))

    assert service.serve()

    assert answered == [10]


def test_who_waits_for_an_earlier_file_does_not_wait_for_the_later_ones(
    queue: MappedFileQueue, fs: FailingFs, supervisor: Supervisor
) -> None:
    """Files are flushed one after the other, and each flush answers those whom it covers, late ones among them."""
    service = GroupFlushService(queue, 5000, Clock(), supervisor)
    answered_after: list[tuple[int, int]] = []

    def wait_for(end: int) -> None:
        service.wait_for(end, lambda _status, _reason: answered_after.append((end, syncs(fs))))

    for _ in range(3):
        queue.append(b"x" * SIZE)
    wait_for(3 * SIZE)
    fs.fails = lambda call, _path: wait_for(SIZE) if call == "sync" and syncs(fs) == 1 else None

    assert service.serve()

    assert answered_after == [(SIZE, 1), (3 * SIZE, 3)]


@pytest.mark.parametrize("pooled", [False, True])
def test_flushing_everything_ends_while_others_go_on_writing(
    tmp_path: Path, fs: FailingFs, supervisor: Supervisor, pooled: bool
) -> None:
    """What was there when it began is durable; else the checkpoint would wait for a pause that never comes."""
    allocation = AllocationService(fs, supervisor=supervisor, pool=TransientStorePool(2, SIZE) if pooled else None)
    queue = MappedFileQueue(fs, Placement((tmp_path,)), SIZE, allocation=allocation)
    flusher = CommitLogFlusher(
        MessageStoreConfig(), queue, Clock(), supervisor, on_readable=lambda: None, pooled=pooled
    )
    queue.append(b"x" * 10)

    def write_meanwhile(call: str, _path: str) -> None:
        if call in ("sync", "write") and queue.max_wrote < 200:
            fs.fails = lambda _call, _path: None
            queue.append(b"y" * 10)
            fs.fails = write_meanwhile

    fs.fails = write_meanwhile
    durable = flusher.flush()

    assert 10 <= durable < 200
    queue.close()


def test_a_failed_flush_is_no_success(queue: MappedFileQueue, fs: FailingFs, supervisor: Supervisor) -> None:
    """Nor is it a timeout, which producers take as sent; the next request fails too."""
    service = GroupFlushService(queue, 5000, Clock(), supervisor)
    answers = Answers()
    queue.append(b"x" * 10)
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None
    service.wait_for(10, answers)

    service.serve()
    fs.fails = lambda _call, _path: None
    service.wait_for(10, answers)
    service.serve()

    assert answers.statuses == [PutMessageStatus.UNKNOWN_ERROR] * 2
    assert "flushing" in answers.reasons[0]
    assert not service.serve()


def test_a_request_for_what_was_never_written_is_not_answered_with_success(
    queue: MappedFileQueue, supervisor: Supervisor
) -> None:
    """However often the queue is flushed."""
    service = GroupFlushService(queue, 5000, Clock(), supervisor)
    answers = Answers()
    queue.append(b"x" * 10)
    service.wait_for(11, answers)

    service.serve()

    assert answers.statuses == [PutMessageStatus.UNKNOWN_ERROR]


def test_group_flushing_threads_serve_and_stop(queue: MappedFileQueue, supervisor: Supervisor) -> None:
    """Requests are served as they come; what nobody waits for is flushed as well; stopping serves the rest."""
    service = GroupFlushService(queue, 5000, Clock(), supervisor)
    service.start()
    answers = Answers()
    for number in range(20):
        queue.append(b"x" * 64)
        service.wait_for(queue.max_offset, answers)
        wait_until(lambda expected=number + 1: len(answers.statuses) == expected, "an answer")  # type: ignore[misc]
    queue.append(b"y" * 64)
    service.noted()
    wait_until(lambda: queue.flushed_where == queue.max_offset, "a flush nobody waits for")

    queue.append(b"z" * 64)
    service.wait_for(queue.max_offset, answers)
    service.stop()

    assert answers.statuses == [OK] * 21


class Work:
    """Something paced: work to do, and how it was done."""

    def __init__(self) -> None:
        self.there = False
        self.done: list[int] = []

    def waiting(self) -> bool:
        """Whether there is work."""
        return self.there

    def __call__(self, least_pages: int) -> bool:
        self.done.append(least_pages)
        if least_pages == 0:
            self.there = False
        return True


def test_every_so_often_all_is_done_whatever_its_size(supervisor: Supervisor) -> None:
    """Least pages else."""
    clock = ManualClock(0)
    work = Work()
    service = PacedService("test", FlushPace(500, 4, 1000), work, work.waiting, clock, supervisor)

    for now_ms in (500, 1000, 1500, 2000):
        clock.now_ms = now_ms
        service.step()

    assert work.done == [4, 0, 4, 0]


@pytest.mark.parametrize("timed", [True, False])
def test_a_paced_service_sleeps_until_there_is_work(supervisor: Supervisor, timed: bool) -> None:
    """It is woken by ``noted``, works, and sleeps again; stopping does what is left."""
    work = Work()
    service = PacedService("test", FlushPace(1, 4, 3, timed), work, work.waiting, Clock(), supervisor)
    service.start()

    work.there = True
    service.noted()
    wait_until(lambda: not work.there, "the work is done")
    wait_until(lambda: service._sleeping, "it sleeps")
    rounds = len(work.done)
    assert work.done[-1] == 0

    work.there = True
    service.stop()
    assert len(work.done) == rounds + 1
    assert not work.there


def test_stopping_does_not_wait_for_the_interval(supervisor: Supervisor) -> None:
    """An hour's interval, and it ends at once with everything done."""
    work = Work()
    work.there = True
    service = PacedService("test", FlushPace(3_600_000, 4, 3_600_000), work, work.waiting, Clock(), supervisor)
    service.start()

    service.stop()

    assert work.done == [0]


def test_work_that_fails_leaves_the_thread_alive(queue: MappedFileQueue, fs: FailingFs, supervisor: Supervisor) -> None:
    """The queue is poisoned, so nothing waits any more."""
    config = MessageStoreConfig(flush_interval_commit_log=1, flush_commit_log_thorough_interval=0)
    flusher = CommitLogFlusher(config, queue, Clock(), supervisor, on_readable=lambda: None, pooled=False)
    fs.fails = lambda call, _path: IO_ERROR if call == "sync" else None
    flusher.start()

    queue.append(b"x")
    flusher.first.noted()
    wait_until(lambda: bool(queue.poison), "the failure is known")
    flusher.stop()

    assert queue.flushed_where == 0


def test_flushing_and_committing_go_over_all_files(queue: MappedFileQueue) -> None:
    """Both say whether anything moved."""
    for _ in range(3):
        queue.append(b"x" * SIZE)

    assert (commit_all(queue), queue.committed_where) == (True, 3 * SIZE)
    assert (flush_all(queue), queue.flushed_where) == (True, 3 * SIZE)
    assert (commit_all(queue), flush_all(queue)) == (False, False)


def test_paces_are_the_configured_ones() -> None:
    """RocketMQ's defaults."""
    config = MessageStoreConfig()

    assert FlushPace.of_flush(config) == FlushPace(500, 4, 10_000, timed=True)
    assert FlushPace.of_commit(config) == FlushPace(200, 4, 200, timed=True)


def test_with_sync_flush_there_is_a_group_service_only(queue: MappedFileQueue, supervisor: Supervisor) -> None:
    """``flush`` of its own works beside it."""
    config = MessageStoreConfig(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    flusher = CommitLogFlusher(config, queue, Clock(), supervisor, on_readable=lambda: None, pooled=False)
    flusher.start()
    queue.append(b"x" * 10)

    assert flusher.group is not None
    assert flusher.flush() == 10

    flusher.stop()
