"""Dispatch loses nothing, says when it cannot go on, and wakes cheaply."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskFullError, InvariantError
from rocketstore.store.dispatch import DEFERRED_BYTES_MAX, SCAN_BYTES, DispatchService
from rocketstore.types import RecordHead, ScannedRecords
from tests.support.waiting import wait_until
from tests.unit.rocketstore.fakes import FakeLog, FakeSink, head

DAMAGE = CorruptLogError(Path("log"), 5, "no record", "look")


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def service(log: FakeLog, sink: FakeSink) -> Iterator[DispatchService]:
    service = DispatchService(log, [sink])
    yield service
    service.stop(60)


def offsets(sink: FakeSink) -> list[int]:
    return [head.offset for head in sink.heads]


def test_what_comes_is_dispatched_when_woken(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    service.start()
    for end in (100, 300, 1000):
        log.max_offset = end
        service.wake()
        assert service.wait_dispatched(60)

    assert offsets(sink) == list(range(0, 1000, 100))
    assert service.behind_bytes() == 0


def test_a_wake_up_alone_is_enough(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    """Nobody waits, nothing polls: each wake-up after the thread fell asleep must be heard."""
    service.start()
    for count in range(1, 50):
        wait_until(lambda: service._asleep, "the thread sleeps")
        log.max_offset = count * 100
        service.wake()
        wait_until(lambda: service.position == log.max_offset, "dispatched")

    assert len(sink.heads) == 49


def test_a_put_that_comes_right_before_it_falls_asleep_is_dispatched(
    log: FakeLog, sink: FakeSink, service: DispatchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever put it saw a thread awake, and woke nobody."""
    step = service._step_patiently

    def overtaken() -> float:
        nap_s = step()
        if not nap_s and not log.max_offset:
            log.max_offset = 100
            service.wake()
        return nap_s

    monkeypatch.setattr(service, "_step_patiently", overtaken)
    service.start()

    wait_until(lambda: offsets(sink) == [0], "it is dispatched")


def test_a_sleeping_thread_does_not_scan(log: FakeLog, service: DispatchService) -> None:
    log.max_offset = 100
    service.start()
    assert service.wait_dispatched(60)
    wait_until(lambda: service._asleep, "the thread sleeps")
    scans = len(log.scans)

    threading.Event().wait(0.05)

    assert len(log.scans) == scans


@pytest.mark.parametrize(
    ("nap_s_min", "count", "nap_s"),
    [
        (0.0, 1, 0.0),
        (0.0, 2, 0.001),
        (0.0, 65, 0.016),
        (0.01, 1, 0.005),
        (0.01, 2, 0.01),
        (0.01, 65, 0.016),
        (0.05, 1, 0.005),
        (0.05, 2, 0.05),
        (0.05, 65, 0.05),
    ],
)
def test_a_single_message_is_dispatched_at_once_and_more_are_gathered(
    log: FakeLog, sink: FakeSink, nap_s_min: float, count: int, nap_s: float
) -> None:
    """While nobody waits for them, also single ones, which cost as much as many, but not for long."""
    service = DispatchService(log, [sink], nap_s_min=lambda: nap_s_min)
    log.max_offset = count * 100
    assert service._step_patiently() == nap_s
    assert len(sink.heads) == count


@pytest.mark.parametrize(
    ("behind", "goes_first", "is_much"),
    [
        (SCAN_BYTES - 1, False, False),
        (SCAN_BYTES, False, True),
        (SCAN_BYTES, True, False),
        (DEFERRED_BYTES_MAX - 1, True, False),
        (DEFERRED_BYTES_MAX, True, True),
    ],
)
def test_dispatch_naps_with_much_to_do_only_if_the_log_goes_first_and_not_for_ever(
    log: FakeLog, sink: FakeSink, behind: int, goes_first: bool, is_much: bool
) -> None:
    """A slave fetches the log before its queues; if it never catches up, the queues may lack only so much."""
    service = DispatchService(log, [sink], log_goes_first=lambda: goes_first)
    log.max_offset = behind
    assert service._has_much_to_do() is is_much


