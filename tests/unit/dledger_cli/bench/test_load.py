"""Making load, with clients that answer when the test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dledger.errors import AccessDeniedError, DLedgerError, EntryTooLargeError, UnavailableError
from dledger_cli.commands.bench import BenchLoad, LoadPlan, Submit
from rocketstore.client import ForbiddenError, NotFoundError

DEADLINE_S = 120.0


class AnsweredItem:
    """Answered before anybody asks."""

    def __init__(self, error: DLedgerError | None = None) -> None:
        self._error = error

    def exception(self) -> DLedgerError | None:
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


class UnansweredItem(AnsweredItem):
    """Answered when ``answer`` is called."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callback = callback

    def answer(self) -> None:
        self._callback(self)


def plan(
    *,
    records: int | None = None,
    seconds: float | None = None,
    rate: float | None = None,
    in_flight: int = 100,
    clients: int = 1,
) -> LoadPlan:
    return LoadPlan(records, seconds, rate, in_flight, clients)


def load_of(wanted: LoadPlan, submit: Submit, clock: Callable[[], float] = time.perf_counter) -> BenchLoad:
    @contextmanager
    def open_client() -> Iterator[Submit]:
        yield submit

    return BenchLoad(wanted, open_client, clock)


@pytest.mark.parametrize("clients", [1, 3, 7])
def test_clients_share_the_records(clients: int) -> None:
    """Together they send exactly so many."""
    load = load_of(plan(records=100, clients=clients), AnsweredItem)
    load.start()

    assert load.wait(DEADLINE_S)
    assert load.meter.read().acknowledged == 100


def test_no_more_than_so_many_are_in_flight() -> None:
    """The next record goes when an answer has made room."""
    items: list[UnansweredItem] = []
    filled = threading.Event()

    def submit() -> UnansweredItem:
        items.append(UnansweredItem())
        if len(items) == 3:
            filled.set()
        return items[-1]

    load = load_of(plan(records=4, in_flight=3), submit)
    load.start()
    assert filled.wait(DEADLINE_S)
    assert not load.wait(0.3), "the fourth has no room"
    assert len(items) == 3

    items[0].answer()

    assert load.wait(DEADLINE_S)
    assert len(items) == 4


def test_a_rate_is_kept_and_latencies_count_from_when_a_record_was_due() -> None:
    """100 per second, and a first answer after one second: those behind it were due long before they could go."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    def submit() -> AnsweredItem:
        if now[0] < 1.0:
            now[0] = 1.0
        return AnsweredItem()

    load = load_of(plan(records=101, rate=100.0), submit, clock=clock)
    load.start()

    assert load.wait(DEADLINE_S)
    found = load.meter.read()
    assert found.max_s == pytest.approx(1.0, abs=0.05)
    assert found.average_s == pytest.approx(0.5, abs=0.1), "half of a second on average, though none took that long"
    assert load.took_s >= 1.0


@pytest.mark.parametrize("clients", [1, 2])
def test_a_rate_is_never_exceeded(clients: int) -> None:
    """Real time: of 20 per second, however many clients share them, the eleventh goes after half a second."""
    sent_s: list[float] = []

    def submit() -> AnsweredItem:
        sent_s.append(time.perf_counter())
        return AnsweredItem()

    load = load_of(plan(records=11, rate=20.0, clients=clients), submit)
    begun_s = time.perf_counter()
    load.start()

    assert load.wait(DEADLINE_S)
    assert load.took_s >= 0.5
    assert [one for one, at_s in enumerate(sorted(sent_s)) if at_s - begun_s < one / 20] == []


def test_time_ends_a_load() -> None:
    """Of which nobody said how many records it has."""
    load = load_of(plan(seconds=0.2, rate=1000.0), AnsweredItem)
    load.start()

    assert load.wait(DEADLINE_S)
    assert load.meter.read().acknowledged > 0


def test_a_stopped_load_sends_no_more_and_waits_for_the_answers() -> None:
    """What Ctrl-C does; the client's end is what waits."""
    sent: list[UnansweredItem] = []

    def submit() -> UnansweredItem:
        sent.append(UnansweredItem())
        load.stop()
        return sent[-1]

    @contextmanager
    def open_client() -> Iterator[Submit]:
        yield submit
        for one in sent:
            one.answer()

    load = BenchLoad(plan(seconds=3600.0), open_client)
    load.start()

    assert load.wait(DEADLINE_S)
    assert load.meter.read().acknowledged == len(sent) == 1


def test_failed_records_are_counted_whether_raised_or_answered() -> None:
    """And the load goes on: a group that loses its leader is worth measuring."""
    answers = iter([AnsweredItem(UnavailableError("away")), None, AnsweredItem()])

    def submit() -> AnsweredItem:
        answer = next(answers)
        if answer is None:
            raise UnavailableError("closed")
        return answer

    load = load_of(plan(records=3), submit)
    load.start()

    assert load.wait(DEADLINE_S)
    assert (load.meter.read().acknowledged, load.meter.failed) == (1, 2)


def test_failed_records_make_room_for_others() -> None:
    """A load without a leader comes to its end, whether that is raised or answered."""
    raised = iter([True, False] * 3)

    def submit() -> AnsweredItem:
        if next(raised):
            raise UnavailableError("closed")
        return AnsweredItem(UnavailableError("away"))

    load = load_of(plan(records=6, in_flight=1), submit)
    load.start()

    try:
        assert load.wait(DEADLINE_S)
    finally:
        load.stop()
    assert load.meter.failed == 6


def test_a_load_took_as_long_as_its_last_answer_though_a_failure() -> None:
    """Else a group that fails in the end would have been fast."""
    now_s = [0.0]
    answers = iter([AnsweredItem(), AnsweredItem(UnavailableError("away"))])

    def submit() -> AnsweredItem:
        now_s[0] += 1.0
        return next(answers)

    load = load_of(plan(records=2), submit, clock=lambda: now_s[0])
    load.start()

    assert load.wait(DEADLINE_S)
    assert load.took_s == 2.0


@pytest.mark.parametrize("error", [EntryTooLargeError, AccessDeniedError, ForbiddenError, NotFoundError])
def test_what_all_records_would_be_refused_with_ends_the_load(error: type[DLedgerError]) -> None:
    """A body that is too large, or a topic that there is not, is not sent for ten seconds."""
    load = load_of(plan(seconds=3600.0, rate=100.0), lambda: AnsweredItem(error("refused")))
    load.start()

    try:
        assert load.wait(DEADLINE_S)
    finally:
        load.stop()
    assert load.meter.failed == 1


def test_a_client_that_breaks_ends_the_load_with_its_error() -> None:
    """Not with figures that leave it out."""

    def submit() -> AnsweredItem:
        raise ZeroDivisionError

    load = load_of(plan(seconds=3600.0, clients=2), submit)
    load.start()

    with pytest.raises(ZeroDivisionError):
        load.wait(DEADLINE_S)


def test_one_client_that_breaks_ends_the_others() -> None:
    """They would go on for an hour, and then nothing would be told."""
    opened: list[int] = []

    @contextmanager
    def open_client() -> Iterator[Submit]:
        opened.append(len(opened))
        if len(opened) == 2:
            raise ZeroDivisionError
        yield AnsweredItem

    load = BenchLoad(plan(seconds=3600.0, rate=100.0, clients=2), open_client)
    load.start()

    try:
        with pytest.raises(ZeroDivisionError):
            load.wait(DEADLINE_S)
    finally:
        load.stop()