def test_it_jumps_to_the_logs_begin(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    """store.md 4.3: behind the minimum there is nothing any more."""
    log.min_offset, log.max_offset = 500, 700

    service.catch_up()

    assert offsets(sink) == [500, 600]
    assert service.position == 700


def test_a_log_that_was_set_up_anew_and_holds_nothing_yet_is_dispatched(log: FakeLog, service: DispatchService) -> None:
    """INSTALL. Else the thread looks for what is gone without a pause, until the first message follows."""
    log.min_offset = log.max_offset = 600

    service.catch_up()

    assert (service.position, service.behind_bytes()) == (600, 0)
    assert service.wait_dispatched(0.0)


def test_it_begins_where_it_is_told(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    log.max_offset = 500
    service.begin_at(300)

    service.catch_up()

    assert offsets(sink) == [300, 400]


def test_a_position_beyond_the_log_waits(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    """A restarted member knows less of the commit position than its queues hold."""
    log.max_offset = 100
    service.begin_at(300)
    service.start()
    assert service.wait_dispatched(60)
    assert service.behind_bytes() == 0

    log.max_offset = 400
    service.wake()

    assert service.wait_dispatched(60)
    assert offsets(sink) == [300]


def test_it_scans_a_megabyte_at_a_time(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    log.max_offset = 3 * SCAN_BYTES // 100 * 100

    service.catch_up()

    assert len(log.scans) == 4
    assert len(sink.heads) == log.max_offset // 100


def test_listeners_hear_of_what_can_be_read(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    heard: list[tuple[int, int, bool]] = []

    def listen(heads: Sequence[RecordHead]) -> None:
        heard.extend((head.offset, service.position, head in sink.heads) for head in heads)

    service.add_listener(listen)
    log.max_offset = 300
    service.start()
    assert service.wait_dispatched(60)
    service.stop(60)

    assert heard == [(0, 300, True), (100, 300, True), (200, 300, True)]


def test_recovery_tells_no_listener(log: FakeLog, service: DispatchService) -> None:
    """store.md 4.3: notification is not fired by recovery dispatch."""
    heard: list[RecordHead] = []
    service.add_listener(heard.extend)
    log.max_offset = 300

    service.catch_up()

    assert heard == []


def test_damage_stops_dispatch_and_is_told(log: FakeLog, sink: FakeSink) -> None:
    """RocketMQ skips to the end of its buffer: messages that were acknowledged never reach a consumer."""
    failures: list[BaseException] = []
    service = DispatchService(log, [sink], on_failure=failures.append)
    log.failure, log.max_offset = DAMAGE, 100
    service.start()

    wait_until(lambda: bool(failures), "the failure")
    log.failure = None

    assert not service.wait_dispatched(5)
    assert service.failure is failures[0] is DAMAGE
    assert (sink.heads, service.position) == ([], 0)
    assert not service.stop(5)


def test_who_waits_hears_of_a_failure_at_once(log: FakeLog, sink: FakeSink) -> None:
    service = DispatchService(log, [sink])
    log.failure, log.max_offset = DAMAGE, 100
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(service.wait_dispatched(3600)))
    waiter.start()
    service.start()

    waiter.join(60)

    assert answers == [False]
    service.stop(60)


def test_a_listeners_exception_stops_dispatch(log: FakeLog, sink: FakeSink) -> None:
    def listen(_heads: Sequence[RecordHead]) -> None:
        raise ValueError("listener")

    service = DispatchService(log, [sink])
    service.add_listener(listen)
    log.max_offset = 100
    service.start()

    wait_until(lambda: service.failure is not None, "the failure")

    assert not service.stop(5)


def test_a_full_disk_is_tried_again(
    log: FakeLog, sink: FakeSink, service: DispatchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketstore.store.dispatch.FULL_RETRY_S", 0.01)
    sink.errors = [DiskFullError("full"), DiskFullError("full")]
    log.max_offset = 300
    service.start()

    assert service.wait_dispatched(60)
    assert offsets(sink) == [0, 100, 200]


def test_damage_that_was_repaired_is_over(
    log: FakeLog, sink: FakeSink, service: DispatchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader whose dispatch waits for a repair offers leadership to others, and no longer than that."""
    monkeypatch.setattr("rocketstore.store.dispatch.FULL_RETRY_S", 0.01)
    log.failure, log.max_offset = CorruptLogError(Path("log"), 5, "no record", "look", 1), 100
    service.start()
    wait_until(lambda: service.damage is not None, "it waits for a repair")

    log.failure = None

    wait_until(lambda: service.damage is None, "it goes on")
    assert offsets(sink) == [0]


def test_a_log_that_cannot_be_read_on_is_an_error(sink: FakeSink) -> None:
    class Stuck(FakeLog):
        def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
            return ScannedRecords([], offset)

    service = DispatchService(Stuck(max_offset=100), [sink])

    with pytest.raises(InvariantError, match="cannot be read from 0"):
        service.catch_up()


def test_a_record_longer_than_a_scan_is_dispatched(sink: FakeSink) -> None:
    class Long(FakeLog):
        def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
            return super().scan(offset, bytes_max) if bytes_max > 2 * SCAN_BYTES else ScannedRecords([], offset)

    service = DispatchService(Long(max_offset=100), [sink])

    service.catch_up()

    assert offsets(sink) == [0]


def test_a_busy_dispatch_stands_still_when_asked(sink: FakeSink) -> None:
    """Under a load that never pauses the checkpoint has its turn after the step at hand."""

    class Endless(FakeLog):
        def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
            self.max_offset = offset + 100 * SCAN_BYTES
            turns.append(offset)
            if len(turns) == 10:
                threading.Thread(target=lambda: looked_at.append(service.standstill(look))).start()
                wait_until(service._turn.locked, "somebody waits for his turn")
            return ScannedRecords([head(offset)], offset + 100)

    def look() -> tuple[int, int]:
        return len(turns), service.position

    turns: list[int] = []
    looked_at: list[tuple[int, int]] = []
    service = DispatchService(Endless(max_offset=100), [sink])
    service.start()

    wait_until(lambda: bool(looked_at), "a look")
    service._stopping = True

    assert looked_at == [(10, 1000)]


def test_stop_dispatches_what_is_there(log: FakeLog, sink: FakeSink, service: DispatchService) -> None:
    service.start()
    log.max_offset = 1000

    assert service.stop(60)
    assert len(sink.heads) == 10


def test_stop_before_start_says_whether_something_is_left(log: FakeLog, service: DispatchService) -> None:
    assert service.stop(0.01)
    log.max_offset = 100
    assert not service.stop(0.01)


def test_time_of_the_last_message_is_known(log: FakeLog, service: DispatchService) -> None:
    log.times = {100: 77}
    log.max_offset = 200

    service.catch_up()

    assert service.last_store_ms == 77


def test_a_part_that_is_gone_undispatched_is_told_of(log: FakeLog, sink: FakeSink) -> None:
    """Before it is left out: whoever counts by what was dispatched does not know any more where it is."""
    jumps: list[int] = []
    service = DispatchService(log, [sink], on_jump=lambda: jumps.append(len(sink.heads)))
    log.max_offset = 300
    service.catch_up()
    assert jumps == []

    log.min_offset, log.max_offset = 600, 900
    service.catch_up()

    assert jumps == [3]
    assert offsets(sink) == [0, 100, 200, 600, 700, 800]
